"""`hymcache rdma check`: what it finds on machines of all kinds."""

from __future__ import annotations

import dataclasses
import json
import resource

import pytest
from typer.testing import CliRunner

from hymcache.cli import rdma
from hymcache.config import Config, VerbsConfig
from hymcache.limits import GIB, MIB
from hymcache.transport.verbs.library import Mtu
from tests.transport.verbs.fake_verbs import PORT, Fabric, FakeLibrary

WIDE = dataclasses.replace(PORT, mtu_active=Mtu.MTU_4096)


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_locked_memory(monkeypatch, resource.RLIM_INFINITY)
    monkeypatch.setattr(rdma, "lacks_device_files", lambda: False)


def limit_locked_memory(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, *, capable: bool = False
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (size_bytes, size_bytes))
    monkeypatch.setattr("hymcache.transport.verbs.ignores_lock_limit", lambda: capable)


def fixes(fabric: Fabric, config: Config | None = None) -> tuple[str, ...]:
    return rdma.run_check(config or Config(), FakeLibrary(fabric, list(fabric.cards))).fixes


def test_a_good_machine_has_nothing_to_fix() -> None:
    fabric = Fabric()
    fabric.plug("mlx5_0", port=WIDE)
    assert fixes(fabric) == ()


def test_a_machine_without_devices_is_shown_soft_roce() -> None:
    (fix,) = fixes(Fabric())
    assert "rdma link add rxe0 type rxe netdev eth0" in fix


def test_each_port_that_cannot_be_used_is_named() -> None:
    fabric = Fabric()
    fabric.plug("mlx5_0", port=dataclasses.replace(WIDE, active=False, state="down"))
    fabric.plug("mlx5_1", gids=[])
    first, second = fixes(fabric)
    assert first.startswith("mlx5_0/1: the port is down")
    assert second.startswith("mlx5_1/1: the port has no GID")


def test_a_limit_on_locked_memory_is_compared_with_what_a_node_registers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric = Fabric()
    fabric.plug("mlx5_0", port=WIDE)
    limit_locked_memory(monkeypatch, 8 * MIB)
    (fix,) = fixes(fabric)
    assert "may lock 8 MiB" in fix
    assert "registers 1664 MiB" in fix  # 1536, and where two chunks overlap
    limit_locked_memory(monkeypatch, 8 * MIB, capable=True)
    assert fixes(fabric) == ()
    limit_locked_memory(monkeypatch, 2 * GIB)
    assert fixes(fabric) == ()


def test_packets_that_could_be_larger_are_told() -> None:
    fabric = Fabric()
    fabric.plug("mlx5_0")
    (fix,) = fixes(fabric)
    assert "packets of 1024 bytes" in fix
    assert "MTU of 4200" in fix


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """The command's library is this fabric."""
    fabric = Fabric()
    monkeypatch.setattr(
        "hymcache.transport.verbs.load_library",
        lambda: FakeLibrary(fabric, list(fabric.cards)),
    )
    return fabric


def test_the_table_marks_what_would_be_used(command: Fabric) -> None:
    command.plug("mlx5_0", port=dataclasses.replace(WIDE, bits_per_second=25_000_000_000))
    command.plug("mlx5_1", "10.0.0.7", port=WIDE)
    shown = CliRunner().invoke(rdma.app, ["check"])
    assert shown.exit_code == 0
    assert "would use: mlx5_1/1, the fastest of 2; keys for one block" in shown.output
    (marked,) = [line for line in shown.output.splitlines() if line.startswith("*")]
    assert " ".join(marked.split()) == "* mlx5_1/1 active 100 Gb/s 4096 1 10.0.0.7 roce_v2"
    assert "GID 1: the first of 2: RoCE v2 before v1, IPv4 before IPv6" in shown.output
    assert "locked memory: unlimited" in shown.output
    assert "nothing to fix" in shown.output


def test_programs_get_json_and_an_exit_code(command: Fabric) -> None:
    shown = CliRunner().invoke(rdma.app, ["check", "--json"])
    assert shown.exit_code == 1
    told = json.loads(shown.output)
    assert told["chosen"] is None
    assert told["ports"] == []
    command.plug("mlx5_0", port=WIDE)
    shown = CliRunner().invoke(rdma.app, ["check", "--json", "--set", "verbs.gid_index=0"])
    assert shown.exit_code == 0
    told = json.loads(shown.output)
    assert (told["chosen"], told["gid_index"]) == ("mlx5_0/1", 0)
    assert told["gid_reason"] == "as verbs.gid_index says"
    assert told["ports"][0]["gids"][0]["address"] == "10.0.0.1"


def test_memory_that_may_not_be_locked_is_an_exit_code(
    command: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.plug("mlx5_0", port=WIDE)
    limit_locked_memory(monkeypatch, 8 * MIB)
    assert CliRunner().invoke(rdma.app, ["check"]).exit_code == 1
    limit_locked_memory(monkeypatch, 8 * MIB, capable=True)
    shown = CliRunner().invoke(rdma.app, ["check"])
    assert shown.exit_code == 0
    assert "CAP_IPC_LOCK, so it does not hold" in shown.output


def test_device_files_that_a_container_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "lacks_device_files", lambda: True)
    (fix,) = fixes(Fabric())
    assert "/dev/infiniband is missing here" in fix


def test_settings_of_the_configuration_count(command: Fabric) -> None:
    command.plug("mlx5_0", port=WIDE)
    config = Config(verbs=VerbsConfig(device="mlx5_7"))
    (fix,) = fixes(command, config)
    assert fix == "mlx5_0/1: verbs.device names mlx5_7"
