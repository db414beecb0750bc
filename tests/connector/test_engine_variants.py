"""The connector in real engines of other kinds: one engine a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from hymcache.bench.tiny_model import TINY, make_model
from hymcache.connector.block_layout import GroupLayout, Run
from hymcache.connector.metadata import LoadPart, LoadRequest, StepMetadata
from hymcache.connector.settings import read_settings
from hymcache.connector.shard_namespaces import Rank, Shards, WorkerLayout
from hymcache.connector.store_core import CoreStore
from hymcache.connector.worker_side import WorkerSide
from hymcache.errors import ConfigError
from tests.connector.real_engine import BLOCK_TOKENS, Counted, Engine, prompt, transfer_config
from tests.connector.reference_tokens import TOKENS, ReferenceTokens
from tests.connector.service_process import Service, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(180)]

BLOCKS = TOKENS // BLOCK_TOKENS
KV_BLOCK_BYTES = BLOCK_TOKENS * TINY.kv_bytes_per_token
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.kill()


@pytest.fixture
def start(model: Path, reference: ReferenceTokens) -> Iterator[Start]:
    del reference  # The engine that makes it must be gone before these.
    engines: list[Engine] = []

    def start_engine(transfer: dict[str, Any], **options: Any) -> Engine:
        engines.append(Engine(options.pop("model", model), transfer, **options))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


def test_an_engine_starts_without_a_service_and_uses_it_when_it_comes(
    start: Start, tmp_path: Path, reference: ReferenceTokens
) -> None:
    """Over tcp, with large blocks, and without a prefix cache of its own."""
    service = Service(tmp_path)
    config = transfer_config(service.master_address, transport="tcp")
    engine = start(config, block_size=64, enable_prefix_caching=False)
    assert engine.generate(prompt(TOKENS, 0)).tokens == reference(0)
    service.start()
    try:
        cached = 0
        for _ in range(200):
            generated = engine.generate(prompt(TOKENS, 0))
            assert generated.tokens == reference(0)
            cached = generated.cached_tokens
            if cached == TOKENS:
                break
        assert cached == TOKENS
        assert engine.counts()["bytes|load|tcp"] == TOKENS * TINY.kv_bytes_per_token
    finally:
        service.kill()


def test_preempted_requests_are_saved_and_loaded_right(
    start: Start, service: Service, reference: ReferenceTokens
) -> None:
    engine = start(
        transfer_config(service.master_address),
        kv_cache_memory_bytes=22 * KV_BLOCK_BYTES,
        max_model_len=512,
    )
    seeds = [0, 1, 2, 3]
    for _ in range(3):
        assert engine.generate_all([prompt(TOKENS, s) for s in seeds]) == [
            reference(s) for s in seeds
        ]
        engine.forget_local()
    assert engine.preemptions() > 0
    assert engine.counts()["blocks_loaded"] > 0


def test_two_models_share_nothing(
    start: Start, service: Service, reference: ReferenceTokens, tmp_path: Path
) -> None:
    other = make_model(replace(TINY, name="other", intermediate=512), tmp_path)
    config = transfer_config(service.master_address)
    engine = start(config, model=other)
    # What the reference's model has stored by now would give its tokens.
    assert engine.generate(prompt(TOKENS, 0)).tokens != reference(0)
    assert engine.counts()["blocks_asked"] == BLOCKS
    assert engine.counts().get("blocks_hit", 0) == 0


def test_layers_with_a_sliding_window(start: Start, service: Service, hybrid_model: Path) -> None:
    plain = Engine(hybrid_model, None)
    expected = plain.generate(prompt(600, 0)).tokens
    plain.close()
    engine = start(transfer_config(service.master_address), model=hybrid_model)
    assert len(engine.scheduler.kv_cache_config.kv_cache_groups) == 2
    assert engine.generate(prompt(600, 0)).tokens == expected
    engine.forget_local()
    counted = Counted(engine)
    generated = engine.generate(prompt(600, 0))
    assert generated.tokens == expected
    assert generated.cached_tokens == 576
    # All 18 blocks of one group, and of the other those of the last 127 tokens.
    assert counted["blocks_loaded"] == 18 + 4


def test_tensor_parallel_workers_in_processes_of_their_own(
    start: Start, service: Service, reference: ReferenceTokens
) -> None:
    engine = start(
        transfer_config(service.master_address),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert engine.generate(prompt(TOKENS, 6)).tokens == reference(6)
    engine.forget_local()
    counted = Counted(engine)
    generated = engine.generate(prompt(TOKENS, 6))
    assert generated.tokens == reference(6)
    assert generated.cached_tokens == TOKENS
    assert counted["blocks_hit"] == BLOCKS
    assert counted["blocks_loaded"] == 2 * BLOCKS


def test_it_is_one_of_several_connectors(
    start: Start, service: Service, reference: ReferenceTokens
) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    children = [
        {
            "kv_connector": "HyMCacheConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"master": master},
        }
        for master in (nowhere, service.master_address)
    ]
    engine = start(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    )
    assert engine.generate(prompt(TOKENS, 5)).tokens == reference(5)
    engine.forget_local()
    counted = Counted(engine)
    assert engine.generate(prompt(TOKENS, 5)).tokens == reference(5)
    assert counted["blocks_loaded"] == BLOCKS


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"mastr": "a:1"}, "kv_connector_extra_config: mastr: unknown key; did you mean master?"),
        ({"master": "storage"}, 'master = "storage": not an address'),
        ({"staging_bytes": "5 apples"}, "staging_bytes"),
    ],
)
def test_a_wrong_configuration_stops_the_start_in_one_line(
    model: Path, reference: ReferenceTokens, extra: dict[str, Any], line: str
) -> None:
    del reference
    config = transfer_config("127.0.0.1:7400")
    config["kv_connector_extra_config"] = extra
    with pytest.raises(ConfigError) as caught:
        Engine(model, config)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_that_makes_no_sense_is_a_failed_load(service: Service) -> None:
    """As from a scheduler of another version; the worker computes instead."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    layout = GroupLayout(0, 4, (Run(memory.data_ptr(), 1024, 1024),), "x")
    store = CoreStore(read_settings({"master": service.master_address}), "test")
    worker = WorkerSide(
        store.transfers([layout]),
        Rank(0, 0),
        Shards(1, 1, 1),
        [WorkerLayout("x", 1024)],
        deadline_s=5.0,
    )
    plans = [b"", b"garbage", bytes(1000), b"\xff" * 4096]
    loads = [
        LoadRequest(str(i), (LoadPart(0, (plan,), 0, [1, 2]),)) for i, plan in enumerate(plans)
    ]
    worker.start_loads(StepMetadata(loads))
    finished: set[str] = set()
    bad: set[int] = set()
    reports: dict[str, int] = {}
    while len(finished) < len(plans):
        finished |= worker.finished(()).finished_recving
        bad |= worker.take_bad_blocks()
        report = worker.take_report()
        reports |= report.loads if report is not None else {}
    assert bad == {1, 2}
    assert set(reports.values()) == {0}
    assert not memory.any()
    assert worker.take_stats() is not None
    worker.close()
    store.close()
