"""TTFT of a prompt whose KV another engine computed: two engines side by side.

For every prompt, in turn for each system: engine A computes it (cold) and its connector stores
it; engine B, which never saw it, gets it through the system (remote); B once more, from its own
prefix cache (local). Tokens are drawn from a seeded generator and are new every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache.bench.cost import process_cpu_s
from hymcache.bench.engine_process import EngineProcess
from hymcache.bench.mooncake_peer import PeerMissing
from hymcache.bench.prompt import random_prompt
from hymcache.bench.samples import SampleLog, machine_context
from hymcache.bench.tiny_model import MID, make_model
from hymcache.bench.transport_choice import TransportChoice
from hymcache.bench.ttft_system import (
    Peer,
    Place,
    RunningSystem,
    hymcache_system,
    peer_system,
)

ANSWER_TOKENS: Final = 8
_WARM_UP_TOKENS: Final = 300
_DRAIN_S: Final = 0.5  # time for an engine's connector to store what it computed

Report = Callable[[str], None]


@dataclass(frozen=True)
class TtftOptions:
    """What a run does; `ours` False times the peers alone."""

    cache_dir: Path
    out_dir: Path
    tokens: tuple[int, ...] = (2000, 8000)
    repetitions: int = 5
    peers: tuple[Peer, ...] = ()
    ours: bool = True
    transport: TransportChoice = TransportChoice.AUTO  # of ours
    seed: int = 1

    @property
    def samples_path(self) -> Path:
        """The raw samples of the run."""
        return self.out_dir / "ttft.jsonl"

    @property
    def steps(self) -> int:
        """Prompts of all systems, as `run_ttft` reports them, peers that are missing included."""
        return len(self.tokens) * self.repetitions * (len(self.peers) + self.ours)


@dataclass(frozen=True)
class EnginePair:
    """A system with its engines, ready."""

    system: RunningSystem
    first: EngineProcess
    second: EngineProcess


def run_ttft(options: TtftOptions, report: Report, advance: Callable[[], None]) -> dict[str, str]:
    """Writes samples to `samples_path`; returns why systems were left out, by name.

    Raises:
        ChildFailed: HyMCache or an engine of its failed.
    """
    place = Place(
        cache_dir=options.cache_dir,
        log_dir=options.out_dir / "logs",
        model=make_model(MID, options.cache_dir),
    )
    log = SampleLog(options.samples_path, machine_context())
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        systems = (
            [stack.enter_context(hymcache_system(place, options.transport))] if options.ours else []
        )
        for peer in options.peers:
            report(f"starting {peer}")
            try:
                systems.append(stack.enter_context(peer_system(peer, place)))
            except PeerMissing as error:
                missing[peer] = str(error)
        pairs = []
        for system in systems:
            report(f"starting two engines with {system.name}")
            pairs.append(stack.enter_context(_engines(system, place.log_dir)))
        _measure(pairs, options, log, report, advance)
    return missing


@contextmanager
def _engines(system: RunningSystem, log_dir: Path) -> Iterator[EnginePair]:
    with (
        EngineProcess(system.options("a"), log_dir) as first,
        EngineProcess(system.options("b"), log_dir) as second,
    ):
        for engine in (first, second):
            engine.open()
        for engine in (first, second):
            engine.wait_open()
        yield EnginePair(system, first, second)


def _measure(
    pairs: Sequence[EnginePair],
    options: TtftOptions,
    log: SampleLog,
    report: Report,
    advance: Callable[[], None],
) -> None:
    rng = random.Random(options.seed)
    for pair in pairs:
        for engine in (pair.first, pair.second):
            engine.generate(random_prompt(rng, _WARM_UP_TOKENS), drain_s=_DRAIN_S)
    for tokens in options.tokens:
        for repetition in range(options.repetitions):
            for pair in pairs:
                report(
                    f"{pair.system.name}: {tokens} tokens, {repetition + 1} of "
                    f"{options.repetitions}"
                )
                _measure_prompt(pair, random_prompt(rng, tokens), repetition, log)
                advance()


def _measure_prompt(pair: EnginePair, prompt: list[int], repetition: int, log: SampleLog) -> None:
    expected: tuple[int, ...] | None = None
    for phase, engine in (("cold", pair.first), ("remote", pair.second), ("local", pair.second)):
        server_before_s = sum(map(process_cpu_s, pair.system.server_pids))
        answer = engine.generate(prompt, tokens_max=ANSWER_TOKENS, drain_s=_DRAIN_S)
        expected = expected or answer.tokens
        log.add(
            "ttft",
            system=pair.system.name,
            phase=phase,
            tokens=len(prompt),
            kv_bytes=len(prompt) * MID.kv_bytes_per_token,
            repetition=repetition,
            ttft_s=answer.ttft_s,
            ttft_cpu_s=answer.ttft_cpu_s,
            total_s=answer.total_s,
            total_cpu_s=answer.total_cpu_s,
            server_cpu_s=sum(map(process_cpu_s, pair.system.server_pids)) - server_before_s,
            cached_tokens=answer.cached_tokens,
            tokens_equal=answer.tokens == expected,
        )
