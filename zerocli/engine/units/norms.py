"""Norms of gradients: each rank measures the pieces of the slices it owns, and adds their squares in a fixed order.

[Note: one norm for all stages and placements] The pieces depend only on the layout and the bucket size, so the norm has
the same bits whether gradients are whole or partitioned, on the device or offloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerocli.engine.units.buckets import BucketPlans
from zerocli.engine.units.unit import Flat
from zerocli.layout.shards import Span

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine

NORM_ROW = 4096
"""Elements that a CPU adds up in fp32 at a time."""


class GradientNorms:
    """The norms of this rank's pieces; gradients replicated over tensor-parallel ranks are made equal before.

    Sums in different data-parallel groups may be rounded differently, so replicated gradients can differ.
    """

    def __init__(self, flats: list[Flat], plans: BucketPlans, engine: Engine) -> None:
        self._flats, self._plans, self._device = flats, plans, engine.device
        self._tensor_parallel, self._replicas = engine.tensor_parallel, engine.replicas
        self._norms: dict[tuple[int, int], torch.Tensor] = {}
        """By (index of the flat, first column)."""

    def clear(self) -> None:
        self._norms.clear()

    def measure_on_device(self) -> None:
        """Measure all gradients on the device."""
        for flat in self._flats:
            same = Span(flat.replicated, flat.layout.total).intersect(flat.held).shifted(-flat.held.start)
            if flat.gradient.held is not None and same.numel:
                self._tensor_parallel.agree_(
                    flat.gradient.held[same.start : same.stop], f"gradients of {flat.unit.title}"
                )
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        for index, flat in enumerate(self._flats):
            if flat.gradient.held is not None:
                start = flat.own.start - flat.held.start
                for plan in self._plans.of(flat):
                    for columns in _measured(flat, plan.columns):
                        pieces[index, columns.start] = flat.gradient.held[start + columns.start : start + columns.stop]
        if pieces:
            values = list(pieces.values())
            # On a GPU with few kernel launches.
            many = torch._foreach_norm(values, 2, torch.float32) if values[0].is_cuda else map(_norm, values)
            self._norms.update(zip(pieces, many, strict=True))

    def measure_offloaded(self) -> None:
        """Fetch and measure all offloaded gradients, piece by piece; write back those that were made equal."""
        for flat in self._flats:
            if (store := flat.gradient.store) is None:
                continue
            for plan in self._plans.of(flat):
                piece = torch.empty(plan.columns.numel, dtype=store.dtype, device=self._device)
                store.fetch(plan.columns.start, piece).wait()
                self.measure_piece(flat, plan.columns, piece)
                if flat.own.start + plan.columns.stop > flat.replicated:
                    store.put(plan.columns.start, piece).synchronize()

    def measure_piece(self, flat: Flat, columns: Span, piece: torch.Tensor) -> None:
        """Measure the gradient of these columns of the owned slice."""
        for part in _measured(flat, columns):
            measured = piece[part.start - columns.start : part.stop - columns.start]
            if flat.own.start + part.start >= flat.replicated:
                self._tensor_parallel.agree_(measured, f"gradients of {flat.unit.title}")
            self._norms[self._flats.index(flat), part.start] = _norm(measured)

    def sum_of_squares(self) -> torch.Tensor:
        """Return this rank's part of the sum of squares, in fp64: a gradient that n ranks hold counts as 1/n of it."""
        squares, each = torch.zeros((), dtype=torch.float64, device=self._device), self._replicas.world
        norms: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for (index, start), norm in sorted(self._norms.items(), key=lambda each: each[0]):
            flat = self._flats[index]
            norms[flat.own.start + start >= flat.replicated].append(norm)
        for replicated, copies in ((False, each), (True, each * self._tensor_parallel.world)):
            if norms[replicated]:
                squares = squares + torch.stack(norms[replicated]).double().square().sum() / copies
        return squares


def _measured(flat: Flat, columns: Span) -> list[Span]:
    """Split columns of the owned slice at the border between split and replicated parameters."""
    at = min(max(flat.replicated - flat.own.start, columns.start), columns.stop)
    return [span for span in (Span(columns.start, at), Span(at, columns.stop)) if span.numel]


def _norm(piece: torch.Tensor) -> torch.Tensor:
    """Return the norm of a piece, accurate to fp32 rounding.

    On a CPU torch accumulates a whole piece in a few fp32 sums: with eight million elements the error is 2e-4, so the
    norm is computed over rows of NORM_ROW elements.
    """
    if piece.is_cuda or piece.numel() <= NORM_ROW:
        return torch._foreach_norm([piece], 2, torch.float32)[0]
    whole = piece.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(piece[:whole].view(-1, NORM_ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(piece[whole:], dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64)
    return norm.float()
