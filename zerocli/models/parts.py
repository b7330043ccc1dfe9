"""Modules of both model families. Each module with its own parameters or buffers has `reset_parameters()`, which fills
only those, in place: a unit can be materialised from the meta device and initialised by itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerocli.models.loss import linear_cross_entropy

if TYPE_CHECKING:
    from zerocli.models.cache import Cache, LayerCache

INIT_STD = 0.02


def residual_std(layers: int) -> float:
    """Return the standard deviation for a projection into the residual stream; each layer has two."""
    return INIT_STD / math.sqrt(2 * layers)


def init_normal_(weight: Tensor, std: float) -> None:
    """Fill the weight from a normal distribution; on the meta device, where there is nothing to fill, return at once.

    The first random fill of a meta tensor makes torch import its compiler, which takes over a second.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """A linear layer whose weight starts normal with `init_std`, and whose bias starts at zero."""

    parts: dict[str, int] | None = None
    """Rows of each of the matrices that are one here and several in Hugging Face's models, by name."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, init_std: float = INIT_STD) -> None:
        self.init_std = init_std  # before the parent's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        init_normal_(self.weight, self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding table that starts normal with the standard deviation of every other weight."""

    def reset_parameters(self) -> None:
        init_normal_(self.weight, INIT_STD)


class Head(nn.Module):
    """The final norm, the output projection and the loss. With `tied`, that parameter is the projection."""

    def __init__(self, norm: nn.Module, hidden: int, vocab: int, tied: Tensor | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.is_tied = tied is not None
        self.weight: Tensor = tied if tied is not None else nn.Parameter(torch.empty(vocab, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.is_tied:  # the embedding initialises a weight that both use
            init_normal_(self.weight, INIT_STD)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss, or without targets the logits."""
        x = self.norm(x)
        if targets is None:
            return F.linear(x, self.weight)
        return linear_cross_entropy(x, self.weight, targets)


class Block(nn.Module):
    """One layer: attention and MLP, each added to the residual stream."""

    def __init__(
        self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module, window: int = 0
    ) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.window = window
        """Tokens that a token attends to; 0: all before it. The decoder makes the mask."""

    def forward(self, x: Tensor, *shared: Tensor | None, cache: LayerCache | None = None) -> Tensor:
        """Return the layer's output; `shared` is a mask, and with positions the rotary tables of the tokens."""
        x = x + self.attention(self.norm1(x), *shared, cache=cache)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """The base of both families: embedding, blocks, head."""

    def __init__(self, embed: nn.Module, blocks: list[Block], head: Head, seq: int) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.seq = seq

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the mean loss of (batch, seq) targets in fp32, or without targets the (batch, seq, vocab) logits.

        `positions`, (batch, seq), are those of tokens in their documents, several of which share a row: attention does
        not cross from one into another. Without them a row is one document. A target of -100 is not counted. With a
        `cache` the tokens follow those in it, and only the last one's logits are returned, (batch, 1, vocab).
        """
        length = tokens.shape[1] + (cache.length if cache is not None else 0)
        if length > self.seq:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {self.seq} positions")
        if cache is not None:
            return self._continue(tokens, cache)
        x = self._embed(tokens, positions)
        for block, more in zip(self.blocks, self._block_inputs(x, positions), strict=True):
            x = block(x, *more)
        out: Tensor = self.head(x, targets)
        return out

    def make_cache(self, capacity: int) -> Cache:
        """Return an empty cache for texts of up to `capacity` tokens."""
        from zerocli.models.cache import Cache

        return Cache(self._windows(), capacity)

    def _windows(self) -> list[int]:
        return [int(block.window) for block in self.blocks]  # type: ignore[arg-type]

    def _continue(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the logits after the last of these tokens, which follow those in the cache; see `forward`."""
        positions = cache.positions(tokens)
        x = self._embed(tokens, positions)
        shared: list[tuple[Tensor | None, ...]] = [*self._block_inputs(x, None)]
        if positions is not None:
            shared = [(None, *self._tables(positions))] * len(self.blocks)
        for block, more, layer in zip(self.blocks, shared, cache.layers, strict=True):
            x = block(x, *more, cache=layer)
        out: Tensor = self.head(x[:, -1:])
        return out

    def unit_modules(self) -> list[nn.Module]:
        """Return the modules that are units, in order of use.

        A tied weight is needed at both ends of the model, so then embedding and head belong to the rest.
        """
        if self.head.is_tied:
            return list(self.blocks)
        return [self.embed, *self.blocks, self.head]

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the first block's input; a family with learned positions adds them."""
        x: Tensor = self.embed(tokens)
        return x

    def _block_inputs(self, x: Tensor, positions: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Return what each block takes beside x: nothing, a mask, or a mask and what `_tables` returns.

        Blocks share these tensors: each mask is made once per forward, in the type that attention computes in, as
        torch would otherwise convert it in each block and keep each copy for backward.
        """
        seq = x.shape[1]
        windows = [window if window < seq else 0 for window in self._windows()]  # longer: plain causal attention
        masks: dict[int, tuple[Tensor, ...]] = {} if positions is not None else {0: ()}
        tables = () if positions is None else self._tables(positions)
        for window in windows:
            if window not in masks:
                masks[window] = (attention_mask(seq, window, positions, x), *tables)
        return [masks[window] for window in windows]

    def _tables(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return further inputs of all blocks that depend on given positions."""
        return ()


def attention_mask(seq: int, window: int, positions: Tensor | None, x: Tensor) -> Tensor:
    """Return what is added to scores, in the type of x: 0 where a token may attend, else -inf.

    (seq, seq) for whole rows, (batch, 1, seq, seq) with positions: a document begins wherever a position is not the
    previous one plus 1. With a window a token attends to that many tokens, itself included.
    """
    allowed = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril_()
    if window:
        allowed.triu_(1 - window)
    if positions is not None:
        begins = torch.zeros_like(positions)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        document = begins.cumsum(1)
        allowed = (document[:, :, None] == document[:, None, :]).logical_and_(allowed)[:, None]
    mask = torch.zeros(allowed.shape, dtype=x.dtype, device=x.device)
    return mask.masked_fill_(allowed.logical_not_(), float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """Return causal attention as (batch, seq, heads * head_dim); a `mask` of `attention_mask` replaces the causal one.

    q: (batch, seq, heads, head_dim); k and v may have fewer heads, each of which serves a run of query heads.
    """
    groups = q.shape[2] // k.shape[2]
    # Only the half-precision GPU kernels read shared heads in place, and of those none with a mask; the others would
    # fall back to a kernel that holds all seq x seq scores, which costs far more than repeating keys and values.
    shared = groups > 1 and mask is None and q.is_cuda and q.dtype != torch.float32
    if groups > 1 and not shared:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    causal = mask is None
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal, enable_gqa=shared)
    return out.transpose(1, 2).flatten(2)
