"""`Shape`: the dimensions of a decoder of any family, and its parameters by unit. Pure integers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerocli.config import LoraConfig
from zerocli.errors import UserError
from zerocli.plan.blocks.lora import FUSED_PROJECTIONS, Lora, choose


@dataclass(frozen=True)
class Parameter:
    """One parameter: its global shape, and the dimension that tensor parallelism splits (None: replicated).

    A dimension that the degree does not divide is not split, as in the engine.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    trainable: bool = True
    width: int = 0
    """Bytes of an element if it has its own compute dtype; 0: the run's."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local(self, tp: int) -> tuple[int, ...]:
        """Return the shape of the part that one of `tp` ranks holds."""
        if self.cut is None or self.shape[self.cut] % tp:
            return self.shape
        return tuple(size // tp if at == self.cut else size for at, size in enumerate(self.shape))


BIASES = ("qkv_bias", "out_bias", "mlp_bias")
"""The fields that say which projections of a block have biases."""
NORMS = {"pre": 2, "shared": 1, "parallel": 2, "post": 2, "sandwich": 4}
"""Norms of a block, by where they are.

pre: before attention and before the MLP. shared: one before both, which run on its output. parallel: one before each,
and both run on the block's input. post: after each. sandwich: before and after each.
"""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, keys and values are made from vectors of low rank."""

    q_rank: int
    """0: queries are made from the hidden state."""
    kv_rank: int
    nope: int
    """Elements of a query or key without rotary positions, per head."""
    rope: int
    """Elements with them; those of keys are shared by all heads."""
    value: int
    """Elements of a value, per head."""


@dataclass(frozen=True)
class Shape:
    """A decoder: embedding, `layers` blocks of attention and MLP, final norm, head."""

    family: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    mlp_hidden: int
    kv_heads: int = 0
    """0: as many as `heads`."""
    head_dim: int = 0
    """0: hidden / heads."""
    tie: bool = False
    """Whether the head shares the embedding's weight."""
    gated: bool = False
    """Whether the MLP has a gate projection besides its up projection."""
    norm: str = "layer"
    """`layer` (weight and bias), `rms` (weight) or `plain` (a layer norm without either)."""
    norm_bias: bool = True
    norms: str = "pre"
    """Where a block's norms over the hidden size are: a key of `NORMS`."""
    embed_norm: bool = False
    """Whether a norm follows the embedding."""
    final_norm: bool = True
    q_norm: int = 0
    """Weights of the norm on queries; 0: none."""
    k_norm: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: int = 0
    """Rows of a table of learned positions."""
    rotary: bool = False
    window: int = 0
    """Tokens that a token attends to in the layers with a window; 0: all before it."""
    window_layers: str = ""
    """The layers with a window, as in `ModelConfig`."""
    embed_dim: int = 0
    """Width of the embedding if it is projected to the hidden size; 0: hidden."""
    dropout: float = 0.0
    experts: int = 0
    """Experts in each sparse block; 0: dense."""
    experts_per_token: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    """Width of the shared expert, which every token uses; 0: none."""
    shared_gate: bool = True
    router_bias: bool = False
    sinks: bool = False
    """Whether attention has a learned score per head that attends to nothing."""
    latent: Latent | None = None
    """Replaces the projection of queries, keys and values; `head_dim` is then that of queries and keys."""
    sparse_every: int = 1
    """A block is sparse if `(index + 1) % sparse_every == 0`."""
    dense_blocks: tuple[int, ...] = ()
    """Blocks that are dense in spite of `sparse_every`."""
    max_positions: int = 0
    """The longest sequence that the model supports; 0: unknown."""
    lora: Lora | None = None
    """Adapters that are trained while every other parameter is frozen."""

    @property
    def width_q(self) -> int:
        """Elements of all queries per token."""
        return self.heads * self.head_size

    @property
    def width_kv(self) -> int:
        """Elements of all keys per token; values have as many."""
        return (self.kv_heads or self.heads) * self.head_size

    @property
    def width_out(self) -> int:
        """Elements of attention's result per token."""
        return self.heads * self.latent.value if self.latent else self.width_q

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def local_vocab(self, tp: int) -> int:
        """Return the tokens whose rows one of `tp` ranks holds."""
        return self.vocab if self.vocab % tp else self.vocab // tp

    @cached_property
    def sparse(self) -> tuple[bool, ...]:
        """Whether the MLP of each block is a mixture of experts."""
        if not self.experts:
            return (False,) * self.layers
        dense = set(self.dense_blocks)
        return tuple((block + 1) % self.sparse_every == 0 and block not in dense for block in range(self.layers))

    @cached_property
    def numel(self) -> int:
        return sum(each.numel * times for unit, times in self.units for each in unit.parameters)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(p.numel * times for unit, times in self.units for p in unit.parameters if p.trainable)

    @property
    def trains_head(self) -> bool:
        """Whether the weight of the output layer is trained."""
        return self.lora is None or ("tokens" if self.tie else "head") in self.lora.saved

    @property
    def active_numel(self) -> int:
        """Return the parameters that one token uses: of the experts, only those it is routed to."""
        one = sum(each.numel for each in self._mlp("", self.expert_hidden))
        return self.numel - sum(self.sparse) * (self.experts - self.experts_per_token) * one

    @cached_property
    def units(self) -> list[tuple[Unit, int]]:
        """The units in order of use, as the engine makes them, each with its number of consecutive repeats.

        A tied weight is used at both ends: embedding and head are then one unit, `rest`, which comes first.
        """
        if self.tie:
            found = [(Unit("rest", (*self.embed_parameters(), *self.head_parameters())), 1)]
        else:
            found = [(Unit("embed", self.embed_parameters()), 1)]
        known: dict[bool, Unit] = {}
        for block, times in self.runs:
            sparse = self.sparse[block]
            if sparse not in known:
                known[sparse] = Unit("block", self.block_parameters(block), sparse)
            found.append((known[sparse], times))
        return found if self.tie else [*found, (Unit("head", self.head_parameters()), 1)]

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(First block, number) of each run of blocks of one kind."""
        numbers = [sum(1 for _ in alike) for _, alike in itertools.groupby(self.sparse)]
        return tuple(zip([0, *itertools.accumulate(numbers)], numbers, strict=False))

    # -- parameters ------------------------------------------------------------------------------------------------

    def embed_parameters(self) -> tuple[Parameter, ...]:
        width = self.embed_dim or self.hidden
        found = [Parameter("tokens", (self.vocab, width), 0)]
        if self.positions:
            found.append(Parameter("positions", (self.positions, self.hidden)))
        if width != self.hidden:
            found.append(Parameter("project_in", (self.hidden, width)))
        if self.embed_norm:
            found += self._norm("embed_norm", self.hidden)
        return self._frozen(found)

    def _frozen(self, parameters: list[Parameter]) -> tuple[Parameter, ...]:
        """Return a model's own parameters, frozen if there are adapters, but for those that are trained whole."""
        saved = () if self.lora is None else self.lora.saved
        return tuple(dataclasses.replace(p, trainable=self.lora is None or p.name in saved) for p in parameters)

    def head_parameters(self) -> tuple[Parameter, ...]:
        width = self.embed_dim or self.hidden
        found = list(self._norm("norm", self.hidden)) if self.final_norm else []
        if width != self.hidden:
            found.append(Parameter("project_out", (width, self.hidden)))
        if not self.tie:
            found.append(Parameter("head", (self.vocab, width), 0))
        if self.head_bias:
            found.append(Parameter("head_bias", (self.vocab,)))
        return self._frozen(found)

    def block_parameters(self, block: int = 0) -> tuple[Parameter, ...]:
        """Return a block's parameters: queries, keys and values are one matrix, and so are gate and up."""
        found: list[Parameter] = []
        for index in range(NORMS[self.norms]):
            found += self._norm(f"norm{index + 1}", self.hidden)
        if self.latent:
            found += self._latent(self.latent)
        else:
            found += self._linear("qkv", self.hidden, self.width_q + 2 * self.width_kv, self.qkv_bias, cut=0)
        if self.q_norm:
            found += [Parameter("q_norm", (self.q_norm,)), Parameter("k_norm", (self.k_norm,))]
        if self.sinks:
            found.append(Parameter("sinks", (self.heads,), 0))
        found += self._linear("out", self.width_out, self.hidden, self.out_bias, cut=1)
        found += self._experts() if self.sparse[block] else self._mlp("", self.mlp_hidden)
        return (*self._frozen(found), *self._adapters())

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of a block's projections that may have adapters, by name."""
        wide = {"q": (self.hidden, self.width_q), "k": (self.hidden, self.width_kv), "v": (self.hidden, self.width_kv)}
        wide["out"] = (self.width_out, self.hidden)
        wide |= {"gate": (self.hidden, self.mlp_hidden)} if self.gated else {}
        wide |= {"up": (self.hidden, self.mlp_hidden), "down": (self.mlp_hidden, self.hidden)}
        into = {name: fused for fused, names in FUSED_PROJECTIONS.get(self.family, {}).items() for name in names}
        found: dict[str, tuple[int, int]] = {}
        for name, (inputs, outputs) in wide.items():
            here = into.get(name, name)
            found[here] = inputs, outputs + found.get(here, (0, 0))[1]
        return found

    def matrices(self, *names: str) -> tuple[str, ...]:
        """Return the matrices of transformers that these projections, one matrix here, are there."""
        fused = FUSED_PROJECTIONS.get(self.family, {})
        return next(((name,) for name, parts in fused.items() if parts[0] in names), names)

    def _adapters(self) -> list[Parameter]:
        if self.lora is None:
            return []
        rank, found = self.lora.rank, []
        for name, (inputs, outputs) in self.projections().items():
            if name in self.lora.targets:
                found += [Parameter(f"{name}.a", (rank, inputs)), Parameter(f"{name}.b", (outputs, rank))]
        return found

    def adapted(self, asked: LoraConfig) -> Shape:
        """Return this model with adapters; UserError if they are not planned for it."""
        if self.experts or self.latent:
            raise UserError(f"--lora is planned for dense blocks with plain attention, and {self.family} has others")
        return dataclasses.replace(self, lora=choose(asked, self.family, self.projections(), self.layers, self.tie))

    def _latent(self, latent: Latent) -> list[Parameter]:
        found = []
        if latent.q_rank:
            found += self._linear("q_a", self.hidden, latent.q_rank, self.qkv_bias, cut=None)
            found.append(Parameter("q_a_norm", (latent.q_rank,)))
        found.append(Parameter("q_b", (self.width_q, latent.q_rank or self.hidden), 0))
        found += self._linear("kv_a", self.hidden, latent.kv_rank + latent.rope, self.qkv_bias, cut=None)
        found.append(Parameter("kv_a_norm", (latent.kv_rank,)))
        found.append(Parameter("kv_b", (self.heads * (latent.nope + latent.value), latent.kv_rank), 0))
        return found

    def _mlp(self, name: str, width: int) -> list[Parameter]:
        up = 2 * width if self.gated else width
        return [
            *self._linear(f"{name}up", self.hidden, up, self.mlp_bias, cut=0),
            *self._linear(f"{name}down", width, self.hidden, self.mlp_bias, cut=1),
        ]

    def _experts(self) -> list[Parameter]:
        found = [Parameter("router", (self.experts, self.hidden))]
        if self.router_bias:
            found.append(Parameter("router_bias", (self.experts,)))
        for index in range(self.experts):
            found += self._mlp(f"expert{index}.", self.expert_hidden)
        if self.shared_hidden:
            found += self._mlp("shared.", self.shared_hidden)
            found += [Parameter("shared_gate", (1, self.hidden))] if self.shared_gate else []
        return found

    def _linear(self, name: str, inputs: int, outputs: int, bias: bool, cut: int | None) -> list[Parameter]:
        weight = [Parameter(name, (outputs, inputs), cut)]
        # A layer split by its inputs gives partial sums: its bias is added once, after their sum.
        return weight + ([Parameter(f"{name}_bias", (outputs,), 0 if cut == 0 else None)] if bias else [])

    def _norm(self, name: str, width: int) -> list[Parameter]:
        if self.norm == "plain":
            return []
        bias = self.norm == "layer" and self.norm_bias
        return [Parameter(name, (width,)), *([Parameter(f"{name}_bias", (width,))] if bias else [])]

    def scaled(self, layers: int, hidden: int) -> Shape:
        """Return the family's shape at another size: the same head size, ratio of KV heads and ratio of MLP width."""
        head = self.head_size
        heads = max(1, round(hidden * self.heads / self.hidden))
        share = self.heads // (self.kv_heads or self.heads)
        heads = max(1, heads // share) * share
        ratio = hidden / self.hidden
        changes: dict[str, Any] = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads // share if self.kv_heads else 0,
            "head_dim": head if self.head_dim else 0,
            "mlp_hidden": _near(self.mlp_hidden * ratio),
            "expert_hidden": _near(self.expert_hidden * ratio),
            "shared_hidden": _near(self.shared_hidden * ratio),
        }
        # A norm over a head keeps its weights; one over all heads grows with them.
        if self.q_norm == self.width_q:
            changes |= {"q_norm": heads * head, "k_norm": heads // share * head}
        if not self.head_dim and hidden % heads:
            changes["head_dim"] = head
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Unit:
    """The parameters that are gathered, computed with and released together."""

    kind: str
    """`rest`, `embed`, `block` or `head`."""
    parameters: tuple[Parameter, ...]
    sparse: bool = False


def _near(width: float) -> int:
    """Return the multiple of 64 nearest to a scaled width; 0 stays 0."""
    return max(64, round(width / 64) * 64) if width else 0
