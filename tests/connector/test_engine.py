"""The connector in a real vLLM engine, against a real master and node, through all that fails.

Engines are dear, so these tests share one: what it computed goes to the store, its own prefix
cache is emptied, and what it generates from the store's KV is compared with the tokens of an
engine that never had a connector.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hymcache.bench.tiny_model import TINY
from tests.connector.real_engine import BLOCK_TOKENS, Counted, Engine, prompt, transfer_config
from tests.connector.reference_tokens import TOKENS, ReferenceTokens, second_turn
from tests.connector.service_process import Service

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 2.0
BLOCKS = TOKENS // BLOCK_TOKENS
BYTES = TOKENS * TINY.kv_bytes_per_token
# How long a service that came back may take until an engine has hits again.
RECOVERY_S = 30.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.kill()


@pytest.fixture(scope="module")
def engine(model: Path, service: Service, reference: ReferenceTokens) -> Iterator[Engine]:
    del reference  # The engine that makes it must be gone before this one.
    config = transfer_config(service.master_address, deadline_s=DEADLINE_S)
    # Prompts are computed in chunks.
    engine = Engine(model, config, max_num_batched_tokens=128)
    yield engine
    engine.close()


def test_what_is_loaded_gives_the_same_tokens(engine: Engine, reference: ReferenceTokens) -> None:
    counted = Counted(engine)
    assert engine.generate(prompt(TOKENS, 0)).tokens == reference(0)
    assert counted["blocks_saved"] == BLOCKS
    assert counted["bytes|save|shm"] == BYTES
    engine.forget_local()
    generated = engine.generate(prompt(TOKENS, 0))
    assert generated.tokens == reference(0)
    # The load claims the whole prompt: one token of it is computed anew, not a block.
    assert generated.cached_tokens == TOKENS
    assert counted["blocks_asked"] == 2 * BLOCKS
    assert counted["blocks_hit"] == counted["blocks_loaded"] == BLOCKS
    assert counted["bytes|load|shm"] == BYTES


def test_a_second_turn_and_a_part_of_a_prompt(engine: Engine, reference: ReferenceTokens) -> None:
    counted = Counted(engine)
    engine.forget_local()
    tokens = second_turn(reference(0))
    assert engine.generate(tokens).tokens == reference.second_turn
    assert counted["blocks_loaded"] == BLOCKS
    assert counted["blocks_saved"] == len(tokens) // BLOCK_TOKENS - BLOCKS
    engine.forget_local()
    # A prompt that leaves the stored one in its middle.
    other = [*tokens[:200], *prompt(120, 101)]
    generated = engine.generate(other)
    assert generated.cached_tokens == 200 // BLOCK_TOKENS * BLOCK_TOKENS
    engine.forget_local()
    assert engine.generate(other).tokens == generated.tokens


def test_requests_that_come_together(engine: Engine, reference: ReferenceTokens) -> None:
    prompts = [prompt(TOKENS, seed) for seed in (0, 1, 0, 2)]
    expected = [reference(seed) for seed in (0, 1, 0, 2)]
    engine.forget_local()
    assert engine.generate_all(prompts) == expected
    for seed in (0, 1, 2):
        # A block that was saved is found once its node has told the master.
        generate_until_hit(engine, reference, seed)
    engine.forget_local()
    counted = Counted(engine)
    assert engine.generate_all(prompts) == expected
    # What two of them share was loaded once.
    assert counted["blocks_loaded"] == 3 * BLOCKS


def test_an_aborted_load_leaves_nothing_behind(
    engine: Engine, service: Service, reference: ReferenceTokens
) -> None:
    generate_until_hit(engine, reference, 3)
    engine.forget_local()
    req_id = engine.start_loading(prompt(TOKENS, 3), before=service.node.pause)
    engine.abort(req_id)
    service.node.resume()
    # Only when all blocks are back.
    engine.forget_local()


def test_a_node_that_does_not_answer_costs_a_request_its_deadline(
    engine: Engine, service: Service, reference: ReferenceTokens
) -> None:
    generate_until_hit(engine, reference, 4)
    engine.forget_local()
    counted = Counted(engine)
    started = time.monotonic()
    req_id = engine.start_loading(prompt(TOKENS, 4), before=service.node.pause)
    (generated,) = engine.run(req_id)
    assert generated.tokens == reference(4)
    assert time.monotonic() - started < DEADLINE_S + 3
    assert counted["blocks_load_failed|deadline"] == BLOCKS
    service.node.resume()
    engine.drain()


def test_a_node_killed_in_the_middle_of_a_load(
    engine: Engine, service: Service, reference: ReferenceTokens
) -> None:
    generate_until_hit(engine, reference, 5)
    engine.forget_local()
    counted = Counted(engine)
    started = time.monotonic()
    req_id = engine.start_loading(prompt(TOKENS, 5), before=service.node.pause)
    service.node.kill()
    (generated,) = engine.run(req_id)
    assert generated.tokens == reference(5)
    assert time.monotonic() - started < DEADLINE_S + 3
    assert counted["blocks_load_failed|unavailable"] == BLOCKS
    engine.drain()
    # Without a node the engine goes on.
    assert engine.generate(prompt(TOKENS, 6)).tokens == reference(6)
    service.node.start()
    generate_until_hit(engine, reference, 6)


def test_a_master_that_hangs_and_one_that_is_gone(
    engine: Engine, service: Service, reference: ReferenceTokens
) -> None:
    generate_until_hit(engine, reference, 7)
    service.master.pause()
    counted = Counted(engine)
    for _ in range(3):
        engine.forget_local()
        assert engine.generate(prompt(TOKENS, 7)).tokens == reference(7)
    assert counted["lookups_failed"] >= 1
    service.master.kill()
    engine.forget_local()
    assert engine.generate(prompt(TOKENS, 7)).tokens == reference(7)
    assert counted["blocks_loaded"] == 0
    service.master.start()
    # The node tells the new master what it holds.
    generate_until_hit(engine, reference, 7)


def test_flipped_bits_are_never_read(
    engine: Engine, service: Service, reference: ReferenceTokens
) -> None:
    req_id = engine.add(prompt(TOKENS, 8))
    engine.step_until(lambda: engine.output_tokens(req_id) > 0)
    block = engine.first_block_bytes(req_id)
    engine.run(req_id)
    flip_on_device(service.device, block)
    # The node has the block in its DRAM as well until others take the place.
    for seed in range(9, 13):
        engine.generate(prompt(TOKENS, seed))
    engine.forget_local()
    counted = Counted(engine)
    assert engine.generate(prompt(TOKENS, 8)).tokens == reference(8)
    assert counted["blocks_load_failed|corrupt"] == 1
    # It was computed, and is stored again.
    generate_until_hit(engine, reference, 8)


def generate_until_hit(engine: Engine, reference: ReferenceTokens, seed: int) -> None:
    """Until a prompt comes from the store, whole; the tokens are right from the first."""
    end = time.monotonic() + RECOVERY_S
    while True:
        engine.forget_local()
        generated = engine.generate(prompt(TOKENS, seed))
        assert generated.tokens == reference(seed)
        if generated.cached_tokens == TOKENS:
            return
        assert time.monotonic() < end, "the store is not used again"


def flip_on_device(device: Path, contents: bytes) -> None:
    """Waits until a block lies on the device, and flips a bit of it there."""
    end = time.monotonic() + RECOVERY_S
    with device.open("r+b") as file:
        while True:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                place = mapped.find(contents)
            if place >= 0:
                break
            assert time.monotonic() < end, "the block is never flushed"
            time.sleep(0.2)
        file.seek(place + 100)
        file.write(bytes([contents[100] ^ 1]))
        file.flush()
