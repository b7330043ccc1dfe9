"""LoRA in plans: adapters of low rank beside the frozen projections of a decoder's blocks. Needs no torch.

A projection with an adapter gives `torch.add(y, b(a(x)), alpha=scale)`, with `a` of (rank, inputs) and `b` of
(outputs, rank). Projections that are one matrix here (queries, keys and values; gate and up) have an adapter each, as
peft makes them of a Llama. In some families of transformers they are one matrix too, and peft makes one adapter for all
of it: `FUSED_PROJECTIONS`. Every other parameter is frozen: it has no gradient and no optimizer states,
and autograd does not keep its input for backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerocli.errors import UserError

TARGETS = ("q", "k", "v", "out", "gate", "up", "down")
_NAMES = {f"{name}_proj": name for name in TARGETS} | {"o": "out", "o_proj": "out"}
MAX_RANK = 65536
_QKV, _GATE_UP = ("q", "k", "v"), ("gate", "up")
FUSED_PROJECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt2", "gpt_neox"), (_QKV,)),
    **dict.fromkeys(("glm", "glm4"), (_GATE_UP,)),
    "phi3": (_QKV, _GATE_UP),
}
"""By family of transformers: the projections that are one matrix there."""


@dataclass(frozen=True)
class Lora:
    """Adapters of one rank on these projections of every block."""

    rank: int
    targets: tuple[str, ...] = TARGETS

    def of(self, *names: str) -> list[str]:
        """Return those of the projections that have an adapter."""
        return [name for name in names if name in self.targets]


def parse_lora(text: str) -> Lora:
    """Return what `--lora` asks for: `16`, or `16:q,v`; UserError if it is neither."""
    rank, colon, names = text.partition(":")
    if not rank.strip().isdigit() or not 1 <= int(rank) <= MAX_RANK:
        raise UserError(
            f"--lora {text}: {rank!r} is not a rank from 1 to {MAX_RANK}", hint="--lora 16, or --lora 16:q,v"
        )
    if not colon:
        return Lora(int(rank))
    asked = [name.strip() for name in names.split(",")]
    targets = [_NAMES.get(name, name) for name in asked]
    for name, target in zip(asked, targets, strict=True):
        if target not in TARGETS:
            raise UserError(f"--lora {text}: there is no projection {name!r}; there are {', '.join(TARGETS)}")
    return Lora(int(rank), tuple(name for name in TARGETS if name in targets))
