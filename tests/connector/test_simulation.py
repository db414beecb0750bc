"""The connector in vLLM's scheduler, against a store that does what it likes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import RequestStatus

from tests.connector.memory_store import Faults, MemoryStore
from tests.connector.simulated_engine import (
    SimulatedEngine,
    full_spec,
    make_model,
    sliding_spec,
)

pytestmark = pytest.mark.vllm


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path)


@pytest.fixture
def make(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make_engine(store: MemoryStore, **options: Any) -> SimulatedEngine:
        return SimulatedEngine(options.pop("model", model), store, monkeypatch, **options)

    return make_engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def start_loading(engine: SimulatedEngine, store: MemoryStore, tokens: list[int]) -> str:
    """A request in the middle of its load."""
    store.faults.slow = 0.9
    req_id = engine.add(tokens)
    while engine.requests[req_id].status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        engine.step()
    store.faults.slow = 0.0
    return req_id


def test_an_engine_loads_what_another_saved(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    tokens = prompt(40)
    expected = a.expected(tokens, 4)
    assert a.generate(tokens).tokens == expected
    assert a.counts["blocks_saved"] == 10
    result = b.generate(tokens)
    assert result.tokens == expected
    # The load claims the whole prompt: its last token is computed anew for the first to
    # generate, and each but the last of those for the next.
    assert result.computed == 1 + 3
    assert b.counts["blocks_asked"] == b.counts["blocks_hit"] == b.counts["blocks_loaded"] == 10
    assert "blocks_saved" not in b.counts


def test_steps_that_overlap(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store, overlap=True), make(store, overlap=True)
    tokens = prompt(40)
    for engine in (a, b):
        assert engine.generate(tokens, max_tokens=8).tokens == engine.expected(tokens, 8)
    assert a.counts["blocks_saved"] == 11
    assert b.counts["blocks_loaded"] == 10


def test_a_second_turn_loads_the_first_and_saves_what_is_new(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    first = prompt(40)
    answer = a.generate(first, max_tokens=8).tokens
    # The block of the answer that was filled while it was generated is there as well.
    assert a.counts["blocks_saved"] == 11
    second = first + answer + prompt(12, seed=1)
    result = b.generate(second)
    assert result.tokens == b.expected(second, 4)
    assert b.counts["blocks_loaded"] == 11
    assert result.computed == len(second) - 44 + 3
    assert b.counts["blocks_saved"] == 4


def test_only_what_the_engine_has_not_is_loaded(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    tokens = prompt(60)
    a.generate(tokens)
    b.generate(tokens[:24])
    b.counts.clear()
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert b.counts["blocks_asked"] == 15 - 6
    assert b.counts["blocks_loaded"] == 15 - 6


def test_a_hit_of_a_single_block_is_not_worth_a_load(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    tokens = prompt(40)
    a.generate(tokens)
    b.generate(tokens[:36])
    lookups = store.lookups
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert store.lookups == lookups


def test_without_prefix_caching_everything_comes_from_the_store(make: Any) -> None:
    store = MemoryStore()
    a = make(store, prefix_caching=False)
    tokens = prompt(40)
    a.generate(tokens)
    result = a.generate(tokens)
    assert result.tokens == a.expected(tokens, 4)
    assert a.counts["blocks_loaded"] == 10
    assert result.computed == 1 + 3


def test_what_is_known_to_be_stored_is_not_offered_again(make: Any) -> None:
    store = MemoryStore()
    a = make(store)
    tokens = prompt(40)
    a.generate(tokens)
    saved = a.counts["blocks_saved"]
    a.generate(tokens)
    assert a.counts["blocks_saved"] == saved
    assert "blocks_skipped|stored_already" not in a.counts


@pytest.mark.parametrize(
    ("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)]
)
def test_roles(make: Any, role: str, saves: bool, loads: bool) -> None:
    store = MemoryStore()
    tokens, others = prompt(40), prompt(40, seed=1)
    make(store).generate(tokens)
    engine = make(store, transfer={"kv_role": role})
    engine.generate(tokens)
    engine.generate(others)
    assert ("blocks_loaded" in engine.counts) == loads
    assert ("blocks_saved" in engine.counts) == saves
    # A cache hands nothing over that a preemption must wait for.
    assert not engine.scheduler.requires_kv_delivery


def test_two_models_share_nothing(make: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    other = make_model(tmp_path, "other")
    a, b = make(store), make(store, model=other)
    tokens = prompt(40)
    a.generate(tokens)
    b.generate(tokens)
    assert b.counts["blocks_asked"] == 10
    assert "blocks_hit" not in b.counts


def test_engines_of_different_block_order_share_where_the_bytes_are_the_same(make: Any) -> None:
    store = MemoryStore()
    tokens = prompt(40)
    make(store, layout=KVCacheLayout.LBHNC).generate(tokens)
    for layout, shares in [("BLHNC", True), ("LBNHC", False)]:
        engine = make(store, layout=KVCacheLayout[layout])
        assert engine.generate(tokens).tokens == engine.expected(tokens, 4)
        assert ("blocks_loaded" in engine.counts) == shares


def test_each_tensor_parallel_rank_has_its_own_blocks(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store, tp=2), make(store, tp=2)
    tokens = prompt(40)
    a.generate(tokens)
    assert a.counts["blocks_saved"] == 20
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert b.counts["blocks_asked"] == 10
    assert b.counts["blocks_loaded"] == 20
    # The hit is what all ranks have.
    one_rank = list(store.objects)[len(store.objects) // 2 :]
    for key in one_rank[4:]:
        del store.objects[key]
    c = make(store, tp=2)
    assert c.generate(tokens).tokens == c.expected(tokens, 4)
    assert c.counts["blocks_loaded"] < 20


def test_equal_kv_on_all_ranks_is_saved_once_and_loaded_by_each(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store, tp=2, tp_replicas=2), make(store, tp=2, tp_replicas=2)
    tokens = prompt(40)
    a.generate(tokens)
    assert a.counts["blocks_saved"] == len(store.objects) == 10
    assert b.generate(tokens).tokens == b.expected(tokens, 4)
    assert b.counts["blocks_loaded"] == 20


def test_of_a_sliding_window_only_the_window_is_loaded(make: Any) -> None:
    store = MemoryStore()
    specs = (full_spec(), sliding_spec(10))
    a, b = make(store, specs=specs, blocks=128), make(store, specs=specs, blocks=128)
    tokens = prompt(82)
    a.generate(tokens)
    # 85 tokens have KV: the last of those generated has none.
    assert a.counts["blocks_saved"] == 2 * 21
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    # 20 blocks, and of the window those with tokens 71 to 79.
    assert b.counts["blocks_loaded"] == 20 + 3
    assert result.computed == 2 + 3


def test_a_model_of_windows_alone(make: Any) -> None:
    store = MemoryStore()
    specs = (sliding_spec(10),)
    a, b = make(store, specs=specs), make(store, specs=specs)
    tokens = prompt(82)
    a.generate(tokens)
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert b.counts["blocks_loaded"] == 3


def test_an_incomplete_window_gives_a_shorter_hit(make: Any) -> None:
    store = MemoryStore()
    specs = (full_spec(), sliding_spec(10))
    a, b = make(store, specs=specs, blocks=128), make(store, specs=specs, blocks=128)
    tokens = prompt(82)
    a.generate(tokens)
    del store.objects[a.keys(tokens).span(0, 1, 18, 19)]
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert b.counts["blocks_loaded"] == 18 + 3


def test_a_failed_load_is_computed_from_where_it_failed(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    tokens = prompt(40)
    a.generate(tokens)
    req_id = start_loading(b, store, tokens)
    # Found by the lookup, and gone before it is loaded.
    del store.objects[a.keys(tokens).span(0, 0, 6, 7)]
    (result,) = b.run(req_id)
    assert result.tokens == b.expected(tokens, 4)
    assert b.counts["blocks_load_failed|miss"] == 1
    assert result.computed == 40 - 24 + 3
    b.drain()
    # And what was lost is stored again.
    c = make(store)
    assert c.generate(tokens).computed == 1 + 3


def test_a_load_that_fails_at_once_is_not_tried_again(make: Any) -> None:
    store = MemoryStore(faults=Faults(load_fails=1.0))
    a, b = make(store), make(store)
    tokens = prompt(40)
    a.generate(tokens)
    lookups = store.lookups
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert result.computed == 40 + 3
    assert store.lookups == lookups + 1


def test_with_several_groups_a_failed_load_takes_the_request_back(make: Any) -> None:
    store = MemoryStore()
    specs = (full_spec(), sliding_spec(10))
    a, b = make(store, specs=specs, blocks=128), make(store, specs=specs, blocks=128)
    tokens = prompt(82)
    a.generate(tokens)
    store.faults.load_fails = 0.1
    result = b.generate(tokens)
    assert result.tokens == b.expected(tokens, 4)
    assert result.computed == 82 + 3


def test_a_skipped_save_is_offered_again(make: Any) -> None:
    store = MemoryStore(faults=Faults(save_skipped=1.0))
    a, b = make(store), make(store)
    tokens = prompt(40)
    req_id = a.add(tokens, max_tokens=8)
    for _ in range(6):
        a.step()
    assert "blocks_saved" not in a.counts
    assert a.counts["blocks_skipped|buffer_full"] == 1
    store.faults.save_skipped = 0.0
    a.run(req_id)
    a.drain()
    assert a.counts["blocks_saved"] == 11
    assert b.generate(tokens).computed == 1 + 3


def test_what_the_store_has_lost_is_saved_again(make: Any) -> None:
    store = MemoryStore()
    a = make(store)
    tokens = prompt(40)
    a.generate(tokens)
    store.objects.clear()
    assert a.scheduler.reset_prefix_cache()
    a.generate(tokens)
    assert len(store.objects) == 10


def test_an_aborted_load_gives_its_blocks_back(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    tokens = prompt(40)
    a.generate(tokens)
    b.abort(start_loading(b, store, tokens))
    b.drain()
    assert "blocks_load_failed|cancelled" not in b.counts


def test_a_request_that_loads_the_same_prefix_waits_and_hits_locally(make: Any) -> None:
    store = MemoryStore()
    a, b = make(store), make(store)
    tokens = prompt(40)
    a.generate(tokens)
    results = b.run(b.add(tokens), b.add([*tokens, 1, 2, 3]))
    assert [r.tokens for r in results] == [
        b.expected(tokens, 4),
        b.expected([*tokens, 1, 2, 3], 4),
    ]
    assert b.counts["blocks_loaded"] == 10
    b.drain()


def test_reset_cache_leaves_what_was_stored_behind(make: Any) -> None:
    store = MemoryStore()
    a = make(store)
    tokens = prompt(40)
    a.generate(tokens)
    assert a.scheduler.reset_prefix_cache(reset_connector=True)
    a.counts.clear()
    assert a.generate(tokens).computed == 40 + 3
    assert "blocks_hit" not in a.counts
    assert a.counts["blocks_saved"] == 10
    # The new namespace is this engine's own.
    assert make(store).generate(tokens).computed == 1 + 3


def test_saves_that_hang_do_not_take_the_engines_blocks(make: Any) -> None:
    """Blocks held for saves are bounded, and given back when the engine runs short of them."""
    store = MemoryStore(faults=Faults(saves_hang=True))
    engine = make(store, blocks=40)
    for seed in range(2):
        engine.run(engine.add(prompt(40, seed), 8))
    held = engine.scheduler.connector._scheduler._saves._held_blocks
    assert held == 10
    assert "blocks_skipped|cancelled" not in engine.counts
    # This one needs more than the others leave.
    engine.add(prompt(140), 8)
    engine.run()
    assert engine.counts["blocks_skipped|cancelled"] == 10
    # Of 11, 11 and 36 full blocks, those that were never held.
    assert engine.counts["blocks_skipped|engine_backlog"] == 11 + 11 + 36 - 2 * 10
    for req_id, request in engine.requests.items():
        prompt_tokens = list(request.prompt_token_ids)
        assert engine.finished[req_id].tokens == engine.expected(prompt_tokens, 8)
    store.faults.saves_hang = False
    engine.drain()


def test_a_store_without_answers_costs_the_first_request_only(make: Any) -> None:
    store = MemoryStore(faults=Faults(lookup_fails=1.0))
    a = make(store)
    for seed in range(20):
        tokens = prompt(40, seed)
        assert a.generate(tokens).tokens == a.expected(tokens, 4)
    assert a.counts["lookups_failed"] == 1
    assert store.lookups == 1


@pytest.mark.parametrize("specs", [(full_spec(),), (full_spec(), sliding_spec(10))], ids=len)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_kv_is_right(make: Any, specs: Any, seed: int) -> None:
    """Two engines short of blocks, in any order of events; every read of KV is checked."""
    dice = random.Random(seed)
    faults = Faults(
        slow=dice.choice([0.0, 0.3, 0.8]),
        lookup_fails=dice.choice([0.0, 0.1]),
        load_fails=dice.choice([0.0, 0.1]),
        save_skipped=dice.choice([0.0, 0.1, 0.5]),
        evicted=dice.choice([0.0, 0.02]),
    )
    store = MemoryStore(seed, faults)
    options: dict[str, Any] = {
        "specs": specs,
        "blocks": dice.choice([24, 48]) * len(specs),
        "batched_tokens": dice.choice([8, 32]),
        "prefix_caching": dice.random() < 0.8,
        "tp": dice.choice([1, 2]),
        "overlap": dice.random() < 0.5,
    }
    engines = [make(store, **options), make(store, **options)]
    documents = [prompt(dice.randrange(8, 60), seed=i) for i in range(4)]
    wanted: list[dict[str, tuple[list[int], int]]] = [{}, {}]
    for _ in range(30):
        which = dice.randrange(2)
        engine = engines[which]
        tokens = dice.choice(documents)[: dice.randrange(8, 61)] + prompt(
            dice.randrange(0, 6), seed=dice.randrange(1000)
        )
        answer_tokens = dice.randrange(1, 12)
        wanted[which][engine.add(tokens, answer_tokens)] = (tokens, answer_tokens)
        for _ in range(dice.randrange(0, 12)):
            engine.step()
        if dice.random() < 0.15:
            req_id = dice.choice(list(wanted[which]))
            if req_id not in engine.finished:
                engine.abort(req_id)
                del wanted[which][req_id]
    for engine, requests in zip(engines, wanted, strict=True):
        engine.drain()
        for req_id, (tokens, answer_tokens) in requests.items():
            assert engine.finished[req_id].tokens == engine.expected(tokens, answer_tokens)
    assert sum(engine.counts.get("blocks_saved", 0) for engine in engines) > 0


def test_the_random_runs_preempt_load_and_fail(make: Any) -> None:
    """What the test above relies on does happen in it."""
    store = MemoryStore(1, Faults(slow=0.3, load_fails=0.1))
    engine = make(store, blocks=24, max_seqs=4)
    for _ in range(3):
        for seed in range(4):
            engine.add(prompt(24, seed), 24)
        engine.drain()
    assert max(r.num_preemptions for r in engine.requests.values()) > 0
    assert engine.counts["blocks_loaded"] > 0
    assert any(key.startswith("blocks_load_failed") for key in engine.counts)
