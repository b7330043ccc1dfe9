"""The fp32 master of bf16 parameters, kept as a 16-bit remainder beside them.

[Note: split master] The parameter is the master rounded to bf16, ties away from zero. The difference of their bit
patterns, `master - (parameter << 16)`, then lies in [-32768, 32767]: an int16 holds it, and the sum gives back every
bit of the master. (If ties went to even, as torch rounds, the difference could also be +32768.) The same rounding is
used where the master is stored as fp32, so both ways of storing it train bit for bit alike.
"""

from __future__ import annotations

import torch

from zerocli.layout.constants import NARROWED_AT_A_TIME

REMAINDER = "remainder"
"""Name of the array that holds the master's low bits."""


def join(
    parameters: torch.Tensor,
    remainder: torch.Tensor,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the fp32 master of bf16 parameters and their int16 remainder; `scratch` is fp32 memory to work in."""
    master = torch.empty_like(parameters, dtype=torch.float32) if out is None else out
    low = (torch.empty_like(master) if scratch is None else scratch).view(torch.int32)
    master.copy_(parameters)  # the bf16 bits become the upper half
    master.view(torch.int32).add_(low.copy_(remainder))
    return master


def split_(
    master: torch.Tensor, parameters: torch.Tensor, remainder: torch.Tensor, scratch: torch.Tensor | None = None
) -> None:
    """Write the rounded master to `parameters` and what that leaves to `remainder`; `master` is overwritten."""
    bits = master.view(torch.int32)
    rounded = torch.empty_like(master) if scratch is None else scratch
    parameters.copy_(_past_ties(bits, rounded))
    rounded.copy_(parameters)
    remainder.copy_(bits.sub_(rounded.view(torch.int32)))


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bf16 parameters and the int16 remainder of an fp32 master, which stays as it is."""
    parameters = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_(master.clone(), parameters, remainder)
    return parameters, remainder


def narrow(values: torch.Tensor, dtype: torch.dtype, copy: bool = False) -> torch.Tensor:
    """Return values in the compute dtype; fp32 is rounded to bf16 as `split_` does."""
    if dtype == torch.bfloat16 and values.dtype == torch.float32:
        values = values.contiguous()
        out = torch.empty_like(values, dtype=dtype)
        rounded = values.new_empty(min(values.numel(), NARROWED_AT_A_TIME))
        for part, made in zip(*(each.view(-1).split(NARROWED_AT_A_TIME) for each in (values, out)), strict=True):
            made.copy_(_past_ties(part.view(torch.int32), rounded[: part.numel()]))
        return out
    return values.to(dtype, copy=copy)


def _past_ties(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return fp32 values that torch rounds to bf16 as the master is rounded: where bit 15 is set, bit 0 is too.

    So a tie becomes more than a tie, and no other value crosses one; infinities and NaN stay.
    """
    past = torch.bitwise_right_shift(bits, 15, out=out.view(torch.int32))
    past.bitwise_and_(1).bitwise_or_(bits)
    return out
