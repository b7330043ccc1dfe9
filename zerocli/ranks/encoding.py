"""Plain values as bytes: tensors, numbers, strings, and lists and dicts of them; no code runs when they are read."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": dict}
_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices", torch.sparse_csr_tensor),
    "sparse_csc": ("ccol_indices", "row_indices", torch.sparse_csc_tensor),
    "sparse_bsr": ("crow_indices", "col_indices", torch.sparse_bsr_tensor),
    "sparse_bsc": ("ccol_indices", "row_indices", torch.sparse_bsc_tensor),
}


def encode(value: Any) -> bytes:
    """Return a plain value as bytes; raise TypeError for what is none."""
    parts: list[bytes] = []
    head = json.dumps(_described(value, parts)).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *parts))


def decode(data: bytes, device: torch.device | str = "cpu") -> Any:
    """Return the value that `encode` wrote; raise ValueError if the bytes are not whole.

    Tensors that were not on the CPU are put on `device`.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        described = json.loads(data[8 : 8 + length])
        return _made(described, memoryview(data)[8 + length :], device)
    except (KeyError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"these bytes are no encoded value: {error}") from error


def _described(value: Any, parts: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (bytes, bytearray, complex):
        return [kind.__name__, value.hex() if kind is not complex else [value.real, value.imag]]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return [kind.__name__, [_described(each, parts) for each in value]]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return [kind.__name__, [[_described(k, parts), _described(v, parts)] for k, v in value.items()]]
    if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return _described_tensor(value.detach(), parts)
    raise TypeError(f"a {kind.__name__} is no number, string, tensor, list or dict")


def _described_tensor(tensor: torch.Tensor, parts: list[bytes]) -> Any:
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise TypeError("quantized and nested tensors, and those without values, cannot be written")
    if layout == "sparse_coo":
        indices, values = tensor._indices(), tensor._values()
        return [
            layout,
            _described(indices, parts),
            _described(values, parts),
            list(tensor.shape),
            tensor.is_coalesced(),
        ]
    if layout in _COMPRESSED:
        outer, inner, _ = _COMPRESSED[layout]
        found = [getattr(tensor, outer)(), getattr(tensor, inner)(), tensor.values()]
        return [layout, *(_described(each, parts) for each in found), list(tensor.shape)]
    if layout != "strided":
        raise TypeError(f"a tensor of layout {layout} cannot be written")
    packed = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    memory = packed.reshape(-1).view(torch.uint8).numpy().tobytes() if packed.numel() else b""
    start = sum(map(len, parts))
    parts.append(memory)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ["tensor", dtype, list(tensor.shape), start, len(memory), tensor.device.type == "cpu"]


def _made(described: Any, memory: memoryview, device: torch.device | str) -> Any:
    if not isinstance(described, list):
        return described
    kind, *rest = described
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_made(each, memory, device) for each in rest[0])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_made(k, memory, device): _made(v, memory, device) for k, v in rest[0]})
    if kind == "tensor":
        dtype, shape, start, nbytes, on_cpu = rest
        found = torch.frombuffer(bytearray(memory[start : start + nbytes]), dtype=torch.uint8) if nbytes else None
        made = torch.empty(0, dtype=torch.uint8) if found is None else found
        return made.view(getattr(torch, dtype)).reshape(shape).to("cpu" if on_cpu else device)
    if kind == "sparse_coo":
        indices, values = (_made(each, memory, device) for each in rest[:2])
        return torch.sparse_coo_tensor(indices, values, rest[2], is_coalesced=rest[3], check_invariants=True)
    if kind in _COMPRESSED:
        make: Any = _COMPRESSED[kind][2]
        return make(*(_made(each, memory, device) for each in rest[:3]), rest[3], check_invariants=True)
    if kind == "complex":
        return complex(*rest[0])
    if kind in ("bytes", "bytearray"):
        return bytes.fromhex(rest[0]) if kind == "bytes" else bytearray.fromhex(rest[0])
    if kind in ("dtype", "device"):
        return getattr(torch, rest[0]) if kind == "dtype" else torch.device(rest[0])
    raise ValueError(f"these bytes are no encoded value: {kind!r}")
