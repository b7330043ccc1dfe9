"""Both families: sizes, causality, initialisation from the meta device, and what an engine relies on."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerocli.models import build
from zerocli.models.llama import Rotary
from zerocli.models.parts import attend

CONFIGS = Path(__file__).parents[2] / "configs"
SEQ = 12

DEFAULTS: dict[str, Any] = dict(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=0,
    vocab=61,
    mlp_hidden=0,
    dropout=0.0,
    tie=True,
    rope_theta=1e4,
    norm_eps=1e-5,
    bias=True,
    head_dim=0,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    window=0,
    window_layers="",
    rope_scaling={},
    positions=0,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": dict(family="gpt2"),
    "gpt2-untied-no-bias": dict(family="gpt2", tie=False, bias=False),
    "gpt2-dropout": dict(family="gpt2", dropout=0.1),
    "llama": dict(family="llama", tie=False, mlp_hidden=48),
    "llama-tied-gqa": dict(family="llama", kv_heads=2, mlp_hidden=48),
    "qwen2-window": dict(family="llama", kv_heads=2, mlp_hidden=48, qkv_bias=True, window=9, window_layers="1"),
    "qwen3": dict(family="llama", kv_heads=2, mlp_hidden=48, head_dim=6, qk_norm=True),
}


def make_config(**fields: Any) -> Any:
    return SimpleNamespace(**{**DEFAULTS, **fields})


def make_model(variant: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return build(make_config(**VARIANTS[variant]), SEQ, device)


def make_tokens(seq: int = SEQ) -> Tensor:
    return torch.randint(DEFAULTS["vocab"], (2, seq), generator=torch.Generator().manual_seed(1))


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("tiny", 842_496),
        ("gpt2-124m", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("zero-7.5b", 7_459_921_920),
        ("zero-128b", 127_477_678_080),
        ("zero-1t", 1_007_989_606_400),
    ],
)
def test_bundled_config_has_the_parameters_it_states(name: str, expected: int) -> None:
    text = (CONFIGS / f"{name}.toml").read_text()
    config = tomllib.loads(text)
    command, sentence = text.splitlines()[:2]
    assert command.startswith(f"# zerocli train {name}")
    assert f"{expected:,} parameters" in sentence
    model = build(make_config(**config["model"]), config["train"]["seq"], "meta")
    assert num_parameters(model) == expected
    nominal = {"zero-7.5b": 7.5e9, "zero-128b": 128e9, "zero-1t": 1e12}.get(name, expected)
    assert abs(expected - nominal) <= 0.01 * nominal


@every_variant
def test_loss_is_that_of_the_logits(variant: str) -> None:
    model = make_model(variant).eval()
    tokens, targets = make_tokens(), make_tokens().roll(-1, dims=1)
    targets[:, -1] = -100
    logits = model(tokens)
    assert logits.shape == (2, SEQ, DEFAULTS["vocab"])
    assert torch.equal(logits, model(tokens))
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100))


@every_variant
def test_future_tokens_do_not_change_past_logits(variant: str) -> None:
    model = make_model(variant).eval()
    tokens = make_tokens()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % DEFAULTS["vocab"]
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert (after[:, 7:] - before[:, 7:]).abs().amax(-1).min() > 1e-4
    torch.testing.assert_close(model(tokens[:, :7]), before[:, :7])


def test_longer_sequence_than_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens is longer than the model's 12 positions"):
        make_model("gpt2")(make_tokens(SEQ + 1))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(family="gpt3"), "choose one of gpt2, llama"),
        (dict(family="gpt2", heads=5), "does not divide into 5 heads"),
        (dict(family="llama", kv_heads=3), "model.kv_heads"),
        (dict(family="llama", hidden=12), "even head size"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(make_config(**fields), SEQ, "meta")


@every_variant
def test_bf16_follows_fp32(variant: str) -> None:
    model = make_model(variant).eval()
    tokens = make_tokens()
    expected = model(tokens, tokens)
    model.bfloat16()
    loss = model(tokens, tokens)
    assert loss.dtype == torch.float32 and model(tokens).dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_variant
def test_units_are_the_blocks_and_without_a_tie_both_ends(variant: str) -> None:
    model = make_model(variant, "meta")
    units = model.unit_modules()
    if VARIANTS[variant].get("tie", DEFAULTS["tie"]):
        assert units == list(model.blocks)
        embedding = next(m for m in model.embed.modules() if isinstance(m, nn.Embedding))
        assert model.head.weight is embedding.weight
    else:
        assert units == [model.embed, *model.blocks, model.head]
    owned = [{id(p) for p in unit.parameters()} for unit in units]
    assert sum(map(len, owned)) == len(set().union(*owned)), "no parameter belongs to two units"


@every_variant
def test_modules_initialise_one_by_one_from_the_meta_device(variant: str) -> None:
    """Materialised and reset in the order of construction, the model is the one that was built in place."""
    built, model = make_model(variant), make_model(variant, "meta")
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, memo.setdefault(id(p), nn.Parameter(torch.full_like(p, torch.nan, device="cpu"))))
        for name, b in module.named_buffers(recurse=False):
            setattr(module, name, torch.full_like(b, torch.nan, device="cpu"))
    torch.manual_seed(0)
    for module in model.modules():
        owned = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert not owned or hasattr(module, "reset_parameters")
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, a), (_, b) in zip(model.named_parameters(), built.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(model.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("variant", ["gpt2-untied-no-bias", "llama"])
def test_initial_spread_follows_the_rule(variant: str) -> None:
    model = make_model(variant)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / (2 * DEFAULTS["layers"]) ** 0.5 if residual else 0.02
            assert abs(p.std().item() - expected) < 0.15 * expected, name
    assert all((p == 0).all() for name, p in make_model("gpt2").named_parameters() if name.endswith("bias"))


def test_tied_head_does_not_initialise_the_embedding_again() -> None:
    model = make_model("gpt2")
    before = model.head.weight.clone()
    model.head.reset_parameters()
    assert torch.equal(model.head.weight, before)


def test_dropout_acts_in_training_only() -> None:
    model, tokens = make_model("gpt2-dropout"), make_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("variant", ["gpt2-dropout", "llama-tied-gqa"])
def test_recomputed_blocks_give_the_same_gradients(variant: str) -> None:
    block = make_model(variant).blocks[0]
    x = torch.randn(2, SEQ, DEFAULTS["hidden"], generator=torch.Generator().manual_seed(2), requires_grad=True)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(3)
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        gradients.append(torch.autograd.grad(y.square().sum(), [x, *block.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("variant", ["gpt2-dropout", "llama-tied-gqa"])
def test_block_compiles_as_one_graph(variant: str) -> None:
    block = make_model(variant).eval().blocks[0]
    x = torch.randn(2, SEQ, DEFAULTS["hidden"])
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))


def test_shared_heads_equal_repeated_ones() -> None:
    q, k, v = (torch.randn(2, SEQ, heads, 8) for heads in (6, 2, 2))
    got = attend(q, k, v)
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    for head in range(6):
        scores = q[:, :, head] @ k[:, :, head // 3].transpose(1, 2) / 8**0.5
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        torch.testing.assert_close(got[..., 8 * head : 8 * (head + 1)], weights @ v[:, :, head // 3])


def test_model_with_shared_heads_equals_one_with_their_copies() -> None:
    shared = make_model("llama-tied-gqa").eval()
    full = build(make_config(family="llama", mlp_hidden=48), SEQ, "cpu").eval()
    state = shared.state_dict()
    for name, weight in state.items():
        if name.endswith("qkv.weight"):
            q, k, v = weight.unflatten(0, (-1, 8)).split((4, 2, 2))
            state[name] = torch.cat((q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0))).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(shared(make_tokens()), full(make_tokens()))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = Rotary(32, 16, 1e4)
    q, k = (torch.randn(1, 1, 1, 16).expand(1, 32, 1, 16) for _ in range(2))
    torch.testing.assert_close(rotary(q).norm(dim=-1), q.norm(dim=-1))
    scores = (rotary(q)[0, :, 0] @ rotary(k)[0, :, 0].t()).detach()
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5], rtol=1e-4, atol=1e-4)


def test_rotary_tables_stay_fp32_and_leave_no_trace_in_a_checkpoint() -> None:
    model = make_model("llama")
    rotary = model.blocks[0].attention.rotary
    assert all(block.attention.rotary is rotary for block in model.blocks)
    before = rotary.cos.clone()
    model.to(torch.bfloat16)
    assert rotary.cos.dtype == torch.float32 and torch.equal(rotary.cos, before)
    assert not any("rotary" in name for name in model.state_dict())


def test_automatic_mlp_width() -> None:
    assert build(make_config(family="gpt2"), SEQ, "meta").blocks[0].mlp.up.weight.shape[0] == 4 * 32
    wide = build(make_config(family="llama", hidden=4096), SEQ, "meta").blocks[0].mlp
    assert wide.down.weight.shape[1] == 11008


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_variant
def test_gpu_follows_the_cpu(variant: str) -> None:
    model, tokens = make_model(variant).eval(), make_tokens()
    expected = model(tokens, tokens)
    model.cuda()
    torch.testing.assert_close(model(tokens.cuda(), tokens.cuda()).cpu(), expected, rtol=1e-3, atol=0)
    model.bfloat16()
    torch.testing.assert_close(model(tokens.cuda(), tokens.cuda()).cpu(), expected, rtol=1e-2, atol=0)
