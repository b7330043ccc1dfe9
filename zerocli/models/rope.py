"""The frequencies of rotary positions, for every type of scaling that `zerocli.config.rope` lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any], device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of elements, (head_dim / 2,) in fp64, and the factor of the tables."""
    powers = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    plain = theta**-powers
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling), _yarn_factor(scaling)
    # `dynamic` is plain up to the model's positions, and longer sequences are refused.
    return plain, 1.0


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Divide the low frequencies by `factor`, keep the high ones, and interpolate between both."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - smooth) * plain / scaling["factor"] + smooth * plain
    return scaled


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Divide by `factor` what turns less than `beta_slow` times over the original length, and ramp to `beta_fast`."""

    def index(turns: float) -> float:
        """Return which pair of elements makes `turns` turns over the original length."""
        length = scaling["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(scaling.get("beta_fast") or 32), index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last = last + 0.001 if first == last else last
    at = torch.arange(head_dim // 2, device=plain.device, dtype=torch.float64)
    ramp = ((at - first) / (last - first)).clamp(0, 1)
    scaled: Tensor = plain / scaling["factor"] * ramp + plain * (1 - ramp)
    return scaled


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    """Return what scales cosines and sines, and so by its square all scores."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(mscale) / scale(of_all) if mscale and of_all else scale(1)
