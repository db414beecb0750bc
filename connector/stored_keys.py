"""What this engine believes to be in the store, so that it need not offer it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from hymcache.lookup.keys import KEY_BYTES

# 131,072 keys cost about 20 MB of the scheduler's memory and cover 2 TiB of 16 MiB blocks.
_KEYS_MAX: Final = 1 << 17
# The store may have evicted it since. An offer of what is stored costs one round trip and tells
# the store that it is still of use.
_BELIEF_S: Final = 600.0


class StoredKeys:
    """A bounded memory of keys, the latest kept, each believed for ten minutes."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        keys_max: int = _KEYS_MAX,
        belief_s: float = _BELIEF_S,
    ) -> None:
        self._clock = clock
        self._keys_max = keys_max
        self._belief_s = belief_s
        # In order of their times: a key that is added again moves to the end.
        self._added_at: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._added_at)

    def add(self, keys: bytes) -> None:
        """Remembers keys, 16 bytes each."""
        now = self._clock()
        for key in _each(keys):
            self._added_at.pop(key, None)
            self._added_at[key] = now
        while len(self._added_at) > self._keys_max:
            del self._added_at[next(iter(self._added_at))]

    def discard(self, keys: bytes) -> None:
        """Forgets keys that turned out to be missing."""
        for key in _each(keys):
            self._added_at.pop(key, None)

    def leading(self, keys: bytes) -> int:
        """How many of the keys, from the first on, are believed to be stored."""
        oldest = self._clock() - self._belief_s
        count = 0
        for key in _each(keys):
            if self._added_at.get(key, oldest - 1) < oldest:
                break
            count += 1
        return count

    def clear(self) -> None:
        """Forgets all."""
        self._added_at.clear()


def _each(keys: bytes) -> Iterator[bytes]:
    return (keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES))
