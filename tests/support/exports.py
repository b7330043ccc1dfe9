"""Models to export, their values, and the names and layouts that Hugging Face gives them."""

from __future__ import annotations

from pathlib import Path

import torch

from zerocli import config as configs
from zerocli.checkpoint import safetensors
from zerocli.run import engines

SHAPE = (
    "model.layers=2 model.hidden=32 model.heads=4 model.vocab=61 model.mlp_hidden=40 train.seq=16 train.batch=2".split()
)
MODELS = {
    "llama": ["model.family=llama", "model.kv_heads=2", "model.tie=false"],
    "llama tied": ["model.family=llama", "model.mlp_hidden=0"],
    "gpt2": ["model.family=gpt2"],
    "qwen3 with biases": [
        *("model.family=llama", "model.kv_heads=2", "model.head_dim=12", "model.qk_norm=true", "model.tie=false"),
        *("model.qkv_bias=true", "model.out_bias=true", "model.window=5", "model.window_layers=1"),
        *("model.rope_scaling={rope_type = 'linear', factor = 2.0}", "model.positions=64"),
    ],
    "gpt2 with more positions": ["model.family=gpt2", "model.positions=40"],
    "gpt2 untied without biases": ["model.family=gpt2", "model.tie=false", "model.bias=false"],
}


def config_of(sets: list[str]) -> configs.Config:
    return engines.resolve(configs.load("tiny", [*SHAPE, *sets]), 1)


def noisy(engine) -> dict[str, torch.Tensor]:
    """Give every parameter values of its own (fresh norms and biases are all alike), and return them."""
    generator = torch.Generator().manual_seed(5)
    state = {k: torch.randn(v.shape, generator=generator) * 0.1 for k, v in sorted(engine.state_dict().items())}
    if "head.weight" in state and "embed.weight" in state and engine.model.head.is_tied:
        state["head.weight"] = state["embed.weight"]
    if "head.weight" in state and "embed.tokens.weight" in state and engine.model.head.is_tied:
        state["head.weight"] = state["embed.tokens.weight"]
    engine.load_state_dict(state)
    return state


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in an export, read by the format's own library where it is there, and by ours."""
    weights = safetensors.Weights(folder)
    ours = {name: weights.read(name, 0, entry.numel).view(entry.shape) for name, (_, entry) in weights.entries.items()}
    try:
        from safetensors.torch import load_file
    except ImportError:
        return ours
    theirs: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        theirs |= load_file(file)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[n].float(), ours[n]) for n in ours)
    return theirs


def expected(state: dict[str, torch.Tensor], config: configs.Config) -> dict[str, torch.Tensor]:
    """What Hugging Face calls each, written out here once more."""
    model, found = config.model, {}
    head = model.head_dim or model.hidden // model.heads
    kv = (model.kv_heads or model.heads) * head
    if model.family == "llama":
        found["model.embed_tokens.weight"] = state["embed.weight"]
        found["model.norm.weight"] = state["head.norm.weight"]
        for i in range(model.layers):
            ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
            gate, up = state[ours + "mlp.gate_up.weight"].chunk(2)
            for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
                parts = state[f"{ours}attention.qkv.{kind}"].split((model.heads * head, kv, kv))
                found |= {f"{theirs}self_attn.{n}_proj.{kind}": t for n, t in zip("qkv", parts, strict=True)}
            if model.out_bias:
                found[theirs + "self_attn.o_proj.bias"] = state[ours + "attention.out.bias"]
            for norm in ("q_norm", "k_norm") if model.qk_norm else ():
                found[f"{theirs}self_attn.{norm}.weight"] = state[f"{ours}attention.{norm}.weight"]
            found |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
            found[theirs + "self_attn.o_proj.weight"] = state[ours + "attention.out.weight"]
            found[theirs + "mlp.down_proj.weight"] = state[ours + "mlp.down.weight"]
            found[theirs + "input_layernorm.weight"] = state[ours + "norm1.weight"]
            found[theirs + "post_attention_layernorm.weight"] = state[ours + "norm2.weight"]
    else:
        found["transformer.wte.weight"] = state["embed.tokens.weight"]
        found["transformer.wpe.weight"] = state["embed.positions.weight"]
        found["transformer.ln_f.weight"] = state["head.norm.weight"]
        found["transformer.ln_f.bias"] = state.get("head.norm.bias", torch.zeros(model.hidden))
        pairs = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out"}
        pairs |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        for i in range(model.layers):
            for theirs, ours in pairs.items():
                weight = state[f"blocks.{i}.{ours}.weight"]
                found[f"transformer.h.{i}.{theirs}.weight"] = weight.t() if weight.dim() == 2 else weight
                bias = state.get(f"blocks.{i}.{ours}.bias", torch.zeros(weight.shape[0]))
                found[f"transformer.h.{i}.{theirs}.bias"] = bias
    if not model.tie:
        found["lm_head.weight"] = state["head.weight"]
    return found
