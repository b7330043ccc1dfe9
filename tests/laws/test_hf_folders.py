"""A Hugging Face folder in, trained as transformers' own module, a folder out: the same logits before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import ARCHITECTURES, tokens, write
from ranks import run_ranks

from zerocli import config as configs
from zerocli.checkpoint import Saver, source_files
from zerocli.checkpoint.imports import load_weights
from zerocli.cli import main as cli
from zerocli.config import Config, hub, to_dict
from zerocli.engine.engine import Engine
from zerocli.errors import Refused, UserError
from zerocli.models import build_model, transformers_model
from zerocli.run import engines
from zerocli.run.steps import micro_step

transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
THEIRS = ["model.code=transformers"]
Case = tuple[torch.Tensor, torch.Tensor, list[float]]


def opened(folder: str, stage: int, *sets: str, **changes: Any) -> tuple[Config, Engine]:
    config = configs.load(folder, [*THEIRS, "train.seq=12", "optimizer.lr=0.01", *sets])
    engine = engines.make_engine(config, stage=stage, empty=True, **changes)
    load_weights(engine, config.train.init_from, config.model)
    return config, engine


def trained(folder: str, run: str, stage: int) -> Case:
    """Return the logits before and after two steps, and the losses; rank by rank the batch is the same in all."""
    import torch.distributed as dist

    config, engine = opened(folder, stage)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    given = tokens()
    mine = given[rank * len(given) // world : (rank + 1) * len(given) // world]

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return engine.model.eval()(given[:, :-1])

    before, losses = logits(), []
    engine.model.train()
    for step in range(2):
        losses.append(micro_step(engine, (mine[:, :-1], mine[:, 1:]), (0, step)).item())
        engine.step()
    if run:
        if rank == 0:
            Path(run).mkdir()
            source_files.keep(config, engine.model, Path(run))
        saver = Saver(engine, Path(run) / "checkpoints", asynchronous=False)
        saver.save(2, {"config": to_dict(config), "samples": 0})
        saver.close()
        assert saver.failure is None, saver.failure
    after = logits()
    engine.close()
    return before, after, losses


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Return what each test needs of two ranks: they import transformers once."""
    found: dict[str, Any] = {name: trained(f"{folder}/{name}", f"{folder}/run-{name}", 3) for name in ARCHITECTURES}
    found["routed"] = [routed(f"{folder}/routed", stage) for stage in (1, 3)]
    found["random"] = {name: random_start(f"{folder}/bare-{name}.json", 3) for name in ("llama", "gemma2")}
    return found


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    for family in ARCHITECTURES:
        write(family, folder / family, torch.bfloat16 if family == "phi3" else torch.float32)
    write("mixtral", folder / "routed", output_router_logits=True, router_aux_loss_coef=0.5)
    for family in ("llama", "gemma2"):
        (folder / f"bare-{family}.json").write_bytes((folder / family / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def sharded(there) -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, str(there))


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def labelled(given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tokens and targets as transformers takes them: it would shift labels by itself."""
    targets = given[:, 1:].contiguous()
    return {"input_ids": given[:, :-1], "labels": targets, "shift_labels": targets}


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_transformers_before_and_after_the_round_trip(there, sharded, family):
    before, after, losses = sharded[0][family]
    given = tokens()
    began = theirs(there / family)
    with torch.no_grad():
        output = began(**labelled(given[:2]))
        assert close(began(given[:, :-1]).logits, before)
    assert losses[0] == pytest.approx(output.loss.item(), rel=1e-5)
    out = there / f"out-{family}"
    assert cli.run(["export", str(there / f"run-{family}"), str(out), "--dtype", "fp32"]) == 0
    came = theirs(out)
    with torch.no_grad():
        assert close(came(given[:, :-1]).logits, after)
        assert not close(before, after)  # something was trained
    greedy = came.generate(given[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=False)
    assert greedy.tolist() == by_hand(came, given[:1, :4], greedy.shape[1])


def test_an_export_has_the_dtype_of_the_folder(there, sharded, capsys):
    out = there / "out-as-begun"
    assert cli.run(["export", str(there / "run-phi3"), str(out)]) == 0
    assert "bf16 (as the folder that the run began from)" in capsys.readouterr().err
    assert list(hub.stored(str(out))) == ["BF16"]


def by_hand(model: Any, start: torch.Tensor, length: int) -> list[list[int]]:
    """Return the greedy continuation, by our own module built from the exported weights."""
    config = configs.load(model.config._name_or_path, [*THEIRS, "train.seq=12"])
    ours = build_model(config.model, 12, "cpu").eval()
    ours.load_state_dict(model.state_dict())
    with torch.no_grad():
        while start.shape[1] < length:
            start = torch.cat([start, ours(start)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return start.tolist()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_export_has_the_names_configs_and_tokenizer_of_its_folder(there, sharded, family):
    out, began = there / f"files-{family}", there / family
    assert cli.run(["export", str(there / f"run-{family}"), str(out), "--dtype", "bf16"]) == 0
    indices = [json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (began, out)]
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (began, out))
    assert other.pop("dtype") == "bfloat16" and one.pop("dtype") and one == other
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (began / name).read_bytes(), name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_two_ranks_at_stage_3_train_as_one_process_does(there, sharded, family):
    before, after, losses = trained(str(there / family), "", 0)
    assert close(before, sharded[0][family][0]) and torch.equal(sharded[0][family][1], sharded[1][family][1])
    assert torch.allclose(after, sharded[0][family][1], rtol=1e-3, atol=1e-4)
    assert sum(losses) / 2 == pytest.approx(sum(sum(rank[family][2]) for rank in sharded) / 4, rel=1e-5)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_attention_and_positions_stay_within_packed_documents_or_packing_is_refused(there, family):
    model = transformers_model.build(str(there / family), 12, "cpu").eval()
    given = tokens(2)[:, :-1]
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with torch.no_grad():
        if family == "falcon":
            with pytest.raises(Refused, match="does not keep packed documents apart"):
                model(given, None, positions)
            return
        packed = model(given, None, positions)
        assert close(packed[:, :5], model(given[:, :5])) and close(packed[:, 5:], model(given[:, 5:]))
        assert not close(packed, model(given))
        targets = tokens(2)[:, 1:].clone()
        targets[:, :6] = -100
        expected = torch.nn.functional.cross_entropy(packed[:, 6:].flatten(0, 1), targets[:, 6:].flatten())
        assert model(given, targets, positions).item() == pytest.approx(expected.item(), rel=1e-5)
        assert model(given, torch.full_like(targets, -100)).item() == 0


def test_the_loss_is_computed_by_the_head_only_where_logits_are_nothing_else(there):
    plain = {family for family in ARCHITECTURES if transformers_model.build(str(there / family), 8).computes_loss}
    assert plain == set(ARCHITECTURES) - {"gemma2", "gptj"}  # a cap on the logits; a bias


# -- what a config turns on --------------------------------------------------------------------------------------------


def routed(folder: str, stage: int) -> tuple[float, dict[str, torch.Tensor]]:
    _, engine = opened(folder, stage)
    given = tokens()
    loss = micro_step(engine, (given[:, :-1], given[:, 1:]), (0, 1)).item()
    engine.step()
    return loss, engine.state_dict()


def test_the_balance_of_experts_is_part_of_the_loss_if_the_config_says_so(there, sharded):
    folder, given = there / "routed", tokens()
    began = theirs(folder).train()
    output = began(**labelled(given))
    without = began(**labelled(given), output_router_logits=False).loss.item()
    optimizer = torch.optim.AdamW(
        [{"params": [p]} | ({"weight_decay": 0.0} if p.dim() < 2 else {}) for p in began.parameters()],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(began.parameters(), 1.0)
    optimizer.step()
    expected = began.state_dict()
    for loss, state in [routed(str(folder), 0), *sharded[0]["routed"]]:
        assert loss == pytest.approx(output.loss.item(), rel=1e-5) and abs(loss - without) > 0.1
        assert all(torch.allclose(state[name], expected[name], atol=2e-4) for name in expected)


def test_experts_of_any_width_compute_in_16_bits(tmp_path):
    """torch's grouped product takes rows of a multiple of 16 bytes only."""
    path = write("mixtral", tmp_path, intermediate_size=20)
    model = transformers_model.build(str(path), 12, "cpu").bfloat16()
    assert model(tokens()[:, :-1], tokens()[:, 1:]).isfinite()


def test_dropout_of_the_config_counts(tmp_path):
    folder = write("gpt2", tmp_path / "gpt2", resid_pdrop=0.5)
    model = transformers_model.build(str(folder), 12, "cpu")
    given = tokens(1)[:, :-1]
    assert model.training and not torch.equal(model(given), model(given))


# -- random weights ----------------------------------------------------------------------------------------------------


def random_start(path: str, stage: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    config = configs.load(path, [*THEIRS, "train.seq=12", "train.seed=7"])
    engine = engines.make_engine(config, stage=stage)
    with torch.no_grad():
        return engine.state_dict(), engine.model.eval()(tokens()[:, :-1])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_bare_config_gives_the_same_random_weights_for_any_number_of_ranks(there, sharded, family):
    path = there / f"bare-{family}.json"
    assert configs.load(str(path), THEIRS).train.init_from == ""
    alone, logits = random_start(str(path), 0)
    for state, same in (rank["random"][family] for rank in sharded):
        assert close(logits, same)  # non-persistent buffers, such as rotary tables, are right too
        assert state.keys() == alone.keys() and all(torch.equal(state[name], alone[name]) for name in alone)
    matrix = next(value for name, value in alone.items() if "q_proj" in name)
    assert 0.015 < matrix.std() < 0.025  # transformers' own initialisation


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_loaded_get_the_fact(there, tmp_path):
    import safetensors.torch

    folder = write("qwen3", tmp_path / "missing")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.q_norm.weight"
    file = folder / index["weight_map"].pop(name)
    values = safetensors.torch.load_file(file)
    del values[name]
    safetensors.torch.save_file(values, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="has no values for model.layers.1.self_attn.q_norm.weight"):
        opened(str(folder), 0)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight has shape \[120, 32\], and .* \[130, 32\]"):
        wrong = json.loads((there / "qwen3/config.json").read_text()) | {"vocab_size": 130}
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        config = configs.load(str(tmp_path / "config.json"), THEIRS)
        load_weights(engines.make_engine(config), str(there / "qwen3"), config.model)
    with pytest.raises(UserError, match="t5 is an encoder-decoder"):
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
        engines.make_model(configs.load(str(tmp_path / "config.json")))
    with pytest.raises(UserError, match="bert attends to both sides"):
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        engines.make_model(configs.load(str(tmp_path / "config.json")))


def test_a_tied_weight_may_be_stored_twice_if_it_is_the_same(tmp_path):
    import safetensors.torch

    folder = write("qwen2", tmp_path / "qwen2")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    table = "model.embed_tokens.weight"
    values = safetensors.torch.load_file(folder / index["weight_map"][table])[table]
    for twin, fits in ((values.clone(), True), (values + 1, False)):
        safetensors.torch.save_file({"lm_head.weight": twin}, folder / "twin.safetensors")
        index["weight_map"]["lm_head.weight"] = "twin.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if fits:
            assert torch.equal(opened(str(folder), 0)[1].state_dict()["lm_head.weight"], values)
        else:
            with pytest.raises(UserError, match="differ, and the model's config.json says that they are one"):
                opened(str(folder), 0)
