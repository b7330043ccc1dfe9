"""The laws again where the streams are real: one GPU with NCCL, and two ranks sharing one over gloo."""

from __future__ import annotations

import pytest
import torch
from gpu_stack import Stack, run_without_waiting, train_stack
from ranks import run_ranks

import zerocli

pytestmark = pytest.mark.gpu


def test_one_gpu_over_nccl_is_the_same_at_every_stage(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for settings in ({}, {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "accumulate": 3}):
            reference = train_stack(0, settings)
            assert reference[-1] < reference[0]
            for stage in (1, 2, 3):
                assert train_stack(stage, settings) == reference, (stage, settings)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "accumulate": 2}, {"recompute": True}], ids=str)
def test_two_ranks_on_one_gpu_are_the_same_at_every_stage(settings):
    reference = run_ranks(2, train_stack, 0, settings)
    for stage in (1, 2, 3):
        if settings.get("accumulate", 1) > 1 and stage >= 2:
            for mine, other in zip(run_ranks(2, train_stack, stage, settings), reference, strict=True):
                assert mine == pytest.approx(other, rel=1e-2)
        else:
            assert run_ranks(2, train_stack, stage, settings) == reference, stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_delays_on_the_streams_change_no_number(stage):
    reference = run_ranks(2, train_stack, stage, {})
    for seed, settings in ((1, {}), (2, {"recompute": True}), (3, {"gather_buffers": 3})):
        assert run_ranks(2, train_stack, stage, settings, seed) == reference, (seed, settings)


def test_a_bare_cuda_is_the_current_gpu():
    engine = zerocli.shard(Stack(1), device="cuda")
    assert engine.device == torch.device("cuda", torch.cuda.current_device())


def test_steady_state_never_waits_for_the_device():
    run_without_waiting()


def _compiled(stage: int, settings: dict):
    return train_stack(stage, settings, steps=4)


def test_compiled_blocks_are_right_at_stage_3():
    reference = run_ranks(2, _compiled, 0, {"compile": True}, seconds=300)
    for recompute in (False, True):
        got = run_ranks(2, _compiled, 3, {"compile": True, "recompute": recompute}, seconds=300)
        for mine, other in zip(got, reference, strict=True):
            assert mine == pytest.approx(other, rel=1e-4)
