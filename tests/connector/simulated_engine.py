"""vLLM's own scheduler and block pool, the connector's both halves, and a model made of hashes.

What a real model would write into the KV cache depends on the tokens before; here it is a hash of
them. So every step can check that the KV it reads is right, whoever wrote or loaded it, in
microseconds instead of a forward's milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from hymcache.connector import vllm as connector_module
from hymcache.connector.request_keys import RequestKeys
from hymcache.connector.vllm import HyMCacheConnector
from tests.connector.memory_store import MemoryStore

BLOCK_TOKENS = 4
LAYERS = 2
VOCABULARY = 50
HEADS, HEAD_SIZE = 2, 4
# Steps in which nothing at all happens, before a test calls it a hang.
IDLE_STEPS_MAX = 500


def full_spec() -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )


def sliding_spec(window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        sliding_window=window,
    )


def make_model(folder: Path, name: str = "model") -> Path:
    """A model's folder without weights: vLLM reads its configuration only."""
    path = folder / name
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@dataclass
class Rank:
    """One worker: its connector and its part of the KV cache."""

    index: int
    connector: HyMCacheConnector
    views: dict[str, torch.Tensor]


@dataclass
class Work:
    """What a step does for a request: tokens `start...end-1`, in the blocks it has by then."""

    request: Request
    start: int
    end: int
    tables: tuple[list[int], ...]
    samples: bool


@dataclass
class Finished:
    """What became of a request: what it generated, and how many tokens were computed for it."""

    tokens: list[int]
    computed: int


@dataclass
class SimulatedEngine:
    """An engine. With `overlap` it schedules a step before it has executed the last one."""

    model: Path
    store: MemoryStore
    patch: pytest.MonkeyPatch
    specs: tuple[KVCacheSpec, ...] = field(default_factory=lambda: (full_spec(),))
    blocks: int = 64
    max_seqs: int = 4
    batched_tokens: int = 32
    tp: int = 1
    tp_replicas: int = 1
    prefix_caching: bool = True
    overlap: bool = False
    layout: KVCacheLayout = KVCacheLayout.LBHNC
    transfer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.patch.setattr(connector_module, "CoreStore", lambda *_: self.store)
        self.kv_cache_config = self._kv_cache_config()
        self.vllm_config = self._vllm_config()
        init_none_hash(sha256)
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(
            self.kv_cache_config, self.vllm_config
        )
        self.hasher = get_request_block_hasher(hash_tokens, sha256)
        self.scheduler = (AsyncScheduler if self.overlap else Scheduler)(
            self.vllm_config,
            self.kv_cache_config,
            SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda _: False),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        self.ranks = [self._rank(index) for index in range(self.tp)]
        self.aggregator = KVOutputAggregator(self.tp)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Finished] = {}
        self.counts: dict[str, int] = {}
        self._scheduled: deque[tuple[Any, list[Work]]] = deque()
        self._prefixes: dict[str, list[bytes]] = {}
        self._computed: dict[str, int] = {}
        self._next = 0

    # What a test does

    def add(self, prompt: list[int], max_tokens: int = 4) -> str:
        self._next += 1
        request = Request(
            f"request-{self._next}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0),
            None,
            block_hasher=self.hasher,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return f"request-{self._next}"

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self._note_finished()

    def step(self) -> None:
        """One step, in the order of calls of vLLM's model runner."""
        output = self.scheduler.schedule()
        self._scheduled.append(
            (output, [self._work(*c) for c in output.num_scheduled_tokens.items()])
        )
        if len(self._scheduled) > self.overlap:
            self._execute_oldest()

    def _execute_oldest(self) -> None:
        output, works = self._scheduled.popleft()
        results = [self._execute(rank, output, works) for rank in self.ranks]
        result = self.aggregator.aggregate(results)
        assert result is not None
        for outputs in self.scheduler.update_from_output(output, result).values():
            self._count(outputs.scheduler_stats)
        self._note_finished()

    def run(self, *req_ids: str) -> list[Finished]:
        """Steps until these requests, or all, are finished."""
        idle = 0
        while any(r not in self.finished for r in (req_ids or self.requests)):
            before = self._progress()
            self.step()
            idle = idle + 1 if self._progress() == before else 0
            assert idle < IDLE_STEPS_MAX, f"hangs: {self.unfinished()}"
        return [self.finished[r] for r in (req_ids or self.requests)]

    def drain(self) -> None:
        """Runs on until the engine has nothing to do, then checks that nothing is left behind."""
        self.run()
        for _ in range(IDLE_STEPS_MAX):
            if not self.scheduler.has_requests() and not self._scheduled:
                break
            self.step() if self.scheduler.has_requests() else self._execute_oldest()
        assert not self.scheduler.has_requests(), "the engine is kept from going idle"
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.blocks - 1, "blocks are held for ever"
        side = self.scheduler.connector._scheduler
        assert not side._matcher.open, "lookups are left open"
        assert not side._states
        assert not side._loads._loads
        assert not side._loads._loader_of
        for rank in self.ranks:
            assert rank.connector._worker is not None
            assert not rank.connector._worker._loads
            assert not rank.connector._worker._save_of_job

    def generate(self, prompt: list[int], max_tokens: int = 4) -> Finished:
        """One request from its start to its end, saves included."""
        (finished,) = self.run(self.add(prompt, max_tokens))
        self.drain()
        return finished

    def keys(self, tokens: list[int]) -> RequestKeys:
        """The keys of a prompt's blocks."""
        request = Request("", tokens, SamplingParams(), None, block_hasher=self.hasher)
        side = self.scheduler.connector._scheduler
        return RequestKeys(request, side._groups.groups, side._namespaces)

    def unfinished(self) -> list[str]:
        return [
            f"{r.request_id} {r.status.name} {r.num_computed_tokens}/{r.num_tokens}"
            for r in self.requests.values()
            if r.request_id not in self.finished
        ]

    # The model

    def expected(self, tokens: list[int], max_tokens: int) -> list[int]:
        """What the model generates: what an engine without any cache would."""
        tokens = list(tokens)
        for _ in range(max_tokens):
            tokens.append(_next_token(_extend(b"", tokens)))
        return tokens[-max_tokens:] if max_tokens else []

    def _work(self, req_id: str, count: int) -> Work:
        # The scheduler has advanced the request by this step's tokens already.
        request = self.requests[req_id]
        self._computed[req_id] = self._computed.get(req_id, 0) + count
        end = request.num_computed_tokens
        return Work(
            request,
            end - count,
            end,
            self.scheduler.kv_cache_manager.get_block_ids(req_id),
            samples=not request.is_prefill_chunk,
        )

    def _prefix_hashes(self, request: Request, count: int) -> list[bytes]:
        """The hash of the tokens up to and with each position, those it will generate included."""
        hashes = self._prefixes.setdefault(request.request_id, [])
        prompt_ids = request.prompt_token_ids
        for position in range(len(hashes), count):
            before = hashes[-1] if hashes else b""
            given = position < len(prompt_ids)
            token = prompt_ids[position] if given else _next_token(before)
            hashes.append(_extend(before, [token]))
        return hashes

    def _execute(self, rank: Rank, output: Any, works: list[Work]) -> ModelRunnerOutput:
        connector, metadata = rank.connector, output.kv_connector_metadata
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        for work in works:
            self._forward(rank, work)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        transfer = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=[work.request.request_id for work in works],
            req_id_to_index={work.request.request_id: i for i, work in enumerate(works)},
            sampled_token_ids=[self._sample(work) for work in works],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=transfer,
        )

    def _forward(self, rank: Rank, work: Work) -> None:
        hashes = self._prefix_hashes(work.request, work.end)
        for g, spec in enumerate(self.specs):
            window = getattr(spec, "sliding_window", None)
            read_from = 0 if window is None else max(0, work.start - window + 1)
            for position in range(read_from, work.start):
                self._check(rank, g, work.tables[g], position, hashes[position])
            for position in range(work.start, work.end):
                self._write(rank, g, work.tables[g], position, hashes[position])

    def _sample(self, work: Work) -> list[int]:
        if not work.samples:
            return []
        return [_next_token(self._prefix_hashes(work.request, work.end)[work.end - 1])]

    def _contents(self, rank: Rank, group: int, layer: int, prefix: bytes) -> torch.Tensor:
        shard = rank.index // self.tp_replicas
        size = HEADS * 2 * HEAD_SIZE * 2
        seed = prefix + bytes([shard, group, layer])
        raw = hashlib.shake_128(seed).digest(size)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(HEADS, -1)

    def _slot(self, rank: Rank, group: int, layer: int, table: list[int], position: int) -> Any:
        block = table[position // BLOCK_TOKENS]
        assert block, f"position {position} has no block"
        view = rank.views[f"group{group}.layer{layer}"].view(torch.uint8)
        return view[block, :, position % BLOCK_TOKENS, :]

    def _write(self, rank: Rank, g: int, table: list[int], position: int, prefix: bytes) -> None:
        for layer in range(LAYERS):
            contents = self._contents(rank, g, layer, prefix)
            self._slot(rank, g, layer, table, position).copy_(contents)

    def _check(self, rank: Rank, g: int, table: list[int], position: int, prefix: bytes) -> None:
        for layer in range(LAYERS):
            found = self._slot(rank, g, layer, table, position)
            right = torch.equal(found, self._contents(rank, g, layer, prefix))
            assert right, f"wrong KV at position {position} of group {g}, layer {layer}"

    # How it is put together

    def _kv_cache_config(self) -> KVCacheConfig:
        groups, placed, offset = [], [], 0
        page = self.specs[0].page_size_bytes
        # Groups lie over each other, as vLLM has them: a block belongs to one group at a time.
        size = LAYERS * self.blocks * page
        for g, spec in enumerate(self.specs):
            names = [f"group{g}.layer{layer}" for layer in range(LAYERS)]
            groups.append(KVCacheGroupSpec(names, spec))
            by_layer = self.layout.is_layer_compact
            placed.append(
                KVCacheTensor(
                    size,
                    names,
                    layer_stride=page * self.blocks if by_layer else page,
                    block_stride=page if by_layer else page * LAYERS,
                    offset=offset,
                )
            )
        config = KVCacheConfig(self.blocks, placed, groups)
        config.kv_tp_replicas = self.tp_replicas
        return config

    def _vllm_config(self) -> VllmConfig:
        transfer = {
            "kv_connector": "HyMCacheConnector",
            "kv_connector_module_path": "hymcache.connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"master": "nowhere:1"},
        } | self.transfer
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(self.model), dtype="bfloat16", skip_tokenizer_init=True
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=self.max_seqs,
                max_num_batched_tokens=self.batched_tokens,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(
                block_size=BLOCK_TOKENS, enable_prefix_caching=self.prefix_caching
            ),
            parallel_config=ParallelConfig(tensor_parallel_size=self.tp),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        config.cache_config.num_gpu_blocks = self.blocks
        # Where vLLM runs on a CPU it never overlaps steps; on a GPU it does by default.
        config.scheduler_config.async_scheduling = self.overlap
        return config

    def _rank(self, index: int) -> Rank:
        group = SimpleNamespace(rank_in_group=index)
        self.patch.setattr(connector_module, "get_tp_group", lambda: group)
        self.patch.setattr(
            connector_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0)
        )
        raw = torch.zeros(self.kv_cache_config.kv_cache_tensors[0].size, dtype=torch.int8)
        views: dict[str, torch.Tensor] = {}
        for placed, spec in zip(self.kv_cache_config.kv_cache_tensors, self.specs, strict=True):
            of_group = create_kv_cache_views(raw, spec, self.blocks, self.layout, placed)
            views |= dict(zip(placed.layers, of_group, strict=True))
        connector = HyMCacheConnector(
            self.vllm_config, KVConnectorRole.WORKER, self.kv_cache_config
        )
        connector.register_kv_caches(views)
        return Rank(index, connector, views)

    def _note_finished(self) -> None:
        for req_id, request in self.requests.items():
            if request.is_finished() and req_id not in self.finished:
                computed = self._computed.get(req_id, 0)
                self.finished[req_id] = Finished(list(request.output_token_ids), computed)

    def _count(self, stats: Any) -> None:
        if stats is not None and stats.kv_connector_stats is not None:
            for key, count in stats.kv_connector_stats["counts"].items():
                self.counts[key] = self.counts.get(key, 0) + count

    def _progress(self) -> tuple[int, ...]:
        return tuple(r.num_computed_tokens + r.num_tokens for r in self.requests.values())


def _extend(prefix: bytes, tokens: Any) -> bytes:
    for token in tokens:
        prefix = hashlib.sha1(prefix + bytes([token])).digest()  # not for secrecy
    return prefix


def _next_token(prefix: bytes) -> int:
    return prefix[0] % VOCABULARY
