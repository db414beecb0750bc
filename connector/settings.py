"""What a user sets in `kv_connector_extra_config`.

A value given there wins over the environment (`HYMCACHE_CLIENT__DEADLINE_S`), that over the
section `[client]` of the TOML file (`config`), that over the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hymcache import limits
from hymcache.address import Address
from hymcache.config import Config, DurationS, Size, VerbsConfig
from hymcache.config_source import load_config, parse_section
from hymcache.errors import ConfigError

ORIGIN: Final = "kv_connector_extra_config"

_THREADS_MAX: Final = 64


def _addresses(value: object) -> tuple[Address, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError('not an address; write "host:port", or a list of them')
    addresses = tuple(Address.parse(part) for part in parts)
    if any(address.port == 0 or address.is_wildcard for address in addresses):
        raise ValueError("not an address to connect to; write the host and port of the master")
    return addresses


_Masters = Annotated[tuple[Address, ...], BeforeValidator(_addresses)]


class ConnectorSettings(BaseModel):
    """The settings of one connector. The keys are those of `kv_connector_extra_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    master: _Masters = Field(
        min_length=1, max_length=16, description="The masters to ask, in order of preference."
    )
    transport: Literal["auto", "shm", "verbs", "tcp"] = Field(
        description="How bytes move; `auto` takes `shm` where the node is on this host, else "
        "`verbs` where both ends have an RDMA device, else `tcp`."
    )
    deadline_s: DurationS = Field(
        gt=0,
        le=3600,
        description="The longest that a load or a save may take; after it the engine recomputes.",
    )
    connect_timeout_s: DurationS = Field(
        gt=0, le=3600, description="The longest wait for a connection."
    )
    verify_checksums: bool = Field(description="Check the crc32c of what was loaded.")
    secret_file: Path | None = Field(
        None, description="A file that holds the secret of the service."
    )
    config: Path | None = Field(
        None, description="A TOML file; its sections [client] and [verbs] and its secret count."
    )
    staging_bytes: Size = Field(
        limits.STAGING_BUFFER_BYTES,
        ge=limits.MIB,
        description="Pinned host memory between the service and the memory of a GPU. Not used "
        "where the engine's memory is host memory.",
    )
    load_threads: int = Field(
        1, ge=1, le=_THREADS_MAX, description="Threads that copy blocks into the engine."
    )
    save_threads: int = Field(
        1, ge=1, le=_THREADS_MAX, description="Threads that copy blocks out of the engine."
    )

    def secret_bytes(self) -> bytes:
        """The shared secret, b"" when none is set. Raises ConfigError if it cannot be had."""
        if self.secret_file is not None:
            return Config(secret=None, secret_file=self.secret_file).secret_bytes()
        return load_config(self.config).secret_bytes()

    def verbs(self) -> VerbsConfig:
        """The section [verbs] of the TOML file, for RDMA."""
        return load_config(self.config).verbs

    def master_addresses(self) -> tuple[str, ...]:
        """The masters as `host:port`."""
        return tuple(str(address) for address in self.master)


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The settings from vLLM's `kv_connector_extra_config`.

    Raises ConfigError, one line a fault, for an unknown key (it names the near one), a value that
    cannot be, or a file that cannot be read.
    """
    path = extra.get("config")
    if path is not None and not isinstance(path, str | Path):
        raise ConfigError(f"{ORIGIN}: config = {path!r}: should be the path of a TOML file")
    client = load_config(None if path is None else Path(path)).client
    values = {
        "master": [str(address) for address in client.masters],
        "transport": client.transport,
        "deadline_s": client.deadline_s,
        "connect_timeout_s": client.connect_timeout_s,
        "verify_checksums": client.verify_checksums,
    }
    settings = parse_section(ConnectorSettings, {**values, **extra}, ORIGIN)
    settings.secret_bytes()  # A missing secret should stop the start, not the first request.
    return settings
