"""The update of a part of a chunk, in memory of one device: by torch's operations, or by compiled code on the CPU.

Where triton is installed, a GPU updates a chunk in one pass instead: see `can_fuse`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zerocli.engine.optimizer.compiled_update import CompiledAdam
from zerocli.engine.optimizer.optim import At, FlatOptimizer, FusedAdam, Group, Piece, StepValues
from zerocli.engine.units.master import REMAINDER, join, narrow, split_
from zerocli.engine.units.unit import MASTER
from zerocli.layout.flats import Sizing

if TYPE_CHECKING:  # needs triton
    from zerocli.engine.optimizer.update_kernels import FusedAdamUpdate


def can_fuse(rule: FlatOptimizer, device: torch.device) -> bool:
    """Whether the rule has a fused update on this device: of parameters, master, states and gradient in one pass."""
    fits = type(rule) is FusedAdam and "max_exp_avg_sq" not in rule.state_names
    return device.type == "cuda" and fits and importlib.util.find_spec("triton") is not None


def fused_update(rule: FlatOptimizer) -> FusedAdamUpdate:
    """Return the rule's fused update; see `can_fuse`."""
    from zerocli.engine.optimizer.update_kernels import FusedAdamUpdate

    assert isinstance(rule, FusedAdam)
    return FusedAdamUpdate(rule.decoupled)


def empty_beside(device: torch.device, numel: int, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Return memory of `place`, page-locked on the host of a GPU: only copies from and to such run beside the host."""
    pin = place.type == "cpu" and device.type == "cuda"
    return torch.empty(numel, dtype=dtype, device=place, pin_memory=pin)


class PieceUpdate:
    """Updates pieces by a rule, with scratch memory of its own."""

    def __init__(
        self, rule: FlatOptimizer, device: torch.device, sizing: Sizing, compiled: CompiledAdam | None = None
    ) -> None:
        """Take the rule's `compiled` kernel for updates on the CPU, if there is one."""
        self._rule, self._device, self._sizing, self._compiled = rule, device, sizing, compiled
        self._scratch: dict[tuple[str, str], torch.Tensor] = {}
        """fp32 memory by use and device type."""
        self._inverse: tuple[StepValues, torch.Tensor | None] | None = None
        """The step's values on the CPU, and the factor that stands for dividing by their scale; None: it is 1."""

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the scratch memory, on the device and on the host."""
        for buffer in self._scratch.values():
            yield "buffers", "update scratch", buffer

    def update(
        self,
        part: slice,
        arrays: dict[str, torch.Tensor],
        grad: torch.Tensor,
        target: torch.Tensor | None,
        values: StepValues,
        group: Group,
        at: At,
    ) -> None:
        """Update a part of a chunk: its master, states and parameters; it fits the cache unless that is compiled."""
        states = {name: arrays[name][part] for name in self._rule.state_names}
        device = grad.device
        split = REMAINDER in arrays
        # Another memory if the CPU updates states whose parameters, fp32 ones or those to be written, are on a GPU.
        master = arrays[REMAINDER if split else MASTER][part].to(device)
        parameters = target[part] if target is not None else None
        if parameters is not None and parameters.device != device:
            parameters = parameters.to(device) if split else torch.empty_like(parameters, device=device)
        piece = Piece(parameters, master, grad[part], states, group, at)
        if self.is_compiled(grad, target, values):
            assert self._compiled is not None
            factor = self._factor(values)
            done = self._compiled.update(piece, 1.0 if factor is None else factor.item())
            if done < piece.grad.numel():
                self._update_plain(piece.after(done), values)
        else:
            self._update_plain(piece, values)
        if not split and master.device != arrays[MASTER].device:
            arrays[MASTER][part].copy_(master)
        if target is not None and parameters is not None and parameters.device != target.device:
            target[part].copy_(parameters, non_blocking=not split)

    def is_compiled(self, grad: torch.Tensor, target: torch.Tensor | None, values: StepValues) -> bool:
        """Whether the compiled kernel makes the update; a step that changes nothing is left to torch's operations."""
        return self._compiled is not None and self._compiled.takes(grad, target) and not values.skip

    def _update_plain(self, piece: Piece, values: StepValues) -> None:
        parameters, master, grad = piece.parameters, piece.master, piece.grad
        if master.dtype != torch.int16:
            self._rule.update(master, *self._fp32(grad, values), piece.states, piece.group, piece.at)
            if parameters is not None:
                parameters.copy_(narrow(master, parameters.dtype))
            return
        assert parameters is not None
        joined, bits = (self._scratch_of(use, grad.device, grad.numel()) for use in ("master", "bits"))
        join(parameters, master, joined, bits)
        self._rule.update(joined, *self._fp32(grad, values), piece.states, piece.group, piece.at)
        split_(joined, parameters, master, bits)

    def _scratch_of(self, use: str, device: torch.device, numel: int) -> torch.Tensor:
        """Return `numel` elements of fp32 scratch memory, in which narrower parameters are updated."""
        scratch = self._scratch.get((use, device.type))
        if scratch is None or scratch.numel() < numel:
            least = self._sizing.update_chunk(torch.bfloat16.itemsize, device.type)
            scratch = empty_beside(self._device, max(numel, least), torch.float32, device)
            self._scratch[use, device.type] = scratch
        return scratch[:numel]

    def _fp32(self, grad: torch.Tensor, values: StepValues) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient in fp32, copied if necessary, and the scale that the kernel has to divide it by."""
        if grad.dtype != torch.float32:
            grad = self._scratch_of("grad", grad.device, grad.numel()).copy_(grad)
        if grad.is_cuda:
            return grad, values.grad_scale
        factor = self._factor(values)
        return (grad if factor is None else grad.mul_(factor)), None

    def _factor(self, values: StepValues) -> torch.Tensor | None:
        """Return what gradients on the CPU are multiplied by, instead of a division by the step's scale.

        The CPU kernel is 20% slower when it scales, and division costs more than multiplication. The piece is in
        cache, and the scale is in host memory.
        """
        if self._inverse is None or self._inverse[0] is not values:
            self._inverse = values, None if values.grad_scale == 1 else 1 / values.grad_scale
        return self._inverse[1]
