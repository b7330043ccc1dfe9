"""Deep models: the plan from a few blocks of each run is the plan of all of them, byte for byte."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from zerocli.config import LoraConfig
from zerocli.errors import UserError
from zerocli.layout.flats import place
from zerocli.layout.recompute import Recompute
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.memory import flats as plan_flats_module
from zerocli.plan.memory import initialisation, step
from zerocli.plan.memory.arena import PAGE_NBYTES
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.flats import plan_flats
from zerocli.plan.memory.repeats import replayed
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup

KINDS: dict[int, list[str]] = {0: [], 1: ["optimizer"], 2: ["optimizer", "grads"], 3: ["optimizer", "grads", "params"]}


def random_shape(rng: random.Random, layers: int, seq: int) -> Shape:
    heads = rng.choice([1, 2, 4])
    more: dict[str, Any] = {
        "tie": rng.random() < 0.5,
        "gated": rng.random() < 0.5,
        "norm": rng.choice(["layer", "rms", "plain"]),
        "norms": rng.choice(["pre", "pre", "shared", "post", "sandwich", "parallel"]),
        "mlp_bias": rng.random() < 0.5,
        "dropout": rng.choice([0.0, 0.0, 0.1]),
        "rotary": rng.random() < 0.5,
    }
    more["positions"] = 0 if more["rotary"] else seq
    if rng.random() < 0.3:
        more |= {"experts": 3, "experts_per_token": 1, "expert_hidden": 64, "shared_hidden": rng.choice([0, 32])}
        more |= {"sparse_every": rng.choice([1, 2, 3]), "dense_blocks": tuple(rng.sample(range(8), rng.choice([0, 2])))}
    return Shape("random", layers, 16 * heads, heads, rng.choice([50, 1000]), rng.choice([64, 256]), **more)


def random_setup(rng: random.Random, shape: Shape, seq: int) -> Setup:
    def tiers() -> str:
        one, two = (f"{rng.randint(1, 4000)}KiB" for _ in range(2))
        several = [f"hbm:{one}+cpu", f"cpu:{one}+nvme", f"hbm:{one}+cpu:{two}+nvme", f"cpu:{one}+hbm"]
        return rng.choice(["cpu", "nvme", *several])

    stage, dp = rng.randint(0, 3), rng.choice([1, 2, 3, 8])
    tp = 2 if shape.heads % 2 == 0 and rng.random() < 0.25 else 1
    parts = [f"{kind}={tiers()}" for kind in KINDS[stage] if rng.random() < 0.6]
    whole = rng.randint(0, shape.layers)
    selective = Recompute(whole, rng.randint(0, shape.layers - whole))
    recompute = rng.choice([False, True, rng.randint(1, shape.layers), selective, selective])
    if recompute and rng.random() < 0.5:
        parts.append(f"activations={tiers()}")
    return Setup(
        stage=stage,
        offload=",".join(parts),  # type: ignore[arg-type]
        ranks=dp * tp,
        ranks_per_node=dp * tp,
        tp=tp,
        batch=rng.randint(1, 4),
        seq=seq,
        recompute=recompute,
        partition_activations=tp > 1 and rng.random() < 0.5,
        accumulate=rng.choice([1, 1, 2]),
        device=rng.choice(["cuda", "cpu"]),
        precision=rng.choice(["bf16", "fp32"]),
        master=rng.choice(["split", "fp32"]),
        update=rng.choice(["auto", "cpu", "stream"]),
        gather_buffers=rng.choice([2, 3, 9]),
        bucket_nbytes=rng.choice([32 << 20, 1 << 16]),
        staging_nbytes=rng.choice([512 << 20, 1 << 16]),
        checkpoints=rng.choice([0, 3]),
    )


def without_fragments(plan: Plan) -> Plan:
    """Return a plan without the allocator's fragmentation, which depends on every block."""
    rows = tuple(row for row in plan.rows if not row.formula.startswith("fragment"))
    return dataclasses.replace(plan, rows=rows, fragments=0)


@pytest.mark.parametrize(("seed", "number"), [(17, 5), pytest.param(18, 80, marks=pytest.mark.long)])
def test_a_few_blocks_give_the_plan_of_all(monkeypatch, forget_plans, seed, number):
    """Random models and setups of up to 64 blocks, with budgets that end in the middle of the blocks."""
    rng = random.Random(seed)
    for _ in range(number):
        seq = rng.choice([16, 64, 128])
        shape = random_shape(rng, rng.randint(1, 64), seq)
        setup = random_setup(rng, shape, seq)
        if setup.tp == 1 and not shape.experts and rng.random() < 0.3:
            targets = rng.sample(["q", "v", "out", "up", "down"], rng.randint(1, 5))
            shape = shape.adapted(LoraConfig(4, tuple(targets)))
        few = plan_model(shape, setup)
        with monkeypatch.context() as patch:
            for module in (initialisation, step):
                patch.setattr(module, "replayed", lambda keys, lead, period=1: [(at, 0) for at in range(len(keys))])
            patch.setattr(plan_flats_module.Flats, "enough", lambda flats, sizing: flats.units)
            forget_plans()
            whole = plan_model(shape, setup)
        forget_plans()
        assert without_fragments(whole) == without_fragments(few), (shape, setup)
        assert abs(whole.needed("hbm") - few.needed("hbm")) <= 2 * PAGE_NBYTES, (shape, setup)


def test_flats_are_placed_as_the_engine_places_them():
    rng = random.Random(5)
    for _ in range(100):
        shape = random_shape(rng, rng.randint(1, 64), 16)
        setup = random_setup(rng, shape, 16)
        flats = plan_flats(shape, setup)
        assert list(flats) == place(flats, setup.placement(), setup.sizing)
        assert [flat for unit, times in flats.runs for flat in unit * times] == list(flats)


def test_budgets_that_are_used_up_are_refused_as_before():
    shape = random_shape(random.Random(1), 64, 16)
    with pytest.raises(UserError, match="has no place left"):
        plan_model(shape, Setup(stage=3, ranks=2, seq=16, offload="optimizer=cpu:100KiB"))  # type: ignore[arg-type]


def test_ten_thousand_blocks_take_no_more_replays_than_a_hundred():
    for layers in (100, 10_000):
        assert len(list(replayed(["block"] * layers, 4))) == 8
        assert len(list(replayed(["dense", "sparse"] * (layers // 2), 5, 2))) == 10
    shape = Shape("gpt2", 10_000, 64, 4, 100, 256, tie=True)
    small = Shape("gpt2", 100, 64, 4, 100, 256, tie=True)
    setup = Setup(stage=0, ranks=1, batch=1, seq=16, recompute=True)
    deep, shallow = plan_model(shape, setup), plan_model(small, setup)
    block = sum(each.numel for each in shape.block_parameters())
    assert deep.of("parameters") - shallow.of("parameters") >= 9900 * 2 * block
