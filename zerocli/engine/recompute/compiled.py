"""Compiled blocks: a model's repeated blocks go through torch.compile; equal blocks share one compilation.

[Note: what is compiled]
Only blocks that repeat are compiled: an embedding, a head or the rest runs once per pass, so it would cost a
compilation of its own. The compiled function takes the block's module as an argument. torch.compile then treats its
parameters as inputs of the graph, and every block of the same structure passes the same guards.

[Note: recomputation of compiled blocks]
A recomputed block is compiled with the checkpoint inside the graph. torch then partitions the graph so that forward
saves only the block's inputs, and backward recomputes what it needs and no more. The saved inputs and parameters still
pass through the saved-tensor hooks that are active at run time (saved_views.py, activations.py). A block that cannot
be one graph is checkpointed outside its compiled parts, as an eager block is. Of a block that is recomputed selectively
torch saves the outputs that selective.py names too; such a block that cannot be one graph runs eagerly.

A failed compilation never ends a run. Backward graphs are compiled in forward too, so a failure comes before the block
has computed anything; the call is then repeated eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from zerocli import machine
from zerocli.engine.recompute.selective import compiled_contexts
from zerocli.engine.units.divide import of_one_class
from zerocli.engine.units.unit import Unit
from zerocli.errors import Refused
from zerocli.layout.constants import MIN_COMPILED_STEPS
from zerocli.layout.sizes import count_of

NOT, WHOLE, SELECTIVE = "kept", "whole", "selective"
"""How a block is recomputed in backward."""

NOT_RUN = object()
"""Returned in place of a block's output if the block could not be run in this way."""


def choose_compile(
    setting: bool | str, device: torch.device, num_blocks: int, steps: int, backend: str = "inductor"
) -> tuple[bool, str]:
    """Return whether blocks are compiled, and the reason; `auto` compiles long runs on a GPU."""
    if setting not in (True, False, "auto"):
        raise ValueError(f"compile {setting!r} is not one of auto, True, False")
    if setting is False:
        return False, "as asked"
    on_gpu = device.type == "cuda"
    if setting == "auto" and not on_gpu:
        return False, "CPU"
    if not num_blocks:
        return False, "no repeated blocks"
    if setting == "auto" and steps < MIN_COMPILED_STEPS:
        return (
            False,
            f"{count_of(steps, 'step')}, fewer than {MIN_COMPILED_STEPS}" if steps else "number of steps not known",
        )
    if backend == "inductor" and (missing := machine.missing_compiler(on_gpu)):
        return False, missing
    if setting == "auto":
        return True, f"CUDA, {num_blocks} equal blocks, {steps} steps"
    return True, "as asked"


class Backend:
    """The compiler behind torch.compile; counts the graphs that it compiles."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        import torch._functorch.config as functorch
        from torch._dynamo.backends.registry import lookup_backend

        self.num_graphs += 1
        eagerly = {"force_non_lazy_backward_lowering": True}
        known = all(hasattr(functorch, name) for name in eagerly)
        # Compile backward now: an error in backward itself would come too late to run the block eagerly.
        with functorch.patch(eagerly) if known else contextlib.nullcontext():
            return lookup_backend(self.name)(graph, inputs)


class CompiledFunction:
    """A forward compiled for all blocks that it is called with; it is not tried again after a failure."""

    def __init__(
        self, forward: Callable[..., Any], recompute: str, fullgraph: bool, backend: Backend, device: torch.device
    ) -> None:
        function = _calling(forward) if recompute == NOT else _recomputing(forward, recompute == SELECTIVE)
        self._function = torch.compile(_with_own_code(function), backend=backend, fullgraph=fullgraph)
        self._device = device
        self._proven = False
        self.failure = ""
        """First line of the error after which it is not used any more."""
        self.full = False
        """Whether the last call needed one graph more than torch allows; other blocks may still use it."""

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Return the block's output; NOT_RUN if it could not be compiled, with all random states as before."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        self.full = False
        if self.failure:
            return NOT_RUN
        states, made = [] if self._proven else self._random_states(), Refused.latest
        try:
            output = self._function(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self.full = True
            return NOT_RUN
        except TorchDynamoException as error:  # perhaps of the block itself: then the eager call raises it again
            self.failure, Refused.latest = _first_line(error), made
            for restore, state in states:
                restore(state)
            return NOT_RUN
        self._proven = True
        return output

    def _random_states(self) -> list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
        states: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]
        states = [(torch.set_rng_state, torch.get_rng_state())]
        if self._device.type == "cuda":
            restore = functools.partial(torch.cuda.set_rng_state, device=self._device)
            states.append((restore, torch.cuda.get_rng_state(self._device)))
        return states


class CompiledBlocks:
    """Runs the repeated blocks among `units` compiled, if that is chosen, and eagerly where it is not possible."""

    def __init__(
        self, units: Sequence[Unit], setting: bool | str, backend: str, device: torch.device, steps: int
    ) -> None:
        repeated = of_one_class(units)
        self.on, self.reason = choose_compile(setting, device, len(repeated), steps, backend)
        """Whether blocks are compiled, and why."""
        self._units = {unit.index for unit in repeated} if self.on else set()
        self._device, self._backend = device, Backend(backend)
        self.eager = False
        """Whether blocks run eagerly for now: set around passes beside training, whose shapes would add graphs."""
        self._functions: dict[tuple[Any, ...], CompiledFunction] = {}
        """By forward, recompute and fullgraph; and by the unit's index where a unit has its own."""
        self._own: set[tuple[int, str]] = set()
        """(index, recompute) of units that need graphs of their own: see `attempt`."""
        self._ran: set[int] = set()
        self._seconds = 0.0
        self._notes: dict[str, None] = {}
        if self.on:
            tell_compiler()

    @property
    def num_graphs(self) -> int:
        """Number of graphs compiled so far; each includes its backward."""
        return self._backend.num_graphs

    @property
    def notes(self) -> list[str]:
        """What was compiled and in how long, and which blocks run eagerly and why, one line each."""
        made = f"compiled {count_of(len(self._ran), 'block')} in {self._seconds:.1f} s"
        made = f"{made} ({count_of(self.num_graphs, 'graph')})"
        return [*([made] if self._ran else []), *self._notes]

    def includes(self, unit: Unit) -> bool:
        """Whether the unit is to be compiled."""
        return unit.index in self._units

    def run(self, unit: Unit, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit's forward: as one compiled graph, in compiled parts, or eagerly."""
        if self.eager:
            return body(*args, **kwargs)
        for fullgraph in (True, False):
            output = self.attempt(unit, body, args, kwargs, fullgraph)
            if output is not NOT_RUN:
                return output
        try:
            output = body(*args, **kwargs)
        except Exception:  # the block's own error, not the compiler's: compile it when it is called without one
            forward = getattr(body, "__func__", body)
            self._functions = {key: value for key, value in self._functions.items() if key[0] is not forward}
            raise
        function, name = self._function(unit, body, fullgraph=False, recompute=NOT), type(unit.module).__name__
        if function.failure:
            self._notes.setdefault(f"{name} runs eagerly, it cannot be compiled: {function.failure}")
        elif function.full:
            self._notes.setdefault(f"{name} runs eagerly at times: it needs more graphs than torch's recompile_limit")
        return output

    def attempt(
        self, unit: Unit, body: Callable[..., Any], args: Any, kwargs: Any, fullgraph: bool, recompute: str = NOT
    ) -> Any:
        """Return a unit's output, compiled as one graph or in parts; NOT_RUN if that cannot be.

        Blocks share one function, whose graphs torch limits to 8 (`recompile_limit`). If the blocks need more, because
        a Python value such as a layer's index differs between them, further blocks get functions of their own.
        """
        values = _without_empty_caches(args, kwargs)
        if values is None:
            return NOT_RUN
        args, kwargs = values
        if hasattr(body, "__func__"):  # else a forward of this module alone
            args = (unit.module, *args)
        before, began = self.num_graphs, time.perf_counter()
        function = self._function(unit, body, fullgraph, recompute)
        output = function(args, kwargs)
        if function.full and (unit.index, recompute) not in self._own:
            self._own.add((unit.index, recompute))
            output = self._function(unit, body, fullgraph, recompute)(args, kwargs)
        if self.num_graphs > before:
            self._seconds += time.perf_counter() - began
        if output is not NOT_RUN:
            self._ran.add(unit.index)
        return output

    def _function(self, unit: Unit, body: Callable[..., Any], fullgraph: bool, recompute: str) -> CompiledFunction:
        forward = getattr(body, "__func__", body)
        key: tuple[Any, ...] = (forward, recompute, fullgraph)
        if (unit.index, recompute) in self._own:
            key = (*key, unit.index)
        if key not in self._functions:
            self._functions[key] = CompiledFunction(forward, recompute, fullgraph, self._backend, self._device)
        return self._functions[key]


@functools.cache
def tell_compiler() -> None:
    """Make torch.compile skip the runtime's own functions; it still compiles the user's code between them.

    Loads the compiler, which takes a second. `zerocli.models` is compiled like a user's model, and this file has the
    functions that call a block.
    """
    from torch._dynamo import trace_rules

    import zerocli.engine

    engine = {each.name for each in pkgutil.walk_packages(zerocli.engine.__path__, "zerocli.engine.")}
    kept = {__name__, __package__, "zerocli.engine"}  # naming a package would skip all its files, this one too
    names = []
    for name in sorted({*sys.modules, *engine} - kept):
        ours = name.startswith(("zerocli.", "offload.", "tiers.")) and not name.startswith("zerocli.models")
        if ours and (name in engine or sys.modules[name].__spec__ is not None):
            names.append(name)
    # torch compiles one regular expression of all files for each that is added, which takes a second in all.
    with _without(trace_rules, "_recompile_re"):
        for name in names[:-1]:
            trace_rules.add(name)
    trace_rules.add(names[-1])


@contextlib.contextmanager
def _without(module: Any, name: str) -> Iterator[None]:
    """Replace a module's function, if it has it, by one that does nothing, while the body runs."""
    function = getattr(module, name, None)
    if function is not None:
        setattr(module, name, lambda: None)
    try:
        yield
    finally:
        if function is not None:
            setattr(module, name, function)


# -- functions that are compiled ---------------------------------------------------------------------------------------


def _calling(forward: Callable[..., Any]) -> Callable[..., Any]:
    def block(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return block


def _recomputing(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    def block(*args: Any, **kwargs: Any) -> Any:
        def inner() -> Any:  # without arguments: a block's own may be named like those of checkpoint
            return forward(*args, **kwargs)

        if selective:
            return checkpoint(inner, use_reentrant=False, context_fn=compiled_contexts)
        return checkpoint(inner, use_reentrant=False)

    return block


def cast_arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast a layer's floating-point arguments to the dtype of its parameters; a forward pre-hook.

    It holds no state: a copy of the module in fp32 may keep it.
    """
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    if dtype == torch.float32:
        return None
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return None if args[0].dtype == dtype else ((cast(args[0], dtype),), kwargs)
    return tree_map(lambda value: cast(value, dtype), (args, kwargs))


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy with a code object of its own: torch keeps graphs, and limits their number, per code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _without_empty_caches(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Return a block's arguments with None for empty key-value caches; None if a cache is needed.

    Models of transformers give each block a cache even in training, where nothing reads it. A block writes to the
    layer of its own index there, so no two blocks could share a graph. Their own checkpointing drops it likewise.
    """
    library: Any = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, library.Cache)]
    if not caches:
        return args, kwargs
    if not torch.is_grad_enabled() or any(cache.get_seq_length() for cache in caches):
        return None
    kept = tuple(None if isinstance(value, library.Cache) else value for value in args)
    return kept, {name: None if isinstance(value, library.Cache) else value for name, value in kwargs.items()}


def _first_line(error: BaseException) -> str:
    """Return the first line of what an error says, preferring the error that it was raised for."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
