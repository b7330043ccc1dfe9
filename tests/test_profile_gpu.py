"""Laws of the profile on a GPU: its ledger is the allocator's, little is unattributed, and no number changes."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SETS = ("model.layers=4", "model.hidden=512", "model.heads=8", "train.batch=8", "train.seq=512", "train.steps=5")
WAYS = {
    "stage 2": ("zero.stage=2",),
    "stage 3 offload": ("zero.stage=3", "offload.placement=cpu"),
    "recompute": ("zero.stage=3", "activations.policy=recompute"),
}


def run(folder: Path, sets: tuple[str, ...], plain: bool = False) -> dict:
    """Train or profile in this process, alone on the GPU; return what was recorded."""
    from zerocli import config as configs
    from zerocli import trainer
    from zerocli.launch import RunOptions
    from zerocli.profile.observer import Observer
    from zerocli.profile.profiler import Profiler

    gc.collect()  # the engine before this one, of which the allocator's counters would still tell
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    folder.mkdir()
    (folder / "text.txt").write_text("where the bytes lie and where the seconds go\n" * 2000)
    given = (*SETS, "train.precision=bf16", "data.tokenizer=bytes", f"data.path={folder / 'text.txt'}", *sets)
    config = configs.load("tiny", sets=given, flags={})
    trainer._train(config, RunOptions(str(folder)), Observer() if plain else Profiler())
    return json.loads((folder / "profile.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_the_ledger_is_the_allocators_at_every_phase_boundary(tmp_path, way):
    document = run(tmp_path / "on", WAYS[way])
    assert len(document["boundaries"]) >= 7
    for boundary in document["boundaries"]:
        # Blocks are multiples of 512 bytes: where next to nothing is on the device, that is what differs.
        assert boundary["ledger"] == pytest.approx(boundary["allocator"], rel=0.01, abs=64 << 10), boundary["moment"]


@pytest.mark.parametrize("way", WAYS)
def test_books_balance_on_a_gpu(tmp_path, way):
    document = run(tmp_path / "on", WAYS[way])
    for tier, peak in document["peak"].items():
        found = {row["category"]: row["measured"] for row in document["rows"] if row["tier"] == tier}
        assert sum(found.values()) == peak["measured"]
    hbm = {row["category"]: row["measured"] for row in document["rows"] if row["tier"] == "hbm"}
    assert abs(hbm["unattributed"]) <= 0.03 * document["peak"]["hbm"]["measured"]
    assert hbm["runtime"] > 0
    step = document["step"]
    assert step["wait"] + step["compute"] == pytest.approx(step["seconds"], rel=0.02)
    assert {"compute", "update"} <= set(document["timeline"]["lanes"])


def test_losses_on_a_gpu_are_bit_identical_with_profiling_on_and_off(tmp_path):
    sets = WAYS["stage 3 offload"]
    assert run(tmp_path / "on", sets)["losses"] == run(tmp_path / "off", sets, plain=True)["losses"]


def test_lanes_of_offload_are_timed_by_events(tmp_path):
    document = run(tmp_path / "on", WAYS["stage 3 offload"])
    spans = document["timeline"]["spans"]
    for lane in ("host to device", "device to host"):
        found = [span for span in spans if span[0] == lane]
        assert found and all(span[3] >= span[2] >= 0 for span in found)
    links = {link["lane"]: link["achieved"] for link in document["step"]["links"]}
    assert all(0 < rate < 200 for rate in links.values())  # GB/s: no link of today is faster
