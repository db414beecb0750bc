"""What identifies the weights that KV was computed with.

A model on the Hugging Face hub is its name and commit. A local directory is its name and a
digest of its files, so that replicas which mount one model at different paths share KV while a
checkpoint that was overwritten in place starts anew. The digest does not read the weights: it
covers the name and size of each file and a few hundred bytes out of every tensor, which is
milliseconds where a whole read would be minutes. A finer change of a tensor touches nearly all
of its elements, so the samples tell two fine-tunes of one model apart.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from huggingface_hub import try_to_load_from_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SAMPLE_BYTES: Final = 256
# For files whose tensors are not listed at their front.
_SAMPLES_PER_FILE: Final = 4096
_SAFETENSORS_HEADER_BYTES_MAX: Final = 100 << 20
# Of a model's configuration: these say nothing of its KV and differ between equal models.
_VOLATILE_CONFIG_KEYS: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def weights_identity(vllm_config: VllmConfig) -> str:
    """The weights that this engine runs, e.g. `Qwen/Qwen2.5-32B@1a2b3c` or `my-model@90ab12`."""
    model = vllm_config.model_config
    identity = _model_identity(model)
    if vllm_config.load_config.load_format == "dummy":
        # Random weights, the same for the same seed.
        identity += f"#dummy{model.seed}"
    return identity


def draft_identity(vllm_config: VllmConfig) -> str:
    """The weights of a drafter of its own, "" without one.

    Its layers may stand in the same blocks. What drafts without weights, or with some of the
    model's own, adds no fact: the layers that blocks consist of are in the layout id.
    """
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or draft.model == vllm_config.model_config.model:
        return ""
    return _model_identity(draft)


def config_digest(model: ModelConfig) -> str:
    """A digest of the model's configuration, overrides such as RoPE scaling included."""
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE_CONFIG_KEYS}
    # An object that is not JSON counts by its type: its text may hold an address.
    text = json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def named_identity(name: str, revision: str | None = None) -> str:
    """The weights behind the name of a model: a local path, or one on the hub."""
    path = Path(name)
    if path.exists():
        return f"{path.resolve().name}@{_files_digest(path)}"
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        # .../snapshots/<commit>/config.json
        return f"{name}@{Path(cached).parent.name}"
    return f"{name}@{revision or 'main'}"


def _model_identity(model: ModelConfig) -> str:
    if model.model_weights:
        # Weights in an object store; `model` is then a temporary directory without them.
        return str(model.model_weights)
    return named_identity(model.model, model.revision)


def _files_digest(path: Path) -> str:
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in candidates:
        if file.suffix not in _WEIGHT_SUFFIXES or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in _sample_offsets(stream, file.suffix, size):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _sample_offsets(stream: BinaryIO, suffix: str, size: int) -> list[int]:
    """Where to read: the middle of each tensor, or places spread over the file."""
    middles = _tensor_middles(stream, size) if suffix == ".safetensors" else None
    if middles is not None:
        return [0, *middles]
    last = max(size - _SAMPLE_BYTES, 0)
    return [*range(0, last, max(_SAMPLE_BYTES, size // _SAMPLES_PER_FILE)), last]


def _tensor_middles(stream: BinaryIO, size: int) -> list[int] | None:
    header_bytes = int.from_bytes(stream.read(8), "little")
    if not 2 <= header_bytes <= min(_SAFETENSORS_HEADER_BYTES_MAX, size - 8):
        return None
    try:
        header = json.loads(stream.read(header_bytes))
        spans = sorted(
            entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
        )
        return [
            8 + header_bytes + max(begin, (begin + end - _SAMPLE_BYTES) // 2)
            for begin, end in spans
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not what its suffix says; vLLM tells the user so when it loads the file.
        return None
