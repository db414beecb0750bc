"""Runs the grid: repetitions x tiers x arms x prefixes x sessions, two requests each.

    session   engine A: prefix + question 1      engine A (same) or B (cross): prefix + question 2

Right before the second request its engine answers a short prompt that is in no figure: in the same
arm it has just worked, in the cross arm it has slept, and what is compared is where the KV comes
from. Tiers take turns in an order that moves on by one with each repetition, and each starts with
new engines and a new region. Prompts are random tokens from one seed, the same for all tiers and
new for every session.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hymcache.bench.child_process import ChildFailed
from hymcache.bench.engine_process import BLOCK_TOKENS, EngineProcess
from hymcache.bench.prompt import random_prompt
from hymcache.bench.region_reuse.controls import measure_copy_paths, probe_region, region_start
from hymcache.bench.region_reuse.request_log import KIND, Arm, Cell, Request, Tier
from hymcache.bench.region_reuse.tiers import Engines, Place, TierMissing, running_engines
from hymcache.bench.samples import SampleLog, machine_context
from hymcache.bench.tiny_model import MID, kv_bytes_per_token, make_model
from hymcache.limits import GIB

ANSWER_TOKENS: Final = 4
QUESTION_TOKENS: Final = 32
_WARM_UP_TOKENS: Final = 300
_DRAIN_S: Final = 0.3
_COUNTERS: Final = ("external_prefix_cache_queries_total", "external_prefix_cache_hits_total")


@dataclass(frozen=True)
class ReuseOptions:
    """What a run does."""

    cache_dir: Path
    out_dir: Path
    region: Path
    tiers: tuple[Tier, ...] = tuple(Tier)
    prefixes: tuple[int, ...] = (512, 1024, 2048, 4096)
    sessions: int = 5
    repetitions: int = 3
    region_bytes: int = 2 * GIB
    prefault: bool = True
    model: Path | None = None  # default: MID with random weights
    dtype: str = "float32"
    devices: tuple[str, ...] = ()  # of GPUs, one for each engine
    seed: int = 1

    @property
    def samples_path(self) -> Path:
        """The raw requests of the run."""
        return self.out_dir / "requests.jsonl"

    @property
    def steps(self) -> int:
        """Sessions of all tiers, those of missing ones included."""
        return self.repetitions * len(self.tiers) * len(Arm) * len(self.prefixes) * self.sessions


def run_region_reuse(
    options: ReuseOptions, report: Callable[[str], None], advance: Callable[[], None]
) -> None:
    """Writes everything to `samples_path`.

    Raises:
        ChildFailed: an engine or a service failed.
    """
    place = Place(
        cache_dir=options.cache_dir,
        log_dir=options.out_dir / "logs",
        model=options.model or make_model(MID, options.cache_dir),
        dtype=options.dtype,
        devices=options.devices,
        region=options.region,
        region_bytes=options.region_bytes,
        prefault=options.prefault,
        tokens_max=max(options.prefixes) + QUESTION_TOKENS + ANSWER_TOKENS + 64,
    )
    log = SampleLog(options.samples_path, machine_context())
    log.add(
        "setup",
        model=place.model.name,
        kv_bytes_per_token=kv_bytes_per_token(place.model, options.dtype),
        block_tokens=BLOCK_TOKENS,
        options={name: _plain(value) for name, value in asdict(options).items()},
    )
    missing: set[Tier] = set()
    for repetition in range(options.repetitions):
        turn = repetition % len(options.tiers)
        for tier in (*options.tiers[turn:], *options.tiers[:turn]):
            if tier not in missing:
                report(f"{tier}: starting two engines, repetition {repetition + 1}")
                try:
                    with running_engines(tier, place, repetition) as engines:
                        _check_fresh(tier, log, engines)
                        _Turn(options, log, tier, repetition, engines).run(report, advance)
                        _check_region(tier, place, log, options.seed + repetition)
                    continue
                except TierMissing as error:
                    missing.add(tier)
                    log.add("skipped_tier", tier=tier, reason=str(error))
            for _ in range(options.steps // (options.repetitions * len(options.tiers))):
                advance()


def _check_fresh(tier: Tier, log: SampleLog, engines: Engines) -> None:
    if tier is not Tier.T4:
        return
    logs = (engines.first.log_path, engines.second.log_path)
    start = region_start(*logs)
    log.add("region_start", **start)
    if start != {"formatted": 1, "attached": 1}:
        raise ChildFailed(f"the region is not fresh: {start}; see {logs[0]}", logs[0])


def _check_region(tier: Tier, place: Place, log: SampleLog, seed: int) -> None:
    if tier is Tier.T4:
        log.add("never_stored", **probe_region(place.region, random.Random(seed)))
        for measured in measure_copy_paths(place.region):
            log.add("copy_path", **measured)


class _Turn:
    """One tier in one repetition."""

    def __init__(
        self,
        options: ReuseOptions,
        log: SampleLog,
        tier: Tier,
        repetition: int,
        engines: Engines,
    ) -> None:
        self._options = options
        self._log = log
        self._tier = tier
        self._repetition = repetition
        self._engines = engines

    def run(self, report: Callable[[str], None], advance: Callable[[], None]) -> None:
        for seed, engine in enumerate((self._engines.first, self._engines.second)):
            # Each computes one of its own, so that the second one's first load is in the figures.
            engine.generate(random_prompt(random.Random(seed), _WARM_UP_TOKENS))
        for prefix in self._options.prefixes:
            for session in range(self._options.sessions):
                for arm in Arm:
                    report(
                        f"{self._tier}, repetition {self._repetition + 1}: {prefix} tokens, "
                        f"session {session + 1} of {self._options.sessions}, {arm}"
                    )
                    self._session(prefix, session, arm)
                    advance()

    def _session(self, prefix: int, session: int, arm: Arm) -> None:
        rng = random.Random(
            f"{self._options.seed} {self._repetition} {prefix} {session} {arm.value}"
        )
        shared = random_prompt(rng, prefix)
        for order in (1, 2):
            question = random_prompt(rng, QUESTION_TOKENS)
            second = arm is Arm.CROSS and order == 2
            engine = self._engines.second if second else self._engines.first
            if order == 2:
                engine.generate(random_prompt(rng, QUESTION_TOKENS), drain_s=_DRAIN_S)
            cell = Cell(self._repetition, self._tier, arm, prefix, session)
            self._request(engine, [*shared, *question], cell, order)

    def _request(self, engine: EngineProcess, prompt: list[int], cell: Cell, order: int) -> None:
        before = self._counters()
        answer = engine.generate(prompt, tokens_max=ANSWER_TOKENS, drain_s=_DRAIN_S)
        queries, hits = (
            int(after - was) for after, was in zip(self._counters(), before, strict=True)
        )
        request = Request(
            *cell,
            order=order,
            engine="a" if engine is self._engines.first else "b",
            prompt_tokens=len(prompt),
            ttft_s=answer.ttft_s,
            cached_tokens=answer.cached_tokens,
            external_queries=queries,
            external_hits=hits,
            tokens=answer.tokens,
        )
        self._log.add(KIND, **request.fields())

    def _counters(self) -> tuple[float, ...]:
        totals = [0.0] * len(_COUNTERS)
        for engine in (self._engines.first, self._engines.second):
            metrics = engine.metrics("external_prefix_cache")
            for index, name in enumerate(_COUNTERS):
                totals[index] += sum(v for key, v in metrics.items() if key.endswith(name))
        return tuple(totals)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(part) if isinstance(part, str) else part for part in value]
    return str(value) if isinstance(value, Path) else value
