"""A name server that does not answer: calls end at their deadline all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a network and a file system of its own: port 53 is taken by a socket that nobody reads.
NAMESPACE = """\
ip link set lo up
mount --bind "$1" /etc/resolv.conf
exec "$2" -P -c "$3"
"""
PROGRAM = """\
import socket, time
import hymcache
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
with hymcache.Client("store.example:7400", deadline_s=1.0, connect_timeout_s=0.5) as client:
    began = time.monotonic()
    try:
        client.lookup([b"k" * 16])
    except hymcache.errors.Unavailable as error:
        print(f"{time.monotonic() - began:.1f} {error}")
"""


def test_a_silent_name_server_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    resolver = tmp_path / "resolv.conf"
    # The C library would wait for half a minute.
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:15 attempts:2\n")
    run = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--mount", "--net"),
            *("sh", "-ec", NAMESPACE, "sh", str(resolver), sys.executable, PROGRAM),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seconds, _, line = run.stdout.partition(" ")
    assert "cannot resolve store.example:7400" in line
    assert float(seconds) < 10
