"""Laws of the profile on a GPU: its ledger is the allocator's, little is unattributed, and no number changes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SETS = ("model.layers=4", "model.hidden=512", "model.heads=8", "train.batch=8", "train.seq=512", "train.steps=12")
WAYS = {
    "stage 2": ("zero.stage=2",),
    "stage 3 offload": ("zero.stage=3", "offload.placement=cpu"),
    "recompute": ("zero.stage=3", "activations.policy=recompute"),
    "selective": ("zero.stage=3", "activations.policy=selective"),
}


def run(folder: Path, sets: tuple[str, ...], plain: bool = False, exact: bool = False) -> dict:
    """Train or profile in a process of its own, where nothing of other tests is on the GPU; return what it recorded."""
    folder.mkdir()
    (folder / "text.txt").write_text("where the bytes lie and where the seconds go\n" * 2000)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as process:
        process.submit(_work, folder, sets, plain, exact).result()
    return json.loads((folder / "profile.json").read_text())


def _work(folder: Path, sets: tuple[str, ...], plain: bool, exact: bool) -> None:
    from zerocli import config as configs
    from zerocli.config.options import RunOptions
    from zerocli.profile.observer import Observer
    from zerocli.profile.profiler import Profiler
    from zerocli.run import trainer
    from zerocli.run.processes.watchdog import Watchdog

    if exact:  # the backward of fused attention adds in any order where determinism is asked for with warnings only
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    given = (*SETS, "train.precision=bf16", "data.tokenizer=bytes", f"data.path={folder / 'text.txt'}", *sets)
    config = configs.load("tiny", sets=given, flags={})
    trainer.train_rank(config, RunOptions(str(folder)), Observer() if plain else Profiler(), Watchdog(0))


SOME = [pytest.param(way, marks=[] if way.startswith("s") else pytest.mark.long) for way in WAYS]
FEW = [pytest.param(way, marks=[] if way == "stage 3 offload" else pytest.mark.long) for way in WAYS]


@pytest.mark.parametrize("way", SOME)
def test_the_ledger_is_the_allocators_at_every_phase_boundary(tmp_path, way):
    document = run(tmp_path / "on", WAYS[way])
    assert len(document["boundaries"]) >= 7
    for boundary in document["boundaries"]:
        # Blocks are multiples of 512 bytes: where next to nothing is on the device, that is what differs.
        assert boundary["ledger"] == pytest.approx(boundary["allocator"], rel=0.01, abs=64 << 10), boundary["moment"]


@pytest.mark.parametrize("way", FEW)
def test_books_balance_on_a_gpu(tmp_path, way):
    document = run(tmp_path / "on", WAYS[way])
    for tier, peak in document["peak"].items():
        found = {row["category"]: row["measured"] for row in document["rows"] if row["tier"] == tier}
        assert sum(found.values()) == peak["measured"]
        # Choosing where to update states that are away takes half a GiB of host memory, for a moment.
        if tier != "dram" or "offload" not in way:
            assert abs(found.get("unattributed", 0)) <= 0.03 * peak["measured"], tier
    hbm = {row["category"]: row["measured"] for row in document["rows"] if row["tier"] == "hbm"}
    assert hbm["runtime"] > 0
    step = document["step"]
    assert step["wait"] + step["compute"] == pytest.approx(step["seconds"], rel=0.02)
    assert {"compute", "update"} <= set(document["timeline"]["lanes"])


def test_losses_on_a_gpu_are_bit_identical_with_profiling_on_and_off(tmp_path):
    sets = WAYS["stage 3 offload"]
    on, off = run(tmp_path / "on", sets, exact=True), run(tmp_path / "off", sets, plain=True, exact=True)
    assert on["losses"] == off["losses"]


def test_lanes_of_offload_are_timed_by_events(tmp_path):
    document = run(tmp_path / "on", WAYS["stage 3 offload"])
    spans = document["timeline"]["spans"]
    for lane in ("host to device", "device to host"):
        found = [span for span in spans if span[0] == lane]
        assert found and all(span[3] >= span[2] >= 0 for span in found)
    links = {link["lane"]: link["achieved"] for link in document["step"]["links"]}
    assert all(0 < rate < 200 for rate in links.values())  # GB/s: no link of today is faster


def test_the_command_tells_of_a_gpu_and_writes_torchs_own_snapshot(tmp_path):
    (tmp_path / "text.txt").write_text("where the bytes lie and where the seconds go\n" * 2000)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    sets = [word for each in (*SETS, "data.tokenizer=bytes", "data.path=text.txt") for word in ("--set", each)]
    command = [sys.executable, "-m", "zerocli", "profile", "tiny", *sets, "--precision", "bf16", "--ranks", "1"]
    done = subprocess.run(
        [*command, "--snapshot", "snapshot.pickle", "--html", "page.html", "--run-dir", "run", "--json"],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    hbm = document["peak"]["hbm"]
    # The constants of context and workspaces are an H200's; another GPU's runtime may be a few hundred MiB apart.
    assert abs(hbm["predicted"] - hbm["measured"]) < 1 << 30
    assert document["step"]["tokens_per_second"] > 0
    assert (tmp_path / "snapshot.pickle").stat().st_size > 1000 and (tmp_path / "page.html").stat().st_size > 1000


def test_another_user_of_the_gpu_is_not_in_the_books(tmp_path):
    from zerocli.profile.nvml import process_nbytes

    torch.zeros(1, device="cuda")  # a process that holds nothing is not told of
    if process_nbytes(torch.device("cuda", 0)) is None:
        pytest.skip("the driver does not tell processes apart here")
    alone = run(tmp_path / "alone", WAYS["stage 2"])["peak"]["hbm"]["measured"]
    script = "import sys, torch; x = torch.zeros(4 << 30, dtype=torch.uint8, device='cuda'); x.sum().item()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{script}; print('there', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "there\n"
        beside = run(tmp_path / "beside", WAYS["stage 2"])["peak"]["hbm"]["measured"]
        other.stdin.close()
    assert abs(beside - alone) < 256 << 20


def test_seconds_of_every_step_are_the_devices_own(tmp_path):
    """The host runs ahead: a step that is short on the host is not short on the device, and none takes no time."""
    run(tmp_path / "on", WAYS["stage 2"], plain=True)
    lines = [json.loads(line) for line in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()]
    later = sorted(line["seconds"] for line in lines[1:])
    assert len(later) == 11 and later[0] > later[-1] / 20
