"""States in a model's own format: extra state, hooks and methods that rename, fuse, split, drop or scale tensors."""

from __future__ import annotations

import copy
import io
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import zerocli
from zoo.blocks import WIDTH, Block, Stack
from zoo.case import case, refused


def blocks_of(kind, layers: int = 3) -> Stack:
    """A stack of other blocks."""
    model = Stack()
    model.blocks = nn.ModuleList(kind() for _ in range(layers))
    return model


def state_of(trainer):
    """What an unsharded model's state_dict() is, as a copy."""
    return trainer.engine.state_dict() if trainer.engine is not None else copy.deepcopy(trainer.model.state_dict())


def logged(run, state) -> None:
    """Log the tensors of a state and the names of all its values."""
    run.log("names", len(state))
    for name in sorted(state):
        value = state[name]
        values = value if isinstance(value, dict) else {"": value}
        for key, each in values.items():
            if isinstance(each, torch.Tensor | int | float):
                run.log(f"{name} {key}", each)


def round_trip(name, make, averaged=True, **about):
    """Enter a case: train, save, change, load what was saved, copy, and train on; `averaged`: an EMA's state too."""

    @case(f"states-{name}", **about)
    def program(run):
        trainer = run.shard(make)
        run.trainers.clear()  # the states are compared here, by the names that the model gives them
        run.train(trainer, 2)
        saved = state_of(trainer)
        logged(run, saved)
        plain = run.build(make)
        plain.load_state_dict(saved)
        logged(run, plain.state_dict())
        run.train(trainer, 1)
        trainer.model.load_state_dict(saved)
        run.train(trainer, 1)
        logged(run, state_of(trainer))
        logged(run, trainer.whole_copy().state_dict())
        if averaged and run.sharded:
            average = zerocli.EMA(trainer.engine, 0.5)
            average.update()
            average.load_state_dict(average.state_dict())
            logged(run, average.state_dict())
        elif averaged:
            logged(run, trainer.model.state_dict())

    return program


class Extra(Block):
    """A block with state that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.calls, self.scale = 0, torch.ones(2)

    def forward(self, x):
        self.calls += self.training
        self.scale = self.scale + 1
        return super().forward(x) * (1 + self.calls / 100)

    def get_extra_state(self):
        return {"calls": self.calls, "scale": self.scale, "note": "text"}

    def set_extra_state(self, state):
        self.calls, self.scale = state["calls"], state["scale"].to(self.up.weight.device)


round_trip("extra", lambda: blocks_of(Extra), also=("stage1",), gpu=True)


class ExtraOfTheModel(Stack):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        return super().forward(tokens) * (1 + self.calls / 100)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


round_trip("extra-of-the-model", ExtraOfTheModel)


class Gated(nn.Module):
    """Reads a fused projection of older states as two."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._register_load_state_dict_pre_hook(self._split)

    def _split(self, state, prefix, *_):
        for kind in ("weight", "bias"):
            if f"{prefix}ab.{kind}" in state:
                state[f"{prefix}a.{kind}"], state[f"{prefix}b.{kind}"] = state.pop(f"{prefix}ab.{kind}").chunk(2)

    def forward(self, x):
        return x + self.a(x) * self.b(x)


class Fused(Gated):
    """Also writes them fused."""

    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(self._fuse)

    @staticmethod
    def _fuse(module, state, prefix, metadata):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}{part}.{kind}") for part in "ab"]
            state[f"{prefix}ab.{kind}"] = torch.cat(parts)


round_trip("hook-that-splits", lambda: blocks_of(Gated))
round_trip("hook-that-fuses", lambda: blocks_of(Fused), also=("stage1",), gpu=True)


@case("states-older-with-fused-tensors", also=("stage1",))
def older(run):
    """A state written before a layer was split in two; the model's hook converts it."""
    trainer = run.shard(lambda: blocks_of(Gated))
    run.train(trainer, 1)
    trainer.load(run.build(lambda: blocks_of(Fused)).state_dict())
    run.train(trainer, 2)
    run.log("names", len(trainer.model.load_state_dict({}, strict=False).missing_keys))


class Scaled(Block):
    """Stores one tensor in other units."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self._written)
        self.register_load_state_dict_pre_hook(self._read)

    @staticmethod
    def _written(module, state, prefix, metadata):
        state[f"{prefix}norm.weight"] = state[f"{prefix}norm.weight"] * 4

    @staticmethod
    def _read(module, state, prefix, *_):
        state[f"{prefix}norm.weight"] = state[f"{prefix}norm.weight"] / 4


round_trip("hooks-that-scale", lambda: blocks_of(Scaled))


class ScaledAfterwards(Block):
    """Changes the loaded tensors in place."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_post_hook(self._read)

    @staticmethod
    def _read(module, keys):
        with torch.no_grad():
            module.up.weight.mul_(0.5)
            module.down.bias.data.add_(1)


round_trip("hook-after-loading", lambda: blocks_of(ScaledAfterwards), averaged=False, also=("stage1",))


class Prefixed(Stack):
    """All names have a prefix in files."""

    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(lambda m, state, p, _: {f"model.{k}": v for k, v in state.items()})
        self._register_load_state_dict_pre_hook(self._strip)

    def _strip(self, state, prefix, *_):
        for name in [name for name in state if name.startswith("model.")]:
            state[name.removeprefix("model.")] = state.pop(name)


round_trip("hook-that-renames", Prefixed)


class Headless(Stack):
    """Leaves its head out of states, and does not miss it."""

    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(self._drop)
        self.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())

    @staticmethod
    def _drop(module, state, prefix, metadata):
        state.pop("head.weight")


round_trip("hook-that-drops", Headless)


class Versioned(Block):
    """Adds its version to states and reads older ones."""

    _version = 3

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}version"] = torch.tensor(self._version)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        assert metadata.get("version") == self._version
        state.pop(f"{prefix}version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


round_trip("methods-of-its-own", lambda: blocks_of(Versioned))


class Resized(Block):
    """A buffer whose size is the state's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().abs().mean().view(1) * 0 + 1])
        return super().forward(x) * (1 + self.seen.sum() / 100)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.seen = self.seen.new_empty(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


round_trip("buffer-that-grows", lambda: blocks_of(Resized))


class Nested(Stack):
    """A state_dict of another shape than torch's."""

    def state_dict(self, *args, **kwargs):
        return {"net": super().state_dict(*args, **kwargs), "kind": "nested"}

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state["net"], strict=strict)


@case("states-of-another-shape", also=("stage1",))
def nested(run):
    trainer = run.shard(Nested)
    run.trainers.clear()
    run.train(trainer, 2)
    saved = state_of(trainer)
    logged(run, saved)
    run.train(trainer, 1)
    trainer.model.load_state_dict(saved)
    run.train(trainer, 1)
    logged(run, state_of(trainer))


@case("states-of-a-model-that-names-parameters-otherwise")
def other_names(run):
    class Named(Stack):
        def named_parameters(self, *args, **kwargs):
            yield from ((f"net.{name}", p) for name, p in super().named_parameters(*args, **kwargs))

    trainer = run.shard(Named)
    run.trainers.clear()
    run.train(trainer, 2)
    saved = state_of(trainer)
    logged(run, saved)
    trainer.model.load_state_dict(saved)
    if run.sharded:
        average = zerocli.EMA(trainer.engine)
        average.load_state_dict(average.state_dict())
    run.train(trainer, 1)


@case("states-of-a-batch-norm-before-it-counted")
def before_counting(run):
    """torch's own conversion: older states have no num_batches_tracked."""

    def make():
        model = Stack()
        model.blocks = nn.ModuleList(nn.Sequential(Block(), Turned()) for _ in range(2))
        return model

    class Turned(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(WIDTH)

        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    trainer = run.shard(make)
    run.trainers.clear()
    run.train(trainer, 2)
    state = {name: value for name, value in run.build(make).state_dict().items() if "num_batches" not in name}
    trainer.model.load_state_dict(state)
    run.train(trainer, 1)
    logged(run, {name: value for name, value in state_of(trainer).items() if "running" not in name})


@case("states-of-a-unit", also=("stage1",))
def of_a_unit(run):
    """Loading into one block, and into a part of the rest."""
    trainer = run.shard(Stack)
    run.train(trainer, 2)
    torch.manual_seed(5)
    trainer.model.blocks[1].load_state_dict(Block().state_dict())
    trainer.model.head.load_state_dict(Stack().head.state_dict())
    trainer.model.blocks[2].load_state_dict({"up.bias": torch.ones(12)}, strict=False)
    run.train(trainer, 2)


@case("states-of-a-wrong-model")
def wrong(run):
    """Errors are of torch's type, and name what does not match."""
    trainer = run.shard(Stack)
    run.train(trainer, 1)
    for change in ({"more": torch.ones(1)}, {"head.weight": torch.ones(3)}, {"head.weight": "text"}):
        try:
            trainer.model.load_state_dict({"head.weight": torch.ones(11, 8)} | change, strict=True)
        except RuntimeError as error:
            run.log("named", next(iter(change)) in str(error) or "size" in str(error))
    state = run.build(Stack).state_dict()
    trainer.load(state)
    run.train(trainer, 1)


@case("states-saved-by-torch", at3=refused("engine.state_dict()"))
def by_torch(run):
    """torch.save(model.state_dict()): where each rank has a part only, it is refused."""
    trainer = run.shard(Stack)
    run.train(trainer, 2)
    stream = io.BytesIO()
    torch.save(trainer.model.state_dict(), stream)
    stream.seek(0)
    logged(run, torch.load(stream))


@case("states-of-dcp", at3=refused("engine.state_dict()"))
def of_dcp(run):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    trainer = run.shard(Stack)
    run.train(trainer, 1)
    logged(run, get_model_state_dict(trainer.model))


@case("states-in-a-checkpoint", also=("stage1",))
def in_checkpoint(run):
    """Extra state, odd buffers and odd layouts are in checkpoints too."""
    from zerocli.checkpoint import Saver, load

    def make():
        model = blocks_of(Extra)
        model.register_buffer("coo", torch.randn(4, 4).relu().to_sparse())
        model.register_buffer("rows", torch.randn(3, 1).expand(3, 5))
        model.register_buffer("phases", torch.randn(4, dtype=torch.complex64).conj())
        model.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        model.register_buffer("count", torch.arange(4).to(torch.uint16))
        return model

    trainer = run.shard(make)
    run.trainers.clear()
    run.train(trainer, 2)
    if run.sharded:
        folder = [tempfile.mkdtemp() if run.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        saver = Saver(trainer.engine, folder[0], asynchronous=False)
        saver.save(2)
        saver.close()
        assert saver.failure is None, saver.failure
        model = trainer.model
        model.blocks[0].calls, model.blocks[1].scale = 77, torch.zeros(2)
        with torch.no_grad():
            model.coo.mul_(0)
            model.small.zero_()
            model.rows[:, 0].zero_()
        load(trainer.engine, next(saver.folder.path.glob("*2")))
    run.log("coo", trainer.model.coo.to_dense())
    run.log("rows", trainer.model.rows)
    run.log("small", trainer.model.small.float())
    run.log("count", trainer.model.count.int())
    run.train(trainer, 2)
    run.log("calls", trainer.model.blocks[0].calls)


class Unpicklable(Block):
    def get_extra_state(self):
        return self

    def set_extra_state(self, state):
        pass


@case("states-that-a-checkpoint-cannot-hold")
def not_in_checkpoint(run):
    from zerocli.checkpoint import Saver

    trainer = run.shard(lambda: blocks_of(Unpicklable))
    run.trainers.clear()
    run.train(trainer, 1)
    if run.sharded:
        folder = [tempfile.mkdtemp() if run.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        saver = Saver(trainer.engine, folder[0], asynchronous=False)
        run.refused(lambda: saver.save(1), "_extra_state", "checkpoint")
        saver.close()
