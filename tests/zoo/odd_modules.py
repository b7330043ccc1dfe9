"""Odd modules: unusual classes, wrappers, compiled parts, and what a model may have beside dense layers."""

from __future__ import annotations

import abc

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from zoo.blocks import WIDTH, Block, Stack
from zoo.case import case, refused, trained
from zoo.statedicts import blocks_of


class Wrapping(nn.Module):
    """A block inside of another class."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)


# -- classes -----------------------------------------------------------------------------------------------------------


class Registered(Wrapping):
    """Subclasses must say what they are, and none may have the name of another."""

    known: dict[str, type] = {}

    def __init_subclass__(cls, *, kind, **arguments):
        super().__init_subclass__(**arguments)
        assert cls.__name__ not in Registered.known
        Registered.known[cls.__name__] = cls


class Kind(Registered, kind="x"):
    pass


@case("odd-class-that-registers-subclasses", also=("stage1",))
def registering(run):
    run.train(run.shard(lambda: blocks_of(Kind)), 3)
    run.log("as before", Registered.known == {"Kind": Kind})


class Tagged(type):
    """A metaclass that demands an argument."""

    def __new__(cls, name, bases, body, *, tag):
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name, bases, body, *, tag):
        super().__init__(name, bases, body)


class WithMetaclass(Wrapping, metaclass=Tagged, tag=1):
    pass


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)


class Frozen(Wrapping):
    """Takes no attributes after its construction, not even a class."""

    def __init__(self):
        super().__init__()
        self.closed = True

    def __setattr__(self, name, value):
        if self.__dict__.get("closed"):
            raise AttributeError(f"{name} is frozen")
        super().__setattr__(name, value)


class Slotted(Wrapping):
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.factor = 0.5

    def forward(self, x):
        return super().forward(x) * self.factor


class Calling(Wrapping):
    def __call__(self, x):
        return super().__call__(x) * 0.5


class Delegating(Wrapping):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


trained("odd-metaclass", lambda: blocks_of(WithMetaclass))
trained("odd-abstract-base", lambda: blocks_of(Concrete))
trained("odd-frozen-attributes", lambda: blocks_of(Frozen))
trained("odd-slots", lambda: blocks_of(Slotted))
trained("odd-call-of-its-own", lambda: blocks_of(Calling))
trained("odd-getattr-of-its-own", lambda: blocks_of(Delegating))


@case("odd-parameters-hidden", below3=refused("head.weight"), at3=refused("head.weight"))
def hidden(run):
    class Hiding(Stack):
        def parameters(self, recurse=True):
            return (p for name, p in super().named_parameters(recurse=recurse) if "head" not in name)

    run.train(run.shard(Hiding), 1)


@case("odd-reference-to-the-parent")
def parent(run):
    def make():
        model = Stack()
        for block in model.blocks:
            block.__dict__["parent"] = model
        return model

    trainer = run.shard(make)
    run.train(trainer, 2)
    copied = trainer.whole_copy()
    run.log("copied", copied.blocks[0].parent is copied)


# -- what is not a plain model -----------------------------------------------------------------------------------------


@case("odd-lazy", below3=refused("head.weight", "lazy"), at3=refused("head.weight", "lazy"))
def lazy(run):
    def make():
        model = Stack()
        model.head = nn.LazyLinear(11, bias=False)
        if not run.sharded:
            model(torch.zeros(1, 3, dtype=torch.long))
        return model

    run.train(run.shard(make), 1)


@case("odd-lazy-that-has-run")
def lazy_run(run):
    def make():
        model = Stack()
        model.head = nn.LazyLinear(11, bias=False)
        model(torch.zeros(1, 3, dtype=torch.long))
        return model

    run.train(run.shard(make), 3)


@case("odd-scripted-blocks", at3=refused("blocks.0", "TorchScript"))
def scripted(run):
    def make():
        model = Stack()
        model.blocks = nn.ModuleList(torch.jit.script(block) for block in model.blocks)
        return model

    run.train(run.shard(make), 1)


@case("odd-data-parallel-wrapper", below3=refused("DistributedDataParallel"), at3=refused("DistributedDataParallel"))
def wrapped(run):
    model = run.build(Stack)
    run.train(run.shard(nn.parallel.DistributedDataParallel(model) if run.sharded else model), 1)


@case("odd-fully-sharded", below3=refused("DTensor", "fully_shard"), at3=refused("DTensor", "fully_shard"))
def fully_sharded(run):
    model = run.build(Stack)
    if run.sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    run.train(run.shard(model), 1)


@case("odd-without-parameters", below3=refused("no parameters"), at3=refused("no parameters"))
def nothing(run):
    model = nn.Identity()
    if run.sharded:
        run.shard(model)


@case("odd-compiled-as-one-graph", below3=refused("fullgraph", "compile=True"), at3=refused("fullgraph"))
def one_graph(run):
    model = run.build(Stack)
    run.train(run.shard(torch.compile(model, backend="eager", fullgraph=True) if run.sharded else model), 1)


@case("odd-compiled-in-place-as-one-graph", below3=refused("fullgraph", "compile=True"), at3=refused("fullgraph"))
def one_graph_in_place(run):
    model = run.build(Stack)
    if run.sharded:
        model.compile(backend="eager", fullgraph=True)
    run.train(run.shard(model), 1)


@case("odd-compiled-parts")
def compiled_parts(run):
    """Blocks, and a part of the rest, that are graphs of their own."""

    def make():
        model = Stack()
        if run.sharded:
            compiled = [torch.compile(block, backend="eager", fullgraph=True) for block in model.blocks]
            model.blocks = nn.ModuleList(compiled)
            model.head = torch.compile(model.head, backend="eager", fullgraph=True)
        return model

    trainer = run.shard(make)
    run.trainers.clear()  # torch.compile changes the names
    run.train(trainer, 2)
    if run.sharded:
        trainer.engine.load_state_dict(trainer.engine.state_dict())
    run.train(trainer, 1)


# -- parameters --------------------------------------------------------------------------------------------------------


def _each(change, part="up"):
    def make():
        model = Stack()
        for block in model.blocks:
            change(getattr(block, part))
        return model

    return make


trained("odd-weight-norm", _each(parametrizations.weight_norm))
trained("odd-spectral-norm", _each(parametrizations.spectral_norm))
trained("odd-orthogonal", _each(parametrizations.orthogonal))
trained("odd-pruned", _each(lambda layer: prune.l1_unstructured(layer, "weight", 0.3)))


class Lists(Stack):
    """Parameters in lists and dicts of the model itself."""

    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.scales = nn.ParameterDict({"all": torch.randn(WIDTH)})

    def body(self, x):
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = block(x) + shift * self.scales["all"]
        return x


class Empties(Stack):
    """Parameters of no element, and of no dimension."""

    def __init__(self):
        super().__init__()
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.5))
        self.blocks[0].empty, self.blocks[1].scale = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale + self.empty.sum()


class Dtypes(Stack):
    """Frozen parameters that no collective of gloo moves as they are."""

    def __init__(self):
        super().__init__()
        kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.bool, torch.complex64]
        for at, kind in enumerate(kinds):
            values = torch.randint(0, 60, (4 * kind.itemsize,), dtype=torch.uint8).view(kind)
            values = torch.tensor([True, False, True]) if kind == torch.bool else values
            self.blocks[at % 3].register_parameter(f"kept{at}", nn.Parameter(values, requires_grad=False))

    def forward(self, tokens):
        # Read where a block is whole: in its own forward.
        return super().forward(tokens)


class ReadingDtypes(Block):
    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.randn(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(WIDTH).to(torch.uint16), requires_grad=False)

    def forward(self, x):
        assert self.small.dtype == torch.float8_e4m3fn
        return super().forward(x)[..., self.order.long()] * (1 + self.small.float())


trained("odd-parameter-lists", Lists)
trained("odd-empty-and-scalar-parameters", Empties)
trained("odd-dtypes-of-frozen-parameters", Dtypes)
trained("odd-dtypes-that-are-read", lambda: blocks_of(ReadingDtypes))


# -- changes after sharding --------------------------------------------------------------------------------------------


@case("odd-buffer-added-later")
def added_buffer(run):
    trainer = run.shard(Stack)
    trainer.model.register_buffer("late", torch.ones(3))
    trainer.model.blocks[0].register_buffer("late", torch.arange(4))
    run.train(trainer, 2)
    trainer.load({name: value.clone() for name, value in trainer.state().items()})
    run.train(trainer, 1)
    run.log("copied", trainer.whole_copy().late)


@case("odd-unfrozen-between-forward-and-backward", also=("stage1",))
def unfrozen(run):
    """The graph has no gradient for what was frozen when it was made; the next one has."""

    def make():
        model = Stack()
        model.blocks[1].requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    trainer = run.shard(make)
    for step in range(3):
        loss = trainer(run.tokens(step, 4, 8))
        if step == 1:
            trainer.model.blocks[1].requires_grad_(True)
            trainer.model.head.requires_grad_(True)
        trainer.backward(loss)
        trainer.step()


@case("odd-frozen-between-forward-and-backward", also=("stage1",))
def frozen(run):
    trainer = run.shard(Stack)
    for step in range(3):
        loss = trainer(run.tokens(step, 4, 8))
        if step == 1:
            trainer.model.blocks[1].requires_grad_(False)
            trainer.model.head.requires_grad_(False)
        trainer.backward(loss)
        trainer.step()
