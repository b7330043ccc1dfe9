"""Laws of adapters: the base stays as it is, sharding changes no number, and peft's arithmetic is ours."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_gpt import BATCH, SEQ, train_step
from torch import nn
from toy_tiers import NVME

import zerocli
from zerocli.config import LoraConfig, ModelConfig
from zerocli.errors import UserError
from zerocli.models import build
from zerocli.models.adapters import adapters_of
from zerocli.models.lora import adapt, adapter_names, idle_note, linear_layers

STEPS = 3
LLAMA = {"family": "llama", "kv_heads": 1, "tie": False, "mlp_hidden": 40}
WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "recompute": True},
    {"stage": 3},
    {"stage": 3, "recompute": "selective"},
    {"stage": 3, "offload": "params=cpu"},
    {"stage": 3, "offload": "params=nvme,optimizer=cpu", **NVME},
    {"stage": 3, "recompute": True, "offload": "params=cpu,grads=cpu,optimizer=cpu,activations=cpu"},
]
COMPILED = {"stage": 3, "compile": True, "compile_backend": "aot_eager", "recompute": True}


def made(shape: dict[str, Any], **settings: Any) -> Any:
    """Return a built-in model with adapters whose values all count."""
    torch.manual_seed(0)
    model = build(ModelConfig(**{"layers": 2, "hidden": 32, "heads": 2, "vocab": 64} | shape), SEQ, "cpu")
    zerocli.lora(model, **{"rank": 4} | settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # which bf16 holds as it is
        for name, parameter in model.named_parameters():
            if name in adapter_names(model):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def digest(state: dict[str, torch.Tensor], names: list[str]) -> str:
    found = hashlib.sha256()
    for name in names:
        found.update(state[name].float().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def trained(model: Any, way: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a few steps; the base must be what it was, and no byte of it written to a tier."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    before = digest(dict(model.state_dict()), frozen)
    engine = zerocli.shard(model, lr=1e-2, clip=0.5, units=model.unit_modules(), **way)
    engine.tiers.traffic.clear()
    losses = [loss for step in range(STEPS) for loss in train_step(engine, step)]
    engine.synchronize()
    updated = sum(flat.own.numel * flat.dtype.itemsize for flat in engine.trainable())
    assert engine.tiers.traffic["parameters written"] <= STEPS * updated, engine.tiers.traffic
    if "params" in way.get("offload", ""):
        assert engine.tiers.traffic["parameters read"] > STEPS * updated  # the base came from its tier
    assert not idle_note(model)
    state = engine.state_dict()
    engine.close()
    assert digest(state, frozen) == before, way
    return losses, state


def every_way(ways: list[dict[str, Any]], shape: dict[str, Any], lora: dict[str, Any], also: dict[str, Any]) -> None:
    """Compare ways with the first of them, bit for bit."""
    expected = trained(made(shape, **lora), ways[0] | also)
    assert expected[0][-1] != expected[0][0]
    for way in ways[1:]:
        losses, state = trained(made(shape, **lora), way | also)
        assert losses == expected[0], way
        assert all(torch.equal(value, state[name]) for name, value in expected[1].items()), way


CASES = [
    ([WAYS[0], WAYS[2], WAYS[4], *WAYS[6:]], LLAMA, {"dropout": 0.1}, {}),
    (WAYS[3:7:3], {}, {"save_modules": ["tokens"]}, {"accumulate": 2}),  # stages below 2 add micro-steps first
    (WAYS[3:7:3], LLAMA, {"dora": True, "targets": ["q", "down"], "dropout": 0.1}, {}),
    (
        WAYS[3:6:2],
        {"layers": 1},
        {"dtype": "fp32"},
        {"precision": "bf16", "keep_fp32": lambda name, _: ".lora." in name},
    ),
]


MORE = [([WAYS[0], WAYS[1], WAYS[3], WAYS[5], COMPILED], LLAMA, {"dropout": 0.1}, {}), (WAYS[3:7], *CASES[2][1:])]
MORE += [CASES[1]]


def _all_cases(more: bool) -> None:
    for case in MORE if more else (CASES[0], CASES[3]):
        every_way(*case)


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.long)])
def test_stages_placements_and_recomputation_change_no_number_and_the_base_stays_as_it_is(more):
    run_ranks(2, _all_cases, more, seconds=600)


def plain(model: nn.Module, world: int) -> list[float]:
    """Train as any torch program does, on the batches of all ranks together."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = []
        for rank in range(world):
            torch.manual_seed(100 * step + rank)
            tokens.append(torch.randint(0, 64, (BATCH, SEQ + 1)))
        joined = torch.cat(tokens)
        optimizer.zero_grad()
        loss = model(joined[:, :-1], joined[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Net(nn.Module):
    """Somebody's own model: one layer is called, of another only the weight is read."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.embed, self.reads = nn.Embedding(64, 16), reads
        self.first, self.second, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.embed(tokens)))
        x = F.linear(x, self.second.weight) if self.reads else self.second(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Experts(nn.Module):
    """Experts in two packed tensors, as transformers has them; of some of its models the matrices are transposed."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        up, down = torch.randn(3, 24, 16) * 0.2, torch.randn(3, 16, 24) * 0.2
        self.up, self.down = (nn.Parameter(each.mT.contiguous() if transposed else each) for each in (up, down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (each if self.is_transposed else each.mT for each in (self.up, self.down))
        return sum(torch.tanh(x @ up[at]) @ down[at] for at in range(3))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.blocks = nn.Embedding(64, 16), nn.ModuleList(Experts(at == 1) for at in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MIXTURE_WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"recompute": True},
    {"recompute": "selective", "offload": "params=cpu,optimizer=cpu"},
]


def adapted_mixture() -> nn.Module:
    return zerocli.lora(Mixture(), rank=2, targets=["blocks.0", "up", "head"])


def _own_and_pefts() -> list[list[float]]:
    """Train a model adapted by us, and one adapted by peft if it is there, at stage 3; return the losses of both."""
    found = []
    mixtures = [(adapted_mixture(), way) for way in MIXTURE_WAYS]
    for model, way in [*((each, {}) for each in own_models()), *mixtures]:
        engine = zerocli.shard(model, **{"lr": 1e-2, "stage": 3, "weight_decay": 0.01} | way)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(100 * step + engine.collectives.rank)
            tokens = torch.randint(0, 64, (BATCH, SEQ + 1))
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / 2)
            engine.step()
        engine.close()
        found.append(losses)
    return found


def own_models() -> list[nn.Module]:
    models = []
    for dora in (False, True):
        torch.manual_seed(1)
        models.append(zerocli.lora(Net(), rank=4, targets=["first", "second"], dora=dora))
    models.append(adapted_mixture())
    try:
        from peft import LoraConfig as Pefts
        from peft import get_peft_model
    except ImportError:
        return models
    torch.manual_seed(1)
    return [*models, get_peft_model(Net(), Pefts(r=4, target_modules=["first", "second"], init_lora_weights=False))]


def test_a_model_of_ones_own_and_one_of_pefts_train_as_in_plain_torch():
    expected = [plain(model, 2) for model in (*own_models(), *(adapted_mixture() for _ in MIXTURE_WAYS))]
    for found in run_ranks(2, _own_and_pefts):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_an_adapter_whose_layer_is_never_called_is_told_of():
    tokens = torch.randint(0, 64, (2, 9))
    with pytest.warns(UserWarning, match="1 of 2 layers with adapters were not called in the first step: second;"):
        zerocli.lora(Net(reads=True), rank=4, targets=["first", "second"])(tokens[:, :-1], tokens[:, 1:])
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    assert [name for name, _ in linear_layers(layer)] == ["linear1", "linear2"]  # attention reads its weights
    zerocli.lora(layer, rank=2)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.add_(1.0 if name.endswith("lora.all.b") else 0.0)
        x = torch.randn(1, 3, 16)
        assert torch.allclose(layer.train()(x), layer.eval()(x), atol=1e-5)  # torch's fused path would leave them out


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"targets": "secnd"}, "no linear layer is called secnd; there are first, second, head"),
        ({"targets": ["first", "q_proj"]}, "no linear layer is called q_proj"),
        ({"targets": "fi[rst"}, "'fi[rst' is not a regular expression"),
        ({"rank_pattern": {"secnd": 2}}, "rank_pattern: secnd=2 fits no layer with adapters; there are first, second"),
        ({"alpha_pattern": {"first": 0}}, '"first=0" is not NAME=ALPHA'),
        ({"rank_pattern": {"fi[rst": 2}}, '"fi[rst" is not a regular expression'),
        ({"rank_pattern": {"first": 17}}, "rank 17 is above the smaller side of first, 24 x 16"),
        ({"rank": 17}, "rank 17 is above the smaller side of first, 24 x 16"),
        ({"save_modules": ["embd"]}, "there is no module embd; there are embed, first, second, head"),
    ],
)
def test_what_cannot_be_adapted_is_refused(settings, said):
    model = Net()
    with pytest.raises(ValueError) as refused:
        zerocli.lora(model, **{"rank": 4} | settings)
    assert said in str(refused.value)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not list(adapters_of(model))


def test_targets_are_names_ends_of_names_or_expressions():
    def found(**settings: Any) -> set[str]:
        model = made(LLAMA, **settings)
        return {f"{path}.{part}" for path, _, part, _ in adapters_of(model)}

    two = {f"blocks.{i}.attention.qkv.{part}" for i in range(2) for part in ("q", "v")}
    assert found(targets=["q", "v"]) == two
    assert found(targets=["qkv"]) == two | {f"blocks.{i}.attention.qkv.k" for i in range(2)}
    assert found(targets=[r"blocks\.1\.mlp\..*"]) == {
        f"blocks.1.mlp.{n}" for n in ("gate_up.gate", "gate_up.up", "down.all")
    }
    assert len(found()) == 14 and not any("head" in name for name in found())


def test_a_model_has_adapters_once_and_dora_needs_values():
    model = zerocli.lora(Net(), rank=2)
    with pytest.raises(UserError, match="has adapters already"):
        adapt(model, LoraConfig(2))
    with torch.device("meta"), pytest.raises(ValueError, match="the model has no values"):
        zerocli.lora(Net(), dora=True)
    plain_net = Net()
    tokens = torch.randint(0, 64, (2, 9))
    changed = zerocli.lora(copy.deepcopy(plain_net), rank=2, dora=True)
    expected = plain_net(tokens[:, :-1], tokens[:, 1:])
    assert torch.allclose(changed(tokens[:, :-1], tokens[:, 1:]), expected, rtol=1e-5)  # as yet nothing is changed
