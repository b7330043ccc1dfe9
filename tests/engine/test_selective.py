"""Laws of selective recomputation: no number changes, no product runs twice, and what is kept is the arithmetic."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths import LONG
from ranks import run_cases, run_ranks
from small_gpt import BATCH, CHECKPOINT, LAYERS, SEQ, make, train, train_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerocli
from zerocli import Recompute
from zerocli.engine.recompute.selective import EXPENSIVE, is_kept
from zerocli.engine.units.divide import recomputed_units
from zerocli.plan.measure import LiveBytes

WAYS: list[dict[str, Any]] = [
    {"recompute": True},
    {"recompute": "selective"},
    {"recompute": Recompute(0, 2)},
    {"recompute": Recompute(1, 2)},
    {"recompute": Recompute(3, 1)},
    {"recompute": "selective", "offload": "activations=cpu"},
]
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _numbers(settings: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = make(**settings)
    losses = train(engine)
    state = engine.state_dict()
    engine.close()
    return losses, state


def _every_way(settings: dict, ways: list[dict]) -> None:
    losses, state = _numbers(settings)
    for way in ways:
        others, other = _numbers(settings | way)
        assert others == losses, way
        assert all(torch.equal(other[name], value) for name, value in state.items()), way


@pytest.mark.longer
@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.long) for s in (0, 1, 2)), 3])
def test_selective_recomputation_changes_no_number(stage):
    """With dropout, in several micro-steps and on two ranks."""
    run_ranks(2, _every_way, {"stage": stage, "accumulate": 2}, WAYS if LONG else WAYS[3::2])
    if stage == 3 and LONG:
        run_ranks(2, _every_way, {"stage": 3, "precision": "bf16"}, WAYS[1:4])


@pytest.mark.long
def test_selective_recomputation_goes_together_with_states_elsewhere(tmp_path):
    away = {"offload": "params=nvme,grads=cpu,optimizer=cpu", "nvme_path": (str(tmp_path),), "update": "stream"}
    kept, selective, mixed = run_cases(
        2, _numbers, [({},), (away | {"recompute": "selective"},), (away | {"recompute": Recompute(1, 2)},)]
    )
    for other in (selective, mixed):
        for rank, numbers in zip(kept, other, strict=True):
            assert numbers[0] == rank[0]


# -- bytes and operations ----------------------------------------------------------------------------------------------


def _forward_nbytes(**settings: Any) -> int:
    """Return the bytes that a forward pass of the second step leaves for backward."""
    with LiveBytes() as live:
        engine = make(layers=8, dropout=0.0, stage=0, **settings)
        train_step(engine, 0)
        before = live.nbytes
        tokens = torch.zeros((BATCH, SEQ), dtype=torch.long)
        loss = engine(tokens, tokens)
        gc.collect()
        held = live.nbytes - before
        engine.backward(loss)
        engine.step()
        del loss, tokens
        assert live.nbytes - before <= 4096  # and all of it is freed
    return held


def test_a_selective_block_keeps_its_products_and_attention_and_no_more():
    whole, selective = (_forward_nbytes(recompute=way) for way in (True, "selective"))
    # Queries, keys and values; attention's output; its projection; the MLP's wide product, but not its last one.
    products = CHECKPOINT * (3 + 1 + 1 + 4)
    stats = BATCH * SEQ * 2 * 4  # of attention: one number per head and token
    assert selective - whole == 8 * (products + stats)
    kept = _forward_nbytes()
    assert whole < selective < kept
    # A number of blocks is exact too: the arena of checkpoints is allocated before.
    assert _forward_nbytes(recompute=Recompute(6, 2)) - whole == 2 * (products + stats)


class Count(TorchDispatchMode):
    """Counts the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation.__name__.partition(".")[0]] += 1
        return operation(*args, **(kwargs or {}))


def test_no_product_or_attention_runs_twice():
    counts = {}
    for name, way in (("kept", False), ("selective", "selective"), ("whole", True)):
        engine = make(stage=0, dropout=0.0, recompute=way)
        train_step(engine, 0)
        tokens = torch.zeros((BATCH, SEQ), dtype=torch.long)
        with Count() as mode:
            engine.backward(engine(tokens, tokens))
        counts[name] = mode.counts
        engine.close()
    for each in ("mm", "addmm", ATTENTION):
        assert counts["selective"][each] == counts["kept"][each] > 0
    for each in ("gelu", "native_layer_norm"):
        assert counts["selective"][each] == counts["whole"][each] > counts["kept"][each]
    assert counts["whole"]["addmm"] == counts["kept"]["addmm"] + 3 * LAYERS
    assert counts["whole"][ATTENTION] == counts["kept"][ATTENTION] + LAYERS


def test_a_graph_without_a_backward_is_freed_at_once():
    with LiveBytes() as live:
        engine = make(dropout=0.0, stage=0, recompute="selective")
        train_step(engine, 0)
        before = live.nbytes
        tokens = torch.zeros((BATCH, SEQ), dtype=torch.long)
        loss = engine(tokens, tokens)
        assert live.nbytes - before > LAYERS * 9 * CHECKPOINT
        del loss, tokens
        gc.collect()
        assert live.nbytes - before <= 4096


# -- which units -------------------------------------------------------------------------------------------------------


def test_the_first_blocks_are_whole_and_the_next_selective():
    engine = make(dropout=0.0, recompute=Recompute(1, 2))
    blocks = engine.units[1 : 1 + LAYERS]
    assert recomputed_units(engine.units, Recompute(1, 2)) == {blocks[0]: False, blocks[1]: True, blocks[2]: True}
    assert recomputed_units(engine.units, "selective") == dict.fromkeys(blocks, True)
    train(engine)
    assert engine.memory()["activations"] == 3 * CHECKPOINT
    for bad in (Recompute(LAYERS, 1), Recompute(0, LAYERS + 1), Recompute(-1, 2), Recompute(2, -1)):
        with pytest.raises(ValueError, match=f"the model has {LAYERS} repeated blocks"):
            make(recompute=bad)
    with pytest.raises(ValueError, match="recompute='most': pass True, False, 'selective', a number of blocks"):
        make(recompute="most")


# -- any module --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A block of a user's own; each subclass does one thing that selective recomputation must get right."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class ChangesProduct(Layer):
    """Changes a product in place, behind the view that F.linear returns and by several operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.up.weight).mul_(2)
        y[..., 0] += 1
        torch.add(y.detach(), 1, out=torch.empty_like(y))
        return x + self.down(F.relu(y, inplace=True))


class WrittenOut(Layer):
    """Attention that is written out, whose scores are not kept, with dropout between products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.up(x)
        scores = F.dropout(torch.softmax(q @ q.transpose(-1, -2), -1), 0.3)
        return x + F.dropout(self.down(scores @ q), 0.2)


class RandomAttention(Layer):
    """Attention that draws random numbers, and dropout after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.up(x)[:, None]
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)[:, 0]
        return x + self.down(F.dropout(y, 0.3))


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.conv(self.norm(x)))


class Nested(Layer):
    """Checkpoints a part of itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return x + self.down(checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False))


class Inner(Layer):
    """Has a gradient of its own in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.up(y)).sum(), y)
        return x + self.down(torch.tanh(self.up(x))) + 0.1 * slope


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _norms(layer: type[nn.Module], backwards: int = 1, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    engine = zerocli.shard(Net(layer), clip=1.0, accumulate=backwards, **settings)
    norms = []
    for step in range(3):
        torch.manual_seed(step)
        loss = engine(torch.randn(4, 6, 8))
        for left in reversed(range(backwards)):
            engine.backward(loss, retain_graph=left > 0)
        norms += [loss.item(), engine.step().grad_norm.item()]
    engine.close()
    return norms


LAYERS_OF_ALL_KINDS = [Layer, ChangesProduct, WrittenOut, RandomAttention, Convolves, Nested, Inner]


@pytest.mark.parametrize("layer", LAYERS_OF_ALL_KINDS)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_any_module_can_be_recomputed_selectively(layer, stage):
    kept = _norms(layer, stage=stage)
    for way in ("selective", Recompute(1, 1)):
        assert _norms(layer, stage=stage, recompute=way) == kept


class Compiled(Layer):
    """Compiles a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(lambda x: self.down(torch.tanh(self.up(x))), backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.compiled(x)


class Outer(nn.Module):
    """Has units inside, whose parameters are updated and gathered while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return x + self.last(torch.tanh(x))


@pytest.mark.long
def test_parts_of_a_block_may_be_compiled_or_units_themselves():
    """Muon's update has matrix products of its own."""
    assert _norms(Compiled, recompute="selective") == _norms(Compiled)
    for units in (Outer, (Outer, Layer), Layer):
        settings = {
            "optimizer": "muon",
            "units": lambda module, units=units: isinstance(module, units),
            "offload": "cpu",
        }
        assert _norms(Outer, **settings, recompute="selective") == _norms(Outer, **settings)


@pytest.mark.parametrize("layer", [Layer, ChangesProduct, RandomAttention])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_backward_through_one_graph_computes_what_was_kept(layer, stage):
    kept = _norms(layer, backwards=2, stage=stage)
    assert _norms(layer, backwards=2, stage=stage, recompute="selective") == kept


class Wrong(Layer):
    """Does something else each time, for a reason that cannot be put back."""

    turns = itertools.cycle((True, False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.turns):
            return super().forward(x)
        return x + self.down(torch.tanh(F.linear(x, self.up.weight)))


def test_a_block_that_does_something_else_in_backward_is_refused():
    engine = zerocli.shard(Net(Wrong, 1), stage=0, units=Wrong, recompute="selective")
    loss = engine(torch.randn(4, 6, 8))
    with pytest.raises(RuntimeError, match=r"recomputed selectively ran aten\.mm\.default in backward"):
        engine.backward(loss)


def test_products_over_few_elements_and_random_attention_are_cheap_or_not_exact():
    aten = torch.ops.aten
    short, long = torch.ones(1, 2, 64), torch.ones(1, 2, 512)
    assert not is_kept(aten.bmm.default, (short, short.mT), {}) and is_kept(aten.bmm.default, (long, long.mT), {})
    assert not is_kept(aten.baddbmm.default, (short, short, short.mT), {})
    assert is_kept(aten.mm.default, (short[0], short[0].T), {}) and not is_kept(aten.add.Tensor, (short, short), {})
    attention = aten._scaled_dot_product_flash_attention.default
    assert is_kept(attention, (short,) * 3, {}) and is_kept(attention, (*(short,) * 3, 0.0), {})
    assert not is_kept(attention, (*(short,) * 3, 0.1), {}) and not is_kept(attention, (short,) * 3, {"dropout_p": 0.1})
    assert {aten.mm.default, aten.addmm.default, attention} <= EXPENSIVE.keys()
