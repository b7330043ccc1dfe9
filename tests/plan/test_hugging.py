"""Laws: any config of transformers is planned; its parameters are counted exactly, with transformers and without."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS
from hf_drawn import draw

from zerocli.cli import main as cli
from zerocli.config import Config, hub
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.errors import ConfigError, UserError
from zerocli.layout.recompute import Recompute
from zerocli.plan.blocks import hugging
from zerocli.plan.blocks.families import FAMILIES, read_shape
from zerocli.plan.blocks.fields import NoFormula
from zerocli.plan.blocks.inputs import read_source
from zerocli.plan.measure import LiveBytes
from zerocli.plan.models.resolve import Traces
from zerocli.plan.setup import Setup

pytest.importorskip("transformers")

FORMULAS = [name for name, values in CONFIGS.items() if values["model_type"] in FAMILIES]
QUICK = ("falcon-40b", "gemma2", "olmo2", "cohere", "bloom", "stablelm-parallel")
QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
LARGE = (
    *QWEN,
    "gemma2",
    "phi3",
    "olmo",
    "olmo2",
    "starcoder2",
    "granite",
    "stablelm",
    "cohere",
    "glm4",
    "smollm3",
    "gptj",
)
"""Also compared at their default size: that of a released model."""


def some(names: list[str], quick: tuple[str, ...]) -> list[Any]:
    """Return the names as parameters of a test; those that are not quick are run by the long set."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]


def count(values: dict[str, Any]) -> int:
    """Return the parameters of transformers' own model."""
    model = hugging.build(hub.read_config(hub.ConfigFile(values, {}, "config.json")))
    assert all(p.is_meta for p in model.parameters())
    return sum(p.numel() for p in model.parameters())


def fit(values: dict[str, Any], folder: Path, capsys: Any, *words: str) -> tuple[int, dict[str, Any], str]:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    code = cli.run(["fit", str(path), "--ranks", "2", "--stage", "3", "--json", *words])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {}, captured.err


@pytest.mark.parametrize("name", some(FORMULAS, QUICK))
def test_a_formula_counts_what_transformers_builds(name):
    assert read_shape(CONFIGS[name], {}, name).numel == count(CONFIGS[name])


@pytest.mark.parametrize("name", some(list(LARGE), ("gemma2", "glm4", *QWEN)))
def test_defaults_are_those_of_transformers(name):
    assert read_shape({"model_type": name}, {}, name).numel == count({"model_type": name})


def without(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    """Return the small config of a family without some keys, and with others."""
    return {key: value for key, value in CONFIGS[name].items() if key not in keys} | more


FIELDS: dict[str, dict[str, Any]] = {
    "the head_dim of qwen3_moe is not fixed": without("qwen3_moe", "head_dim"),
    "qwen3_moe has 4 kv heads": without("qwen3_moe", "num_key_value_heads", num_attention_heads=8),
    "qwen2_moe has 16 kv heads": without("qwen2_moe", "num_key_value_heads", num_attention_heads=32),
    "qwen3 has 32 kv heads": without("qwen3", "num_key_value_heads", num_attention_heads=64),
    "null kv heads are heads": CONFIGS["smollm3"] | {"num_key_value_heads": None, "num_attention_heads": 8},
    "phi has a head_dim": CONFIGS["phi"] | {"head_dim": 24},
    "stablelm has no head_dim": CONFIGS["stablelm"] | {"head_dim": 24},
    "opt without weights in norms": CONFIGS["opt"] | {"layer_norm_elementwise_affine": False},
    "mixtral has no mlp_bias": CONFIGS["mixtral"] | {"mlp_bias": True},
    "qwen2_moe has no mlp_bias": CONFIGS["qwen2_moe"] | {"mlp_bias": True},
    "qwen3_moe has no mlp_bias": CONFIGS["qwen3_moe"] | {"mlp_bias": True},
    "qwen2_moe has a qkv_bias": CONFIGS["qwen2_moe"] | {"qkv_bias": False},
    "falcon has no n_layer": without("falcon", "num_hidden_layers", n_layer=2),
    "gpt2 by other names": without("gpt2", "n_embd", "n_layer", "n_head", hidden_size=48, num_hidden_layers=2)
    | {"num_attention_heads": 2, "max_position_embeddings": 40},
    "another name comes first": CONFIGS["bloom"] | {"n_embed": 48, "num_hidden_layers": 2},
    "experts by another name": without("gpt_oss", "num_local_experts", num_experts=3),
    "heads that do not divide the width": without("cohere", hidden_size=36, num_attention_heads=8),
    "latent heads do not divide the width": CONFIGS["deepseek_v3"] | {"num_attention_heads": 6},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_formula_reads_fields_as_transformers_does(name):
    assert read_shape(FIELDS[name], {}, name).numel == count(FIELDS[name])


UNCOUNTED = {
    "add_cross_attention": CONFIGS["gpt2"] | {"add_cross_attention": True},
    "mlp_bias": CONFIGS["deepseek_v2"] | {"mlp_bias": True},
}


@pytest.mark.parametrize("field", UNCOUNTED)
def test_transformers_builds_what_a_formula_does_not_count(field, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(UNCOUNTED[field]))
    source = read_source(str(tmp_path / "config.json"), [], {})
    assert source.shape is None and source.file is not None and source.config.train.seq == 64
    assert count(dict(source.file.values)) > count(UNCOUNTED[field] | {field: False})
    monkeypatch.setattr(hub, "installed", lambda: False)
    code, _, err = fit(UNCOUNTED[field], tmp_path, capsys)
    assert code == 2 and f"{field} true is not counted" in err and "zerocli[hf]" in err


CANNOT_RUN: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2": (without("qwen2", "num_key_value_heads"), "num_key_value_heads is missing, and the family's default 32"),
    "qwen3": (without("qwen3", "num_key_value_heads"), "num_key_value_heads is missing, and the family's default 32"),
    "experts": (without("qwen3_moe", "num_experts_per_tok"), "the family's default 8 is more than 4"),
    "norms": (CONFIGS["falcon"] | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
    "sequential": (CONFIGS["falcon-40b"] | {"parallel_attn": False}, "parallel_attn is false"),
    "kv heads": (CONFIGS["falcon"] | {"num_kv_heads": 2, "multi_query": False}, "num_kv_heads is not num_att"),
    "odd kv heads": (CONFIGS["falcon-40b"] | {"num_kv_heads": 3}, "num_kv_heads 3 does not divide"),
    "phi": (CONFIGS["phi"] | {"head_dim": 24, "qk_layernorm": True}, "the norms of qk_layernorm"),
}


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_a_model_that_transformers_builds_but_cannot_run_is_refused(name):
    import torch

    values, fact = CANNOT_RUN[name]
    with pytest.raises(ConfigError, match=fact):
        read_shape(values, {}, "config.json")
    meta = hugging.build(hub.read_config(hub.ConfigFile(values, {}, "config.json")))
    kind: Any = type(meta)
    with pytest.raises((RuntimeError, AttributeError, NameError)):
        kind(meta.config)(input_ids=torch.zeros((1, 4), dtype=torch.int64), use_cache=False)


KNOWN = ("does not divide", "is more than", "such blocks", "qk_layernorm")
"""Reasons for which a config is refused that transformers builds: the cases above."""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_config_of_a_family_is_counted_as_transformers_builds_it(family, seed):
    rng, built = random.Random(f"{family} {seed}"), 0
    while built < 40:
        values = draw(family, rng)
        try:
            expected = count(values)
        except UserError:
            continue
        built += 1
        try:
            assert read_shape(values, {}, "config.json").numel == expected, values
        except NoFormula as error:
            assert any(error.problems[0].fact.startswith(field) for field in UNCOUNTED), values
        except ConfigError as error:
            assert any(known in str(error) for known in KNOWN), (str(error), values)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("family", [["llama"], {"llama": 1}, []], ids=str)
def test_a_model_type_of_another_type_is_refused(family, installed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hub, "installed", lambda: installed)
    for more in ({}, {"text_config": {"model_type": family}}):
        code, _, err = fit(CONFIGS["llama"] | more | {"model_type": family}, tmp_path, capsys)
        assert code == 2 and f"model_type {json.dumps(family)} is not" in err


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_more_experts_than_any_model_has_are_refused(name):
    """Each has parameters of its own in a plan: counting them would take forever."""
    values = {key: 10**9 if key in ("num_experts", "n_routed_experts") else x for key, x in CONFIGS[name].items()}
    values.pop("num_local_experts", None)
    with pytest.raises(ConfigError, match="experts 1000000000 is not between 1 and"):
        read_shape(values, {}, "config.json")


@pytest.mark.parametrize("name", some(list(CONFIGS), ("vit", "t5")))
def test_every_family_is_planned_with_its_exact_count(name, tmp_path, capsys):
    code, answer, _ = fit(CONFIGS[name], tmp_path, capsys, "--seq", "16")
    assert code == 0
    assert answer["model"]["parameters"] == count(CONFIGS[name]) and answer["model"]["whole"]
    rows = {row["category"]: row["bytes"] for row in answer["candidates"][0]["rows"] if row["tier"] == "hbm"}
    assert rows["activations"] > 0


@pytest.mark.parametrize("name", some(FORMULAS, ("falcon-40b", "gemma2")))
def test_a_formula_scales_and_is_replayed(name, tmp_path, capsys):
    """Every arrangement of norms is replayed, with recomputation too; twice the width is the same family."""
    code, answer, _ = fit(CONFIGS[name], tmp_path, capsys, "--seq", "16", "--set", "activations.policy=recompute")
    assert code == 0 and answer["model"]["whole"]
    shape = read_shape(CONFIGS[name], {}, name)
    wide = shape.scaled(shape.layers, 2 * shape.hidden)
    assert (wide.q_norm == wide.width_q) == (shape.q_norm == shape.width_q) and wide.numel > shape.numel


def test_without_transformers_formulas_count_and_others_are_refused(monkeypatch, tmp_path, capsys):
    expected = count(CONFIGS["gemma3"]["text_config"] | {"model_type": "gemma3_text"})
    monkeypatch.setattr(hub, "installed", lambda: False)
    code, answer, _ = fit(CONFIGS["gemma3"], tmp_path, capsys)
    assert code == 0 and answer["model"]["parameters"] == expected
    assert any("the text model alone" in note for note in answer["notes"])
    code, _, err = fit(CONFIGS["vit"], tmp_path, capsys)
    assert code == 2 and 'model_type "vit" is not supported' in err and "zerocli[hf]" in err


def test_a_broken_transformers_is_named_and_formulas_go_on_without_it(tmp_path):
    package = tmp_path / "broken" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise ImportError("no module named other")')
    paths = os.pathsep.join(map(str, (package.parent, Path(__file__).parents[2])))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}

    commands = []
    for name, *words in (("gemma2",), ("vit",), ("gemma2", "--trace")):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name]))
        commands.append(["fit", str(path), "--ranks", "2", "--stage", "3", *words])
    code = f"from zerocli.cli.main import run; codes = [run(words) for words in {commands}]; print(codes)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("[0, 2, 2]\n") and "a bug in zerocli" not in done.stderr
    assert done.stderr.count("but cannot be imported: ImportError: no module named other") == 2
    assert str(package) in done.stderr and "pip install 'zerocli[hf]'" in done.stderr


def test_code_that_comes_with_a_model_is_not_run(tmp_path, capsys):
    code, _, err = fit({"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}}, tmp_path, capsys)
    assert code == 2 and "auto_map names code that comes with the model, which is not run" in err
    values = CONFIGS["gemma3"] | {"attn_implementation": "some/kernel", "auto_map": {"AutoModel": "modeling.Mine"}}
    config = hub.read_config(hub.ConfigFile(values, {}, "config.json"))
    assert hugging.build(config).config._attn_implementation in ("sdpa", "eager")


def test_a_model_that_cannot_be_traced_is_counted(tmp_path, capsys, monkeypatch):
    """Mamba without its kernels loops over tokens: too many operations for fake tensors."""
    monkeypatch.setattr("zerocli.plan.models.fake_run.MAX_OPERATIONS", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # another test may have kept a trace of it
    code, answer, _ = fit(CONFIGS["mamba"], tmp_path, capsys, "--seq", "16")
    assert code == 0 and answer["model"]["parameters"] == count(CONFIGS["mamba"]) and not answer["model"]["whole"]
    assert any("activations are not counted" in note for note in answer["notes"])


@pytest.mark.parametrize("most", range(288, 291))
def test_a_trace_that_is_too_long_ends_with_an_error_wherever_it_is(most, monkeypatch):
    """From inside some operations an exception would end the process: here every other number of operations did."""
    from zerocli.plan.models.record import record
    from zerocli.plan.models.resolve import loss

    monkeypatch.setattr("zerocli.plan.models.fake_run.MAX_OPERATIONS", most)
    config = hub.read_config(hub.ConfigFile(CONFIGS["mamba"], {}, "config.json"))
    with pytest.raises(RuntimeError, match=f"more than {most} operations"):
        record("mamba", hugging.build(config), Setup(ranks=2, stage=3, batch=2, seq=16), loss)


def test_sizes_that_no_model_has_are_refused():
    values = CONFIGS["mamba"] | {"num_hidden_layers": 10**9}
    with pytest.raises(ConfigError, match="num_hidden_layers 1000000000 is more than"):
        hub.read_config(hub.ConfigFile(values, {}, "config.json"))


@pytest.mark.parametrize("name", some(["gemma2", "llama", "falcon-rw", "gpt_neox", "bert", "vit"], ("llama",)))
def test_a_traced_model_takes_what_the_engine_takes(name):
    """Of five blocks three are traced; the engine's steps are real."""
    from zerocli.engine.engine import Engine
    from zerocli.engine.settings import Settings
    from zerocli.plan.measure import LiveBytes
    from zerocli.plan.models.resolve import loss
    from zerocli.plan.models.traced import trace

    deep = {key: 5 for key in ("num_hidden_layers", "num_layers", "n_layer") if key in CONFIGS[name]}
    config = hub.read_config(hub.ConfigFile(CONFIGS[name] | deep, {}, "config.json"))
    asked = Setup(ranks=1, ranks_per_node=1, batch=3, seq=48, device="cpu", precision="fp32")
    traced = trace(name, lambda: hugging.build(config), asked, loss)
    for stage, recompute in ((0, False), (2, True), (3, Recompute(2, 2))):
        given = {"stage": stage, "recompute": recompute}
        with LiveBytes() as live:
            engine = Engine(hugging.build(config), Settings(**given, precision="fp32", clip=1.0, device="cpu"))
            live.peak = live.nbytes
            for _ in range(2):
                batch = hugging.batch_of(engine.model, asked.batch, asked.seq)
                engine.backward(hugging.loss_of(engine(**batch)))
                engine.step()
        engine.close()
        planned = traced.plan(dataclasses.replace(asked, **given)).allocated
        assert live.peak * 0.995 <= planned <= live.peak * 1.01, (stage, recompute)


def test_a_trace_is_kept_for_its_own_batch_sequence_precision_and_device():
    file = hub.ConfigFile(CONFIGS["bert"], {}, "config.json")
    traces, asked = Traces("bert", file, Config()), Setup(batch=2, seq=16)
    others = [{"batch": 3}, {"seq": 32}, {"precision": "fp32"}, {"device": "cpu", "precision": "bf16"}]
    assert len({traces._path(dataclasses.replace(asked, **each)) for each in [{}, *others]}) == 5
    assert traces._path(dataclasses.replace(asked, stage=3, ranks=4)) == traces._path(asked)


def test_a_trace_in_the_cache_is_as_good_as_a_new_one_and_needs_no_torch(tmp_path, capsys, monkeypatch):
    """A file that is damaged is traced again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stated = CONFIGS["bert"] | {"max_position_embeddings": 16}
    found = [fit(stated, tmp_path, capsys)[1]["candidates"]]
    (kept,) = (tmp_path / "cache" / "zerocli" / "traces").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("zerocli.plan.models.resolve.Traces._trace", lambda *given: pytest.fail("traced again"))
        patched.setattr(hub, "read_config", lambda *given: pytest.fail("transformers was imported to read the file"))
        found += [fit(stated, tmp_path, capsys, *seq)[1]["candidates"] for seq in ((), ("--seq", "16"))]
    kept.write_text("{}")
    found.append(fit(stated, tmp_path, capsys)[1]["candidates"])
    assert found[0] and all(each == found[0] for each in found)


def test_what_all_blocks_of_a_t5_have_is_planned_once():
    """The encoder's output and the table of distances, and the one gradient of each: nothing grows with the depth."""
    from zerocli.plan.models.resolve import loss
    from zerocli.plan.models.traced import trace

    over = []
    for layers in (4, 6):
        values = CONFIGS["t5"] | {"num_layers": layers, "num_decoder_layers": layers}
        config = hub.read_config(hub.ConfigFile(values, {}, "config.json"))
        given = {"stage": 2, "precision": "fp32", "recompute": True}
        setup = Setup(ranks=1, ranks_per_node=1, batch=3, seq=48, device="cpu", **given)
        planned = trace("t5", lambda config=config: hugging.build(config), setup, loss).plan(setup).allocated
        live = LiveBytes()
        with live:
            engine = Engine(hugging.build(config), Settings(**given, clip=1.0, device="cpu"))
            live.peak = live.nbytes
            for _ in range(2):
                engine.backward(hugging.loss_of(engine(**hugging.batch_of(engine.model, 3, 48))))
                engine.step()
        engine.close()
        over.append(planned - live.peak)
    assert over[0] >= 0 and abs(over[1] - over[0]) <= 8192, over
