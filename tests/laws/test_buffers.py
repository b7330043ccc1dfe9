"""Law: an engine keeps nothing from step to step but what zerocli/layout specifies, and a plan adds up the same."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from lengths import LONG
from ranks import run_ranks

from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.layout.buffers import persistent
from zerocli.models import build
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.measure import LiveBytes
from zerocli.plan.memory.flats import plan_flats
from zerocli.plan.setup import Setup
from zerocli.profile import places

MODEL = ModelConfig(layers=3, hidden=32, heads=4, vocab=150)
SEQ = 16
Sizes = Counter[tuple[str, str, int]]
"""How many buffers there are by category, tier and bytes."""
SCALARS = 4096 + 128 * 6
"""Bytes of counters, norms, the loss scale and what released parameters show, that have no specification."""

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"stage": 0}),
    ({"tie": False}, {"stage": 1, "precision": "bf16"}),
    ({}, {"stage": 1, "offload": "optimizer=cpu", "precision": "bf16", "accumulate": 2}),
    ({"family": "llama", "kv_heads": 2}, {"stage": 2, "bucket_nbytes": 8192}),
    ({}, {"stage": 2, "precision": "bf16", "reduce": "fp32"}),
    ({}, {"stage": 2, "offload": "grads=cpu", "accumulate": 2, "bucket_nbytes": 8192}),
    ({"tie": False}, {"stage": 2, "optimizer": "sgd", "offload": "cpu"}),
    ({"family": "llama"}, {"stage": 3, "gather_buffers": 3}),
    *(  # an embedding and a head of one size: with one block between them, both are gathered at once in backward
        ({"family": "llama", "tie": False, "layers": layers, "hidden": 48, "vocab": 2001}, {"stage": 3})
        for layers in (1, 2)
    ),
    ({}, {"stage": 3, "offload": "cpu", "precision": "bf16"}),
    ({}, {"stage": 3, "offload": "cpu", "update": "stream", "staging_nbytes": 1 << 16}),
    ({}, {"stage": 3, "offload": "optimizer=hbm:64KiB+cpu,params=cpu", "precision": "bf16", "update": "stream"}),
    ({"tie": False}, {"stage": 3, "offload": "params=cpu,optimizer=nvme", "optimizer": "rmsprop"}),
]
SOME = CASES if LONG else CASES[1::5]


def train(model: torch.nn.Module, settings: dict[str, Any]) -> tuple[Engine, int]:
    """Return an engine that has taken two steps, and the bytes of what these have left alive."""
    torch.backends.mkldnn.set_flags(_enabled=False)  # its refusal of bf16 on old cores costs more than the matmul
    live = LiveBytes()
    with live:
        engine = Engine(model, Settings(device="cpu", clip=1.0, units=model.unit_modules(), **settings))
        for _ in range(2):
            for _ in range(settings.get("accumulate", 1)):
                tokens = torch.randint(MODEL.vocab, (2, 2, SEQ))
                engine.backward(engine(tokens[0], tokens[1]))
            engine.step()
        engine.synchronize()
        del tokens
        gc.collect()
    return engine, live.nbytes


def kept(engine: Engine) -> Sizes:
    """Return what an engine has, but for the model's own buffers, which are lists."""
    found: Sizes = Counter()
    others = {buffer.data_ptr() for buffer in engine.model.buffers()}
    seen: set[int] = set()
    for category, _, tensor in engine.holdings():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen | others:
            seen.add(storage.data_ptr())
            found[category, "hbm", storage.nbytes()] += 1
    for piece in places.pieces(engine):
        if "read ahead" not in piece.name:
            found[piece.category, piece.block.tier.name, piece.block.nbytes] += 1
    return found


def specified(specs: list) -> Sizes:
    return Counter((spec.category, spec.tier, spec.nbytes) for spec in specs if spec.nbytes)


def _compare(cases: list, folder: str) -> list[tuple[Sizes, Sizes, int, int]]:
    found = []
    for changes, settings in cases:
        decoder = build(dataclasses.replace(MODEL, **changes), SEQ, "meta")
        engine, live = train(decoder, settings | {"nvme_path": (folder,)})
        buffers = sum(buffer.nbytes for buffer in decoder.buffers())
        here = sum(spec.nbytes for spec in engine.specs() if spec.tier == "hbm")
        found.append((kept(engine), specified(engine.specs()), live, here + buffers))
        engine.close()
    return found


def planned(changes: dict[str, Any], settings: dict[str, Any], world: int) -> Sizes:
    """Return what a plan adds up for the same model."""
    given = {"precision": "fp32"} | settings
    setup = Setup(ranks=world, ranks_per_node=world, batch=2, seq=SEQ, device="cpu", **given)
    shape = shape_of(dataclasses.replace(MODEL, **changes), SEQ)
    return specified(persistent(plan_flats(shape, setup).units, setup.sizing))


@pytest.mark.longer
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_engine_keeps_what_is_specified_and_nothing_else_and_a_plan_adds_up_the_same(world, tmp_path):
    everyone = run_ranks(world, _compare, SOME, str(tmp_path))
    for rank, found in enumerate(everyone):
        for (changes, settings), (held, specs, live, stated) in zip(SOME, found, strict=True):
            assert held == specs, (changes, settings)
            if rank == 0:  # whose part of each flat a plan is of
                assert specs == planned(changes, settings, world), (changes, settings)
            assert stated <= live <= stated + SCALARS, (changes, settings)


class Gated(torch.nn.Module):
    """Blocks with a matrix in the compute dtype and a gain in fp32; the first block and one bias are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(MODEL.vocab, 32)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        for block in self.blocks:
            block.register_parameter("gain", torch.nn.Parameter(torch.ones(32)))
            block.register_forward_hook(lambda block, args, out: out * block.gain.to(out.dtype))
        for parameter in (*self.blocks[0].parameters(), self.blocks[1].bias):
            parameter.requires_grad_(False)

    def unit_modules(self) -> list[torch.nn.Module]:
        return list(self.blocks)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1).float(), targets.flatten())


def _partly_frozen(stage: int) -> tuple[Sizes, Sizes, int, int]:
    engine, live = train(Gated(), {"stage": stage, "precision": "bf16", "keep_fp32": "gain"})
    here = sum(spec.nbytes for spec in engine.specs())
    return kept(engine), specified(engine.specs()), live, here


@pytest.mark.parametrize("stage", [0, *(pytest.param(s, marks=pytest.mark.long) for s in (1, 2)), 3])
def test_frozen_parameters_and_those_of_another_dtype_are_specified_too(stage):
    for held, specs, live, stated in run_ranks(2, _partly_frozen, stage):
        # A second gather buffer is made when one is wanted beside the first, and a frozen block may never want it.
        spare = specs - held
        assert not held - specs and {category for category, _, _ in spare} <= {"gathered"}
        stated -= sum(nbytes * count for (_, _, nbytes), count in spare.items())
        assert stated <= live <= stated + SCALARS
