"""Hooks of the user's own: on modules, on outputs, on parameters."""

from __future__ import annotations

import torch
from torch import nn

from zoo.blocks import Block, Stack
from zoo.case import case, either


@case("forward-hooks", also=("stage3-cpu",))
def forward_hooks(run):
    """Hooks that record activations and that change inputs and outputs, on units and inside them."""
    trainer = run.shard(Stack)
    seen = []
    trainer.model.blocks[1].register_forward_hook(lambda m, args, out: seen.append(out.detach().mean()))
    trainer.model.blocks[0].register_forward_hook(lambda m, args, out: out * 0.9)
    trainer.model.blocks[2].register_forward_pre_hook(lambda m, args: (args[0] + 0.1,))
    trainer.model.blocks[2].up.register_forward_hook(lambda m, args, out: out + 0.1)
    run.train(trainer, 3)
    run.log("seen", torch.stack(seen))


@case("forward-hooks-before-shard")
def forward_hooks_before(run):
    model = run.build(Stack)
    model.blocks[0].register_forward_hook(lambda m, args, out: out * 0.9)
    model.blocks[2].register_forward_pre_hook(lambda m, args: (args[0] + 0.1,))
    run.train(run.shard(model), 3)


@case("hook-that-reads-the-units-weight", at3=either("blocks.1.up.weight", "gathered"))
def reading_hook(run):
    """A forward hook on a unit runs after its parameters were let go."""
    trainer = run.shard(Stack)
    trainer.model.blocks[1].register_forward_hook(lambda m, args, out: run.log("mean", m.up.weight.mean()))
    run.train(trainer, 2)


@case("module-backward-hooks", also=("stage3-cpu",))
def backward_hooks(run):
    """Full backward hooks see the gradients of inputs and outputs; one scales them."""
    trainer = run.shard(Stack)
    seen = []
    trainer.model.blocks[1].register_full_backward_hook(lambda m, gin, gout: seen.append(gin[0].abs().mean()))
    trainer.model.blocks[2].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 0.5,))
    trainer.model.blocks[0].up.register_full_backward_pre_hook(lambda m, gout: (gout[0] * 2,))
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
    # The engine's loss is a share of the mean over the ranks: only ratios of gradients inside are plain torch's.
    run.log("ratios", torch.stack(seen) / seen[0])


@case("output-hooks")
def output_hooks(run):
    """Tensor hooks on activations: gradient reversal."""

    class Reversed(Stack):
        def body(self, x):
            x = self.blocks[0](x)
            if x.requires_grad:
                x.register_hook(lambda grad: -grad)
            return self.blocks[2](self.blocks[1](x))

    run.train(run.shard(Reversed), 3)


@case("parameter-hooks-before-shard", below3=either("hook"), at3=either("hook"))
def parameter_hooks_before(run):
    """`p.register_hook` scales a gradient, as freezing of single rows does."""
    model = run.build(Stack)
    model.embed.weight.register_hook(lambda grad: grad * (torch.arange(11, device=grad.device) % 2)[:, None])
    model.blocks[1].up.weight.register_hook(lambda grad: grad * 3)
    run.train(run.shard(model), 3)


@case("parameter-hooks-after-shard", below3=either("hook"), at3=either("hook"), also=("stage0", "stage3-cpu"))
def parameter_hooks(run):
    trainer = run.shard(Stack)
    trainer.model.embed.weight.register_hook(lambda grad: grad * (torch.arange(11, device=grad.device) % 2)[:, None])
    trainer.model.blocks[1].up.weight.register_hook(lambda grad: grad * 3)
    run.train(trainer, 3)


class Counting(Block):
    """Updates buffers in forward: a counter and a running mean, and uses the mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.running = self.running * 0.9 + 0.1 * x.detach().mean((0, 1))
        return super().forward(x - self.running)


@case("buffers-updated-in-forward", also=("stage3-cpu",))
def buffers(run):
    def make():
        model = Stack()
        model.blocks = nn.ModuleList(Counting() for _ in range(3))
        return model

    run.train(run.shard(make), 3)


@case("parametrized-by-pre-hook-on-the-root", at3=either("gathered"))
def root_pre_hook(run):
    """A pre-hook on the root reads the root's own parameters."""
    trainer = run.shard(Stack)
    trainer.model.register_forward_pre_hook(lambda m, args: run.log("norm", m.head.weight.norm()))
    run.train(trainer, 2)
