from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hymcache.quantity import format_size, parse_duration_s, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("5GiB", 5 << 30),
        ("5 gib", 5 << 30),
        ("1.5KiB", 1536),
        ("500MB", 500_000_000),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_that_people_write(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a size"),
        ("ten", "not a size"),
        (-1, "not a size"),
        ("-1GiB", "not a size"),
        ("1e9", "not a size"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
        ("5G", '"G" is not a unit of size'),
        ("1.3B", "not a whole number"),
        ("9" * 19, "not a size"),
    ],
)
def test_what_is_no_size_is_told(text: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_formatted_size_reads_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        (10, 10.0),
        (0.25, 0.25),
        ("10", 10.0),
        ("10s", 10.0),
        ("250ms", 0.25),
        ("3us", 3e-6),
        ("2min", 120.0),
        ("1h", 3600.0),
    ],
)
def test_durations_that_people_write(text: object, duration_s: float) -> None:
    assert parse_duration_s(text) == duration_s


def test_a_bare_number_has_the_unit_of_its_key() -> None:
    assert parse_duration_s(3000, bare_unit="ms") == 3.0
    assert parse_duration_s("3s", bare_unit="ms") == 3.0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", float("nan"), float("inf"), True, None])
def test_what_is_no_duration_is_told(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration_s(text)


def test_an_unknown_unit_of_time_is_told() -> None:
    with pytest.raises(ValueError, match='"days" is not a unit of time'):
        parse_duration_s("3days")
