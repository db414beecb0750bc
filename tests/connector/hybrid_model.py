"""A tiny model with two KV cache groups."""

from __future__ import annotations

from pathlib import Path

import torch


def make_hybrid_model(folder: Path) -> Path:
    """Every other layer reads the last 128 tokens only."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    torch.manual_seed(0)
    config = Olmo3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.2,
    )
    path = folder / "hybrid"
    Olmo3ForCausalLM(config).save_pretrained(path)
    return path
