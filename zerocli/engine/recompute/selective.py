"""Selective recomputation: a block keeps the outputs of its expensive operations and runs the others again.

[Note: selective recomputation]
Torch's non-reentrant checkpoint runs a block twice: in forward, and in backward when the first saved tensor is needed.
Under `KeptOutputs.running` the first run keeps the outputs of matrix products and attention, and the second returns
them in the same order in place of computing them. Norms, activation functions, rotations, dropout and additions run
again. Three rules keep the numbers exact:

- An output that is changed in place after it was made is not kept, because its first value is gone.
- Attention that draws random numbers is not kept: dropout after it would draw others than in forward.
- An output that is kept no more (a second backward through one graph) is computed again.

An output that nothing needs in backward is freed at the end of forward: recomputation stops at the last saved tensor,
so it never gets there. That is usually a block's last matrix product.

torch's own `create_selective_checkpoint_contexts` serves compiled blocks, where torch plans the graph (compiled.py). It
does not serve eager ones. It counts all operations, and those of the engine inside a block (a gather, an update) differ
between the two runs. It does not see changes in place behind the view that `F.linear` returns, and does not restore the
random numbers that kept operations drew. It also keeps the last product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from zerocli.errors import Refused

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
MAX_CHEAP_INNER = 256
"""A batched product over an inner dimension of at most this size is cheap: moving its result takes as long as computing
it.

These are the scores of attention that is written out; they have seq x seq elements per head.
"""


def _find(names: tuple[str, ...]) -> dict[Any, int | None]:
    """Return the operations of these names that this torch has, each with the position of its `dropout_p`, if any."""
    found: dict[Any, int | None] = {}
    for name in names:
        if (operation := getattr(torch.ops.aten, name, None)) is not None:
            arguments = [each.name for each in operation.default._schema.arguments]
            found[operation.default] = arguments.index("dropout_p") if "dropout_p" in arguments else None
    return found


EXPENSIVE = _find((*_PRODUCTS, "convolution", *_ATTENTIONS))
_BATCHED = {torch.ops.aten.bmm.default: 0, torch.ops.aten.baddbmm.default: 1}
"""Batched products, and which argument is their first factor."""


def is_kept(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether a selective block keeps the output of this call."""
    if operation not in EXPENSIVE:
        return False
    if operation in _BATCHED:
        return int(args[_BATCHED[operation]].shape[-1]) > MAX_CHEAP_INNER
    place = EXPENSIVE[operation]
    if place is None:
        return True
    return not (args[place] if len(args) > place else (kwargs or {}).get("dropout_p", 0.0))


def _policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = is_kept(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


compiled_contexts: Callable[[], Any] = functools.partial(create_selective_checkpoint_contexts, _policy)
"""The `context_fn` of a checkpoint inside a compiled graph."""


class _Output:
    """What one call of an expensive operation returned, until it is dropped or taken."""

    def __init__(self, operation: Any, value: Any, num_saved: int) -> None:
        self.operation, self.value, self.num_saved = operation, value, num_saved
        self.num_changes = 0
        """Changes in place with which it is kept: see `change_once`."""

    @property
    def storages(self) -> list[int]:
        return [each.untyped_storage()._cdata for each in tree_leaves(self.value) if isinstance(each, torch.Tensor)]


class KeptOutputs:
    """The kept outputs of one call of a block; see [Note: selective recomputation]."""

    def __init__(self, ended: Callable[[], bool] = lambda: False) -> None:
        self._ended = ended
        """Whether torch has ended the recomputation: a forward that catches its exception goes on, for nothing."""
        self._outputs: list[_Output] = []
        self._storages: dict[int, _Output] = {}
        """Kept outputs by storage; in the recomputation those that were returned and are about to be changed."""
        self._next = 0
        self._num_saved = 0
        """Number of tensors that autograd has saved so far in this call's forward."""
        self._recorded = self._runs = False
        self._paused = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep outputs while the body runs the block's forward; when it runs the recomputation, return them."""
        if self._runs:  # a gradient inside the block's forward recomputes what it has done so far
            with self.paused():
                yield
            return
        mode = _Mode(self._replay if self._recorded else self._record)
        self._runs, self._storages, self._next = True, {}, 0
        _running.append(self)
        try:
            if self._recorded:
                with mode:
                    yield
            else:
                with self._counting(), mode:
                    yield
                self._recorded = True
                # Outputs that were made after the last tensor was saved: recomputation stops before them.
                for output in self._outputs:
                    if output.num_saved >= self._num_saved:
                        output.value = None
        finally:
            self._runs, self._storages = False, {}
            _running.pop()

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert outer is not None  # those of the checkpoint
        outer_pack, outer_unpack = outer

        def pack(tensor: torch.Tensor) -> Any:
            self._num_saved += 1
            return outer_pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, outer_unpack):
            yield

    def _record(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if self._paused:
            return operation(*args, **kwargs)
        if self._storages and _changes(operation):
            for tensor in _changed(operation, args, kwargs):
                self._drop(tensor)
        num_saved = self._num_saved
        value = operation(*args, **kwargs)
        if operation in EXPENSIVE:
            # Without its place in the graph, which would keep the graph alive.
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, value) if is_kept(operation, args, kwargs) else None
            output = _Output(operation, kept, num_saved)
            self._outputs.append(output)
            self._storages.update(dict.fromkeys(output.storages, output))
        return value

    def _drop(self, tensor: torch.Tensor) -> None:
        if (output := self._storages.get(tensor.untyped_storage()._cdata)) is not None:
            self._forget(output)
            output.value = None

    def _forget(self, output: _Output) -> None:
        self._storages = {storage: each for storage, each in self._storages.items() if each is not output}

    def _replay(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if self._paused or operation not in EXPENSIVE:
            return operation(*args, **kwargs)
        if self._next >= len(self._outputs) or self._outputs[self._next].operation is not operation:
            if self._ended():
                return operation(*args, **kwargs)
            raise Refused(
                f"a block that is recomputed selectively ran {operation} in backward, and another operation in its "
                "place in forward: its forward must do the same each time, or be excluded with shard(..., "
                "recompute=...)"
            )
        output = self._outputs[self._next]
        self._next += 1
        if output.num_changes:
            self._storages.update(dict.fromkeys(output.storages, output))
        value, output.value = output.value, None
        return operation(*args, **kwargs) if value is None else value

    # -- what the engine does inside a block -----------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def change_once(self, tensor: torch.Tensor, change: Callable[[], None]) -> None:
        output = self._storages.get(tensor.untyped_storage()._cdata)
        if output is None:
            change()
        elif not self._recorded:
            with self.paused():
                change()
            output.num_changes += 1
        else:
            output.num_changes -= 1
            if not output.num_changes:
                self._forget(output)


_running: list[KeptOutputs] = []
"""The calls of selective blocks that are running; the last one is innermost."""


def change_once(tensor: torch.Tensor, change: Callable[[], None]) -> None:
    """Run `change`, which changes `tensor` in place; not in a recomputation whose kept output has the change already.

    For the sums of tensor parallelism: a product is kept with its sum.
    """
    if _running:
        _running[-1].change_once(tensor, change)
    else:
        change()


def paused() -> contextlib.AbstractContextManager[None]:
    """Return a context for operations of the engine inside a block: they are not the block's, and run as they are."""
    return _running[-1].paused() if _running else contextlib.nullcontext()


class _Mode(TorchDispatchMode):
    """Hands each operation to a function."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(operation, args, kwargs or {})


@functools.cache
def _changes(operation: Any) -> bool:
    """Whether an operation may change its arguments; the schemas of c10d's collectives do not say."""
    schema = getattr(operation, "_schema", None)  # a higher-order operator has none
    return schema is not None and (operation.namespace == "c10d" or bool(schema.is_mutable))


def _changed(operation: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call may change."""
    everything = operation.namespace == "c10d"
    for at, argument in enumerate(operation._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if everything or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))
