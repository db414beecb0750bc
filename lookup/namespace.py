"""Namespaces: what the bytes of a KV block depend on beside its tokens.

Two engines share blocks exactly when their namespaces are equal, so every fact that changes the
bytes belongs in: model, dtype, layout, parallel rank, hash algorithm, ... The service itself
knows nothing of models; it sees the 64-bit fingerprint.

The fingerprint is the first 8 bytes, little-endian, of SHA-256 over the facts in order of their
names, each as `<length of name>:<name><length of value>:<value>` in UTF-8 with the lengths in
decimal: no two different sets of facts have the same encoding. A fingerprint of 0 becomes 1,
because 0 stands for "no namespace" on the wire.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NewType, Self

Fingerprint = NewType("Fingerprint", int)
"""64 bits that stand for a namespace; never 0."""

# The version of this file's and keys.py's encodings. It is a fact of every namespace, so a change
# here makes old objects unreachable instead of wrong.
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """A fingerprint, and the facts it was made from as one readable line."""

    fingerprint: Fingerprint
    name: str

    @classmethod
    def of(cls, facts: Mapping[str, str | int]) -> Self:
        """The namespace of these facts. Their order does not matter; numbers count as text."""
        texts = {name: str(value) for name, value in facts.items()}
        if "format" in texts:
            raise ValueError('the fact "format" is the encoding\'s own')
        texts["format"] = str(FORMAT_VERSION)
        encoding = b"".join(_measured(part) for item in sorted(texts.items()) for part in item)
        first = int.from_bytes(hashlib.sha256(encoding).digest()[:8], "little")
        name = " ".join(f"{fact}={value}" for fact, value in texts.items())
        return cls(Fingerprint(first or 1), name)


def _measured(text: str) -> bytes:
    raw = text.encode()
    return b"%d:%b" % (len(raw), raw)
