"""Laws of `shard(offload="auto")`: it changes no number against the same keywords by hand, and what it picks fits."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

import zerocli
from zerocli.plan.measure import LiveBytes
from zerocli.run.own_loop import copy_on_meta

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Tagger(nn.Module):
    """Not a language model: its loss is outside."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.seq = width // 2  # tokens of a row
        self.embed = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.tags = nn.Linear(width, 40)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.tags(x)


def losses(engine: Any, model: nn.Module, rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(2):
        tokens = torch.randint(500, (4, model.seq), generator=generator)
        loss = loss_of(model, tokens)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 40)


def example(model: nn.Module) -> torch.Tensor:
    return loss_of(model, torch.zeros(4, model.seq, dtype=torch.int64))


def _both(
    memory: dict[int, int], folder: str, settings: dict[str, Any], width: int = 128
) -> tuple[str, list[float], list[float], int]:
    """Train with the choice, and with its keywords by hand; return the keywords, both runs' losses, and the peak."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    given = {"lr": 1e-3, "clip": 1.0, "nvme_path": (folder,), **settings}
    torch.manual_seed(0)
    model = Tagger(width)
    live = LiveBytes()
    engine = zerocli.shard(model, offload="auto", example=example, memory=memory.get(rank, 0), **given)
    held = sum(engine.memory().values())  # what is made later is live
    with live:
        chosen = losses(engine, model, rank)
    asked = engine.settings
    by_hand = {"stage": asked.stage, "offload": str(asked.offload), "recompute": asked.recompute}
    engine.close()
    torch.manual_seed(0)
    model = Tagger(width)
    engine = zerocli.shard(model, **{**given, **by_hand})
    again = losses(engine, model, rank)
    engine.close()
    return str(by_hand), chosen, again, held + live.peak


@pytest.mark.parametrize(
    ("settings", "width", "less"),
    [  # bf16 is narrow: a CPU without it computes at a thousandth of its speed
        pytest.param({}, 128, 15 * MIB, marks=pytest.mark.long),
        pytest.param({"stage": 2, "precision": "bf16"}, 32, 1600 << 10, marks=pytest.mark.long),
        pytest.param({"optimizer": torch.optim.NAdam}, 128, 15 * MIB, marks=pytest.mark.long),
        pytest.param({"precision": "bf16", "keep_fp32": "norm"}, 32, 1600 << 10, marks=pytest.mark.long),
    ],
    ids=["adamw", "stage 2", "nadam", "fp32 kept"],
)
def test_all_ranks_choose_alike_and_the_choice_changes_no_number(settings, width, less, tmp_path):
    kinds = set()
    for memory in ({}, {1: less}):  # only one of the ranks has less
        everyone = run_ranks(2, _both, memory, str(tmp_path), settings, width)
        assert len({keywords for keywords, *_ in everyone}) == 1
        for rank, (keywords, chosen, by_hand, peak) in enumerate(everyone):
            assert chosen == by_hand
            assert peak <= memory.get(rank, 1 << 40), keywords
        kinds.add(everyone[0][0])
    assert len(kinds) == 2  # less memory, another choice


@pytest.mark.long
def test_under_one_process_it_is_said_as_keywords_that_give_it_by_hand(tmp_path, capfd):
    keywords, chosen, by_hand, _ = _both({0: 30 * MIB}, str(tmp_path), {"units": Block})
    assert chosen == by_hand
    written = r'auto: stage=3, (offload="(?P<offload>[^"]*)", )?recompute="(?P<policy>[^"]*)"'
    said = re.search(written, capfd.readouterr().err)
    assert said is not None and f"'{said['offload'] or ''}'" in keywords
    assert said["policy"] in ("keep", "recompute", "selective")


def test_a_copy_without_memory_leaves_the_model_alone():
    model = Tagger()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    with LiveBytes() as live:
        made = copy_on_meta(model, lambda name, parameter: parameter.dtype)
    assert live.peak == model.seen.nbytes and all(value.is_meta for value in made.parameters())
    assert torch.equal(made.seen, model.seen) and made.seen is not model.seen
    assert [name for name, _ in made.named_modules()] == [name for name, _ in model.named_modules()]
    for name, (value, copied) in before.items():
        assert model.state_dict(keep_vars=True)[name] is value and torch.equal(value, copied)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"offload": "auto"}, ValueError, "needs example=lambda model"),
        ({"example": example}, ValueError, 'for offload="auto"'),
        ({"offload": "auto", "example": example, "tp": 2}, ValueError, "with tp or a group, place the states by hand"),
        ({"offload": "auto", "example": example, "recompute": Block}, ValueError, "recomputed by choice"),
        ({"offload": "auto", "example": lambda model: float(example(model))}, ValueError, "could not be traced"),
        pytest.param(
            {"offload": "auto", "example": example, "memory": 2 * MIB},
            zerocli.Refused,
            r"nearest: stage=3, .*more hbm",
            marks=pytest.mark.long,
        ),
        ({"offload": "auto", "example": example, "optimizer": "nosuch"}, ValueError, "nosuch"),
    ],
)
def test_what_cannot_be_chosen_is_refused(given, error, said):
    model = Tagger()
    with pytest.raises(error, match=said):
        zerocli.shard(model, **given)
    with contextlib.closing(zerocli.shard(model)) as engine:  # nothing of the model is changed
        assert losses(engine, model, 0)
