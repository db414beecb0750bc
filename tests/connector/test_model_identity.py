from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file

from hymcache.connector.model_identity import config_digest, draft_identity, weights_identity

pytestmark = pytest.mark.vllm


def engine(path: Path | str, **options: Any) -> Any:
    model = SimpleNamespace(
        model=str(path), model_weights="", revision=options.get("revision"), seed=7
    )
    load_format = options.get("load_format", "auto")
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=options.get("speculative"),
    )


def weights(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer{i}": torch.rand(64, 64, generator=generator) for i in range(4)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_copies_of_a_model_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    a = weights_identity(engine(weights(tmp_path / "a" / "llama")))
    assert a == weights_identity(engine(weights(tmp_path / "b" / "llama")))
    assert a.startswith("llama@")
    assert a != weights_identity(engine(weights(tmp_path / "a" / "other")))
    assert a != weights_identity(engine(weights(tmp_path / "c" / "llama", seed=1)))


def test_a_change_of_one_tensor_is_seen(tmp_path: Path) -> None:
    folder = weights(tmp_path / "llama")
    before = weights_identity(engine(folder))
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    # The third of four tensors of 16 KiB, all of it.
    raw[-2 * 16384 : -16384] = bytes(16384)
    file.write_bytes(raw)
    assert weights_identity(engine(folder)) != before


def test_files_that_are_not_what_they_say_count_by_samples(tmp_path: Path) -> None:
    for name, raw in [("a", b"\xff" * 8 + b"x" * 5000), ("b", b"\xff" * 8 + b"y" * 5000)]:
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "model.safetensors").write_bytes(raw)
        (tmp_path / name / "m" / "pytorch_model.bin").write_bytes(raw[:100])
    one, two = (weights_identity(engine(tmp_path / name / "m")) for name in "ab")
    assert one != two


def test_dummy_weights_are_those_of_their_seed(tmp_path: Path) -> None:
    folder = weights(tmp_path / "llama")
    assert weights_identity(engine(folder, load_format="dummy")).endswith("#dummy7")


def test_a_model_that_is_nowhere_here_is_its_name_and_revision() -> None:
    assert weights_identity(engine("some/model-x")) == "some/model-x@main"
    assert weights_identity(engine("some/model-x", revision="v2")) == "some/model-x@v2"


def test_a_model_of_the_hub_is_its_name_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hymcache.connector.model_identity.try_to_load_from_cache",
        lambda *_, **__: str(tmp_path / "snapshots" / "abc123" / "config.json"),
    )
    assert weights_identity(engine("some/model")) == "some/model@abc123"


def test_a_drafter_with_weights_of_its_own_counts(tmp_path: Path) -> None:
    def drafting_with(path: Path | str | None) -> Any:
        draft = None if path is None else engine(path).model_config
        return engine("m", speculative=SimpleNamespace(draft_model_config=draft))

    assert draft_identity(drafting_with(weights(tmp_path / "draft"))).startswith("draft@")
    assert draft_identity(drafting_with("m")) == ""
    assert draft_identity(drafting_with(None)) == ""
    assert draft_identity(engine("m")) == ""


def test_the_configuration_counts_with_its_overrides_but_not_with_its_place() -> None:
    def digest(**changes: Any) -> str:
        config = {"rope_theta": 1e4, "_name_or_path": "/a", "transformers_version": "4"} | changes
        return config_digest(
            SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=lambda: json.loads(json.dumps(config)))
            )
        )

    assert digest() == digest(_name_or_path="/b", transformers_version="5")
    assert digest() != digest(rope_theta=1e6)
