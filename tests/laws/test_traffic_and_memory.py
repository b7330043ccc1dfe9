"""Laws: communication is the paper's (2Ψ, 2Ψ, 2Ψ, 3Ψ), and so is memory, to the byte of what is stated here."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from deep import BLOCK_NUMEL, WIDTH, Deep, live_nbytes, live_storages
from lengths import LONG
from ranks import run_cases

import zerocli
from zerocli.layout.shards import PARAM_ALIGN, SHARD_ALIGN


def _wire(stage: int, layers: int, recompute: bool) -> tuple[dict[str, int], int, Counter]:
    """Return the counted bytes of the third step, the padded numel, and what torch.distributed was really asked."""
    import torch.distributed as dist

    import zerocli.engine.comm as comm

    seen: Counter = Counter()

    def spy(kind, function, size):
        def counted(*args, **kwargs):
            seen[kind] += size(*args)
            return function(*args, **kwargs)

        return counted

    unwatched = comm._all_gather, comm._reduce_scatter, dist.all_reduce
    comm._all_gather = spy("all_gather", comm._all_gather, lambda full, shard: full.nbytes)
    comm._reduce_scatter = spy("reduce_scatter", comm._reduce_scatter, lambda shard, full: full.nbytes)
    dist.all_reduce = spy("all_reduce", dist.all_reduce, lambda tensor, *_: 2 * tensor.nbytes)
    torch.manual_seed(0)
    model = Deep(layers)
    engine = zerocli.shard(model, stage=stage, clip=1.0, bucket_nbytes=16384, recompute=recompute)
    for _ in range(3):
        engine.collectives.take_nbytes()
        seen.clear()
        engine.backward(model(torch.randn(4, WIDTH)))
        engine.step()
    padded = sum(flat.layout.total for flat in engine.flats())
    assert padded - engine.numel <= len(engine.units) * dist.get_world_size() * SHARD_ALIGN
    comm._all_gather, comm._reduce_scatter, dist.all_reduce = unwatched
    seen["messages"], seen["engines"] = engine.collectives.nbytes["control"], engine.channel.num_slots
    return engine.collectives.take_nbytes(), padded, seen


@pytest.mark.longer
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_communication_is_the_papers(stage):
    cases = [(stage, layers, recompute) for layers in (2, 7) for recompute in (False, True)][:: 1 if LONG else 3]
    for (_, layers, _), ranks in zip(cases, run_cases(2, _wire, cases), strict=True):
        _check_wire(stage, layers, *ranks[0])


def _check_wire(stage: int, layers: int, counted: dict[str, int], padded: int, seen: Counter) -> None:
    # All-reduced in fp64: the global norm, and of each parameter whether it got a gradient.
    control = 2 * 8 * (1 + 4 * layers + 2)
    whole = padded * 4
    expected = {
        0: {"all_reduce": 2 * whole, "all_gather": 0, "reduce_scatter": 0},
        1: {"all_reduce": 0, "all_gather": whole, "reduce_scatter": whole},
        2: {"all_reduce": 0, "all_gather": whole, "reduce_scatter": whole},
        3: {"all_reduce": 0, "all_gather": 2 * whole, "reduce_scatter": whole},
    }[stage]
    assert counted == expected
    # Over gloo ranks meet where a pass begins and ends, and at the step; at stage 3 also before each gather, after each
    # unit's backward and where forward ends. Each tells the others five integers, and one per engine.
    met, message = seen.pop("messages") - control // 2, 2 * 8 * (5 + seen.pop("engines"))
    gathers = 2 * (layers + 1) if stage == 3 else 0
    more = layers + 2 if stage == 3 else 0
    assert met % message == 0 and gathers + 3 <= met // message <= gathers + more + 3
    assert dict(seen) == {k: v for k, v in (expected | {"all_reduce": expected["all_reduce"] + control}).items() if v}
    assert sum(counted.values()) == (3 if stage == 3 else 2) * whole


def _held(stage: int, layers: int, master: str = "split") -> tuple[int, dict, int]:
    before = live_storages()
    model = Deep(layers)
    engine = zerocli.shard(model, stage=stage, precision="bf16", clip=1.0, master=master)
    for _ in range(2):
        engine.backward(model(torch.randn(4, WIDTH)))
        engine.step()
    return live_nbytes(besides=before), engine.memory(), engine.numel


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_the_papers(stage, world):
    layers, masters = 6, ("fp32", "split")
    for master, ranks in zip(masters, run_cases(world, _held, [(stage, layers, m) for m in masters]), strict=True):
        _check_held(stage, world, layers, master, *ranks[0])


def _check_held(stage: int, world: int, layers: int, master: str, live: int, held: dict, psi: int) -> None:
    n, k = world, {"fp32": 12, "split": 10}[master]  # bytes of master and moments
    states = {0: (2 + 2 + k) * psi, 1: 4 * psi + k * psi // n, 2: 2 * psi + (2 + k) * psi // n, 3: (4 + k) * psi // n}
    states = states[stage]
    # Constants, none of which grows with the number of layers (but padding, a unit's worth of alignment each):
    padding = (layers + 1) * (n * SHARD_ALIGN + 4 * PARAM_ALIGN) * 16
    scratch = {"fp32": 4 * (1 << 20), "split": 3 * 4 * (1 << 16)}[master]  # fp32: a gradient; a master and its bits
    buckets = 2 * 2 * (BLOCK_NUMEL + n * SHARD_ALIGN) if stage >= 2 else 0
    gathered = 2 * (2 * BLOCK_NUMEL + (WIDTH + 1) * WIDTH + 3 * n * SHARD_ALIGN) if stage == 3 else 0
    small = 4096  # scalars: loss scale, counters, poison
    assert live <= states + padding + scratch + buckets + gathered + small
    assert states <= held["parameters"] + held["gradients"] + held["optimizer_states"] <= states + padding
    assert held["gathered"] <= gathered and held["buffers"] <= scratch + buckets
    assert abs(live - sum(held.values())) <= small


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_do_not_grow_with_layers(stage):
    sizes = [ranks[0][1] for ranks in run_cases(2, _held, [(stage, layers) for layers in (4, 8)])]
    assert len({(held["gathered"], held["buffers"]) for held in sizes}) == 1
