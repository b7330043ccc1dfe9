"""A vision model of transformers (ViT), sharded at stage 3: by a loop of one's own, or by `zerocli train`.

python examples/vision.py                                                 one process
torchrun --standalone --nproc-per-node 2 examples/vision.py               two
cd examples && zerocli train vision:make --stage 3 --data FILE --seq 768  the command line
"""

from __future__ import annotations

import os

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import zerocli

SIDE, CLASSES = 16, 4


def config() -> ViTConfig:
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return ViTConfig(**sizes, **dropout, image_size=SIDE, patch_size=4, num_labels=CLASSES)


class Images(nn.Module):
    """ViT with the arguments of `zerocli train`: 768 bytes of a file are an image, the byte after them its class."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = ViTForImageClassification(config())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pixels = tokens.view(-1, 3, SIDE, SIDE).to(self.vit.classifier.weight.dtype) / 127.5 - 1
        loss: torch.Tensor = self.vit(pixel_values=pixels, labels=targets[:, -1] % CLASSES).loss
        return loss


def make() -> nn.Module:
    """Return the model; `zerocli train vision:make` calls it on the meta device, where it takes no memory."""
    return Images()


def main() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):  # each rank initialises only what it owns
        model = ViTForImageClassification(config())
    engine = zerocli.shard(model, optimizer="adamw", lr=1e-3, stage=3, clip=1.0)
    rank = int(os.environ.get("RANK", "0"))
    generator = torch.Generator().manual_seed(rank)  # each rank has data of its own
    for step in range(1, 41):
        labels = torch.randint(0, CLASSES, (16,), generator=generator)
        images = torch.randn(16, 3, SIDE, SIDE, generator=generator) * 0.3 + labels.view(-1, 1, 1, 1) / CLASSES
        loss = engine(pixel_values=images.to(engine.device), labels=labels.to(engine.device)).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    engine.close()


if __name__ == "__main__":
    main()
