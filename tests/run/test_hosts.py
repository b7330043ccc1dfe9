"""Several hosts for real: two network namespaces joined by a veth pair stand for two machines."""

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

SETS = ["train.steps=150", "checkpoint.every=10", "train.log_every=1000", "train.watchdog=8", "zero.stage=3"]

pytestmark = pytest.mark.long


class Hosts:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        self.names = [f"zerocli{os.getpid()}{side}" for side in "ab"]
        self.links = [f"zc{os.getpid() % 100000}{side}" for side in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def open(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def mend(self) -> None:
        ip("-n", self.names[0], "link", "set", self.links[0], "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, folder: Path, host: int, port: int, *more: str) -> subprocess.Popen:
        """Start torchrun on one of the hosts, as one node of two."""
        sets = [word for each in [*TINY, *SETS] for word in ("--set", each)]
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1"]
        command += ["--master-addr", self.addresses[0], "--master-port", str(port)]
        command += ["-m", "zerocli", "train", "tiny", *sets, "--run-dir", str(folder / "run"), *more]
        environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.links[host]}
        with (folder / f"host{host}").open("a") as log:
            return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    made = Hosts()
    try:
        made.open()
    except subprocess.CalledProcessError as error:
        made.close()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.close()


def test_a_cut_link_ends_the_job_naming_the_missing_ranks_and_it_resumes(tmp_path, hosts):
    assert train(tmp_path / "one", *SETS).codes == [0, 0]  # one host
    agents = [hosts.start(tmp_path, host, 29511) for host in range(2)]
    try:
        wait_for_a_checkpoint(tmp_path, agents)
        ranks = [pid for agent in agents for pid in workers(agent)]
        assert len(ranks) == 2
        hosts.cut()
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < deadline, "the job did not end"
            time.sleep(0.1)
    finally:
        kill_all(agents)
    said = [(tmp_path / f"host{host}").read_text() for host in range(2)]
    assert "has been stuck for" in said[0] and re.search("rank 1 (does not answer|had not arrived)", said[0]), said[0]
    assert "rank 0" in said[1], said[1]

    hosts.mend()
    agents = [hosts.start(tmp_path, host, 29512, "--resume") for host in range(2)]
    try:
        assert [agent.wait(120) for agent in agents] == [0, 0], (tmp_path / "host0").read_text()
    finally:
        kill_all(agents)
    assert "resuming after step" in (tmp_path / "host0").read_text()
    assert losses(tmp_path / "run") == losses(tmp_path / "one")
