"""The preflight of `train` and the verdict of `train --dry-run`: the plan compared with this machine."""

from __future__ import annotations

import json

import pytest

from zerocli import config as configs
from zerocli import machine
from zerocli.cli import main as cli
from zerocli.errors import UserError
from zerocli.machine import Gpu
from zerocli.plan.report.preflight import ACCURACY, preflight, refuse
from zerocli.run import trainer

GIB = 2**30


@pytest.fixture(autouse=True)
def machine_of_24_gib(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "LOCAL_WORLD_SIZE", "ZEROCLI_PARENT", "ZEROCLI_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(24 * GIB, 24 * GIB, None))
    monkeypatch.chdir(tmp_path)


def tiny(*sets: str) -> configs.Config:
    return configs.load("tiny", ["parallel.ranks=2", *sets], {})


@pytest.mark.parametrize(
    "words",
    [pytest.param(["llama3-70b", "--ranks", "2"], marks=pytest.mark.long), ["tiny", "--batch", "1000000"]],
)
def test_a_dry_run_of_what_does_not_fit_is_3_with_a_verdict(words, capsys):
    assert cli.run(["train", *words, "--dry-run", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False
    sizes = answer["tiers"]["dram"]
    assert sizes["available"] == 24 * GIB < sizes["needed"] and answer["plan"]["rows"]
    assert cli.run(["train", *words, "--dry-run"]) == 3
    out = capsys.readouterr().out
    assert "does not fit this machine" in out and "24.0 GiB available" in out and "\ntry: " in out


@pytest.mark.parametrize(
    "words",
    [pytest.param(["llama3-70b", "--ranks", "2"], marks=pytest.mark.long), ["tiny", "--batch", "1000000"]],
)
def test_a_dry_run_of_profile_has_the_verdict_of_train(words, capsys):
    assert cli.run(["profile", *words, "--dry-run", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert cli.run(["train", *words, "--dry-run", "--json"]) == 3
    train = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False and answer["tiers"] == train["tiers"] and answer["rows"]
    assert cli.run(["profile", *words, "--dry-run"]) == 3
    out = capsys.readouterr().out
    assert "does not fit this machine" in out and "24.0 GiB available" in out and "\ntry: " in out
    assert cli.run(["profile", "tiny", "--dry-run"]) == 0
    assert "\nfits this machine (2 ranks)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_dry_run_in_which_auto_finds_nothing_has_the_document_of_the_nearest(command, capsys):
    words = [command, "llama3-8b", "--ranks", "2", "--dry-run", "--json"]
    assert cli.run(words) == 3
    plain = json.loads(capsys.readouterr().out)
    assert cli.run([*words, "--auto"]) == 3
    shown = capsys.readouterr()
    nearest = json.loads(shown.out)
    assert set(plain) <= set(nearest) and nearest["fits"] is False
    assert 24 * GIB < nearest["tiers"]["dram"]["needed"] <= plain["tiers"]["dram"]["needed"]
    assert nearest["reason"].startswith("no stage, placement or recomputation fits") and nearest["reason"] in shown.err
    if command == "train":
        assert f"--stage {nearest['config']['zero']['stage']}" in nearest["reason"]


@pytest.mark.parametrize("auto", [[], ["--auto"]])
@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_dry_run_of_states_without_a_place_has_a_document(command, auto, capsys):
    words = ["tiny", "--stage", "1", "--offload", "optimizer=hbm:1KiB", "--dry-run", *auto]
    assert cli.run([command, *words, "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1 and answer["fits"] is False and answer["tiers"] == {}
    assert "has no place left" in answer["reason"]


def test_a_dry_run_of_what_fits_says_so(capsys):
    assert cli.run(["train", "tiny", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert cli.run(["train", "tiny", "--dry-run"]) == 0
    assert "\nfits this machine (2 ranks)" in capsys.readouterr().out


def wide_factory():
    from torch import nn

    return nn.Linear(100_000, 100_000)


def test_a_factory_is_compared_by_its_model_states(capsys):
    assert cli.run(["train", "test_preflight:wide_factory", "--dry-run", "--ranks", "2", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False and answer["tiers"]["dram"]["needed"] >= 8 * 10**10


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_run_that_cannot_fit_starts_no_rank(command, capsys, tmp_path):
    assert cli.run([command, "tiny", "--batch", "1000000"]) == 3
    err = capsys.readouterr().err
    assert "host memory" in err and "24.0 GiB available" in err and "try: --batch" in err
    assert not (tmp_path / "runs").exists()


def test_under_torchrun_the_first_rank_of_a_node_refuses(monkeypatch, capsys, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert cli.run(["train", "tiny", "--batch", "1000000"]) == 3
    assert "does not fit this machine" in capsys.readouterr().err


def test_a_folder_that_no_state_is_placed_in_need_not_exist(capsys):
    for command in ("train", "profile"):
        assert (
            cli.run([command, "tiny", "--stage", "3", "--offload", "cpu", "--nvme-path", "/proc/nowhere", "--dry-run"])
            == 0
        )
        assert "\nfits this machine" in capsys.readouterr().out


def test_under_torchrun_the_first_rank_of_a_node_looks_at_its_disks(monkeypatch, capsys):
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(trainer, "START_SECONDS", 0.1)  # rank 0, which would show it, never comes
    words = ["--stage", "3", "--offload", "nvme", "--nvme-path", "/proc/nowhere", "--set", "train.watchdog=0.1"]
    assert cli.run(["train", "tiny", *words]) == 2
    assert "--nvme-path /proc/nowhere: there is no such folder" in capsys.readouterr().err


def test_a_run_within_the_plans_accuracy_is_not_refused(monkeypatch):
    [room] = preflight(tiny(), ()).rooms
    for share, refused in ((1 - ACCURACY + 0.001, False), (1 - ACCURACY - 0.001, True)):
        memory = machine.Memory(24 * GIB, int(room.needed * share), None)
        monkeypatch.setattr(machine, "memory", lambda memory=memory: memory)
        if refused:
            with pytest.raises(UserError, match="host memory") as caught:
                refuse(tiny(), ())
            assert caught.value.exit_code == 3
        else:
            refuse(tiny(), ())


def test_the_change_that_is_offered_fits():
    config = tiny("train.batch=1000000")
    with pytest.raises(UserError) as caught:
        refuse(config, ())
    words = caught.value.hint.split()
    batch = words[words.index("--batch") + 1]
    stage = words[words.index("--stage") + 1] if "--stage" in words else 0
    sets = [word for flag, word in zip(words, words[1:], strict=False) if flag == "--set"]
    assert preflight(tiny(f"train.batch={batch}", f"zero.stage={stage}", *sets), ()).fits


def test_checkpoints_and_buffers_on_demand_refuse_no_run():
    saving = tiny("checkpoint.every=1", "checkpoint.buffer=100GiB")
    assert preflight(saving, ()).rooms == preflight(tiny(), ()).rooms


def test_gpus_are_compared_by_rank_and_shared_ones_divided(monkeypatch):
    gpus = [Gpu("NVIDIA H100", 80 * GIB)] * 2
    [room, _] = preflight(tiny(), gpus).rooms
    assert room.tier == "hbm" and 78 * GIB < room.available < 80 * GIB
    # Eight ranks on machines of two GPUs: four such nodes, unless ranks share a GPU.
    eight = configs.load("tiny", ["parallel.ranks=8"], {})
    assert preflight(eight, gpus).rooms[0].available == room.available
    monkeypatch.setenv("ZEROCLI_SHARE_GPU", "1")
    assert preflight(eight, gpus).rooms[0].available == room.available // 4
    # The cap of torch's allocator is beside the context and NCCL.
    capped = preflight(tiny("train.gpu_memory=2GiB"), gpus).rooms[0]
    assert 3 * GIB < capped.available < 3.5 * GIB


def test_disks_of_one_file_system_count_once(tmp_path):
    paths = f"{tmp_path}/a,{tmp_path}/b"
    config = tiny("zero.stage=3", "offload.placement=nvme", f"offload.nvme_path={paths}")
    [room] = [room for room in preflight(config, ()).rooms if room.tier == "nvme"]
    assert room.available == pytest.approx(machine.disk(tmp_path)[1], rel=0.05)


def test_blocks_that_may_be_compiled_are_not_refused_for_what_eager_ones_keep():
    eager = configs.load("tiny", ["parallel.ranks=1", "train.batch=4000", "model.compile=false"], {})
    auto = configs.load("tiny", ["parallel.ranks=1", "train.batch=4000", "model.compile=auto"], {})
    [room] = [each for each in preflight(eager, [Gpu("NVIDIA H100", 80 * GIB)]).rooms if each.tier == "hbm"]
    smaller = [Gpu("NVIDIA H100", int(0.8 * room.needed))]
    with pytest.raises(UserError, match="does not fit this machine"):
        refuse(eager, smaller)
    refuse(auto, smaller)


def test_a_batch_that_no_machine_holds_is_refused_also_for_the_code_of_transformers(tmp_path, capsys):
    """Nothing is built for it: the config.json says how wide and deep the model is."""
    pytest.importorskip("transformers")
    config = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    words = ["train", str(tmp_path / "config.json"), "--ranks", "2", "--seq", "64", "--run-dir", str(tmp_path / "run")]
    assert cli.run([*words, "--batch", "100000000"]) == 3
    said = capsys.readouterr().err
    assert "does not fit this machine: host memory: " in said and "inputs of its blocks alone" in said
    assert not (tmp_path / "run").exists()
    most = int(said.partition("try: --batch ")[2].split()[0])
    there = machine.memory().available
    assert there * 0.5 < most * 2 * 4 * 64 * 64 * 4 <= there * 1.5
