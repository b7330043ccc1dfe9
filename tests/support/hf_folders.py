"""Folders as people have them: tiny random weights of many architectures, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_DECODER = dict(
    vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GQA = _DECODER | dict(num_key_value_heads=2)
_OLD = dict(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
_STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GQA | dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
                                              high_freq_factor=4.0, original_max_position_embeddings=16)),
    "mistral": _GQA | dict(sliding_window=5),
    "qwen2": _GQA | dict(tie_word_embeddings=True),
    "qwen3": _GQA | dict(head_dim=16),
    "gpt2": _OLD | _STILL,
    "gemma2": _GQA | dict(head_dim=16, sliding_window=5),
    "phi3": _GQA,
    "olmo2": _GQA,
    "mixtral": _GQA | dict(num_local_experts=3, num_experts_per_tok=2),
    "falcon": _DECODER | dict(hidden_dropout=0.0, attention_dropout=0.0),
    "gptj": _OLD | _STILL | dict(rotary_dim=4),
}  # fmt: skip


def write(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Path:
    """Write a folder of random weights, with a tokenizer; norms and biases are random too, so that each counts."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **ARCHITECTURES[family] | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages }}", "model_max_length": 64})
    )
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


WORDS = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2} | {chr(97 + i): 3 + i for i in range(26)}
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
}  # fmt: skip


def tokens(batch: int = 4, seq: int = 12) -> torch.Tensor:
    """Return (batch, seq + 1) tokens."""
    return torch.randint(3, 120, (batch, seq + 1), generator=torch.Generator().manual_seed(5))
