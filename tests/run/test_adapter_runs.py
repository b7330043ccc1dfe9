"""Runs with adapters: what their checkpoints hold, and what becomes of the base that they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import losses, train

from zerocli.checkpoint.adapters import fingerprint
from zerocli.checkpoint.manifest import read
from zerocli.checkpoint.safetensors import Weights
from zerocli.cli import main as cli
from zerocli.cli.generate import read_config
from zerocli.run import generate
from zerocli.run.engines import make_engine, make_model

LORA = ("lora.rank=2", "optimizer.schedule=constant", "optimizer.lr=0.01", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The weights of a short run, as a folder."""
    root = tmp_path_factory.mktemp("base")
    assert train(root / "run", "train.steps=2", world=1).codes == [0]
    assert cli.run(["export", str(root / "run"), str(root / "model")]) == 0
    return root / "model"


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory) -> Path:
    """A run with adapters at stage 2, with its checkpoints of steps 2, 4 and 6."""
    run = tmp_path_factory.mktemp("whole") / "run"
    ended = train(run, *LORA, f"train.init_from={base}", "zero.stage=2")
    assert ended.codes == [0, 0], ended.said
    assert "adapters: rank 2, alpha 4, on all-linear" in ended.said[0]
    return run


def again(whole: Path, folder: Path, step: int = 2) -> Path:
    """Return a copy of the run as it was after a step."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return folder


def test_a_checkpoint_holds_adapters_and_their_states_alone_and_names_the_base(whole, base):
    manifest = read(whole / "checkpoints" / "step-00000006")
    assert manifest.values["base"] == fingerprint(str(base))
    assert all(".lora." in name for name in manifest.tensors if name.startswith(("parameters/", "optimizer/")))
    kinds = {name.partition(".lora.")[0].rpartition("/")[0] for name in manifest.tensors if ".lora." in name}
    assert {"parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq"} == kinds
    assert sum(".lora." in name for name in manifest.tensors) == 3 * 2 * 4 * 2  # arrays, blocks, layers, matrices


@pytest.mark.parametrize(
    "sets,world",
    [
        (("zero.stage=3", "offload.placement=params=cpu,optimizer=cpu"), 2),
        (("zero.stage=0", "train.batch=4"), 1),
    ],
)
def test_a_run_goes_on_at_another_stage_placement_or_number_of_ranks(whole, base, tmp_path, sets, world):
    run = again(whole, tmp_path / "run")
    ended = train(run, *LORA, f"train.init_from={base}", *sets, world=world, resume=True)
    assert ended.codes == [0] * world, ended.said
    assert "resuming after step 2" in ended.said[0]
    exact = world == 2
    assert losses(run) == (losses(whole) if exact else pytest.approx(losses(whole), rel=1e-5))
    if exact:
        ours, theirs = (read_all(each / "checkpoints" / "step-00000006") for each in (run, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    from zerocli.checkpoint.reader import Reader

    manifest = read(path)
    with Reader(path, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors if ".lora." in name}


def test_another_base_is_refused_and_one_that_moved_is_asked_for(whole, base, tmp_path, capsys):
    run, moved, other = again(whole, tmp_path / "run", 6), tmp_path / "moved", tmp_path / "other"
    gone = str(tmp_path / "gone")
    shutil.copytree(base, moved)
    shutil.copytree(base, other)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-2] ^= 64  # of the last element
    (other / "model.safetensors").write_bytes(raw)
    assert fingerprint(str(moved)) == fingerprint(str(base)) != fingerprint(str(other))
    lora = (*LORA, "train.steps=8")
    refused = train(run, *lora, f"train.init_from={other}", world=1, resume=True)
    assert refused.codes == [2] and "trained on another base" in refused.said[0], refused.said
    missing = train(run, *lora, f"train.init_from={gone}", world=1, resume=True)
    assert missing.codes == [2] and "train.init_from=FOLDER" in missing.said[0], missing.said
    assert train(run, *lora, f"train.init_from={moved}", "train.batch=4", world=1, resume=True).codes == [0]

    # What reads the newest checkpoint, whose config names a folder that is gone by now.
    shutil.rmtree(moved)
    out = str(tmp_path / "out")
    for words, said in (
        (["generate", str(run), "x"], "try: --set train.init_from=FOLDER"),
        (["export", str(run), out, "--merge"], "try: --base-dir FOLDER"),
        (["export", str(run), out, "--merge", "--base-dir", str(other)], "holds other weights than those"),
    ):
        assert cli.run(words) == 2, words
        assert said in (told := capsys.readouterr().err) and "Traceback" not in told, told
    assert cli.run(["generate", str(run), "x", "--max-tokens", "3", "--set", f"train.init_from={base}"]) == 0
    made = capsys.readouterr().out
    assert cli.run(["export", str(run), str(tmp_path / "adapter")]) == 0
    beside = ["generate", str(base), "x", "--max-tokens", "3", "--set", "data.tokenizer=bytes"]
    assert cli.run([*beside, "--lora", str(tmp_path / "adapter")]) == 0
    assert capsys.readouterr().out == made
    assert cli.run([*beside, "--lora", "2"]) == 2
    assert "holds no adapters, and new ones of rank 2 would add nothing" in capsys.readouterr().err
    assert cli.run(["generate", str(run), "x", "--set", f"train.init_from={other}"]) == 2
    assert "trained on another base" in capsys.readouterr().err
    assert cli.run(["export", str(run), out, "--merge", "--base-dir", str(base)]) == 0
    began, merged = Weights(base), Weights(out)
    changed = {
        n
        for n, (_, e) in began.entries.items()
        if not torch.equal(began.read(n, 0, e.numel), merged.read(n, 0, e.numel))
    }
    assert began.entries.keys() == merged.entries.keys()
    assert changed == {n for n in began.entries if "c_" in n and n.endswith(".weight")}


@pytest.mark.long
def test_a_base_of_random_weights_follows_from_the_seed(tmp_path, capsys):
    """A run without a folder: a resumed one makes its base again, and another seed is another base."""
    run, sets = tmp_path / "run", ("lora.rank=2", "lora.dora=true", "lora.base=nf4")
    ended = train(run, *sets, "train.steps=2", check=2)
    assert ended.codes == [0, 0], ended.said
    manifest = read(run / "checkpoints" / "step-00000002")
    assert manifest.values["base"].startswith("random weights ")
    assert not [name for name in manifest.tensors if name.startswith("parameters/") and ".lora." not in name]
    assert train(run, *sets, "train.steps=3", world=1, resume=True).codes == [0]
    other = train(run, *sets, "train.steps=4", "train.seed=5", world=1, resume=True)
    assert other.codes == [2] and "trained on another base" in other.said[0]
    assert cli.run(["export", str(run), str(tmp_path / "out"), "--merge"]) == 2
    assert "random weights" in capsys.readouterr().err
    assert cli.run(["export", str(run), str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert about["use_dora"] and about["base_model_name_or_path"] is None and about["fan_in_fan_out"]
    names = Weights(tmp_path / "out" / "adapter_model.safetensors").entries
    assert "base_model.model.transformer.h.1.mlp.c_proj.lora_magnitude_vector" in names


def test_frozen_parameters_stay_as_they_are_and_the_rest_is_trained(base, tmp_path):
    run = tmp_path / "run"
    ended = train(run, f"train.init_from={base}", "train.freeze=wte,h.0", "train.steps=2", world=1)
    assert ended.codes == [0] and "frozen: wte, h.0;" in ended.said[0], ended.said
    assert cli.run(["export", str(run), str(tmp_path / "out")]) == 0
    began, after = Weights(base), Weights(tmp_path / "out")
    for name, (_, entry) in began.entries.items():
        same = torch.equal(began.read(name, 0, entry.numel), after.read(name, 0, entry.numel))
        assert same == (".wte." in name or ".h.0." in name), name
    refused = train(tmp_path / "no", "train.freeze=zzz", world=1)
    assert refused.codes == [2] and "no parameter's name has 'zzz' in it; there are" in refused.said[0]
    nothing = train(tmp_path / "all", "train.freeze=.", world=1)
    assert nothing.codes == [2] and "nothing is left to train" in nothing.said[0]


def test_a_base_in_four_bits_is_merged_and_continued_as_it_was_trained(base, tmp_path):
    """The merged matrices are those of the decoded base with the adapters added, not of the folder's own weights."""
    run, out = tmp_path / "run", tmp_path / "out"
    ended = train(
        run, *LORA, f"train.init_from={base}", "lora.base=nf4", "zero.stage=3", "offload.placement=params=cpu"
    )
    assert ended.codes == [0, 0] and "stored as nf4" in ended.said[0], ended.said
    assert cli.run(["export", str(run), str(out), "--merge"]) == 0
    given = {"precision": "fp32", "stage": None, "offload": None, "sets": ()}
    config = read_config(str(run), True, given)
    engine = make_engine(config, make_model(config).requires_grad_(False), compile=False)
    generate.load(engine, config, generate.Weights(str(run), True), lambda text: None)
    state, merged, began = engine.state_dict(), Weights(out), Weights(base)
    engine.close()
    for layer, theirs in (("attention.qkv", "attn.c_attn"), ("mlp.down", "mlp.c_proj")):
        matrix = state[f"blocks.1.{layer}.weight"]
        a, b = (state[f"blocks.1.{layer}.lora.all.{each}"] for each in "ab")
        name = f"transformer.h.1.{theirs}.weight"
        found, before = (each.read(name, 0, matrix.numel()).view(matrix.shape[::-1]).t() for each in (merged, began))
        assert torch.allclose(found, matrix + 2 * (b @ a), atol=1e-6)
        assert 0.02 < (matrix - before).norm() / before.norm() < 0.2  # rounded to 4 bits
