from __future__ import annotations

import dataclasses

import pytest

from hymcache.bench.engine_process import Generation
from hymcache.bench.shared_prompt import KvCounts, KvNotShared, SharedPrompt, Turn

ANSWER = Generation(
    ttft_s=0.5,
    ttft_cpu_s=0.9,
    total_s=0.6,
    total_cpu_s=1.0,
    cached_tokens=0,
    tokens=(5, 6, 7),
    finish_reason="length",
)
OTHER_ANSWER = dataclasses.replace(ANSWER, tokens=(5, 6, 8))
ALL_LOADED = KvCounts(blocks_asked=10, blocks_hit=10, blocks_loaded=10, transports=("shm",))


def outcome(turn: Turn, storing: Generation = ANSWER) -> SharedPrompt:
    return SharedPrompt(storing, KvCounts(blocks_saved=10), (turn,))


def turn(remote: Generation = ANSWER, counts: KvCounts = ALL_LOADED) -> Turn:
    return Turn("the same prompt", 320, ANSWER, remote, counts)


def test_blocks_loaded_and_tokens_equal_is_what_is_wanted() -> None:
    outcome(turn()).check()


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (outcome(turn(), storing=OTHER_ANSWER), "engine A answers otherwise"),
        (outcome(turn(remote=OTHER_ANSWER)), "engine B's tokens are not those"),
        (outcome(turn(counts=KvCounts(blocks_asked=10))), r"loaded none .*asked 10, hit 0"),
        (
            outcome(turn(counts=dataclasses.replace(ALL_LOADED, blocks_loaded=9))),
            "loaded 9 blocks of the 10",
        ),
    ],
)
def test_anything_else_is_told_in_one_line(shared: SharedPrompt, message: str) -> None:
    with pytest.raises(KvNotShared, match=message) as caught:
        shared.check()
    assert "\n" not in str(caught.value)
