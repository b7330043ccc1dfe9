"""Views of weights that outlive a forward, buffers that are refilled, and what backward finds in them."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, either, trained


def of(layer: type[nn.Module], layers: int = 3) -> type[Regressor]:
    """Return a regressor of `layers` equal layers."""

    class Layers(Regressor):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(layer() for _ in range(layers))

    return Layers


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)


class AsComplex(nn.Module):
    """A rotation of pairs by a complex view of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2, 2))

    def forward(self, x):
        turned = torch.view_as_complex(x.view(-1, WIDTH // 2, 2).contiguous()) * torch.view_as_complex(self.weight)
        return x + torch.view_as_real(turned).flatten(1)


trained("view-as-complex", of(AsComplex), pairs, also=("stage3-cpu",))


class KeepsAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.turned = w.t()  # past autograd's own saving
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.turned, x.t() @ grad


class KeepsSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w.t())
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, turned = ctx.saved_tensors
        return grad @ turned, x.t() @ grad


class AttributeLayer(Weight):
    def forward(self, x):
        return torch.tanh(KeepsAttribute.apply(x, self.weight))


class SavedLayer(Weight):
    def forward(self, x):
        return torch.tanh(KeepsSaved.apply(x, self.weight))


trained("function-keeps-attribute", of(AttributeLayer, 5), pairs, at3=either("weight"), also=("stage3-cpu",), gpu=True)
trained("function-saves-transposed", of(SavedLayer, 5), pairs)


class HalfFrozen(nn.Module):
    """A frozen and a trainable parameter of equal size."""

    def __init__(self):
        super().__init__()
        self.fixed = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3, requires_grad=False)
        self.moving = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x):
        return x + torch.tanh(x @ self.fixed) @ self.moving


trained("frozen-and-trainable-of-equal-size", of(HalfFrozen), pairs, also=("stage3-cpu",))
trained(
    "frozen-and-trainable-one-buffer",
    of(HalfFrozen),
    pairs,
    settings={"gather_buffers": 1},
    also=("stage3-cpu",),
    gpu=True,
)


class HalfFrozenRoot(Regressor):
    """The rest, which stays while its blocks come and go, has the same two sizes as each of them."""

    def __init__(self):
        super().__init__(0)
        self.first = HalfFrozen()
        self.blocks = nn.ModuleList(HalfFrozen() for _ in range(3))

    def body(self, x):
        return self.first(super().body(self.first(x)))


trained("frozen-and-trainable-in-the-rest-too", HalfFrozenRoot, pairs, also=("stage3-cpu",))
trained("one-gather-buffer", Stack, settings={"gather_buffers": 1}, also=("stage3-cpu",))
trained("one-gather-buffer-recomputed", Stack, settings={"gather_buffers": 1, "recompute": True})
trained("many-gather-buffers", Stack, settings={"gather_buffers": 9})


class Slices(nn.Module):
    """One weight cut into query, key and value, with a broadcast and a narrowed view."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        q, k, v = (x @ part.t() for part in self.qkv.chunk(3))
        return x + (q * k).softmax(-1) * v * self.gain.expand(WIDTH) + x * self.qkv.select(0, 0)


trained("views-and-slices-of-weights", of(Slices), pairs)


class InPlace(nn.Module):
    """In-place operations on activations, as residual nets have them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.relu(self.first(x), inplace=True)
        y = self.second(y).mul_(0.5)
        y += x
        return y.clamp_(-3, 3)


trained("in-place-on-activations", of(InPlace), pairs)


class InPlaceOnInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x.add_(torch.tanh(self.linear(x.clone())))


class InPlaceStack(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceOnInput() for _ in range(3))

    def body(self, x):
        return super().body(x * 1.0)


trained("in-place-on-a-units-input", InPlaceStack)


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    weight: torch.Tensor


class TellsWeight(Block):
    def forward(self, x):
        return Result(super().forward(x), self.up.weight)


class Penalised(Stack):
    """Uses a weight that a unit has handed out in a dataclass."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TellsWeight() for _ in range(3))

    def forward(self, tokens):
        x, penalty = self.embed(tokens), 0.0
        for block in self.blocks:
            result = block(x)
            x, penalty = result.hidden, penalty + result.weight.pow(2).mean()
        return self.loss(x, tokens) + 0.1 * penalty


trained("weight-in-a-returned-dataclass", Penalised, at3=either("up.weight", "gathered"), also=("stage3-cpu",))


class GivesWeight(Block):
    def forward(self, x):
        return super().forward(x), self.up.weight


class PenalisedTuple(Stack):
    """Uses a weight that a unit has returned by itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(GivesWeight() for _ in range(3))

    def forward(self, tokens):
        x, penalty = self.embed(tokens), 0.0
        for block in self.blocks:
            x, weight = block(x)
            penalty = penalty + weight.pow(2).mean()
        return self.loss(x, tokens) + 0.1 * penalty


trained("weight-as-an-output", PenalisedTuple, at3=either("up.weight", "gathered"))


class GivesView(Block):
    def forward(self, x):
        return super().forward(x), self.up.weight.t()[:2]


class PenalisedView(PenalisedTuple):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(GivesView() for _ in range(3))


trained("view-of-a-weight-as-an-output", PenalisedView, at3=either("up.weight", "gathered"))


# -- recomputation by the user -----------------------------------------------------------------------------------------


class Checkpointed(Stack):
    """The user's own checkpoint around each block; `order` says which blocks run."""

    reentrant, order = True, (0, 1, 2)

    def body(self, x):
        for i in self.order:
            x = checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)
        return x


class CheckpointedShared(Checkpointed):
    order = (0, 1, 0, 1)


class NotReentrant(Checkpointed):
    reentrant, order = False, (0, 1, 2, 0)


class CheckpointedInside(Stack):
    """Checkpoints within a unit."""

    class Inner(Block):
        def forward(self, x):
            return x + checkpoint(lambda y: self.down(F.silu(self.up(y))), self.norm(x), use_reentrant=False)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CheckpointedInside.Inner() for _ in range(3))


class CheckpointedReentrantInside(CheckpointedInside):
    class Inner(Block):
        def forward(self, x):
            return x + checkpoint(lambda y: self.down(F.silu(self.up(y))), self.norm(x), use_reentrant=True)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CheckpointedReentrantInside.Inner() for _ in range(3))


class CheckpointedSequence(Stack):
    def body(self, x):
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)


REENTRANT = either("use_reentrant=False")

trained("reentrant-checkpoint", Checkpointed, below3=REENTRANT, at3=REENTRANT, also=("stage0", "stage3-cpu"))
trained(
    "reentrant-checkpoint-around-shared-blocks",
    CheckpointedShared,
    below3=REENTRANT,
    at3=REENTRANT,
    also=("stage0", "stage1", "stage3-cpu"),
    gpu=True,
)
trained("reentrant-checkpoint-inside-units", CheckpointedReentrantInside, below3=REENTRANT, at3=REENTRANT)
trained("checkpoint-around-units", NotReentrant, also=("stage3-cpu",))
trained("checkpoint-inside-units", CheckpointedInside)
trained("checkpoint-sequential", CheckpointedSequence)


@case("saved-tensors-on-cpu")
def saved_on_cpu(run):
    """The user's own saved-tensor hooks around the model."""
    trainer = run.shard(Stack)
    for step in range(3):
        with torch.autograd.graph.save_on_cpu():
            loss = trainer(run.tokens(step, 4, 8))
        trainer.backward(loss)
        trainer.step()
