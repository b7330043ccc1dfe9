"""Laws of partitioned checkpoints (Pa): tensor-parallel ranks each keep a part, and the parts are gathered once."""

from __future__ import annotations

from typing import Any

from ranks import run_ranks
from small_gpt import BATCH, CHECKPOINT, HIDDEN, SEQ, make, train

LAYERS, TP = 4, 2
WAYS: list[dict[str, Any]] = [
    {"recompute": True},
    {"recompute": True, "partition_activations": False},
    {"offload": "activations=cpu"},
    {"offload": "activations=cpu", "partition_activations": False},
    {"offload": "activations=nvme"},
    {"offload": f"activations=hbm:{CHECKPOINT // TP}B+cpu:{CHECKPOINT // TP}B+nvme"},
]


def _run(settings: dict) -> dict[str, Any]:
    engine = make(LAYERS, tp=TP, **settings)
    losses = train(engine, 2)
    engine.tensor_parallel.take_nbytes()
    engine.tiers.traffic.clear()
    losses += train(engine, 1)
    seen = {
        "losses": losses,
        "peak": engine.activations.peak_nbytes,
        "arena": engine.memory()["activations"],
        "comm": engine.tensor_parallel.take_nbytes(),
        "traffic": dict(engine.tiers.traffic),
    }
    engine.close()
    return seen


def _every_way(settings: dict, ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_run(settings | way) for way in ({}, *ways)]


def test_partitioned_checkpoints_change_no_loss_and_keep_their_part(tmp_path):
    common = {"stage": 2, "nvme_path": (str(tmp_path),)}
    for kept, *others in run_ranks(4, _every_way, common, WAYS):
        recomputed, whole, cpu, whole_cpu, nvme, mixed = others
        for way, other in zip(WAYS, others, strict=True):
            assert other["losses"] == kept["losses"], way
        assert whole["arena"] == whole["peak"] == LAYERS * BATCH * SEQ * HIDDEN * 4
        assert recomputed["arena"] == LAYERS * BATCH * SEQ * HIDDEN * 4 // TP
        assert mixed["arena"] == CHECKPOINT // TP
        for away, part in ((cpu, TP), (nvme, TP), (whole_cpu, 1)):
            assert away["arena"] == 0
            assert away["peak"] <= 2 * CHECKPOINT
            assert away["traffic"]["activations written"] == LAYERS * CHECKPOINT // part
        assert cpu["traffic"]["activations read"] == LAYERS * CHECKPOINT // TP
        assert not list(tmp_path.iterdir())


def test_the_extra_communication_is_one_gather_a_block():
    for kept, recomputed, whole in run_ranks(2, _every_way, {"stage": 0, "dropout": 0.0}, WAYS[:2]):
        extra = recomputed["comm"]["all_gather"] - whole["comm"]["all_gather"]
        assert extra == LAYERS * BATCH * SEQ * HIDDEN * 4
        assert whole["comm"]["all_reduce"] == recomputed["comm"]["all_reduce"] > kept["comm"]["all_reduce"]
        assert extra < 0.10 * sum(whole["comm"].values()), (extra, whole["comm"])
