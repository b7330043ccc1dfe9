"""Tiny models of the built-in families, built by transformers with random weights, and ours with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zerocli import config as configs
from zerocli.models import Decoder, build, hugging

SEQ = 24
_SMALL = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, rms_norm_eps=1e-5,
)  # fmt: skip
_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
_SLIDING = dict(use_sliding_window=True, sliding_window=7)
CASES: dict[str, dict[str, Any]] = {
    "gpt2": dict(model_type="gpt2", vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "gpt2-other-names": dict(
        model_type="gpt2", vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "llama": dict(model_type="llama", tie_word_embeddings=True),
    "llama-biases": dict(model_type="llama", attention_bias=True, mlp_bias=True, head_dim=12, rope_theta=5e5),
    "llama-3.1": dict(model_type="llama", rope_scaling=_LLAMA3, rope_theta=5e5),
    "llama-linear": dict(model_type="llama", rope_scaling=dict(type="linear", factor=4.0)),
    "llama-dynamic": dict(model_type="llama", rope_scaling=dict(type="dynamic", factor=2.0)),
    "llama-yarn": dict(model_type="llama", rope_parameters=_YARN | dict(rope_theta=1e6)),
    "llama-yarn-options": dict(
        model_type="llama",
        rope_scaling=_YARN | dict(beta_fast=8, beta_slow=2, truncate=False, mscale=0.7, mscale_all_dim=0.9),
    ),
    "mistral": dict(model_type="mistral", sliding_window=7),
    "mistral-no-window": dict(model_type="mistral", sliding_window=None, head_dim=6),
    "qwen2": dict(model_type="qwen2"),
    "qwen2-window": dict(model_type="qwen2", max_window_layers=1, **_SLIDING),
    "qwen2-yarn": dict(model_type="qwen2", rope_scaling=_YARN | dict(attention_factor=1.25), tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen3-window": dict(
        model_type="qwen3", head_dim=12, attention_bias=True, **_SLIDING,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip


def values_of(name: str) -> dict[str, Any]:
    """Return the config.json of a case, as its author would write it."""
    values = CASES[name]
    if values["model_type"] == "gpt2":
        return values | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _SMALL | values


def their_model(values: dict[str, Any]) -> Any:
    """Return transformers' model of a config.json, with weights that are all different, norms and biases too."""
    import transformers

    torch.manual_seed(0)
    rest = {key: json.loads(json.dumps(value)) for key, value in values.items() if key != "model_type"}
    config = transformers.CONFIG_MAPPING[values["model_type"]](**rest)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(noise + 1 if weight.dim() == 1 and not name.endswith("bias") else noise)
    return model


def load_config(values: dict[str, Any], folder: Path, *sets: str) -> configs.Config:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return configs.load(str(path), [f"train.seq={SEQ}", *sets])


def state_from(theirs: dict[str, torch.Tensor], model: configs.ModelConfig) -> dict[str, torch.Tensor]:
    """Return our state of Hugging Face tensors."""
    state = {}
    for mapping in hugging.mappings(model):
        parts = [theirs[name] for name in mapping.theirs]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        state[mapping.ours] = whole.t() if mapping.transposed else whole
    if model.tie:
        state["head.weight"] = state["embed.tokens.weight" if model.family == "gpt2" else "embed.weight"]
    return state


def our_model(config: configs.Config, theirs: dict[str, torch.Tensor]) -> Decoder:
    model = build(config.model, config.train.seq).eval()
    model.load_state_dict(state_from(theirs, config.model))
    return model


def tokens_of(seq: int = SEQ) -> torch.Tensor:
    return torch.randint(61, (2, seq), generator=torch.Generator().manual_seed(2))
