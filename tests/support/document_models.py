"""A small attention model that takes positions, and folders with a tokenizer and a chat template, for tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 300

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace(
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n",
    "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n",
)
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}", "{% if loop.last or m['role'] != 'assistant' %}(thinks) {% endif %}{{ m['content'] }}"
)
"""Like templates that drop the reasoning of earlier turns: a turn's text depends on whether others follow."""


class Attentive(nn.Module):
    """One layer of attention within documents, which positions of 0 begin; returns the mean loss of counted targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 16), nn.Embedding(64, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def token_losses(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = steps.expand_as(tokens) if positions is None else positions
        documents = (positions == 0).cumsum(1)
        allowed = (documents[:, :, None] == documents[:, None, :]) & (steps[:, None] >= steps)
        x = self.embed(tokens) + self.place(positions)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return F.cross_entropy(self.out(x).transpose(1, 2), targets, reduction="none", ignore_index=-100)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.token_losses(tokens, targets, positions).sum() / (targets != -100).sum()


class Blind(Attentive):
    """Takes no positions."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, targets)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_rows(number: int = 40) -> list[dict[str, str]]:
    """Questions and answers of many lengths."""
    return [
        {"prompt": f"{k}: " + "what " * (k % 4), "completion": "so " * (1 + k * 5 % 7) + str(k)} for k in range(number)
    ]


def write_tokenizer(folder: Path, template: Any = CHATML, bos: bool = False) -> Path:
    """Write a byte-level tokenizer with special tokens and a chat template; its largest id is below VOCAB."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary["so"] = len(vocabulary)
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [("s", "o")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"])
    if bos:
        special = [("<|bos|>", made.token_to_id("<|bos|>"))]
        made.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=special)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": {"content": "<|eos|>"}, "bos_token": "<|bos|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
