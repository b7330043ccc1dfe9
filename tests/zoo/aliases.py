"""Tensors that share memory with a parameter: made before `shard`, or kept from an earlier forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, refused, trained

SHARED = refused("shared memory with", "weight")


def _steps(run, trainer, first: int, count: int, batch=pairs) -> None:
    for step in range(first, first + count):
        trainer.backward(trainer(*batch(run, step)))
        trainer.step()


def _tokens(run, step):
    return (run.tokens(step, 4, 8),)


# -- kept by the model -------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Keeps the transpose of its weight and computes with that as well."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.turned = make(self.weight)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight) @ self.use()

    def use(self):
        return self.turned


def turned(make):
    class Net(Regressor):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(Turned(make) for _ in range(3))

    return Net


def _kept(name: str, make, **about) -> None:
    trained(f"alias-{name}", turned(make), pairs, at3=SHARED, also=("stage1",), **about)


_kept("detached-transpose-as-an-attribute", lambda w: w.detach().t())
_kept("data-as-an-attribute", lambda w: w.data)
_kept("data-reshaped", lambda w: w.data.view(-1).view(WIDTH, WIDTH))
_kept("view-with-a-graph", lambda w: w.t())


class Chunks(nn.Module):
    """Cuts one weight into three views, once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.3)
        self.parts = [self.weight[i * WIDTH :][:WIDTH] for i in range(3)]

    def forward(self, x):
        q, k, v = (F.linear(x, part) for part in self.parts)
        return x + torch.sigmoid(q) * torch.tanh(k) + v


class ChunkNet(Regressor):
    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(Chunks() for _ in range(3))


trained("alias-views-with-graphs-in-a-list", ChunkNet, pairs, at3=SHARED, also=("stage1",))


class Closure(Stack):
    """A function in forward has caught a tensor on the head's memory."""

    def __init__(self):
        super().__init__()
        kept = self.head.weight.detach()
        self.penalty = lambda: 0.1 * kept.pow(2).sum()

    def forward(self, tokens):
        return super().forward(tokens) * (1 + self.penalty())


trained("alias-in-a-closure", Closure, at3=SHARED, also=("stage1",))


class InADict(Stack):
    def __init__(self):
        super().__init__()
        self.seen = {name: p.detach() for name, p in self.named_parameters()}

    def forward(self, tokens):
        return super().forward(tokens) + 0.01 * sum(value.abs().sum() for value in self.seen.values())


trained("alias-in-a-dict", InADict, at3=SHARED, also=("stage1", "stage2-cpu"))


class SharedBuffer(Stack):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", self.embed.weight.detach())

    def forward(self, tokens):
        return super().forward(tokens) + self.table[tokens].mean()


trained("alias-buffer", SharedBuffer, at3=refused("buffer", "table", "embed.weight"), also=("stage1",))


# -- kept by the program -----------------------------------------------------------------------------------------------


@case("alias-state-dict-read-after-training", at3=SHARED, also=("stage1",))
def old_state(run):
    """A state dict of torch shows the live weights."""
    model = run.build(Regressor)
    before = model.state_dict()
    trainer = run.shard(model)
    _steps(run, trainer, 0, 2)
    run.log("live", torch.cat([value.flatten() for value in before.values()]))


@case("alias-state-dict-never-read", also=("stage1", "stage3-cpu"))
def old_state_kept(run):
    model = run.build(Regressor)
    run.kept = model.state_dict()
    _steps(run, run.shard(model), 0, 3)


@case("alias-state-dict-assigned", also=("stage1", "stage3-cpu"))
def assigned(run):
    """`load_state_dict(assign=True)` makes the loaded tensors the parameters' memory."""
    model = run.build(Regressor)
    torch.manual_seed(3)
    loaded = {name: torch.randn(value.shape) * 0.3 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    trainer = run.shard(model)
    run.kept = loaded
    _steps(run, trainer, 0, 3)


@case("alias-copied-state-dict", also=("stage1",))
def copied_state(run):
    model = run.build(Regressor)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = run.shard(model)
    _steps(run, trainer, 0, 2)
    run.log("before", torch.cat([value.flatten() for value in before.values()]))


@case("alias-average-over-data", at3=SHARED, also=("stage1",))
def average(run):
    """A moving average that reads the parameters' data by tensors it took at the start."""
    model = run.build(Regressor)
    live = [p.data for p in model.parameters()]
    average = [value.clone() for value in live]
    trainer = run.shard(model)
    for step in range(3):
        _steps(run, trainer, step, 1)
        torch._foreach_lerp_(average, live, 0.1)
    run.log("average", torch.cat([value.flatten() for value in average]))


@case("alias-edited", at3=SHARED, also=("stage1",))
def edited(run):
    """What is written through the alias is the parameter's value."""
    model = run.build(Regressor)
    weight = model.blocks[0].up.weight.detach()
    trainer = run.shard(model)
    for step in range(3):
        _steps(run, trainer, step, 1)
        weight.mul_(0.9)


@case("alias-edited-bf16", at3=SHARED, also=("stage1",), tolerance=2e-2)
def edited_half(run):
    model = run.build(lambda: Regressor().bfloat16())
    weight = model.blocks[0].up.weight.detach()
    trainer = run.shard(model, precision="bf16")
    for step in range(3):
        trainer.backward(trainer(*(value.bfloat16() for value in pairs(run, step))).float())
        trainer.step()
        weight.mul_(0.5)
        trainer.edited()


@case("alias-of-another-dtype", below3=SHARED, at3=SHARED, tolerance=2e-2, also=("stage1",))
def other_dtype(run):
    """Parameters compute in bf16, the tensor on the old memory is fp32."""
    model = run.build(Regressor)
    weight = model.blocks[0].up.weight.detach()
    trainer = run.shard(model, precision="bf16")
    trainer.backward(trainer(*(pairs(run, 0))))
    trainer.step()
    run.log("weight", weight.float())


@case("alias-after-unfreezing", at3=SHARED, also=("stage1",))
def unfrozen(run):
    """Unfreezing lays parameters out again, in other memory."""
    model = run.build(Regressor)
    model.blocks[0].requires_grad_(False)
    weight, bias = model.blocks[0].up.weight.detach(), model.blocks[0].up.bias.data
    trainer = run.shard(model)
    _steps(run, trainer, 0, 1)
    model.blocks[0].requires_grad_(True)
    _steps(run, trainer, 1, 2)
    run.log("sums", torch.stack([weight.sum(), bias.sum()]))


NUMPY = refused("numpy", "blocks.0.up.weight")


@case("alias-numpy", below3=NUMPY, at3=NUMPY, also=("stage1",))
def numpy_array(run):
    model = run.build(Regressor)
    array = model.blocks[0].up.weight.detach().numpy()
    trainer = run.shard(model)
    _steps(run, trainer, 0, 2)
    run.log("sum", array.sum())


@case("alias-numpy-copied", also=("stage1",))
def numpy_copy(run):
    model = run.build(Regressor)
    array = model.blocks[0].up.weight.detach().numpy().copy()
    trainer = run.shard(model)
    _steps(run, trainer, 0, 2)
    run.log("sum", array.sum())


@case("alias-from-numpy", also=("stage1",))
def from_numpy(run):
    """Weights that came from numpy: the array is the parameter's memory, and nobody looks at it again."""

    def make():
        model = Regressor()
        for p in model.parameters():
            p.data = torch.from_numpy(p.detach().numpy().copy())
        return model

    _steps(run, run.shard(make), 0, 3)


STORED = refused("storage of blocks.0.up.weight", "clone")


@case("alias-storage", below3=STORED, at3=STORED)
def storage_kept(run):
    run.kept = run.build(Regressor)
    storage = run.kept.blocks[0].up.weight.untyped_storage()
    _steps(run, run.shard(run.kept), 0, 1)
    run.log("bytes", sum(storage.tolist()))


EXPORTED = refused("blocks.0.up.weight", "DLPack")


@case("alias-dlpack", below3=EXPORTED, at3=EXPORTED)
def dlpack(run):
    model = run.build(Regressor)
    run.kept = torch.utils.dlpack.to_dlpack(model.blocks[0].up.weight.detach())
    _steps(run, run.shard(model), 0, 1)


# -- parameters on one memory ------------------------------------------------------------------------------------------


class TiedByData(Stack):
    def __init__(self):
        super().__init__()
        self.head.weight.data = self.embed.weight.data


TIED = refused("embed.weight", "head.weight", "one memory")
trained("alias-tied-by-data", TiedByData, below3=TIED, at3=TIED, also=("stage1",))


class OneStorage(Regressor):
    """All parameters are views of one flat tensor that the program has made."""

    def __init__(self, keep=False):
        super().__init__()
        flat = torch.cat([p.detach().flatten() for p in self.parameters()])
        at = 0
        for p in self.parameters():
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.flat = flat if keep else None

    def forward(self, x, y):
        loss = super().forward(x, y)
        return loss if self.flat is None else loss + 0.01 * self.flat.pow(2).mean()


trained("alias-parameters-of-one-storage", OneStorage, pairs, also=("stage1",))
FLAT = refused("shared memory with", "flat")
trained("alias-users-own-flat", lambda: OneStorage(True), pairs, below3=FLAT, at3=FLAT, also=("stage1",))


class Interleaved(nn.Module):
    """Two parameters on one memory that do not share an element."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(WIDTH, 2 * WIDTH) * 0.3
        self.left, self.right = nn.Parameter(memory[:, :WIDTH]), nn.Parameter(memory[:, WIDTH:])

    def forward(self, x):
        return x + torch.tanh(x @ self.left) @ self.right


class InterleavedNet(Regressor):
    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(Interleaved() for _ in range(3))


trained("alias-interleaved-parameters", InterleavedNet, pairs, also=("stage1",))


class NotContiguous(Turned):
    """The parameter itself is a transposed view, and another tensor shares its memory."""

    def __init__(self, make):
        super().__init__(make)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.turned = self.weight.detach().t()


class NotContiguousNet(Regressor):
    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(NotContiguous(lambda w: None) for _ in range(3))


trained("alias-of-a-transposed-parameter", NotContiguousNet, pairs, at3=SHARED, also=("stage1",))


@case("alias-another-model-by-data", at3=SHARED, also=("stage1",))
def other_model(run):
    """A second model shares the weights by `.data`, and is read between steps."""
    model, other = run.build(Regressor), run.build(Regressor)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        its.data = mine.data
    trainer = run.shard(model)
    for step in range(3):
        _steps(run, trainer, step, 1)
        with torch.no_grad():
            run.log("other", other(*pairs(run, step + 20)))


@case("alias-graph-from-before", also=("stage1",))
def earlier_graph(run):
    """An output from before `shard` is kept; its graph holds views of the weights."""
    model = run.build(Regressor)
    run.kept = model(*pairs(run, 30))
    _steps(run, run.shard(model), 0, 3)


# -- kept from a forward after shard -----------------------------------------------------------------------------------


class Caching(Turned):
    """Caches a view of its weight in its first forward and uses it from then on."""

    how = staticmethod(lambda w: w.detach().t())

    def __init__(self):
        super().__init__(lambda w: None)

    def use(self):
        if self.turned is None:
            self.turned = self.how(self.weight)
        return self.turned


def caching(make):
    class Layer(Caching):
        how = staticmethod(make)

    class Net(Regressor):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))

    return Net


trained("alias-cached-in-the-first-forward", caching(lambda w: w.detach().t()), pairs, 4, at3=SHARED, also=("stage1",))
trained("alias-data-cached-in-the-first-forward", caching(lambda w: w.data), pairs, 4, at3=SHARED)
trained("alias-copy-cached-in-the-first-forward", caching(lambda w: w.detach().t().clone()), pairs, 4, also=("stage1",))
FROZEN = caching(lambda w: w.detach().t())


def _frozen():
    model = FROZEN()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].turned = torch.eye(WIDTH)
    return model


trained("alias-cached-view-of-a-frozen-weight", _frozen, pairs, 4, also=("stage1", "stage3-cpu"))


@case("alias-cached-in-evaluation", at3=SHARED)
def evaluated(run):
    trainer = run.shard(caching(lambda w: w.detach().t()))
    with torch.no_grad():
        run.log("before", trainer(*pairs(run, 40)))
    _steps(run, trainer, 0, 2)
    run.log("cache", trainer.model.blocks[0].turned.sum())


@case("alias-kept-from-gathered", at3=SHARED, also=("stage1",))
def kept_from_gathered(run):
    """A tensor taken inside `gathered` follows the weights in plain torch."""
    trainer = run.shard(Regressor)
    _steps(run, trainer, 0, 1)
    with torch.no_grad(), trainer.gathered():
        weight = trainer.model.blocks[1].up.weight.detach()
    run.log("before", weight.sum())
    _steps(run, trainer, 1, 1)
    run.log("after", weight.sum())


@case("alias-kept-from-gathered-and-loaded", at3=SHARED)
def kept_and_loaded(run):
    trainer = run.shard(Regressor)
    state = trainer.state()
    with torch.no_grad(), trainer.gathered():
        weight = trainer.model.blocks[1].up.weight.detach()
    trainer.load({name: value * 0.5 for name, value in state.items()})
    run.log("after", weight.sum())


@case("alias-kept-from-gathered-and-written", at3=SHARED)
def kept_and_written(run):
    trainer = run.shard(Regressor)
    with torch.no_grad(), trainer.gathered():
        weight = trainer.model.blocks[1].up.weight.detach()
    with torch.no_grad(), trainer.gathered(write=True):
        trainer.model.blocks[1].up.weight.mul_(0.5)
    run.log("after", weight.sum())


class Recorder(Block):
    """Records its weight in every forward, as hooks for histograms do."""

    def __init__(self):
        super().__init__()
        self.record = []

    def forward(self, x):
        self.record = [*self.record[-2:], self.up.weight.detach()]
        return super().forward(x)


class Recording(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Recorder() for _ in range(3))


trained("alias-recorded-and-never-read", Recording, pairs, 5, also=("stage1", "stage3-cpu"))
