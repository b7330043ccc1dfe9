"""LoRA in plans: adapters of low rank beside the frozen projections of a decoder's blocks. Needs no torch.

A projection with an adapter gives `torch.add(y, b(a(x)), alpha=factor)`, with `a` of (rank, inputs) and `b` of
(outputs, rank), as `zerocli.models.lora` makes them. There is one adapter for each matrix that the family has in
transformers, as peft makes them: one for queries, keys and values of a GPT-2, three of a Llama. Every other parameter
is frozen: it has no gradient and no optimizer states, and autograd does not keep its input for backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerocli.config import LoraConfig
from zerocli.config.lora import matches
from zerocli.errors import UserError

_QKV: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v")}
_GATE_UP: dict[str, tuple[str, ...]] = {"gate_up": ("gate", "up")}
FUSED_PROJECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt2", "gpt_neox"), _QKV),
    **dict.fromkeys(("glm", "glm4"), _GATE_UP),
    "phi3": _QKV | _GATE_UP,
}
"""By family of transformers: the projections that are one matrix there."""
_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "wq"),
    "k": ("k_proj", "wk"),
    "v": ("v_proj", "wv"),
    "qkv": ("c_attn", "qkv_proj", "query_key_value"),
    "out": ("o", "o_proj", "out_proj", "attn.c_proj", "self_attention.dense", "attention.dense", "wo"),
    "gate": ("gate_proj",),
    "up": ("up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h"),
}
"""What the projections are called in models."""


@dataclass(frozen=True)
class Lora:
    """Adapters of one rank on these projections of every block."""

    rank: int
    targets: tuple[str, ...]

    def of(self, names: Iterable[str]) -> list[str]:
        """Return those of the projections that have an adapter."""
        return [name for name in names if name in self.targets]


def choose(asked: LoraConfig, family: str, projections: Iterable[str]) -> Lora:
    """Return the adapters that a config asks for in a family with these projections; UserError if there are none."""
    names = tuple(projections)
    found = tuple(name for name in names if matches(asked.targets, name, *(f"x.{each}" for each in _NAMES[name])))
    if not found:
        fused = [name for name in names if name in FUSED_PROJECTIONS.get(family, {})]
        why = f" ({', '.join(fused)}: one matrix in transformers)" if fused else ""
        raise UserError(
            f"--lora: no block of {family} has a projection {', '.join(asked.targets)}; there are "
            f"{', '.join(names)}{why}",
            hint=f"--lora {asked.rank}, or --lora {asked.rank}:{names[0]}",
        )
    return Lora(asked.rank, found)
