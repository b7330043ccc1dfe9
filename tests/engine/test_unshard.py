"""`engine.unsharded_model()`: an independent, whole, plain copy of the user's module, and nothing of ours in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

import zerocli


class Policy(nn.Module):
    """A small language model with a tie, a buffer, a frozen layer, and a hook and an attribute of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.arange(11) * 0.1)
        self.norm = nn.LayerNorm(8)
        self.blocks[0][0].requires_grad_(False)
        self.note = {"first": self.blocks[0], "weight": self.embed.weight}
        self.blocks[1].register_forward_hook(double)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens).mean(1))
        for block in self.blocks:
            x = block(x) + x
        return self.head(x) + self.shift.to(x.dtype)


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def log_probability(logits: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logits.float(), -1)[:, 3]


def _train_against_reference(settings: dict[str, Any]) -> dict[str, Any]:
    """Take a copy, then train by DPO's loss; return what both say before and after."""
    torch.manual_seed(5)
    engine = zerocli.shard(Policy(), lr=1e-2, **settings)
    model = engine.model
    tokens = torch.arange(24).view(6, 4) % 11
    for _ in range(2):
        engine.backward(F.cross_entropy(model(tokens).float(), tokens[:, 0]))
        engine.step()
    reference = engine.unsharded_model()
    model.eval(), reference.eval()
    with torch.no_grad():
        before, ours = reference(tokens), model(tokens).float()
    state = engine.state_dict()
    model.train()
    for _ in range(3):
        loss = -F.logsigmoid(log_probability(model(tokens)) - log_probability(reference(tokens)).detach()).mean()
        engine.backward(loss)
        engine.step()
    model.eval()
    with torch.no_grad():
        after, trained = reference(tokens), model(tokens).float()
    found = dict(before=before, ours=ours, after=after, trained=trained, state=state)
    plain = dict(reference.state_dict())
    inner = [*reference.modules()]
    found |= dict(
        plain={name: value.clone() for name, value in plain.items()},
        classes=[type(module).__module__ + "." + type(module).__name__ for module in inner],
        forwards=[name for module in inner for name in vars(module) if name == "forward"],
        tie=reference.head.weight is reference.embed.weight is reference.note["weight"],
        note=reference.note["first"] is reference.blocks[0],
        frozen=[name for name, p in reference.named_parameters() if not p.requires_grad],
        hooks=list(reference.blocks[1]._forward_hooks.values()) == [double],
        deep=torch.equal(copy.deepcopy(reference)(tokens), after),
        dtypes={p.dtype for p in engine.unsharded_model(dtype=torch.bfloat16).parameters()},
    )
    reference.train()
    reference(tokens).sum().backward()  # a plain module: torch's own backward
    found["grad"] = reference.head.weight.grad is not None
    engine.close()
    return found


CASES = [
    {"stage": 0},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "offload": "cpu", "recompute": True},
    {"stage": 3, "precision": "bf16"},
]


def _all_cases() -> list[dict[str, Any]]:
    return [_train_against_reference(settings) for settings in CASES]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, _all_cases)[1]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_reference_says_what_the_model_said_and_stays_so(found, case):
    one = found[case]
    rough = 5e-2 if "precision" in CASES[case] else 1e-5
    torch.testing.assert_close(one["before"], one["ours"], rtol=rough, atol=rough)
    assert torch.equal(one["before"], one["after"])
    assert (one["trained"] - one["ours"]).abs().max() > 1e-2  # while the engine has trained on


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_copy_is_the_users_own_module(found, case):
    one = found[case]
    assert one["tie"] and one["note"] and one["hooks"] and one["deep"] and one["grad"] and not one["forwards"]
    assert one["frozen"] == ["blocks.0.0.weight", "blocks.0.0.bias"]
    assert not [name for name in one["classes"] if name.startswith("zerocli") or "Sharded" in name]
    assert one["dtypes"] == {torch.bfloat16}
    for name, value in one["state"].items():
        if name.startswith(("embed", "blocks", "shift")):
            assert torch.equal(one["plain"][name], value), name


def test_the_model_is_as_before_after_a_copy_that_failed():
    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not to be copied")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine = zerocli.shard(model, stage=3)
    model.handle = Uncopyable()
    before = model(torch.ones(1, 3))
    with pytest.raises(TypeError, match="not to be copied"):
        engine.unsharded_model()
    assert torch.equal(model(torch.ones(1, 3)), before)
    engine.backward(model(torch.ones(1, 3)).sum())  # still the engine's own forward
    engine.step()
