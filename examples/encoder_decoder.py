"""An encoder-decoder of transformers (T5), sharded at stage 3: by a loop of one's own, or by `zerocli train`.

python examples/encoder_decoder.py                                                 one process
torchrun --standalone --nproc-per-node 2 examples/encoder_decoder.py               two
cd examples && zerocli train encoder_decoder:make --stage 3 --data FILE --seq 32   the command line
"""

from __future__ import annotations

import os

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import zerocli


def config() -> T5Config:
    sizes = dict(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)


class Seq2Seq(nn.Module):
    """T5 with the arguments of `zerocli train`: the encoder reads the tokens, the decoder predicts the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.t5 = T5ForConditionalGeneration(config())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.t5(input_ids=tokens, labels=targets, use_cache=False).loss
        return loss


def make() -> nn.Module:
    """Return the model; `zerocli train encoder_decoder:make` calls it on the meta device, where it takes no memory."""
    return Seq2Seq()


def main() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):  # each rank initialises only what it owns
        model = T5ForConditionalGeneration(config())
    engine = zerocli.shard(model, optimizer="adamw", lr=3e-3, stage=3, clip=1.0)
    rank = int(os.environ.get("RANK", "0"))
    generator = torch.Generator().manual_seed(rank)  # each rank has data of its own
    for step in range(1, 61):
        source = torch.randint(1, 9, (16, 8), generator=generator).to(engine.device)
        loss = engine(input_ids=source, labels=source.flip(1)).loss  # to be read backwards
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    engine.close()


if __name__ == "__main__":
    main()
