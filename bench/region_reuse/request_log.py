"""What is noted of every request: one line of `requests.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from hymcache.bench.samples import Sample, of_kind

KIND: Final = "region_reuse"


class Tier(StrEnum):
    """Where KV can be reused from; the names are the paper's."""

    T0 = "T0"
    T1 = "T1"
    T2 = "T2"
    T3 = "T3"
    T4 = "T4"


TIER_MEANINGS: Final = {
    Tier.T0: "no reuse",
    Tier.T1: "the engine's own prefix cache",
    Tier.T2: "vLLM's CPU offload",
    Tier.T3: "HyMCache, remote",
    Tier.T4: "shared region",
}


class Arm(StrEnum):
    """Which engine the second request of a session goes to."""

    SAME = "same"
    CROSS = "cross"


class Cell(NamedTuple):
    """Where in the grid a session is."""

    repetition: int
    tier: Tier
    arm: Arm
    prefix_tokens: int
    session: int


@dataclass(frozen=True)
class Request:
    """One request of a session: the first one computes the prefix, the second one reuses it.

    `prefix_tokens` is the nominal length, `prompt_tokens` that with the question;
    `external_queries` and `external_hits` are tokens, of both engines' counters together.
    """

    repetition: int
    tier: Tier
    arm: Arm
    prefix_tokens: int
    session: int
    order: int
    engine: str
    prompt_tokens: int
    ttft_s: float
    cached_tokens: int
    external_queries: int
    external_hits: int
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The request that a line tells of."""
        values: dict[str, Any] = {name: sample[name] for name in cls.__dataclass_fields__}
        return cls(
            **{
                **values,
                "tier": Tier(values["tier"]),
                "arm": Arm(values["arm"]),
                "tokens": tuple(values["tokens"]),
            }
        )

    def fields(self) -> dict[str, object]:
        """What a line tells."""
        return asdict(self)

    @property
    def hit_fraction(self) -> float:
        """The part of the prompt that was not computed."""
        return self.cached_tokens / self.prompt_tokens


def requests_of(samples: Iterable[Sample]) -> list[Request]:
    """All requests, in the order in which they were made."""
    return [Request.of(sample) for sample in of_kind(samples, KIND)]
