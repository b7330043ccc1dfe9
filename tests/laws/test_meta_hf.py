"""Hugging Face models built on the meta device: initialised as they initialise themselves, or loaded unit by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_cases, run_ranks
from torch import nn

import zerocli

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
GQA = SMALL | dict(num_key_value_heads=2)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GQA),
    "llama-scaled-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GQA | dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4), tie_word_embeddings=True),
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GQA),
    "mistral": ("MistralConfig", "MistralForCausalLM", GQA),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        dict(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GQA | dict(head_dim=8)),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GQA | dict(head_dim=8, sliding_window=8)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", GQA | dict(num_local_experts=4, num_experts_per_tok=2)),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL),
}


def make(family: str, device: str) -> nn.Module:
    config, model, fields = FAMILIES[family]
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, model)(getattr(transformers, config)(**fields))


def batch(family: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _shard(family: str, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    model = make(family, "meta").eval()
    engine = zerocli.shard(model, stage=stage, seed=3)
    with torch.no_grad():
        loss = model(**batch(family)).loss.item()
    return engine.state_dict(), {name: b.clone() for name, b in model.named_buffers()}, loss


def _shard_all(stage: int) -> list[Any]:
    return [_shard(family, stage) for family in FAMILIES]


@pytest.fixture(scope="module")
def sharded() -> dict[int, dict[str, Any]]:
    """What two ranks make of each family at a stage, and one rank alone."""
    (first, _), (_, second) = run_cases(2, _shard_all, [(1,), (3,)])
    found = {0: _shard_all(0), 1: first, 3: second}
    return {stage: dict(zip(FAMILIES, results, strict=True)) for stage, results in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_meta_model_starts_as_its_own_initialisation_would_have_it(sharded, family):
    state, buffers, loss = sharded[3][family]
    built = make(family, "cpu").eval()
    expected = built.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert value.isfinite().all(), name
        std, wanted = value.float().std(correction=0).item(), expected[name].float().std(correction=0).item()
        assert std == pytest.approx(wanted, rel=0.35, abs=1e-6), name
        if wanted == 0:
            assert torch.equal(value.float(), expected[name].float()), name
    for name, b in built.named_buffers():
        assert torch.equal(buffers[name], b), name
    # The very numbers, in a model that was never on the meta device.
    built.load_state_dict(state)
    assert built(**batch(family)).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_values_do_not_depend_on_stage_or_ranks(sharded, family):
    for stage in (0, 1):
        for name, value in sharded[stage][family][0].items():
            assert torch.equal(value, sharded[3][family][0][name]), (stage, name)


def test_padding_rows_and_ties_are_as_the_model_has_them(sharded):
    state, _, _ = sharded[3]["bert"]
    embedding = state["bert.embeddings.word_embeddings.weight"]
    assert embedding[0].abs().max() == 0 and embedding[1].abs().max() > 0
    assert torch.equal(state["cls.predictions.decoder.weight"], embedding)


def _given(family: str, stage: int, lazily: bool) -> float:
    model = make(family, "meta").eval()
    whole = make(family, "cpu").state_dict()
    whole.pop("lm_head.weight" if family != "bert" else "cls.predictions.decoder.weight", None)  # tied, as on the Hub
    state = (lambda name: whole[name]) if lazily else whole
    zerocli.shard(model, stage=stage, state=state)
    with torch.no_grad():
        return model(**batch(family)).loss.item()


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(f, marks=pytest.mark.long) for f in ("t5", "bert"))])
def test_given_weights_are_loaded_unit_by_unit(family):
    expected = make(family, "cpu").eval()(**batch(family)).loss.item()
    assert run_ranks(2, _given, family, 3, True) == [pytest.approx(expected, rel=1e-5)] * 2
    assert _given(family, 2, False) == pytest.approx(expected, rel=1e-5)


def test_weights_that_do_not_fit_are_refused_before_anything_is_built():
    state = make("llama", "cpu").state_dict()
    state["unheard"] = state.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unknown \['unheard'\]"):
        zerocli.shard(make("llama", "meta"), state=state)
    with pytest.raises(ValueError, match="no value for model.norm.weight"):
        zerocli.shard(make("llama", "meta"), state=lambda name: state[name])


class Table(nn.Module):
    """A table that only `__init__` computes, as rotary embeddings do."""

    def __init__(self, config: dict[str, int], scale: float):
        super().__init__()
        self.config, self.scale = config, scale
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(config["size"]) * scale, persistent=False)
        self.twice = self.table * 2


def test_a_table_is_made_anew_from_its_config_or_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(Table({"size": 5}, 0.5))
    zerocli.shard(model)
    assert model[0].table.tolist() == [0, 0.5, 1, 1.5, 2] and model[0].twice.tolist() == [0, 1, 2, 3, 4]
    with torch.device("meta"):
        model = nn.Sequential(Table({"size": 5}, 0.5))
    del model[0].config
    with pytest.raises(ValueError, match=r"0\.table, 0\.twice: on the meta device"):
        zerocli.shard(model)
