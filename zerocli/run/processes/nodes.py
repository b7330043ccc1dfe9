"""The nodes of a run, compared at its start: what is wrong between them is one message on rank 0, with their names.

Ranks with another version of zerocli or torch come here too, so the keys and the form of what is exchanged must not
change. Every rank writes one `RankInfo`; rank 0 reads all of them at once, and answers all with one `Findings`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import math
import os
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload
import tiers
import zerocli
from zerocli import machine
from zerocli.config import AUTO, Config, refuse_shard_ranks, to_dict
from zerocli.config.options import RunOptions
from zerocli.console import say
from zerocli.errors import USAGE, ShownElsewhere, UserError
from zerocli.layout.shards import nearest_divisor
from zerocli.layout.sizes import count_of, format_bytes
from zerocli.ranks.startup import STARTUP
from zerocli.run.processes.heartbeats import info_key

CLOCK_SECONDS = 10.0
"""Clocks further apart are reported: torchrun takes a node whose clock is 15 s behind for one that is gone."""
SAME_MEMORY = 0.95
"""Host memory of a node, as a share of the largest, from which on nodes count as equal."""
MOST_NAMES = 3
"""Nodes that a message names; further ones are counted."""
FOLDER_SECONDS = 3.0
"""How long a rank looks for rank 0's file: a shared file system may show a new file late."""
READ_SECONDS = 30.0
"""How long rank 0, which hosts the store, waits for the others to have read why the run ends."""
OWN_TO_A_NODE = frozenset(
    ("model.folder", "train.init_from", "offload.nvme_path", "lora.start")
    + ("data.path", "data.mix", "data.validation", "data.tokenizer", "data.cache")
)
"""Keys that are paths, which may differ between nodes."""


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself and its node."""

    host: str
    local_rank: int
    local_world: int
    clock: float
    config: Mapping[str, Any] = field(default_factory=dict)
    """The values that must be equal on all ranks."""
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    """Its GPU's name and memory; empty without one."""
    memory: int = 0
    """Of the host, in bytes."""
    folder: str = ""
    """Why it cannot see rank 0's file in the run folder; empty if it can."""
    refused: Sequence[Any] = ()
    """(message, hint, exit code) of the node's own comparison with the plan, if that refused the run."""
    config_key: str = ""
    """The key under which the store has `config`, which is then not sent with the info."""

    @classmethod
    def read(cls, text: bytes) -> RankInfo:
        """Return the info of a rank whose version may have other fields."""
        return cls(**{name: value for name, value in json.loads(text).items() if name in cls.__dataclass_fields__})


@dataclass
class Findings:
    """What rank 0 finds: problems as (fact, hint), of which any ends the run, and notes."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    code: int = USAGE

    def error(self, kind: type[UserError]) -> UserError:
        hints = dict.fromkeys(hint for _, hint in self.problems if hint)
        return kind(*(fact for fact, _ in self.problems), hint="\n".join(hints), exit_code=self.code)


class Nodes:
    """The ranks' comparison of their nodes, in their store, before torch opens a group."""

    def __init__(self, store: dist.Store, config: Config, options: RunOptions, shared: bool) -> None:
        """`shared` says whether all ranks read or write the run folder."""
        self._store = store
        self._config, self._options, self._shared = config, options, shared
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def compare(self, refused: UserError | None = None) -> tuple[str, ...]:
        """Compare all ranks and their nodes; return each rank's host on rank 0. Raise UserError there if the run cannot
        work, and `ShownElsewhere` on the others. `refused` is what this node's own comparison with the plan found.
        Collective.
        """
        with STARTUP.waiting("comparing the nodes"), contextlib.ExitStack() as stack:
            began = now()
            if self.rank == 0:
                self._store.set("nodes/file", self._leave_file(stack))
            info = self._own_info(refused, self._store.get("nodes/file").decode())
            self._store.set(info_key(self.rank), json.dumps(asdict(self._with_config_in_store(info))))
            if self.rank:
                findings = Findings(**json.loads(self._store.get("nodes/verdict")))
                if findings.problems:
                    self._store.set(f"nodes/read/{self.rank}", "")
                    raise findings.error(ShownElsewhere)
                return ()
            keys = [info_key(rank) for rank in range(self.world)]
            infos = self._with_configs([RankInfo.read(each) for each in self._store.multi_get(keys)])
            findings = judge(infos, self._config, self._options, (began, now()))
            self._store.set("nodes/verdict", json.dumps(asdict(findings)))
        if findings.problems:
            with STARTUP.by_itself("telling the other ranks"), contextlib.suppress(dist.DistStoreError):
                everyone = [f"nodes/read/{rank}" for rank in range(1, self.world)]
                self._store.wait(everyone, datetime.timedelta(seconds=READ_SECONDS))
            raise findings.error(UserError)
        for note in findings.notes:
            say(f"note: {note}")
        return tuple(info.host for info in infos)

    def _own_info(self, refused: UserError | None, file: str) -> RankInfo:
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        return RankInfo(
            socket.gethostname(),
            int(os.environ.get("LOCAL_RANK", self.rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", self.world)),
            now(),
            compared(self._config, self._options),
            versions() if first else {},
            own_gpu(),
            machine.memory().allowed,
            look_for(file) if first else "",
            () if refused is None else (str(refused), refused.hint, refused.exit_code),
        )

    def _with_config_in_store(self, info: RankInfo) -> RankInfo:
        """Return the info with the key of its config, which only the first of those who have it need to write."""
        text = json.dumps(info.config)
        key = f"nodes/config/{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        if not self._store.check([key]):
            self._store.set(key, text)
        return replace(info, config={}, config_key=key)

    def _with_configs(self, infos: Sequence[RankInfo]) -> list[RankInfo]:
        """Return infos with their configs; equal ones share one."""
        keys = dict.fromkeys(info.config_key for info in infos if info.config_key)
        known = {key: json.loads(self._store.get(key)) for key in keys}
        return [replace(info, config=known[info.config_key]) if info.config_key else info for info in infos]

    def _leave_file(self, stack: contextlib.ExitStack) -> str:
        """Make a file in the run folder for the others to look for, if they are to share it; return its path.

        It is removed with the stack.
        """
        if not self._shared:
            return ""
        path = Path(os.path.abspath(self._options.run_dir), f".nodes-{secrets.token_hex(8)}")
        try:
            path.touch(exist_ok=False)
        except OSError:  # the run says it in its own words
            return ""
        stack.callback(path.unlink, missing_ok=True)
        return str(path)


def now() -> float:
    return time.time()


def own_gpu() -> str:
    """Return the name and the memory of this rank's GPU; an empty text without one."""
    if not torch.cuda.is_available():
        return ""
    about = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return f"{about.name} ({format_bytes(about.total_memory)})"


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes; zerocli's with a checksum of its source."""
    number = 0
    for package in (zerocli, offload, tiers):
        folder = Path(str(package.__file__)).parent
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c")]):
            number = zlib.crc32(path.read_bytes(), number)
    return {"zerocli": f"{machine.version('zerocli')} (source {number:08x})", "torch": torch.__version__}


def compared(config: Config, options: RunOptions) -> dict[str, Any]:
    """Return the values that must be equal on all ranks, by key; paths are left out."""
    values = {
        f"{section}.{key}": value
        for section, keys in to_dict(config).items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
    flags = {"--run-dir": options.run_dir, "--resume": options.resume, "--check": options.check}
    return {key: value for key, value in values.items() if key not in OWN_TO_A_NODE} | flags


def look_for(path: str) -> str:
    """Return why a file cannot be seen here; an empty text if it can, or none is to be looked for."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while path:
        try:
            os.stat(path)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                return error.strerror or "it cannot be read"
            time.sleep(FOLDER_SECONDS / 30)
    return ""


# -- what rank 0 finds ------------------------------------------------------------------------------------------------


def judge(infos: Sequence[RankInfo], config: Config, options: RunOptions, read: tuple[float, float]) -> Findings:
    """Return what is wrong between the ranks' nodes; rank 0 began and ended to read their infos at the times `read`."""
    chosen = bool(options.auto) or config.activations.policy == AUTO
    groups = (*_groups(infos, config), *(_sizes(infos) if chosen else ()))
    found = Findings([*_places(infos), *_alike(infos), *_folders(infos, os.path.abspath(options.run_dir)), *groups])
    if refused := [info for info in infos if info.refused]:
        found.code = USAGE if found.problems else refused[0].refused[2]
        found.problems += [(f"{_nodes([info.host])}: {info.refused[0]}", info.refused[1]) for info in refused]
    found.notes += [*_unequal(infos), *_clocks(infos, *read)]
    return found


Problem = tuple[str, str]


def _places(infos: Sequence[RankInfo]) -> Iterator[Problem]:
    """Yield nodes that have fewer ranks than their launcher says."""
    promised: dict[str, int] = {}
    for info in infos:
        promised[info.host] = max(info.local_world, promised.get(info.host, 0))
    counts = Counter(info.host for info in infos)
    for host, said in promised.items():
        if said > (there := counts[host]):
            yield (
                f"node {host} has {count_of(there, 'rank')} and LOCAL_WORLD_SIZE={said} there",
                "torchrun, which sets LOCAL_RANK and LOCAL_WORLD_SIZE; or set both on every rank",
            )
            return  # all nodes have the same launcher


def _alike(infos: Sequence[RankInfo]) -> Iterator[Problem]:
    """Yield what must be equal and is not: versions, or else the config, of which versions have other keys."""
    alike = True
    for name in infos[0].versions:
        if words := differing((info.host, info.versions.get(name)) for info in infos if info.versions):
            alike = False
            yield f"nodes have different versions of {name}: {words}", "one environment for all nodes"
    configs = list({id(info.config): info.config for info in infos}.values()) if alike else []
    for key in dict.fromkeys(key for config in configs for key in config):
        texts = {id(config): json.dumps(config.get(key)) for config in configs}
        if words := differing((info.host, texts[id(info.config)]) for info in infos if len(set(texts.values())) > 1):
            yield f"{key} differs between ranks: {words}", "the same command and config on all nodes"


def _folders(infos: Sequence[RankInfo], run_dir: str) -> Iterator[Problem]:
    if apart := [info for info in infos if info.folder]:
        yield (
            f"the run folder {run_dir} is not shared: {_nodes(info.host for info in apart)} cannot see the file that "
            f"rank 0 wrote there on {_nodes([infos[0].host])} ({apart[0].folder})",
            "--run-dir with a folder that all nodes share; or --save-every never, which writes on rank 0 alone",
        )


def _groups(infos: Sequence[RankInfo], config: Config) -> Iterator[Problem]:
    """Yield groups of neighbouring ranks that do not fit into nodes."""
    parallel, wrong = config.parallel, False
    hosts = {info.local_world: info.host for info in reversed(infos)}
    for local, host in hosts.items():
        try:
            refuse_shard_ranks(parallel, len(infos), local)
        except UserError as error:
            wrong = True
            yield f"{_nodes([host])}: {error}", error.hint
    each, size = math.gcd(*hosts), parallel.shard_ranks * parallel.tp
    if across := _crossing(infos, parallel.tp):
        yield f"--tp {parallel.tp} would split layers between {across}", f"--tp {nearest_divisor(parallel.tp, each)}"
    elif not wrong and 0 < size <= each and (across := _crossing(infos, size)):
        yield (
            f"--shard-ranks {parallel.shard_ranks} would partition between {across}",
            "ranks of a node as neighbours: srun --distribution=block",
        )


def _sizes(infos: Sequence[RankInfo]) -> Iterator[Problem]:
    """Yield nodes with different numbers of ranks, for which nothing can be chosen: a plan is of equal nodes."""
    if words := differing((info.host, str(info.local_world)) for info in infos):
        yield (
            f"nodes have different numbers of ranks ({words}), and what is chosen automatically is for equal ones",
            "--stage, --offload and --set activations.policy=recompute instead of --auto",
        )


def _crossing(infos: Sequence[RankInfo], size: int) -> str:
    """Return the first group of `size` neighbouring ranks that is not on one node, in words."""
    for start in range(0, len(infos), size):
        hosts = [info.host for info in infos[start : start + size]]
        if len(set(hosts)) > 1:
            return f"{_nodes(hosts)} (ranks {start} to {start + size - 1})"
    return ""


def _unequal(infos: Sequence[RankInfo]) -> Iterator[str]:
    """Yield what nodes differ in, of which the least decides."""
    if words := differing((info.host, info.gpu or "no GPU") for info in infos):
        yield f"GPUs differ: {words}; plans are for the least, and every step takes as long as on the slowest"
    if words := differing((info.host, str(info.local_world)) for info in infos):
        yield f"nodes have different numbers of ranks: {words}"
    most = max(info.memory for info in infos)
    if min(info.memory for info in infos) < SAME_MEMORY * most:
        words = differing((info.host, format_bytes(info.memory)) for info in infos)
        yield f"host memory differs: {words}; plans are for the least"


def _clocks(infos: Sequence[RankInfo], began: float, ended: float) -> Iterator[str]:
    """Yield clocks that differ from rank 0's: every info was written after `began` and before `ended`."""
    apart = {info.host: max(info.clock - ended, 0.0) or min(info.clock - began, 0.0) for info in infos}
    if wrong := {host: seconds for host, seconds in apart.items() if abs(seconds) > CLOCK_SECONDS}:
        most = max(wrong.values(), key=abs)
        way = "ahead of" if most > 0 else "behind"
        yield (
            f"the clock of {_nodes(wrong)} is at least {abs(most):.0f} s {way} that of {_nodes([infos[0].host])}: "
            "times in logs do not agree, and torchrun's rendezvous may take a node for lost (try: chronyc tracking)"
        )


def differing(values: Iterable[tuple[str, str | None]]) -> str:
    """Return which hosts have which value, in words; an empty text if all have the same."""
    by_value: dict[str | None, list[str]] = {}
    for host, value in values:
        by_value.setdefault(value, []).append(host)
    return "; ".join(f"{value} on {_nodes(hosts)}" for value, hosts in by_value.items()) if len(by_value) > 1 else ""


def _nodes(hosts: Iterable[str]) -> str:
    """Return nodes in words: the first few of many."""
    names = list(dict.fromkeys(hosts))
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    *most, last = [*names[:MOST_NAMES], *more]
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"node{'s' if len(names) > 1 else ''} {listed}"
