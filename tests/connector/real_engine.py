"""A real vLLM engine on the CPU, inside the test's process, stepped by the test."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory, kv_transfer
from vllm.v1.request import RequestStatus

BLOCK_TOKENS = 32
_STEPS_S = 40.0
# More than a lookup ever takes here.
_LOOKUP_S = 0.2


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=tokens)


def transfer_config(master: str, **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` that docs/vllm.md shows."""
    return {
        "kv_connector": "HyMCacheConnector",
        "kv_connector_module_path": "hymcache.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": master, **extra},
    }


@dataclass
class Generated:
    """`cached_tokens` are those of the prompt that did not have to be computed."""

    tokens: list[int]
    cached_tokens: int


class Engine:
    """One engine; only one with a connector can be in a process at a time."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, **options: Any) -> None:
        options = {
            "block_size": BLOCK_TOKENS,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 4,
        } | options
        try:
            self.llm = LLM(
                model=str(model),
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                disable_log_stats=False,
                kv_transfer_config=transfer,
                **options,
            )
        except BaseException:
            # A start that fails leaves vLLM's own state behind.
            kv_transfer.ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise
        self._next = 0

    @property
    def core(self) -> Any:
        """The engine's core: scheduler, cache manager, executor."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def add(self, tokens: list[int], max_tokens: int = 8) -> str:
        self._next += 1
        req_id = str(self._next)
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.llm_engine.add_request(req_id, {"prompt_token_ids": tokens}, parameters)
        return req_id

    def abort(self, req_id: str) -> None:
        self.llm.llm_engine.abort_request([req_id])

    def step(self) -> dict[str, Generated]:
        """One step; the requests that it finished."""
        outputs = self.llm.llm_engine.step()
        return {
            o.request_id: Generated(list(o.outputs[0].token_ids), o.num_cached_tokens or 0)
            for o in outputs
            if o.finished
        }

    def step_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _STEPS_S
        while not condition():
            assert time.monotonic() < end, "it never comes"
            self.step()

    def run(self, *req_ids: str) -> list[Generated]:
        """Steps until these requests are finished."""
        finished: dict[str, Generated] = {}
        end = time.monotonic() + _STEPS_S
        while any(req_id not in finished for req_id in req_ids):
            assert time.monotonic() < end, "the engine hangs"
            finished |= self.step()
        return [finished[req_id] for req_id in req_ids]

    def drain(self) -> None:
        """Steps until nothing is left to do, saves included, as a server's loop does."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def generate(self, tokens: list[int], max_tokens: int = 8) -> Generated:
        """One request, alone, from its start to the end of its saves."""
        (generated,) = self.run(self.add(tokens, max_tokens))
        self.drain()
        return generated

    def generate_all(self, prompts: list[list[int]]) -> list[list[int]]:
        """Several requests at once."""
        return [generated.tokens for generated in self.run(*(self.add(p) for p in prompts))]

    def forget_local(self) -> None:
        """Empties the engine's own prefix cache: what it computed is in the store only."""
        self.drain()
        assert self.llm.reset_prefix_cache()

    def start_loading(self, tokens: list[int], before: Callable[[], None]) -> str:
        """A request that waits for its load. `before` is called when it has been looked up."""
        req_id = self.add(tokens)
        time.sleep(_LOOKUP_S)
        before()
        status = self.status(req_id)
        while status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            assert status == RequestStatus.WAITING, "nothing of it was found"
            self.step()
            status = self.status(req_id)
        return req_id

    def status(self, req_id: str) -> RequestStatus | None:
        request = self._request(req_id)
        return None if request is None else RequestStatus(request.status)

    def _request(self, req_id: str) -> Any:
        for request in self.scheduler.requests.values():
            # vLLM makes ids its own by an ending.
            if request.request_id.split("-")[0] == req_id:
                return request
        return None

    def output_tokens(self, req_id: str) -> int:
        """How many tokens a request has generated so far; 0 for one that is gone."""
        request = self._request(req_id)
        return 0 if request is None else int(request.num_output_tokens)

    def first_block_bytes(self, req_id: str) -> bytes:
        """What the first layer of a running request's first block holds."""
        request = self._request(req_id)
        block_id = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][0]
        layers = self.core.vllm_config.compilation_config.static_forward_context
        view = next(layer.kv_cache for layer in layers.values() if hasattr(layer, "kv_cache"))
        return bytes(view[block_id].contiguous().numpy().tobytes())

    def counts(self) -> dict[str, float]:
        """The connector's counters as the engine's /metrics has them."""
        counts: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:hymcache_") and hasattr(metric, "value"):
                labels = [v for k, v in metric.labels.items() if k not in {"model_name", "engine"}]
                name = metric.name.removeprefix("vllm:hymcache_").removesuffix("_total")
                counts["|".join([name, *labels])] = metric.value
        return counts

    def preemptions(self) -> float:
        """How often requests lost their blocks to others."""
        metrics = self.llm.get_metrics()
        return float(sum(m.value for m in metrics if m.name == "vllm:num_preemptions"))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        with suppress(AttributeError):
            del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


class Counted:
    """What an engine's counters grew by."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.counts()

    def __getitem__(self, name: str) -> float:
        return self._engine.counts().get(name, 0.0) - self._before.get(name, 0.0)
