"""Comparing a sharded run with the reference: every number close, none missing, none NaN."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float) -> list[str]:
    """Return one line for each value that is missing, extra or differs by more than `tolerance` of its scale."""
    lines = [f"{label}: missing" for label in wanted.keys() - found.keys()]
    tied = {label for label in found.keys() - wanted.keys() if label.startswith("state ")}
    lines += [f"{label}: only in the sharded run" for label in found.keys() - wanted.keys() - tied]
    for label, right in wanted.items():
        if label in found:
            line = _difference(found[label], right, tolerance)
            lines += [f"{label}: {line}"] if line else []
    return lines


def _difference(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> str:
    if left.shape != right.shape:
        return f"shape {tuple(left.shape)} instead of {tuple(right.shape)}"
    if not right.numel():
        return ""
    if right.is_complex() and not left.is_complex():
        return "real instead of complex"
    if not (right.is_floating_point() or right.is_complex()):
        return "" if torch.equal(left, right) else f"{left.flatten()[:8].tolist()} != {right.flatten()[:8].tolist()}"
    kind = torch.complex128 if right.is_complex() else torch.float64
    left, right = left.to(kind), right.to(kind)
    if not torch.isfinite(right).all():
        return "the reference itself is not finite"
    if not torch.isfinite(left).all():
        return "not finite"
    scale = max(right.abs().max().item(), 0.1)
    gap = (left - right).abs().max().item()
    return "" if gap <= tolerance * scale else f"differs by {gap:.2e} at a scale of {scale:.2e}"
