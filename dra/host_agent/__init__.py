"""The agent of a host: makes DAX devices of composed regions, and tells container runtimes.

It speaks a small part of Redfish (app.py), keeps its allocations on disk (allocations.py) and
leaves the devices to a back end (backend.py): sysfs on real hosts, files in simulations.
"""

from __future__ import annotations

from hymcache.dra.host_agent.client import DaxWindow, HostAgentClient, UnmaterializeResult
from hymcache.dra.host_agent.resources import (
    AllocationPhase,
    DaxConflict,
    DaxDevice,
    DaxRegion,
    Holder,
    HolderKind,
)

__all__ = [
    "AllocationPhase",
    "DaxConflict",
    "DaxDevice",
    "DaxRegion",
    "DaxWindow",
    "Holder",
    "HolderKind",
    "HostAgentClient",
    "UnmaterializeResult",
]
