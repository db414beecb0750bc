"""The Redfish bodies of a host agent: what its clients send and get, and where.

    GET    /redfish/v1                                                    open
    POST   /redfish/v1/SessionService/Sessions      {UserName, Password}  -> 201, X-Auth-Token
    DELETE /redfish/v1/SessionService/Sessions/{id}
    GET    /redfish/v1/Systems/1/MemoryDomains/CXL[/MemoryChunks[/{allocationId}]]
    POST   .../MemoryDomains/CXL/Actions/Oem/CxlHost.MaterializeDAX       MaterializeRequest
    POST   .../MemoryDomains/CXL/Actions/Oem/CxlHost.UnmaterializeDAX     UnmaterializeRequest

MaterializeDAX answers 201 with the memory chunk, 200 where it was there already, 409 where
another allocation has bytes of the range. UnmaterializeDAX answers 200 also where there is
nothing (any more), and 409 with Holders while processes hold the device.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from hymcache.errors import HymcacheError

ROOT: Final = "/redfish/v1"
SESSIONS: Final = f"{ROOT}/SessionService/Sessions"
MEMORY_DOMAIN: Final = f"{ROOT}/Systems/1/MemoryDomains/CXL"
MEMORY_CHUNKS: Final = f"{MEMORY_DOMAIN}/MemoryChunks"
MATERIALIZE: Final = f"{MEMORY_DOMAIN}/Actions/Oem/CxlHost.MaterializeDAX"
UNMATERIALIZE: Final = f"{MEMORY_DOMAIN}/Actions/Oem/CxlHost.UnmaterializeDAX"
TOKEN_HEADER: Final = "X-Auth-Token"  # noqa: S105 - the name, not a token

# A name of a CDI device and of a file at once: what a UUID needs, and no path.
ALLOCATION_ID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
# Any wait for holders is shorter: who asks comes back, and a lost connection holds nothing up.
WAIT_S_MAX: Final = 300.0

AllocationId = Annotated[
    str, Field(pattern=rf"^(?:{ALLOCATION_ID.pattern})$", description="A UUID, or like one.")
]


class DaxConflict(HymcacheError):
    """The range belongs to another allocation or use, or the allocation to another range."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class _Request(_Body):
    # What is nearly a number is a mistake of who sent it.
    model_config = ConfigDict(strict=True)


class LoginRequest(_Request):
    """POST to the sessions; the answer's X-Auth-Token goes into all further requests."""

    user_name: Annotated[str, Field(alias="UserName", max_length=128)]
    password: Annotated[str, Field(alias="Password", max_length=1024, repr=False)]


class MaterializeRequest(_Request):
    """Make a DAX device of exactly these bytes of this host's physical address space."""

    allocation_id: Annotated[AllocationId, Field(alias="AllocationId")]
    physical_start: Annotated[int, Field(alias="PhysicalStart", ge=0, lt=1 << 64)]
    size_bytes: Annotated[int, Field(alias="SizeBytes", gt=0, lt=1 << 64)]


class UnmaterializeRequest(_Request):
    """Take the device away once nobody holds it.

    While somebody does, it waits for up to WaitSeconds; with Fence it kills who holds it first.
    """

    allocation_id: Annotated[AllocationId, Field(alias="AllocationId")]
    fence: Annotated[bool, Field(alias="Fence")] = False
    wait_s: Annotated[float, Field(alias="WaitSeconds", ge=0, le=WAIT_S_MAX)] = 0.0


class DaxRegion(_Body):
    """Memory of the host that devices are made of: one of a memory domain's `Oem.CxlHost.Regions`.

    PhysicalStart is None while the kernel does not tell where it begins.
    """

    name: Annotated[str, Field(alias="Name")]
    physical_start: Annotated[int | None, Field(alias="PhysicalStart")]
    size_bytes: Annotated[int, Field(alias="SizeBytes")]
    available_bytes: Annotated[int, Field(alias="AvailableBytes")]
    align_bytes: Annotated[int, Field(alias="AlignBytes")]


class AllocationPhase(StrEnum):
    """Where an allocation is on this host."""

    MATERIALIZING = "Materializing"  # intended and recorded; a crash is taken up from here
    READY = "Ready"
    DRAINING = "Draining"  # no new container gets it; somebody may still hold it
    FAILED = "Failed"  # it was ready, and could not be made again after a restart


class DaxDevice(_Body):
    """A device of this host: a memory chunk's `Oem.CxlHost`. Sizes in bytes."""

    allocation_id: Annotated[str, Field(alias="AllocationId")]
    path: Annotated[str, Field(alias="DaxDevice", description="As containers see it.")]
    size_bytes: Annotated[int, Field(alias="SizeBytes")]
    physical_start: Annotated[int, Field(alias="PhysicalStart")]
    cdi_name: Annotated[str, Field(alias="CdiDevice", description="Fully qualified.")]
    phase: Annotated[AllocationPhase, Field(alias="Phase")] = AllocationPhase.READY
    message: Annotated[str, Field(alias="Message")] = ""


class HolderKind(StrEnum):
    """How a process holds a device."""

    OPEN = "Open"  # a file descriptor
    MAPPED = "Mapped"
    RDMA = "Rdma"  # it can reach the device and has an RDMA device open: memory may be registered


class Holder(_Body):
    """A process that holds a device, as the host sees it."""

    pid: Annotated[int, Field(alias="Pid")]
    command: Annotated[str, Field(alias="Command")]
    kinds: Annotated[tuple[HolderKind, ...], Field(alias="Kinds")]
    pod_uid: Annotated[str | None, Field(alias="PodUid")] = None

    def __str__(self) -> str:
        pod = f" of pod {self.pod_uid}" if self.pod_uid else ""
        return f"{self.command} (pid {self.pid}{pod})"
