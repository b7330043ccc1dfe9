"""How much an asynchronous save costs training, how fast it and an export write, beside what the disk can do.

    python benchmarks/saves.py --dir /mnt/nvme --set model.layers=24 --set model.hidden=2048 --set model.heads=16 \
        --set train.seq=1024 --set train.batch=16 --set train.precision=bf16 --set checkpoint.buffer=20GiB

trains a GPT-2 without saving, then with a save under way, and prints one JSON document. The stall is the time from the
call of `save` to the end of the step in which the save ends, less that of as many steps just before and after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiers.pages import Pages  # noqa: E402
from zerocli import config as configs  # noqa: E402
from zerocli.checkpoint import export  # noqa: E402
from zerocli.checkpoint.folder import Folder  # noqa: E402
from zerocli.checkpoint.manifest import read as read_manifest  # noqa: E402
from zerocli.checkpoint.saver import Saver  # noqa: E402
from zerocli.config import to_dict  # noqa: E402
from zerocli.engine.api import open_process_group  # noqa: E402
from zerocli.engine.engine import Engine  # noqa: E402
from zerocli.files import DirectFile  # noqa: E402
from zerocli.garbage import long_lived  # noqa: E402
from zerocli.run import engines  # noqa: E402

CHUNK_NBYTES = 32 << 20


def raw_write_rate(folder: Path, nbytes: int) -> float:
    """Return the bytes a second at which four threads write around the page cache, synced."""
    path = folder / "raw"
    path.touch()
    pages = Pages(CHUNK_NBYTES)
    pages.bytes.random_()
    began = time.perf_counter()
    with DirectFile(path) as file, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: file.write(pages.memory, at), range(0, nbytes, CHUNK_NBYTES)))
        file.sync()
    seconds = time.perf_counter() - began
    path.unlink()
    return -(-nbytes // CHUNK_NBYTES) * CHUNK_NBYTES / seconds


def raw_copy_rate(source: Path, folder: Path, nbytes: int) -> float:
    """Return the bytes a second at which threads read one file and write as much to another, as an export must."""
    fd = os.open(source, os.O_RDONLY | os.O_DIRECT)
    pages = [Pages(CHUNK_NBYTES) for _ in range(8)]

    def read(thread: int) -> None:
        for at in range(thread * CHUNK_NBYTES, nbytes, 4 * CHUNK_NBYTES):
            os.preadv(fd, [pages[thread].memory], at)

    path = folder / "copy"
    path.touch()
    began = time.perf_counter()
    with DirectFile(path) as file, ThreadPoolExecutor(8) as threads:

        def write(thread: int) -> None:
            for at in range(thread * CHUNK_NBYTES, nbytes, 4 * CHUNK_NBYTES):
                file.write(pages[4 + thread].memory, at)

        jobs = [threads.submit(job, thread) for job in (read, write) for thread in range(4)]
        for job in jobs:
            job.result()
        file.sync()
    seconds = time.perf_counter() - began
    path.unlink()
    os.close(fd)
    return nbytes / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="folder on the disk to write to")
    parser.add_argument("--steps", type=int, default=12, help="steps without a save, before each")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.KEY=VALUE")
    given = parser.parse_args()
    config = configs.load("tiny", given.sets)
    open_process_group()
    folder = Path(tempfile.mkdtemp(prefix="zerocli-saves-", dir=given.dir))
    try:
        engine = engines.make_engine(config)
        with long_lived():
            document = measure(engine, config, folder, given.steps, given.saves)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(document, indent=2))
    return 0


def measure(engine: Engine, config: configs.Config, folder: Path, steps: int, num_saves: int) -> dict[str, object]:
    rank = engine.collectives.rank
    shape = (config.train.batch, config.train.seq)
    tokens = torch.randint(0, config.model.vocab, shape, device=engine.device)

    cuda = engine.device.type == "cuda"
    issued: list[torch.cuda.Event] = []
    ended: list[float] = []

    def step() -> None:
        """Train a step; the host is at most one ahead of the device, as in `zerocli train`."""
        engine.backward(engine(tokens, tokens))
        engine.step()
        if cuda:
            issued.append(torch.cuda.Event())
            issued[-1].record()
            if len(issued) > 1:
                issued.pop(0).synchronize()
        ended.append(time.perf_counter())

    def finish() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds_of(num_steps: int) -> float:
        began = finish()
        for _ in range(num_steps):
            step()
        return (finish() - began) / num_steps

    seconds_of(3)
    saver = Saver(engine, folder / "checkpoints", buffer_nbytes=config.checkpoint.buffer, keep=1)
    saves, raws, plains = [], [], []
    for number in range(1, num_saves + 1):
        raws.append(raw_write_rate(folder, 4 << 30))
        plain = seconds_of(steps)
        began = finish()
        saver.save(number, {"config": to_dict(config)})
        called = time.perf_counter() - began
        ended.clear()
        while saver.busy:  # until the checkpoint before it is removed, too
            step()
        ends = [began, *ended, finish()]
        plain = (plain + seconds_of(steps)) / 2
        stall = ends[-1] - began - (len(ends) - 2) * plain
        plains.append(plain)
        excess = [after - before - plain for before, after in itertools.pairwise(ends[:-1])]
        saves.append({"seconds": saver.last_seconds, "stall": stall, "call": called, "plain": plain, "excess": excess})
    saver.close()
    if saver.failure:
        sys.exit(saver.failure)
    manifest = read_manifest(Folder(folder / "checkpoints").of(num_saves))
    duration, raw = statistics.median(save["seconds"] for save in saves), statistics.median(raws)
    nbytes = sum(manifest.files.values())
    rates = {"raw": raw, "save": nbytes / duration}
    if rank == 0:
        began = time.perf_counter()
        done = export.write(Folder(folder / "checkpoints").of(num_saves), manifest, folder / "out", "fp32", 5 * 10**9)
        rates["export"] = done.nbytes / (time.perf_counter() - began)
        shard = Folder(folder / "checkpoints").of(num_saves) / "rank-00000.bin"
        rates["raw_copy"] = raw_copy_rate(shard, folder, min(done.nbytes, shard.stat().st_size))
    return {
        "parameters": engine.numel,
        "ranks": engine.collectives.world,
        "device": str(engine.device),
        "cores": os.cpu_count(),
        "step_seconds": statistics.median(plains),
        "save_bytes": nbytes,
        "save_seconds": duration,
        "stall_share_of_save": statistics.median(save["stall"] / save["seconds"] for save in saves),
        "saves": saves,
        "raws": raws,
        "gb_per_second": {name: rate / 1e9 for name, rate in rates.items()},
        "save_of_raw": rates["save"] / raw,
        "export_of_raw": rates.get("export", 0.0) / raw,
        "export_of_raw_copy": rates.get("export", 0.0) / rates.get("raw_copy", raw),
    }


if __name__ == "__main__":
    sys.exit(main())
