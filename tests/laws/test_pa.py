"""Laws of partitioned checkpoints (Pa): tensor-parallel ranks each keep a part, and the parts are gathered once."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from small_gpt import BATCH, CHECKPOINT, HIDDEN, SEQ, make, train

LAYERS, TP = 4, 2
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True},
    "mixed": {"offload": f"activations=hbm:{CHECKPOINT // TP}B+cpu:{CHECKPOINT // TP}B+nvme"},
}
MORE: dict[str, dict[str, Any]] = {
    "whole": {"recompute": True, "partition_activations": False},
    "whole cpu": {"offload": "activations=cpu", "partition_activations": False},
    "cpu": {"offload": "activations=cpu"},
    "nvme": {"offload": "activations=nvme"},
}


def _run(settings: dict) -> dict[str, Any]:
    engine = make(LAYERS, tp=TP, **settings)
    losses = train(engine, 1)
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


def _every_way(settings: dict, ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: _run(settings | way) for name, way in ways.items()}


@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_partitioned_checkpoints_change_no_loss_and_keep_their_part(tmp_path, ways):
    common = {"stage": 2, "nvme_path": (str(tmp_path),)}
    arenas = {"whole": LAYERS * CHECKPOINT, "recomputed": LAYERS * CHECKPOINT // TP, "mixed": CHECKPOINT // TP}
    for found in run_ranks(4, _every_way, common, {"kept": {}} | ways):
        kept = found.pop("kept")
        for way, other in found.items():
            assert other["losses"] == kept["losses"], way
            assert other["arena"] == arenas.get(way, 0), way
            if way in arenas:
                continue
            assert other["peak"] <= 2 * CHECKPOINT
            assert other["traffic"]["activations written"] == LAYERS * CHECKPOINT // (1 if "whole" in way else TP)
        if "whole" in found:
            assert found["whole"]["peak"] == LAYERS * CHECKPOINT
        if "cpu" in found:
            assert found["cpu"]["traffic"]["activations read"] == LAYERS * CHECKPOINT // TP
        assert not list(tmp_path.iterdir())


def test_the_extra_communication_is_one_gather_a_block():
    ways = {"kept": {}, "recomputed": WAYS["recomputed"], "whole": MORE["whole"]}
    for found in run_ranks(2, _every_way, {"stage": 0, "dropout": 0.0}, ways):
        kept, recomputed, whole = (found[way] for way in ways)
        extra = recomputed["comm"]["all_gather"] - whole["comm"]["all_gather"]
        assert extra == LAYERS * BATCH * SEQ * HIDDEN * 4
        assert whole["comm"]["all_reduce"] == recomputed["comm"]["all_reduce"] > kept["comm"]["all_reduce"]
        assert extra < 0.10 * sum(whole["comm"].values()), (extra, whole["comm"])
