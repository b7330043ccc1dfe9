"""A model with every kind of state to save, its training, and changes to a saved manifest."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from toys import Uneven, split, uneven_batch

import zerocli
from zerocli.checkpoint import Saver
from zerocli.checkpoint import manifest as manifests

TIERS = {
    "tier_options": {
        "nvme": {"workers": 2, "grow_nbytes": 1 << 20, "staging_nbytes": 1 << 20, "unit_nbytes": 1 << 18},
    },
    "staging_nbytes": 48000,  # several chunks a unit
    "read_ahead_nbytes": 48000,
}


class Stateful(Uneven):
    """With a frozen parameter, a scalar one, and buffers that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x, y):
        self.seen += (x[:, :3] > 0).sum(0)
        return super().forward(x, y) * (1 + self.scalar**2) + self.frozen.sum() * 0 + torch.rand(()) * 1e-3


def engine_of(settings: dict, seed: int = 7):
    torch.manual_seed(seed)
    model = Stateful()
    common = {"lr": 1e-2, "clip": 0.5, "weight_decay": 0.1, "bucket_nbytes": 4096, **TIERS}
    return model, zerocli.shard(model, **(common | settings))


def train(engine, model, steps: range) -> list[float]:
    rank, world = engine.collectives.rank, engine.collectives.world
    losses = []
    for step in steps:
        loss = model(*uneven_batch(step, split(rank, world)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine) -> dict:
    """Every parameter, state and counter, whole, as bytes that can be compared."""
    state = engine.state_dict()
    optimizer = engine.optimizer_state_dict()
    flat = {name: value.tolist() for name, value in state.items() if name != "seen"}
    flat |= {f"{n}.{k}": v.tolist() for n, states in optimizer.pop("state").items() for k, v in states.items()}
    return flat | optimizer


def save_at(folder: str, settings: dict, steps: int, asynchronous: bool = False):
    """Train some steps, save, go on; return what was there at the save and the losses that followed."""
    model, engine = engine_of(settings)
    train(engine, model, range(1, steps + 1))
    saver = Saver(engine, folder, asynchronous=asynchronous)
    before = everything(engine)
    saver.save(steps)
    after = train(engine, model, range(steps + 1, steps + 3))
    saver.close()
    assert saver.failure is None, saver.failure
    final = everything(engine), model.seen.tolist()
    engine.close()
    return before, after, final


def rewrite(path: Path, change) -> None:
    """Change what the manifest says and give it a checksum that holds."""
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    change(manifest)
    text = json.dumps(manifest, separators=(",", ":")).encode()
    digest = manifests.hashlib.sha256(text).hexdigest().encode()
    (path / "manifest.json").write_bytes(manifests._HEAD + digest + manifests._MIDDLE + text + manifests._TAIL)
