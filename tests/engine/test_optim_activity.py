"""A parameter that got no gradient on any rank is left alone, as torch leaves it: no decay, no momentum, no count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lengths import LONG
from ranks import run_cases, run_ranks
from torch import nn

import zerocli

STEPS = 8
SHAPES = [
    (0, ""),
    (1, ""),
    (2, ""),
    (3, ""),
    (3, "cpu"),
    (3, "nvme"),
    (1, "optimizer=cpu"),
    (2, "grads=cpu,optimizer=nvme"),
]
SOME = SHAPES if LONG else [SHAPES[i] for i in (0, 3, 7)]


class Heads(nn.Module):
    """A body, three heads of which each step uses some, and a branch that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Linear(13, 5) for name in "abc"})
        self.unused = nn.Linear(13, 7)
        self.shift = nn.Parameter(torch.ones(13))
        self.late = nn.Parameter(torch.ones(13))

    def forward(self, x: torch.Tensor, y: torch.Tensor, heads: str, late: bool) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.shift
        if late:
            x = x * self.late
        return sum(F.mse_loss(self.heads[name](x), y) for name in heads)


def inputs(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 13, generator=generator), torch.randn(8, 5, generator=generator)
    return x[rows], y[rows]


def uses(step: int) -> tuple[str, bool]:
    """Which heads a step uses: a and b in turns, c in two steps; and whether it uses the parameter `late`."""
    return "ab"[step % 2] + ("c" if step in (3, 6) else ""), step >= 5


OPTIMIZERS = {
    "adamw": dict(weight_decay=0.1, betas=(0.8, 0.9)),
    "sgd": dict(weight_decay=0.1, momentum=0.9),
    "nadam": dict(weight_decay=0.1),
}


def theirs(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = Heads()
    options = dict(OPTIMIZERS[name])
    decay = options.pop("weight_decay")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "nadam": torch.optim.NAdam}[name]
    optimizer = kind(groups, lr=1e-2, **options)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(*inputs(step, slice(0, 8)), *uses(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def train(name: str, stage: int, offload: str, folder: str, start: int = 0, stop: int = STEPS, **settings):
    from zerocli.checkpoint import Folder, load

    torch.manual_seed(3)
    model = Heads()
    own = {"offload": offload, "nvme_path": (folder,), "clip": 0.5, "lr": 1e-2, "staging_nbytes": 40000}
    own["read_ahead_nbytes"] = 40000
    engine = zerocli.shard(model, optimizer=name, stage=stage, **own, **OPTIMIZERS[name], **settings)
    if start:
        load(engine, Folder(folder).of(4))
    rank, world = engine.collectives.rank, engine.collectives.world
    each = 8 // world
    for step in range(start + 1, stop + 1):
        engine.backward(model(*inputs(step, slice(rank * each, (rank + 1) * each)), *uses(step)))
        engine.step()
    return engine


def numbers(engine) -> dict[str, list]:
    return {key: value.tolist() for key, value in engine.state_dict().items()}


def _each_shape(name: str, folder: str):
    found = {}
    for stage, offload in SOME:
        engine = train(name, stage, offload, folder)
        found[stage, offload] = numbers(engine), engine.counts.by_name()
        engine.close()
    return found


@pytest.mark.longer
@pytest.mark.parametrize("name", ["adamw", *(pytest.param(n, marks=pytest.mark.long) for n in ("sgd", "nadam"))])
def test_parameters_without_a_gradient_are_skipped_as_torch_skips_them(tmp_path, name):
    expected = theirs(name)
    for found in run_ranks(2, _each_shape, name, str(tmp_path)):
        first, counts = found[0, ""]
        for key, value in expected.items():
            assert torch.allclose(torch.tensor(first[key]), value, rtol=1e-4, atol=1e-6), key
        for shape in SOME:
            assert found[shape] == (first, counts), shape  # to the bit
        assert counts["shift"] == STEPS and counts["unused.weight"] == 0
        assert counts["heads.a.bias"] == counts["heads.b.bias"] == STEPS // 2
        assert counts["heads.c.bias"] == 2 and counts["late"] == 4


def _one_rank_only(stage: int):
    """Each rank uses a head of its own; a third head is used by nobody."""
    torch.manual_seed(3)
    model = Heads()
    engine = zerocli.shard(model, stage=stage, lr=1e-2, weight_decay=0.1, units=[model.unused])
    rank = engine.collectives.rank
    for step in range(1, 4):
        engine.backward(model(*inputs(step, slice(0, 8)), "ab"[rank], False))
        engine.step()
    return numbers(engine), engine.counts.by_name()


def test_a_gradient_on_one_rank_is_enough():
    torch.manual_seed(3)
    model = Heads()
    decays = [
        {"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": 0.1 * (d - 1)} for d in (2, 1)
    ]
    optimizer = torch.optim.AdamW(decays, lr=1e-2)
    for step in range(1, 4):
        optimizer.zero_grad()
        for head in "ab":
            (model(*inputs(step, slice(0, 8)), head, False) / 2).backward()
        optimizer.step()
    for stage, ranks in enumerate(run_cases(2, _one_rank_only, [(stage,) for stage in range(4)])):
        found, counts = ranks[0]
        assert counts["heads.a.bias"] == counts["heads.b.bias"] == 3 and counts["heads.c.bias"] == 0
        for key, value in model.named_parameters():
            assert torch.allclose(torch.tensor(found[key]), value, rtol=1e-4, atol=1e-6), (stage, key)


def _save(folder: str):
    from zerocli.checkpoint import Saver

    for name in OPTIMIZERS:
        engine = train(name, 2, "", f"{folder}/{name}", stop=4)
        saver = Saver(engine, f"{folder}/{name}", asynchronous=False)
        saver.save(4)
        saver.close()
        whole = train(name, 2, "", f"{folder}/{name}")
        state = engine.state_dict(), engine.optimizer_state_dict()
        yield name, numbers(whole), whole.counts.by_name(), state


def _saved(folder: str):
    return list(_save(folder))


def _resumed(folder: str, name: str, stage: int, offload: str, state):
    by_file = train(name, stage, offload, f"{folder}/{name}", start=4)
    found = [(numbers(by_file), by_file.counts.by_name())]
    by_file.close()
    torch.manual_seed(11)
    model = Heads()
    engine = zerocli.shard(model, optimizer=name, stage=stage, lr=1e-2, clip=0.5, **OPTIMIZERS[name])
    engine.load_state_dict(state[0])
    engine.load_optimizer_state_dict(state[1])
    each = 8 // engine.collectives.world
    rank = engine.collectives.rank
    for step in range(5, STEPS + 1):
        engine.backward(model(*inputs(step, slice(rank * each, (rank + 1) * each)), *uses(step)))
        engine.step()
    return [*found, (numbers(engine), engine.counts.by_name())]


@pytest.mark.long
def test_mixed_counts_resume_at_any_stage_placement_and_world(tmp_path):
    for name, expected, counts, state in run_ranks(2, _saved, str(tmp_path))[0]:
        for stage, offload in ((3, "cpu"), (0, "")):
            for found in run_ranks(2, _resumed, str(tmp_path), name, stage, offload, state)[1]:
                assert found == (expected, counts), (name, stage)
        for found, its_counts in _resumed(str(tmp_path), name, 2, "", state):
            assert its_counts == counts
            for key, value in expected.items():
                assert torch.allclose(torch.tensor(found[key]), torch.tensor(value), rtol=1e-4, atol=1e-6), (name, key)


def test_a_checkpoint_with_one_count_for_all_still_loads(tmp_path):
    from zerocli.checkpoint.state import restore_histories

    engine = train("nadam", 2, "", str(tmp_path), stop=2)
    old = {"updates": 2.0, "optimizer": {"scalars": {"step": 2.0, "mu_product": 0.5}}}
    restore_histories(engine, old, {})
    assert set(engine.counts.by_name().values()) == {2}
    assert engine.rule.numbers("shift", engine.counts.class_of("shift"), 1) == {"step": 2.0, "mu_product": 0.5}


def test_frozen_after_shard_is_left_alone_and_a_skipped_step_counts_for_nobody():
    torch.manual_seed(3)
    model = Heads()
    engine = zerocli.shard(model, stage=2, lr=1e-2, weight_decay=0.1)
    engine.backward(model(*inputs(1, slice(0, 8)), "a", False))
    engine.step()
    model.blocks[0].weight.requires_grad_(False)
    before = engine.state_dict()["blocks.0.weight"]
    engine.backward(model(*inputs(2, slice(0, 8)), "a", False))
    engine.step()
    assert torch.equal(engine.state_dict()["blocks.0.weight"], before)
    counts = engine.counts.by_name()
    assert counts["blocks.0.weight"] == 1 and counts["blocks.1.weight"] == 2
    engine.backward(model(*inputs(2, slice(0, 8)), "b", False) * float("nan"))
    assert engine.step().skipped.item() == 1
    assert engine.counts.by_name() == counts


def test_a_chunk_with_nothing_to_update_is_not_fetched():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.rest = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(6400))

        def forward(self, which: str) -> torch.Tensor:
            return getattr(self, which).sum()

    moved = {}
    for which in ("used", "rest"):
        engine = zerocli.shard(Two(), stage=3, offload="optimizer=cpu", staging_nbytes=6 * 24 * 640, update="stream")
        engine.backward(engine(which))
        engine.step()
        engine.synchronize()
        moved[which] = sum(engine.tiers.traffic.values())
    assert 0 < moved["used"] < moved["rest"] / 2


@pytest.mark.parametrize("stage", [0, 3])
def test_partial_accumulation_averages_over_the_passes_made(stage):
    torch.manual_seed(3)
    model, twin = Heads(), Heads()
    twin.load_state_dict(model.state_dict())
    engine = zerocli.shard(model, optimizer="sgd", lr=0.1, stage=stage, accumulate=4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for part in (slice(0, 4), slice(4, 8)):
        engine.backward(model(*inputs(1, part), "a", True))
        (twin(*inputs(1, part), "a", True) / 2).backward()
    norm = engine.step().grad_norm
    expected = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
    optimizer.step()
    assert stage == 3 or torch.allclose(norm, expected)
    for key, value in engine.state_dict().items():
        assert torch.allclose(value, twin.state_dict()[key], atol=1e-6), key
