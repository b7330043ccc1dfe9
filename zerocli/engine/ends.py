"""The ends of the model: where a loss scale must not show.

Under fp16 the loss is multiplied by a scale before backward, and the engine divides its own gradients by it. A tensor
of the user's outside the model (an input that wants its gradient, a head of their own) must get the plain gradient.
Those tensors are found by a walk over the part of the graph that lies outside: from the loss to the model's outputs,
and from its inputs on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerocli.engine.parameters import is_sharded


class Ends:
    """What went into the model's calls and came out of them since the last backward."""

    def __init__(self) -> None:
        self._outputs: set[Any] = set()
        self._inputs: list[torch.Tensor] = []

    def note_inputs(self, values: Any) -> None:
        self._inputs += [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.requires_grad]

    def note_output(self, value: torch.Tensor) -> None:
        self._outputs.add(value.grad_fn)

    def clear(self) -> None:
        self._outputs.clear()
        self._inputs.clear()

    @contextlib.contextmanager
    def unscaled(self, loss: torch.Tensor, scale: torch.Tensor) -> Iterator[None]:
        """While the body runs the backward of a scaled loss, leaves outside the model get the gradient of the loss."""
        leaves = self._leaves(loss)
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, old in zip(leaves, before, strict=True):
                new = None if leaf.grad is None else (leaf.grad / scale).to(leaf.grad.dtype)
                leaf.grad = old if new is None else new if old is None else old + new

    def _leaves(self, loss: torch.Tensor) -> list[torch.Tensor]:
        found = {id(value): value for value in self._inputs if value.is_leaf}
        left = [loss.grad_fn, *(value.grad_fn for value in self._inputs)]
        seen: set[Any] = set()
        while left:
            node = left.pop()
            if node is None or node in seen or node in self._outputs:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor) and not is_sharded(leaf):
                found[id(leaf)] = leaf
            left += [following for following, _ in node.next_functions]
        return list(found.values())
