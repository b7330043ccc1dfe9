"""What is wrong between the nodes of a run is one message on rank 0 before its first step, with the nodes' names."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from runs import Ended, train

from zerocli import config as configs
from zerocli import machine
from zerocli.config.options import RunOptions
from zerocli.errors import DOES_NOT_FIT, USAGE, UserError
from zerocli.run.processes import launch, nodes
from zerocli.run.processes.nodes import Findings, RankInfo, judge

GIB = 2**30


def on_two_nodes(rank: int, folder: str) -> str:
    """Half of the ranks are on node a, the others on node b."""
    each = int(os.environ["WORLD_SIZE"]) // 2
    os.environ |= {"LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
    host = "ab"[rank // each]
    socket.gethostname = lambda: host
    nodes.FOLDER_SECONDS = 0.01
    return folder


def on_another_version(rank: int, folder: str) -> str:
    if on_two_nodes(rank, folder) and socket.gethostname() == "b":
        found = machine.version
        machine.version = lambda package: "9.9" if package == "zerocli" else found(package)
    return folder


def with_a_folder_each(rank: int, folder: str) -> str:
    """The same path is another folder on node b, as on a disk of its own."""
    if on_two_nodes(rank, folder) and socket.gethostname() == "b":
        seen = os.stat
        os.stat = lambda path, **how: seen(f"{path}.b" if ".nodes-" in str(path) else path, **how)
    return folder


def with_another_command(rank: int, folder: str) -> str:
    on_two_nodes(rank, folder)
    if rank:
        load = configs.load
        configs.load = lambda source, sets: load(source, [*sets, "optimizer.lr=0.5"])
    return folder


def with_a_fast_clock(rank: int, folder: str) -> str:
    if on_two_nodes(rank, folder) and socket.gethostname() == "b":
        clock = nodes.now
        nodes.now = lambda: clock() + 4000
    return folder


def with_little_memory(rank: int, folder: str) -> str:
    if on_two_nodes(rank, folder) and socket.gethostname() == "b":
        found = machine.memory()
        machine.memory = lambda *_: replace(found, total=found.total // 2, limit=None, available=found.available // 2)
    return folder


def refused_by_one(ended: Ended, fact: str, hint: str) -> None:
    """Rank 0 says it in one line; no rank has a traceback, or has made a step."""
    assert set(ended.codes) == {USAGE}
    assert len(re.findall(fact, ended.said[0])) == 1, ended.said[0]
    assert f"try: {hint}" in ended.said[0] and "Traceback" not in "".join(ended.said)


VERSIONS = r"versions of zerocli: \S+ \(source \w+\) on node a; 9.9 .* on node b"
FOLDERS = r"folder \S+ is not shared: node b cannot see .* on node a \(No such"
CONFIGS = r"optimizer.lr differs between ranks: \S+ on node a; 0.5 on node b"
WRONG = {
    "version": (on_another_version, 2, (), VERSIONS, "one environment"),
    "folder": (with_a_folder_each, 2, (), FOLDERS, "--run-dir"),
    "tp": (on_two_nodes, 4, ("parallel.tp=4",), r"--tp 4 would split layers between nodes a and b", "--tp 2"),
    "command": (with_another_command, 2, (), CONFIGS, "the same command"),
}
LONG = pytest.mark.long


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("folder", "tp") else LONG) for name in WRONG])
def test_what_is_wrong_between_nodes_is_told_once(tmp_path, name):
    before, world, sets, fact, hint = WRONG[name]
    ended = train(tmp_path / "run", "model.heads=4", *sets, world=world, before=before)
    refused_by_one(ended, fact, hint)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob(".nodes*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "note"),
    [
        (with_a_fast_clock, r"note: the clock of node b is at least [34]\d\d\d s ahead of that of node a"),
        (with_little_memory, r"note: host memory differs: \S+ GiB on node a; \S+ GiB on node b; plans are for"),
    ],
)
def test_what_slows_a_run_down_is_noted_once(tmp_path, before, note):
    ended = train(tmp_path / "run", "train.steps=2", before=before)
    assert ended.codes == [0, 0], ended.said
    assert len(re.findall(note, ended.said[0])) == 1, ended.said[0]
    assert not re.search(note, ended.said[1])


def test_a_folder_of_a_run_that_does_not_save_need_not_be_shared(tmp_path):
    ended = train(tmp_path / "run", "train.steps=1", "checkpoint.every=0", before=with_a_folder_each)
    assert ended.codes == [0, 0], ended.said


# -- what rank 0 finds -------------------------------------------------------------------------------------------------


def infos(hosts: str, each: int, **changes: dict[str, object]) -> list[RankInfo]:
    """Ranks on hosts of one letter, `each` on one; `changes` are the fields of those of a host that differ."""
    known = {"clock": 50.0, "versions": {"zerocli": "1", "torch": "2"}, "gpu": "H200", "memory": 100 * GIB}
    known |= {"local_world": each}
    return [RankInfo(host, local, **(known | changes.get(host, {}))) for host in hosts for local in range(each)]


def found(these: list[RankInfo], auto: frozenset[str] = frozenset(), **parallel: int) -> Findings:
    config = configs.load("tiny")
    config = replace(config, parallel=replace(config.parallel, **parallel))
    return judge(these, config, RunOptions("/run", auto=auto), (40.0, 60.0))


def test_equal_nodes_have_nothing_to_tell():
    assert found(infos("abcd", 8)) == Findings()
    assert found(infos("abcd", 8), tp=4, shard_ranks=2) == Findings()
    assert found(infos("a", 1)) == Findings()
    assert found(infos("aa", 2)) == Findings()  # two agents of torchrun on one machine


TWO = {"local_world": 2}


@pytest.mark.parametrize(
    ("these", "parallel", "fact", "hint"),
    [
        (infos("ab", 4), {"tp": 8}, "--tp 8 would split layers between nodes a and b (ranks 0 to 7)", "--tp 4"),
        (infos("ab", 6), {"tp": 4}, "--tp 4 would split layers between nodes a and b (ranks 4 to 7)", "--tp 3"),
        (infos("ab", 6), {"shard_ranks": 4}, "node a: shard_ranks 4 does not divide the 6 data-parallel ranks of a"
         " node: 1, 2, 3 or 6 does", "--shard-ranks 3"),
        (infos("ab", 6), {"shard_ranks": 5}, "node a: shard_ranks 5 does not divide the 12 data-parallel ranks",
         "--shard-ranks 4"),
        (infos("abab", 1, a=TWO, b=TWO), {"shard_ranks": 2},
         "--shard-ranks 2 would partition between nodes a and b (ranks 0 to 1)", "ranks of a node as neighbours"),
        (infos("ab", 1, a=TWO, b=TWO), {}, "node a has 1 rank and LOCAL_WORLD_SIZE=2 there", "torchrun, which sets"),
        (infos("abcdefg", 1, a={"versions": {"torch": "3"}}), {},
         "different versions of torch: 3 on node a; 2 on nodes b, c, d and 3 more", "one environment"),
        (infos("ab", 1, b={"folder": "Permission denied"}), {}, "the run folder /run is not shared: node b cannot see "
         "the file that rank 0 wrote there on node a (Permission denied)", "--run-dir"),
        (infos("ab", 1, a={"config": {"k": 1}}, b={"config": {"k": 2}}), {},
         "k differs between ranks: 1 on node a; 2 on node b", "the same command"),
    ],
)  # fmt: skip
def test_rank_0_names_what_is_wrong_and_where(these, parallel, fact, hint):
    ((said, tip),) = found(these, **parallel).problems
    assert fact in said and hint in tip


def test_nothing_is_chosen_for_nodes_with_different_numbers_of_ranks():
    these = [*infos("a", 4), *infos("b", 2)]
    assert found(these).notes == ["nodes have different numbers of ranks: 4 on node a; 2 on node b"]
    ((said, _),) = found(these, auto=frozenset({"zero.stage"})).problems
    assert "different numbers of ranks (4 on node a; 2 on node b)" in said


def test_a_node_that_is_too_small_is_named_with_its_own_message():
    these = infos("ab", 2, b={"refused": ("does not fit this machine", "--stage 3", DOES_NOT_FIT)})
    findings = found(these)
    assert findings.problems[0] == ("node b: does not fit this machine", "--stage 3") and findings.code == DOES_NOT_FIT


def test_a_refusal_of_one_node_of_several_is_left_to_rank_0(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise UserError("does not fit", exit_code=DOES_NOT_FIT)

    monkeypatch.delenv("ZEROCLI_PARENT", raising=False)
    monkeypatch.setattr(launch, "_refuse_worker", refuse)
    config, options = configs.load("tiny"), RunOptions(str(tmp_path))
    worker = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(UserError, match="does not fit"):
        launch.with_refusal(config, options, worker)
    refused = launch.with_refusal(config, options, worker | {"LOCAL_WORLD_SIZE": "1"}).refused
    assert refused is not None and refused.exit_code == DOES_NOT_FIT
    assert launch.with_refusal(config, options, worker | {"LOCAL_RANK": "1"}) is options


def test_all_that_is_wrong_is_told_at_once():
    these = infos("ab", 2, b={"versions": {"zerocli": "2", "torch": "2"}, "folder": "No such file or directory"})
    findings = found(these, tp=4)
    assert len(findings.problems) == 3 and findings.code == USAGE


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"gpu": "A100"}, "GPUs differ: H200 on node a; A100 on node b; plans are for the least"),
        ({"memory": 50 * GIB}, "host memory differs: 100.0 GiB on node a; 50.0 GiB on node b; plans are for"),
        ({"clock": 75.0}, "the clock of node b is at least 15 s ahead of that of node a"),
        ({"clock": 10.0}, "the clock of node b is at least 30 s behind that of node a"),
        ({"clock": 65.0}, ""),
        ({"memory": 98 * GIB}, ""),
    ],
)
def test_what_is_only_slow_is_a_note(changes, note):
    findings = found(infos("ab", 2, b=changes))
    assert not findings.problems and (note in " ".join(findings.notes) if note else not findings.notes)
    assert len(findings.notes) == bool(note)


def test_the_info_of_another_version_is_read():
    text = b'{"host": "a", "local_rank": 0, "local_world": 1, "clock": 1.0, "later": 2}'
    assert RankInfo.read(text) == RankInfo("a", 0, 1, 1.0)


@pytest.mark.parametrize("package", ["zerocli", "offload", "tiers"])
def test_the_number_of_the_source_changes_with_it(monkeypatch, tmp_path, package):
    """Versions of a repository have one number for many states of their code, which is in three packages."""
    assert re.fullmatch(r".* \(source [0-9a-f]{8}\)", nodes.versions()["zerocli"])
    assert nodes.versions()["torch"] == torch.__version__
    monkeypatch.setattr(getattr(nodes, package), "__file__", str(tmp_path / "__init__.py"))
    assert nodes.versions.__wrapped__()["zerocli"] != nodes.versions()["zerocli"]


def test_what_rank_0_reads_of_a_rank_is_short_and_equal_configs_are_read_once(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16384")
    config, store = configs.load("tiny"), dist.HashStore()
    comparison = nodes.Nodes(store, config, RunOptions("/run"), shared=True)
    alike, other = nodes.compared(config, RunOptions("/run")), {"optimizer.lr": 0.5}
    made = [replace(info, config=dict(other if info.host == "b" else alike)) for info in infos("abc", 8)]
    sent = [json.dumps(asdict(comparison._with_config_in_store(info))) for info in made]
    assert max(map(len, sent)) < 400 < len(json.dumps(alike)) and store.num_keys() == 2
    read = comparison._with_configs([RankInfo.read(text.encode()) for text in sent])
    assert [json.dumps(info.config) for info in read] == [json.dumps(info.config) for info in made]
    assert len({id(info.config) for info in read}) == 2
