"""Several hosts for real: network namespaces that are joined by a bridge stand for machines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import kill_all, wait_for_a_checkpoint, workers
from runs import TINY, losses, train

SETS = ["train.steps=150", "checkpoint.every=10", "train.log_every=1000", "train.watchdog=15", "zero.stage=3"]

pytestmark = pytest.mark.long


class Hosts:
    """Namespaces, each with a link to one bridge."""

    def __init__(self, number: int) -> None:
        mark = os.getpid() % 100000
        self.bridge = f"zcb{mark}"
        self.names = [f"zerocli{mark}h{host}" for host in range(number)]
        self.links = [f"zc{mark}h{host}" for host in range(number)]
        self.addresses = [f"10.213.7.{host + 1}" for host in range(number)]

    def open(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("netns", "add", name)
            ip("link", "add", link, "type", "veth", "peer", "name", f"{link}b")
            ip("link", "set", f"{link}b", "master", self.bridge, "up")
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def set_link(self, host: int, state: str) -> None:
        ip("-n", self.names[host], "link", "set", self.links[host], state)

    def degrade(self) -> str:
        """Delay and lose packets on every link; return why that cannot be done, if it cannot."""
        for name, link in zip(self.names, self.links, strict=True):
            words = ["tc", "-n", name, "qdisc", "add", "dev", link, "root", "netem", "delay", "5ms", "loss", "1%"]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                return done.stderr.strip()
        return ""

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def start(self, folder: Path, host: int, port: int, num_hosts: int, *more: str) -> subprocess.Popen:
        """Start torchrun on one of the hosts, as one node of `num_hosts`; `more` are sets, and flags."""
        words = [word for each in [*TINY, *SETS] for word in ("--set", each)]
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(num_hosts), "--node-rank", str(host), "--nproc-per-node", "1"]
        command += ["--master-addr", self.addresses[0], "--master-port", str(port)]
        command += ["-m", "zerocli", "train", "tiny", *words, "--run-dir", str(folder / "run"), *more]
        environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.links[host]}
        with (folder / f"host{host}").open("a") as log:
            return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(request) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    made = Hosts(request.param)
    try:
        made.open()
    except subprocess.CalledProcessError as error:
        made.close()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.close()


def wait_for_ends(pids: list[int], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the job did not end"
        time.sleep(0.1)


@pytest.mark.parametrize("hosts", [2, 3], indirect=True, ids=["of 2", "of 3"])
def test_a_cut_link_ends_the_job_naming_the_missing_rank_and_it_resumes_on_the_others(tmp_path, hosts):
    """Of two hosts the link comes back; of three the two that are left go on, with the same global batch."""
    number, left = len(hosts.names), 2
    batch = [] if number == 2 else ["--set", "train.batch=1", "--set", "train.global_batch=12"]
    assert train(tmp_path / "one", *SETS, *batch[1::2], world=number).codes == [0] * number  # one host
    agents = [hosts.start(tmp_path, host, 29511, number, *batch) for host in range(number)]
    try:
        wait_for_a_checkpoint(tmp_path, agents, seconds=300)
        ranks = [pid for agent in agents for pid in workers(agent)]
        assert len(ranks) == number
        hosts.set_link(number - 1, "down")
        wait_for_ends(ranks)
    finally:
        kill_all(agents)
    said = [(tmp_path / f"host{host}").read_text() for host in range(number)]
    assert "has been stuck for" in said[0] or "another rank was lost" in said[0], said[0]
    assert re.search(f"rank {number - 1} (does not answer|had not arrived)", said[0]), said[0]
    assert "rank 0" in said[number - 1], said[number - 1]

    hosts.set_link(number - 1, "up")
    agents = [hosts.start(tmp_path, host, 29512, left, "--resume", *batch) for host in range(left)]
    try:
        assert [agent.wait(400) for agent in agents] == [0] * left, (tmp_path / "host0").read_text()
    finally:
        kill_all(agents)
    assert "resuming after step" in (tmp_path / "host0").read_text()
    same, whole = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert same == (whole if left == number else pytest.approx(whole, rel=1e-4))


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_delay_and_loss_of_packets_change_no_number(tmp_path, hosts):
    if why := hosts.degrade():
        pytest.skip(f"packets cannot be delayed here: {why}")
    short = ["--set", "train.steps=10", "--set", "train.watchdog=60"]
    assert train(tmp_path / "one", *SETS, *short[1::2]).codes == [0, 0]
    agents = [hosts.start(tmp_path, host, 29513, 2, *short) for host in range(2)]
    try:
        assert [agent.wait(400) for agent in agents] == [0, 0], (tmp_path / "host0").read_text()
    finally:
        kill_all(agents)
    assert losses(tmp_path / "run") == losses(tmp_path / "one")
