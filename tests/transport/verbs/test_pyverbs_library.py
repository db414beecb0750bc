"""What pyverbs answers, and what becomes of answers that cannot be. pyverbs is a stand-in."""

from __future__ import annotations

import errno
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hymcache.errors import DeviceError
from hymcache.transport.verbs import load_library
from hymcache.transport.verbs.library import Device, GidType, LinkLayer, Mtu


class PyverbsError(Exception):
    """As pyverbs has it."""


class PyverbsRDMAError(PyverbsError):
    """With an errno."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class Made:
    """A domain or a window."""

    rkey = 7

    def __init__(self, *_args: object) -> None:
        pass

    def close(self) -> None:
        raise PyverbsRDMAError("Failed to dealloc", errno.EBUSY)


def gid_row(index: int, kind: int) -> SimpleNamespace:
    return SimpleNamespace(
        port_num=1,
        gid_index=index,
        gid_type=kind,
        ndev_ifindex=0,
        gid_str=lambda: "0000:0000:0000:0000:0000:ffff:0a00:0001",
    )


class Context:
    """A device whose port a test can change."""

    port: dict[str, Any]

    def __init__(self, name: str) -> None:
        assert name == "card0"

    def query_device(self) -> SimpleNamespace:
        return SimpleNamespace(
            phys_port_cnt=1,
            max_qp_wr=1,
            max_cqe=1,
            max_qp_init_rd_atom=1,
            max_qp_rd_atom=1,
            max_mr_size=1,
            max_mw=1,
            device_cap_flags=1 << 23,
            fw_version="1.0",
        )

    def query_port(self, number: int) -> SimpleNamespace:
        assert number == 1
        return SimpleNamespace(**self.port)

    def query_gid_table(self, _count: int) -> list[SimpleNamespace]:
        return [gid_row(0, 1), gid_row(1, 2), gid_row(2, 9)]

    def close(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    port = {
        "state": 4,
        "link_layer": 2,
        "active_mtu": 3,
        "max_mtu": 5,
        "lid": 0,
        "max_msg_sz": 1 << 30,
    }
    monkeypatch.setattr(Context, "port", port, raising=False)
    contents: dict[str, dict[str, object]] = {
        "pyverbs": {"__file__": "/somewhere/pyverbs/__init__.py"},
        "pyverbs.device": {"Context": Context},
        "pyverbs.mr": {"MW": Made},
        "pyverbs.pd": {"PD": Made},
        "pyverbs.pyverbs_error": {
            "PyverbsError": PyverbsError,
            "PyverbsRDMAError": PyverbsRDMAError,
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return load_library().open("card0")


def test_a_port_is_told_in_the_terms_of_the_standard(device: Device) -> None:
    port = device.port(1)
    assert (port.active, port.state) == (True, "active")
    assert (port.link_layer, port.mtu_active) == (LinkLayer.ETHERNET, Mtu.MTU_1024)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"active_mtu": 0}, "port 1 of card0 has a Mtu that cannot be: 0"),
        ({"max_mtu": 9}, "port 1 of card0 has a Mtu that cannot be: 9"),
        ({"link_layer": 7}, "port 1 of card0 has a LinkLayer that cannot be: 7"),
    ],
)
def test_a_port_that_cannot_be_is_an_error_of_the_device(
    device: Device, changes: dict[str, int], line: str
) -> None:
    Context.port.update(changes)
    with pytest.raises(DeviceError) as raised:
        device.port(1)
    assert str(raised.value) == line


def test_addresses_of_a_kind_to_come_are_left_out(device: Device) -> None:
    assert [entry.kind for entry in device.gids(1)] == [GidType.ROCE_V1, GidType.ROCE_V2]


def test_a_window_that_does_not_end_is_told(device: Device) -> None:
    window = device.open_domain().open_window()
    with pytest.raises(
        DeviceError, match="cannot end a memory window: Failed to dealloc"
    ) as raised:
        window.close()
    assert raised.value.errno == errno.EBUSY
