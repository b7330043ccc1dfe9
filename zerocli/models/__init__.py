"""The reference models: GPT-2 and Llama of any size."""

from __future__ import annotations

import torch
from torch import nn

from zerocli.config import ModelConfig
from zerocli.models.gpt2 import GPT2
from zerocli.models.llama import Llama
from zerocli.models.loss import linear_cross_entropy
from zerocli.models.parts import Decoder

__all__ = ["FAMILIES", "Decoder", "build", "build_model", "linear_cross_entropy"]

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"gpt2": GPT2, "llama": Llama}


def build_model(model: ModelConfig, seq: int, device: str | torch.device = "cpu") -> nn.Module:
    """Return the model of a config's `model` section, built by our own code or by that of transformers."""
    if model.code == "transformers":
        from zerocli.models import transformers_model

        return transformers_model.build(model.folder, seq, device)
    return build(model, seq, device)


def build(config: ModelConfig, seq: int, device: str | torch.device = "cpu") -> Decoder:
    """Return the model for sequences of up to `seq` tokens, initialised; on the meta device it takes no memory."""
    if config.family not in FAMILIES:
        raise ValueError(f"model.family is {config.family!r}: choose one of {', '.join(FAMILIES)}")
    size = config.head_dim or config.hidden // config.heads
    if not config.head_dim and config.hidden % config.heads:
        raise ValueError(f"model.hidden {config.hidden} does not divide into {config.heads} heads")
    if config.kv_heads and config.heads % config.kv_heads:
        raise ValueError(f"model.heads {config.heads} does not divide into {config.kv_heads} groups (model.kv_heads)")
    if config.family == "llama" and size % 2:
        raise ValueError(f"rotary positions need an even head size, not {size}")
    with torch.device(device):
        return FAMILIES[config.family](config, seq)
