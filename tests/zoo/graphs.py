"""Graphs that a program handles itself: outside tensors, higher derivatives, old graphs, several engines."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import checkpoint

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, either, refused


class Net(nn.Sequential):
    """Blocks on raw data that return their output."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block())


@case("outside-parameter", also=("stage0", "stage1", "stage3-cpu"), gpu=True)
def outside_parameter(run):
    """A learned temperature outside of the model keeps plain torch's local gradient, undivided."""
    trainer = run.shard(Net)
    scale = nn.Parameter(torch.ones(WIDTH, device=run.device))
    rule = torch.optim.SGD([scale], lr=0.1)
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(x) * scale, y))
        run.log("outside gradient", scale.grad)
        trainer.step()
        rule.step()
        rule.zero_grad()


def _outside_input(name: str, tolerance: float, precision: str, also: tuple[str, ...]) -> None:
    @case(name, tolerance=tolerance, also=also)
    def program(run):
        """Adversarial examples: the input's gradient is plain torch's, undivided and unscaled."""
        trainer = run.shard(Net, precision=precision)
        for step in range(3):
            x, y = pairs(run, step)
            x.requires_grad_()
            trainer.backward(F.mse_loss(trainer(x).float(), y))
            run.log("input gradient", x.grad)
            trainer.step()


_outside_input("outside-input", 1e-5, "fp32", ("stage0", "stage3-cpu"))
_outside_input("outside-input-fp16", 2e-2, "fp16", ("stage0",))


@case("outside-parameter-fp16", tolerance=2e-2)
def outside_parameter_fp16(run):
    trainer = run.shard(Net, precision="fp16")
    scale = nn.Parameter(torch.ones(WIDTH, device=run.device))
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(x).float() * scale, y))
        run.log("outside gradient", scale.grad)
        scale.grad = None
        trainer.step()


@case("outside-module-before-the-model", also=("stage3-cpu",))
def outside_module(run):
    """A plain encoder in front of the sharded model, with an optimizer of its own."""
    trainer = run.shard(Net)
    encoder = run.build(lambda: nn.Linear(WIDTH, WIDTH))
    rule = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(encoder(x)), y))
        run.log("encoder gradient", encoder.weight.grad)
        trainer.step()
        rule.step()
        rule.zero_grad()


@case("maml-functional-call", at3=either(), also=("stage0", "stage3-cpu"))
def maml(run):
    """Inner steps on functional copies of the parameters; the outer gradient goes through them."""
    trainer = run.shard(Net)
    for step in range(2):
        x, y = pairs(run, step)
        fast = dict(trainer.model.named_parameters())
        inner = F.mse_loss(functional_call(trainer.model, fast, (x,)), y)
        grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(fast.items(), grads, strict=True)}
        trainer.backward(F.mse_loss(functional_call(trainer.model, fast, (y,)), x))
        trainer.step()


@case("maml-on-an-unsharded-copy")
def maml_copy(run):
    """Inner steps on a whole copy, then a step of the model itself."""
    trainer = run.shard(Net)
    for step in range(2):
        x, y = pairs(run, step)
        other = trainer.whole_copy()
        rule = torch.optim.SGD(other.parameters(), lr=0.1)
        F.mse_loss(other(x), y).backward()
        rule.step()
        with torch.no_grad():
            target = other(x)
        trainer.backward(F.mse_loss(trainer(x), target))
        trainer.step()


class Recomputing(torch.autograd.Function):
    """A user's own checkpoint, whose backward calls backward."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Adjoint(torch.autograd.Function):
    """As the adjoint of a Neural ODE: parameters are inputs, and get the gradients that backward computes itself."""

    @staticmethod
    def forward(ctx, block, x, *params):
        ctx.block, ctx.params = block, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + 0.1 * block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x + 0.1 * ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.params), grad)


class OwnFunctions(Net):
    def forward(self, x):
        x = self[0](x)
        x = Adjoint.apply(self[1], x, *self[1].parameters())
        return Recomputing.apply(self[0], Recomputing.apply(self[2], x))


@case("own-functions-that-run-blocks-in-backward")
def own_functions(run):
    trainer = run.shard(OwnFunctions)
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(x), y))
        trainer.step()


class Implicit(nn.Module):
    """A fixed point; a hook on it solves for the gradient with the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        def again(z):
            return 0.3 * torch.tanh(self.block(z) + x)

        with torch.no_grad():
            z = again(again(torch.zeros_like(x)))
        z = again(z)
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            end = 0.3 * torch.tanh(self.block(start) + x.detach())

            def solve(grad):
                for _ in range(2):
                    grad = torch.autograd.grad(end, start, grad, retain_graph=True)[0] + grad
                return grad

            z.register_hook(solve)
        return z


@case("implicit-layers")
def implicit(run):
    trainer = run.shard(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Implicit(), Implicit()))
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(x), y))
        trainer.step()


class Repeating(nn.Module):
    """Calls its first block twice; the first output does not depend on the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        first = self.blocks[0](self.blocks[2](self.stem(x)))
        return first, checkpoint(self.blocks[0], first, use_reentrant=False)


@case("two-losses-of-a-block-that-is-used-twice")
def two_losses(run):
    """A retained graph of which the first pass reaches one call of the block, and the second one both."""
    trainer = run.shard(Repeating, accumulate=2)
    for step in range(2):
        x, y = pairs(run, step)
        first, second = trainer(x)
        trainer.backward(F.mse_loss(first, y), retain_graph=True)
        trainer.backward(F.mse_loss(second, y))
        trainer.step()


@case("recompute-penalty-and-another-pass")
def penalty_and_pass(run):
    """What a second derivative reads of a recomputed block outlives the block's checkpoint."""
    trainer = run.shard(Net, recompute=True)
    for step in range(2):
        x, y = pairs(run, step)
        mixed = (x + y).requires_grad_()
        (slope,) = torch.autograd.grad(trainer(mixed).sum(), mixed, create_graph=True)
        trainer.backward(trainer(x).mean() - trainer(y).mean() + (slope.norm(dim=1) - 1).square().mean())
        trainer.step()


@case("loss-without-a-gradient")
def no_gradient(run):
    trainer = run.shard(Net)
    x, y = pairs(run, 0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = F.mse_loss(trainer(x), y)
        run.refused(lambda loss=loss: trainer.backward(loss), "no_grad")
        run.values.clear()
    run.refused(lambda: trainer.backward(trainer(x)), "one element")
    run.values.clear()
    trainer.backward(F.mse_loss(trainer(x), y))
    trainer.step()


@case("loss-backward-refused-then-going-on", also=("stage0", "stage1", "stage3-cpu"), gpu=True)
def loss_backward(run):
    """`loss.backward()` is refused, and nothing of it leaks into the next step."""
    trainer = run.shard(Stack)
    for step in range(3):
        run.refused(lambda step=step: trainer(run.tokens(step + 30, 4, 8)).backward(), "engine.backward")
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


@case("backward-of-an-old-graph", below3=refused("step"), at3=refused("step"), also=("stage0", "stage3-cpu"))
def old_graph(run):
    trainer = run.shard(Stack)
    old = trainer(run.tokens(9, 4, 8))
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    trainer.step()
    if run.sharded:  # plain torch may say that weights were changed in place, or say nothing
        trainer.backward(old)
        trainer.step()


@case("old-graph-refused-then-going-on", also=("stage0", "stage3-cpu"))
def old_graph_then_on(run):
    trainer = run.shard(Stack)
    for step in range(3):
        old = trainer(run.tokens(9, 4, 8))
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        run.refused(lambda old=old: trainer.engine.backward(old), "step")


@case("gradient-penalty", below3=either(), at3=either(), also=("stage0", "stage3-cpu"), gpu=True)
def penalty(run):
    """The critic's gradient by its input is part of the loss."""
    trainer = run.shard(Net)
    for step in range(3):
        x, y = pairs(run, step)
        x.requires_grad_()
        score = trainer(x).mean()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        trainer.backward(score + 10 * (slope.norm(dim=1) - 1).pow(2).mean())
        trainer.step()


@case("gradient-penalty-inside-forward", below3=either(), at3=either())
def penalty_inside(run):
    """An energy model: forces are gradients that forward itself takes."""

    class Energy(Regressor):
        def forward(self, x, y):
            with torch.enable_grad():
                x = x.requires_grad_()
                energy = self.body(x).pow(2).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return F.mse_loss(force, y)

    trainer = run.shard(Energy)
    for step in range(3):
        trainer.backward(trainer(*pairs(run, step)))
        trainer.step()


@case("create-graph-in-backward", below3=either("create_graph"), at3=either("create_graph"))
def create_graph(run):
    trainer = run.shard(Net)
    for step in range(2):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(x), y), create_graph=True)
        trainer.step()


@case(
    "retain-graph", below3=either("retain_graph"), at3=either("retain_graph"), also=("stage0", "stage3-cpu"), gpu=True
)
def retain(run):
    """Two losses on one graph, two backward passes."""
    trainer = run.shard(Net, accumulate=2)
    for step in range(3):
        x, y = pairs(run, step)
        out = trainer(x)
        trainer.backward(F.mse_loss(out, y), retain_graph=True)
        trainer.backward(F.l1_loss(out, y))
        trainer.step()


@case("saliency-by-autograd-grad", at3=either(), also=("stage3-cpu",))
def saliency(run):
    """Gradients by the input alone, between steps."""
    trainer = run.shard(Net)
    for step in range(3):
        x, y = pairs(run, step)
        probe = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(trainer(probe).sum(), probe)
        run.log("slope", slope)
        trainer.backward(F.mse_loss(trainer(x), y))
        trainer.step()


@case("gan-two-engines", also=("stage0", "stage3-cpu"), gpu=True)
def gan(run):
    """The generator's loss goes through the frozen discriminator of another engine."""
    generator, critic = run.shard(Net), run.shard(lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1)))
    for step in range(3):
        noise, real = pairs(run, step)
        with torch.no_grad():
            fake = generator(noise)
        critic.backward(F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean())
        critic.step()
        critic.model.requires_grad_(False)
        generator.backward(F.softplus(-critic(generator(noise))).mean())
        generator.step()
        critic.model.requires_grad_(True)


@case("two-engines-under-one-loss", below3=either("engine"), at3=either("engine"), also=("stage0", "stage3-cpu"))
def two_engines(run):
    """Encoder and decoder are sharded apart and trained by one loss."""
    encoder, decoder = run.shard(Net), run.shard(Net)
    for step in range(3):
        x, y = pairs(run, step)
        loss = F.mse_loss(decoder(encoder(x)), y)
        if run.sharded:
            decoder.backward(loss)
        else:
            decoder.backward(loss)
            encoder.passes = 1
        encoder.step()
        decoder.step()


@case("torch-compile-after-shard", below3=either("compile"), at3=either("compile"), also=("stage0",))
def compiled(run):
    trainer = run.shard(Stack)
    torch._dynamo.reset()
    model = torch.compile(trainer.model, backend="aot_eager")
    for step in range(3):
        trainer.backward(model(run.tokens(step, 4, 8)))
        trainer.step()
    torch._dynamo.reset()


@case("torch-compile-before-shard", below3=either("compile"), at3=either("compile"))
def compiled_before(run):
    torch._dynamo.reset()
    model = torch.compile(run.build(Stack), backend="aot_eager")
    trainer = run.shard(model) if run.sharded else run.shard(model._orig_mod)  # the engine names what was compiled
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
    torch._dynamo.reset()


@case("jvp", at3=either(), below3=either())
def forward_mode(run):
    """A directional derivative of the output, for logging."""
    trainer = run.shard(Net)
    for step in range(2):
        x, y = pairs(run, step)
        with torch.no_grad():
            run.log("slope", jvp(trainer.model, (x,), (torch.ones_like(x),))[1])
        trainer.backward(F.mse_loss(trainer(x), y))
        trainer.step()


@case("vmap", at3=either(), below3=either())
def mapped(run):
    trainer = run.shard(Net)
    for step in range(2):
        x, y = pairs(run, step)
        with torch.no_grad():
            run.log("mapped", vmap(trainer.model)(x.view(2, 2, WIDTH)))
        trainer.backward(F.mse_loss(trainer(x), y))
        trainer.step()


@case("detached-teacher-of-itself")
def self_distillation(run):
    """The model is its own teacher within a step: two forwards, one under no_grad."""
    trainer = run.shard(Net)
    for step in range(3):
        x, y = pairs(run, step)
        student = trainer(x)
        with torch.no_grad():
            teacher = trainer(y)
        trainer.backward(F.mse_loss(student, teacher + y))
        trainer.step()


@case("output-detached-in-part")
def detached(run):
    """Backward reaches the last block alone in odd steps."""

    class Detaching(Regressor):
        def forward(self, x, y, cut):
            for i, block in enumerate(self.blocks):
                x = block(x)
                x = x.detach() if cut and i == 1 else x
            return F.mse_loss(x, y)

    trainer = run.shard(Detaching)
    for step in range(4):
        trainer.backward(trainer(*pairs(run, step), step % 2 == 1))
        trainer.step()


@case("truncated-backpropagation-through-time")
def truncated(run):
    """A state goes from step to step, detached."""
    trainer = run.shard(lambda: copy.deepcopy(Net()))
    state = torch.zeros(4, WIDTH, device=run.device)
    for step in range(3):
        x, y = pairs(run, step)
        state = trainer(x + state)
        trainer.backward(F.mse_loss(state, y))
        state = state.detach()
        trainer.step()
