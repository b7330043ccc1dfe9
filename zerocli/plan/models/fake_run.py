"""One run of a model on tensors without memory: what is allocated, saved and freed in each of its parts."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerocli.engine.build import mixes
from zerocli.engine.events import RUNNING, Events, Subscribers
from zerocli.engine.optimizer.dataflow import tensors_in
from zerocli.engine.precision import PRECISIONS
from zerocli.engine.recompute.selective import is_kept
from zerocli.engine.units.casts import InputCasts
from zerocli.engine.units.divide import claim_parameters, find_units, recomputed_units
from zerocli.engine.units.unit import Unit as EngineUnit
from zerocli.layout.recompute import WHOLE
from zerocli.plan.blocks.program import ALLOCATE, ENTER, FIRST, FREE, GRADIENT, LAST, OWN, SAVE, Event, Place
from zerocli.plan.blocks.work import Work
from zerocli.plan.measure import device_of
from zerocli.plan.models.operations import work_of
from zerocli.plan.setup import Setup

MAX_DISTANCE = 4
"""Parts that lie so far apart at most refer to each other's storages; what a part further away frees stays to the end
of the pass."""
MAX_OPERATIONS = 15_000
"""A model with more operations in forward is not traced: a loop over tokens takes minutes on fake tensors."""
MANY_OPERATIONS, FEW_TOKENS = 1_000, (4, 8, 16)
"""With more operations than this, runs on so few tokens tell first whether forward loops over them."""
Loss = Callable[[nn.Module, Setup], torch.Tensor]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the blocks that can be recomputed, in the engine's order."""
    units = [EngineUnit(number, *found) for number, found in enumerate(find_units(model))]
    return [(unit.name, unit.module) for unit in recomputed_units(units, WHOLE)] if len(units) > 1 else []


def kind_of(name: str, block: nn.Module) -> Any:
    """Return what equal blocks have in common: their list, their class, and their parameters."""
    return re.sub(r"\.\d+", "", name), type(block), tuple((n, p.shape, p.dtype) for n, p in block.named_parameters())


def widths_of(model: nn.Module, compute: torch.dtype) -> dict[torch.dtype, int]:
    """Return the bytes of an element by dtype, 0 for the compute dtype, which parameters take as in the engine: but
    fp32 ones (adapters) of a bf16 model stay fp32."""
    found = {p.dtype for p in model.parameters()}
    narrowed = {dtype for dtype in found if dtype.is_floating_point}
    narrowed -= {torch.float32} if mixes(model, compute) else set()
    return {dtype: 0 if dtype in narrowed else dtype.itemsize for dtype in found}


class TooLong(RuntimeError):
    """A forward has more operations than are traced."""


class Run:
    """What one run of a model allocated, by part: part 0 comes before the first block, block n is part 2 n + 1."""

    def __init__(self) -> None:
        self.forward: defaultdict[int, list[Event]] = defaultdict(list)
        self.backward: defaultdict[int, list[Event]] = defaultdict(list)
        self.work: defaultdict[int, list[tuple[int, bool, Work]]] = defaultdict(list)
        """Of each operation in forward: how many saves came before it in its part, whether its output is kept by a
        selective block, and its work."""
        self.work_back: defaultdict[int, Work] = defaultdict(Work)
        self.inputs: dict[int, Place | None] = {}
        self.outputs: dict[int, Place | None] = {}
        self.arguments: dict[int, tuple[Place, ...]] = {}
        self.copied_nbytes: dict[int, int] = {}
        self.long_lived: defaultdict[int, set[int]] = defaultdict(set)
        self.gradients: dict[int, Place | None] = {}
        self.called: list[str] = []
        """The names of the blocks, in the order of their calls."""


class Trace(TorchDispatchMode):
    """Runs a model on fake tensors and notes what is allocated and freed, and in which part."""

    def __init__(self, model: nn.Module, setup: Setup, loss: Loss, places: dict[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._setup, self._loss = model, setup, loss
        self.on_gpu = setup.device == "cuda"
        self.most = MAX_OPERATIONS
        """Operations that forward may have."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        compute = PRECISIONS[setup.precision].compute
        self.blocks = {id(block): name for name, block in blocks_of(model)}
        self.kinds = {name: kind_of(name, block) for name, block in blocks_of(model)}
        _without_memory(model, self._mode, compute)
        casts = InputCasts(model, compute, False)
        model.register_forward_pre_hook(lambda module, args, kwargs: casts.prepare(args, kwargs), with_kwargs=True)
        self._units = {
            id(p): OWN if id(unit.module) in self.blocks else places[unit.name]
            for unit, named in claim_parameters(model, find_units(model))
            for _, p in named
        }
        for name, module in find_units(model):
            if id(module) in self.blocks:
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._exit)
            elif name and name in places:
                module.register_forward_pre_hook(self._entering(places[name]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def run_forward(self) -> Run:
        """Run forward with nothing saved for backward; TooLong if it has more than `MAX_OPERATIONS`.

        A loop over tokens is recognised by runs on few of them, long before all of its operations have run.
        """
        self.most = min(MANY_OPERATIONS, MAX_OPERATIONS)
        with contextlib.suppress(TooLong):
            return self.run(backward=False)
        self.most = MAX_OPERATIONS
        tokens = self._setup.seq
        if tokens > max(FEW_TOKENS):
            few, more, most = (self._operations(number) for number in FEW_TOKENS)
            whole = most + (most - more) * (tokens - FEW_TOKENS[2]) // (FEW_TOKENS[2] - FEW_TOKENS[1])
            if most - more > 1.5 * (more - few) and whole > self.most:  # twice as many more for twice as many tokens
                number = f"more than {self.most} operations in forward: about {whole}"
                raise TooLong(f"it has {number}, in a loop over tokens")
        return self.run(backward=False)

    def _operations(self, tokens: int) -> int:
        """Return the operations in forward of sequences of so many tokens; 0 if it does not take such."""
        whole, self._setup = self._setup, replace(self._setup, seq=tokens)
        try:
            self.run(backward=False)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return 0
        finally:
            self._setup = whole
        return self.operations

    def run(self, backward: bool) -> Run:
        """Run forward, with nothing saved for backward or with backward; return what was noted."""
        self._run, self._back, self._part, self._depth, self._call = Run(), False, 0, 0, -1
        self._events = self._run.forward
        self._owners: dict[int, tuple[int, int] | None] = {}
        """(part, number) of live storages by identity; None for those that no operation of this run made."""
        self._numbers: Counter[int] = Counter()
        self._saves: Counter[int] = Counter()
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}
        """Arguments of blocks that have a gradient, by id."""
        self._in_loss, self.operations, self._noting, self.draws = 0, 0, True, False
        drops = torch.autograd.graph.saved_tensors_hooks(self._saved, _never)
        with self._mode, RUNNING.of(Subscribers(_LossEvents(self))), torch.random.fork_rng(devices=()), self:
            with contextlib.nullcontext() if backward else drops, _Calls(self):
                value = self._loss(self._model, self._setup)
            if backward:
                self._back, self._events = True, self._run.backward
                value.backward()
            self._noting = False
            del value
        return self._run

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # two of three calls are autograd's questions for this
            return device_of(args[0])
        kwargs = kwargs or {}
        self.operations += 1
        for tensor in tensors_in((args, kwargs)):
            self._see(tensor, None)
        out = function(*args, **kwargs)
        kept = not self._back and not self.draws and is_kept(function, args, kwargs)
        for tensor in tensors_in(out):
            self._see(tensor, kept)
        counts = work_of(function, args, kwargs, out, self._in_loss > 0)
        if counts.calls:
            if self._back:
                self._run.work_back[self._part] += counts
            else:
                self._run.work[self._part].append((self._saves[self._part], kept, counts))
        return out

    def _entering(self, place: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._note((ENTER, place, 0, 0))

    # -- storages ------------------------------------------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor, kept: bool | None) -> None:
        """Note a storage that is new: one that an operation made, or with `kept` None one that was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._owners:
            return
        if kept is None:
            self._owners[key] = None
        else:
            part = self._part
            number = self._numbers[part]
            self._numbers[part] += 1
            self._owners[key] = part, number
            self._note((ALLOCATE, number, storage.nbytes(), int(kept)))
        weakref.finalize(storage, self._gone, key, self._run)

    def _gone(self, key: int, run: Run) -> None:
        if run is not self._run or not self._noting:
            return
        owner = self._owners.pop(key, None)
        if owner is not None and (place := self._place(owner)) is not None:
            self._note((FREE, *place, 0))

    def _note(self, event: Event) -> None:
        if self._noting:
            self._events[self._part].append(event)

    def _place(self, owner: tuple[int, int] | None, part: int | None = None) -> Place | None:
        """Return a storage as seen from a part, by default the current one; None if it is too far away."""
        if owner is None:
            return None
        back = (self._part if part is None else part) - owner[0]
        if owner[0] == 0 and back:
            return FIRST, owner[1]
        if self._back and back and owner[0] == 2 * (self._call + 1):
            return LAST, owner[1]
        return (back, owner[1]) if abs(back) <= MAX_DISTANCE else None

    def _place_of(self, tensor: torch.Tensor | None, part: int) -> Place | None:
        if tensor is None:
            return None
        return self._place(self._owners.get(tensor.untyped_storage()._cdata), part)

    def _saved(self, tensor: torch.Tensor) -> None:
        self._saves[self._part] += 1
        place = self._used(tensor)
        self._note((SAVE, *(place or (0, -1)), 0))  # one that no part has counts too: recomputation stops at the last

    def _used(self, tensor: torch.Tensor) -> Place | None:
        """Return the place of a tensor that the current part uses; None if no part near it made the tensor."""
        place = self._place_of(tensor, self._part)
        if place is None or place[0] in (0, 1, 2, FIRST):
            return place
        owner = self._owners[tensor.untyped_storage()._cdata]
        assert owner is not None
        self._run.long_lived[owner[0]].add(owner[1])
        return None

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._call += 1
        self._run.called.append(self.blocks[id(module)])
        part = self._part = 2 * self._call + 1
        x = _main((args, kwargs))
        self._run.inputs[part] = self._place_of(x, part)
        self._run.outputs[part - 1] = self._place_of(x, part - 1)
        others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each is not x]
        self._run.copied_nbytes[part] = sum(each.nbytes for each in others if each.requires_grad and self._is_new(each))
        places = (self._used(each) for each in others)
        self._run.arguments[part] = tuple(place for place in places if place is not None)
        if x is not None and x.requires_grad:
            x.register_hook(self._reached(part - 1, part))

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether no earlier block was given this tensor."""
        known = self._given.get(id(tensor))
        self._given[id(tensor)] = weakref.ref(tensor)
        return known is None or known() is not tensor

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        part, out = self._part, _main(output)
        self._run.outputs[part] = self._place_of(out, part)
        if out is not None and out.requires_grad:
            out.register_hook(self._reached(part, part + 1))
        self._part = part + 1

    def _reached(self, part: int, before: int) -> Callable[[torch.Tensor], None]:
        """Return a hook for the gradient that part `before` ends with, after which the backward of `part` runs.

        The output of a block is the input of the next one if nothing is between them: then the hook of the output runs
        first, and the other one finds that the part has changed.
        """

        def reached(gradient: torch.Tensor) -> None:
            self._run.gradients[before] = self._place_of(gradient, before)
            if part % 2 or self._part == before:
                self._part = part

        return reached

    def _accumulated(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            return
        place = self._place_of(grad, self._part)
        if place is not None:
            self._note((GRADIENT, *place, self._units[id(parameter)]))
            self._owners[grad.untyped_storage()._cdata] = None  # its free is not this part's
        parameter.grad = None


class _LossEvents(Events):
    """Tells a trace when the chunked loss runs."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @contextlib.contextmanager
    def loss(self) -> Iterator[None]:
        self._trace._in_loss += 1
        try:
            yield
        finally:
            self._trace._in_loss -= 1


class _Calls(TorchFunctionMode):
    """While active, forward may run `Trace.most` operations, and attention with dropout runs as on the device.

    TooLong is raised before a call of torch, not from inside an operation, where it may end the process. A CPU
    has no kernel for attention with dropout and keeps all scores; a GPU's needs what it needs without.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._trace.operations > self._trace.most and torch._C._current_graph_task_id() == -1:  # not in backward
            raise TooLong(f"it has more than {self._trace.most} operations in forward")
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and self._trace.on_gpu and kwargs.get("dropout_p"):
            self._trace.draws = True  # what draws random numbers is kept by no selective block
            try:
                return function(*args, **(kwargs | {"dropout_p": 0.0}))
            finally:
                self._trace.draws = False
        return function(*args, **kwargs)


def _main(values: Any) -> torch.Tensor | None:
    """Return the tensor that goes from block to block: the first that has a gradient, or else the first of numbers."""
    floats = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    trained = [each for each in floats if each.requires_grad]
    return next(iter(trained or floats), None)


def _never(packed: Any) -> torch.Tensor:
    raise RuntimeError("backward does not run on a forward that saved nothing")


def loss_of_tokens(model: nn.Module, setup: Setup) -> torch.Tensor:
    tokens = torch.zeros((2, setup.batch, setup.seq), dtype=torch.int64)
    loss: torch.Tensor = model(tokens[0], tokens[1])
    return loss


def _without_memory(model: nn.Module, mode: FakeTensorMode, compute: torch.dtype) -> None:
    """Replace a model's parameters and buffers by fake ones on the CPU, in the dtypes that the engine gives them."""
    widths, known = widths_of(model, compute), dict[int, torch.Tensor]()
    for module in model.modules():
        for table in cast(list[dict[str, torch.Tensor | None]], [module._parameters, module._buffers]):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in known:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    with mode:
                        narrowed = is_parameter and not widths[tensor.dtype]
                        fake = torch.empty(tensor.shape, dtype=compute if narrowed else tensor.dtype)
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
                    known[id(tensor)] = fake
                table[name] = None if tensor is None else known[id(tensor)]


@contextlib.contextmanager
def values_unknown() -> Iterator[None]:
    """While the body runs, a fake tensor that is asked for its truth says no, in place of raising.

    There is no other way: torch has no hook for that.
    """
    own, before, owner = "__bool__" in vars(FakeTensor), vars(FakeTensor).get("__bool__"), cast(Any, FakeTensor)
    owner.__bool__ = lambda tensor: False
    try:
        yield
    finally:
        if own:
            owner.__bool__ = before
        else:
            del owner.__bool__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While the body runs, torch does not log the operations that fail on fake tensors: they are reported as errors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
