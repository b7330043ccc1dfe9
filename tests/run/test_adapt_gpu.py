"""Laws of adapting on a GPU: a run leaves a slow disk, and goes on where memory does not suffice, with equal losses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import SlowDisk, losses, train

from zerocli import config as configs
from zerocli.config.options import AUTOMATIC
from zerocli.engine.events import FORWARD, Events
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.build import plan_model
from zerocli.plan.setup import setup_of

pytestmark = pytest.mark.gpu

SETS = ["model.layers=8", "model.hidden=512", "model.heads=8", "train.seq=256", "train.batch=16", "checkpoint.every=0"]
SETS += ["train.precision=bf16", "optimizer.schedule=constant", "train.log_every=1", "zero.stage=3"]


class OtherProgram(Events):
    """Takes device memory with the first forward and keeps it, as another program on the GPU does."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held: torch.Tensor | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == FORWARD and self._held is None:
            self._held = torch.empty(self._nbytes, dtype=torch.uint8, device="cuda")
        yield


def deterministic(rank: int, folder: str) -> str:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return folder


def adapted(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["adapted"] for row in rows if "adapted" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[int, float]:
    """The losses of a run that stays as it is, with everything on the device."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    ended = train(folder, *SETS, "train.steps=16", world=1, before=deterministic)
    assert ended.codes == [0], ended.said
    return losses(folder)


def test_a_run_leaves_a_slow_disk_and_changes_no_number_on_a_gpu(tmp_path, plain):
    (swap := tmp_path / "swap").mkdir()
    sets = (
        *SETS,
        "train.steps=16",
        "train.adapt=true",
        "offload.placement=optimizer=nvme",
        f"offload.nvme_path={swap}",
    )
    ended = train(tmp_path / "run", *sets, world=1, before=deterministic, events=(SlowDisk(),))
    assert ended.codes == [0], ended.said
    [change] = adapted(tmp_path / "run")
    assert "nvme" not in change.partition(", as ")[0] and not list(swap.iterdir()), change
    assert losses(tmp_path / "run") == plain


def test_memory_that_another_program_takes_has_a_run_go_on_with_less(tmp_path, plain):
    """The allocation that fails is torch's own, somewhere in the first forward or backward."""
    config = configs.load("tiny", SETS)
    needs = []
    for recompute in (False, True):
        setup = setup_of(config, ranks=1, ranks_per_node=1, device="cuda", recompute=recompute)
        needs.append(plan_model(shape_of(config.model, config.train.seq), setup))
    kept, recomputed = needs
    cap = int(kept.needed("hbm") * 1.1)
    taken = cap - kept.allocated + (kept.allocated - recomputed.allocated) // 2
    ended = train(
        tmp_path / "run", *SETS, "train.steps=6", f"train.gpu_memory={cap}B", world=1, before=deterministic,
        auto=frozenset(AUTOMATIC) - {"zero.stage"}, events=(OtherProgram(taken),),
    )  # fmt: skip
    assert ended.codes == [0], ended.said
    assert adapted(tmp_path / "run") and "memory did not suffice" in ended.said[0], ended.said
    assert losses(tmp_path / "run") == {step: plain[step] for step in range(1, 7)}
