"""Published models: the fields of their config.json that decide their size, and their published parameter counts.

Each count was found in public material that is not ours; above each group stands where. "Safetensors total" is what the
model's own page counts in its files. For Llama 2 that is 64 a layer more than here: its files also hold the rotary
frequencies, a buffer.
"""

from __future__ import annotations

from typing import Any


def _neox(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


def _opt(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
    } | more


def _gated(kind: str, layers: int, hidden: int, heads: int, kv: int, mlp: int, vocab: int, **more: Any) -> dict:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    } | more


def _phi(layers: int, hidden: int, heads: int, mlp: int) -> dict[str, Any]:
    return _gated("phi", layers, hidden, heads, heads, mlp, 51200, tie_word_embeddings=False)


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    # Counts: the presets of keras-hub. Layers, widths and heads: the hparams of the four releases.
    "gpt2": ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}, 124_439_808),
    "gpt2-medium": ({"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16}, 354_823_168),
    "gpt2-large": ({"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20}, 774_030_080),
    "gpt2-xl": ({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}, 1_557_611_200),
    # Counts, layers, widths and heads: the model cards' tables of exact totals; vocabularies: the totals less the
    # parameters beside embeddings, which the cards also give.
    "pythia-70m": (_neox(6, 512, 8, 50304), 70_426_624),
    "pythia-160m": (_neox(12, 768, 12, 50304), 162_322_944),
    "pythia-410m": (_neox(24, 1024, 16, 50304), 405_334_016),
    "pythia-1b": (_neox(16, 2048, 8, 50304), 1_011_781_632),
    "pythia-1.4b": (_neox(24, 2048, 16, 50304), 1_414_647_808),
    "pythia-2.8b": (_neox(32, 2560, 32, 50304), 2_775_208_960),
    "pythia-6.9b": (_neox(32, 4096, 32, 50432), 6_857_302_016),
    "pythia-12b": (_neox(36, 5120, 40, 50688), 11_846_072_320),
    # config.json of each. Counts: 125m as loaded by transformers (OpenVINO's notes on pruning); the others as half the
    # bytes in fp16 that another program's tests expect; 1.3b also as counted before a LoRA training.
    "opt-125m": (_opt(12, 768, 12), 125_239_296),
    "opt-350m": (_opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False), 331_196_416),
    "opt-1.3b": (_opt(24, 2048, 32), 1_315_758_080),
    "opt-6.7b": (_opt(32, 4096, 32), 6_658_473_984),
    # Counts: safetensors totals of the models' pages, as recorded with their revisions; Llama 2 as loaded, and in
    # DeepSpeed's own log of the 13B; TinyLlama and Llama 3.2 also in GGUF headers. Shapes: config.json, papers.
    "tinyllama-1.1b": (_gated("llama", 22, 2048, 32, 4, 5632, 32000), 1_100_048_384),
    "llama2-7b": (_gated("llama", 32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "llama2-13b": (_gated("llama", 40, 5120, 40, 40, 13824, 32000), 13_015_864_320),
    "llama2-70b": (_gated("llama", 80, 8192, 64, 8, 28672, 32000), 68_976_648_192),
    "llama3-8b": (_gated("llama", 32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    "llama3-70b": (_gated("llama", 80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "llama3.1-405b": (_gated("llama", 126, 16384, 128, 8, 53248, 128256), 405_853_388_800),
    "llama3.2-1b": (
        _gated("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "llama3.2-3b": (
        _gated("llama", 28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
        3_212_749_824,
    ),
    # GGUF header, and config.json.
    "mistral-7b": (_gated("mistral", 32, 4096, 32, 8, 14336, 32000), 7_241_732_096),
    # Safetensors totals (0.5B, 7B: of Qwen2.5 as well, whose shapes are the same), keras-hub's preset for 72B; Qwen3
    # as built by transformers on the meta device, tied weights once. Shapes: config.json.
    "qwen2-0.5b": (_gated("qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True), 494_032_768),
    "qwen2-7b": (_gated("qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "qwen2.5-72b": (_gated("qwen2", 80, 8192, 64, 8, 29568, 152064), 72_706_203_648),
    "qwen3-0.6b": (
        _gated("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "qwen3-8b": (_gated("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    # Presets of keras-hub; config.json.
    "gemma-2b": (_gated("gemma", 18, 2048, 8, 1, 16384, 256000, head_dim=256), 2_506_172_416),
    "gemma-7b": (_gated("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896),
    # Safetensors totals; config.json and the printed modules of each.
    "phi-1.5": (_phi(24, 2048, 32, 8192), 1_418_270_720),
    "phi-2": (_phi(32, 2560, 32, 10240), 2_779_683_840),
    # Safetensors totals; config.json; 8x7B and Qwen1.5-MoE also as presets of keras-hub.
    "mixtral-8x7b": (
        _gated("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "mixtral-8x22b": (
        _gated("mixtral", 56, 6144, 48, 8, 16384, 32000, num_local_experts=8, num_experts_per_tok=2),
        140_620_634_112,
    ),
    "qwen1.5-moe-a2.7b": (
        _gated(
            *("qwen2_moe", 24, 2048, 16, 16, 5632, 151936),
            **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
            **{"num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1},
        ),
        14_315_784_192,
    ),
    "qwen3-30b-a3b": (
        _gated(
            *("qwen3_moe", 48, 2048, 32, 4, 6144, 151936),
            **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128},
        ),
        30_532_122_624,
    ),
}
