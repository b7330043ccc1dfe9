"""Changes that a program makes to parameters after `shard`: freezing, loading, clamping, writing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zoo.blocks import Stack
from zoo.case import case, either, refused

KEPT = either("engine.")
"""Kept, or refused with the call that keeps it."""


def _steps(run, trainer, first: int, count: int) -> None:
    for step in range(first, first + count):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


def _freeze(module: nn.Module, frozen: bool) -> None:
    for p in module.parameters():
        p.requires_grad_(not frozen)


def half_frozen() -> Stack:
    model = Stack()
    _freeze(model.blocks[1], True)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


@case("unfreeze-after-shard", also=("stage0", "stage2-cpu", "stage3-cpu"), gpu=True)
def unfreeze(run):
    """Discriminative fine-tuning: blocks are unfrozen as training goes on."""
    trainer = run.shard(half_frozen)
    _steps(run, trainer, 0, 2)
    _freeze(trainer.model, False)
    _steps(run, trainer, 2, 2)


@case("freeze-after-shard", also=("stage0", "stage3-cpu"))
def freeze(run):
    """Frozen parameters stand still at once, whatever momentum they have."""
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 2)
    _freeze(trainer.model.blocks[1], True)
    trainer.model.embed.weight.requires_grad_(False)
    _steps(run, trainer, 2, 2)


@case("freeze-and-unfreeze-by-turns", also=("stage3-cpu",))
def by_turns(run):
    trainer = run.shard(Stack)
    for step in range(4):
        _freeze(trainer.model.blocks[0], step % 2 == 0)
        _freeze(trainer.model.blocks[2], step % 2 == 1)
        _steps(run, trainer, step, 1)


@case("unfreeze-everything-frozen")
def unfreeze_all(run):
    """All but the head is frozen at first."""

    def make():
        model = Stack()
        _freeze(model, True)
        _freeze(model.head, False)
        return model

    trainer = run.shard(make)
    _steps(run, trainer, 0, 1)
    trainer.model.requires_grad_(True)
    _steps(run, trainer, 1, 2)


@case("frozen-but-one")
def frozen_but_one(run):
    def make():
        model = Stack()
        _freeze(model, True)
        model.blocks[1].norm.bias.requires_grad_(True)
        return model

    _steps(run, run.shard(make), 0, 3)


@case("frozen-set-after-shard-before-training")
def frozen_first(run):
    """Everything but the head is frozen between shard and the first step."""
    trainer = run.shard(Stack)
    _freeze(trainer.model, True)
    _freeze(trainer.model.head, False)
    _steps(run, trainer, 0, 3)


def _loaded_values(run) -> dict[str, torch.Tensor]:
    torch.manual_seed(40)
    return {name: value.to(run.device) for name, value in Stack().state_dict().items()}


def _loading(name: str, tolerance: float, **settings) -> None:
    @case(f"model-load-state-dict-{name}", below3=KEPT, at3=KEPT, also=("stage0", "stage3-cpu"), tolerance=tolerance)
    def by_model(run):
        trainer = run.shard(Stack, **settings)
        _steps(run, trainer, 0, 1)
        trainer.model.load_state_dict(_loaded_values(run))
        trainer.edited()
        _steps(run, trainer, 1, 2)

    @case(f"engine-load-state-dict-{name}", also=("stage0", "stage3-cpu"), tolerance=tolerance)
    def by_engine(run):
        trainer = run.shard(Stack, **settings)
        _steps(run, trainer, 0, 1)
        trainer.load(_loaded_values(run))
        _steps(run, trainer, 1, 2)


_loading("fp32", 1e-5)
_loading("bf16", 2e-2, precision="bf16")


def _clamp(p: torch.Tensor) -> None:
    p.clamp_(-0.05, 0.05)


def _clamp_data(p: torch.Tensor) -> None:
    p.data.clamp_(-0.05, 0.05)


def _editing(name: str, edit, tolerance: float, below3, at3, **settings) -> None:
    @case(name, below3=below3, at3=at3, tolerance=tolerance)
    def program(run):
        trainer = run.shard(Stack, **settings)
        for step in range(3):
            _steps(run, trainer, step, 1)
            with torch.no_grad():
                for p in trainer.model.parameters():
                    edit(p)
            trainer.edited()


for precision, near in (("fp32", 1e-5), ("bf16", 2e-2)):
    about = {"tolerance": near, "below3": KEPT, "at3": refused("gathered"), "precision": precision}
    _editing(f"clamp-parameters-{precision}", _clamp, **about)
    _editing(f"clamp-data-{precision}", _clamp_data, **about)


def _clamped_gathered(precision: str, tolerance: float, gpu: bool) -> None:
    @case(f"clamp-gathered-{precision}", tolerance=tolerance, also=("stage0", "stage3-cpu", "stage3-nvme"), gpu=gpu)
    def program(run):
        """The supported way to write parameters: kept by every later step."""
        trainer = run.shard(Stack, precision=precision)
        for step in range(3):
            _steps(run, trainer, step, 1)
            with torch.no_grad(), trainer.gathered(write=True):
                for p in trainer.model.parameters():
                    _clamp(p)


_clamped_gathered("fp32", 1e-5, True)
_clamped_gathered("bf16", 2e-2, False)


class ClippingLayer(nn.Module):
    """Clips its weight inside forward, as Wasserstein critics do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return x + self.linear(x)


def _clipping_stack() -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(ClippingLayer() for _ in range(3))
    return model


@case("clip-weights-inside-forward-fp32", below3=KEPT, at3=KEPT, also=("stage0", "stage3-cpu"))
def clip_inside(run):
    trainer = run.shard(_clipping_stack)
    _steps(run, trainer, 0, 3)


@case("clip-weights-inside-forward-bf16", below3=KEPT, at3=KEPT, tolerance=2e-2)
def clip_inside_bf16(run):
    trainer = run.shard(_clipping_stack, precision="bf16")
    for step in range(3):
        loss = trainer(run.tokens(step, 4, 8))
        trainer.edited()
        trainer.backward(loss)
        trainer.step()


@case("re-initialise-a-layer", below3=KEPT, at3=refused("gathered"))
def reinitialise(run):
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 1)
    nn.init.constant_(trainer.model.head.weight, 0.01)
    trainer.edited()
    _steps(run, trainer, 1, 2)


@case("zero-a-row-gathered-by-name", also=("stage3-cpu",))
def zero_row(run):
    """Writes one parameter of one unit; the others stay sharded."""
    trainer = run.shard(Stack)
    for step in range(3):
        _steps(run, trainer, step, 1)
        with torch.no_grad(), trainer.gathered("blocks.1.up.weight", write=True):
            trainer.model.blocks[1].up.weight[0].zero_()


@case("replace-a-parameter", below3=refused("head.weight"), at3=refused("head.weight"))
def replace(run):
    """`module.weight = nn.Parameter(...)` after shard: the engine would go on with the old one."""
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 1)
    trainer.model.head.weight = nn.Parameter(torch.full((11, 8), 0.02, device=run.device))
    _steps(run, trainer, 1, 2)


# -- changes that differ between the ranks -----------------------------------------------------------------------------


def _differing(name: str, edit, changed: str, last: int = 1, **settings) -> None:
    """Train, edit after one step, and train on; or edit after the last one, before the states are read."""
    words = refused(changed, "different values", "write=True")

    @case(f"edit-that-differs-{name}", below3=words, at3=refused("gathered"))
    def program(run):
        trainer = run.shard(Stack, **settings)
        _steps(run, trainer, 0, 2)
        model = trainer.model
        if run.sharded and run.variant["stage"] == 3:  # only one rank may touch it: no rank waits for the other
            model.head.weight.add_(1)
        with torch.no_grad():
            edit(run, model)
        _steps(run, trainer, 2, last)


def _on_one_rank(run, model) -> None:
    if run.rank == 1:
        model.blocks[1].up.weight.data.mul_(1.1)


_differing("by-rank", lambda run, model: model.head.weight.add_(0.01 * run.rank), "head.weight")
_differing("at-the-end", lambda run, model: model.head.weight.add_(0.01 * run.rank), "head.weight", last=0)
_differing("bf16", lambda run, model: model.head.weight.add_(run.rank), "head.weight", precision="bf16")
_differing("random", lambda run, model: nn.init.normal_(model.embed.weight), "embed.weight")
_differing("one-element", lambda run, model: model.embed.weight[3, 2].fill_(run.rank), "embed.weight")
_differing("on-one-rank-through-data", _on_one_rank, "blocks.1.up.weight")
_differing("frozen", lambda run, model: model.head.requires_grad_(False).weight.data.mul_(1 + run.rank), "head.weight")


@case("edit-on-one-rank-then-broadcast", at3=refused("gathered"))
def broadcast(run):
    """Rank 0 loads values, and gives them to the others: afterwards they are the same."""
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 1)
    if run.sharded and run.variant["stage"] == 3:
        trainer.model.head.weight.add_(1)
    with torch.no_grad():
        for p in trainer.model.parameters():
            if run.rank == 0:
                p.mul_(0.5)
            dist.broadcast(p.data, 0)
    _steps(run, trainer, 1, 2)
