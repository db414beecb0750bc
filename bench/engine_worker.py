"""The child side of `engine_process`: one vLLM engine at a time, driven by JSON lines.

Commands come on stdin, events leave on the descriptor named in argv[1]; stdout and stderr stay
free for what vLLM prints. Every command has an `op` and is answered by exactly one event `reply`
or `error`; `open` also sends `progress` events before it. The end of stdin ends the process, also
in the middle of a command: whoever started it is gone.

    open {llm}            an engine in this process; `llm` are keyword arguments of vllm.LLM
    generate {prompt, tokens_max, drain_s}
    drain {seconds}       steps the idle engine, so that a connector finishes its saves
    reset                 drops the engine's own prefix cache
    metrics {containing}  samples of this process' Prometheus registry
    close                 shuts the engine down; `open` may follow
    quit
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import IO, Any, Final

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_ORPHAN_EXIT_S: Final = 3.0
_YIELD_S: Final = 0.001  # what vLLM's own busy loop sleeps after a step that ran no model
_DRAIN_STEP_S: Final = 0.01

Json = dict[str, Any]


class EngineWorker:
    """Executes commands; holds the engine that is open, if any."""

    def __init__(self, events: IO[str]) -> None:
        self._events = events
        self._llm: Any = None
        self._requests = 0

    def send(self, event: str, **fields: object) -> None:
        """Writes one event for the parent."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")
        self._events.flush()

    def execute(self, command: Json) -> Json:
        """Does what a command says; returns the fields of its reply."""
        operation = command["op"]
        if operation == "open":
            return self._open(command["llm"])
        if operation == "close":
            return self._close()
        if operation == "metrics":
            return _metrics(command["containing"])
        if self._llm is None:
            raise RuntimeError(f"{operation}: no engine is open")
        if operation == "generate":
            return self._generate(command["prompt"], command["tokens_max"], command["drain_s"])
        if operation == "drain":
            self._drain(command["seconds"])
            return {}
        if operation == "reset":
            return {"reset": bool(self._llm.reset_prefix_cache())}
        raise ValueError(f"unknown command {operation!r}")

    def _open(self, arguments: Json) -> Json:
        if self._llm is not None:
            raise RuntimeError("an engine is open already")
        started = time.monotonic()
        self.send("progress", text="importing vLLM")
        from vllm import LLM

        self.send("progress", text="starting the engine")
        self._llm = LLM(**arguments)
        return {"start_s": time.monotonic() - started, "cpu_s": time.process_time()}

    def shut_down(self) -> None:
        """Ends the engine, its connector included; what it held stays until `_close`."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    def _close(self) -> Json:
        if self._llm is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            self.shut_down()
            self._llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
        return {"cpu_s": time.process_time()}

    def _generate(self, prompt: list[int], tokens_max: int, drain_s: float) -> Json:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        self._requests += 1
        greedy = SamplingParams(temperature=0, max_tokens=tokens_max, ignore_eos=True)
        cpu_before, started = time.process_time(), time.perf_counter()
        ttft_s = ttft_cpu_s = 0.0
        last: Any = None
        engine.add_request(
            f"bench-{os.getpid()}-{self._requests}", {"prompt_token_ids": prompt}, greedy
        )
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if not outputs:
                time.sleep(_YIELD_S)
            for output in outputs:
                if last is None and output.outputs and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - started
                    ttft_cpu_s = time.process_time() - cpu_before
                last = output
        total_s = time.perf_counter() - started
        self._drain(drain_s)
        return {
            "ttft_s": ttft_s,
            "ttft_cpu_s": ttft_cpu_s,
            "total_s": total_s,
            "total_cpu_s": time.process_time() - cpu_before,
            "cached_tokens": last.num_cached_tokens or 0,
            "tokens": list(last.outputs[0].token_ids),
            "finish_reason": last.outputs[0].finish_reason,
        }

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._llm.llm_engine.step()
            time.sleep(_DRAIN_STEP_S)


def _metrics(containing: list[str]) -> Json:
    """Samples, summed over all labels but the ones that tell kinds of one metric apart."""
    from prometheus_client import REGISTRY

    samples: list[Json] = [
        {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
        for family in REGISTRY.collect()
        for sample in family.samples
        if any(part in sample.name for part in containing)
    ]
    return {"samples": samples}


def _read_commands(commands: queue.SimpleQueue[Json | None]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)
    time.sleep(_ORPHAN_EXIT_S)  # an idle worker leaves by itself within this time
    os._exit(1)


def main() -> None:
    """Runs until `quit` or the end of stdin."""
    os.environ.update(ENVIRONMENT)
    events = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    worker = EngineWorker(events)
    commands: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    while (command := commands.get()) is not None:
        if command["op"] == "quit":
            worker.shut_down()
            worker.send("reply", cpu_s=time.process_time())
            os._exit(0)  # without the seconds that tearing down an interpreter with torch takes
        try:
            worker.send("reply", **worker.execute(command))
        except Exception as error:  # noqa: BLE001 - told to the parent, which decides
            traceback.print_exc()
            worker.send("error", message=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
