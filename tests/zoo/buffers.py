"""Buffers of every kind: whatever their layout, dtype and sharing of memory, training starts from rank 0's values."""

from __future__ import annotations

import torch
from torch import nn

from zoo.blocks import Stack
from zoo.case import case, refused


def _dtypes() -> list[torch.dtype]:
    names = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    )
    return [getattr(torch, name) for name in names.split() if hasattr(torch, name)]


def logged(run, tensor):
    """Log a tensor's values exactly, whatever its dtype."""
    values = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    values = values.resolve_conj().contiguous().reshape(-1)
    run.log("buffer", values.view(torch.uint8).int() if values.numel() else values.int())


class WithBuffers(Stack):
    """Buffers that `make` registers on a submodule; `rank` seeds them, so that only rank 0's are right."""

    def __init__(self, make, rank):
        super().__init__()
        self.held = nn.Module()
        state = torch.get_rng_state()
        torch.manual_seed(rank)
        make(self.held)
        torch.set_rng_state(state)

    def forward(self, tokens):
        scale = 1.0
        for b in self.held.buffers():
            if b.layout == torch.strided and b.is_floating_point() and b.numel() and b.itemsize > 1:
                scale = scale + b.detach().float().mean() * 0.1
        return super().forward(tokens) * scale


def starts_from_rank_0(name, make, persistent=True, **about):
    """Enter a case: rank 0's buffers in the reference, each rank's own in the sharded model before it is sharded."""

    @case(f"buffer-{name}", **about)
    def program(run):
        rank = run.rank if run.sharded else 0
        trainer = run.shard(lambda: WithBuffers(make, rank))
        for b in trainer.model.held.buffers():
            logged(run, b)
        if run.sharded and not persistent:
            run.log("nothing", 0)
        run.train(trainer, 2)


def entering(name, **about):
    def enter(make):
        starts_from_rank_0(name, make, **about)
        return make

    return enter


@entering("expanded", also=("stage1",), gpu=True)
def expanded(held):
    held.register_buffer("mask", torch.randn(1).expand(1000, 1000))
    held.register_buffer("rows", torch.randn(7, 1).expand(7, 500))


@entering("strided", also=("stage1",), gpu=True)
def strided(held):
    held.register_buffer("columns", torch.randn(16, 48)[:, ::3])
    held.register_buffer("turned", torch.randn(5, 9).T)
    held.register_buffer("last", torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last))


@entering("overlapping")
def overlapping(held):
    held.register_buffer("windows", torch.randn(40).unfold(0, 8, 2))
    held.register_buffer("odd", torch.randn(64).as_strided((4, 5, 3), (7, 2, 0), 3))


@entering("of-every-dtype", gpu=True)
def every_dtype(held):
    for dtype in _dtypes():
        values = torch.randint(0, 60, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        values = torch.randint(0, 2, (3, 5)).bool() if dtype == torch.bool else values
        held.register_buffer(f"as_{str(dtype)[6:]}", values)


@entering("strided-of-every-dtype")
def strided_dtypes(held):
    for dtype in _dtypes():
        if dtype != torch.bool and not dtype.is_floating_point:
            values = torch.randint(0, 100, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
            held.register_buffer(f"as_{str(dtype)[6:]}", values[::2])
    held.register_buffer("flags", torch.randint(0, 2, (8, 8)).bool()[:, 1::2])
    held.register_buffer("small", torch.randn(8, 8).to(torch.float8_e4m3fn).T)


@entering("conjugated")
def conjugated(held):
    held.register_buffer("phases", torch.randn(6, dtype=torch.complex64).conj())
    held.register_buffer("imaginary", torch.randn(6, dtype=torch.complex64).conj().imag)


@entering("sparse")
def sparse(held):
    held.register_buffer("coo", torch.randn(6, 6).relu().to_sparse())
    held.register_buffer("csr", torch.randn(6, 6).relu().to_sparse_csr())


@entering("empty-and-none")
def empty(held):
    held.register_buffer("nothing", None)
    held.register_buffer("empty", torch.zeros(0, 4))
    held.register_buffer("number", torch.randn(()))
    held.register_buffer("hidden", torch.randn(3, 3).T, persistent=False)


class Subclass(torch.Tensor):
    """A tensor subclass with `__torch_function__`."""


@entering("tensor-subclass")
def subclass(held):
    held.register_buffer("table", torch.randn(4, 6).as_subclass(Subclass)[:, ::2])


@entering("of-inference-mode")
def inference(held):
    with torch.inference_mode():
        held.register_buffer("table", torch.randn(4, 6))


@entering("with-a-graph")
def with_graph(held):
    held.register_buffer("scaled", torch.randn(4, requires_grad=True) * 2)
    held.register_buffer("leaf", torch.randn(4, requires_grad=True))


@case("buffer-views-of-one-memory", also=("stage1",), gpu=True)
def sharing(run):
    """Two buffers share memory, a third is one of them under another name, a plain attribute is held elsewhere."""

    def make(held):
        whole = torch.randn(8, 6)
        held.register_buffer("whole", whole)
        held.register_buffer("part", whole[:, 1:3])
        held.register_buffer("again", whole)
        held.plain = whole

    trainer = run.shard(lambda: WithBuffers(make, run.rank if run.sharded else 0))
    held = trainer.model.held
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        held.part += 1
        for b in (held.whole, held.part, held.again):
            run.log("buffer", b)
    run.log("one object", held.again is held.whole)
    if run.device.type == "cpu":
        run.log("elsewhere", held.plain)


@case("buffer-that-is-an-attribute-elsewhere", also=("stage1",))
def held_elsewhere(run):
    """What a user's own object holds is the buffer, after sharding too."""
    kept = []

    def make(held):
        held.register_buffer("windows", torch.randn(20).unfold(0, 4, 2))
        held.register_buffer("count", torch.zeros(()))
        kept.append(held.count)

    trainer = run.shard(lambda: WithBuffers(make, run.rank if run.sharded else 0))
    for step in range(2):
        kept[0].add_(1)
        trainer.backward(trainer(run.tokens(step, 4, 8)) * trainer.model.held.count)
        trainer.step()
    run.log("count", trainer.model.held.count)


@case("buffer-shape-differs-between-ranks", below3=refused("different models", "held.table"), at3=refused("held.table"))
def other_shape(run):
    rank = run.rank if run.sharded else 0
    run.train(run.shard(lambda: WithBuffers(lambda held: held.register_buffer("table", torch.ones(3 + rank)), 0)), 1)


@case("buffer-dtype-differs-between-ranks", below3=refused("different models", "held.table"), at3=refused("held.table"))
def other_dtype(run):
    dtype = torch.int32 if run.sharded and run.rank else torch.float32
    run.train(run.shard(lambda: WithBuffers(lambda h: h.register_buffer("table", torch.ones(3, dtype=dtype)), 0)), 1)


@case("buffer-on-one-rank-only", below3=refused("different models"), at3=refused("different models"))
def one_rank(run):
    def make(held):
        if run.sharded and run.rank:
            held.register_buffer("spare", torch.ones(3))

    run.train(run.shard(lambda: WithBuffers(make, 0)), 1)


@case("buffer-of-a-model-that-is-meta-on-one-rank", below3=refused("meta"), at3=refused("meta"))
def meta_on_one(run):
    """Rank 0 has the values and the others build the shapes alone."""
    model = run.build(Stack)
    if run.sharded and run.rank:
        model = model.to("meta")
    run.train(run.shard(model), 1)
