"""A master and a storage node in a guest, as their user starts them."""

from __future__ import annotations

from tests.testbed.command_channel import GuestCommand
from tests.testbed.guest import Guest

# As long as any test may take.
_DEADLINE_S = 600.0
_START_DEADLINE_S = 240.0

# In the guest itself, so that the batch is not over before the order has come.
_KILL_WHEN_SENDING = """
cd /sys/class/infiniband/rxe0/ports/1/hw_counters
before=$(<sent_pkts)
until (($(<sent_pkts) - before >= {packets})); do :; done
kill -s KILL -- -{group}
"""


class StoreService:
    """Ready when constructed; its processes end with the test."""

    def __init__(self, guest: Guest, *node_settings: str) -> None:
        self._guest = guest
        master = self._start(
            "master",
            f"master.listen={guest.address}:0",
            "master.grpc=",
            "master.http=",
            # A node in a starved guest is silent for a while and still there.
            "master.lease_ms=60s",
        )
        self.master = _addresses(master)["master.listen"]
        self._node_http = ""
        self.node = self.start_node(*node_settings)

    def start_node(self, *settings: str) -> GuestCommand:
        """Starts a node, with a device that is empty, and waits until it serves."""
        self._guest.run("rm -f /dev/shm/device /tmp/node.sock")
        self.node = self._start(
            "node",
            f"node.masters={self.master}",
            f"node.listen={self._guest.address}:0",
            "node.http=127.0.0.1:0",
            "node.name=n1",
            "node.unix=/tmp/node.sock",
            "device.path=/dev/shm/device",
            "device.capacity=128MiB",
            "device.staging=16MiB",
            "device.write_buffer=16MiB",
            "device.preallocate=false",
            "verbs.timeout=18",
            *settings,
        )
        self._node_http = _addresses(self.node)["node.http"]
        return self.node

    def kill_node(self) -> None:
        """As the kernel does when memory is short: without a word to anybody."""
        self._guest.end_command(self.node)
        self.node.wait(check=False)

    def kill_node_when_sending(self, packets: int) -> None:
        """The same, as soon as the guest has sent so many packets of RDMA."""
        script = _KILL_WHEN_SENDING.format(packets=packets, group=self.node.wait_started())
        self._guest.run(script, deadline_s=60)
        self.node.wait(check=False)

    def node_metrics(self) -> dict[str, float]:
        """What the node's /metrics says."""
        host, port = self._node_http.split(":")
        ask = "printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        answer = self._guest.run(f"exec 3<>/dev/tcp/{host}/{port}; {ask}").stdout
        _, _, text = answer.replace("\r\n", "\n").partition("\n\n")
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("hymcache_node_"): float(value) for name, value in rows}

    def _start(self, command: str, *settings: str) -> GuestCommand:
        options = [f"--set={setting}" for setting in settings]
        return self._guest.start_python("hymcache", command, *options, deadline_s=_DEADLINE_S)


def _addresses(command: GuestCommand) -> dict[str, str]:
    printed = command.wait_for_output("hymcache: ready", deadline_s=_START_DEADLINE_S)
    rows = (line.split() for line in printed.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2 and "." in row[0]}
