"""The main job: an engine answers a long prompt with the KV that another engine computed.

Engine A computes a long prompt, and its connector stores the KV. Engine B, another process, then
gets the same prompt and, its own prefix cache dropped, a second turn of the conversation. What
both must answer is known from an engine without the connector, which B's process runs first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hymcache.bench.engine_process import EngineOptions, EngineProcess, Generation
from hymcache.bench.prompt import random_prompt
from hymcache.errors import HymcacheError

BLOCK_TOKENS: Final = 32
_ANSWER_TOKENS: Final = 16
_QUESTION_TOKENS: Final = 48
_WARM_UP_TOKENS: Final = 200
_SAVE_POLLS_MAX: Final = 40
_SAVE_POLL_S: Final = 0.25
_METRICS: Final = "vllm:hymcache_"

Report = Callable[[str, str], None]  # an engine's name, and what it is doing


class KvNotShared(HymcacheError):
    """Engine B did not take A's KV, or its answer is another; the text says what was seen."""


@dataclass(frozen=True)
class KvCounts:
    """What an engine's connector did, from the engine's own metrics."""

    blocks_asked: int = 0
    blocks_hit: int = 0
    blocks_loaded: int = 0
    blocks_saved: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0
    transports: tuple[str, ...] = ()  # that loads used


@dataclass(frozen=True)
class Turn:
    """One prompt: how an engine without the connector took it, and how B did with remote KV."""

    name: str
    prompt_tokens: int
    computed: Generation
    remote: Generation
    counts: KvCounts

    @property
    def tokens_agree(self) -> bool:
        """Whether B's greedy tokens are those of the engine without the connector."""
        return self.remote.tokens == self.computed.tokens


@dataclass(frozen=True)
class SharedPrompt:
    """What came of it. `storing` is A's answer, with the connector and nothing to load."""

    storing: Generation
    stored: KvCounts
    turns: tuple[Turn, ...]

    def check(self) -> None:
        """Raises KvNotShared unless B loaded A's blocks and all answers agree."""
        expected = self.turns[0].computed.tokens
        if self.storing.tokens != expected:
            raise KvNotShared("engine A answers otherwise than an engine without the connector")
        for turn in self.turns:
            counts = turn.counts
            if counts.blocks_loaded == 0:
                raise KvNotShared(
                    f"{turn.name}: engine B loaded none of A's blocks "
                    f"(asked {counts.blocks_asked}, hit {counts.blocks_hit})"
                )
            if counts.blocks_loaded < counts.blocks_hit:
                raise KvNotShared(
                    f"{turn.name}: engine B loaded {counts.blocks_loaded} blocks of the "
                    f"{counts.blocks_hit} that were hit"
                )
            if not turn.tokens_agree:
                raise KvNotShared(
                    f"{turn.name}: engine B's tokens are not those of an engine without the "
                    "connector"
                )


def share_prompt(
    model: Path,
    kv_transfer_config: Mapping[str, Any],
    log_dir: Path,
    *,
    prompt_tokens: int,
    report: Report,
    seed: int = 7,
) -> SharedPrompt:
    """Runs the job with two engines, each in a process of its own.

    Raises:
        ChildFailed: an engine did not start, or died.
    """
    rng = random.Random(seed)
    with (
        EngineProcess(_options("A", model, kv_transfer_config), log_dir) as first,
        EngineProcess(_options("B", model, kv_transfer_config), log_dir) as second,
    ):

        def show() -> None:
            report("A", first.poll())
            report("B", second.poll())

        first.open()  # starts beside what B's process computes
        prompts, computed = _compute(second, random_prompt(rng, prompt_tokens), rng, report, show)
        second.open()
        first.wait_open(on_idle=show)
        report("A", f"computing {prompt_tokens} tokens")
        _warm_up(first, rng)
        storing = first.generate(prompts[0], tokens_max=_ANSWER_TOKENS)
        report("A", "storing the KV")
        stored = _wait_saved(first, prompt_tokens // BLOCK_TOKENS)
        report("A", f"done: {stored.blocks_saved} blocks stored")
        second.wait_open()
        _warm_up(second, rng)
        turns = []
        for name, prompt, reference in zip(
            ("same prompt", "second turn"), prompts, computed, strict=True
        ):
            report("B", f"{name}: {len(prompt)} tokens")
            turns.append(_take_turn(second, name, prompt, reference))
        report("B", "done")
    return SharedPrompt(storing, stored, tuple(turns))


def _options(name: str, model: Path, kv_transfer_config: Mapping[str, Any]) -> EngineOptions:
    return EngineOptions(
        name=name,
        model=model,
        kv_transfer_config=dict(kv_transfer_config),
        block_tokens=BLOCK_TOKENS,
        kv_cache_bytes=256 << 20,
    )


def _compute(
    engine: EngineProcess,
    prompt: list[int],
    rng: random.Random,
    report: Report,
    show: Callable[[], object],
) -> tuple[list[list[int]], list[Generation]]:
    """Both prompts, and what an engine without the connector answers to them."""
    engine.open(with_connector=False)
    engine.wait_open(on_idle=show)
    _warm_up(engine, rng)
    report("B", "computing the answers without the connector")
    first = engine.generate(prompt, tokens_max=_ANSWER_TOKENS, drain_s=0.0)
    second_prompt = [*prompt, *first.tokens, *random_prompt(rng, _QUESTION_TOKENS)]
    engine.reset_prefix_cache()
    second = engine.generate(second_prompt, tokens_max=_ANSWER_TOKENS, drain_s=0.0)
    engine.close()
    return [prompt, second_prompt], [first, second]


def _warm_up(engine: EngineProcess, rng: random.Random) -> None:
    engine.generate(random_prompt(rng, _WARM_UP_TOKENS), tokens_max=2)


def _wait_saved(engine: EngineProcess, blocks: int) -> KvCounts:
    # What was saved before, of the warm-up, counts too: more than enough is enough.
    for _ in range(_SAVE_POLLS_MAX):
        counts = read_counts(engine)
        if counts.blocks_saved >= blocks:
            break
        engine.drain(_SAVE_POLL_S)
    return read_counts(engine)


def _take_turn(engine: EngineProcess, name: str, prompt: list[int], computed: Generation) -> Turn:
    engine.reset_prefix_cache()
    before = read_counts(engine)
    remote = engine.generate(prompt, tokens_max=_ANSWER_TOKENS)
    return Turn(name, len(prompt), computed, remote, _difference(read_counts(engine), before))


def read_counts(engine: EngineProcess) -> KvCounts:
    """What the engine's connector has done since the engine's process started."""
    totals: dict[tuple[str, str], float] = {}
    transports = set()
    for sample in engine.metric_samples(_METRICS):
        name = sample["name"].removeprefix(_METRICS).removesuffix("_total")
        direction = sample["labels"].get("direction", "")
        totals[name, direction] = totals.get((name, direction), 0.0) + sample["value"]
        if name == "bytes" and direction == "load" and sample["value"] > 0:
            transports.add(sample["labels"]["transport"])
    return KvCounts(
        blocks_asked=int(totals.get(("blocks_asked", ""), 0)),
        blocks_hit=int(totals.get(("blocks_hit", ""), 0)),
        blocks_loaded=int(totals.get(("blocks_loaded", ""), 0)),
        blocks_saved=int(totals.get(("blocks_saved", ""), 0)),
        bytes_loaded=int(totals.get(("bytes", "load"), 0)),
        bytes_saved=int(totals.get(("bytes", "save"), 0)),
        transports=tuple(sorted(transports)),
    )


def _difference(after: KvCounts, before: KvCounts) -> KvCounts:
    return KvCounts(
        blocks_asked=after.blocks_asked - before.blocks_asked,
        blocks_hit=after.blocks_hit - before.blocks_hit,
        blocks_loaded=after.blocks_loaded - before.blocks_loaded,
        blocks_saved=after.blocks_saved - before.blocks_saved,
        bytes_loaded=after.bytes_loaded - before.bytes_loaded,
        bytes_saved=after.bytes_saved - before.bytes_saved,
        transports=after.transports,
    )
