from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hymcache.lookup.keys import KEY_BYTES, object_key, object_keys
from hymcache.lookup.namespace import FORMAT_VERSION, Fingerprint, Namespace

_facts = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "format"), st.text(max_size=8), max_size=4
)


def test_the_fingerprint_is_that_of_the_written_encoding() -> None:
    # Lengths are of the UTF-8, in bytes; the version is a fact like any other.
    encoding = b"6:format1:15:model8:Qwen-\xc3\xa9B"
    assert FORMAT_VERSION == 1
    expected = int.from_bytes(hashlib.sha256(encoding).digest()[:8], "little")
    assert Namespace.of({"model": "Qwen-éB"}).fingerprint == expected


def test_golden_fingerprint_and_key() -> None:
    # Objects stored by one release must be found by the next.
    space = Namespace.of({"model": "m", "tp_rank": 3})
    assert space.name == "model=m tp_rank=3 format=1"
    assert f"{space.fingerprint:016x}" == "53f192f5e567fe3c"
    key = object_key(space.fingerprint, b"\x07" * 32)
    assert key.hex() == "2755c6b03160b0a2f12078d236265de1"


def test_a_key_is_half_a_sha256() -> None:
    fingerprint = Fingerprint(0x0102030405060708)
    whole = hashlib.sha256(bytes([8, 7, 6, 5, 4, 3, 2, 1]) + b"hash").digest()
    assert object_key(fingerprint, b"hash") == whole[:KEY_BYTES]


def test_keys_come_in_the_order_of_the_hashes() -> None:
    hashes = [bytes([i]) * 32 for i in range(5)]
    keys = object_keys(Fingerprint(1), hashes)
    assert keys == b"".join(object_key(Fingerprint(1), h) for h in hashes)
    assert object_keys(Fingerprint(1), []) == b""


@given(_facts, _facts)
def test_different_facts_have_different_fingerprints(a: dict[str, str], b: dict[str, str]) -> None:
    assert (Namespace.of(a).fingerprint == Namespace.of(b).fingerprint) == (a == b)


def test_facts_do_not_run_into_each_other() -> None:
    assert Namespace.of({"a": "b", "c": "d"}) != Namespace.of({"a": "b1:c1:d"})
    assert Namespace.of({"a": 1}).fingerprint == Namespace.of({"a": "1"}).fingerprint


def test_the_encodings_own_fact_is_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        Namespace.of({"format": 2})
