"""Whether a recomputation gives what the first run of a block gave: two sums of each tensor that autograd saves, and of
each that the block returns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerocli.errors import Refused

_Sums = list[tuple[torch.dtype, torch.Tensor | None]]
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-4}
_HALF_TOLERANCE = 1e-2
"""Relative to the sum of absolute values: some kernels add in another order each time."""


class SavedValues:
    """The sums of what autograd saved in the first run of one call, and of what it returned."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: dict[str, _Sums] = {}
        """What the first run saved, and what it returned."""
        self.ended = False
        """Whether torch has ended the recomputation that runs."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Note what autograd saves while the body runs the first time; raise Refused if it saves other values later."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            yield
            return
        outer_pack, outer_unpack = outer
        found: _Sums = []
        self.ended = False

        def pack(tensor: torch.Tensor) -> Any:
            if self.ended:  # the forward has caught the exception, and goes on
                return tensor
            found.append((tensor.dtype, _sums(tensor)))
            try:
                return outer_pack(tensor)
            except BaseException as error:
                self.ended = is_end(error)
                raise

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, outer_unpack):
                yield
        except BaseException as error:
            if is_end(error):
                self._compare(self._first.get("saved", []), found)
            raise
        self._compare(self._first.setdefault("saved", found), found)

    def returned(self, output: Any) -> None:
        """Note what the first run returned; raise Refused if a later one returns other values."""
        found = [(leaf.dtype, _sums(leaf)) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self._compare(self._first.setdefault("returned", found), found)

    def _compare(self, before: _Sums, found: _Sums) -> None:
        if before is found:
            return
        for (dtype, first), (_, again) in zip(before, found, strict=False):
            if first is not None and again is not None and not _alike(first.tolist(), again.tolist(), dtype):
                raise Refused(
                    f"{self._name} is recomputed, and its forward computed other values in backward than before: it "
                    "depends on something that changes from call to call, and that the engine cannot put back. Keep it "
                    "in a buffer or an attribute, or exclude the block with shard(..., recompute=...)"
                )


def is_end(error: BaseException | None) -> bool:
    """Whether this is torch's way to end a recomputation."""
    return type(error).__name__ == "_StopRecomputationError"


def _sums(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sum and the sum of absolute values; None of a tensor that has no such values."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if not tensor.numel() or tensor.is_quantized or tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        return None
    # Memory that nothing has written: the workspace of an LSTM, the seed of a fused attention that drops nothing.
    whole_number = not tensor.is_floating_point() and not tensor.is_complex()
    if tensor.dtype == torch.uint8 or (whole_number and tensor.numel() <= 2):
        return None
    with torch.no_grad():
        values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        if not values.is_floating_point():
            return torch.stack((values.sum(), values.count_nonzero())).double()
        kind = torch.promote_types(values.dtype, torch.float32)
        return torch.stack((values.sum(dtype=kind), torch.linalg.vector_norm(values, 1, dtype=kind)))


def _alike(first: list[float], again: list[float], dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point and not dtype.is_complex:
        return first == again
    if not all(map(math.isfinite, (*first, *again))):
        return [*map(math.isfinite, first)] == [*map(math.isfinite, again)]
    tolerance = _TOLERANCE.get(dtype, _HALF_TOLERANCE) * max(first[1], again[1])
    return all(abs(a - b) <= tolerance for a, b in zip(first, again, strict=True))
