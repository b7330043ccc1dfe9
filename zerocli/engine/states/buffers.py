"""A model's buffers: placed on the device with rank 0's values, whatever their layout, dtype and sharing of memory.

A buffer may be expanded, overlap itself, be a view of another one, or be sparse. Collectives move dense bytes alone, so
values travel packed, and are written back element by element where they differ. A buffer that is on the device already
stays the object that it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator

import torch
from torch import nn

from zerocli.engine.comm import Collectives
from zerocli.errors import Refused
from zerocli.ranks.encoding import decode, encode

CHUNK_NBYTES = 64 << 20
"""Values are received in pieces of this size, beside the buffer that they are compared with."""


def place_buffers(model: nn.Module, fresh: set[int], collectives: Collectives, device: torch.device) -> None:
    """Put the model's buffers on the device; those that had values start from rank 0's.

    `fresh` are the ids of tensors that are initialised later. Buffers that share memory go on sharing it.
    """
    refuse_different_models(model, fresh, collectives)
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, b in module._buffers.items():
            if b is not None and id(b) not in fresh:
                named.setdefault(id(b), (f"{path}.{name}" if path else name, b))
    placed = _moved([b for _, b in named.values()], device)
    for module in model.modules():
        for name, b in module._buffers.items():
            if b is not None and id(b) in placed:
                module._buffers[name] = placed[id(b)]
    if collectives.world > 1 and collectives.backend != "fake":  # in a fake group this process is rank 0
        for key, (name, _) in named.items():
            take_first(name, placed[key], collectives)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are elements of one storage, at its strides."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return getattr(type(tensor), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's memory: itself, or the members of a sparse one or a wrapper."""
    if tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor


def held_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the memory that the model's buffers take."""
    for name, b in model.named_buffers():
        for part in plain_parts(b):
            yield name, part


@torch.no_grad()
def write_buffer(name: str, b: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a buffer in place; ValueError if its layout cannot hold them."""
    with torch.inference_mode(b.is_inference()):
        try:
            b.copy_(values)
            return
        except RuntimeError:
            values = values.to(b.device, copy=True)
        if not is_plain(b):
            torch.utils.swap_tensors(b, values)
            return
        values = values.to(b.dtype)
        elements = _distinct(b)
        rows, index = _addressed(elements)
        kept, given = rows[index], values[tuple(slice(0, size) for size in elements.shape)]
        rows[_addresses(elements).flatten()] = given.reshape(-1, 1).contiguous().view(torch.uint8)
        if not torch.equal(b, values):
            rows[index] = kept
            raise ValueError(f"elements of the buffer {name} share memory, and the state has different values for them")


def refuse_different_models(model: nn.Module, fresh: set[int], collectives: Collectives) -> None:
    """Raise Refused on all ranks unless they have the same parameters and buffers: names, shapes and dtypes."""
    if collectives.world == 1 or collectives.backend == "fake":
        return
    texts = list(_descriptions(model, fresh))
    marks = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") for text in texts]
    digest = hashlib.sha256(repr(marks).encode()).digest()
    short = torch.tensor([len(marks), *digest], dtype=torch.int64, device=collectives.device)
    everyone = collectives.gather_control(short)
    if bool((everyone == everyone[0]).all()):
        return
    length = int(everyone[:, 0].max())
    padded = torch.tensor(marks + [-1] * (length - len(marks)), dtype=torch.int64, device=collectives.device)
    rows = collectives.gather_control(padded).tolist()
    at = next(i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1)
    other = next(rank for rank, row in enumerate(rows) if row[at] != rows[0][at])
    mine = (texts[at] if at < len(texts) else "no further tensor").encode()[:200].ljust(200)
    shown = collectives.gather_control(torch.tensor(list(mine), dtype=torch.uint8, device=collectives.device)).tolist()
    first, second = (bytes(shown[rank]).decode(errors="replace").strip() for rank in (0, other))
    raise Refused(
        f"the ranks have different models: rank 0 has {first}, and rank {other} has {second}; build the same model on "
        "every rank"
    )


def _descriptions(model: nn.Module, fresh: set[int]) -> Iterator[str]:
    for name, p in model.named_parameters():
        kind = "a meta parameter" if id(p) in fresh else "a trainable parameter" if p.requires_grad else "a parameter"
        yield f"{name}, {kind} of {p.dtype} {list(p.shape)}"
    for name, b in model.named_buffers():
        kind = "a meta buffer" if id(b) in fresh else "a buffer"
        shape = list(_distinct(b).shape) if is_plain(b) else f"{type(b).__name__} {list(b.shape)}"
        yield f"{name}, {kind} of {b.dtype} {shape}"


# -- moving ------------------------------------------------------------------------------------------------------------


def _moved(buffers: list[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Return the buffers on the device, by their ids; those that share a storage share one there too."""
    found = {id(b): b for b in buffers if b.device == device}
    sharing: dict[int, list[torch.Tensor]] = {}
    for b in buffers:
        if id(b) not in found:
            shares = is_plain(b) and type(b) is torch.Tensor and b.numel() > 0 and not b.is_meta
            sharing.setdefault(b.untyped_storage().data_ptr() if shares else id(b), []).append(b)
    for group in sharing.values():
        if len(group) == 1:
            found[id(group[0])] = group[0].to(device)
            continue
        # All of them lie between these bytes of the storage, which become the new one.
        start = min(b.storage_offset() * b.itemsize for b in group)
        stop = max(_last_byte(b) for b in group)
        start -= start % max(b.itemsize for b in group)
        old = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        new = old.set_(group[0].untyped_storage(), start, (stop - start,), (1,)).to(device, copy=True)
        for b in group:
            offset = (b.storage_offset() * b.itemsize - start) // b.itemsize
            view = torch.empty(0, dtype=b.dtype, device=device)
            found[id(b)] = view.set_(new.untyped_storage(), offset, b.shape, b.stride()).requires_grad_(b.requires_grad)
    return found


def _last_byte(b: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(b.shape, b.stride(), strict=True))
    return int(b.storage_offset() + last + 1) * b.itemsize


# -- rank 0's values ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def take_first(name: str, b: torch.Tensor, collectives: Collectives) -> None:
    """Give a buffer rank 0's values, in place."""
    if any(base.__name__ == "DTensor" for base in type(b).__mro__):
        return  # its own mesh says what each rank has of it
    with torch.inference_mode(b.is_inference()):
        if not is_plain(b):
            _take_odd(name, b, collectives)
            return
        with torch._C.DisableTorchFunctionSubclass():
            _take_plain(b.detach().as_subclass(torch.Tensor), collectives)


def _take_plain(b: torch.Tensor, collectives: Collectives) -> None:
    if not b.numel():
        return
    elements = _distinct(b)
    if _overlaps(elements):
        rows, index = _addressed(elements)
        packed = rows[index]
        if _receive(packed.view(-1), collectives):
            rows[index] = packed
        return
    values = elements.resolve_conj().resolve_neg().contiguous()
    flat = values.as_strided((values.numel(),), (1,))  # view(-1) would keep an odd stride of a single element
    changed = _receive(flat.view(torch.uint8), collectives)
    if changed and values.data_ptr() != elements.data_ptr():
        elements.copy_(values)


def _receive(packed: torch.Tensor, collectives: Collectives) -> bool:
    """Overwrite packed bytes with rank 0's where they differ; return whether any do."""
    changed = False
    for part in packed.split(CHUNK_NBYTES):
        theirs = collectives.broadcast(part.to(collectives.device, copy=True)).to(part.device)
        if collectives.rank > 0 and not torch.equal(theirs, part):
            part.copy_(theirs)
            changed = True
    return changed


def _distinct(b: torch.Tensor) -> torch.Tensor:
    """Return the buffer without its expanded dimensions: one element of each."""
    for dim, (size, stride) in enumerate(zip(b.shape, b.stride(), strict=True)):
        if size > 1 and stride == 0:
            b = b.narrow(dim, 0, 1)
    return b


def _overlaps(b: torch.Tensor) -> bool:
    """Whether two elements of the tensor may be one in memory, as in sliding windows."""
    reach = 0
    for stride, size in sorted(zip(b.stride(), b.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _addressed(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory that a tensor spans, one row of bytes per element, and the rows that it reads, each once."""
    index = _addresses(b).unique()
    spanned = b.as_strided((int(index[-1]) + 1,), (1,), b.storage_offset())
    return spanned.view(torch.uint8).view(-1, b.itemsize), index


def _addresses(b: torch.Tensor) -> torch.Tensor:
    """Return where in memory each element of a tensor is, in elements from its first."""
    reads = torch.zeros((), dtype=torch.int64, device=b.device)
    for size, stride in zip(b.shape, b.stride(), strict=True):
        reads = reads.unsqueeze(-1) + torch.arange(size, device=b.device) * stride
    return reads


def _take_odd(name: str, b: torch.Tensor, collectives: Collectives) -> None:
    """Give a sparse buffer rank 0's values; a quantized or wrapped one must be equal on all ranks."""
    mine, readable = bytearray(), True
    try:
        mine = bytearray(encode(b.detach()))
    except TypeError:
        readable = False
        with contextlib.suppress(Exception):  # only to compare
            stream = io.BytesIO()
            torch.save(b.detach(), stream)
            mine = bytearray(stream.getvalue())
    digest = torch.tensor([len(mine), *hashlib.sha256(mine).digest()], device=collectives.device)
    everyone = collectives.gather_control(digest)
    if everyone[0, 0] and bool((everyone == everyone[0]).all()):
        return
    sendable = collectives.broadcast(torch.tensor([readable], device=collectives.device).int())
    refusal = Refused(
        f"the buffer {name} is a {type(b).__name__} ({b.layout}) that differs between ranks, and rank 0's cannot be "
        "given to the others: keep its parts as plain tensors, or give it the same values on every rank"
    )
    if not sendable.item():
        raise refusal
    sent = torch.empty(int(everyone[0, 0]), dtype=torch.uint8, device=collectives.device)
    if collectives.rank == 0:
        sent.copy_(torch.frombuffer(mine, dtype=torch.uint8))
    for part in sent.split(CHUNK_NBYTES):
        collectives.broadcast(part)
    if collectives.rank > 0:
        try:
            theirs = decode(sent.cpu().numpy().tobytes(), b.device)
            torch.utils.swap_tensors(b, theirs.requires_grad_(b.requires_grad))
        except (ValueError, RuntimeError):
            raise refusal from None
