from __future__ import annotations

from pathlib import Path

from hymcache.bench.samples import SampleLog, machine_context, of_kind, read_samples


def test_samples_come_back_in_order_and_with_their_context(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "new" / "raw.jsonl", {"cpu": "x"})
    log.add("copy", case="shm_get_16m", cpu_s_per_gb=0.1)
    log.add("lookup", p50_us=9.5)
    samples = read_samples(log.path)
    assert [sample["kind"] for sample in samples] == ["copy", "lookup"]
    assert of_kind(samples, "lookup")[0]["p50_us"] == 9.5
    assert all(sample["context"] == {"cpu": "x"} for sample in samples)


def test_a_new_run_does_not_append_to_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    SampleLog(path, {}).add("copy")
    SampleLog(path, {})
    assert read_samples(path) == []


def test_the_context_names_the_machine_and_the_versions() -> None:
    context = machine_context()
    assert {"cpu", "cpus", "kernel", "python", "hymcache", "numpy"} <= context.keys()
