"""The work of one operation: products, attention, bytes of other kernels. For models without a formula, which are
traced (`zerocli.plan.models.record`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zerocli.engine.optimizer.dataflow import tensors_in
from zerocli.plan.blocks.work import Work
from zerocli.plan.time.compute import BACKWARD_OPS

BALANCE = {2: 160.0, 4: 12.0}
"""Operations for each byte that a matrix product reads or writes, by the bytes of a number, below which an H200 waits
for memory. Such are products with a short inner dimension: queries and keys, where attention has no kernel of its own.
"""
ATTENTION = "scaled_dot_product"
NO_KERNEL = ("empty", "new_empty", "detach", "alias", "lift", "is_", "sym_", "_unsafe_view")
"""How the names of operations begin that launch nothing."""


def work_of(function: Any, args: Any, kwargs: Any, out: Any, in_loss: bool = False) -> Work:
    """Return what one operation computes. Of the chunked loss (`in_loss`) only products count, and what they read and
    write: on a GPU one kernel does the rest, in place.
    """
    if _launches_nothing(function):
        return Work()
    found = _work_of(function, args, kwargs, out)
    if not in_loss:
        return found
    return dataclasses.replace(found, moved=_nbytes(args, kwargs, out)) if found.products else Work()


def _launches_nothing(function: Any) -> bool:
    """Return whether an operation only makes a view or uninitialised memory."""
    space, _, name = function._schema.name.partition("::")
    if space == "prim" or name.startswith(NO_KERNEL):
        return True
    returned = [each.alias_info for each in function._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


def _work_of(function: Any, args: Any, kwargs: Any, out: Any) -> Work:
    name = function._schema.name
    if ATTENTION in name:
        q, k, v = args[1:4] if "backward" in name else args[:3]  # the output's gradient comes first
        causal = any(each is True for each in (*args, *kwargs.values()))
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
        operations = 2.0 * pairs * (q.shape[3] + v.shape[3])
        return Work(attention=operations * (BACKWARD_OPS if "backward" in name else 1.0), calls=1.0)
    counted = flop_registry.get(_not_in_place(function))
    if counted is not None:
        operations = float(counted(*args, **kwargs, out_val=out))
        width = next((each.element_size() for each in tensors_in(out)), 2)  # a convolution's backward makes several
        waits = max(0.0, _nbytes(args, kwargs, out) - operations / BALANCE.get(width, BALANCE[2]))
        return Work(products=operations, moved=waits, calls=1.0)
    return Work(moved=_nbytes(args, kwargs, out), calls=1.0)


def _not_in_place(function: Any) -> Any:
    """Return the operation of torch's own; for one that writes into its first argument, that which makes a tensor."""
    space, _, name = function._schema.name.partition("::")
    return getattr(torch.ops.aten, name.removesuffix("_"), None) if space == "aten" else None


def _nbytes(*values: Any) -> float:
    """Return the bytes of all tensors that an operation reads or writes, each once."""
    seen = {id(each): each for each in tensors_in(values)}
    return float(sum(math.prod(each.shape) * each.element_size() for each in seen.values()))
