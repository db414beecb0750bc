"""Makes the client of a fabric manager from a process's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from hymcache.dra.fabric.client import FabricManager
from hymcache.dra.fabric.host_devices import HostAgentSettings, HostDevices
from hymcache.dra.fabric.paper_dialect import PaperFabricManager
from hymcache.dra.fabric.public_dialect import PublicFabricManager
from hymcache.dra.fabric.transport import FabricTimeouts, FabricTransport, RetryPolicy
from hymcache.errors import ConfigError


class FabricDialect(StrEnum):
    """How a fabric manager wants to be asked."""

    PAPER = "paper"  # composes a region and attaches it to hosts in one call
    PUBLIC = "public"  # cfm-service as it is published: compose, assign, then each host's agent


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """Where the fabric manager is and how to speak to it.

    `agents` are needed in the public dialect. In the paper's they let devices be removed whose
    region is lost, of which the fabric manager knows nothing any more.
    """

    url: str
    dialect: FabricDialect = FabricDialect.PAPER
    ca_file: Path | None = None
    agents: HostAgentSettings | None = None
    timeouts: FabricTimeouts = field(default_factory=FabricTimeouts)
    retry: RetryPolicy = field(default_factory=RetryPolicy)


def connect_fabric(settings: FabricSettings) -> FabricManager:
    """The client; it connects with its first request. Raises ConfigError."""
    if not settings.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{settings.url}: not the URL of a fabric manager; write e.g. https://cfm:8080"
        )
    transport = FabricTransport(
        settings.url, ca_file=settings.ca_file, timeouts=settings.timeouts, retry=settings.retry
    )
    devices = None if settings.agents is None else HostDevices(transport, settings.agents)
    if settings.dialect is FabricDialect.PAPER:
        return PaperFabricManager(transport, devices)
    if devices is None:
        raise ConfigError(
            "the public dialect needs the host agents: name the credentials for them, "
            "or set the dialect to paper"
        )
    return PublicFabricManager(transport, devices)
