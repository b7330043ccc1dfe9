"""Following memory: every storage that an operation makes is in the ledger until its last reference is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerocli.engine.optimizer.dataflow import tensors_in
from zerocli.profile.ledger import UNATTRIBUTED, Ledger

_LOSS_OPS = {"aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::nll_loss_forward"}
"""Operations that make or read logits in models that do not use our own loss."""
_FRESH = "aten::lift_fresh"
"""Operation that introduces new memory not made by any operation: torch.tensor, torch.from_numpy."""
RUNTIME = "runtime"
"""Category of memory that is the communication library's own: it is no tensor of the run, and not counted."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Follower(TorchDispatchMode):
    """While entered, logs the storages on `device` that operations make; frees are logged even after it is left.

    `category` returns the category of memory made now, `unseen` that of memory whose creation was not seen: usually
    unattributed, under the operation that used it, until it is named. Memory that a kernel allocates and frees
    internally is invisible here.
    """

    def __init__(
        self, ledger: Ledger, device: torch.device, category: Callable[[], str], unseen: Callable[[], str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._device = ledger, device.type
        self._category, self._unseen = category, unseen
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._entered = False

    def follow(self, on: bool) -> None:
        """Enter or leave the mode; repeated calls do nothing."""
        if on and not self._entered:
            self.__enter__()  # type: ignore[no-untyped-call]
        elif not on and self._entered:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._entered = on

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = function._schema.name
        about_logits = operation in _LOSS_OPS
        for tensor in tensors_in((args, kwargs)):
            self._meet(tensor, operation, about_logits)
        out = function(*args, **kwargs)
        for tensor in tensors_in(out):
            self._log(tensor, "logits" if about_logits else self._category(), operation)
        return out

    def _meet(self, tensor: torch.Tensor, operation: str, about_logits: bool) -> None:
        unseen = self._unseen()
        known = tensor.untyped_storage()._cdata in self._references
        self._log(tensor, self._category() if operation == _FRESH else unseen, operation)
        if unseen == RUNTIME and not known:
            self.disown(tensor)
        if about_logits and operation == "aten::_log_softmax":
            found = self.find(tensor)
            if found is not None and found.category == "activations":
                found.category = "logits"

    def _log(self, tensor: torch.Tensor, category: str, operation: str) -> None:
        if tensor.device.type != self._device or type(tensor) not in _PLAIN:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return
        self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        unit = self._ledger.moment[1]
        what = operation.removeprefix("aten::") if category == UNATTRIBUTED or not unit else category
        made = f"{operation.removeprefix('aten::')} {'x'.join(map(str, tensor.shape))}"
        self._ledger.take(key, storage.nbytes(), category, f"{unit} {what}".strip(), made)

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        self._ledger.give(key)

    # -- what others know ------------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> Any:
        """Return the allocation that holds a tensor, if it is known."""
        return self._ledger.get(tensor.untyped_storage()._cdata)

    def name(self, tensor: torch.Tensor, category: str, name: str) -> None:
        """Set the category and name of a tensor's memory, back to its allocation; logs it if it was not known."""
        if tensor.device.type != self._device or not tensor.untyped_storage().nbytes():
            return
        found = self.find(tensor)
        if found is None:
            self._log(tensor, category, name)
            found = self.find(tensor)
        if found is not None:
            found.category, found.name = category, name

    def disown(self, tensor: torch.Tensor) -> None:
        """Remove a tensor's memory from the ledger: it belongs to another tier."""
        if tensor.device.type == self._device and tensor.numel():
            key = tensor.untyped_storage()._cdata
            if key not in self._references:
                self._log(tensor, UNATTRIBUTED, "")
            self._ledger.disown(key)
