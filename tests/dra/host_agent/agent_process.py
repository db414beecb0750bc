"""A host agent as a user runs it: a process of the command line, over TLS, on files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import trustme

from hymcache.dra.host_agent import HostAgentClient

USER, PASSWORD = "driver", "correct horse"


class AgentProcess:
    """An agent that may be killed and started again; its files stay."""

    def __init__(self, folder: Path, host: str = "host-1", memory: Path | None = None) -> None:
        self._folder = folder
        self._host = host
        self.memory = memory or folder / "memory"
        self.cdi_root = folder / "cdi"
        self.ca_file = folder / "ca.pem"
        self._log = folder / "agent.log"
        self._process: subprocess.Popen[str] | None = None
        self.url = self.metrics_url = ""
        self._write_secrets()

    def start(self) -> None:
        """Returns when it serves."""
        arguments = [sys.executable, "-m", "hymcache", "dra", "host-agent", "--backend", "file"]
        for option, value in {
            "credentials": self._folder / "credentials",
            "listen": "127.0.0.1:0",
            "http": "127.0.0.1:0",
            "tls-cert": self._folder / "cert.pem",
            "tls-key": self._folder / "key.pem",
            "memory": self.memory,
            "node-name": self._host,
            "state": self._folder / "state",
            "cdi-root": self.cdi_root,
        }.items():
            arguments += [f"--{option}", str(value)]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.fullmatch(r"host agent\s+(\S+)\s*", line):
                self.url = f"https://{found[1]}"
            if found := re.fullmatch(r"metrics\s+(\S+)\s*", line):
                self.metrics_url = f"http://{found[1]}"
            if line == "hymcache: ready\n":
                return
        raise AssertionError(f"it does not start:\n{self._log.read_text()}")

    def kill(self) -> None:
        """As a crash does; may be called again."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As an operator does; the exit status."""
        return self._end(signal.SIGTERM)

    def device(self, allocation_id: str) -> Path:
        """The file that is the device on this host."""
        return self.memory / "hosts" / self._host / allocation_id

    def client(self, *, password: str = PASSWORD) -> HostAgentClient:
        return HostAgentClient(
            self.url, user_name=USER, password=password, ca_file=str(self.ca_file)
        )

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        self._process.communicate(timeout=10)
        status, self._process = self._process.returncode, None
        return status

    def _write_secrets(self) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(str(self.ca_file))
        certificate.cert_chain_pems[0].write_to_path(str(self._folder / "cert.pem"))
        certificate.private_key_pem.write_to_path(str(self._folder / "key.pem"))
        credentials = self._folder / "credentials"
        credentials.mkdir()
        for name, value in (("username", USER), ("password", PASSWORD)):
            (credentials / name).write_text(value + os.linesep)
