"""Frozen parameters in 4 and 8 bits: the codecs, and engines whose base is stored so, on real ranks."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lengths import LONG
from ranks import run_ranks

from zerocli.checkpoint import Folder, Saver, load
from zerocli.config import LoraConfig, ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.engine.units.codecs import NF4, decode, encode, nf4_scales
from zerocli.errors import Refused
from zerocli.layout.codecs import CODECS, GRAIN, GRAIN_NBYTES, encoded_nbytes, is_encoded
from zerocli.models import build
from zerocli.models.lora import adapt
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.measure import LiveBytes
from zerocli.plan.memory import tape
from zerocli.plan.memory.build import plan_model
from zerocli.plan.setup import Setup

MODEL = ModelConfig(family="llama", layers=3, hidden=128, heads=4, kv_heads=2, vocab=150, tie=False)
SEQ = 24


def values(grains: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers as weights are distributed, in blocks of different sizes, one of them zero."""
    made = torch.randn(grains * GRAIN, generator=torch.Generator().manual_seed(1))
    made = made.view(-1, 64) * torch.rand(grains * GRAIN // 64, 1, generator=torch.Generator().manual_seed(2))
    made[3] = 0
    return made.reshape(-1).to(dtype)


def decoded(codec: str, encoded: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(encoded.numel() // GRAIN_NBYTES[codec] * GRAIN, dtype=dtype)
    decode(codec, encoded, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_values_are_the_nearest_that_the_codec_has(codec, dtype):
    plain = values(3, dtype)
    encoded = encode(codec, plain)
    assert encoded.numel() == encoded_nbytes(codec, plain.numel()) < plain.numel() * {"nf4": 0.52, "int8": 1.02}[codec]
    made = decoded(codec, encoded)
    blocks, width = plain.float().view(-1, 64), {"nf4": 0.17, "int8": 0.5 / 127}[codec]
    largest = plain.float().view(-1, 64 if codec == "nf4" else 256).abs().amax(1)
    bound = largest.repeat_interleave(1 if codec == "nf4" else 4)[:, None]
    slack = largest.max() / 127 if codec == "nf4" else 1e-6  # the scales are rounded too
    assert ((made.view(-1, 64) - blocks).abs() <= width * bound + slack).all()
    assert (made.view(-1, 64)[3] == 0).all() and torch.equal(decoded(codec, encoded, dtype), made.to(dtype))


@pytest.mark.parametrize("codec", CODECS)
def test_a_grain_is_encoded_by_itself(codec):
    """So a slice of a flat has the same bytes, however many ranks share it, and however it is cut while decoding."""
    plain = values(67)  # more than are decoded together
    whole = encode(codec, plain)
    parts = [encode(codec, part) for part in plain.split((GRAIN, 40 * GRAIN, 26 * GRAIN))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat([decoded(codec, part) for part in parts]), decoded(codec, whole))


def test_scales_of_nf4_are_rounded_to_a_127th_of_their_spread():
    plain = values(2)
    scales = plain.view(-1, 64).abs().amax(1).view(2, -1)
    spread = (scales - scales.mean(1, keepdim=True)).abs().amax(1, keepdim=True)
    found = nf4_scales(encode("nf4", plain).view(2, -1))
    assert ((found - scales).abs() <= spread / 127 * 0.5001).all()


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    plain = values(2)
    theirs, state = functional.quantize_4bit(plain, blocksize=64, quant_type="nf4")
    packed = encode("nf4", plain).view(2, -1)[:, : GRAIN // 2].reshape(-1)
    assert torch.equal(theirs.view(-1), packed) and state.code.tolist() == pytest.approx(NF4, abs=0)


def test_matrices_are_encoded_and_routers_and_vectors_are_not():
    names = (
        "a.q_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.experts.gate_up_proj",
        "mlp.gate.weight",
        "x.router.weight",
    )
    assert [is_encoded(name, (8, 8)) for name in names] == [True, True, True, False, False]
    assert not is_encoded("norm.weight", (8,)) and is_encoded("mlp.experts.down_proj", (4, 8, 8))


# -- engines -------------------------------------------------------------------------------------------------------


def make(state: dict[str, torch.Tensor] | None = None, **settings: Any) -> Engine:
    model = build(MODEL, SEQ, "meta")
    adapt(model, LoraConfig(4))
    units = model.unit_modules()
    given = {"units": units, "device": "cpu", "clip": 1.0, "lr": 1e-2, "seed": 3, "state": state, **settings}
    return Engine(model, Settings(**given))


def steps(engine: Engine, number: int = 3) -> list[float]:
    losses = []
    for step in range(number):
        tokens = torch.randint(MODEL.vocab, (2, 2, SEQ), generator=torch.Generator().manual_seed(step))
        loss = engine(*tokens.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def digest(state: dict[str, torch.Tensor], base: bool = True) -> str:
    chosen = [value for name, value in sorted(state.items()) if (".lora." not in name) is base]
    return hashlib.sha256(b"".join(value.float().numpy().tobytes() for value in chosen)).hexdigest()


PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "recompute": True},
    {"stage": 3, "recompute": "selective", "offload": "params=cpu"},
    {"stage": 3, "offload": "params=nvme", "gather_buffers": 3},
]


def _everywhere(codec: str, places: list[dict[str, Any]]) -> list[Any]:
    """Return losses, digests of the base before and after and of the adapters, and bytes of the base written to tiers.

    The last row is of a run without a codec, from the decoded values.
    """
    found: list[Any] = []
    start: dict[str, torch.Tensor] = {}
    for place in places:
        engine = make(base=codec, **place)
        start = engine.state_dict()
        engine.tiers.traffic.clear()
        losses = steps(engine)
        engine.synchronize()
        trained = sum(flat.spec.own_nbytes for flat in engine.trainable() if flat.param_store is not None)
        written = engine.tiers.traffic["parameters written"] - len(losses) * trained
        end = engine.state_dict()
        found.append((losses, digest(start), digest(end), digest(end, base=False), written))
        engine.close()
    engine = make(start, stage=0)
    found.append((steps(engine), digest(start), digest(start), digest(engine.state_dict(), base=False), 0))
    engine.close()
    return found


@pytest.mark.longer
@pytest.mark.parametrize("codec", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_a_stored_base_equals_its_decoded_values_at_every_stage_and_place(codec):
    """Law: bit for bit a run whose frozen weights are the decoded ones; the base never changes and is never written."""
    places = (PLACES if LONG else PLACES[2:]) if codec == "nf4" else PLACES[2:3]
    one, two = run_ranks(1, _everywhere, codec, places[:1]), run_ranks(2, _everywhere, codec, places)
    rows = [*one[0], *two[0]]
    assert len({str(row) for row in rows}) == 1, rows
    losses, before, after, _, written = rows[0]
    assert before == after and written == 0 and losses[0] != losses[-1]


def _peak(settings: dict[str, Any]) -> int:
    torch.backends.mkldnn.set_flags(_enabled=False)
    live = LiveBytes()
    with live:
        engine = make(**settings)
        steps(engine, 2)
    engine.close()
    return live.peak


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 3, "base": "nf4", "offload": "params=cpu"},
        {"stage": 0, "base": "nf4", "precision": "bf16"},  # the peak is where the base is encoded
    ],
    ids=["offloaded", "encoding"],
)
def test_a_plan_of_a_stored_base_is_what_the_engine_takes(monkeypatch, settings):
    monkeypatch.setattr(tape, "sys", SimpleNamespace(getrefcount=lambda thing: 3))  # as `LiveBytes` watches
    peak = max(run_ranks(2, _peak, settings))
    given = {"precision": "fp32"} | settings
    asked = Setup(**given, ranks=2, ranks_per_node=2, batch=2, seq=SEQ, device="cpu")
    plan = plan_model(shape_of(MODEL, SEQ).adapted(LoraConfig(4)), asked)
    assert peak * 0.99 <= plan.allocated <= peak * 1.01


def test_an_encoded_parameter_can_be_read_and_not_written():
    engine = make(base="nf4", stage=0)
    name = "blocks.0.mlp.down.weight"
    with engine.gathered(name):
        assert engine.model.get_parameter(name).abs().sum() > 0
    with pytest.raises(Refused, match="stored as nf4"), engine.gathered(name, write=True):
        pass
    before = engine.state_dict()
    engine.load_state_dict(before | {name: before[name] * 2})
    assert torch.allclose(engine.state_dict()[name], 2 * before[name], rtol=0.02, atol=1e-6)
    engine.close()


def test_a_codec_without_anything_frozen_is_refused():
    model = build(MODEL, SEQ, "meta")
    with pytest.raises(ValueError, match="every parameter is trained: zerocli.lora"):
        Engine(model, Settings(units=model.unit_modules(), device="cpu", lr=1e-2, base="nf4"))


def _save(folder: str, codec: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = make(base=codec, stage=3, offload="params=cpu")
    steps(engine, 1)
    saver = Saver(engine, folder, asynchronous=False)
    saver.save(1)
    saver.close()
    found = engine.state_dict(), steps(engine, 2)
    engine.close()
    return found


@pytest.mark.parametrize("codec", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_a_checkpoint_has_the_stored_base_for_any_layout(tmp_path, codec):
    """An engine that began from other weights, on other slices, goes on with the saved base."""
    saved, losses = run_ranks(2, _save, str(tmp_path), codec)[0]
    engine = make(base=codec, stage=0, seed=5)
    load(engine, Folder(tmp_path).of(1))
    found = engine.state_dict()
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []
    assert steps(engine, 2) == pytest.approx(losses, rel=1e-5)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_gives_the_same_bits(codec):
    plain = values(3)
    encoded = encode(codec, plain)
    assert torch.equal(encode(codec, plain.cuda()).cpu(), encoded)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(plain.numel(), dtype=dtype, device="cuda")
        decode(codec, encoded.cuda(), out)
        assert torch.equal(out.cpu(), decoded(codec, encoded, dtype))


@pytest.mark.gpu
def test_a_stored_base_equals_its_decoded_values_on_a_gpu():
    found = []
    start: dict[str, torch.Tensor] = {}
    for place in ({"stage": 0}, {"stage": 3, "offload": "params=cpu", "recompute": True}, None):
        settings = {"base": "nf4", **place} if place is not None else {"stage": 0, "state": start}
        engine = make(**settings, precision="bf16", device="cuda")
        start = engine.state_dict()
        found.append((steps(engine), digest(engine.state_dict(), base=False)))
        engine.close()
    assert found[0] == found[1] == found[2]
