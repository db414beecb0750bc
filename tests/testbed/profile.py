"""The kinds of machine that guests can be, and how each gets its devices ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20

# A guest's own memory; what it does not touch costs the host nothing.
_MEMORY_MIB: Final = 2048


@dataclass(frozen=True)
class Profile:
    """QEMU's arguments and the first command of a guest.

    `memory` makes the arguments for the guest's memory from the file that both guests share.
    `prepare` is a script for bash that leaves the devices ready; it ends within
    `prepare_deadline_s`. Both guests have a network interface and `shared_bytes` of one memory.
    """

    name: str
    prepare: str
    memory: Callable[[Path], tuple[str, ...]]
    machine: str = "q35"
    cpu: str = "max"
    kernel_arguments: tuple[str, ...] = ()
    shared_bytes: int = 0
    prepare_deadline_s: float = 60.0
    # What the tests' Python has to have.
    python_modules: tuple[str, ...] = ()
    # What Python in its guests imports beforehand, the first's and the second's: see
    # python_server.py.
    preloaded: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def _own_memory(_shared: Path) -> tuple[str, ...]:
    return ("-m", f"{_MEMORY_MIB}M")


# The kernel means such memory for its own use (kmem) unless it is told otherwise. The device file
# is there before a driver is, and cannot be opened then.
_BIND_DAX: Final = """
until [[ -e /sys/bus/dax/devices/dax0.0 ]]; do sleep 0.2; done
echo dax0.0 >/sys/bus/dax/drivers/device_dax/new_id
until [[ -e /sys/bus/dax/drivers/device_dax/dax0.0 && -c /dev/dax0.0 ]]; do sleep 0.2; done
"""

_VERBS: Final = ("pyverbs.cq", "pyverbs.device")

# RoCE in software, on the network interface between the two guests.
RXE: Final = Profile(
    name="rxe",
    python_modules=("pyverbs",),
    preloaded=(
        ("hymcache.cli.application", "hymcache.kv_manager", "hymcache.master", *_VERBS),
        ("hymcache.cli.application", "numpy.random", "tests.testbed.store_client", *_VERBS),
    ),
    memory=_own_memory,
    prepare="""set -e
modprobe rdma_rxe
modprobe ib_uverbs
interface=$(cd /sys/class/net && echo e*)
rdma link add rxe0 type rxe netdev "$interface"
until rdma link show rxe0/1 | grep -q 'state ACTIVE'; do sleep 0.2; done
""",
)

_REGION_CLIENTS: Final = ("tests.testbed.dax_bytes", "tests.testbed.region_client")
_HOST_CLIENTS: Final = (
    *_REGION_CLIENTS,
    "hymcache.cli.application",
    "hymcache.dra.host_agent.app",
    "hymcache.dra.host_agent.command",
    "tests.dra.host_agent.guest_client",
)

_HMEM_MIB: Final = 1024


def _hmem_memory(shared: Path) -> tuple[str, ...]:
    return (
        *("-m", f"{_MEMORY_MIB + _HMEM_MIB}M"),
        *("-object", f"memory-backend-ram,id=own,size={_MEMORY_MIB}M"),
        *("-numa", "node,nodeid=0,memdev=own,cpus=0"),
        "-object",
        f"memory-backend-file,id=shared,share=on,mem-path={shared},size={_HMEM_MIB}M",
        *("-numa", "node,nodeid=1,memdev=shared"),
    )


# Memory of the host under the same file in both guests, marked "soft reserved": the kernel makes
# a device-dax region of it that can be split, at the speed of memory.
HMEM: Final = Profile(
    name="hmem",
    preloaded=(_HOST_CLIENTS, _HOST_CLIENTS),
    memory=_hmem_memory,
    kernel_arguments=(f"memmap={_HMEM_MIB}M%4G-1+0xefffffff",),
    shared_bytes=_HMEM_MIB * MIB,
    prepare="""set -e
modprobe dax_hmem
modprobe device_dax
"""
    + _BIND_DAX,
)

_CXL_MIB: Final = 512


def _cxl_memory(shared: Path) -> tuple[str, ...]:
    return (
        *("-m", f"{_MEMORY_MIB}M"),
        "-object",
        f"memory-backend-file,id=shared,share=on,mem-path={shared},size={_CXL_MIB}M",
        *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"),
        *("-device", "cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2"),
        *("-device", "cxl-type3,bus=rp0,volatile-memdev=shared,id=cxl0,sn=0x1"),
        *("-M", "cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"),
    )


# A CXL memory expander (type 3) with volatile memory, as device-dax. Every access is emulated: a
# few MB/s. The kernel flushes CPU caches when it commits a region, which it refuses to do where it
# knows itself on a hypervisor.
CXL: Final = Profile(
    name="cxl",
    preloaded=(_REGION_CLIENTS, _REGION_CLIENTS),
    memory=_cxl_memory,
    machine="q35,cxl=on",
    cpu="max,hypervisor=off",
    shared_bytes=_CXL_MIB * MIB,
    prepare=f"""set -e
for module in cxl_acpi cxl_pci cxl_mem device_dax dax_cxl; do modprobe "$module"; done
cd /sys/bus/cxl/devices
until [[ -e decoder0.0/create_ram_region && -e decoder2.0/mode ]]; do sleep 0.2; done
region=$(<decoder0.0/create_ram_region)
echo "$region" >decoder0.0/create_ram_region
echo ram >decoder2.0/mode
echo {_CXL_MIB * MIB} >decoder2.0/dpa_size
cd "$region"
echo 256 >interleave_granularity
echo 1 >interleave_ways
echo {_CXL_MIB * MIB} >size
echo decoder2.0 >target0
echo 1 >commit
echo "$region" >/sys/bus/cxl/drivers/cxl_region/bind
"""
    + _BIND_DAX,
)

PROFILES: Final = {profile.name: profile for profile in (RXE, HMEM, CXL)}
