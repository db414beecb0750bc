"""The tokens that are right: those of an engine that never had a connector."""

from __future__ import annotations

from pathlib import Path

from tests.connector.real_engine import Engine, prompt

# All prompts of the engine tests have this length: 10 blocks of 32 tokens.
TOKENS = 320
_SEEDS = 16


class ReferenceTokens:
    """For the prompts of the engine tests, by seed; made by one engine, once."""

    def __init__(self, model: Path) -> None:
        engine = Engine(model, None)
        prompts = [prompt(TOKENS, seed) for seed in range(_SEEDS)]
        self._tokens = engine.generate_all(prompts)
        (self.second_turn,) = engine.generate_all([second_turn(self._tokens[0])])
        engine.close()

    def __call__(self, seed: int) -> list[int]:
        return self._tokens[seed]


def second_turn(answer: list[int]) -> list[int]:
    """The first prompt, the answer to it, and a further question."""
    return [*prompt(TOKENS, 0), *answer, *prompt(70, 100)]
