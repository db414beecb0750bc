"""One engine as it is deployed: vLLM's API server, its engine in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

pytest.importorskip("vllm")

from tests.connector.real_engine import BLOCK_TOKENS, prompt, transfer_config
from tests.connector.reference_tokens import TOKENS
from tests.connector.service_process import Service, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

START_S = 200.0
STOP_S = 30.0


class Server:
    """The server, and the requests that this test makes."""

    def __init__(self, model: Path, transfer: dict[str, Any], log: Path) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        command += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS)]
        command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        # The way to empty the server's own prefix cache is for developers only.
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd="/", env=environment, stdout=output, stderr=output
            )

    def wait_until_up(self) -> None:
        end = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < end, self._log.read_text()[-4000:]
            try:
                self.get("/health")
            except URLError:
                time.sleep(0.5)
            else:
                return

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=60) as response:
            return str(response.read().decode())

    def post(self, path: str, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            self._url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())

    def complete(self, tokens: list[int]) -> str:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0}
        return str(json.loads(self.post("/v1/completions", body))["choices"][0]["text"])

    def metric(self, name: str) -> float:
        found = re.search(rf"^vllm:hymcache_{name}{{.*}} (\S+)$", self.get("/metrics"), re.M)
        return float(found[1]) if found else 0.0


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    service = Service(tmp_path)
    service.start()
    # By its registered name: without the module's path.
    transfer = transfer_config(service.master_address)
    del transfer["kv_connector_module_path"]
    server = Server(model, transfer, tmp_path / "server.log")
    try:
        server.wait_until_up()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(STOP_S)
        finally:
            server.process.kill()
            service.kill()


def test_a_server_loads_what_it_saved_and_shows_it_in_its_metrics(server: Server) -> None:
    first = server.complete(prompt(TOKENS, 0))
    wait_for(server, "blocks_saved_total", TOKENS // BLOCK_TOKENS)
    server.post("/reset_prefix_cache", {})
    assert server.complete(prompt(TOKENS, 0)) == first
    wait_for(server, "blocks_loaded_total", TOKENS // BLOCK_TOKENS)
    assert server.metric("load_seconds_count") == 1


def wait_for(server: Server, name: str, value: float) -> None:
    """Counters come with the output of a later step."""
    end = time.monotonic() + 20
    while server.metric(name) != value:
        assert time.monotonic() < end, f"{name} is {server.metric(name)}"
        time.sleep(0.1)
