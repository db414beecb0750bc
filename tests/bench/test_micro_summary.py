from __future__ import annotations

import pytest

from hymcache.bench.micro_summary import copy_costs, micro_numbers
from hymcache.bench.samples import Sample


def copy(case: str, side: str, round_index: int, cost: float) -> Sample:
    return {
        "kind": "copy",
        "case": case,
        "side": side,
        "round": round_index,
        "cpu_s_per_gb": cost,
    }


def lookup(side: str, round_index: int, p50_us: float, server_cpu_us: float) -> Sample:
    return {
        "kind": "lookup",
        "side": side,
        "round": round_index,
        "p50_us": p50_us,
        "server_cpu_us": server_cpu_us,
    }


def test_a_copy_is_the_median_of_the_ratios_within_rounds() -> None:
    # The machine becomes three times slower in the second round: the ratio does not notice.
    samples = [
        copy("shm_get_16m", "reference", 0, 0.10),
        copy("shm_get_16m", "plain", 0, 0.06),
        copy("shm_get_16m", "reference", 1, 0.30),
        copy("shm_get_16m", "plain", 1, 0.21),
        copy("shm_get_16m", "plain", 2, 0.05),
        copy("shm_get_16m", "reference", 2, 0.10),
    ]
    assert micro_numbers(samples)["shm_get_16m"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("side", "name"),
    [
        ("plain", "tcp_put_1m"),
        ("crc", "tcp_put_1m_crc"),
        ("device", "tcp_put_1m_device"),
        ("flushed", "tcp_put_1m_flushed"),
    ],
)
def test_each_side_has_a_name_of_its_own(side: str, name: str) -> None:
    samples = [copy("tcp_put_1m", "reference", 0, 0.4), copy("tcp_put_1m", side, 0, 0.2)]
    assert micro_numbers(samples)[name] == pytest.approx(0.5)


def test_a_round_without_its_reference_is_refused() -> None:
    with pytest.raises(KeyError):
        micro_numbers([copy("shm_get_16m", "plain", 0, 0.06)])


def test_costs_keep_the_order_of_cases_and_all_rounds() -> None:
    samples = [
        copy("shm_put_1m", "reference", 0, 1.0),
        copy("shm_get_1m", "reference", 0, 2.0),
        copy("shm_put_1m", "reference", 1, 3.0),
    ]
    costs = copy_costs(samples)
    assert list(costs) == ["shm_put_1m", "shm_get_1m"]
    assert costs["shm_put_1m"] == {"reference": [1.0, 3.0]}


def test_lookup_is_compared_with_the_echo_of_its_round() -> None:
    samples = [
        lookup("echo", 0, 10.0, 5.0),
        lookup("ours", 0, 12.0, 9.0),
        lookup("ours", 1, 60.0, 11.0),
        lookup("echo", 1, 50.0, 6.0),
        lookup("ours", 2, 99.0, 99.0),  # a round that broke off
    ]
    numbers = micro_numbers(samples)
    assert numbers["lookup32_p50_ratio"] == pytest.approx(1.2)
    assert numbers["lookup32_server_us"] == pytest.approx(10.0)


def test_metadata_is_growth_for_each_object() -> None:
    sample: Sample = {
        "kind": "metadata",
        "objects": 1000,
        "resident_before_bytes": 50_000,
        "resident_after_bytes": 118_000,
    }
    assert micro_numbers([sample])["metadata_bytes_per_object"] == pytest.approx(68.0)


def test_what_was_not_measured_is_none() -> None:
    assert micro_numbers([]) == {
        "lookup32_server_us": None,
        "lookup32_p50_ratio": None,
        "metadata_bytes_per_object": None,
    }


def moved(case: str, round_index: int, wall_s: float) -> Sample:
    return {
        "kind": "copy",
        "case": case,
        "side": "plain",
        "round": round_index,
        "cpu_s_per_gb": 0.1,
        "moved_bytes": 10**9,
        "wall_s": wall_s,
    }


def test_rdma_is_told_as_a_part_of_the_line_rate() -> None:
    samples = [{"kind": "port", "name": "mlx5_0/1", "bits_per_second": 100_000_000_000}]
    for round_index, wall_s in enumerate((0.1, 0.16, 0.2)):
        samples.append(moved("verbs_get_16m", round_index, wall_s))
        samples.append(copy("verbs_get_16m", "reference", round_index, 0.05))
    numbers = micro_numbers(samples)
    assert numbers["verbs_get_16m_of_line_rate"] == pytest.approx(0.5)
    assert numbers["verbs_get_16m"] == pytest.approx(2.0)


def test_without_the_speed_of_the_port_there_is_no_line_rate() -> None:
    samples = [{"kind": "port", "name": "rxe0/1", "bits_per_second": 0}]
    samples += [
        moved("verbs_get_16m", 0, 0.1),
        copy("verbs_get_16m", "reference", 0, 0.0),  # and nothing to compare the cost with
    ]
    assert not [name for name in micro_numbers(samples) if name.startswith("verbs_")]
