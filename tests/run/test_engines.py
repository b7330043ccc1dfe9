"""The files that docs/cluster.md has for the engines of clusters: what of them can be run on one machine is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from commands import lines
from ranks import hold_port

from zerocli.checkpoint.folder import Folder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cluster.md").read_text()
SMALL = "--set model.layers=2 --set model.hidden=16 --set model.heads=2 --seq 8 --batch 2"
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "CUDA_VISIBLE_DEVICES": "",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


def block(heading: str, first: str, number: int = 0) -> str:
    """Return a block of code of a section of the page, by its language."""
    section = re.split(r"^## ", PAGE.partition(f"\n## {heading}\n")[2], flags=re.M)[0]
    return re.findall(rf"^```{first}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[number]


def small(text: str, **changes: str) -> str:
    """Return a file of the page for a tiny model on this machine."""
    text = text.replace("zerocli train llama3-8b", f"zerocli train tiny {SMALL}").replace("srun zerocli", ZEROCLI)
    for old, new in changes.items():
        assert re.search(old, text), (old, text)
        text = re.sub(old, new, text)
    return text


ZEROCLI = f"srun {sys.executable} -m zerocli"


# -- SLURM -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if why := slurm.missing():
        pytest.skip(why)
    held = [hold_port() for _ in range(3)]
    made = slurm.Slurm(tmp_path_factory.mktemp("slurm"), tuple(each.getsockname()[1] for each in held))
    for each in held:
        each.close()
    made.environ |= ENVIRON
    try:
        made.open()
        yield made
    finally:
        made.close()


def said(cluster: slurm.Slurm, job: int) -> str:
    return (cluster.folder / f"slurm-{job}.out").read_text()


@pytest.mark.long  # SLURM sends its signal up to a minute early
def test_a_job_of_slurm_is_saved_before_its_time_is_over_and_requeued(cluster):
    script = small(block("SLURM", "bash"))
    script = re.sub(r"#SBATCH --(gpus|cpus).*\n", "", script).replace("--ntasks-per-node=8", "--ntasks-per-node=1")
    script = script.replace("USR1@300", "USR1@60").replace("--time=24:00:00", "--time=2")
    script = script.replace("--save-every 500", "--save-every 50000 --steps 1000000")
    script = script.replace("$code -eq 75", '$code -eq 75 -a -z "$SLURM_RESTART_COUNT"')
    script = script.replace("srun ", "srun --kill-on-bad-exit=1 ")
    job = cluster.submit(script)
    cluster.wait(
        lambda: (cluster.folder / f"slurm-{job}.out").exists() and said(cluster, job).count(", which is saved") == 2
    )
    cluster.finish(job)
    text = said(cluster, job)
    stops = [int(step) for step in re.findall(r"stopped after step (\d+) \(\w+", text)]
    assert re.findall(r"resuming after step (\d+)", text) == [str(stops[0])] and stops[1] > stops[0], text
    assert Folder(cluster.folder / f"runs/{job}/checkpoints").committed()[0].step == stops[1]
    assert "Terminated" not in text and "Traceback" not in text, text


@pytest.mark.long
def test_torchrun_under_srun_is_a_job_of_two_nodes(cluster):
    held = hold_port()
    script = small(block("SLURM", "bash", 1)).replace("--save-every 500", "--save-every 3 --steps 6")
    script = script.replace("nproc-per-node 8", "nproc-per-node 1").replace(
        "$head:29500", f"127.0.0.1:{held.getsockname()[1]}"
    )
    script = re.sub(r"#SBATCH --(gpus|cpus).*\n", "", script)
    job = cluster.submit(script)
    cluster.finish(job)
    held.close()
    assert "2 ranks on cpu" in said(cluster, job), said(cluster, job)
    assert lines(cluster.folder / f"runs/{job}")[-1]["step"] == 6


@pytest.mark.long
def test_a_batch_script_without_srun_starts_its_own_ranks(cluster):
    """SLURM's variables of a rank are there too."""
    run = f"{sys.executable} -m zerocli train tiny {SMALL} --steps 3 --run-dir direct"
    job = cluster.submit(f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=2\n{run}\n")
    cluster.finish(job)
    assert "ranks 2 (no GPU" in said(cluster, job), said(cluster, job)
    assert lines(cluster.folder / "direct")[-1]["step"] == 3


# -- torchrun's variables: Kubeflow, SkyPilot --------------------------------------------------------------------------


def on_nodes(folder: Path, command: list[str], *each: dict[str, str]) -> list[str]:
    """Run a command once for each node, with the node's variables; return what each said."""
    running = [
        subprocess.Popen(
            command, cwd=folder, env=ENVIRON | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for environ in each
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(each), texts
    return texts


@pytest.mark.long
@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_the_command_of_a_manifest_runs_with_the_variables_of_its_operator(tmp_path, kind):
    """Two agents stand for two pods; an elastic PyTorchJob has a rendezvous, a TrainJob a rank for each node."""
    yaml = pytest.importorskip("yaml")
    (spec,) = [each for each in map(yaml.safe_load, manifests()) if each["kind"] == kind]
    found = (
        spec["spec"].get("trainer")
        or spec["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    )
    words = " ".join([*found["command"], *found["args"]])
    words = words.replace("train llama3-8b", f"train tiny {SMALL} --steps 4").replace("/runs/", f"{tmp_path}/")
    held = hold_port()
    port = str(held.getsockname()[1])
    common = {"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2"}
    if kind == "PyTorchJob":
        policy = spec["spec"]["elasticPolicy"]
        common |= {"PET_RDZV_BACKEND": policy["rdzvBackend"], "PET_RDZV_ID": policy["rdzvId"]}
        common |= {"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_MAX_RESTARTS": str(policy["maxRestarts"])}
        each = [common, common]
    else:
        common |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        each = [common | {"PET_NODE_RANK": str(rank)} for rank in range(2)]
    texts = on_nodes(tmp_path, words.split(), *each)
    held.close()
    assert any("2 ranks on cpu" in text for text in texts), texts
    assert lines(tmp_path / "llama")[-1]["step"] == 4


def manifests() -> list[str]:
    section = PAGE.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    return re.findall(r"^```yaml\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_the_task_of_skypilot_runs_on_two_nodes(tmp_path):
    yaml = pytest.importorskip("yaml")
    held = hold_port()
    script = yaml.safe_load(block("SkyPilot", "yaml"))["run"].replace("29500", str(held.getsockname()[1]))
    script = script.replace("train llama3-8b", f"train tiny {SMALL} --steps 4").replace('"/runs/', f'"{tmp_path}/')
    common = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_TASK_ID": "sky-1"}
    common |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    texts = on_nodes(
        tmp_path, ["bash", "-c", script], *(common | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(2))
    )
    held.close()
    assert "2 ranks on cpu" in texts[0], texts
    assert lines(tmp_path / "sky-1")[-1]["step"] == 4


# -- Ray ---------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_workers_of_ray_train_are_ranks_and_report_a_checkpoint(tmp_path):
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'", exc_type=ImportError)
    words = [str(ROOT / "examples/ray_train.py"), "--workers", "2", "--run-dir", str(tmp_path / "run"), "--"]
    words += ["tiny", *SMALL.split(), "--steps", "4", "--save-every", "2", "--stage", "3"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^step 4: loss \d", done.stdout, re.M)
    assert lines(tmp_path / "run")[-1]["step"] == 4
