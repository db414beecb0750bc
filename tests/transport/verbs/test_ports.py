"""Which device, port and GID are taken, and what is said where none can be."""

from __future__ import annotations

import dataclasses

import pytest

from hymcache.config import VerbsConfig
from hymcache.errors import ConfigError
from hymcache.transport.verbs.library import GidEntry, GidType, LinkLayer
from hymcache.transport.verbs.ports import (
    choose_gid,
    choose_port,
    gid_order,
    gid_text,
    survey_ports,
)
from tests.transport.verbs.fake_verbs import PORT, Fabric, FakeLibrary, ipv4_gid

LINK_LOCAL = bytes.fromhex("fe80000000000000025056fffea00001")
GLOBAL = bytes.fromhex("20010db8000000000000000000000001")


def entry(index: int, gid: bytes, kind: GidType) -> GidEntry:
    return GidEntry(1, index, gid, kind, "e0")


# As a NIC lists them: each address with both versions of RoCE.
TABLE = (
    entry(0, LINK_LOCAL, GidType.ROCE_V1),
    entry(1, LINK_LOCAL, GidType.ROCE_V2),
    entry(2, ipv4_gid("10.0.0.1"), GidType.ROCE_V1),
    entry(3, ipv4_gid("10.0.0.1"), GidType.ROCE_V2),
    entry(4, GLOBAL, GidType.ROCE_V1),
    entry(5, GLOBAL, GidType.ROCE_V2),
)
SORTED = tuple(sorted(TABLE, key=gid_order))


def test_roce_v2_with_ipv4_comes_first_and_v1_last() -> None:
    assert [one.index for one in SORTED] == [3, 5, 1, 2, 4, 0]


def test_infiniband_takes_the_first_row() -> None:
    rows = [entry(i, LINK_LOCAL, GidType.INFINIBAND) for i in (2, 0, 1)]
    assert [one.index for one in sorted(rows, key=gid_order)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("peer", "index"),
    [
        (None, 3),
        ((GidType.ROCE_V2, ipv4_gid("10.9.9.9")), 3),
        ((GidType.ROCE_V2, GLOBAL), 5),  # of the family of the peer's address
        ((GidType.ROCE_V1, GLOBAL), 2),
        ((GidType.INFINIBAND, LINK_LOCAL), None),
    ],
)
def test_the_gid_is_one_that_reaches_the_peer(
    peer: tuple[GidType, bytes] | None, index: int | None
) -> None:
    chosen = choose_gid(SORTED, VerbsConfig(), peer)
    assert (None if chosen is None else chosen.index) == index


def test_a_configured_gid_index_is_taken_or_nothing() -> None:
    chosen = choose_gid(SORTED, VerbsConfig(gid_index=4))
    assert chosen is not None
    assert chosen.index == 4
    assert choose_gid(SORTED, VerbsConfig(gid_index=7)) is None


def test_addresses_are_written_as_people_write_them() -> None:
    assert [gid_text(one) for one in TABLE[::2]] == [
        "fe80::250:56ff:fea0:1",
        "10.0.0.1",
        "2001:db8::1",
    ]


def test_the_fastest_active_port_is_taken() -> None:
    fabric = Fabric()
    fabric.plug("slow0", port=dataclasses.replace(PORT, bits_per_second=10**10))
    fabric.plug("fast0")
    fabric.plug("faster0", port=dataclasses.replace(PORT, bits_per_second=4 * 10**11))
    fabric.plug("soft0", port=dataclasses.replace(PORT, bits_per_second=0))
    fabric.set_link("faster0", up=False)
    library = FakeLibrary(fabric, list(fabric.cards))
    assert choose_port(library, VerbsConfig()).device == "fast0"
    assert choose_port(library, VerbsConfig(device="soft0")).device == "soft0"
    names = [report.device for report in survey_ports(library, VerbsConfig()).ports]
    assert names == ["fast0", "slow0", "soft0", "faster0"]
    assert fabric.leaks == {}  # looking leaves nothing open


def test_a_machine_without_devices_is_told_of_soft_roce() -> None:
    library = FakeLibrary(Fabric(), [])
    with pytest.raises(ConfigError, match="rdma link add rxe0 type rxe"):
        choose_port(library, VerbsConfig())


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({}, VerbsConfig(device="mlx5_9"), "verbs.device names mlx5_9"),
        ({}, VerbsConfig(port=2), "verbs.port names port 2"),
        ({}, VerbsConfig(gid_index=9), "verbs.gid_index = 9: that row is empty"),
        ({"gids": []}, VerbsConfig(), "give its network interface an IP address"),
        (
            {"gids": [entry(0, LINK_LOCAL, GidType.INFINIBAND)]},
            VerbsConfig(),
            "does not speak RoCE (iWARP, say)",
        ),
        (
            {"port": dataclasses.replace(PORT, active=False, state="down")},
            VerbsConfig(),
            "the port is down; bring its link up",
        ),
        (
            {"port": dataclasses.replace(PORT, link_layer=LinkLayer.UNKNOWN)},
            VerbsConfig(),
            "bring its link up",
        ),
    ],
)
def test_a_port_that_cannot_be_used_is_named_with_the_reason(
    changes: dict[str, object], config: VerbsConfig, reason: str
) -> None:
    fabric = Fabric()
    fabric.plug("card0", "10.0.0.1", **changes)
    with pytest.raises(ConfigError, match=r"card0/1: ") as raised:
        choose_port(FakeLibrary(fabric, ["card0"]), config)
    assert reason in str(raised.value)


def test_a_device_that_cannot_be_opened_is_told_beside_the_others() -> None:
    fabric = Fabric()
    fabric.plug("card0")

    class Library(FakeLibrary):
        def device_names(self) -> list[str]:
            return ["broken0", "card0"]

        def open(self, name: str):  # type: ignore[no-untyped-def]
            from hymcache.errors import DeviceError
            from tests.transport.verbs.fake_verbs import FakeDevice

            if name == "broken0":
                raise DeviceError("cannot open the RDMA device broken0: busy", 16)
            return FakeDevice(self.fabric, self.fabric.cards[name])

    survey = survey_ports(Library(fabric, []), VerbsConfig())
    assert survey.broken == ("cannot open the RDMA device broken0: busy",)
    assert [report.device for report in survey.usable] == ["card0"]
