"""The GPT-2 family: learned positions, LayerNorm before each sublayer, GELU, and a head tied to the embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from zerocli.config import ModelConfig
from zerocli.models.parts import Block, Decoder, Embedding, Head, Linear, attend, residual_std

if TYPE_CHECKING:
    from zerocli.engine.tensor_parallel import TensorParallel
    from zerocli.models.cache import LayerCache
    from zerocli.models.parallel import Split


class GPT2(Decoder):
    """A GPT-2 of any size, for sequences of up to `seq` tokens, or up to its `positions` if these are more."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        seq = max(seq, config.positions)
        embed = Embed(config, seq)
        blocks = [Block(_norm(config), Attention(config), _norm(config), MLP(config)) for _ in range(config.layers)]
        tied = embed.tokens.weight if config.tie else None
        super().__init__(embed, blocks, Head(_norm(config), config.hidden, config.vocab, tied), seq)

    def tensor_parallel_plan(self, tp: TensorParallel) -> dict[str, Split]:
        """Return how the model is split over ranks: by heads, by the MLP's width, by tokens of the vocabulary."""
        from zerocli.models.parallel import Column, split_decoder

        return split_decoder(self, "embed.tokens", {"blocks.*.mlp.up": Column(tp)}, tp)

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        x: Tensor = self.embed(tokens) if positions is None else self.embed(tokens, positions)
        return x


class Embed(nn.Module):
    """The sum of a token's embedding and its position's."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab, config.hidden)
        self.positions = Embedding(seq, config.hidden)
        self.dropout = config.dropout

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        table = self.positions.weight
        places = table[: tokens.shape[1]] if positions is None else F.embedding(positions, table)
        x = self.tokens(tokens) + places
        return _dropout(x, self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention; one matmul computes queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.hidden // config.heads
        self.dropout = config.dropout
        self.masks: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Context for dropout inside the heads: under tensor parallelism each rank draws its own masks there."""
        qkv_width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(config.hidden, qkv_width, config.bias)
        self.out = Linear(config.hidden, config.hidden, config.bias, residual_std(config.layers))

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if cache is not None:
            x = cache.attend(q, k, v, mask)
        elif self.dropout > 0 and self.training:
            with self.masks():
                x = attend(q, k, v, self.dropout, mask)
        else:
            x = attend(q, k, v, mask=mask)
        return _dropout(self.out(x), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide as the model unless the config says otherwise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.mlp_hidden or 4 * config.hidden
        self.up = Linear(config.hidden, width, config.bias)
        self.down = Linear(width, config.hidden, config.bias, residual_std(config.layers))
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate="tanh"))
        return _dropout(x, self.dropout, self.training)


def _norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Return x with dropout while training; a probability of 0 launches no kernel."""
    return F.dropout(x, p) if p > 0 and training else x
