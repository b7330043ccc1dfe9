"""LoRA in plans: adapters of low rank beside the frozen projections of a decoder's blocks. Needs no torch.

A projection with an adapter gives `torch.add(y, b(a(x)), alpha=factor)`, with `a` of (rank, inputs) and `b` of
(outputs, rank), as `zerocli.models.lora` makes them. There is one adapter for each matrix that the family has in
transformers, as peft makes them: one for queries, keys and values of a GPT-2, three of a Llama. Every other parameter
is frozen: it has no gradient and no optimizer states, and autograd does not keep its input for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zerocli.config import Config, LoraConfig
from zerocli.config.lora import PROJECTION_NAMES, matches
from zerocli.errors import UserError

_QKV: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v")}
_GATE_UP: dict[str, tuple[str, ...]] = {"gate_up": ("gate", "up")}
FUSED_PROJECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt2", "gpt_neox"), _QKV),
    **dict.fromkeys(("glm", "glm4"), _GATE_UP),
    "phi3": _QKV | _GATE_UP,
}
"""By family of transformers: the projections that are one matrix there."""
_ATTENTION = ("q", "k", "v", "qkv", "out")
_OURS = {"q": "attention.qkv", "k": "attention.qkv", "v": "attention.qkv", "gate": "mlp.gate_up", "up": "mlp.gate_up"}
"""The layers of the built-in models that several projections are one matrix of."""
EMBEDDINGS, HEADS = ("embed_tokens", "wte", "embed", "tokens"), ("lm_head", "head")
"""What `lora.save_modules` calls the token embedding and the output layer."""


@dataclass(frozen=True)
class Lora:
    """Adapters of one rank on these projections of every block."""

    rank: int
    targets: tuple[str, ...]
    dropout: bool = False
    """Whether the adapters' inputs have dropout."""
    saved: tuple[str, ...] = ()
    """Of `tokens` and `head`, the parameters that are trained whole."""

    def of(self, names: Iterable[str]) -> list[str]:
        """Return those of the projections that have an adapter."""
        return [name for name in names if name in self.targets]


def left_out(config: Config) -> bool:
    """Return whether formulas leave out what is trained: parts of a model, DoRA, adapters of several ranks or of some
    blocks only, which are named by their numbers.
    """
    lora = config.lora
    numbered = any(char.isdigit() for target in lora.targets for char in target)
    return bool(config.train.freeze or (lora.rank and (lora.dora or lora.rank_pattern or numbered)))


def choose(asked: LoraConfig, family: str, projections: Iterable[str], layers: int = 1, tie: bool = False) -> Lora:
    """Return the adapters that a config asks for in a family with these projections; UserError if there are none.

    All blocks are planned alike: a projection has an adapter in all of them if a regular expression finds it in one.
    """
    names = tuple(projections)
    paths = {name: tuple(_paths(name, layers)) for name in names}
    found = tuple(name for name in names if matches(asked.targets, *paths[name]))
    missing = [each for each in asked.targets if not any(matches((each,), *paths[name]) for name in names)]
    if not found or (missing and not asked.start):
        fused = [name for name in names if name in FUSED_PROJECTIONS.get(family, {})]
        why = f" ({', '.join(fused)}: one matrix in transformers)" if fused else ""
        raise UserError(
            f"--lora: no block of {family} has a projection {', '.join(missing)}; there are {', '.join(names)}{why}",
            hint=f"--lora {asked.rank}, or --lora {asked.rank}:{names[0]}",
        )
    ends = {"tokens": EMBEDDINGS, "head": HEADS}
    saved = [name for name, known in ends.items() if set(asked.save_modules) & set(known)]
    if tie and saved:
        saved = ["tokens"]
    return Lora(asked.rank, found, asked.dropout > 0, tuple(saved))


def _paths(projection: str, layers: int) -> Iterator[str]:
    """Yield the names that a projection may have in models."""
    part, modules = ("attention", ("self_attn", "attn")) if projection in _ATTENTION else ("mlp", ("mlp",))
    yield projection
    for layer in range(layers):
        yield f"blocks.{layer}.{part}.{projection}"
        if projection in _OURS:
            yield f"blocks.{layer}.{_OURS[projection]}"
        for block in (f"model.layers.{layer}", f"transformer.h.{layer}"):
            for name in PROJECTION_NAMES[projection]:
                yield from (f"{block}.{name}",) if "." in name else (f"{block}.{each}.{name}" for each in modules)
