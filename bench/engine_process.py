"""Drives a vLLM engine that lives in a child process of its own (`engine_worker`).

The engine runs inside the child (no further process), so one pid is the engine: its CPU clock is
the engine's CPU time, and killing it kills the engine. Every read has a deadline.

    with EngineProcess(EngineOptions(name="A", model=make_model(TINY, cache_dir)), log_dir) as a:
        a.open()                            # begins to start; engines start side by side
        a.wait_open()
        first = a.generate([5, 6, 7], tokens_max=8)
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from hymcache.bench.child_process import ChildFailed, ChildProcess

START_TIMEOUT_S: Final = 240.0
GENERATE_TIMEOUT_S: Final = 180.0
BLOCK_TOKENS: Final = 32
_IDLE_S: Final = 0.2
_QUIT_TIMEOUT_S: Final = 15.0
_REPLY_BYTES_MAX: Final = 4 << 20

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of. `block_tokens` must be a multiple of 32 on a CPU."""

    name: str
    model: Path
    kv_transfer_config: JsonObject | None = None
    block_tokens: int = BLOCK_TOKENS
    dtype: str = "float32"  # on AVX2 bfloat16 is four times slower
    tokens_max: int = 16384
    kv_cache_bytes: int = 768 << 20
    requests_max: int = 4
    prefix_caching: bool = True
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Path = field(default_factory=lambda: Path(sys.executable))

    def llm_arguments(self, *, with_connector: bool = True) -> JsonObject:
        """Keyword arguments of `vllm.LLM`."""
        arguments: JsonObject = {
            "model": str(self.model),
            "enforce_eager": True,
            "max_model_len": self.tokens_max,
            "max_num_batched_tokens": self.tokens_max,
            "dtype": self.dtype,
            "block_size": self.block_tokens,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_num_seqs": self.requests_max,
            "enable_prefix_caching": self.prefix_caching,
            "disable_log_stats": False,
            "distributed_executor_backend": "uni",
        }
        if with_connector and self.kv_transfer_config is not None:
            arguments["kv_transfer_config"] = self.kv_transfer_config
        return arguments


@dataclass(frozen=True)
class Generation:
    """One greedy answer. CPU seconds are those of the engine's process, all threads."""

    ttft_s: float
    ttft_cpu_s: float
    total_s: float
    total_cpu_s: float
    cached_tokens: int
    tokens: tuple[int, ...]
    finish_reason: str | None


class EngineProcess:
    """A child process that holds one engine at a time. A context manager: it ends on exit."""

    def __init__(self, options: EngineOptions, log_dir: Path) -> None:
        self.options = options
        read_fd, write_fd = os.pipe()
        try:
            self._child = ChildProcess(
                f"engine {options.name}",
                [*(str(options.python), "-P", "-m", "hymcache.bench.engine_worker"), str(write_fd)],
                log_dir / f"engine-{options.name}.log",
                environment={"OMP_NUM_THREADS": str(options.threads), **options.environment},
                pass_fds=(write_fd,),
                piped=True,
                dies_with_parent=False,  # it watches its stdin instead
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._events = read_fd
        self._buffer = b""
        self._unread: deque[JsonObject] = deque()
        self._replies_due = 0
        self.progress = "starting Python"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The process that is the engine."""
        return self._child.pid

    @property
    def log_path(self) -> Path:
        """Where what vLLM prints goes."""
        return self._child.log_path

    def open(self, *, with_connector: bool = True) -> None:
        """Begins to start the engine and returns at once; `wait_open` ends it."""
        self._send(op="open", llm=self.options.llm_arguments(with_connector=with_connector))

    def wait_open(
        self, timeout_s: float = START_TIMEOUT_S, on_idle: Callable[[], object] | None = None
    ) -> JsonObject:
        """Waits for the engine begun with `open`: {"start_s", "cpu_s"}.

        `on_idle` is called several times a second meanwhile: to show progress, for instance.

        Raises:
            ChildFailed: the engine did not start, or not in time.
        """
        return self._reply(timeout_s, on_idle)

    def poll(self) -> str:
        """Reads what has come without waiting; returns what the engine says that it is doing."""
        while self._readable(0.0):
            self._read_some()
        return self.progress

    def close(self) -> None:
        """Shuts the engine down and keeps the process; `open` may follow."""
        self._send(op="close")
        self._reply(_QUIT_TIMEOUT_S)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        tokens_max: int = 8,
        drain_s: float = 0.3,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Generation:
        """Greedy answer to `prompt` (token ids); then steps idle for `drain_s` for its saves."""
        self.begin_generate(prompt, tokens_max=tokens_max, drain_s=drain_s)
        return self.wait_generated(timeout_s)

    def begin_generate(
        self, prompt: Sequence[int], *, tokens_max: int = 8, drain_s: float = 0.3
    ) -> None:
        """`generate` in two halves, so that engines can work side by side."""
        self._send(op="generate", prompt=list(prompt), tokens_max=tokens_max, drain_s=drain_s)

    def wait_generated(
        self,
        timeout_s: float = GENERATE_TIMEOUT_S,
        on_idle: Callable[[], object] | None = None,
    ) -> Generation:
        """The answer to the prompt given to `begin_generate`, after its drain."""
        reply = self._reply(timeout_s, on_idle)
        return Generation(**{**reply, "tokens": tuple(reply["tokens"])})

    def drain(self, seconds: float) -> None:
        """Steps the idle engine for `seconds`."""
        self._send(op="drain", seconds=seconds)
        self._reply(seconds + GENERATE_TIMEOUT_S)

    def reset_prefix_cache(self) -> bool:
        """Drops the engine's own prefix cache; False when blocks were still in use."""
        self._send(op="reset")
        return bool(self._reply(_QUIT_TIMEOUT_S)["reset"])

    def metrics(self, *containing: str) -> dict[str, float]:
        """Values of the engine's Prometheus samples whose name has one of the parts, by name.

        Samples of one name are added up over all labels; `metric_samples` keeps them apart.
        """
        totals: dict[str, float] = {}
        for sample in self.metric_samples(*containing):
            totals[sample["name"]] = totals.get(sample["name"], 0.0) + sample["value"]
        return totals

    def metric_samples(self, *containing: str) -> list[JsonObject]:
        """The engine's Prometheus samples: [{"name", "labels", "value"}]."""
        self._send(op="metrics", containing=list(containing))
        samples: list[JsonObject] = self._reply(_QUIT_TIMEOUT_S)["samples"]
        return samples

    def end(self) -> None:
        """Ends the process: politely where the engine is idle, at once where not. Idempotent."""
        if self._events < 0:
            return
        try:
            if self._child.alive and self._replies_due == 0:
                self._send(op="quit")
                self._reply(_QUIT_TIMEOUT_S)
                self._child.wait(_QUIT_TIMEOUT_S)
        except ChildFailed:
            pass  # it is ended below; whoever called has the error that matters
        finally:
            self._child.end()
            os.close(self._events)
            self._events = -1

    def _send(self, **command: object) -> None:
        try:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
        except (OSError, ValueError) as error:  # the pipe is broken, or closed by end()
            raise self._child.failure("no longer takes commands") from error
        self._replies_due += 1

    def _reply(self, timeout_s: float, on_idle: Callable[[], object] | None = None) -> JsonObject:
        deadline = time.monotonic() + timeout_s
        while not self._unread:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise self._child.failure(f"no answer within {timeout_s:.0f} s")
            if self._readable(min(remaining_s, _IDLE_S) if on_idle else remaining_s):
                self._read_some()
            elif on_idle:
                on_idle()
        self._replies_due -= 1
        event = self._unread.popleft()
        if event.pop("event") == "error":
            raise self._child.failure(event["message"])
        return event

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._events], [], [], timeout_s)[0])

    def _read_some(self) -> None:
        chunk = os.read(self._events, 1 << 16)
        if not chunk:
            self._child.wait(1.0)  # so that the message can name the exit status
            raise self._child.failure("the process is gone")
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if len(self._buffer) > _REPLY_BYTES_MAX:
            raise self._child.failure("an event larger than its bound")
        for line in lines:
            event: JsonObject = json.loads(line)
            if event["event"] == "progress":
                self.progress = event["text"]
            else:
                self._unread.append(event)
