"""Adapters in peft's format: peft loads what we export, we load what peft saved, and merged weights give the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import tokens, write

from zerocli import config as configs
from zerocli.checkpoint import Saver, source_files
from zerocli.checkpoint.imports import load_weights
from zerocli.cli import main as cli
from zerocli.config import to_dict
from zerocli.errors import UserError
from zerocli.run import engines
from zerocli.run.folders.resume import start_adapters
from zerocli.run.steps import micro_step

transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
peft = pytest.importorskip("peft", reason="other people's adapters")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

# family, fields of its config.json, whose code, keys
CASES: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "llama": ("llama", {}, "ours", ["lora.alpha=6"]),
    "llama of transformers": ("llama", {}, "transformers", ["lora.targets=q_proj,mlp.down_proj"]),
    "rslora": ("llama", {}, "ours", ["lora.rslora=true", "lora.targets=q,v"]),
    "dora": ("llama", {}, "ours", ["lora.dora=true"]),
    "dora of transformers": ("qwen2", {}, "transformers", ["lora.dora=true", "lora.dropout=0.1"]),
    "saved": ("llama", {}, "ours", ["lora.save_modules=embed_tokens,lm_head"]),
    "saved and tied": ("qwen2", {}, "ours", ["lora.save_modules=embed_tokens"]),
    "saved and tied of transformers": ("qwen2", {}, "transformers", ["lora.save_modules=embed_tokens"]),
    "gpt2": ("gpt2", {}, "ours", []),
    "gpt2 in part": ("gpt2", {}, "ours", ["lora.targets=mlp.c_proj,c_attn", "lora.dora=true"]),
    "gpt2 of transformers": ("gpt2", {}, "transformers", ["lora.targets=mlp.c_proj,c_attn"]),
    "phi3": ("phi3", {}, "transformers", []),
    "qwen3": ("qwen3", {}, "ours", ["lora.save_modules=norm"]),
    "gemma2": ("gemma2", {}, "transformers", ["lora.dora=true"]),
    "experts": ("mixtral", {}, "transformers", ["lora.targets=q_proj,experts"]),
    "experts of several ranks": (
        "mixtral",
        {},
        "transformers",
        [
            "lora.targets=q_proj,experts",
            "lora.rank_pattern=experts.down_proj=2,q_proj=3",
            "lora.alpha_pattern=experts.*=7",
        ],
    ),
    "several ranks": ("llama", {}, "ours", ["lora.rank_pattern=v_proj=2,down_proj=5", "lora.alpha_pattern=k_proj=0.5"]),
    "experts in part": ("mixtral", {}, "transformers", [r"lora.targets=.*\.1\..*experts\.down_proj"]),
}


def opened(folder: Path, code: str, lora: str, sets: list[str]) -> tuple[Any, Any]:
    """Return the config and the engine of a run from a folder, before its first step."""
    whose = ["model.code=transformers"] if code == "transformers" else []
    config = configs.load(str(folder), [*whose, "train.seq=12", "optimizer.lr=0.02", *sets], {"lora.rank": lora})
    config = engines.resolve(config, 1)
    engine = engines.make_engine(config, stage=3, empty=True)
    load_weights(engine, config.train.init_from, config.model)
    start_adapters(engine, config, lambda text: None)
    return config, engine


def logits(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        return engine.model.eval()(tokens()[:, :-1]).clone()


def trained(folder: Path, run: Path, code: str, sets: list[str]) -> torch.Tensor:
    """Train two steps, save them as a run does, and return the logits after them."""
    config, engine = opened(folder, code, "4", sets)
    engine.model.train()
    for step in range(2):
        micro_step(engine, (tokens()[:, :-1], tokens()[:, 1:]), (0, step))
        engine.step()
    run.mkdir()
    source_files.keep(config, engine.model, run)
    saver = Saver(engine, run / "checkpoints", asynchronous=False)
    saver.save(2, {"config": to_dict(config), "samples": 0})
    saver.close()
    assert saver.failure is None, saver.failure
    found = logits(engine)
    engine.close()
    return found


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()[:, :-1]).logits


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for family in {family for family, *_ in CASES.values()}:
        write(family, root / family)
    return root


@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_is_exported_and_merged_weights_give_the_same(name, folders, tmp_path):
    family, _, code, sets = CASES[name]
    after = trained(folders / family, tmp_path / "run", code, sets)
    base = theirs(folders / family)
    assert not close(of(base), after)  # something was trained
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns of names that it does not find
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*(fan_in_fan_out|tie|tied).*")
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match")  # it forgets target_parameters
        loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    assert close(of(loaded), after)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "whole"), "--merge"]) == 0
    assert close(of(theirs(tmp_path / "whole")), after)
    whole, began = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "whole", folders / family))
    assert whole.keys() == began.keys()
    # And back: the run that goes on from the folder starts where the first ended.
    config, engine = opened(folders / family, code, str(tmp_path / "out"), [])
    assert close(logits(engine), after)
    engine.close()


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {"rank_pattern": {"v_proj": 5, "layers.1.mlp.up_proj": 1}, "alpha_pattern": {"k_proj": 2, "o_proj": 0.5}}
PEFTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "ours", {"target_modules": "all-linear"}),
    "expression": ("llama", "ours", {"target_modules": r".*layers\.1\..*(q_proj|up_proj)", "use_rslora": True}),
    "dora": ("qwen3", "ours", {"target_modules": ["k_proj", "down_proj"], "use_dora": True}),
    "saved": ("llama", "transformers", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved by the end of a name": ("llama", "ours", {"target_modules": ["v_proj"], "modules_to_save": ["norm"]}),
    "gpt2": ("gpt2", "ours", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "gpt2 of transformers": ("gpt2", "transformers", {"target_modules": ["attn.c_proj"], "use_dora": True}),
    "phi3": ("phi3", "transformers", {"target_modules": "all-linear", "use_dora": True}),
    "gemma2": ("gemma2", "transformers", {"target_modules": "all-linear"}),
    "experts": ("mixtral", "transformers", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of several ranks": (
        "mixtral",
        "transformers",
        {
            "target_modules": ["q_proj"],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 2, r"layers\.1\..*gate_up_proj": 5, "q_proj": 4},
            "alpha_pattern": {r"^model\.layers\.0\.mlp\.experts\..*": 9},
        },
    ),
    "several ranks": ("llama", "ours", {"target_modules": "all-linear", **PATTERNS}),
    "several ranks and dora": ("llama", "transformers", {"target_modules": "all-linear", "use_dora": True, **PATTERNS}),
    "experts alone": ("mixtral", "transformers", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
}


@pytest.mark.parametrize("name", PEFTS)
def test_what_peft_saved_is_gone_on_from(name, folders, tmp_path):
    family, code, fields = PEFTS[name]
    torch.manual_seed(3)
    made = peft.get_peft_model(theirs(folders / family), peft.LoraConfig(r=3, lora_alpha=5, **fields)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    made.save_pretrained(str(tmp_path))
    _, engine = opened(folders / family, code, str(tmp_path), [])
    assert close(logits(engine), of(made))
    assert not close(logits(engine), of(theirs(folders / family)))
    engine.close()


def test_a_tied_embedding_that_peft_trained_apart_from_the_head_is_refused(folders, tmp_path):
    torch.manual_seed(3)
    for fields, said in (
        ({}, "it has no lm_head.weight"),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "differ there"),
    ):
        asked = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]} | fields
        made = peft.get_peft_model(theirs(folders / "qwen2"), peft.LoraConfig(r=3, **asked))
        with torch.no_grad():
            made.get_input_embeddings().modules_to_save["default"].weight.add_(1.0)
        made.save_pretrained(str(tmp_path))
        with pytest.raises(UserError, match=f"are one parameter in this model, and {said}"):
            opened(folders / "qwen2", "ours", str(tmp_path), [])


def test_a_part_of_a_fused_layer_is_not_trained_whole(folders):
    with pytest.raises(UserError, match="q_proj, k_proj, v_proj are one matrix here"):
        opened(folders / "llama", "ours", "4:o_proj", ["lora.save_modules=q_proj"])


def test_a_base_in_bf16_is_merged_in_bf16(tmp_path):
    """The sum is rounded once, from fp32: nothing else is lost."""
    folder = write("llama", tmp_path / "llama", torch.bfloat16)
    after = trained(folder, tmp_path / "run", "ours", [])
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "whole"), "--merge"]) == 0
    merged = theirs(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"] == "bfloat16"
    error, moved = (of(merged) - after).abs().mean(), (of(theirs(folder)) - after).abs().mean()
    assert error < moved / 3
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "fp32"), "--merge", "--dtype", "fp32"]) == 0
    assert close(of(theirs(tmp_path / "fp32")), after)
