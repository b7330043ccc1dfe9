"""Several engines in one loop: losses that depend on more than one model, on some ranks or on all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, Block, pairs
from zoo.case import case, refused


class Net(nn.Module):
    """Blocks, of which a call may skip some."""

    def __init__(self, blocks: int = 3, hidden: int = 2 * WIDTH):
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, skip=()):
        for i, block in enumerate(self.blocks):
            x = x if i in skip else block(x)
        return self.head(x)


def _two(run, **settings):
    """Return the trainers of two equal nets."""
    return run.shard(Net, **settings), run.shard(Net, **settings)


def _joined(trainer) -> None:
    """Count a pass of another trainer that this one took part in: the reference does not know of it by itself."""
    if not trainer.run.sharded:
        trainer.passes += 1


@case("engines-gan-of-equal-nets", also=("stage1",), gpu=True)
def gan(run):
    """The generator's loss goes through the discriminator, which is frozen meanwhile."""
    g, d = _two(run)
    for step in range(3):
        real, noise = pairs(run, step)
        d.model.requires_grad_(False)
        g.backward(F.softplus(-d(g(noise))).mean())
        g.step()
        d.model.requires_grad_(True)
        d.backward(F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean())
        d.step()


@case("engines-gan-with-penalty")
def gan_penalty(run):
    """The discriminator's loss has the gradient of its own output, the generator's loss trains it alone."""
    g, d = _two(run)
    for step in range(2):
        real, noise = pairs(run, step)
        real = real.requires_grad_()
        score = d(real).sum()
        (slope,) = torch.autograd.grad(score, real, create_graph=True)
        d.backward(score + slope.square().mean() + d(g(noise).detach()).mean())
        d.step()
        d.model.requires_grad_(False)
        g.backward(-d(g(noise)).mean())
        d.model.requires_grad_(True)
        g.step()


@case("engines-chained", also=("stage1",))
def chained(run):
    """One loss trains both: backward of the second joins the pass of the first."""
    a, b = _two(run)
    for step in range(3):
        x, y = pairs(run, step)
        b.backward(F.mse_loss(b(a(x)), y))
        _joined(a)
        a.step()
        b.step()


@case("engines-chained-blocks-skipped-per-rank", also=("stage1",), gpu=True)
def chained_uneven(run):
    a, b = _two(run)
    for step in range(4):
        x, y = pairs(run, step)
        skip = (run.rank, (step + run.rank) % 3)
        b.backward(F.mse_loss(b(a(x, skip), (2 - run.rank,)), y))
        _joined(a)
        b.step()
        a.step()


@case("engines-two-towers-blocks-skipped-per-rank", also=("stage1",))
def towers(run):
    left, right = _two(run)
    for step in range(3):
        x, y = pairs(run, step)
        u, v = left(x, skip=(step % 3,) if run.rank else ()), right(y, skip=() if run.rank else (1, 2))
        left.backward((u * v).mean() + (u - v).square().mean())
        _joined(right)
        right.step()
        left.step()


@case("engines-loss-depends-on-the-second-on-one-rank", also=("stage1",))
def second_on_one_rank(run):
    a, b = _two(run)
    for step in range(3):
        x, y = pairs(run, step)
        out = a(x)
        out = b(out) if run.rank == 0 else out
        a.backward(F.mse_loss(out, y))
        _joined(b)
        a.step()
        b.step()


@case("engines-three-in-turns")
def three(run):
    a, b = _two(run)
    c = run.shard(lambda: Net(2, WIDTH), optimizer="sgd", lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = pairs(run, step)
        c.backward(F.mse_loss(c(x) + a(x).detach(), y))
        b.backward(F.mse_loss(b(a(x)) + c(x).detach(), y))
        _joined(a)
        for each in (c, a, b):
            each.step()


@case("engines-accumulate-through-both")
def accumulated(run):
    a, b = _two(run, accumulate=2)
    for step in range(2):
        for half in range(2):
            x, y = pairs(run, 2 * step + half)
            b.backward(F.mse_loss(b(a(x, skip=(half,) if run.rank else ())), y))
            _joined(a)
        b.step()
        a.step()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, expert):
        return self.experts[expert](x).mean(-1, keepdim=True)


@case("engines-frozen-reward-of-experts", also=("stage1",), gpu=True)
def reward(run):
    """A frozen model of experts, of which each rank runs another, judges the policy."""
    policy = run.shard(Net)
    judge = run.build(Experts).requires_grad_(False)
    judge = run.shard(judge) if run.sharded else judge
    for step in range(3):
        x, _ = pairs(run, step)
        policy.backward(-judge(policy(x), (step + run.rank) % 4).mean())
        policy.step()
    if not run.sharded:
        return
    run.trainers.pop()


@case("engines-frozen-teacher-and-ema-free-student")
def teacher(run):
    teacher = run.build(Net).requires_grad_(False)
    student, held = run.shard(lambda: Net(2)), run.shard(teacher) if run.sharded else teacher
    for step in range(3):
        x, _ = pairs(run, step)
        with torch.no_grad():
            target = held(x, skip=(run.rank,))
        student.backward(F.mse_loss(student(x), target))
        student.step()
    if run.sharded:
        run.trainers.pop()


@case("engines-made-in-a-loop")
def remade(run):
    """Engines come and go: what one of them leaves must not confuse the next."""
    for round in range(3):
        one = run.shard(lambda: Net(2, WIDTH))
        two = run.shard(lambda: Net(1, 7))
        x, y = pairs(run, round)
        two.backward(F.mse_loss(two(one(x)), y))
        _joined(one)
        one.step()
        two.step()


@case(
    "engines-backward-of-different-ones",
    below3=refused("rank 0", "rank 1", "backward"),
    at3=refused("rank 0", "rank 1", "backward"),
)
def different_roots(run):
    a, b = _two(run)
    x, y = pairs(run, 0)
    loss = F.mse_loss(b(a(x)), y)
    if run.sharded:
        (a if run.rank else b).backward(loss)
