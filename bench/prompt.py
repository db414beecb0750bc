"""Prompts of random tokens."""

from __future__ import annotations

import random
from typing import Final

from hymcache.bench.tiny_model import FIRST_PLAIN_TOKEN

_LAST_PLAIN_TOKEN: Final = 999  # of a vocabulary of 1,024


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids, none of them special."""
    return rng.choices(range(FIRST_PLAIN_TOKEN, _LAST_PLAIN_TOKEN + 1), k=tokens)
