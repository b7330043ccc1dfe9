"""Bytes of a training run as the operating system and the driver count them, beside its plan, for `accuracy.py`.

A case runs through the trainer behind `zerocli train` and `profile`, in processes of its own that form a real group.

- **hbm**: on a GPU, the driver's count of the process at its peak: the allocator's largest reservation, and what is
  outside the allocator. On CPU ranks, the peak of live tensors, followed operation by operation (rank with the most).
- **dram**: the peak resident memory (VmHWM) of all ranks. On a GPU it is compared with the plan's whole host memory,
  Python included. Without a GPU the plan knows no Python and hbm is host memory too, so the prediction is the process
  before the engine is built (after a first run of the same case, so that libraries and threads are there), plus the
  planned hbm and dram. Allocators return freed tensors at once in these runs (MALLOC_MMAP_THRESHOLD_,
  MIMALLOC_PURGE_DELAY).
- **tiers**: dram without the process and hbm: resident pages of what the tiers mapped. Shown, but no bound applies:
  how many staging buffers a disk tier makes depends on its speed.
- **nvme**: blocks of the swap files on disk.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from random_cases import RandomCase

STEPS = 3
SECONDS = 300.0
FIXED = ("model.compile=false", f"train.steps={STEPS}", "train.log_every=100", "checkpoint.every=0")


def measure(case: RandomCase, device: str) -> dict[str, dict[str, int]]:
    """Return {tier: {predicted, measured}} of a case, and more about it under other keys; raise if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="zerocli-accuracy-") as folder:
        text = Path(folder, "text.txt")
        text.write_text("where the bytes lie and where the seconds go\n" * 2000)
        sets = (*FIXED, f"data.path={text}", f'offload.nvme_path=["{folder}"]', *case.sets)
        ranks = _in_subprocess(sets, folder) if device == "cuda" else _in_ranks(case.ranks, sets, folder)
    return _join(ranks, device)


def _join(ranks: list[dict[str, Any]], device: str) -> dict[str, dict[str, int]]:
    plan, about = ranks[0]["plan"], {key: value for key, value in ranks[0].items() if key not in ("plan", "log")}

    def total(name: str) -> int:
        return sum(rank[name] for rank in ranks)

    host = plan["dram"]
    if device == "cpu":
        host += total("base") + plan["hbm"] * len(ranks)
    found = {
        "hbm": {"predicted": plan["hbm"], "measured": max(rank["hbm"] for rank in ranks)},
        "dram": {"predicted": host, "measured": total("rss_peak")},
        "nvme": {"predicted": plan["nvme"], "measured": total("nvme")},
        "tiers": {"predicted": plan["tiers"], "measured": total("tiers")},
    }
    return found | {"about": about}


# -- processes ---------------------------------------------------------------------------------------------------------


def _in_ranks(world: int, sets: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    """Run a case on `world` gloo ranks, forked from a server that has imported torch."""
    # Or the allocator (glibc's; on ARM, mimalloc) keeps freed tensors: what that costs is no model's, and depends on
    # the order of all frees.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "zerocli.run.trainer", "zerocli.profile.profiler"])
    ends, processes = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, folder, sets, there), daemon=True)
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        answers = []
        for rank, end in enumerate(ends):
            if not end.poll(SECONDS):
                raise TimeoutError(f"rank {rank} gave no answer in {SECONDS:.0f} s")
            try:
                answers.append(pickle.loads(end.recv_bytes()))
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without an answer") from None
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    for answer in answers:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    return answers


def _rank(rank: int, world: int, folder: str, sets: tuple[str, ...], connection: Any) -> None:
    import torch
    import torch.distributed as dist

    os.dup2(os.open(os.path.join(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)  # where it refuses bf16 it costs more than the matmul
    answer: dict[str, Any] | str
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        followed = _train(sets, folder, "followed", _observer(follow=True))
        answer = followed | _train(sets, folder, "plain", _observer(follow=False))
        answer |= {"hbm": followed["hbm"], "holders": followed["holders"]}
        if world > 1:
            dist.barrier()
    except BaseException:
        answer = traceback.format_exc()
    connection.send_bytes(pickle.dumps(answer))


def _in_subprocess(sets: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    """Run a case on one GPU in a fresh process: its context is no other case's."""
    code = "import measured_bytes, sys; measured_bytes.alone(sys.argv[1])"
    job = Path(folder, "job.json")
    job.write_text(json.dumps({"sets": sets, "folder": folder}))
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    # A first run: what Triton and cuDNN compile in the process takes memory there, which a later run need not.
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "CUDA_CACHE_PATH": f"{folder}/cuda"}
    environment = {**os.environ, "PYTHONPATH": paths, **caches}
    environment.setdefault("OMP_NUM_THREADS", "2")  # several cases run at once, and some update states on the CPU
    command = [sys.executable, "-c", code, str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    answer = Path(folder, "answer.json")
    if done.returncode or not answer.exists():
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(answer.read_text())]


def alone(job: str) -> None:
    """Run the case of a job file in this process, on its GPU, and write the answer beside the file."""
    from zerocli import allocator

    allocator.choose()  # as `zerocli train` does, before torch is there
    given = json.loads(Path(job).read_text())
    before = device_used()
    answer = _train(tuple(given["sets"]), given["folder"], "run", _observer(follow=False, others=before))
    Path(given["folder"], "answer.json").write_text(json.dumps(answer))


def _train(sets: tuple[str, ...], folder: str, name: str, observer: Any) -> dict[str, Any]:
    from zerocli import config as configs
    from zerocli.config.options import RunOptions
    from zerocli.run import trainer
    from zerocli.run.processes.watchdog import Watchdog

    config = configs.load("tiny", sets=sets, flags={})
    configs.refuse_placement(config.offload.placement, config.zero.stage)
    run_dir = os.path.join(folder, name)
    os.makedirs(run_dir, exist_ok=True)
    trainer.train_rank(config, RunOptions(run_dir), observer, Watchdog(0))
    found: dict[str, Any] = observer.found
    return found


# -- counting ----------------------------------------------------------------------------------------------------------


def device_used() -> int:
    """Return the bytes of the first visible GPU that are in use, without opening a context; 0 if unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        return int(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()[0]) << 20
    return 0


def _observer(follow: bool, others: int = 0) -> Any:
    """Return an observer of one run; `follow` counts live tensors, `others` are bytes that other processes use."""
    from counted_bytes import Counting, Following  # imports torch, which must know its allocator first

    return Following(others) if follow else Counting(others)
