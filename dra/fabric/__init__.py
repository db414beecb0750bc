"""Client of a fabric manager: composes regions of CXL memory and attaches them to hosts."""

from hymcache.dra.fabric.client import ComposeRequest, FabricManager
from hymcache.dra.fabric.connection import FabricDialect, FabricSettings, connect_fabric
from hymcache.dra.fabric.errors import FabricConflict, FabricRejected
from hymcache.dra.fabric.host_devices import HostAgentSettings
from hymcache.dra.fabric.topology import (
    AllocationId,
    ApplianceId,
    Attachment,
    Blade,
    BladeId,
    BladeKey,
    BladePort,
    HostId,
    MemoryId,
    PortId,
    Region,
    RegionRef,
)
from hymcache.dra.fabric.transport import FabricTimeouts, RetryPolicy

__all__ = [
    "AllocationId",
    "ApplianceId",
    "Attachment",
    "Blade",
    "BladeId",
    "BladeKey",
    "BladePort",
    "ComposeRequest",
    "FabricConflict",
    "FabricDialect",
    "FabricManager",
    "FabricRejected",
    "FabricSettings",
    "FabricTimeouts",
    "HostAgentSettings",
    "HostId",
    "MemoryId",
    "PortId",
    "Region",
    "RegionRef",
    "RetryPolicy",
    "connect_fabric",
]
