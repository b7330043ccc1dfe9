"""Keys and values of the tokens that a decoder has seen, so that the next token costs a forward of one token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zerocli.models.parts import attend


class LayerCache:
    """The keys and values of one layer, (batch, kv_heads, capacity, head_dim) each; allocated with the first ones."""

    def __init__(self, capacity: int, window: int = 0) -> None:
        self.length = 0
        """Tokens in it."""
        self._capacity, self._window = capacity, window
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the keys and values of new tokens, and return the attention of these tokens to all, as `attend` does.

        Several tokens are those that a text begins with; later ones come one by one.
        """
        first, self.length = self.length, self.length + k.shape[1]
        assert first == 0 or k.shape[1] == 1, "after the first tokens, one at a time"
        if self._keys is None or self._values is None:
            shape = (k.shape[0], k.shape[2], self._capacity, k.shape[3])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, :, first : self.length] = k.transpose(1, 2)
        self._values[:, :, first : self.length] = v.transpose(1, 2)
        if first == 0:
            return attend(q, k, v, mask=mask)
        since = max(0, self.length - self._window) if self._window else 0
        keys, values = (each[:, :, since : self.length] for each in (self._keys, self._values))
        # The query heads that share a head of keys are its queries: one token attends to all that are there.
        grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
        out = F.scaled_dot_product_attention(grouped, keys, values)
        return out.reshape(q.shape[0], 1, -1)


class Cache:
    """The caches of a decoder's layers."""

    def __init__(self, windows: list[int], capacity: int) -> None:
        """`windows` has the tokens that each layer attends to, 0 for all; `capacity` is in tokens."""
        self.layers = [LayerCache(capacity, window) for window in windows]

    @property
    def length(self) -> int:
        """Tokens in it."""
        return self.layers[0].length

    def positions(self, tokens: Tensor) -> Tensor | None:
        """Return the positions of new tokens; None for the first ones, which begin at 0."""
        if not self.length:
            return None
        last = self.length + tokens.shape[1]
        return torch.arange(self.length, last, device=tokens.device).expand(tokens.shape)
