"""Devices, ports and GIDs, and which of them to use."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass

from hymcache.config import VerbsConfig
from hymcache.errors import ConfigError, DeviceError
from hymcache.transport.verbs.library import (
    Device,
    DeviceLimits,
    GidEntry,
    GidType,
    LinkLayer,
    PortState,
    VerbsLibrary,
)

_IPV4_PREFIX = bytes(10) + b"\xff\xff"


@dataclass(frozen=True)
class PortReport:
    """A port with its addresses, the best first, and what keeps it from being used."""

    device: str
    limits: DeviceLimits
    port: PortState
    gids: tuple[GidEntry, ...]
    problem: str = ""

    @property
    def name(self) -> str:
        """Device and port, as rdma-core's tools write it."""
        return f"{self.device}/{self.port.number}"


@dataclass(frozen=True)
class Survey:
    """What a machine has: ports, the most suitable first, and devices that cannot be asked."""

    ports: tuple[PortReport, ...]
    broken: tuple[str, ...] = ()  # one line each

    @property
    def usable(self) -> tuple[PortReport, ...]:
        """The ports that could be used, the most suitable first."""
        return tuple(report for report in self.ports if not report.problem)


def gid_text(entry: GidEntry) -> str:
    """The address as people write it, e.g. "10.0.0.1" or "fe80::1"."""
    address = ipaddress.IPv6Address(entry.gid)
    return str(address.ipv4_mapped or address)


def is_ipv4(gid: bytes) -> bool:
    """Whether a RoCE GID stands for an IPv4 address."""
    return gid.startswith(_IPV4_PREFIX)


def gid_order(entry: GidEntry) -> tuple[int, int, int]:
    """Sorts GIDs: RoCE v2 before v1, IPv4 before IPv6 before link-local, then by index.

    RoCE v1 does not leave its Ethernet segment, and a link-local address needs the peer's to be on
    the same one; InfiniBand has but one kind.
    """
    if entry.kind is GidType.INFINIBAND:
        return 0, 0, entry.index
    kind = 0 if entry.kind is GidType.ROCE_V2 else 1
    link_local = ipaddress.IPv6Address(entry.gid).is_link_local
    family = 0 if is_ipv4(entry.gid) else 1 + link_local
    return kind, family, entry.index


def survey_ports(library: VerbsLibrary, config: VerbsConfig) -> Survey:
    """All ports of all devices as the configuration sees them."""
    reports: list[PortReport] = []
    broken: list[str] = []
    for name in library.device_names():
        try:
            device = library.open(name)
        except DeviceError as error:
            broken.append(str(error))
            continue
        try:
            for number in range(1, device.limits.ports + 1):
                try:
                    reports.append(_report(device, number, config))
                except DeviceError as error:
                    broken.append(str(error))
        finally:
            device.close()
    reports.sort(key=_suitability)
    return Survey(tuple(reports), tuple(broken))


def choose_port(library: VerbsLibrary, config: VerbsConfig) -> PortReport:
    """The port to use. Raises ConfigError that says why none of them can be."""
    survey = survey_ports(library, config)
    if survey.usable:
        return survey.usable[0]
    if not survey.ports and not survey.broken:
        raise ConfigError(
            "this machine has no RDMA device; for soft-RoCE run "
            "`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
        )
    reasons = [f"{report.name}: {report.problem}" for report in survey.ports]
    raise ConfigError("no RDMA port can be used: " + "; ".join([*reasons, *survey.broken]))


def choose_gid(
    gids: tuple[GidEntry, ...], config: VerbsConfig, peer: tuple[GidType, bytes] | None = None
) -> GidEntry | None:
    """The best of the GIDs, sorted by `gid_order`; one that can reach the peer if it is known."""
    for entry in gids:
        if config.gid_index not in (-1, entry.index):
            continue
        if peer is not None and not _reaches(entry, *peer):
            continue
        return entry
    return None


def _reaches(entry: GidEntry, kind: GidType, gid: bytes) -> bool:
    if entry.kind is not kind:
        return False
    return kind is not GidType.ROCE_V2 or is_ipv4(entry.gid) == is_ipv4(gid)


def _report(device: Device, number: int, config: VerbsConfig) -> PortReport:
    port = device.port(number)
    gids: tuple[GidEntry, ...] = ()
    with suppress(DeviceError):  # told as "no address" below
        gids = tuple(sorted(device.gids(number), key=gid_order))
    return PortReport(
        device.name, device.limits, port, gids, _problem(device.name, port, gids, config)
    )


def _problem(device: str, port: PortState, gids: tuple[GidEntry, ...], config: VerbsConfig) -> str:
    if config.device not in ("", device):
        return f"verbs.device names {config.device}"
    if config.port not in (0, port.number):
        return f"verbs.port names port {config.port}"
    if not port.active or port.link_layer is LinkLayer.UNKNOWN:
        return f"the port is {port.state}; bring its link up (`ip link set ... up`)"
    kinds = {entry.kind for entry in gids}
    if port.link_layer is LinkLayer.ETHERNET and kinds == {GidType.INFINIBAND}:
        return "an Ethernet port that does not speak RoCE (iWARP, say), which is not supported"
    if choose_gid(gids, config) is not None:
        return ""
    return (
        f"verbs.gid_index = {config.gid_index}: that row is empty"
        if config.gid_index >= 0
        else "the port has no GID; give its network interface an IP address"
    )


def _suitability(report: PortReport) -> tuple[bool, int, str, int]:
    return bool(report.problem), -report.port.bits_per_second, report.device, report.port.number
