"""The command line: what it takes, how it fails, what it says of the machine, and that it starts without torch."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import zerocli.run
from zerocli import config as configs
from zerocli import machine
from zerocli.cli import main as cli
from zerocli.cli import train
from zerocli.config import hub
from zerocli.config.options import RunOptions
from zerocli.errors import UserError
from zerocli.plan.search import automatic
from zerocli.plan.setup import Setup
from zerocli.plan.time import bench as plan_bench
from zerocli.run.processes import launch


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "ZEROCLI_", "TORCHELASTIC_"))] + ["RANK"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # `--debug` sets it; whatever a test leaves there goes with the test.
    monkeypatch.setenv("ZEROCLI_DEBUG", "0")


@pytest.fixture
def config_file(tmp_path) -> str:
    path = tmp_path / "small.toml"
    path.write_text("[model]\nlayers = 1\n")
    return str(path)


@pytest.fixture
def trainer(monkeypatch):
    """A trainer that only notes what it was asked to do."""
    calls: list[tuple] = []
    fake = SimpleNamespace(
        calls=calls,
        work=lambda config, options: calls.append(("work", config, options)) or 7,
        dry_run=lambda config, options, profiled=False: calls.append(("dry_run", config, options)) or 0,
    )
    for name in ("trainer", "dry_run"):
        monkeypatch.setattr(zerocli.run, name, fake, raising=False)
        monkeypatch.setitem(sys.modules, f"zerocli.run.{name}", fake)
    return fake


def failing(monkeypatch, error: BaseException) -> None:
    def callback() -> None:
        raise error

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: click.Command("train", callback=callback))


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["configs", "ls"],
        ["env", "--help"],
        ["fit", "--help"],
        ["check", "--help"],
    ],
)
def test_start_up_does_not_import_torch(words):
    code = "import sys; from zerocli.cli.main import run; c = run(sys.argv[1:]); sys.exit(c or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_completion_knows_the_commands():
    environ = {**os.environ, "_ZEROCLI_COMPLETE": "bash_complete", "COMP_WORDS": "zerocli tr", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "zerocli"], env=environ, capture_output=True, text=True)
    assert "train" in done.stdout and "configs" not in done.stdout


def test_the_flags_of_train_are_these():
    options = [name for param in train.command.params if isinstance(param, click.Option) for name in param.opts]
    assert sorted(options) == sorted(
        "--stage --offload --auto --nvme-path --ranks --tp --steps --batch --seq --precision --data --seed --run-dir "
        "--resume --check --dry-run --json --set --init-from --lr --accumulate --epochs --save-every --eval-every "
        "--deepspeed --lora --base --shard-ranks".split()
    )


def test_a_user_error_is_told_without_a_traceback(monkeypatch, capsys):
    failing(monkeypatch, UserError("host memory is full", "  of this node", hint="--offload cpu", exit_code=3))
    assert cli.run(["train"]) == 3
    captured = capsys.readouterr()
    assert captured.err == "error: host memory is full\n  of this node\ntry: --offload cpu\n" and not captured.out
    assert cli.run(["--debug", "train"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_one_line_and_debug_shows_its_traceback(monkeypatch, capsys):
    failing(monkeypatch, ZeroDivisionError("by zero"))
    assert cli.run(["train"]) == 1
    err = capsys.readouterr().err
    assert "bug in zerocli: ZeroDivisionError: by zero" in err and "--debug" in err and "Traceback" not in err
    monkeypatch.setenv("ZEROCLI_DEBUG", "1")
    assert cli.run(["train"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_rank_writes_its_failure_where_torchrun_reads_it(monkeypatch, capsys, tmp_path):
    failing(monkeypatch, ZeroDivisionError("by zero"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    assert cli.run(["train"]) == 1
    record = json.loads((tmp_path / "error").read_text())
    assert (
        "Traceback" in record["message"]
        and "click" not in record["message"]
        and int(record["timestamp"]) > 0
        and record["exit_code"] == 1
    )
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("ZEROCLI_PARENT", "1")
    assert cli.run(["train"]) == 1
    assert not capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch):
    failing(monkeypatch, KeyboardInterrupt())
    assert cli.run(["train"]) == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "did you mean train?"),
        (["train", "--stages", "3"], "--stage"),
        (["train", "--steps", "many"], "many"),
        (["train", "--stage", "7"], "stage"),
        (["train", "no-such-config"], "no-such-config"),
        (["train", "--set", "zero.bukcet=3", "--set", "nonsense"], "did you mean zero.bucket?"),
        (["configs", "show", "tinny"], "did you mean tiny?"),
        (["train", "--resume"], "nothing to resume"),
        (["train", "tiny", "train.steps=3"], "try: zerocli train --set train.steps=3"),
        (["train", "steps=3"], "--set train.steps=3"),
        (["profile", "tiny", "lr=1"], "try: --set optimizer.lr=1"),
        (["train", "absent.yaml"], "zerocli configs ls"),
        (["train", "--deepspeed", "absent.json"], "absent.json: no such file"),
        (["train", "--eval-every", "-1"], "eval_every -1 is below 0"),
        (["generate", "absent", "text"], "absent: no such folder"),
    ],
)
def test_bad_usage_is_2_with_a_way_on(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and "Traceback" not in err


def test_a_yaml_config_needs_pyyaml(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "yaml" else found(name, *more))
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  steps: 3\n")
    assert cli.run(["train", str(path)]) == 2
    err = capsys.readouterr().err
    assert "PyYAML is not installed" in err and "try: pip install pyyaml" in err


def test_fit_ends_with_the_command_that_trains_it(tmp_path, capsys):
    """All that was asked is in it; bare counts have none."""

    def ask(*words):
        assert cli.run(["fit", *words]) == 0
        out = capsys.readouterr().out
        assert "GiB: GPU of one GPU, host and nvme of a node" in out
        return " ".join(out.partition("to train it:\n")[2].replace("\\\n", "").split())

    asked = ("--seq", "64", "--set", "optimizer.name=sgd", "--hardware", "t4", "--stage", "3", "--offload", "cpu")
    assert ask("tiny", "--ranks", "2", *asked) == (
        "zerocli train tiny --stage 3 --offload cpu --ranks 2 --seq 64 --precision fp16 --set optimizer.name=sgd"
    )
    assert ask("tiny", "--ranks", "16", "--stage", "1", "--offload", "none").startswith(
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m zerocli train tiny"
    )
    assert ask("7.5B") == ""
    assert "--ranks 2 --lora 4:c_attn" in ask("tiny", "--ranks", "2", "--lora", "4:c_attn")
    shape = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    words = ["fit", str(tmp_path), "--ranks", "1", "--json"]
    for more, nvme in (([], 2), (["--set", "checkpoint.every=0"], 0)):  # train saves a fine-tuning
        assert cli.run([*words, *more]) == 0
        found = json.loads(capsys.readouterr().out)["candidates"][0]
        assert bool(found["tiers"]["nvme"]["needed"]) == bool(nvme)


def test_operations_of_frozen_weights_are_counted_without_their_gradients(capsys):
    """LoRA of 8B at 8192 tokens: four operations per frozen weight and token, six per trained one, and attention."""
    assert (
        cli.run(["fit", "llama3-8b", "--lora", "16", "--ranks", "1", "--hardware", "h100", "--stage", "0", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)["candidates"][0]["step"]
    trained, embedding = 41_943_040, 128_256 * 4096
    frozen = 8_030_261_248 - embedding  # looked up, not multiplied
    operations = 8192 * (4 * frozen + 6 * trained + 6 * 32 * 8192 * 4096)
    assert found["mfu"] * found["seconds"] * 989e12 == pytest.approx(operations, rel=0.02)


def test_the_help_of_profile_has_its_own_defaults(capsys):
    assert cli.run(["profile", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "of a folder" not in out and "[default: 6]" in out and "[default: never]" in out


def test_a_deepspeed_config_gives_way_to_flags(config_file, monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: seen.append(args) or 5)
    values = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "aio": {}}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    words = ["train", config_file, "--deepspeed", str(tmp_path / "ds.json"), "--run-dir", str(tmp_path / "run")]
    assert cli.run([*words, "--stage", "3", "--set", "train.clip=0.5"]) == 5
    config, _, arguments = seen[0]
    assert (config.train.batch, config.train.global_batch, config.zero.stage, config.train.clip) == (2, 8, 3, 0.5)
    assert "--deepspeed" in arguments
    err = capsys.readouterr().err
    assert "--batch 2" in err and "--stage 1" in err and "without a counterpart: aio: no effect" in err
    assert cli.run([*words, "--accumulate", "3"]) == 5
    assert (seen[1][0].train.accumulate, seen[1][0].train.global_batch) == (3, 0)


def test_train_starts_the_ranks_with_the_resolved_arguments(config_file, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: seen.append((args, kwargs)) or 5)
    words = ["train", config_file, "--ranks", "3", "--stage=3", "--nvme-path", "/a b", "--nvme-path", "/c", "--json"]
    assert cli.run(words + ["--set", "train.clip=0.5", "--run-dir", str(tmp_path / "run")]) == 5
    (config, options, arguments), extra = seen[0]
    assert (config.parallel.ranks, config.zero.stage, config.train.clip) == (3, 3, 0.5)
    assert config.offload.nvme_path == ("/a b", "/c")
    assert options == RunOptions(str(tmp_path / "run"), json=True, source=config_file)
    assert extra == {"fresh": False, "defaults": ["checkpoint.every=1000"]}
    assert arguments[:2] == ["train", config_file] and "--ranks" not in arguments and "--json" in arguments
    line = launch.torchrun_line(3, arguments)
    assert line.startswith(f"torchrun --standalone --nproc-per-node 3 -m zerocli train {config_file} --stage 3 ")
    assert "--nvme-path '/a b' --nvme-path /c" in line
    # What was resolved resolves to the same again.
    assert cli.run([*arguments, "--ranks", "3"]) == 5
    assert seen[1] == seen[0]


def test_weights_are_read_ahead_while_ranks_start(config_file, monkeypatch, tmp_path):
    asked, weights = [], tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(3 * machine.AHEAD_NBYTES + 5))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, nbytes, advice: asked.append((start, nbytes, advice)))
    read_ahead = machine.read_ahead
    monkeypatch.setattr(machine, "read_ahead", lambda files: read_ahead(files).join())
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: 5)
    words = ["train", config_file, "--run-dir", str(tmp_path / "run"), "--init-from", str(weights)]
    assert cli.run(words) == 5
    each = machine.AHEAD_NBYTES
    assert asked == [(start, each, os.POSIX_FADV_WILLNEED) for start in range(0, 4 * each, each)]
    cli.run([*words, "--resume"])  # which needs a checkpoint, not these
    assert len(asked) == 4
    ranks = [
        {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": str(here)} for rank, here in ((0, 4), (3, 4), (0, 2))
    ]
    # Of several nodes each needs a part of the files, and all may be on one file system.
    context = SimpleNamespace(params={"auto": True, "resume": False, "dry_run": False})
    config = configs.load(config_file, [f"train.init_from={weights}"])
    assert [train._may_read_ahead(context, config, rank) for rank in ranks] == [True, False, False]
    # `--auto` measures a disk that it does not know.
    disk = configs.load(config_file, [f"train.init_from={weights}", f"offload.nvme_path={tmp_path}"])
    assert not train._may_read_ahead(context, disk, None)
    (weights / "consolidated.safetensors").touch()
    assert hub.weight_files(str(weights)) == [weights / "model.safetensors"]
    (weights / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "consolidated.safetensors", "b": "none"}}'
    )
    assert hub.weight_files(str(weights)) == [weights / "consolidated.safetensors"]
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 30, 4 * each, None))
    assert read_ahead([weights / "model.safetensors"]) is None and hub.weight_files(str(tmp_path / "none")) == []


def test_under_torchrun_train_is_the_rank(config_file, monkeypatch, trainer, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my job")
    assert cli.run(["train", config_file]) == 7
    [(called, config, options)] = trainer.calls
    assert called == "work" and config.parallel.ranks == 4
    assert options.run_dir == "runs/small-runmy_job" and Path(options.run_dir).is_dir() and not options.resume
    # torchrun starts the ranks again after a failure: they go on from the checkpoint, once there is one.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    cli.run(["train", config_file])
    assert not trainer.calls[-1][2].resume
    saved = Path(options.run_dir, "checkpoints", "step-00000001")
    saved.mkdir(parents=True)
    cli.run(["train", config_file])
    assert not trainer.calls[-1][2].resume  # it was not finished
    (saved / "manifest.json").touch()
    cli.run(["train", config_file])
    assert trainer.calls[-1][2].resume


def test_a_dry_run_writes_nothing(config_file, monkeypatch, trainer, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", config_file, "--dry-run"]) == 0
    [(called, config, options)] = trainer.calls
    assert called == "dry_run" and config.parallel.ranks == 2 and options.dry_run
    assert "ranks 2 (no GPU: two processes" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_resume_finds_the_newest_run_of_its_config(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["gpt2-xl-20250103-000000", "gpt2-20250102-000000", "gpt2-20250101-000000"]):
        Path("runs", name, "checkpoints", "step-00000001").mkdir(parents=True)
        Path("runs", name, "checkpoints", "step-00000001", "manifest.json").touch()
        os.utime(Path("runs", name), (1000 - age, 1000 - age))
    Path("runs/gpt2-20250104-000000").mkdir()  # newer, with nothing to go on from
    assert train.newest_run("gpt2") == "runs/gpt2-20250102-000000"


def test_configs_are_listed_shown_and_copied(capsys, tmp_path):
    assert cli.run(["configs", "ls"]) == 0
    assert any(line.startswith("tiny ") for line in capsys.readouterr().out.splitlines())
    assert cli.run(["configs", "show", "tiny"]) == 0
    shown = capsys.readouterr().out
    target = tmp_path / "new" / "tiny.toml"
    assert cli.run(["configs", "cp", "tiny", str(target.parent)]) == 0
    assert target.read_text() == shown
    target.write_text("mine")
    assert cli.run(["configs", "cp", "tiny", str(target.parent)]) == 2
    assert str(target) in capsys.readouterr().err and target.read_text() == "mine"
    assert cli.run(["configs", "cp", "tiny", str(target.parent), "--force"]) == 0
    assert target.read_text() == shown


def test_env_is_one_document(capsys, tmp_path):
    assert cli.run(["env", "--json", "--nvme-path", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == 1 and facts["cores"] >= 1 and facts["gpus"] == [] and facts["bench"] == {}
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["disks"][str(tmp_path)]["free"] > 0
    assert "gloo" in facts["backends"] and facts["versions"]["torch"]


def test_env_measures_and_remembers(capsys, monkeypatch, tmp_path):
    bench = SimpleNamespace(
        bench_dram_hbm=lambda nbytes, seconds: {"copy": 12.5}, bench_nvme=lambda paths, nbytes, seconds: {"read": 3.25}
    )
    monkeypatch.setitem(sys.modules, "tiers.bench", bench)
    monkeypatch.setattr(sys.modules.get("tiers") or __import__("tiers"), "bench", bench, raising=False)
    monkeypatch.setattr(plan_bench, "_compute_rates", lambda: {"fp32": 0.5})  # takes seconds
    assert cli.run(["env", "--bench", "--nvme-path", str(tmp_path), "--json"]) == 0
    out, told = capsys.readouterr()
    assert told.index("measuring 1 of 3: host memory") < told.index("copy 12.5 GB/s") < told.index("measuring 2 of 3")
    measured = json.loads(out)["bench"]
    assert measured["dram_hbm"]["result"] == {"copy": 12.5} and measured[str(tmp_path)]["result"] == {"read": 3.25}
    assert cli.run(["env"]) == 0
    out = capsys.readouterr().out
    assert "copy 12.5 GB/s (just now)" in out and "read 3.25 GB/s" in out
    plan_bench.cache_path().write_text("{ torn")
    assert cli.run(["env"]) == 0 and "nothing yet" in capsys.readouterr().out


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:       16000 kB\nMemFree:        1 kB\nMemAvailable:   12000 kB\n"


def test_the_tightest_cgroup_v2_limit_counts(tmp_path):
    write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": f"{8000 * 1024}\n",
            "sys/fs/cgroup/job/memory.current": f"{3000 * 1024}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {1000 * 1024}\n",
            "sys/fs/cgroup/job/cpu.max": "50000 100000\n",
        },
    )
    assert machine.memory(tmp_path) == machine.Memory(16000 * 1024, 6000 * 1024, 8000 * 1024)
    assert machine.cores(tmp_path) == 1


def test_cgroup_v1_limits_count_where_the_path_is_not_mounted(tmp_path):
    write_tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8000 * 1024}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1000 * 1024}",
        },
    )
    assert machine.memory(tmp_path) == machine.Memory(16000 * 1024, 7000 * 1024, 8000 * 1024)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert machine.memory(tmp_path).limit is None


def test_visible_gpus_are_counted_as_cuda_does(monkeypatch):
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    listed = [machine.Gpu(name, 2**30) for name in ("a", "b", "c")]
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: listed)
    assert machine.gpus({}) == listed
    assert [gpu.name for gpu in machine.gpus({"CUDA_VISIBLE_DEVICES": "2,0"})] == ["c", "a"]
    assert len(machine.gpus({"CUDA_VISIBLE_DEVICES": "1,-1,2"})) == 1
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": ""}) == machine.gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert len(machine.gpus({"CUDA_VISIBLE_DEVICES": "GPU-5a,GPU-6b"})) == 2


def test_a_working_directorys_own_folders_are_not_taken_for_ours(tmp_path):
    """`python -m` and torchrun put the working directory first, and many have a folder `configs`."""
    for name in ("configs", "offload", "tiers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('theirs')\n")
    listed = subprocess.run(
        [sys.executable, "-m", "zerocli", "configs", "ls"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0 and "gpt2-124m" in listed.stdout
    program = "import zerocli, offload.placement, tiers.errors; print(offload.__file__)"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert Path(found.stdout.strip()).parent.parent == Path(cli.__file__).parents[2], found.stderr


def test_a_disk_that_nobody_measured_is_measured_once(monkeypatch, tmp_path):
    """`--auto` may choose it: a preset's rate was five times too fast."""
    asked: list[Any] = []

    def measured(paths: list[str], nbytes: int, seconds: float) -> dict[str, float]:
        asked.append(paths)
        return {"read": 2.0, "write": 1.0, "both": 0.5}

    bench = SimpleNamespace(bench_nvme=measured)
    monkeypatch.setitem(sys.modules, "tiers.bench", bench)
    monkeypatch.setattr(sys.modules.get("tiers") or __import__("tiers"), "bench", bench, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = (str(tmp_path),)
    lines = plan_bench.measure_unknown(plan_bench.gather(paths), paths)
    assert lines == [f"measured disk {tmp_path}: read 2 GB/s, write 1 GB/s, both 0.5 GB/s"]
    assert plan_bench.measure_unknown(plan_bench.gather(paths), paths) == [] and len(asked) == 1
    setup = Setup(device="cpu", ranks=2, ranks_per_node=2)
    here = automatic.hardware_here(paths, setup, 1 << 30)
    assert (here.disk, here.source) == (0.5, "this machine, measured: disk; other rates of a typical CPU")
