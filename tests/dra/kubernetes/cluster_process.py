"""The fake control plane in a process of its own, and ways to break it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx


class ClusterProcess:
    """Serves when it is constructed; `kubeconfig` names it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "hymcache.bench.fake_cluster"),
                *("--kubeconfig", str(self.kubeconfig), *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline())
        self.server: str = ready["server"]
        self._control = httpx.Client(base_url=ready["control"], timeout=10)

    def fault(self, **body: Any) -> None:
        """`delay_s` before each answer; `refusals`: [[part of the path, status], ...]."""
        self._post("/faults", body)

    def drop_watches(self) -> int:
        """Ends all watches; how many there were."""
        return int(self._post("/drop-watches", {})["dropped"])

    def expire(self, *, in_stream: bool = False) -> None:
        """Forgets the history and ends all watches: who comes back gets 410.

        As the answer's status, or as an event of a watch that began with 200.
        """
        self._post("/expire", {"in_stream": in_stream})

    def go_away(self, seconds: float) -> None:
        """Refuses connections for a while."""
        self._post("/away", {"seconds": seconds})

    def requested(self) -> set[tuple[str, str, str]]:
        """What was asked so far: (group, resource[/part], verb)."""
        answer = self._control.get("/requested")
        return {(group, resource, verb) for group, resource, verb in answer.json()}

    def stop(self) -> None:
        self._control.close()
        if self._process.poll() is None:
            self._process.terminate()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._control.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()
