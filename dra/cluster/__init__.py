"""The Kubernetes API as the driver's processes use it: plain objects, no generated models.

The official client carries the requests; objects stay the dictionaries that they are on the wire,
so that no field of a newer or older server is lost on the way.
"""

from __future__ import annotations

from hymcache.dra.cluster.client import (
    ClusterClient,
    JsonObject,
    ObjectList,
    OfficialClient,
    WatchEvent,
    connect,
)
from hymcache.dra.cluster.errors import (
    ClusterError,
    ClusterUnavailable,
    ObjectConflict,
    ObjectMissing,
    Rejected,
    VersionGone,
)
from hymcache.dra.cluster.kinds import (
    CONFIG_MAP,
    DEVICE_CLASS,
    EVENT,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    ResourceKind,
)

__all__ = [
    "CONFIG_MAP",
    "DEVICE_CLASS",
    "EVENT",
    "LEASE",
    "NAMESPACE",
    "NODE",
    "POD",
    "RESOURCE_CLAIM",
    "RESOURCE_SLICE",
    "ClusterClient",
    "ClusterError",
    "ClusterUnavailable",
    "JsonObject",
    "ObjectConflict",
    "ObjectList",
    "ObjectMissing",
    "OfficialClient",
    "Rejected",
    "ResourceKind",
    "VersionGone",
    "WatchEvent",
    "connect",
]
