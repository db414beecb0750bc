"""What the master's log says of its nodes, and the commands that change them."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hymcache.master import MasterService
from tests.master.conftest import StartMaster
from tests.master.raw_peer import RawNode, wait_until


def cli(master: MasterService, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-P", "-m", "hymcache", *arguments),
            *("--grpc", master.endpoints["master.grpc"]),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_nodes_that_come_and_go_are_told(
    start_master: StartMaster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hymcache.master")
    master = start_master("master.lease_ms=1000")

    def told(text: str) -> bool:
        return any(text in line for line in caplog.messages)

    place = "node a (127.0.0.1:7410)"
    with RawNode(master.endpoints["master.listen"], "a", 1) as node:
        node.register()
        node.heartbeat(objects=3)
        wait_until(lambda: told(f"{place} has joined"), "it has joined")
    wait_until(lambda: told(f"{place} is lost"), "it is lost")
    assert told("nobody is sent to its 3 objects")
    with RawNode(master.endpoints["master.listen"], "a", 1) as node:
        node.register()
        wait_until(lambda: told(f"{place} is back"), "it is back")


def test_an_operator_drains_and_forgets(start_master: StartMaster) -> None:
    master = start_master("master.grpc=127.0.0.1:0", "master.lease_ms=60000")
    with RawNode(master.endpoints["master.listen"], "a", 1) as node:
        node.register()
        drained = cli(master, "drain", "a")
        assert drained.returncode == 0, drained.stderr
        assert "a takes no more writes" in drained.stdout
        assert node.heartbeat()
        assert cli(master, "undrain", "a").returncode == 0
        assert not node.heartbeat()
        refused = cli(master, "forget", "a")
        assert refused.returncode == 2
        assert "is alive" in refused.stderr
    unknown = cli(master, "drain", "b")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "no node 'b'" in unknown.stderr
