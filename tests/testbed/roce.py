"""What the kernel of a guest says of its soft-RoCE device."""

from __future__ import annotations

import json

from tests.testbed.guest import Guest


def sent_packets(guest: Guest) -> int:
    """RoCE packets that a guest has sent."""
    return int(guest.run("cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts").stdout)


def resources(guest: Guest) -> dict[str, int]:
    """How many verbs objects are in use."""
    told = json.loads(guest.run("rdma -j resource show rxe0").stdout)[0]
    return {kind: told[kind] for kind in ("pd", "cq", "qp", "mr", "ctx")}
