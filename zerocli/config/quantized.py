"""Folders of quantized weights: which are read, and how many parameters they have. (No torch.)

`checkpoint/quantized.py` decodes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zerocli.errors import UserError, quote

KEY = "quantization_config"
"""What a config.json describes its quantized weights by."""
READ: dict[str, Mapping[str, tuple[object, ...]]] = {
    "bitsandbytes": {},
    "mxfp4": {},
    "fp8": {},
    "compressed-tensors": {"format": ("float-quantized", "naive-quantized", "int-quantized")},
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
    "awq": {"bits": (4,), "version": ("gemm",), "format": ("gemm",)},
}
"""The methods whose weights are read, and the values of their keys that are: of these, or absent."""
TURNED = ("gpt2", "openai-gpt", "imagegpt")
"""Families whose matrices bitsandbytes stores transposed."""
_SCALES = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format", "bitsandbytes__nf4"),
    *("bitsandbytes__fp4", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
    *("qzeros", "scales", "g_idx"),
)
"""Last words of the names of tensors that hold no parameters."""
_WIDTHS = {"64": 8, "32": 4, "16": 2}


def method_of(values: Mapping[str, Any]) -> str:
    """Return the method by which a config.json says that its weights are quantized; empty if they are not."""
    found = values.get(KEY)
    if not found:
        return ""
    if not isinstance(found, Mapping):
        return str(found)
    loaded = any(found.get(key) for key in ("load_in_4bit", "load_in_8bit"))
    return str(found.get("quant_method") or ("bitsandbytes" if loaded else "unknown"))


def refuse(path: str, values: Mapping[str, Any]) -> None:
    """Raise UserError if a config.json says that its weights are quantized in a way that is not read."""
    method = method_of(values)
    if not method:
        return
    fact = f"its weights are quantized ({quote(method)}), "
    hint = "the folder of the original weights, with --lora 16 --base nf4 for adapters beside them in 4 bits"
    if method not in READ:
        raise UserError(f"{path}: {fact}and of such folders {', '.join(READ)} are read", hint=hint)
    about = values[KEY] if isinstance(values[KEY], Mapping) else {}
    for key, read in READ[method].items():
        value = about.get(key)
        value = value.lower() if isinstance(value, str) else value
        if value is not None and value not in read:
            known = " or ".join(map(str, read))
            raise UserError(f"{path}: {fact}{key} {quote(value)}, and only {known} is read", hint=hint)
    if method == "bitsandbytes" and values.get("model_type") in TURNED:
        raise UserError(f"{path}: {fact}and such a {values['model_type']} is stored transposed", hint=hint)


def parameters(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Return the elements of a model by dtype, of tensors in files (dtype, shape) that may be quantized."""
    found: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        numel, last = math.prod(shape), name.rpartition(".")[2]
        if last in _SCALES or (last.endswith("_scales") and f"{name.removesuffix('scales')}blocks" in tensors):
            continue
        if f"{name}.absmax" in tensors:  # two elements in a byte
            numel *= 2 * _WIDTHS.get(dtype[-2:], 1)
        elif last == "qweight":
            numel *= 8
        elif last.endswith("_blocks"):
            numel *= 2
        found[dtype] = found.get(dtype, 0) + numel
    return found
