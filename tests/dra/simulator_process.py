"""`hymcache dra simulate` in a process of its own, and what its faults are asked for with."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

APPLIANCE = "appliance-0"


class SimulatorProcess:
    """A fabric manager and the agents of node-1 and node-2; ready when it is constructed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hymcache", "dra", "simulate"),
                *("--listen", "127.0.0.1:0", "--state", str(folder), *options),
            ],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self.addresses = self._read_addresses()
        except BaseException:
            # A time-out of the test's too: nobody else knows of the process yet.
            self.process.kill()
            self.process.communicate()
            raise
        self.url = self.addresses["fabric manager"]
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def fault(self, **body: Any) -> None:
        """The next request that it fits meets a fault; see FaultBody."""
        self._do("POST", "/simulator/faults", body)

    def clear_faults(self) -> None:
        self._do("DELETE", "/simulator/faults")

    def power_cycle(self, blade: str) -> None:
        self._do("POST", f"/simulator/appliances/{APPLIANCE}/blades/{blade}/power-cycle")

    @contextlib.contextmanager
    def link_down(self, blade: str, port: str) -> Iterator[None]:
        """A cable is out inside of the block."""
        path = f"/simulator/appliances/{APPLIANCE}/blades/{blade}/ports/{port}/link"
        self._do("PUT", path, {"up": False})
        try:
            yield
        finally:
            self._do("PUT", path, {"up": True})

    @contextlib.contextmanager
    def agent_cut_off(self, host: str) -> Iterator[None]:
        """Nobody reaches a host's agent inside of the block."""
        self._do("PUT", f"/simulator/hosts/{host}/agent", {"up": False})
        try:
            yield
        finally:
            self._do("PUT", f"/simulator/hosts/{host}/agent", {"up": True})

    def regions(self, blade: str) -> list[str]:
        """Names of the regions on a blade."""
        answer = self._do("GET", f"/cfm/v1/appliances/{APPLIANCE}/blades/{blade}/memory")
        return [member["uri"].rpartition("/")[2] for member in answer["members"]]

    def device(self, host: str, allocation_id: str) -> Path:
        """The file that is an allocation's device on a host."""
        return self.folder / "memory" / "hosts" / host / allocation_id

    def cdi_spec(self, host: str, allocation_id: str) -> Path:
        """What a host's container runtime finds of an allocation."""
        return self.folder / "hosts" / host / "cdi" / f"{allocation_id}.json"

    def kill(self) -> None:
        """As the power does."""
        self.process.kill()
        self._close()

    def stop(self) -> None:
        self.process.terminate()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self.process.returncode is None:
            self.stop()

    def _do(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self.http.request(method, path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def _close(self) -> None:
        self.http.close()
        self.process.communicate(timeout=20)

    def _read_addresses(self) -> dict[str, str]:
        assert self.process.stdout is not None
        addresses: dict[str, str] = {}
        for line in self.process.stdout:
            if line == "hymcache: ready\n":
                return addresses
            name, _, address = line.strip().rpartition(" ")
            addresses[name.strip()] = address
        _, errors = self.process.communicate(timeout=20)
        raise AssertionError(f"not ready: {errors}")
