"""Laws: states partitioned within groups of ranks, and copied to each group, give the numbers of plain sharding."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deep import WIDTH, Deep
from lengths import LONG
from ranks import run_cases, run_ranks
from split_models import MODELS, SEQ, batch
from torch import nn
from toys import Uneven, split, uneven_batch

import zerocli
from zerocli.layout.buffers import COPIES
from zerocli.models import build

STEPS = 6 if LONG else 2
FIXED = {"lr": 1e-2, "clip": 0.5, "weight_decay": 0.1, "bucket_nbytes": 4096}
PLAIN: dict[str, Any] = {"stage": 2}
FREE: dict[str, Any] = PLAIN | {"clip": None}
SPREAD = {"shard_states": "all"}
ADDING: dict[str, Any] = {"stage": 1, "accumulate": 2}  # which sums the passes of a rank before it sums over ranks
# What two groups of two train with, by what plain sharding trains with that they equal.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PLAIN, {"stage": 0}),
    (PLAIN, {"stage": 2}),
    (PLAIN, {"stage": 3, "recompute": True}),
    (ADDING, {"stage": 3, "accumulate": 2, "offload": "cpu"}),
    # Slices of four ranks have other norms than those of two, in the last place: nothing is clipped by them.
    (FREE, FREE | SPREAD | {"stage": 3, "recompute": True}),
]
if LONG:
    whole = {"stage": 2, "optimizer": "adafactor", "weight_decay": 0.0}
    CASES += [
        (PLAIN, {"stage": 1}),
        (PLAIN, {"stage": 3}),
        *((FREE, FREE | SPREAD | {"stage": stage}) for stage in (0, 1, 2)),
        (FREE, FREE | SPREAD | {"stage": 3, "offload": "cpu"}),
        (FREE, FREE | SPREAD | {"stage": 3, "uneven": False}),
        (FREE, FREE | SPREAD | {"stage": 3, "offload": "nvme"}),
        (FREE, FREE | SPREAD | {"stage": 3, "offload": "optimizer=cpu,grads=cpu"}),
        (FREE | {"precision": "bf16"}, FREE | SPREAD | {"stage": 3, "precision": "bf16"}),
        (FREE | {"optimizer": "adafactor"}, FREE | SPREAD | {"stage": 3, "optimizer": "adafactor"}),
        (PLAIN, {"stage": 3, "offload": "cpu"}),
        (ADDING, {"stage": 2, "accumulate": 2}),
        (PLAIN, {"stage": 3, "uneven": False}),
        (PLAIN, {"stage": 3, "offload": "nvme"}),
        (PLAIN, {"stage": 2, "offload": "grads=cpu"}),
        (ADDING, {"stage": 3, "accumulate": 2}),
        (ADDING, {"stage": 2, "accumulate": 2, "offload": "optimizer=cpu,grads=cpu"}),
        (whole, whole | {"stage": 3}),
        *((PLAIN | {"precision": name}, {"stage": 3, "precision": name}) for name in ("bf16", "fp16")),
        *((PLAIN | {"reduce": "fp32"}, {"stage": stage, "reduce": "fp32"}) for stage in (1, 3)),
    ]


def _train(batches: int, settings: dict[str, Any], nvme: str = "") -> dict[str, Any]:
    """Train on the joined batch of four ranks, `batches` of them on each rank that there is; return what it showed."""
    torch.manual_seed(7)
    model, accumulate = Uneven(), settings.get("accumulate", 1)
    engine = zerocli.shard(model, **(FIXED | ({"nvme_path": nvme} if nvme else {}) | settings))
    first = engine.collectives.rank * batches
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        for micro in range(accumulate):
            rows = [split(first + each, 4, micro, accumulate) for each in range(batches)]
            found = [model(*(part.to(engine.device) for part in uneven_batch(step, row))) for row in rows]
            engine.backward(sum(found) / batches)
            losses.append([loss.item() for loss in found])
        norms.append(engine.step().grad_norm.item())
    states = engine.optimizer_state_dict()["state"]
    flat = {f"{name}.{key}": value.tolist() for name, of in states.items() for key, value in of.items()}
    engine.close()
    return {"losses": losses, "norms": norms, "state": flat}


def _joined(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each rank showed, with the losses of all of them."""
    losses = [sum(found, []) for found in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return [rank | {"losses": losses} for rank in ranks]


@pytest.mark.longer
def test_two_groups_are_bit_identical_to_plain_sharding(tmp_path):
    """Two plain ranks, each with the batches of one group, add gradients as groups do: (0 + 1) + (2 + 3)."""
    plain = [settings for at, (settings, _) in enumerate(CASES) if settings not in [each for each, _ in CASES[:at]]]
    references = run_cases(2, _train, [(2, settings) for settings in plain])
    groups = run_cases(4, _train, [(1, settings | {"shard_ranks": 2}, str(tmp_path)) for _, settings in CASES])
    for (settings, case), ranks in zip(CASES, groups, strict=True):
        reference = _joined(references[plain.index(settings)])[0]
        for rank in _joined(ranks):
            norms = pytest.approx(reference["norms"], rel=1e-6) if "shard_states" in case else reference["norms"]
            assert rank["losses"] == reference["losses"] and rank["norms"] == norms, case
            assert rank["state"] == reference["state"], case


@pytest.mark.gpu
def test_groups_on_a_gpu_equal_plain_sharding(tmp_path):
    """Four ranks share the GPU over gloo: the sums across groups are ordered by the side stream."""
    for alike in (PLAIN, FREE):
        cases = [settings | {"shard_ranks": 2} for of, settings in CASES if of is alike]
        plain, *groups = run_cases(4, _train, [(1, alike), *((1, each, str(tmp_path)) for each in cases)])
        wanted = [pytest.approx(each, rel=1e-4) for each in _joined(plain)[0]["losses"]]
        assert cases and all(_joined(ranks)[0]["losses"] == wanted for ranks in groups)


def _moved(
    stage: int, shard_ranks: int, accumulate: int = 1, shard_states: str = "group"
) -> tuple[dict[str, int], dict[str, int], int, dict[str, int], int]:
    """Return the bytes of a step inside a group and across groups, the padded elements, what is held, and copies."""
    torch.manual_seed(0)
    model = Deep(2)
    settings = {"clip": 1.0, "bucket_nbytes": 16384, "shard_ranks": shard_ranks, "accumulate": accumulate}
    settings["shard_states"] = shard_states
    engine = zerocli.shard(model, stage=stage, **settings)
    for _ in range(2):
        engine.forget_traffic()
        for _ in range(accumulate):
            engine.backward(model(torch.randn(4, WIDTH)))
        engine.step()
    padded = sum(flat.layout.total for flat in engine.flats())
    copies = sum(spec.nbytes for spec in engine.specs() if spec.name == COPIES)
    assert copies == sum(tensor.nbytes for _, name, tensor in engine.holdings() if name == COPIES)
    return engine.inside.take_nbytes(), engine.across.take_nbytes(), padded, engine.memory(), copies


@pytest.mark.longer
def test_traffic_and_memory_are_the_arithmetic_of_groups():
    cases = [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1), (3, 4)] if LONG else [(1, 2)]
    cases += [(3, 2, 3)]
    for (stage, n, *more), ranks in zip(cases, run_cases(4, _moved, cases), strict=True):
        inside, across, padded, held, copies = ranks[0]
        assert copies == 0
        whole, passes = 4 * padded, (more or [1])[0]
        gathers = {0: 1, 1: 1, 2: 1, 3: 2 * passes}[stage]  # of sums at stage 0, of parameters at the others
        sent = n > 1
        assert inside == {
            "all_gather": sent * gathers * whole,
            "reduce_scatter": sent * passes * whole,
            "all_reduce": 0,
        }
        # An all-reduce of a rank's slice, once per step: 2 x padded / n elements.
        assert across["all_reduce"] == (2 * whole // n if n < 4 else 0), (stage, n)
        assert across["all_gather"] == across["reduce_scatter"] == 0
        states = {
            0: 16 * padded,
            1: 8 * padded + 8 * padded // n,
            2: 4 * padded + 12 * padded // n,
            3: 16 * padded // n,
        }
        assert held["parameters"] + held["gradients"] + held["optimizer_states"] == states[stage], (stage, n)


@pytest.mark.longer
def test_states_over_all_ranks_cost_a_copy_of_the_parameters_in_each_group():
    asked = ((0, 1), (1, 1), (2, 2), (3, 1), (3, 3)) if LONG else ((3, 3),)
    cases = [(stage, 2, passes, "all") for stage, passes in asked]
    for (stage, n, passes, _), ranks in zip(cases, run_cases(4, _moved, cases), strict=True):
        inside, across, padded, held, copies = ranks[0]
        whole, reduced = 4 * padded, {0: 1, 1: 1, 2: passes, 3: passes}[stage]
        gathered = 2 * passes if stage == 3 else 1
        assert inside == {"all_gather": gathered * whole, "reduce_scatter": reduced * whole, "all_reduce": 0}
        # New parameters cross once per step, however often they are gathered, and gradients in each reduction.
        across_once = {"all_gather": whole // n, "reduce_scatter": reduced * whole // n, "all_reduce": 0}
        assert across == (
            across_once if stage else {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 2 * whole // n}
        )
        assert copies == (whole // n if stage == 3 else 0)
        states = {0: 16 * padded, 1: 8 * padded + 8 * padded // 4, 2: 4 * padded + 12 * padded // 4, 3: 4 * padded}
        assert held["parameters"] + held["gradients"] + held["optimizer_states"] == states[stage]


def _host_memory(shard_ranks: int) -> tuple[int, int, int]:
    """Return the bytes of host memory that this rank takes, the padded elements, and the arrays that it has there."""
    torch.manual_seed(0)
    model = Deep(2)
    engine = zerocli.shard(model, stage=3, shard_ranks=shard_ranks, offload="cpu")
    engine.backward(model(torch.randn(4, WIDTH)))
    engine.step()
    flats = list(engine.flats())
    return engine.tiers.used("dram"), sum(flat.layout.total for flat in flats), 3 * len(flats)


def test_a_nodes_host_memory_holds_one_copy_of_what_its_ranks_share():
    """Two nodes of two ranks: groups of a node share one copy there, one group of all ranks shares it over both."""
    for n, ranks in zip((2, 4), run_cases(4, _host_memory, [(2,), (4,)]), strict=True):
        for node in (ranks[:2], ranks[2:]):
            taken, (_, padded, arrays) = sum(used for used, *_ in node), node[0]
            states = 16 * padded * len(node) // n  # fp32: parameters, gradients, momentum and variance
            assert states <= taken <= states + len(node) * arrays * mmap.PAGESIZE, n


class Branches(nn.Module):
    """Ranks of one group run different blocks, and one block is not run by any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in ((0, 2), (1, 2), (2, 0), (0, 1))[dist.get_rank()]:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


def _branches(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Branches()
    engine = zerocli.shard(model, stage=3, lr=0.1, eps=1e-4, weight_decay=0.1, **settings)
    for step in range(3):
        engine.backward(model(torch.ones(2, 8) * (1 + step + dist.get_rank())))
        engine.step()
    return engine.state_dict()


def _split(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build(MODELS["llama"], SEQ, "meta")
    engine = zerocli.shard(model, lr=1e-2, clip=0.3, eps=1e-5, seed=3, tp=2, units=model.unit_modules(), **settings)
    rank = engine.collectives.rank
    for step in range(2):
        engine.backward(engine(*batch(step, slice(2 * rank, 2 * rank + 2))))
        engine.step()
    return engine.state_dict()


def _early(offload: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return a gradient after one pass of two, and with one pass of one; a parameter after a step of each."""
    found = []
    for accumulate in (2, 1):
        torch.manual_seed(7)
        model = Uneven()
        engine = zerocli.shard(model, **FIXED, shard_ranks=2, stage=2, accumulate=accumulate, offload=offload)
        engine.backward(model(*uneven_batch(1, split(dist.get_rank(), 4))))
        found.append(engine.grad("last.weight").flatten().tolist())
        engine.step()
        found.append(engine.state_dict()["last.weight"].flatten().tolist())
    return tuple(found)


def _changed(settings: dict[str, Any]) -> list[float]:
    """Return what a forward gives after each way in which parameters change outside of steps."""
    torch.manual_seed(7)
    model, found = Uneven(), []
    engine = zerocli.shard(model, **FIXED, stage=3, **settings)
    inputs = uneven_batch(1, split(dist.get_rank(), 4))
    engine.backward(model(*inputs))
    engine.step()
    loaded = {name: value * 1.25 for name, value in engine.state_dict().items()}
    found.append(model(*inputs).item())
    with engine.gathered("last.weight", write=True):
        model.last.weight.data.mul_(0.5)
    found.append(model(*inputs).item())
    engine.load_state_dict(loaded)
    found.append(model(*inputs).item())
    return found


def _refusals() -> list[str]:
    said = []
    for settings in ({"shard_ranks": 3}, {"shard_ranks": -1}, {"shard_ranks": 2 + 2 * (dist.get_rank() == 1)}):
        with pytest.raises((ValueError, zerocli.Refused)) as caught:
            zerocli.shard(nn.Linear(3, 3), **settings)
        said.append(str(caught.value))
    return said


def _others() -> tuple[Any, ...]:
    dist.new_group([0])  # ranks that are in different numbers of groups agree on the names of ours
    same = zerocli.shard(nn.Linear(3, 3), shard_ranks=4)
    assert same.shards is same.collectives and same.replicas.world == 1
    one, other = (zerocli.shard(nn.Linear(3, 3), shard_ranks=2) for _ in range(2))
    assert one.shards.group is other.shards.group and one.replicas.group is other.replicas.group
    branches = [
        _branches(settings) for settings in ({}, {"shard_ranks": 2}, {"shard_ranks": 1}, SPREAD | {"shard_ranks": 2})
    ]
    tp = [
        _split(settings)
        for settings in ({"stage": 0}, {"stage": 3, "shard_ranks": 1}, SPREAD | {"stage": 3, "shard_ranks": 1})
    ]
    changed = [_changed(settings) for settings in ({}, SPREAD | {"shard_ranks": 2})]
    return branches, tp, changed, [_early(offload) for offload in ("", "optimizer=cpu,grads=cpu")], _refusals()


@pytest.mark.long
def test_groups_with_other_units_tensor_parallelism_and_steps_that_end_early():
    for branches, tp, changed, early, said in run_ranks(4, _others):
        plain, copied = changed
        assert copied == pytest.approx(plain, rel=1e-5) and len(set(plain)) == 3
        for first, *others in (branches, tp):
            for other in others:
                for name, value in first.items():
                    torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5, msg=name)
        for grad, state, expected, stepped in early:
            assert grad == expected and state == stepped
        assert said[:2] == [
            "shard_ranks 3 does not divide the 4 data-parallel ranks: 1, 2 or 4 does",
            "shard_ranks -1 does not divide the 4 data-parallel ranks: 1, 2 or 4 does",
        ]
        assert "shard_ranks=2" in said[2] and "shard_ranks=4" in said[2]
