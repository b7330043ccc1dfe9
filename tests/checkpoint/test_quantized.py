"""Folders of quantized weights: decoded as the methods' own libraries decode them, and a base like any other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hf_folders
import pytest
import torch

from zerocli import config as configs
from zerocli.checkpoint import Saver, quantized, safetensors, source_files
from zerocli.checkpoint.imports import WEIGHT_DTYPES, load_weights
from zerocli.checkpoint.safetensors import Weights
from zerocli.cli import main as cli
from zerocli.config import hub, to_dict
from zerocli.config import quantized as quantization
from zerocli.engine.units.codecs import NF4, encode
from zerocli.errors import UserError
from zerocli.layout.codecs import GRAIN
from zerocli.run import engines
from zerocli.run.steps import micro_step

GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4, "version": "GEMM"}
BNB, MXFP4 = {"quant_method": "bitsandbytes"}, {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [2, 4]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FP4 = [sign * each / 12 for sign in (1, -1) for each in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
E2M1 = [sign * each for sign in (1, -1) for each in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def folder_of(path: Path, about: dict[str, Any], **tensors: torch.Tensor) -> Path:
    path.mkdir(exist_ok=True)
    entries = [safetensors.Entry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    writer = safetensors.Writer(path / "model.safetensors", entries)
    for name, each in tensors.items():
        writer.write(name, 0, each.reshape(-1))
    writer.finish()
    writer.close()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": about}))
    return path


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1).to(dtype)


def words_of(codes: list[int], bits: int) -> int:
    """Return a word of 32 bits, lowest code first, as a signed number."""
    word = sum(code << bits * at for at, code in enumerate(codes))
    return word - (1 << 32) if word >= 1 << 31 else word


def described(**about: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)


def four_bits(kind: str, twice: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return stored tensors of a (5, 60) matrix in blocks of 32, and its values, element by element."""
    codes, numel = drawn(150), 300
    about: dict[str, Any] = {"quant_type": kind, "blocksize": 32, "dtype": "bfloat16", "shape": [5, 60]}
    tensors = {"m.weight": codes.view(150, 1), "m.weight.quant_map": floats(16)}
    scales = floats(10)
    if twice:
        levels, of_group, small = floats(256, seed=2), floats(3, seed=3), drawn(10, seed=4)
        scales = torch.stack([levels[int(small[i])] * of_group[i // 4] + torch.tensor(0.25) for i in range(10)])
        about |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {"m.weight.nested_absmax": of_group, "m.weight.nested_quant_map": levels}
    tensors["m.weight.absmax"] = small if twice else scales
    tensors[f"m.weight.quant_state.bitsandbytes__{kind}"] = described(**about)
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    halves = [int(codes[i // 2]) >> 4 if i % 2 == 0 else int(codes[i // 2]) & 15 for i in range(numel)]
    values = torch.stack([table[half] * scales[i // 32] for i, half in enumerate(halves)])
    return tensors, values.view(5, 60).bfloat16()


def int8() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, scales = drawn(6, 10).view(torch.int8), floats(6)
    values = torch.stack([(codes[row].float() * scales[row]) * 7.874015718698502e-3 for row in range(6)])
    return {"m.weight": codes, "m.SCB": scales, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}, values


def fp8(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int], end: str) -> Any:
    codes, scales = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn),
        floats(*grid),
    )
    down = [row // block[0] for row in range(shape[-2])]
    across = [column // block[1] for column in range(shape[-1])]
    factors = scales.view(*shape[:-2], -1, grid[-1])[..., down, :][..., across]
    return {"m.weight": codes, f"m.weight{end}": scales}, codes.float() * factors


def mxfp4() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    blocks, scales = drawn(3, 6, 2, 16), drawn(3, 6, 2, seed=5) // 4 + 100
    values = torch.empty(3, 64, 6)
    for expert in range(3):
        for row in range(6):
            for column in range(64):
                byte = int(blocks[expert, row, column // 32, column % 32 // 2])
                code = byte >> 4 if column % 2 else byte & 15
                values[expert, column, row] = E2M1[code] * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
    return {"m.experts.down_proj_blocks": blocks, "m.experts.down_proj_scales": scales}, values


def gptq(bits: int, earlier: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    columns, rows, groups, each = 32, 16, 4, 32 // bits
    codes = drawn(columns, rows).int() % (1 << bits)
    zeros = drawn(groups, rows, seed=6).int() % ((1 << bits) - 1) + 1
    scales, group = floats(groups, rows, dtype=torch.float16), drawn(columns, seed=7).int() % groups
    packed = [[words_of(codes[i : i + each, j].tolist(), bits) for j in range(rows)] for i in range(0, columns, each)]
    stored = zeros - int(earlier)
    packed_zeros = [[words_of(stored[g, j : j + each].tolist(), bits) for j in range(0, rows, each)] for g in range(4)]
    values = torch.empty(rows, columns, dtype=torch.float16)
    for row in range(rows):
        for column in range(columns):
            at = int(group[column])
            values[row, column] = float(codes[column, row] - zeros[at, row]) * float(scales[at, row])
    tensors = {"m.qweight": packed, "m.qzeros": packed_zeros, "m.g_idx": group.tolist()}
    return {k: torch.tensor(v, dtype=torch.int32) for k, v in tensors.items()} | {"m.scales": scales}, values


def awq() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    columns, rows, groups = 12, 16, 3
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # a word's codes, lowest first, are of these of eight columns
    codes, zeros = drawn(columns, rows).int() % 16, drawn(groups, rows, seed=8).int() % 16
    scales = floats(groups, rows, dtype=torch.float16)

    def packed(values: torch.Tensor) -> torch.Tensor:
        rows_of = [
            [words_of([int(row[first + at]) for at in order], 4) for first in range(0, rows, 8)] for row in values
        ]
        return torch.tensor(rows_of, dtype=torch.int32)

    values = torch.empty(rows, columns, dtype=torch.float16)
    for row in range(rows):
        for column in range(columns):
            at = column // 4
            values[row, column] = float(codes[column, row] - zeros[at, row]) * float(scales[at, row])
    return {"m.qweight": packed(codes), "m.qzeros": packed(zeros), "m.scales": scales}, values


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    **{
        f"{kind}{' twice' * twice}": (BNB, four_bits(kind, twice)) for kind in ("nf4", "fp4") for twice in (False, True)
    },
    "int8": (BNB, int8()),
    "fp8 in cut blocks": (FP8, fp8((5, 10), (3, 3), (2, 4), "_scale_inv")),
    "fp8 in blocks that divide": (FP8, fp8((6, 8), (2, 4), (3, 2), "_scale_inv")),
    "fp8 of experts": (FP8, fp8((3, 5, 8), (3, 3, 2), (2, 4), "_scale_inv")),
    "fp8 of a tensor": (FP8, fp8((6, 8), (1, 1), (6, 8), "_scale_inv")),
    "fp8 by rows": (COMPRESSED, fp8((6, 8), (6, 1), (1, 8), "_scale")),
    "mxfp4": (MXFP4, mxfp4()),
    **{f"gptq of {bits}": (GPTQ | {"bits": bits}, gptq(bits, True)) for bits in (2, 4, 8)},
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, False)),
    "awq": (AWQ, awq()),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_methods_arithmetic(tmp_path, case):
    about, (tensors, values) = CASES[case]
    weights = Weights(folder_of(tmp_path / "m", about, **tensors, other=floats(3)))
    name = next(name for name in weights.entries if name != "other")
    entry, numel = weights.entries[name][1], values.numel()
    assert set(weights.entries) == {name, "other"} and weights.stored.keys() >= tensors.keys()
    assert (entry.shape, entry.dtype) == (tuple(values.shape), values.dtype)
    assert torch.equal(weights.read(name, 0, numel).view(values.shape), values.float())
    for start, stop in ((0, 1), (numel // 3, numel // 2 + 1), (numel - 3, numel)):  # not at the ends of blocks
        assert torch.equal(weights.read(name, start, stop), values.float().reshape(-1)[start:stop])
    pieces = list(weights.pieces(name, 5, numel - 1, 32))
    assert [numel - 1, 5] == [pieces[-1][1], pieces[0][0]]
    assert all(before[1] == after[0] for before, after in zip(pieces, pieces[1:], strict=False))


def test_the_methods_that_are_read_are_those_that_can_be_decoded():
    assert quantized.METHODS.keys() == quantization.READ.keys()


BEFORE = {
    "nf4": "m.weight.absmax",
    "nf4 twice": "m.weight.nested_absmax",
    "fp4 twice": "m.weight.nested_quant_map",
    "int8": "m.SCB",
    "fp8 in cut blocks": "m.weight_scale_inv",
    "fp8 by rows": "m.weight_scale",
    "mxfp4": "m.experts.down_proj_scales",
    "gptq of 4": "m.qzeros",
    "gptq of 2": "m.scales",
    "gptq of 8": "m.g_idx",
    "awq": "m.qzeros",
}


@pytest.mark.parametrize("case", BEFORE)
def test_sizes_and_types_that_disagree_are_refused_before_values_are_read(tmp_path, case):
    (about, (tensors, _)), name = CASES[case], BEFORE[case]
    value = tensors[name]
    other = value.double() if value.dtype.is_floating_point else value.to(torch.int16)
    for number, changed in enumerate((value.reshape(-1)[:-1].clone(), other, value.reshape(-1).repeat(2))):
        folder = folder_of(tmp_path / str(number), about, **tensors | {name: changed})
        with pytest.raises(UserError, match=r"m\.\S+") as caught:
            Weights(folder)
        assert "download the folder again" in caught.value.hint


@pytest.mark.parametrize("case", CASES)
def test_codes_without_their_scales_are_no_weights(tmp_path, case):
    """They are refused, or stay the integers that they are, which no parameter is filled from."""
    about, (tensors, _) = CASES[case]
    for name in tensors:
        if name.endswith((".quant_map", "weight_format")):
            continue  # bitsandbytes does not read them either
        try:
            left = Weights(folder_of(tmp_path / name, about, **{k: v for k, v in tensors.items() if k != name}))
        except UserError as error:
            assert "m." in str(error)
        else:
            types = {entry.dtype for _, entry in left.entries.values()}
            assert not left.entries.keys() & {"m.weight", "m.experts.down_proj"} or types - set(WEIGHT_DTYPES)


@pytest.mark.parametrize(
    ("about", "fact"),
    [
        ({"shape": [1 << 20, 1 << 20]}, r"of shape \[1048576, 1048576\] is stored in 150 bytes"),
        ({"shape": [-5, -60]}, "has shape"),
        ({"shape": ["a"]}, "has shape"),
        ({"shape": 7}, "cannot be read"),
        ({"blocksize": 0}, "blocksize 0"),
        ({"blocksize": "64"}, "blocksize 64"),
        ({"dtype": "int8"}, "dtype"),
        ({"nested_offset": "nan"}, "has shape"),
    ],
)
def test_a_hostile_state_of_bitsandbytes_is_refused(tmp_path, about, fact):
    tensors, _ = four_bits("nf4", False)
    whole = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [5, 60]} | about
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = described(**whole)
    with pytest.raises(UserError, match=fact):
        Weights(folder_of(tmp_path / "m", BNB, **tensors))


def test_a_group_that_is_not_there_is_refused(tmp_path):
    tensors, values = gptq(4, True)
    tensors["m.g_idx"][3] = 4
    weights = Weights(folder_of(tmp_path / "m", GPTQ, **tensors))
    with pytest.raises(UserError, match="m.g_idx names a group beyond its 4"):
        weights.read("m.weight", 0, values.numel())


@pytest.mark.parametrize(
    ("about", "fact"),
    [
        ({"quant_method": "aqlm"}, '"aqlm"'),
        (GPTQ | {"bits": 3}, "bits 3, and only 2 or 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format "marlin"'),
        (AWQ | {"version": "gemv"}, 'version "gemv"'),
        (COMPRESSED | {"format": "pack-quantized"}, 'format "pack-quantized"'),
        ({"bits": 4}, '"unknown"'),
        ("torchao", '"torchao"'),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, about, fact):
    with pytest.raises(UserError, match=fact) as caught:
        Weights(folder_of(tmp_path / "m", about, other=floats(3)))
    assert "the folder of the original weights" in caught.value.hint


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_counted_from_headers(tmp_path, case):
    about, (tensors, values) = CASES[case]
    folder = folder_of(tmp_path / "m", about, **tensors, other=floats(3))
    if case in ("gptq of 2", "gptq of 8"):  # counted as 4 bits, which the learning rate does not notice
        return
    assert sum(hub.stored(str(folder)).values()) == math.prod(values.shape) + 3


# -- beside the libraries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_four_bits_equal_bitsandbytes(tmp_path, kind, twice, storage):
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        plain = (floats(96, 320) - 0.6).to(dtype)
        codes, state = functional.quantize_4bit(
            plain, blocksize=64, compress_statistics=twice, quant_type=kind, quant_storage=storage
        )
        beside = {f"m.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        weights = Weights(folder_of(tmp_path / str(dtype), BNB, **{"m.weight": codes, **beside}))
        found = weights.read("m.weight", 0, plain.numel()).view(plain.shape)
        assert torch.equal(found, functional.dequantize_4bit(codes, state).float())


def test_int8_equals_bitsandbytes(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, scales, _ = functional.int8_vectorwise_quant((floats(48, 96) - 0.6).half())
    weights = Weights(folder_of(tmp_path / "m", BNB, **{"m.weight": codes, "m.SCB": scales}))
    found = weights.read("m.weight", 0, codes.numel()).view(codes.shape)
    assert torch.equal(found, functional.int8_vectorwise_dequant(codes, scales))


def test_mxfp4_and_fp8_equal_transformers(tmp_path):
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    tensors, _ = mxfp4()
    weights = Weights(folder_of(tmp_path / "a", MXFP4, **tensors))
    whole = theirs(*tensors.values())
    found = weights.read("m.experts.down_proj", 0, whole.numel()).view(whole.shape)
    assert torch.equal(found.bfloat16(), whole)
    try:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    except ImportError:
        pytest.skip("transformers from 5 on decodes fp8")
    codes, scales = floats(256, 384).to(torch.float8_e4m3fn), floats(2, 3)
    about = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weights = Weights(folder_of(tmp_path / "b", about, **{"m.weight": codes, "m.weight_scale_inv": scales}))
    whole = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(weights.read("m.weight", 0, codes.numel()).view(256, 384).bfloat16(), whole)


# -- a run -------------------------------------------------------------------------------------------------------------


def as_nf4(name: str, plain: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that bitsandbytes stores of a matrix."""
    blocks = plain.float().view(-1, 32)
    scales = blocks.abs().amax(1)
    codes = ((blocks / scales[:, None]).view(-1, 1) - torch.tensor(NF4)).abs().argmin(1)
    state = described(quant_type="nf4", blocksize=32, dtype="bfloat16", shape=list(plain.shape))
    packed = (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)
    return {name: packed, f"{name}.absmax": scales, f"{name}.quant_state.bitsandbytes__nf4": state}


def as_fp8(name: str, plain: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = plain.float().abs().amax() / 448
    return {name: (plain.float() / scales).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales.view(1, 1)}


def two_folders(path: Path, family: str, about: dict[str, Any], encode: Any) -> tuple[Path, Path]:
    """Write a folder whose projections are quantized, and one of the values that they stand for."""
    whole, made, plain = hf_folders.write(family, path / "whole", torch.bfloat16), path / "quantized", path / "plain"
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, entry) in (weights := Weights(whole)).entries.items():
        value = weights.read(name, 0, entry.numel).view(entry.shape).bfloat16()
        tensors |= encode(name, value) if "_proj" in name else {name: value}
    folder_of(made, about, **tensors)
    config = json.loads((whole / "config.json").read_text())
    decoded = Weights(made)
    values = {
        name: decoded.read(name, 0, entry.numel).view(entry.shape) for name, (_, entry) in decoded.entries.items()
    }
    folder_of(plain, {}, **{name: each.bfloat16() for name, each in values.items()})
    for folder, more in ((made, {"quantization_config": about}), (plain, {})):
        (folder / "config.json").write_text(json.dumps(config | more))
        (folder / "tokenizer.json").write_text(json.dumps(hf_folders.TOKENIZER))
    return made, plain


def steps(folder: Path, base: str, run: Path | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two steps of adapters beside a folder; return the losses and all parameters."""
    flags = {"lora.rank": "4", "lora.base": base}
    config = configs.load(str(folder), ["train.seq=12", "train.precision=bf16", "optimizer.lr=0.02"], flags)
    config = engines.resolve(config, 1)
    engine = engines.make_engine(config, stage=3, empty=True)
    said = load_weights(engine, config.train.init_from, config.model)
    assert ("decoded from" in said) == ("quantization_config" in (folder / "config.json").read_text())
    batch, losses = hf_folders.tokens(), []
    for step in range(2):
        losses.append(float(micro_step(engine, (batch[:, :-1], batch[:, 1:]), (0, step))))
        engine.step()
    if run is not None:
        run.mkdir()
        source_files.keep(config, engine.model, run)
        saver = Saver(engine, run / "checkpoints", asynchronous=False)
        saver.save(2, {"config": to_dict(config), "samples": 0})
        saver.close()
    state = engine.state_dict()
    engine.close()
    return losses, state


@pytest.mark.parametrize("base", ["bf16", "nf4"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])  # built in, and of transformers with several experts
def test_a_run_from_a_quantized_folder_is_one_from_the_decoded(tmp_path, family, base):
    pytest.importorskip("transformers")
    method = (BNB, as_nf4) if family == "llama" else ({"quant_method": "fp8"}, as_fp8)
    made, plain = two_folders(tmp_path, family, *method)
    (losses, state), (others, other) = steps(made, base), steps(plain, base)
    assert losses == others and losses[0] != losses[1]
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_a_merged_export_of_a_quantized_base_is_plain_and_the_base_is_known_by_its_files(tmp_path):
    pytest.importorskip("transformers")
    made, plain = two_folders(tmp_path, "llama", BNB, as_nf4)
    run, out = tmp_path / "run", tmp_path / "out"
    steps(made, "bf16", run)
    assert cli.run(["export", str(run), str(out), "--merge"]) == 0
    about = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in about and about.get("dtype", about.get("torch_dtype")) == "bfloat16"
    merged, base = Weights(out), Weights(plain)
    assert merged.entries.keys() == base.entries.keys() == Weights(made).entries.keys()
    for name, (_, entry) in base.entries.items():
        assert torch.equal(merged.read(name, 0, entry.numel), base.read(name, 0, entry.numel)) != ("_proj" in name)
    assert cli.run(["export", str(run), str(tmp_path / "x"), "--merge", "--base-dir", str(plain)]) == 2  # other files


def test_nf4_of_a_folder_in_nf4_has_the_same_codes(tmp_path):
    """Its scales are rounded to 8 bits, as those of any base."""
    scales = torch.rand(512, generator=torch.Generator().manual_seed(1)) + 0.1
    codes = torch.randint(0, 16, (512, 64), generator=torch.Generator().manual_seed(2))
    codes[:, 5] = torch.randint(0, 2, (512,)) * 15  # a block's largest value is its scale
    values = (torch.tensor(NF4)[codes] * scales[:, None]).bfloat16()
    packed = encode("nf4", values.view(-1)).view(2, -1)[:, : GRAIN // 2].reshape(-1)
    assert torch.equal(packed, (codes.view(-1)[0::2] * 16 + codes.view(-1)[1::2]).to(torch.uint8))
