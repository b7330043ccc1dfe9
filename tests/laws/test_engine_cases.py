"""Law: whatever a model does (ties, frozen parts, reuse, errors), every stage gives the same numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from lengths import spread
from ranks import run_cases, run_ranks
from torch import nn

import zerocli

STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks, head: the plainest model with units."""

    def __init__(self, tie: bool = False, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(12, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class UsedTwice(Stack):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class TiedAcrossBlocks(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Skipping(Stack):
    """Uses its second block only at even steps."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        x = self.blocks[0](self.embed(tokens))
        if self.calls % 2 == 0:
            x = self.blocks[1](x)
        x = self.blocks[2](x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Convolutional(nn.Module):
    """A small residual net with BatchNorm: buffers, convolutions, no sequence."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

        def forward(self, x):
            return x + F.relu(self.norm(self.conv(x)))

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3)
        self.layers = nn.Sequential(*(Convolutional.Layer() for _ in range(3)))
        self.out = nn.Linear(6, 5)

    def forward(self, tokens):
        x = tokens.float().view(-1, 1, 4, 2).repeat(1, 1, 2, 4)
        x = self.layers(self.stem(x))
        return F.cross_entropy(self.out(x.mean((2, 3))), tokens[:, 0] % 5)


class Graph(nn.Module):
    """A graph-style net: messages along edges, sums at nodes, one layer shared by two edge types."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.messages = nn.ModuleDict({"near": nn.Linear(8, 8), "far": nn.Linear(8, 8)})
        self.update = nn.GRUCell(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens):
        batch, nodes = tokens.shape
        x = self.embed(tokens)
        ring = torch.arange(nodes)
        for _ in range(2):
            gathered = torch.zeros_like(x)
            for kind, hop in (("near", 1), ("far", 3)):
                gathered = gathered.index_add(1, (ring + hop) % nodes, torch.tanh(self.messages[kind](x)))
            x = self.update(gathered.flatten(0, 1), x.flatten(0, 1)).view(batch, nodes, -1)
        return F.cross_entropy(self.out(x.mean(1)), tokens[:, 0] % 3)


def frozen_stack() -> Stack:
    model = Stack()
    for p in model.blocks[1].parameters():
        p.requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    return model


MODELS = {
    "plain": Stack,
    "tied": lambda: Stack(tie=True),
    "used twice": UsedTwice,
    "tied across blocks": TiedAcrossBlocks,
    "block unused in some steps": Skipping,
    "convolutional": Convolutional,
    "graph": Graph,
    "frozen": frozen_stack,
}


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(step % 2 * 8 + rank))


def train(model: nn.Module, steps: int = 5, **settings) -> tuple[list[float], dict]:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = zerocli.shard(model, **({"lr": 1e-2, "clip": 1.0, "weight_decay": 0.1, "bucket_nbytes": 2048} | settings))
    losses = []
    for step in range(steps):
        loss = model(tokens(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: value.tolist() for name, value in engine.state_dict().items()}


def _case(name: str, stage: int, settings: dict):
    torch.manual_seed(3)
    return train(MODELS[name](), stage=stage, **settings)


@pytest.mark.longer
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_the_same_at_every_stage(name):
    stages = spread(list(MODELS).index(name) + 2, STAGES)
    reference, *others = run_cases(2, _case, [(name, stage, {}) for stage in stages])
    assert reference[0][0][-1] < reference[0][0][0]  # the batches repeat, so the loss falls
    for stage, other in zip(stages[1:], others, strict=True):
        assert other == reference, f"stage {stage}"


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.long) for n in ("used twice", "frozen"))]
)
def test_recomputation_changes_no_number(name):
    again = {"recompute": True}
    reference, *others = run_cases(2, _case, [(name, 0, {}), (name, 0, again), (name, 3, again)])
    assert others == [reference, reference]


def test_frozen_parameters_never_change():
    torch.manual_seed(3)
    before = {name: value.tolist() for name, value in MODELS["frozen"]().state_dict().items()}
    (_, after), _ = run_ranks(2, _case, "frozen", 3, {})
    for name in ("embed.weight", "blocks.0.up.weight", "blocks.1.down.bias"):
        assert after[name] == before[name]
    assert after["blocks.0.up.bias"] != before["blocks.0.up.bias"]


def _dropout_with_user_checkpoint(stage: int):
    """The user's own checkpointing outside of the unit, as many models have it."""
    from torch.utils.checkpoint import checkpoint

    class Own(Stack):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: F.dropout(block(x), 0.2), x, use_reentrant=False)
            return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(3)
    model = Own()
    torch.manual_seed(5)
    return train(model, stage=stage)


def test_a_users_own_checkpointing_works():
    reference, other = run_cases(2, _dropout_with_user_checkpoint, [(0,), (3,)])
    assert other == reference


def _two_forwards(stage: int):
    """Two forwards before one backward, evaluation in between, under no_grad."""
    import torch.distributed as dist

    torch.manual_seed(3)
    model = Stack()
    engine = zerocli.shard(model, lr=1e-2, stage=stage)
    seen = []
    for step in range(3):
        first, second = model(tokens(step, dist.get_rank())), model(tokens(step + 50, dist.get_rank()))
        model.eval()
        with torch.no_grad():
            seen.append(model(tokens(99, 0)).item())
        model.train()
        engine.backward(first + 0.5 * second)
        engine.step()
        seen.append((first + second).item())
    return seen


def test_two_forwards_before_a_backward_and_evaluation_between():
    reference, *others = run_cases(2, _two_forwards, [(stage,) for stage in STAGES])
    assert others == [reference] * 3


def _forwards_then_backwards(stage: int):
    """Both forwards of a step before both backwards; a forward in grad mode that nothing follows."""
    import torch.distributed as dist

    torch.manual_seed(3)
    model = Stack()
    engine = zerocli.shard(model, lr=1e-2, stage=stage, accumulate=2, reduce="fp32")
    seen = []
    for step in range(3):
        first, second = model(tokens(step, dist.get_rank())), model(tokens(step + 5, dist.get_rank()))
        engine.backward(second)
        engine.backward(first)
        seen.append(model(tokens(9, 0)).item())
        engine.step()
        seen.append((first + second).item())
    return seen


def test_two_forwards_then_two_backwards():
    reference, *others = run_cases(2, _forwards_then_backwards, [(stage,) for stage in STAGES])
    for stage, ranks in zip(STAGES[1:], others, strict=True):
        for mine, other in zip(ranks, reference, strict=True):
            assert mine == pytest.approx(other, rel=1e-6), stage


class Failing(Stack):
    fails = False

    def forward(self, tokens):
        x = self.blocks[0](self.embed(tokens))
        if self.fails:
            raise ArithmeticError("in the middle of forward")
        for block in self.blocks[1:]:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class FailingBackward(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FailingBackward.armed:
            raise ArithmeticError("in the middle of backward")
        return grad


class FailsInBackward(Stack):
    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = FailingBackward.apply(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _interrupted(stage: int, in_backward: bool, fail: bool):
    import torch.distributed as dist

    torch.manual_seed(3)
    model = FailsInBackward() if in_backward else Failing()
    engine = zerocli.shard(model, lr=1e-2, stage=stage)
    losses = []
    for step in range(4):
        if fail and step in (0, 2):
            model.fails, FailingBackward.armed = True, True
            with pytest.raises(ArithmeticError):
                engine.backward(model(tokens(step, dist.get_rank())))
            model.fails, FailingBackward.armed = False, False
        loss = model(tokens(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_training_goes_on_after_an_exception(stage, in_backward):
    expected, interrupted = run_cases(2, _interrupted, [(stage, in_backward, False), (stage, in_backward, True)])
    assert interrupted == expected


def _unused_on_one_rank(stage: int):
    """Rank 1 never uses a parameter that rank 0 does; both units still run on both."""
    import torch.distributed as dist

    class Optional(Block):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.ones(12))

        def forward(self, x):
            x = super().forward(x)
            return x * self.extra if dist.get_rank() == 0 else x

    torch.manual_seed(3)
    model = Stack()
    model.blocks = nn.ModuleList(Optional() for _ in range(3))
    return train(model, stage=stage)[1]


def test_parameters_unused_on_one_rank_still_meet():
    reference, *others = run_cases(2, _unused_on_one_rank, [(stage,) for stage in STAGES])
    assert reference[0] == reference[1]
    assert others == [reference] * 3


def _named_units(choice: str):
    torch.manual_seed(3)
    model = Stack()
    units = {"class": Block, "predicate": lambda m: isinstance(m, nn.Linear), "list": [model.head, *model.blocks]}
    engine_losses, _ = train(model, stage=3, units=units[choice])
    return engine_losses


def test_units_can_be_named_by_class_predicate_or_list():
    reference = [result[0] for result in run_ranks(2, _case, "plain", 0, {})]
    choices = [("class",), ("predicate",), ("list",)]
    assert run_cases(2, _named_units, choices) == [reference] * len(choices)


def test_units_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match="no module of Stack matches"):
        zerocli.shard(Stack(), units=nn.Conv1d)


def test_misuse_is_named():
    model = Stack()
    engine = zerocli.shard(model, stage=2)
    with pytest.raises(RuntimeError, match="needs a backward"):
        engine.step()
    with pytest.raises(RuntimeError, match="outside engine.backward"):
        model(tokens(0, 0)).backward()
    engine = zerocli.shard(Stack(), stage=2)
    engine.backward(engine(tokens(0, 0)))
    with pytest.raises(RuntimeError, match="accumulate=2"):
        engine.backward(engine(tokens(0, 0)))
    with pytest.raises(ValueError, match="stage 4 is not one of"):
        zerocli.shard(Stack(), stage=4)
    with pytest.raises(ValueError, match="one element"):
        engine.step()
        engine.backward(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("settings", [{}, {"stage": 2}, {"recompute": True}, {"offload": "activations=cpu"}], ids=str)
def test_an_engine_that_nobody_holds_is_gone(settings):
    """Its memory too: a parameter's hook, which the collector cannot see into, must not keep it."""
    from small_gpt import make, train

    engine = make(2, **settings)
    train(engine, 1)
    engine.close()
    seen = weakref.ref(engine), weakref.ref(engine.units[1].flats[0])
    del engine
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
