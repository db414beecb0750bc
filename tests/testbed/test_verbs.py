"""The store by RDMA between two machines: soft-RoCE does what a NIC does, and fails as it does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.testbed.guest import Guest
from tests.testbed.roce import resources, sent_packets
from tests.testbed.store_client import BATCH, BLOCK_BYTES, CONNECTIONS, DEADLINE_S
from tests.testbed.store_service import StoreService
from tests.testbed.testbed import Testbed

pytestmark = pytest.mark.testbed("rxe")

CLIENT = "tests.testbed.store_client"

# An emulated machine that has other things to do as well.
SLACK_S = 5.0
PATIENCE_S = 60.0
# Until one is in the middle of a batch, and not between two.
KILLS_MAX = 5
PACKETS_OF_A_BATCH = BATCH * BLOCK_BYTES // 4096

# RoCE v2 arrives at this port; TCP goes on.
DROP_ROCE = """set -e
tc qdisc add dev eth0 ingress
tc filter add dev eth0 ingress protocol ip u32 match ip protocol 17 0xff \
  match ip dport 4791 0xffff action drop
"""
PASS_ROCE = "tc qdisc del dev eth0 ingress"

# A batch takes two seconds.
SLOW = "tc qdisc add dev eth0 root tbf rate 8mbit burst 64kb latency 500ms"
FAST = "tc qdisc del dev eth0 root"


class Reader:
    """`keep_reading` in a guest, and the rounds that it has told of."""

    def __init__(self, guest: Guest, master: str, transport: str = "auto") -> None:
        self._guest = guest
        self.command = guest.start_python(CLIENT, "keep_reading", master, transport, deadline_s=400)

    def rounds(self) -> list[dict[str, Any]]:
        printed = self.command.stdout
        return [json.loads(line) for line in printed.splitlines(keepends=True) if "\n" in line]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first round from now on of which this is true; fails if none comes."""
        seen = len(self.rounds())
        limit = time.monotonic() + PATIENCE_S
        while True:
            rounds = self.rounds()
            for told in rounds[seen:]:
                if condition(told):
                    return told
            seen = len(rounds)
            assert self.command.status() is None, self.command.stderr
            assert time.monotonic() < limit, f"the last rounds: {rounds[-3:]}"
            time.sleep(0.1)

    def wait_all_by(self, transport: str) -> dict[str, Any]:
        """A round in which all blocks came by this transport alone."""
        before: dict[str, int] = {}

        def all_by(told: dict[str, Any]) -> bool:
            nonlocal before
            now = {name: told["stats"][f"{name}_read_bytes"] for name in ("verbs", "tcp")}
            moved = {name: now[name] - before.get(name, now[name]) for name in now}
            before = now
            other = "tcp" if transport == "verbs" else "verbs"
            whole = moved[transport] == BATCH * BLOCK_BYTES and moved[other] == 0
            return bool(told["statuses"] == ["OK"] and whole)

        return self.wait_for(all_by)

    def assert_prompt(self) -> None:
        """No round took longer than a call may."""
        slowest = max(told["took_s"] for told in self.rounds())
        assert slowest < DEADLINE_S + SLACK_S


def run_client(guest: Guest, scene: str, master: str, transport: str) -> dict[str, Any]:
    printed = guest.run_python(CLIENT, scene, master, transport, deadline_s=120).stdout
    told: dict[str, Any] = json.loads(printed)
    return told


@pytest.mark.parametrize("windows", ["auto", "off"])
def test_blocks_go_by_rdma_and_come_back_right(testbed: Testbed, windows: str) -> None:
    first, second = testbed.guests
    service = StoreService(first, f"verbs.windows={windows}", "node.verbs=on")
    sent = [sent_packets(guest) for guest in testbed.guests]
    told = run_client(second, "exchange", service.master, "auto")
    stats = told["stats"]
    assert stats["verbs_read_bytes"] == told["bytes"]
    assert stats["verbs_written_bytes"] == told["bytes"]
    assert stats["tcp_read_bytes"] == stats["tcp_written_bytes"] == 0
    assert stats["verbs_failures"] == stats["verbs_fallbacks"] == 0
    # The node's guest sent what was read, the client's what was written, in frames of 4096 bytes.
    for guest, before in zip(testbed.guests, sent, strict=True):
        assert sent_packets(guest) - before >= told["bytes"] // 4096
    metrics = service.node_metrics()
    assert metrics["bytes_handed_total"] == told["bytes"]
    assert metrics["bytes_sent_total"] == 0
    assert (metrics["verbs_keys_made_total"] > 0) == (windows == "auto")


def test_a_node_killed_in_the_middle_of_a_batch(testbed: Testbed) -> None:
    first, second = testbed.guests
    service = StoreService(first)
    reader = Reader(second, service.master)
    for _ in range(KILLS_MAX):
        before = reader.wait_all_by("verbs")
        first.run(SLOW)
        try:
            service.kill_node_when_sending(PACKETS_OF_A_BATCH // 16)
        finally:
            first.run(FAST)
        lost = reader.wait_for(lambda told: told["statuses"] != ["OK"])
        assert set(lost["statuses"]) <= {"OK", "UNAVAILABLE", "DEADLINE", "MISS"}
        # What comes next has other keys to its memory and none of the blocks.
        service.start_node()
        reader.wait_all_by("verbs")
        if lost["stats"]["verbs_failures"] > before["stats"]["verbs_failures"]:
            break
    else:
        pytest.fail("no batch was under way")
    reader.assert_prompt()


def test_a_host_that_hangs(testbed: Testbed) -> None:
    first, second = testbed.guests
    service = StoreService(first)
    reader = Reader(second, service.master)
    reader.wait_all_by("verbs")
    first.pause()
    try:
        reader.wait_for(lambda told: told["statuses"] != ["OK"])
    finally:
        first.resume()
    reader.wait_all_by("verbs")
    reader.assert_prompt()


def test_a_port_that_goes_down_and_comes_back(testbed: Testbed) -> None:
    first, second = testbed.guests
    service = StoreService(first)
    reader = Reader(second, service.master)
    reader.wait_all_by("verbs")
    second.run("ip link set eth0 down")
    reader.wait_for(lambda told: told["statuses"] != ["OK"])
    second.run("ip link set eth0 up")
    reader.wait_all_by("verbs")
    reader.assert_prompt()


def test_tcp_takes_over_while_rdma_does_not_get_through(testbed: Testbed) -> None:
    first, second = testbed.guests
    service = StoreService(first)
    reader = Reader(second, service.master)
    reader.wait_all_by("verbs")
    first.run(DROP_ROCE)
    try:
        told = reader.wait_all_by("tcp")
        assert told["stats"]["verbs_failures"] >= 1
        assert told["stats"]["verbs_fallbacks"] >= 1
    finally:
        first.run(PASS_ROCE)
    reader.wait_all_by("verbs")
    reader.assert_prompt()


@pytest.mark.parametrize("side", ["client", "node"])
def test_a_device_that_is_removed_and_brought_back(testbed: Testbed, side: str) -> None:
    first, second = testbed.guests
    service = StoreService(first)
    reader = Reader(second, service.master)
    reader.wait_all_by("verbs")
    there = second if side == "client" else first
    # The kernel waits until nobody has the device open.
    there.run("rdma link del rxe0", deadline_s=30)
    reader.wait_all_by("tcp")
    there.run(testbed.profile.prepare)
    reader.wait_all_by("verbs")
    reader.assert_prompt()


def test_a_node_without_rdma_serves_by_tcp(testbed: Testbed) -> None:
    first, second = testbed.guests
    service = StoreService(first, "node.verbs=off")
    told = run_client(second, "exchange", service.master, "auto")
    assert told["stats"]["tcp_read_bytes"] == told["bytes"]
    assert told["stats"]["verbs_read_bytes"] == 0


def test_connections_leave_nothing_behind(testbed: Testbed) -> None:
    first, second = testbed.guests
    service = StoreService(first)
    before = [resources(guest) for guest in testbed.guests]
    client = second.start_python(CLIENT, "connect", service.master, "verbs", deadline_s=300)
    told = json.loads(client.wait_for_output("\n", deadline_s=240))
    assert told == {"connections": CONNECTIONS, "links": CONNECTIONS}
    limit = time.monotonic() + PATIENCE_S
    while resources(first) != before[0]:  # the node notices that a connection ended
        assert time.monotonic() < limit, (before[0], resources(first))
    # The client's process still runs.
    assert client.status() is None
    assert resources(second) == before[1]
