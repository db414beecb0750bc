"""In a guest: both ends of perftest, as in `hymcache bench micro --transport verbs`."""

from __future__ import annotations

import sys

from hymcache.bench.perftest_reference import PerftestReference, find_perftest
from hymcache.config import VerbsConfig
from hymcache.transport.verbs import choose_gid, choose_port, load_library

SIZE = 65536
CALLS = 16


def main() -> None:
    find_perftest()
    port = choose_port(load_library(), VerbsConfig())
    gid = choose_gid(port.gids, VerbsConfig())
    assert gid is not None
    reference = PerftestReference(port, gid.index)
    for operation in ("get", "put"):
        cost = reference.measure(operation, SIZE, CALLS * SIZE)
        assert (cost.calls, cost.moved_bytes) == (CALLS, CALLS * SIZE), cost
    sys.stdout.write("measured\n")


if __name__ == "__main__":
    main()
