"""Names that the driver shares with Kubernetes, with container runtimes and with pods.

"Paper" is arXiv 2609.10790 (composable CXL memory as a Kubernetes-native shared memory), whose
manifests work unchanged; the section stands beside each name. A name without one is ours.
"""

from __future__ import annotations

from typing import Final

# Section 2: the driver. A chart may name another; pods see it in slices, claims and sockets.
DRIVER_NAME: Final = "cfm-dra-plugin.cxl.seagate.com"
# Section 2.1: what a claim's request names.
DEVICE_CLASS: Final = "cfm-shared-memory"

# Section 2.1: what a blade's device says of itself in its ResourceSlice.
ATTRIBUTE_APPLIANCE: Final = "applianceId"
ATTRIBUTE_BLADE: Final = "bladeId"
CAPACITY: Final = "cxl_seagate_shared_mem_mib"

# Section 2.2: size, share count and QoS of a claim where the API server counts no capacity.
ANNOTATION_PREFIX: Final = "dra.cfm.seagate.com/"
ANNOTATION_CAPACITY_MIB: Final = ANNOTATION_PREFIX + "capacity-mib"
ANNOTATION_SHARE_COUNT: Final = ANNOTATION_PREFIX + "share-count"
ANNOTATION_QOS: Final = ANNOTATION_PREFIX + "qos"
# Section 2.3: who composes for a claim, set by compare-and-set.
ANNOTATION_OWNER: Final = ANNOTATION_PREFIX + "owner"
# Section 2.6: what is needed to free a claim's memory, one of its three places.
ANNOTATION_TEARDOWN: Final = ANNOTATION_PREFIX + "teardown"
# Section 2.3: holds a deleted claim until its memory is free.
FINALIZER: Final = ANNOTATION_PREFIX + "free-memory"

# Section 2.3, step 6: keys of a device's data in the claim's status.
DATA_ALLOCATION_ID: Final = "allocationId"
DATA_CDI_DEVICES: Final = "cdiDevices"
DATA_MAPPED_HOSTS: Final = "mappedHosts"

# Opaque configuration of a request (`opaque.parameters`): share count and QoS.
CONFIG_API_VERSION: Final = ANNOTATION_PREFIX + "v1alpha1"
CONFIG_KIND: Final = "SharedMemoryConfig"

# The device condition that says that a region is there on the pod's node, and its opposite.
CONDITION_ATTACHED: Final = ANNOTATION_PREFIX + "Attached"
CONDITION_ATTACH_FAILED: Final = ANNOTATION_PREFIX + "AttachFailed"
# The taint of a blade whose memory is stuck, or that is being drained.
TAINT_BLADE: Final = ANNOTATION_PREFIX + "blade"

# Section 2.5: the same device name on every host, <kind>=<allocation id>.
CDI_KIND: Final = "cxl.seagate.com/dax"
CDI_ROOT: Final = "/var/run/cdi"
# Section 2.5: what a container finds in its environment.
ENV_DEVICE: Final = "CXL_DAX_DEVICE"
ENV_SIZE: Final = "CXL_DAX_SIZE"


def cdi_device_name(allocation_id: str) -> str:
    """The fully qualified CDI name of an allocation, the same on all its hosts."""
    return f"{CDI_KIND}={allocation_id}"
