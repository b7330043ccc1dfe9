"""What reads a parameter around the guards of a released one: subclasses, TorchScript, torch.func, raw memory."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import EXACT, case, either, refused, trained
from zoo.memory import of

READ = refused("weight", "gathered")


# -- subclasses of nn.Parameter ----------------------------------------------------------------------------------------


class Tagged(nn.Parameter):
    """A parameter with a tag and no behaviour of its own."""

    tag = "decays"


class Counting(nn.Parameter):
    """A parameter that counts the functions it is given to."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def _tagged(kind: type[nn.Parameter] = Tagged):
    def make() -> Stack:
        model = Stack()
        for block in model.blocks:
            block.up.weight = kind(block.up.weight.detach())
        model.head.weight = kind(model.head.weight.detach())
        return model

    return make


trained("guard-parameter-subclass", _tagged(), also=("stage1",))
trained("guard-parameter-subclass-with-torch-function", _tagged(Counting), also=("stage1",))


@case("guard-parameter-subclass-keeps-its-class", also=("stage1",))
def keeps_class(run):
    trainer = run.shard(_tagged())
    run.train(trainer, 1)
    tags = [getattr(p, "tag", "") for p in trainer.model.parameters() if isinstance(p, Tagged)]
    run.log("tagged", len(tags))


@case("guard-parameter-subclass-clipped-by-hand", below3=refused("clip"), at3=refused("clip"), also=("stage1",))
def clipped(run):
    """torch's clipping reads p.grad, which the engine keeps."""
    trainer = run.shard(_tagged())
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    nn.utils.clip_grad_norm_([p for p in trainer.model.parameters() if isinstance(p, Tagged)], 0.1)
    trainer.step()


@case("guard-parameter-subclass-read-between-steps", at3=READ, also=("stage1",))
def subclass_read(run):
    trainer = run.shard(_tagged())
    run.train(trainer, 1)
    run.log("norm", trainer.model.blocks[0].up.weight.norm())


@case("guard-parameter-subclass-closed", also=("stage1",))
def subclass_closed(run):
    """The class is the user's own again after close."""
    trainer = run.shard(_tagged())
    run.train(trainer, 1)
    state = trainer.state()
    if run.sharded and run.variant["stage"] < 3:
        trainer.engine.close()
        assert type(trainer.model.head.weight) is Tagged
    run.trainers.clear()
    for name, value in state.items():
        run.log(name, value)


class OtherTensor(torch.Tensor):
    """A plain subclass of Tensor; nn.Parameter keeps it."""


@case("guard-parameter-of-a-tensor-subclass", below3=either("subclass"), at3=either("subclass"), also=("stage1",))
def tensor_subclass(run):
    def make() -> Stack:
        model = Stack()
        model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(OtherTensor))
        return model

    run.train(run.shard(make), 2)


# -- TorchScript -------------------------------------------------------------------------------------------------------


@torch.jit.script
def scripted_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight.t()) * torch.sigmoid(x)


class ScriptedFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x):
        return x + scripted_linear(x, self.weight)


trained("guard-scripted-function-in-units", of(ScriptedFunction), pairs, 5, also=("stage1",))


class ScriptedOutside(Regressor):
    """The root calls a scripted function with a weight of a unit."""

    def forward(self, x, y):
        loss = super().forward(x, y)
        return loss + scripted_linear(x, self.blocks[0].up.weight[:WIDTH]).mean()


trained("guard-scripted-function-outside-its-unit", ScriptedOutside, pairs, 4, at3=READ)


@case("guard-scripted-function-between-steps", at3=READ)
def scripted_between(run):
    trainer = run.shard(of(ScriptedFunction))
    for step in range(3):
        trainer.backward(trainer(*pairs(run, step)))
        trainer.step()
        with torch.no_grad():
            run.log("value", scripted_linear(run.randn(step, 2, WIDTH), trainer.model.blocks[1].weight))


class ScriptedInside(Regressor):
    """Each block has a scripted submodule."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = torch.jit.script(block.up)


trained(
    "guard-scripted-submodules", ScriptedInside, pairs, below3=either("script"), at3=either("script"), also=("stage1",)
)


class TracedInside(Regressor):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = torch.jit.trace(block.up, torch.zeros(1, WIDTH))


trained("guard-traced-submodules", TracedInside, pairs, below3=either("script"), at3=either("script"))


# -- torch.func --------------------------------------------------------------------------------------------------------


def _per_sample(run, trainer, how):
    model = trainer.model
    x, y = pairs(run, 0)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x, y):
        return functional_call(model, params, (x[None], y[None]))

    return how(loss, params, x, y)


@case("guard-func-per-sample-gradients", at3=refused("gathered"), also=("stage1",))
def per_sample(run):
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    found = _per_sample(run, trainer, lambda loss, p, x, y: vmap(grad(loss), in_dims=(None, 0, 0))(p, x, y))
    for name, value in found.items():
        run.log(name, value)


@case("guard-func-per-sample-gradients-live", at3=either("gathered"), also=("stage1",))
def per_sample_live(run):
    """The parameters themselves, not detached ones, go into torch.func."""
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    model, (x, y) = trainer.model, pairs(run, 0)

    def loss(params, x, y):
        return functional_call(model, params, (x[None], y[None]))

    found = vmap(grad(loss), in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y)
    for name, value in found.items():
        run.log(name, value)


@case("guard-func-jacrev-live", at3=either("gathered"), also=("stage1",))
def jacobian(run):
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    model, (x, y) = trainer.model, pairs(run, 0)
    found = jacrev(lambda params: functional_call(model, params, (x, y)))(dict(model.named_parameters()))
    for name, value in found.items():
        run.log(name, value)


@case("guard-func-inside-gathered-with-gradients", at3=refused("no_grad", "gathered"))
def func_gathered(run):
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    with trainer.gathered():
        found = _per_sample(run, trainer, lambda loss, p, x, y: vmap(grad(loss), in_dims=(None, 0, 0))(p, x, y))
        for name, value in found.items():
            run.log(name, value)


class FuncInside(Regressor):
    """Forward itself differentiates one of its blocks, as models of energies and forces do."""

    def body(self, x):
        force = grad(lambda x: self.blocks[0](x).sum())(x)
        return super().body(x) + force.detach()


trained("guard-func-inside-forward", FuncInside, pairs, at3=refused("torch.autograd.grad"), also=("stage1",))


@case("guard-func-per-sample-gradients-gathered", also=("stage1",))
def per_sample_gathered(run):
    """What the refusal says to do."""
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    with torch.no_grad(), trainer.gathered():
        found = _per_sample(run, trainer, lambda loss, p, x, y: vmap(grad(loss), in_dims=(None, 0, 0))(p, x, y))
        for name, value in found.items():
            run.log(name, value)


@case("guard-functional-call-with-own-values", also=("stage1",))
def functional_own(run):
    """The model runs with other weights than its own; the loss is of these."""
    model = run.build(Regressor)
    other = {name: p.detach().clone() * 0.5 for name, p in model.named_parameters()}
    trainer = run.shard(model)
    run.train(trainer, 2, pairs)
    with torch.no_grad():
        run.log("loss", functional_call(model, other, pairs(run, 5)))
    run.train(trainer, 1, pairs)


# -- checkpointing with torch's own policies ---------------------------------------------------------------------------


def _policy(ctx, op, *args, **kwargs):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts():
    return create_selective_checkpoint_contexts(_policy)


class SelectiveOutside(Regressor):
    """torch's own selective checkpointing around each unit."""

    def body(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=_contexts)
        return x


class SelectiveBlock(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=_contexts)


class SelectiveInside(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SelectiveBlock() for _ in range(3))


trained("guard-selective-checkpoint-around-units", SelectiveOutside, pairs, 4, at3=either("checkpoint"))
trained("guard-selective-checkpoint-inside-units", SelectiveInside, pairs, 4, at3=either("checkpoint"))


# -- raw memory of a released parameter --------------------------------------------------------------------------------

READS = {
    "numpy": lambda p: torch.as_tensor(p.detach().numpy()),
    "asarray": lambda p: torch.as_tensor(numpy.asarray(p.detach())),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "dlpack-capsule": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())),
    "numpy-of-itself": lambda p: torch.as_tensor(numpy.array(p.requires_grad_(False))),
    "storage": lambda p: torch.tensor(bytes(p.untyped_storage())[:4] != b"", dtype=torch.float32),
    "data-ptr": lambda p: torch.tensor(float(p.data_ptr() > 0)),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "data": lambda p: p.data.clone(),
    "copy": lambda p: copy.copy(p).detach(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
    "aten": lambda p: torch.ops.aten.mul.Tensor(p, 2.0),
    "aten-default": lambda p: torch.ops.aten.sum(p),
    "foreach": lambda p: torch._foreach_norm([p])[0],
    "total-norm": lambda p: nn.utils.get_total_norm([p]),
    "to-vector": lambda p: nn.utils.parameters_to_vector([p]),
    "index": lambda p: p[0, 0],
    "iterate": lambda p: torch.stack(list(p)),
    "item": lambda p: p.flatten()[0],
    "format": lambda p: torch.tensor(float(len(f"{p.flatten()[0]:.1f}") > 0)),
    "cat": lambda p: torch.cat([p, p]),
    "bool": lambda p: torch.tensor(bool((p > -100).all())),
    "as-tensor": lambda p: torch.as_tensor(p) + 0,
    "as-subclass": lambda p: p.as_subclass(torch.Tensor) + 0,
    "set": lambda p: torch.empty(0).set_(p.detach()),
}


def _saved(p):
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=False).detach()


READS["torch-save"] = _saved


@case("guard-every-way-to-read", below3=EXACT, also=("stage1",))
def every_way(run):
    """Each way to a parameter's values gives them, or is refused by name; none gives anything else."""
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    for name, read in READS.items():
        weight = trainer.model.blocks[1].up.weight
        with torch.no_grad():
            if run.sharded and run.variant["stage"] == 3:
                try:
                    run.refused(lambda read=read, weight=weight: read(weight), "blocks.1.up.weight", "gathered")
                except BaseException as error:
                    raise AssertionError(name) from error
            else:
                value = read(weight)
                weight.requires_grad_(True)
                if not run.sharded or run.variant["stage"] < 3:
                    run.log(name, value) if run.sharded is None else None


WRITES = {
    "init": lambda p: nn.init.zeros_(p),
    "from-vector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "fill": lambda p: p.fill_(0.0),
    "copy": lambda p: p.copy_(torch.zeros(p.shape)),
    "foreach": lambda p: torch._foreach_zero_([p]),
    "data": lambda p: p.data.zero_(),
    "out": lambda p: torch.zeros(p.shape, out=p.detach()),
    "aten": lambda p: torch.ops.aten.zero_(p),
    "assign": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


@case("guard-every-way-to-write")
def every_write(run):
    """Each way to write a released parameter is refused by name."""
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    if run.sharded and run.variant["stage"] == 3:
        for name, write in WRITES.items():
            weight = trainer.model.blocks[1].up.weight
            with torch.no_grad():
                try:
                    run.refused(lambda write=write, weight=weight: write(weight), "blocks.1.up.weight", "gathered")
                except BaseException as error:
                    raise AssertionError(name) from error
    run.train(trainer, 1, pairs)


SWAPPED = refused("blocks.1.up.weight", "swap_tensors")


@case("guard-swapped-tensors", below3=SWAPPED, at3=SWAPPED, also=("stage1",))
def swapped(run):
    """The engine's parameter becomes another object's, and the other way round."""
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    weight = trainer.model.blocks[1].up.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(weight.shape)))
    run.train(trainer, 2, pairs)


MADE = refused("blocks.1.up.weight", "nn.Parameter")


@case("guard-parameter-made-from-a-parameter", below3=MADE, at3=READ, also=("stage1",))
def parameter_of_parameter(run):
    trainer = run.shard(Regressor)
    run.train(trainer, 1, pairs)
    run.log("sum", nn.Parameter(trainer.model.blocks[1].up.weight).sum())


@case("guard-scripted-module-called-between-steps", at3=READ)
def scripted_between_modules(run):
    trainer = run.shard(ScriptedInside)
    run.train(trainer, 1, pairs)
    with torch.no_grad():
        run.log("value", trainer.model.blocks[1].up(run.randn(3, 2, WIDTH)))


class FunctionalHead(Stack):
    """The root uses a unit's weight by itself."""

    def forward(self, tokens):
        return super().forward(tokens) + F.linear(self.blocks[0].up.weight, self.blocks[1].down.weight.t()).mean()


trained("guard-weights-of-units-in-the-root", FunctionalHead, at3=either("weight", "gathered"))


# -- refusals whose way out works --------------------------------------------------------------------------------------


def _train_tokens(run, trainer, first: int, count: int) -> None:
    for step in range(first, first + count):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


def _scaled(run, edit) -> None:
    trainer = run.shard(Stack)
    for step in range(3):
        _train_tokens(run, trainer, step, 1)
        with torch.no_grad(), trainer.gathered(write=True):
            for p in trainer.model.parameters():
                edit(p)


@case("guard-data-multiplied-in-gathered", also=("stage1", "stage3-cpu"))
def data_multiplied(run):
    def edit(p):
        p.data *= 0.9

    _scaled(run, edit)


@case("guard-data-replaced-in-gathered", also=("stage1", "stage3-cpu"))
def data_replaced(run):
    def edit(p):
        p.data = p.data * 0.9 + 0.01

    _scaled(run, edit)


@case("guard-data-multiplied", at3=refused("gathered"), also=("stage1",))
def data_multiplied_outside(run):
    trainer = run.shard(Stack)
    for step in range(3):
        _train_tokens(run, trainer, step, 1)
        trainer.model.head.weight.data *= 0.9


@case("guard-data-replaced", at3=refused("gathered"), also=("stage1",))
def data_replaced_outside(run):
    trainer = run.shard(Stack)
    for step in range(3):
        _train_tokens(run, trainer, step, 1)
        trainer.model.head.weight.data = trainer.model.head.weight.data * 0.9


@case("guard-data-exchanged-for-evaluation", at3=refused("gathered"), also=("stage1",))
def data_exchanged(run):
    """Averaged weights are put in for an evaluation, and the old ones back."""
    trainer = run.shard(Stack)
    _train_tokens(run, trainer, 0, 2)
    weight = trainer.model.head.weight
    kept, weight.data = weight.data, torch.full(weight.shape, 0.02)
    with torch.no_grad():
        run.log("averaged", trainer(run.tokens(9, 4, 8)))
    weight.data = kept
    _train_tokens(run, trainer, 2, 2)


OLD = refused("head.weight", "clone")


@case("guard-data-replaced-with-the-old-kept", below3=OLD, at3=refused("gathered"), also=("stage1",))
def data_kept(run):
    """The old values are put back after a step, when the engine's memory has the new ones."""
    trainer = run.shard(Stack)
    weight = trainer.model.head.weight
    kept, weight.data = weight.data, torch.full(weight.shape, 0.02)
    _train_tokens(run, trainer, 0, 1)
    weight.data = kept
    _train_tokens(run, trainer, 1, 1)


@case("guard-conversion-that-changes-nothing", also=("stage1", "stage3-cpu"))
def converted(run):
    trainer = run.shard(Stack)
    _train_tokens(run, trainer, 0, 1)
    trainer.model.to("cpu").float()
    trainer.model.to(torch.float32)
    _train_tokens(run, trainer, 1, 2)


HALF = refused("weight", "precision=", "unsharded_model")


@case("guard-conversion-to-another-dtype", below3=HALF, at3=HALF, also=("stage1",))
def halved(run):
    trainer = run.shard(Stack)
    _train_tokens(run, trainer, 0, 1)
    trainer.model.half()


ADDED = refused("extra.weight", "added after shard")


@case("guard-module-added-after-shard", below3=ADDED, at3=ADDED, also=("stage1",))
def added(run):
    trainer = run.shard(Stack)
    _train_tokens(run, trainer, 0, 1)
    if run.sharded:
        trainer.model.extra = nn.Linear(2, 2)
    _train_tokens(run, trainer, 1, 1)


@case("guard-frozen-module-added-after-shard", also=("stage1",))
def added_frozen(run):
    trainer = run.shard(Stack)
    _train_tokens(run, trainer, 0, 1)
    if run.sharded:
        trainer.model.extra = nn.Linear(2, 2).requires_grad_(False)
    _train_tokens(run, trainer, 1, 1)
    if run.sharded:
        del trainer.model.extra


HEAD = refused("head.weight", "before shard")


@case("guard-child-replaced-after-shard", below3=HEAD, at3=HEAD, also=("stage1",))
def child_replaced(run):
    trainer = run.shard(Stack)
    _train_tokens(run, trainer, 0, 1)
    trainer.model.head = nn.Linear(WIDTH, 11, bias=False)
    _train_tokens(run, trainer, 1, 1)


ORDER = refused("blocks.1", "before shard")


@case("guard-blocks-changed-places-after-shard", below3=ORDER, at3=ORDER, also=("stage1",))
def changed_places(run):
    """Losses would be right, and the names of what is saved wrong."""
    trainer = run.shard(lambda: Stack(2))
    if run.sharded:
        blocks = trainer.model.blocks
        blocks[0], blocks[1] = blocks[1], blocks[0]
    _train_tokens(run, trainer, 0, 1)


@case("guard-engine-copied", below3=refused("unsharded_model"), at3=refused("unsharded_model"))
def engine_copied(run):
    """As part of a trainer object that is copied."""
    trainer = run.shard(lambda: Stack(1))
    if run.sharded:
        copy.deepcopy({"engine": [trainer.engine]})


@case("guard-conversion-to-meta-before-saving", below3=refused("not the parameter"), at3=refused("precision"))
def to_meta(run):
    trainer = run.shard(lambda: Stack(1))
    if run.sharded:
        trainer.model.to("meta")


@case("guard-released-weights-read-by-nested-tensors", at3=READ)
def nested(run):
    """A class of tensors whose own code torch asks before that of a released parameter."""

    class Ragged(Regressor):
        def forward(self, x, y):
            ragged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
            return self.blocks[0].up(ragged).values().square().mean() + super().forward(x, y)

    run.train(run.shard(lambda: Ragged(2)), 2, pairs)


BEFORE = refused("weight", "before shard")


def _rewritten(name: str, rewrite) -> None:
    @case(f"guard-{name}-after-shard", below3=BEFORE, at3=BEFORE, also=("stage1",))
    def program(run):
        trainer = run.shard(Stack)
        _train_tokens(run, trainer, 0, 1)
        if run.sharded:
            rewrite(trainer.model.blocks[0].up)
        _train_tokens(run, trainer, 1, 1)

    @case(f"guard-{name}-before-shard")
    def follows_the_advice(run):
        def make():
            model = Stack()
            rewrite(model.blocks[0].up)
            return model

        run.train(run.shard(make), 2)


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


_rewritten("prune", lambda layer: prune.l1_unstructured(layer, "weight", 0.3))
_rewritten("parametrize", lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Doubled()))
_rewritten("weight-norm", lambda layer: nn.utils.parametrizations.weight_norm(layer))


class Wide(nn.Module):
    """A head of its own on an encoder that another model has too."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.encoder(x)).pow(2).mean()


TWICE = refused("encoder", "another engine", "one nn.Module")


@case("guard-encoder-in-two-engines", below3=TWICE, at3=TWICE, also=("stage1",))
def two_engines(run):
    encoder = run.build(lambda: nn.Sequential(Block(), Block()))
    one, two = run.build(lambda: Wide(encoder)), run.build(lambda: Wide(encoder))
    run.shard(one)
    run.shard(two)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        encoder = nn.Sequential(Block(), Block())
        self.one, self.two = Wide(encoder), Wide(encoder)

    def forward(self, x):
        return self.one(x) + self.two(x)


trained("guard-encoder-of-two-heads-in-one-engine", Both, lambda run, step: (run.randn(step, 4, WIDTH),))

LAZY = refused("weight", "lazy")


@case("guard-lazy-parameters", below3=LAZY, at3=LAZY)
def lazy(run):
    if run.sharded:
        run.shard(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)))


@case("guard-peft-merged-and-unmerged", needs=("peft",), also=("stage1", "stage3-cpu"))
def merged(run):
    from peft import LoraConfig, get_peft_model

    def make():
        return get_peft_model(Stack(), LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False))

    trainer = run.shard(make, lr=1e-3)
    _train_tokens(run, trainer, 0, 2)
    with torch.no_grad(), trainer.gathered(write=True):
        trainer.model.merge_adapter()
    with torch.no_grad():
        run.log("merged", trainer(run.tokens(9, 4, 8)))
    with torch.no_grad(), trainer.gathered(write=True):
        trainer.model.unmerge_adapter()
    _train_tokens(run, trainer, 2, 2)
