"""`hymcache dra kubelet-plugin` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from hymcache.bench.fake_kubelet import FakeKubelet

NODE = "node-1"
DRIVER = "cfm-dra-plugin.cxl.seagate.com"


class PluginProcess:
    """A plugin of the node; it may be killed and started again."""

    def __init__(
        self,
        kubelet: FakeKubelet,
        kubeconfig: Path,
        cdi_root: Path,
        pod_uid: str = "",
        *,
        node: str = NODE,
    ) -> None:
        self._log_path = kubelet.root / f"plugin-{pod_uid}.log"
        self._arguments = [sys.executable, "-m", "hymcache", "dra", "kubelet-plugin", "--verbose"]
        for option, value in {
            "node-name": node,
            "pod-uid": pod_uid,
            "kubeconfig": kubeconfig,
            "cdi-root": cdi_root,
            "plugins-folder": kubelet.plugins_folder,
            "registrar-folder": kubelet.registry,
            "healthcheck-port": 0,
            "metrics-port": 0,
        }.items():
            self._arguments += [f"--{option}", str(value)]
        self._process: subprocess.Popen[str] | None = None
        self.endpoints: dict[str, str] = {}

    def start(self) -> None:
        """Returns when it serves; the kubelet registers it soon after."""
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                self._arguments, cwd="/", stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "hymcache: ready\n":
                return
            if found := re.fullmatch(r"(\w+)\s+(\S+)\s*", line):
                self.endpoints[found[1]] = found[2].replace("0.0.0.0", "127.0.0.1")
        raise AssertionError(f"it does not start:\n{self.log()}")

    def kill(self) -> None:
        """As a crash does; may be called again."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As the DaemonSet does; the exit status."""
        return self._end(signal.SIGTERM)

    def log(self) -> str:
        return self._log_path.read_text()

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        self._process.communicate(timeout=15)
        status, self._process = self._process.returncode, None
        return status
