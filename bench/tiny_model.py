"""Random-weight Llama models, small enough for a CPU, made in place and kept in a cache folder.

Nothing is downloaded: the weights come from a fixed seed, and the tokenizer is a byte-level BPE
trained on one sentence. Weights are drawn wide enough (`initializer_range`) for greedy decoding to
wander through the vocabulary, so that equal tokens are evidence of equal KV.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hymcache.errors import ConfigError

VOCABULARY_TOKENS: Final = 1024
SPECIAL_TOKENS: Final = ("<s>", "</s>", "<pad>")
FIRST_PLAIN_TOKEN: Final = len(SPECIAL_TOKENS)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama model. KV of one token in float32: `kv_bytes_per_token` bytes."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    positions_max: int
    initializer_range: float

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V in all layers for one token, in float32."""
        return 2 * self.layers * self.kv_heads * self.head_size * 4


TINY: Final = ModelShape(
    name="tiny",
    layers=4,
    hidden=256,
    intermediate=704,
    heads=4,
    kv_heads=2,
    head_size=64,
    positions_max=16384,
    initializer_range=0.2,
)
MID: Final = ModelShape(
    name="mid",
    layers=8,
    hidden=512,
    intermediate=1408,
    heads=8,
    kv_heads=4,
    head_size=64,
    positions_max=16384,
    initializer_range=0.1,
)


def kv_bytes_per_token(model: Path, dtype: str) -> int:
    """Bytes of K and V in all layers for one token, from a model folder's config.json.

    Raises ConfigError for a folder without one, or of a kind of attention that is not told there.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        layers: int = config["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: does not tell layers and heads ({error!r})") from error
    return 2 * layers * int(kv_heads) * int(head_size) * (4 if dtype == "float32" else 2)


def model_dir(shape: ModelShape, cache_dir: Path) -> Path:
    """The folder in which `make_model` puts a model of this shape."""
    recipe = json.dumps([asdict(shape), VOCABULARY_TOKENS, "v1"], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    return cache_dir / "models" / f"{shape.name}-{digest}"


def make_model(shape: ModelShape, cache_dir: Path) -> Path:
    """Returns the folder of a model of this shape, making it first where it is not there yet.

    Safe against a second process doing the same: the folder appears complete or not at all.
    """
    target = model_dir(shape, cache_dir)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _hush_transformers()
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(draft)
        _write_weights(shape, draft)
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # not the race that another process won
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _hush_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    special = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    fast.save_pretrained(str(folder))


def _write_weights(shape: ModelShape, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions_max,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=shape.initializer_range,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(str(folder))
