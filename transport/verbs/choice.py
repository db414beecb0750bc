"""Whether this process uses RDMA, as its configuration and its machine have it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from hymcache.config import VerbsConfig
from hymcache.transport.verbs.acceptor import Acceptor
from hymcache.transport.verbs.initiator import Initiator
from hymcache.transport.verbs.pyverbs_library import load_library

_DEVICES: Final = Path("/sys/class/infiniband")


def has_devices(place: Path = _DEVICES) -> bool:
    """Whether the kernel has any RDMA device; costs nothing where it has none."""
    try:
        return any(place.iterdir())
    except OSError:
        return False


def make_acceptor(mode: Literal["auto", "on", "off"], config: VerbsConfig) -> Acceptor | None:
    """What a node offers RDMA with; None where it does not (`node.verbs`)."""
    if mode == "off" or (mode == "auto" and not has_devices()):
        return None
    return Acceptor(load_library, config, mode)


def make_initiator(transport: str, config: VerbsConfig) -> Initiator | None:
    """What a client uses RDMA with; None where it does not (`client.transport`).

    Raises ConfigError when the transport is `verbs` and pyverbs is missing, or no port can be used.
    """
    if transport == "auto" and has_devices():
        return Initiator(load_library, config, required=False)
    if transport != "verbs":
        return None
    initiator = Initiator(load_library, config)
    initiator.check()
    return initiator
