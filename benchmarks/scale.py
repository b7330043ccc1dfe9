"""What grows with the number of ranks, for 8 to 16,384 of them.

    unshare --user --map-root-user --net sh -c 'ip link set lo up && python benchmarks/scale.py'

Each part runs in this process: one real TCPStore with a connection for each rank, the heartbeats of all ranks, their
exchanges, the plan of a checkpoint and its manifest, and `zerocli fit`. It prints seconds (of computing, for
checkpoints and `fit`), messages and bytes. (torch looks up the name of each client's address: in a network of its own,
that fails at once, and no resolver that limits questions delays it.)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

RANKS = (8, 64, 512, 4096, 16384)
PER_NODE = 8
LIMIT = 600.0
"""Seconds of `train.watchdog`."""
SPARE_FILES = 200
HOUR = datetime.timedelta(hours=1)


@dataclasses.dataclass
class Row:
    """What one part takes with so many ranks."""

    part: str
    ranks: int
    seconds: float
    where: str
    """Whose seconds these are."""
    messages: float
    nbytes: float
    """Messages and bytes of `whose` rank."""
    whose: str = ""


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def timed(clock: Callable[[], float] = time.perf_counter) -> Iterator[Callable[[], float]]:
    """Yield what returns the seconds of the body, once it has ended."""
    gc.collect()
    gc.freeze()  # a rank has none of what this process holds for the others
    began, ended = clock(), [0.0]
    yield lambda: ended[0]
    ended[0] = clock() - began


def computed() -> contextlib.AbstractContextManager[Callable[[], float]]:
    """The same in seconds of computing, whatever else the machine does."""
    return timed(time.process_time)


def counted(store: Any) -> tuple[Any, Counter[str]]:
    """Return a store that counts its messages and the bytes of their values, and the counts."""
    import torch.distributed as dist

    class Counted(dist.Store):
        """Hands everything on to another store."""

        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def _note(self, values: list[bytes]) -> None:
            self.counts["messages"] += 1
            self.counts["bytes"] += sum(map(len, values))

        def set(self, key: str, value: Any) -> None:
            self._note([bytes(value) if not isinstance(value, str) else value.encode()])
            store.set(key, value)

        def get(self, key: str) -> bytes:
            found: bytes = store.get(key)
            self._note([found])
            return found

        def add(self, key: str, value: int) -> int:
            self._note([])
            return int(store.add(key, value))

        def check(self, keys: list[str]) -> bool:
            self._note([])
            return bool(store.check(keys))

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            found: bytes = store.compare_set(key, expected, desired)
            self._note([found])
            return found

        def multi_get(self, keys: list[str]) -> list[bytes]:
            found: list[bytes] = store.multi_get(keys)
            self._note(found)
            return found

        def has_extended_api(self) -> bool:
            return True

    made = Counted()
    return made, made.counts


# -- the store ---------------------------------------------------------------------------------------------------------


def growth(sizes: tuple[int, ...]) -> Iterator[Row]:
    """Yield a row for each part and number of ranks."""
    for ranks in sizes:
        for part in (rendezvous, comparison, heartbeats, values, agreement, metrics, checkpoint, plans):
            yield from part(ranks)


def serve(ranks: int, connection: Any) -> None:
    """Keep a store for clients of another process, until that one says that it is done."""
    import torch.distributed as dist

    from zerocli import machine

    machine.allow_open_files(ranks + SPARE_FILES)
    server = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=HOUR, wait_for_workers=False)
    before = resident()
    connection.send(server.port)
    connection.recv()
    connection.send(resident() - before)
    connection.recv()


def rendezvous(ranks: int) -> Iterator[Row]:
    """A real store that as many clients connect to, each with a connection of its own."""
    import torch.distributed as dist

    from zerocli import machine

    machine.allow_open_files(ranks + SPARE_FILES)
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(ranks, there))
    server.start()
    port = here.recv()
    with timed() as seconds:
        clients = [
            dist.TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=HOUR, wait_for_workers=False)
            for _ in range(ranks)
        ]
        for client in clients:
            client.add("here", 1)
    here.send("done")
    nbytes = here.recv()
    del clients, client
    here.send("end")
    server.join()
    yield Row("start: connections to the store", ranks, seconds(), "all, one by one", 1, nbytes, "memory of rank 0")


def heartbeats(ranks: int) -> Iterator[Row]:
    """All ranks' heartbeats through one store, of hosts of eight; then all of them ask at the same time."""
    import torch.distributed as dist

    from zerocli import machine
    from zerocli.run.processes.heartbeats import Heartbeat, Heartbeats, lost_ranks
    from zerocli.run.processes.watchdog import interval_of

    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=HOUR, wait_for_workers=False)
    store, counts = counted(server)
    machine.allow_open_files(ranks + SPARE_FILES)  # each rank has its host's slots open, here all in one process
    everyone, interval = range(ranks), interval_of(LIMIT, ranks)
    beats = [Heartbeats(rank, everyone, store, interval, host=f"host-{rank // PER_NODE}") for rank in everyone]

    def say(number: int) -> None:
        for each in beats:
            if each.rank != ranks - 1 or not number:  # the last rank is lost after its first
                each.say(Heartbeat(time.monotonic(), 1.0, {"data": number}, f"in all_gather of blocks.{number}"))

    say(0)
    joined = counts.copy()
    counts.clear()
    with timed() as seconds:
        say(1)
    yield Row("heartbeats: joining", ranks, 0.0, "", joined["messages"] / ranks, joined["bytes"] / ranks, "each rank")
    yield Row(
        *("heartbeats: one interval", ranks, seconds() / ranks, "each rank"),
        *(counts["messages"] / interval, counts["bytes"] / interval, "the store, per second"),
    )
    counts.clear()
    with timed() as seconds:
        said = lost_ranks(beats[0], lambda: say(2))
    assert said == f"rank {ranks - 1} does not answer (it was in all_gather of blocks.0)", said
    say_counts = Counter(counts)
    yield Row(
        *("heartbeats: the rank that asks", ranks, seconds(), "it, with one interval of all"),
        *(say_counts["messages"], say_counts["bytes"], "the store"),
    )
    # Others that asked at the same time read what it found.
    number = server.add("zerocli-beats/asked", 0) - 1
    counts.clear()
    with timed() as seconds:
        heard = beats[1]._found(number, lambda: None)
    assert heard is not None and heard[1] == {ranks - 1}
    yield Row(
        *("heartbeats: each other that asks", ranks, seconds(), "it"), *(counts["messages"], counts["bytes"], "it")
    )


def comparison(ranks: int) -> Iterator[Row]:
    """The comparison of all nodes before the first step, by rank 0."""
    import torch.distributed as dist

    from zerocli import config as configs
    from zerocli.config.options import RunOptions
    from zerocli.run.processes.nodes import Findings, Nodes, RankInfo, compared, judge, versions

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    config, options = configs.load("llama3-8b"), RunOptions("/run")
    nodes, values, now = Nodes(dist.HashStore(), config, options, shared=True), compared(config, options), time.time()
    sent = []
    for rank in range(ranks):
        node, local = divmod(rank, PER_NODE)
        own = {} if local else versions()
        info = RankInfo(
            f"node-{node:05d}", local, PER_NODE, now, values, own, "NVIDIA H100 80GB HBM3 (79.2 GiB)", 2 << 40
        )
        sent.append(json.dumps(dataclasses.asdict(nodes._with_config_in_store(info))).encode())
    with computed() as seconds:
        infos = nodes._with_configs([RankInfo.read(text) for text in sent])
        assert judge(infos, config, options, (now, now)) == Findings()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    yield Row("start: comparison of nodes", ranks, seconds(), "rank 0", 1, sum(map(len, sent)), "rank 0 reads")


def values(ranks: int) -> Iterator[Row]:
    """What ranks tell each other at their start: every node's machine, the same on all."""
    from zerocli.plan.time.hardware import PRESETS
    from zerocli.run.recompute import alike_text, from_alike

    text = json.dumps(dataclasses.asdict(PRESETS["h100"]))
    with timed() as seconds:
        sent = alike_text([text] * ranks)
    yield Row("start: values of all ranks", ranks, seconds(), "rank 0", 1, len(text) * ranks, "rank 0 reads")
    with timed() as seconds:
        assert len(from_alike(sent)) == ranks
    yield Row("start: values of all ranks", ranks, seconds(), "each rank", 1, len(sent), "each reads")


def agreement(ranks: int) -> Iterator[Row]:
    """One exchange before a gather, which ranks have on CPUs or with uneven=True: rows of seven numbers."""
    import numpy as np

    from zerocli.engine import agreement as agreements

    rows = np.zeros((ranks, agreements._READY + 1), dtype=np.int64)
    with timed() as seconds:
        agreements._most_wanted(rows.tolist())
    yield Row("agreement before a gather (CPU)", ranks, seconds(), "each rank", 1, rows.nbytes, "each rank")
    yield Row("agreement after a step (GPU)", ranks, 0.0, "", 1, 2 * 8, "each rank")


def metrics(ranks: int) -> Iterator[Row]:
    """The values of a step: sums and maxima of all ranks; and every tenth step what is compared rank by rank."""
    import torch

    from zerocli.run.output.stragglers import slowest

    yield Row("metrics of a step", ranks, 0.0, "", 2, 6 * 8, "each rank")
    rows = torch.rand(ranks, 5, dtype=torch.float64)
    with timed() as seconds:
        assert slowest(rows) is not None
    yield Row("metrics of every tenth step", ranks, seconds(), "each rank", 1, rows.nbytes, "each rank")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoint(ranks: int) -> Iterator[Row]:
    """The plan of a checkpoint of a Llama with two blocks as wide as those of 8B, sharded over all ranks."""
    import torch

    from zerocli.checkpoint import manifest as manifests
    from zerocli.checkpoint.boxes import overlapping
    from zerocli.checkpoint.manifest import Manifest
    from zerocli.checkpoint.writer import file_name, tensors_of

    layouts = llama_layouts(ranks, blocks=2)
    digest = "0" * 64
    with computed() as seconds:
        texts = []
        for rank in range(ranks):
            about, written = {}, {}
            for part in parts_of(layouts, rank, ranks):
                about[part.name] = [manifests.name_of(part.dtype), part.shape]
                written[part.name] = [[box.offsets, box.sizes, 0, digest] for box in part.boxes]
            texts.append(json.dumps([about, written]))
    size = sum(map(len, texts))
    yield Row("checkpoint: what a rank wrote", ranks, seconds() / ranks, "each rank", 1, size / ranks, "of each rank")
    before = resident()
    with computed() as seconds:
        tensors = tensors_of([json.loads(text) for text in texts])
    yield Row("checkpoint: what all wrote", ranks, seconds(), "rank 0", ranks, resident() - before, "memory of rank 0")
    with computed() as seconds:
        data = manifests.encode(Manifest(1, tensors, {file_name(rank): 1 << 62 for rank in range(ranks)}))
    yield Row("checkpoint: manifest written", ranks, seconds(), "rank 0", 1, len(data), "file")
    del texts, tensors
    with computed() as seconds:
        manifest = manifests.decode(data)
    yield Row("checkpoint: manifest read", ranks, seconds(), "each rank", 1, len(data), "file")
    there = max(1, ranks // 2)  # resumed on half the ranks
    again = list(parts_of(llama_layouts(there, blocks=2), there // 2, there))
    with computed() as seconds:
        reads = 0
        for part in again:
            pieces = manifest.tensors[part.name].pieces
            places = [piece.offsets for piece in pieces], [piece.sizes for piece in pieces]
            reads += sum(map(len, overlapping(part.boxes, *places)))
    yield Row("resume at another size: plan", ranks, seconds(), "each rank", 1, reads, "reads of each rank")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-00000001")
        path.mkdir()
        files = {f"rank-{rank:05d}.bin": 1 for rank in range(ranks)}
        for name in files:
            (path / name).write_bytes(b"x")
        (path / "manifest.json").write_bytes(manifests.encode(Manifest(1, {}, files)))
        with computed() as seconds:
            manifests.read(path)
        yield Row("resume: sizes of all files", ranks, seconds(), "rank 0 (local disk)", ranks, 0, "files")
    assert torch.float32.itemsize == 4


def llama_layouts(ranks: int, blocks: int) -> list[Any]:
    """Return the layouts of the units of a Llama as wide as 8B."""
    from zerocli.layout.shards import lay_out

    hidden, keys, mlp, vocab = 4096, 1024, 14336, 128256
    block = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
    block |= {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp), "norm1": (hidden,), "norm2": (hidden,)}
    units = [{"embed": (vocab, hidden)}, *[{f"{n}.{k}": v for k, v in block.items()} for n in range(blocks)]]
    units.append({"head": (vocab, hidden), "norm": (hidden,)})
    return [lay_out([(name, shape, int(len(shape) < 2)) for name, shape in unit.items()], ranks) for unit in units]


def parts_of(layouts: list[Any], rank: int, ranks: int) -> Iterator[Any]:
    """Yield the parts that a rank owns: master and two moments."""
    import torch

    from zerocli.checkpoint.boxes import boxes_of, whole
    from zerocli.checkpoint.sources import Memory, Part
    from zerocli.layout.shards import owned

    source = Memory(torch.empty(0))
    for layout in layouts:
        own = owned(layout.total, ranks, rank)
        for entry in layout.entries:
            mine = entry.span.intersect(own)
            if mine.numel:
                found = list(boxes_of(whole(entry.shape), entry.shape, mine.shifted(-entry.offset)))
                for prefix in ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
                    yield Part(f"{prefix}/{entry.name}", entry.shape, source, found)


# -- plans -------------------------------------------------------------------------------------------------------------


def fit(*arguments: str) -> float:
    """Return the seconds in which `zerocli fit` answers."""
    from zerocli.cli.main import run

    with computed() as seconds, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(["fit", *arguments, "--json"])
    return seconds()


def plans(ranks: int) -> Iterator[Row]:
    for words in ((), ("--auto",)):
        seconds = fit("llama3-8b", "--ranks", str(ranks), "--hardware", "h100", *words)
        yield Row(" ".join(["zerocli fit llama3-8b", *words]), ranks, seconds, "one process", 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="", help="comma-separated; 8 to 16384")
    asked = parser.parse_args()
    rows: dict[str, list[Row]] = {}
    for row in growth(tuple(map(int, asked.ranks.split(","))) if asked.ranks else RANKS):
        rows.setdefault(f"{row.part}|{row.where}", []).append(row)
        print(json.dumps(dataclasses.asdict(row)), flush=True)
    print()
    for found in rows.values():
        print(f"{found[0].part} (seconds: {found[0].where or '-'}; messages, bytes: {found[0].whose or '-'})")
        for row in found:
            print(f"  {row.ranks:6}: {row.seconds:11.6f} s {row.messages:12.1f} messages {row.nbytes:16,.0f}")


if __name__ == "__main__":
    main()
