"""Precision: the compute dtype of parameters, and the dynamic loss scale that keeps fp16 gradients from underflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zerocli.errors import Refused


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters, activations and gradients; the optimizer always works in fp32."""

    name: str
    compute: torch.dtype
    scales: bool = False
    """Whether the loss is scaled dynamically."""


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16, scales=True),
}


def precision(name: str, device: torch.device) -> tuple[Precision, str]:
    """Return the precision and the reason for it; `auto` selects bf16 if the device supports it."""
    if name != "auto":
        if name not in PRECISIONS:
            raise ValueError(f"precision {name!r} is not one of auto, {', '.join(PRECISIONS)}")
        return PRECISIONS[name], "as asked"
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return PRECISIONS["bf16"], "GPU supports it"
    return PRECISIONS["fp32"], "no GPU with bf16"


def refuse_half(model: nn.Module, chosen: Precision, loaded: bool) -> None:
    """Refuse to train a model with bf16 or fp16 parameters in fp32, unless its values are `loaded` later: its code is
    made for the dtypes that it has, and torch would compute in them."""
    kinds = {p.dtype: n for n, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}
    halves = [name for name in PRECISIONS if PRECISIONS[name].compute in kinds.keys() - {torch.float32}]
    if chosen.compute == torch.float32 and not loaded and halves:
        name, others = halves[0], " and keeps the others as they are" if torch.float32 in kinds else ""
        which = f"{kinds[PRECISIONS[name].compute]} is" if others else "all parameters of the model are"
        raise Refused(
            f'{which} {name}, and the precision is fp32: pass shard(..., precision="{name}"), which trains in {name} '
            f"with an fp32 copy for the optimizer{others}, or call model.float() before"
        )


class LossScale:
    """A loss scale on the device: halved when gradients overflow, doubled after `interval` steps without overflow."""

    def __init__(self, active: bool, device: torch.device, initial: float = 2.0**16, interval: int = 2000) -> None:
        self.active = active
        self.value = torch.full((), initial if active else 1.0, device=device)
        self._streak = torch.zeros((), dtype=torch.int32, device=device)
        self._interval = interval

    def update(self, overflow: torch.Tensor) -> None:
        """Adapt the scale to whether this step overflowed (1.0) or not (0.0), without a host sync."""
        if self.active:
            torch._amp_update_scale_(self.value, self._streak, overflow, 2.0, 0.5, self._interval)

    def state(self) -> dict[str, float]:
        return {"scale": self.value.item(), "streak": self._streak.item()}

    def load(self, state: dict[str, float]) -> None:
        self.value.fill_(state["scale"])
        self._streak.fill_(int(state["streak"]))
