"""Law: every key of a built-in family's config.json is used, has no effect, is refused, or is named as not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published import PUBLISHED

from zerocli.config import ModelConfig, load
from zerocli.config import file as configfile
from zerocli.config.hugging import TYPES, translate
from zerocli.errors import ConfigError
from zerocli.layout.ranges import format_ranges, parse_ranges

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "num_key_value_heads": 4
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path):
    def write_file(values: dict[str, Any]) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write_file


def model_of(write, **values: Any) -> ModelConfig:
    """Return the model of a config.json for our own code."""
    return load(write(({} if values["model_type"] == "gpt2" else SMALL) | values), sets=["model.code=zerocli"]).model


def refused(write, **values: Any) -> tuple[list[str], str]:
    with pytest.raises(ConfigError) as caught:
        model_of(write, **values)
    return [problem.fact for problem in caught.value.problems], caught.value.hint


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ({"model_type": "llama", "hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear"] * 4}, "layer_types is not 4"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "layer_types names sliding_attention"),
        ({"model_type": "llama", "rope_scaling": {"type": "longrope"}}, 'rope_scaling type "longrope" is not built in'),
        ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "rope_scaling of type linear has no factor"),
        ({"model_type": "qwen2", "rope_parameters": {"mrope_section": [1]}}, "rope_parameters of type default has a"),
        ({"model_type": "llama", "rope_scaling": LLAMA3 | {"factor": "8"}}, 'factor "8" is not a number above 0'),
        ({"model_type": "gpt2", "activation_function": "gelu"}, 'activation_function "gelu"'),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights false"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
        ({"model_type": "gpt2", "attn_pdrop": 0.0}, "attn_pdrop 0.0 is not resid_pdrop 0.1"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention true"),
    ],
)
def test_what_the_built_in_code_does_not_compute_is_refused_with_the_next_command(write, values, fact):
    facts, hint = refused(write, **values)
    assert len(facts) == 1 and fact in facts[0]
    assert "model.code=transformers" in hint


def test_values_of_no_kind_are_refused_with_their_key(write):
    assert refused(write, model_type="llama", attention_bias="yes")[0] == [
        'qkv_bias "yes" is not true or false',
        'out_bias "yes" is not true or false',
    ]
    assert refused(write, model_type="mistral", sliding_window=0)[0] == [
        "sliding_window 0 is not a whole number above 0"
    ]
    assert "is odd" in refused(write, model_type="llama", head_dim=7)[0][0].replace("are odd", "is odd")


def test_keys_of_each_family_become_ours(write):
    llama = model_of(
        write, model_type="llama", rope_scaling=LLAMA3, attention_bias=True, max_position_embeddings=131072
    )
    assert llama.rope_scaling == LLAMA3 and llama.positions == 131072 and llama.type == ""
    assert llama.qkv_bias and llama.out_bias and not llama.mlp_bias and not llama.window
    mistral = model_of(write, model_type="mistral", head_dim=32)
    assert (mistral.type, mistral.kv_heads, mistral.window, mistral.window_layers) == ("mistral", 4, 4096, "")
    assert mistral.head_dim == 32
    assert not model_of(write, model_type="mistral", sliding_window=None, num_key_value_heads=None).window
    assert (
        "kv_heads 8 does not divide"
        in refused(write, model_type="mistral", num_attention_heads=2, num_key_value_heads=8)[0][0]
    )
    qwen2 = model_of(write, model_type="qwen2", num_key_value_heads=2, max_window_layers=3)
    assert qwen2.qkv_bias and not qwen2.out_bias and not qwen2.qk_norm and not qwen2.window
    sliding = {"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8}
    assert model_of(write, **sliding, max_window_layers=3).window_layers == "3"
    assert not model_of(write, **sliding).window  # from layer 28 on
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    assert model_of(write, **sliding, layer_types=kinds).window_layers == "0,2-3"
    qwen3 = model_of(write, model_type="qwen3", num_key_value_heads=2)
    assert qwen3.qk_norm and qwen3.head_dim == 128 and not qwen3.qkv_bias
    assert model_of(write, model_type="gpt2", n_positions=512, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0).dropout == 0


def test_theta_and_scaling_are_read_as_transformers_reads_them(write):
    new = model_of(write, model_type="llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5}, rope_theta=1.0)
    assert new.rope_theta == 5e5 and new.rope_scaling == LLAMA3
    yarn = {"type": "yarn", "factor": 4.0}
    model = model_of(write, model_type="qwen2", num_key_value_heads=2, rope_scaling=yarn, max_position_embeddings=64)
    assert model.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert model_of(write, model_type="llama", rope_scaling={"rope_type": "default"}).rope_scaling == {}


def test_unknown_keys_are_named_unless_they_say_nothing(write):
    values = SMALL | {"model_type": "llama", "use_mrope": False, "unsloth_version": "2", "logits_scaling": 8, "x": None}
    document = configfile.read(write(values))
    assert document.notes == [f"{write(values)}: not known, and not used: logits_scaling, unsloth_version"]


@pytest.mark.parametrize("kind", TYPES)
def test_every_key_that_transformers_writes_is_known(kind):
    """With the config class of the installed version: a key that it gains is found here."""
    transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
    values = transformers.CONFIG_MAPPING[kind]().to_dict()
    made = translate(values, {}, "config.json")
    assert not made.unknown and not made.problems and not made.unsupported


@pytest.mark.parametrize("name", [name for name, (values, _) in PUBLISHED.items() if values["model_type"] in TYPES])
def test_published_models_are_covered(name):
    made = translate(PUBLISHED[name][0], {}, name)
    assert not made.unknown and not made.problems and not made.unsupported


def test_ranges_are_written_as_they_are_read():
    for numbers in ([], [3], [0, 1, 2, 5], [1, 3, 5, 6]):
        assert parse_ranges(format_ranges(numbers)) == set(numbers)
    assert format_ranges(range(28, 32)) == "28-31"
