"""The Llama family: rotary positions, RMSNorm before each sublayer, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerocli.models.fused import rotate, swiglu
from zerocli.models.parts import Decoder, Embedding, Head, Linear, ModelConfig, attend, residual_std

if TYPE_CHECKING:
    from zerocli.engine.tensor_parallel import TensorParallel
    from zerocli.models.parallel import Split


class Llama(Decoder):
    """A Llama of any size, for sequences of up to `seq` tokens."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        embed = Embedding(config.vocab, config.hidden)
        # All layers share one pair of tables; each holds the module, so that a block is complete by itself.
        rotary = Rotary(seq, config.hidden // config.heads, config.rope_theta)
        blocks: list[nn.Module] = [Block(config, rotary) for _ in range(config.layers)]
        tied = embed.weight if config.tie else None
        super().__init__(embed, blocks, Head(_norm(config), config.hidden, config.vocab, tied), seq)

    def tensor_parallel_plan(self, tp: TensorParallel) -> dict[str, Split]:
        """Return how the model is split over ranks: by heads, by the MLP's width, by tokens of the vocabulary."""
        from zerocli.models.parallel import Column, Row, split_attention, split_vocabulary

        block: Any = self.blocks[0]
        width = block.mlp.down.in_features
        mlp: dict[str, Split] = {"blocks.*.mlp.gate_up": Column(tp, width, width), "blocks.*.mlp.down": Row(tp)}
        vocabulary = split_vocabulary("embed", self.head.weight.shape[0], tp)
        return vocabulary | split_attention(block.attention, tp) | mlp


class Rotary(nn.Module):
    """Rotates each head's vector by angles that grow with its position; element i pairs with i + head_dim / 2."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq, 1, head_dim, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, (seq, 1, head_dim); the sine's first half is negative, for the half that is subtracted."""
        seq, _, head_dim = self.cos.shape
        device, dtype = self.cos.device, torch.float64  # fp32 angles are off by 0.01 at position 100,000
        powers = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
        angles = torch.outer(torch.arange(seq, device=device, dtype=dtype), self.theta**-powers)
        cos, sin = angles.cos(), angles.sin()
        self.cos.copy_(torch.cat((cos, cos), dim=-1)[:, None])
        self.sin.copy_(torch.cat((-sin, sin), dim=-1)[:, None])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        """Move with the model, but stay in fp32 when the model's type changes: bf16 tables would lose the positions."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_parameters()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, heads, head_dim) rotated: computed in fp32, rounded once to the type of x."""
        seq = x.shape[1]
        return rotate(x, self.cos[:seq], self.sin[:seq])


class Block(nn.Module):
    """One layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config, rotary)
        self.norm2 = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Attention(nn.Module):
    """Causal self-attention in which `heads // kv_heads` query heads share a head of keys and values."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.hidden // config.heads
        self.rotary = rotary
        self.qkv = Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.out = Linear(config.hidden, config.hidden, init_std=residual_std(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        q, k = self.rotary(qk).split((self.heads, self.kv_heads), dim=2)
        out: Tensor = self.out(attend(q, k, v))
        return out


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, where one matmul computes gate and up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.mlp_hidden or -(-8 * config.hidden // (3 * 256)) * 256
        self.gate_up = Linear(config.hidden, 2 * width)
        self.down = Linear(width, config.hidden, init_std=residual_std(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate_up(x)))
        return out


def _norm(config: ModelConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden, eps=config.norm_eps)
