"""Bodies of the CFM REST API, `/cfm/v1`, as the fabric manager sends and takes them.

Names and meanings are those of the public cfm-service. What arXiv 2609.10790 adds to composing
(`shareCount`, `candidateHosts`, `claimUid`, `allocationId`, `mappedHosts`) is optional here; so is
`addressRangeOffsetMiB`, where a region begins, counted from a host's first byte of CXL memory, a
name of Redfish's MemoryChunks. Unknown keys are passed over, since every release adds some.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool
from pydantic.alias_generators import to_camel

API_ROOT: Final = "/cfm/v1"

# One name in a path: no slash, nothing that a URL or a file system reads otherwise.
ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_PORT_MAX: Final = 65_535
_MIB_MAX: Final = 1 << 40


def _whole(value: object) -> object:
    # pydantic would take "8" and true for numbers, as JSON Schema does not.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("should be a whole number")
    return value


# Stands last in an Annotated: limits before it stay in the schema.
WHOLE: Final = BeforeValidator(_whole)


class Body(BaseModel):
    """A JSON object with camelCase keys."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True
    )

    def to_json(self) -> dict[str, object]:
        """As it is sent: without what is not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Qos(IntEnum):
    """Over how many channels (DIMMs) a region's blocks are spread."""

    ONE = 1
    TWO = 2
    FOUR = 4
    EIGHT = 8


class MemoryType(StrEnum):
    """What a region of memory is."""

    REGION = "MemoryTypeRegion"
    LOCAL = "MemoryTypeLocal"
    CXL = "MemoryTypeCXL"
    UNKNOWN = "MemoryTypeUnknown"


class PortOperation(StrEnum):
    """What to do with a region and a port."""

    ASSIGN = "assign"
    UNASSIGN = "unassign"


class Member(Body):
    """One of a collection."""

    uri: str


class CollectionBody(Body):
    """A list of what there is, by URI."""

    member_count: int
    members: list[Member]


class StatusBody(Body):
    """A cfm-service status code, and what it means."""

    code: int = 0
    message: str = ""


class ErrorBody(Body):
    """Body of each answer with 400, 404, 409 or 500."""

    uri: str = ""
    details: str = ""
    status: StatusBody = Field(default_factory=StatusBody)


class ServiceResource(Body):
    """A path that the service serves."""

    uri: str
    methods: str
    description: str


class ServiceBody(Body):
    """GET /cfm/v1."""

    version: str
    resources: list[ServiceResource]


class CredentialsBody(Body):
    """How the service reaches an appliance, a blade or a host: what registers it."""

    username: str = Field(min_length=1, max_length=128)
    password: str = Field(min_length=1, max_length=1024)
    ip_address: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9.:_-]+$")
    port: Annotated[int, Field(ge=1, le=_PORT_MAX), WHOLE]
    insecure: StrictBool = False
    protocol: str = Field(default="https", pattern="^https?$")
    backend: str = Field(default="httpfish", max_length=64)
    custom_id: ResourceName | None = None


class ApplianceBody(Body):
    """An appliance, a box of blades."""

    id: str
    ip_address: str
    port: int
    status: str | None = None
    blades: Member | None = None
    total_memory_available_mib: Annotated[int | None, Field(alias="totalMemoryAvailableMiB")] = None
    total_memory_allocated_mib: Annotated[int | None, Field(alias="totalMemoryAllocatedMiB")] = None


class BladeBody(Body):
    """A memory blade."""

    id: str
    ip_address: str
    port: int
    status: str | None = None
    ports: Member | None = None
    resources: Member | None = None
    memory: Member | None = None
    total_memory_available_mib: Annotated[int | None, Field(alias="totalMemoryAvailableMiB")] = None
    total_memory_allocated_mib: Annotated[int | None, Field(alias="totalMemoryAllocatedMiB")] = None


class HostBody(Body):
    """A CXL host, as its agent (cxl-host) is registered."""

    id: str
    ip_address: str
    port: int
    status: str | None = None
    ports: Member | None = None
    memory: Member | None = None
    memory_devices: Member | None = None
    local_memory_mib: Annotated[int | None, Field(alias="localMemoryMiB")] = None
    remote_memory_mib: Annotated[int | None, Field(alias="remoteMemoryMiB")] = None


class MemoryDeviceBody(Body):
    """A CXL logical device of a host: a blade's memory as one cable brings it."""

    id: str
    status_state: str | None = None
    serial_number: str | None = None
    link_status: str | None = None
    memory_size_mib: Annotated[int | None, Field(alias="memorySizeMiB")] = None


class CompositionStatus(Body):
    """Whether a resource block is part of a region."""

    composition_state: str
    max_compositions: int = 1
    number_of_compositions: int = 0


class ResourceBlockBody(Body):
    """What regions are made of: a piece of a channel (DIMM)."""

    id: str
    composition_status: CompositionStatus
    channel_id: int
    channel_resource_index: int
    capacity_mib: Annotated[int | None, Field(alias="capacityMiB")] = None
    data_width_bits: int | None = None
    memory_type: str | None = None
    memory_device_type: str | None = None
    manufacturer: str | None = None
    operating_speed_mhz: int | None = None
    part_number: str | None = None
    serial_number: str | None = None
    rank_count: int | None = None


class PortBody(Body):
    """A CXL port of a blade or a host. `linked_port_uri` is the other end of its cable."""

    id: str
    status_health: str
    status_state: str
    g_cxl_id: str | None = None
    linked_port_uri: str | None = None
    port_protocol: str | None = None
    port_medium: str | None = None
    current_speed_gbps: int | None = None
    width: int | None = None
    link_status: str | None = None
    link_state: str | None = None


class MappedHostBody(Body):
    """A host that a region is assigned to (paper)."""

    host_id: str
    port_id: str
    materialized: bool = False
    physical_start: int | None = None
    details: str = ""


class MemoryRegionBody(Body):
    """A region composed on a blade, or memory of a host."""

    id: str
    type: str
    size_mib: Annotated[int, Field(alias="sizeMiB")]
    status: str | None = None
    bandwidth: int | None = None
    latency: int | None = None
    memory_appliance_id: str | None = None
    memory_blade_id: str | None = None
    memory_appliance_port: str | None = None
    mapped_host_id: str | None = None
    mapped_host_port: str | None = None
    address_range_offset_mib: Annotated[int | None, Field(alias="addressRangeOffsetMiB")] = None
    allocation_id: str | None = None
    claim_uid: str | None = None
    mapped_hosts: list[MappedHostBody] | None = None


class ComposeBody(Body):
    """POST .../memory: compose by size. The last three are the paper's."""

    memory_size_mib: Annotated[int, Field(alias="memorySizeMiB", ge=1, le=_MIB_MAX), WHOLE]
    qos: Annotated[Qos, Field(alias="QoS"), WHOLE]
    port: Annotated[ResourceName | None, Field(alias="Port")] = None
    share_count: Annotated[int, Field(ge=1, le=1024), WHOLE] | None = None
    candidate_hosts: list[ResourceName] | None = Field(default=None, min_length=1, max_length=1024)
    claim_uid: str | None = Field(default=None, min_length=1, max_length=256)


class HostComposeBody(Body):
    """POST .../hosts/{hostId}/memory: compose on the blade behind one of the host's ports."""

    memory_size_mib: Annotated[int, Field(alias="memorySizeMiB", ge=1, le=_MIB_MAX), WHOLE]
    qos: Annotated[Qos, Field(alias="QoS"), WHOLE]
    port: Annotated[ResourceName, Field(alias="Port")]


class ComposeBlocksBody(Body):
    """PUT .../memory: compose from named resource blocks."""

    memory_resources: list[ResourceName] = Field(min_length=1, max_length=65_536)
    port: Annotated[ResourceName | None, Field(alias="Port")] = None


class AssignBody(Body):
    """PATCH .../memory/{memoryId}."""

    port: Annotated[ResourceName, Field(alias="Port")]
    operation: Annotated[PortOperation, Field(alias="Operation")]
