"""One real engine in a process of its own; a few blocks of KV through files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hymcache.bench.cache_folder import default_cache_dir
from hymcache.bench.child_process import ChildFailed
from hymcache.bench.engine_process import EngineOptions, EngineProcess
from hymcache.bench.prompt import random_prompt
from hymcache.bench.tiny_model import TINY, make_model

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def example_config(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    options = EngineOptions(
        name="test",
        model=make_model(TINY, default_cache_dir()),
        kv_transfer_config=example_config(folder / "kv"),
        kv_cache_bytes=64 << 20,
        tokens_max=2048,
    )
    with EngineProcess(options, folder) as process:
        yield process


def test_one_process_runs_an_engine_without_and_one_with_a_connector(
    engine: EngineProcess,
) -> None:
    prompt = random_prompt(random.Random(3), 200)
    engine.open(with_connector=False)
    assert engine.wait_open()["cpu_s"] > 0
    computed = engine.generate(prompt)
    assert (len(computed.tokens), computed.finish_reason) == (8, "length")
    assert 0 < computed.ttft_s <= computed.total_s
    assert computed.cached_tokens == 0
    assert engine.generate(prompt).cached_tokens == 192
    assert engine.reset_prefix_cache()
    assert engine.generate(prompt).cached_tokens == 0
    engine.close()

    engine.open()
    engine.wait_open()
    engine.generate(prompt)
    assert engine.reset_prefix_cache()
    loaded = engine.generate(prompt)
    assert loaded.cached_tokens == 192
    assert loaded.tokens == computed.tokens
    assert engine.metrics("external_prefix_cache_hits_total")
    engine.close()


def test_a_failed_start_is_told_with_the_log(engine: EngineProcess) -> None:
    broken = EngineOptions(
        name="broken", model=engine.options.model, kv_transfer_config={"kv_connector": "Nowhere"}
    )
    with EngineProcess(broken, engine.log_path.parent) as process:
        process.open()
        with pytest.raises(ChildFailed, match="engine broken") as caught:
            process.wait_open()
    assert caught.value.log_lines


def test_an_engine_that_is_starting_ends_at_once(engine: EngineProcess) -> None:
    process = EngineProcess(engine.options, engine.log_path.parent / "aborted")
    process.open()
    process.poll()
    process.end()
    process.end()
    with pytest.raises(ChildFailed):
        process.open()
