"""The kinds of objects that the driver reads or writes, and where the API server has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ResourceKind:
    """A kind of object: its group and version, path name and whether in namespaces."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None = None, name: str | None = None, part: str = "") -> str:
        """The path of an object, or of the collection; `part` is a subresource such as status.

        Without a namespace, the collection of a namespaced kind is that of all namespaces.
        """
        prefix = "/api" if "/" not in self.api_version else "/apis"
        path = f"{prefix}/{self.api_version}"
        if self.namespaced and namespace is not None:
            path += f"/namespaces/{namespace}"
        path += f"/{self.plural}"
        if name is not None:
            path += f"/{name}"
        return f"{path}/{part}" if part else path


POD: Final = ResourceKind("v1", "Pod", "pods", True)
NAMESPACE: Final = ResourceKind("v1", "Namespace", "namespaces", False)
NODE: Final = ResourceKind("v1", "Node", "nodes", False)
CONFIG_MAP: Final = ResourceKind("v1", "ConfigMap", "configmaps", True)
EVENT: Final = ResourceKind("events.k8s.io/v1", "Event", "events", True)
LEASE: Final = ResourceKind("coordination.k8s.io/v1", "Lease", "leases", True)
RESOURCE_CLAIM: Final = ResourceKind("resource.k8s.io/v1", "ResourceClaim", "resourceclaims", True)
RESOURCE_SLICE: Final = ResourceKind("resource.k8s.io/v1", "ResourceSlice", "resourceslices", False)
DEVICE_CLASS: Final = ResourceKind("resource.k8s.io/v1", "DeviceClass", "deviceclasses", False)
