"""`hymcache rdma check` and the benchmark's reference where the devices are real to the kernel."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.testbed.guest import PYTHON, REPOSITORY
from tests.testbed.testbed import Testbed

pytestmark = pytest.mark.testbed("rxe")

CHECK = ("hymcache", "rdma", "check")


def test_soft_roce_is_found_with_its_ipv4_address(testbed: Testbed) -> None:
    guest = testbed.second
    told = json.loads(guest.run_python(*CHECK, "--json", "--set", "device.staging=64MiB").stdout)
    assert (told["chosen"], told["gid_index"], told["fixes"]) == ("rxe0/1", 1, [])
    (port,) = told["ports"]
    assert port["state"] == "active"
    assert port["link_layer"] == "ethernet"
    assert port["mtu_bytes"] == 4096
    assert port["memory_windows"]
    assert port["gids"][0] == {
        "index": 1,
        "address": guest.address,
        "type": "roce_v2",
        "interface": "eth0",
    }


def test_a_limit_on_locked_memory_does_not_hold_for_root(testbed: Testbed) -> None:
    shown = testbed.second.run(
        f"ulimit -l 65536; cd {REPOSITORY}; exec {PYTHON} -m {shlex.join(CHECK)}"
    )
    assert "locked memory: 64 MiB (hard limit 64 MiB; CAP_IPC_LOCK" in shown.stdout
    assert "this process may lock" not in shown.stdout


def test_a_machine_whose_device_is_gone_is_shown_what_to_do(testbed: Testbed) -> None:
    guest = testbed.second
    guest.run("rdma link del rxe0")
    try:
        shown = guest.run_python(*CHECK, check=False)
        assert shown.status == 1
        assert "to fix: no RDMA device; for soft-RoCE: modprobe rdma_rxe" in shown.stdout
    finally:
        guest.run(testbed.profile.prepare)


def test_the_benchmark_measures_perftest(testbed: Testbed) -> None:
    printed = testbed.first.run_python("tests.testbed.perftest_cost", deadline_s=120).stdout
    assert printed == "measured\n"
