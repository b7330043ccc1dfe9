"""LoRA and frozen parameters: the plan compared with the real engine, and counts with those of peft."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from zerocli import config as configs
from zerocli.cli import main as cli
from zerocli.config import LoraConfig, ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.layout.recompute import NOTHING
from zerocli.models import build
from zerocli.models import lora as lora_of_models
from zerocli.plan.blocks.families import read_shape
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.measure import LiveBytes
from zerocli.plan.memory import tape
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.decoder import Decoder
from zerocli.plan.memory.ledger import Ledger, Storage
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.traced import trace
from zerocli.plan.report.preflight import plan_config, preflight
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup, setup_of
from zerocli.profile.document import predict
from zerocli.run.engines import count_parameters, make_model
from zerocli.run.output.report import planned_memory

SMALL = ModelConfig(layers=4, hidden=32, heads=4, vocab=150)


def asked(text: str) -> LoraConfig:
    """Return what `--lora TEXT` asks for; further words are keys."""
    text, *more = text.split(" ")
    return configs.load("tiny", more, {"lora.rank": text}).lora


def adapt(decoder: Any, model: ModelConfig, lora: LoraConfig) -> Any:
    """Give a built-in model adapters, as a run does."""
    lora_of_models.adapt(decoder, lora, lora_of_models.names_there(model))
    return decoder


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"stage": 0}, "4"),
    ({"family": "llama", "kv_heads": 2, "tie": False}, {"stage": 0}, "4"),
    ({"family": "llama"}, {"stage": 1}, "4:q,v"),
    ({}, {"stage": 2}, "4:c_attn"),
    ({"family": "llama", "tie": False}, {"stage": 3}, "8"),
    ({"family": "llama", "tie": False}, {"stage": 2, "recompute": True}, "8"),
    ({"dropout": 0.1}, {"stage": 3, "recompute": True}, "4"),
    (
        {"layers": 2, "hidden": 192, "vocab": 2001, "tie": False},
        {"stage": 3, "gather_buffers": 3, "recompute": True},
        "4",
    ),
    ({"family": "llama"}, {"stage": 3, "offload": "cpu"}, "4:q,v"),
    ({"family": "llama"}, {"stage": 2, "offload": "optimizer=cpu", "recompute": 2}, "4:down"),
    ({"layers": 12}, {"stage": 3, "offload": "params=cpu", "accumulate": 2}, "2:up,out"),
    ({"family": "llama", "tie": False}, {"stage": 3}, "4 lora.dropout=0.1 lora.save_modules=embed_tokens,lm_head"),
    ({}, {"stage": 2}, "4 lora.save_modules=wte"),
    ({"family": "llama", "tie": False}, {"stage": 0}, "4:.*mlp.*_proj lora.save_modules=lm_head"),
    ({"family": "llama", "layers": 3, "hidden": 128}, {"stage": 3, "precision": "bf16"}, "8"),
]


def measured(changes: dict[str, Any], setup: dict[str, Any], text: str, batch: int, seq: int) -> tuple[int, int]:
    """Return the peak of live bytes in two steps of the real engine, and its trained parameters."""
    model = dataclasses.replace(SMALL, **changes)
    live = LiveBytes()
    with live:
        with torch.device("meta"):
            decoder = adapt(build(model, seq, "meta"), model, asked(text))
        engine = Engine(decoder, Settings(**setup, units=decoder.unit_modules(), device="cpu", clip=1.0))
        for _ in range(2):
            for _ in range(setup.get("accumulate", 1)):
                tokens = torch.randint(model.vocab, (2, batch, seq))
                engine.backward(engine(tokens[0], tokens[1]))
            engine.step()
    trained = sum(flat.layout.numel for flat in engine.flats() if flat.trainable)
    engine.close()
    return live.peak, trained


def _measure_all(cases: list, batch: int, seq: int, precision: str) -> list:
    torch.backends.mkldnn.set_flags(_enabled=False)
    return [measured(changes, {"precision": precision} | setup, text, batch, seq) for changes, setup, text in cases]


def planned(changes: dict[str, Any], setup: dict[str, Any], text: str, world: int) -> tuple[Shape, Plan]:
    shape = shape_of(dataclasses.replace(SMALL, **changes), 24).adapted(asked(text))
    given = {"ranks": world, "ranks_per_node": world, "batch": 4, "seq": 24, "device": "cpu", "precision": "fp32"}
    return shape, plan_model(shape, Setup(**(given | setup)))


@pytest.fixture
def adds_in_new_memory(monkeypatch, forget_plans):
    """While `LiveBytes` watches, autograd adds two gradients of one tensor in new memory, always."""
    monkeypatch.setattr(tape, "sys", SimpleNamespace(getrefcount=lambda thing: 3))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_plan_of_adapters_is_what_the_engine_takes(world, adds_in_new_memory):
    cases = CASES if world > 1 else [*CASES[1:8:3], *CASES[10:]]
    ranks = run_ranks(world, _measure_all, cases, 4, 24, "fp32")
    for (changes, setup, text), *found in zip(cases, *ranks, strict=True):
        shape, plan = planned(changes, setup, text, world)
        peak = max(each for each, _ in found)
        assert shape.trainable_numel == found[0][1]
        assert peak <= plan.allocated <= peak * 1.01, (changes, setup, text)


@pytest.mark.parametrize(
    ("setup", "text"),
    [
        ({"stage": 0, "recompute": True}, "4"),  # two gradients of one tensor, the first of which is a view
        # gathered weights: the last layers' backward runs before the block does again
        ({"stage": 3, "offload": "params=cpu", "recompute": True}, "4:up,qkv lora.dropout=0.1"),
    ],
    ids=["views", "gathered"],
)
def test_gradients_at_the_end_of_a_recomputed_block_are_counted(setup, text):
    changes = {"layers": 4, "hidden": 64}
    peak, _ = measured(changes, {"precision": "fp32"} | setup, text, 4, 64)
    shape = shape_of(dataclasses.replace(SMALL, **changes), 64).adapted(asked(text))
    given = {"ranks": 1, "ranks_per_node": 1, "batch": 4, "seq": 64, "device": "cpu", "precision": "fp32"}
    assert peak * 0.995 <= plan_model(shape, Setup(**(given | setup))).allocated <= peak * 1.01


def saved_nbytes(block: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes of distinct storages, parameters and tables left out, that autograd keeps of a call."""
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x)
    del out
    return sum(kept.values())


@pytest.mark.parametrize("width", [4, 2], ids=["fp32", "bf16"])
@pytest.mark.parametrize("text", ["8", "4:q,v", "4:down", "2:up,out", "4 lora.dropout=0.1"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_frozen_block_keeps_what_its_adapters_need(family, text, width):
    model = dataclasses.replace(SMALL, family=family, mlp_hidden=48)
    lora = asked(text if family == "llama" else text.replace("q,v", "qkv"))
    precision, dtype = ("fp32", torch.float32) if width == 4 else ("bf16", torch.bfloat16)
    block = adapt(build(model, 8), model, lora).to(dtype).blocks[0]
    measured = saved_nbytes(block, torch.randn(2, 8, 32, dtype=dtype, requires_grad=True))
    ledger = Ledger()
    recorded = tape.Tape(ledger, lambda unit, grad: None)
    decoder = Decoder(
        shape_of(model, 8).adapted(lora), Setup(batch=2, seq=8, precision=precision, device="cpu"), ledger
    )
    decoder.block(recorded, tape.Tensor(Storage(ledger, 2 * 8 * 32 * width), tape.INPUT), 0)
    kept = {id(storage): storage.nbytes for node in recorded._nodes for storage in node.saved}
    assert sum(kept.values()) == measured


def test_adapters_are_counted_as_peft_counts_them():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    values = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100}
    shape = read_shape(values, {}, "llama")
    own = {key: value for key, value in values.items() if key != "model_type"}
    for text, modules in (
        ("8", "all-linear"),
        ("4:q,v", ["q_proj", "v_proj"]),
        ("2:out,mlp.down_proj", ["o_proj", "down_proj"]),
    ):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**own))
        made = peft.get_peft_model(model, peft.LoraConfig(r=asked(text).rank, target_modules=modules))
        trained, everything = made.get_nb_trainable_parameters()
        adapted = shape.adapted(asked(text))
        assert (adapted.trainable_numel, adapted.numel) == (trained, everything)


@pytest.mark.parametrize(
    ("name", "text", "modules"),
    [
        ("GPT2", "8", ["c_attn", "c_proj", "c_fc"]),
        ("GPT2", "4:c_attn", ["c_attn"]),
        ("Phi3", "8", "all-linear"),
        ("Phi3", "2:qkv,gate_up_proj", ["qkv_proj", "gate_up_proj"]),
        ("GPTNeoX", "8", "all-linear"),
        ("Falcon", "8", "all-linear"),
        ("Bloom", "8", "all-linear"),
        ("CodeGen", "8", "all-linear"),
        ("Glm", "8", "all-linear"),
        ("Glm4", "8", "all-linear"),
    ],
)
def test_one_adapter_for_several_projections_is_counted_as_peft_counts_it(name, text, modules):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 120}
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    lora = asked(text)
    made = peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, target_modules=modules))
    adapted = read_shape(config.to_dict(), {}, config.model_type).adapted(lora)
    assert adapted.trainable_numel == made.get_nb_trainable_parameters()[0]


def ask(capsys, *words):
    code = cli.run(["fit", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_fit_counts_states_of_adapters_alone(capsys):
    """Llama 3 8B with rank 16 on all seven projections trains 41,943,040 parameters."""
    words = ("llama3-8b", "--ranks", "1", "--stage", "0", "--offload", "", "--hardware", "h200")
    _, answer = ask(capsys, *words, "--lora", "16")
    assert answer["model"]["trainable_parameters"] == 41_943_040
    assert answer["model"]["parameters"] == 8_030_261_248 + 41_943_040
    rows = {row["category"]: row["bytes"] for row in answer["candidates"][0]["rows"] if row["tier"] == "hbm"}
    assert rows["parameters"] == pytest.approx(2 * 8_072_204_288, rel=1e-4)
    assert rows["optimizer_states"] == pytest.approx(10 * 41_943_040, rel=1e-3)
    _, saving = ask(capsys, *words, "--lora", "16", "--set", "checkpoint.every=9")
    (saves,) = [row for row in saving["candidates"][0]["rows"] if row["formula"].startswith("checkpoints in")]
    # A base that no folder has is drawn again, and is in no checkpoint either.
    kept = setup_of(configs.load("llama3-8b", ["checkpoint.every=9"])).checkpoints
    assert 12 * 41_943_040 < saves["bytes"] / kept < 12.2 * 41_943_040
    _, whole = ask(capsys, *words)
    assert whole["model"]["trainable_parameters"] == whole["model"]["parameters"] == 8_030_261_248
    few = ("--set", "model.layers=4", "--hardware", "rtx4090")
    code, most = ask(capsys, "llama3-8b", "--lora", "16:q,v", "--ranks", "1", "--max", "batch", *few)
    assert code == 0 and most["max"]["value"] > 1


@pytest.mark.parametrize(
    "sets",
    [["train.freeze=blocks"], ["train.freeze=blocks.3,norm"], ["lora.rank=4", "lora.targets=.*blocks.1.*mlp.up"]],
    ids=str,
)
def test_a_run_that_trains_parts_of_a_model_is_planned_as_it_is(sets):
    """Blocks that differ in what is trained, which formulas take to be alike."""
    config = configs.load("tiny", [*sets, "parallel.ranks=2", "zero.stage=1"])
    model = make_model(config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < trained < sum(p.numel() for p in model.parameters())
    numel, _, counted = count_parameters(config)
    assert (numel, counted) == (sum(p.numel() for p in model.parameters()), trained)
    plan = plan_config(config, "cpu")
    assert plan is not None and plan.num_trained == trained
    assert plan.of("optimizer_states") == pytest.approx(8 * trained / 2, rel=0.02)


def test_a_dry_run_counts_an_encoded_base_as_it_is_stored():
    config = configs.load("llama3-8b", ["lora.rank=16", "lora.base=nf4", "parallel.ranks=1", "train.seq=512"])
    numel, local, trained = count_parameters(config)
    held = planned_memory(config, numel, local, trained)["parameters"]
    plan = plan_config(config, "cpu")
    assert plan is not None and plan.of("parameters") == held["held"] == held["stage_0"] < 0.4 * 2 * numel


def test_every_plan_of_a_run_counts_what_dora_computes_beside(adds_in_new_memory):
    """`train` compares it with the machine, `check` runs it unsharded, `profile` shows it beside what was measured."""
    text = "lora.dora=true lora.rank_pattern=down_proj=16"
    sizes = ("family=llama", "layers=4", "hidden=32", "heads=4", "vocab=150")
    words = [f"model.{size}" for size in sizes] + [*text.split(), "lora.rank=4", "train.batch=4", "train.seq=24"]
    config = configs.load("tiny", [*words, "parallel.ranks=1", "zero.stage=3", "train.precision=fp32"])
    facts = {"ranks": 1, "ranks_per_node": 1, "precision": "fp32", "device": "cpu", "recompute": NOTHING}
    found = (preflight(config, ()).plan, plan_config(config, "cpu"), predict(config, facts)[0])
    peak, _ = measured({"family": "llama"}, {"stage": 3, "precision": "fp32"}, f"4 {text}", 4, 24)
    for plan in found:
        assert plan is not None and peak <= plan.allocated <= peak * 1.01


@pytest.mark.long
def test_fit_counts_what_dora_computes_beside(capsys):
    words = ("tiny", "--lora", "4", "--ranks", "1", "--stage", "0", "--hardware", "h100")
    plain, dora = (ask(capsys, *words, *more)[1]["candidates"][0] for more in ((), ("--set", "lora.dora=true")))
    products = 4 * 8 * 128 * 128 * 2  # of the four projections of a block, at least one more each is kept
    assert dora["peaks"]["steady"] > plain["peaks"]["steady"] + 4 * products


def test_a_built_in_family_of_a_folder_is_traced_with_the_adapters_that_formulas_plan(tmp_path, capsys):
    values = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    values |= {"intermediate_size": 24, "vocab_size": 64, "tie_word_embeddings": False, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    words = (
        str(tmp_path / "config.json"),
        "--lora",
        "2:q_proj,down_proj",
        "--seq",
        "8",
        "--ranks",
        "1",
        "--stage",
        "0",
    )
    plain, traced = (ask(capsys, *words, *more)[1]["model"] for more in ((), ("--trace",)))
    assert traced["trainable_parameters"] == plain["trainable_parameters"] == 2 * 2 * (16 + 16 + 16 + 24)


@pytest.mark.parametrize(
    "words,said",
    [
        (["llama3-8b", "--lora", "0"], "is not a rank"),
        (["llama3-8b", "--lora", "16:qq"], "no block of llama has a projection qq; there are q, k, v, out, gate, up"),
        (["gpt2-124m", "--lora", "16:gate"], "no block of gpt2 has a projection gate"),
        (["llama3-8b", "--lora", "16", "--tp", "2"], "tp 2"),
        (["7.5B", "--lora", "16"], "a bare count has no layers"),
    ],
)
def test_what_is_not_planned_is_refused(words, said, capsys):
    assert cli.run(["fit", *words]) == 2
    assert said in capsys.readouterr().err


def frozen_factory() -> nn.Module:
    """A model with adapters, as a factory would build it."""
    return adapt(build(SMALL, 24, "meta"), SMALL, asked("4:c_attn,up"))


def _measure_factory(setup: dict[str, Any]) -> int:
    torch.backends.mkldnn.set_flags(_enabled=False)
    live = LiveBytes()
    with live:
        with torch.device("meta"):
            decoder: Any = frozen_factory()
        engine = Engine(decoder, Settings(**setup, units=decoder.unit_modules(), device="cpu", clip=1.0))
        for _ in range(2):
            tokens = torch.randint(SMALL.vocab, (2, 4, 24))
            engine.backward(engine(tokens[0], tokens[1]))
            engine.step()
    engine.close()
    return live.peak


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_a_traced_factory_with_frozen_parameters_is_what_the_engine_takes(stage):
    setup = {"stage": stage, "precision": "fp32"}
    peak = max(run_ranks(2, _measure_factory, setup))
    two = Setup(**setup, ranks=2, ranks_per_node=2, batch=4, seq=24, device="cpu")

    def make() -> nn.Module:
        with torch.device("meta"):
            return frozen_factory()

    traced = trace("frozen", make, two)
    plan = traced.plan(two)
    assert traced.trainable_numel == shape_of(SMALL, 24).adapted(asked("4:c_attn,up")).trainable_numel
    assert peak * 0.99 <= plan.allocated <= peak * 1.02, (peak, plan.allocated)


def plain_factory() -> nn.Module:
    """A built-in model, as anybody's factory."""
    return build(SMALL, 24, "meta")


def test_fit_adapts_what_it_traces(tmp_path, monkeypatch, capsys):
    """A factory's model, and a family of transformers that has no formula, get their adapters before the trace."""
    words = (
        "--lora",
        "4:qkv,up",
        "--batch",
        "2",
        "--seq",
        "24",
        "--ranks",
        "1",
        "--stage",
        "0",
        "--precision",
        "fp32",
    )
    _, found = ask(capsys, f"{__name__}:plain_factory", *words, "--hardware", "h100")
    shape = shape_of(SMALL, 24).adapted(asked("4:qkv,up"))
    assert found["model"]["trainable_parameters"] == shape.trainable_numel
    assert found["model"]["parameters"] == shape.numel
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    whole = ("--batch", "2", "--seq", "8", "--ranks", "1", "--stage", "0", "--hardware", "h100")
    _, plain = ask(capsys, str(tmp_path / "config.json"), *whole)
    _, few = ask(capsys, str(tmp_path / "config.json"), *whole, "--lora", "2:in_proj")
    assert few["model"]["trainable_parameters"] == 2 * 2 * (32 + 128)  # two blocks of rank 2
    states = [
        sum(row["bytes"] for row in each["candidates"][0]["rows"] if row["category"] == "optimizer_states")
        for each in (plain, few)
    ]
    assert 0 < states[1] < states[0] / 20


def test_frozen_parameters_of_a_count_have_no_states():
    setup = Setup(stage=2, ranks=2, ranks_per_node=2, precision="bf16")
    rows = {row.category: row.nbytes for row in Counted(1000, 900).plan(setup).rows if row.tier == "hbm"}
    assert rows == {"parameters": 2 * 1000, "gradients": 2 * 100 // 2, "optimizer_states": 12 * 100 // 2}


def test_experts_with_adapters_are_traced(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 100, "num_local_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    asked_for = (
        "--batch",
        "2",
        "--seq",
        "8",
        "--ranks",
        "1",
        "--stage",
        "0",
        "--hardware",
        "h100",
        "--lora",
        "4:q_proj",
    )
    code, found = ask(capsys, str(tmp_path / "config.json"), *asked_for)
    assert code == 0 and found["model"]["trainable_parameters"] == 2 * 4 * (32 + 32)
