"""The Llama family: rotary positions, RMSNorm before each sublayer, grouped-query attention, SwiGLU.

Mistral is a Llama with a sliding window, Qwen 2 one with biases of queries, keys and values, Qwen 3 one with norms of
queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerocli.config import ModelConfig
from zerocli.layout.ranges import parse_ranges
from zerocli.models.fused import rotate, swiglu
from zerocli.models.parts import Block, Decoder, Embedding, Head, Linear, attend, residual_std
from zerocli.models.rope import frequencies

if TYPE_CHECKING:
    from zerocli.engine.tensor_parallel import TensorParallel
    from zerocli.models.cache import LayerCache
    from zerocli.models.parallel import Split


class Llama(Decoder):
    """A Llama of any size, for sequences of up to `seq` tokens."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        embed = Embedding(config.vocab, config.hidden)
        # All layers share one pair of tables; each holds the module, so that a block is complete by itself.
        head_dim = config.head_dim or config.hidden // config.heads
        rotary = Rotary(seq, head_dim, config.rope_theta, config.rope_scaling)
        windowed = parse_ranges(config.window_layers) or range(config.layers)
        windows = [config.window if at in windowed else 0 for at in range(config.layers)]
        blocks = [
            Block(_norm(config), Attention(config, rotary), _norm(config), MLP(config), window) for window in windows
        ]
        tied = embed.weight if config.tie else None
        super().__init__(embed, blocks, Head(_norm(config), config.hidden, config.vocab, tied), seq)

    def tensor_parallel_plan(self, tp: TensorParallel) -> dict[str, Split]:
        """Return how the model is split over ranks: by heads, by the MLP's width, by tokens of the vocabulary."""
        from zerocli.models.parallel import Column, split_decoder

        width: int = self.blocks[0].mlp.down.in_features  # type: ignore[union-attr, assignment]
        return split_decoder(self, "embed", {"blocks.*.mlp.gate_up": Column(tp, width, width)}, tp)

    def _tables(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of the rotary tables at these positions, (batch, seq, 1, head_dim) each."""
        rotary: Any = self.blocks[0].attention.rotary  # type: ignore[union-attr]
        return rotary.cos[positions], rotary.sin[positions]


class Rotary(nn.Module):
    """Rotates each head's vector by angles that grow with its position; element i pairs with i + head_dim / 2."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq: int, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.theta, self.scaling = theta, scaling or {}
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq, 1, head_dim, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, (seq, 1, head_dim); the sine's first half is negative, for the half that is subtracted."""
        seq, _, head_dim = self.cos.shape
        device, dtype = self.cos.device, torch.float64  # fp32 angles are off by 0.01 at position 100,000
        turns, factor = frequencies(head_dim, self.theta, self.scaling, device)
        angles = torch.outer(torch.arange(seq, device=device, dtype=dtype), turns)
        cos, sin = angles.cos(), angles.sin()
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        self.cos.copy_(torch.cat((cos, cos), dim=-1)[:, None])
        self.sin.copy_(torch.cat((-sin, sin), dim=-1)[:, None])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        """Move with the model, but stay in fp32 when the model's type changes: bf16 tables would lose the positions."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_parameters()
        return self

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """Return (batch, seq, heads, head_dim) rotated: computed in fp32, rounded once to the type of x.

        Given tables have a row per token, (batch, seq, 1, head_dim).
        """
        if cos is None or sin is None:
            seq = x.shape[1]
            cos, sin = self.cos[:seq], self.sin[:seq]
        return rotate(x, cos, sin)


class Attention(nn.Module):
    """Causal self-attention in which `heads // kv_heads` query heads share a head of keys and values."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.head_dim or config.hidden // config.heads
        self.rotary = rotary
        wide, qkv_width = self.heads * self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(config.hidden, qkv_width, config.qkv_bias)
        keys = self.kv_heads * self.head_dim
        self.qkv.parts = {"q": wide, "k": keys, "v": keys}
        self.q_norm, self.k_norm = None, None
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=config.norm_eps) for _ in range(2))
        self.out = Linear(wide, config.hidden, config.out_bias, residual_std(config.layers))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *tables: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is None or self.k_norm is None:
            qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
            q, k = self.rotary(qk, *tables).split((self.heads, self.kv_heads), dim=2)
        else:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            q, k = self.rotary(self.q_norm(q), *tables), self.rotary(self.k_norm(k), *tables)
        out: Tensor = self.out(attend(q, k, v, mask=mask) if cache is None else cache.attend(q, k, v, mask))
        return out


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, where one matmul computes gate and up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.mlp_hidden or -(-8 * config.hidden // (3 * 256)) * 256
        self.gate_up = Linear(config.hidden, 2 * width, config.mlp_bias)
        self.gate_up.parts = {"gate": width, "up": width}
        self.down = Linear(width, config.hidden, config.mlp_bias, residual_std(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate_up(x)))
        return out


def _norm(config: ModelConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden, eps=config.norm_eps)
