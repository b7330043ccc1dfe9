"""The inputs and outputs of the model, outside of which the loss scale must not be visible.

Under fp16 the loss is multiplied by a scale before backward, and the engine divides its own gradients by it. A user's
tensor outside the model (an input that requires a gradient, a custom head) must get the unscaled gradient. Those
tensors are found by walking the autograd graph outside the model: from the loss to the model's outputs, and from its
inputs on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerocli.engine.guards.parameters import is_sharded


class Ends:
    """Inputs and outputs of the model's calls since the last backward."""

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
        """Give leaves outside the model unscaled gradients while the body runs the backward of a scaled loss."""
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
