"""Export: a checkpoint's weights as consolidated safetensors, streamed piece by piece, under Hugging Face names.

Pieces are read from the checkpoint, verified and written to the new file, a few at a time, bypassing the page cache:
memory does not grow with the model. Only tensors that must be transposed (GPT-2's matrices, for Hugging Face) are held
whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerocli.checkpoint import safetensors, source_files
from zerocli.checkpoint.folder import MANIFEST, Folder
from zerocli.checkpoint.manifest import Damaged, Manifest, Tensor, Unreadable, name_of
from zerocli.checkpoint.manifest import read as read_manifest
from zerocli.checkpoint.reader import Reader, in_order
from zerocli.checkpoint.safetensors import Entry
from zerocli.config import Config, from_dict, load
from zerocli.errors import DOES_NOT_FIT, FAILURE, UserError
from zerocli.layout.sizes import format_bytes
from zerocli.models import hugging
from zerocli.models.hugging import Mapping
from zerocli.regular_files import sync_folder, write_text

NUM_THREADS = 12
"""Number of pieces, or tensors to transpose, that are processed concurrently."""
MEMORY_NBYTES = 2 << 30
"""Memory for transposing tensors; one tensor is always allowed."""
BUFFERS = "buffers/0/"
Row = tuple[Mapping | None, list[Entry]]
"""One of our parameters and the tensors that it becomes; without a parameter, tensors that come from elsewhere."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """The result of an export to the folder `out`."""

    out: Path
    step: int
    files: list[str]
    parameters: int
    note: str
    model: bool
    """Whether the config.json beside the weights describes the model."""
    dtype: str
    """What was written, and why, in words."""
    folder: bool = False
    """Whether it is a Hugging Face folder, which `zerocli train` takes as CONFIG."""
    adapters: str | None = None
    """Of adapters: the base that they are for; empty if it has random weights."""

    @property
    def nbytes(self) -> int:
        return sum((self.out / file).stat().st_size for file in self.files)

    @property
    def tokenizer(self) -> bool:
        """Whether a tokenizer.json lies beside the weights."""
        return (self.out / "tokenizer.json").is_file()


def export(
    run: str,
    step: int | None,
    out: Path,
    dtype: str,
    file_nbytes: int,
    say: Callable[[str], None] = lambda text: None,
    *,
    merge: bool = False,
    base: str = "",
) -> Exported:
    """Write the parameters of a run's newest whole checkpoint (or that of `step`) to `out`, whole or not at all.

    `run` may also be a checkpoint's own folder. An empty `dtype` is that of the folder which the run began from, else
    fp32. Adapters are written as peft's folder, or with `merge` added to their base, which is in the folder `base` if
    it was moved. Damage is often found only while writing: what was written is then removed and the previous
    checkpoint is tried, unless `step` names this one.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already and is not an empty folder", hint="another OUT")
    found = candidates(run, step)
    for path in found:
        try:
            manifest = read_manifest(path)
            config = _config(manifest)
            if config is None or not config.lora.rank:
                if merge:
                    raise UserError("--merge: the run trained no adapters", hint="the same without --merge")
                return write(path, manifest, out, dtype, file_nbytes)
            from zerocli.checkpoint.export_adapters import write_adapters, write_merged

            config = config.with_values({"train.init_from": base}) if base else config
            if merge:
                return write_merged(path, manifest, config, out, dtype, file_nbytes)
            return write_adapters(path, manifest, config, out, dtype)
        except Unreadable as error:
            raise UserError(str(error), exit_code=FAILURE) from None
        except Damaged as error:
            if len(found) == 1:
                hint = "" if step is None else "without --step it is the newest whole one"
                raise UserError(f"{path}: {error}", hint=hint, exit_code=FAILURE) from None
            say(f"{path.name} skipped: {error}")
    fact = f"{run}: none of its {len(found)} checkpoints is whole"
    raise UserError(fact, hint="another copy of the run; what is left of it cannot be used", exit_code=FAILURE)


def candidates(run: str, step: int | None) -> list[Path]:
    """Return the checkpoints to try, newest first; UserError if there are none."""
    path = Path(run)
    if (path / MANIFEST).exists():
        if step is not None and not path.name.endswith(f"-{step:08d}"):
            raise UserError(f"{run}: is a checkpoint itself, and not of step {step}", hint="the run's folder as RUN")
        return [path]
    try:
        found = Folder(path / "checkpoints").committed()
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    wanted = [each.path for each in found if step in (None, each.step)]
    if not wanted:
        others = ", ".join(str(each.step) for each in found[:9])
        raise UserError(
            f"{run}: no whole checkpoint{'' if step is None else f' of step {step}'}"
            + (f"; there are {others}" if others else ""),
            hint=f"--step {found[0].step}" if found else "zerocli train --run-dir RUN --set checkpoint.every=100",
        )
    return wanted


def write(path: Path, manifest: Manifest, out: Path, dtype: str, file_nbytes: int) -> Exported:
    """Write one checkpoint's parameters to `out`, which is absent or empty; raise Damaged if it is not whole."""
    config = _config(manifest)
    source = path.absolute().parent.parent / source_files.FOLDER
    begun_from = source_files.config_of(source) if config and config.model.folder else None
    dtype, why = dtype_of(dtype, begun_from)
    theirs = source_files.names_of(source) if config and config.model.code == "transformers" else None
    reason = hugging.known(config.model) if config else "the checkpoint does not say which model it is of"
    names = [name.removeprefix("parameters/") for name in manifest.tensors if name.startswith("parameters/")]
    mapped = [Mapping(n, (n,)) for n in names]
    zeros: list[tuple[str, int]] = []
    if theirs is not None:
        reason = ""
        known = {mapping.ours for mapping in theirs}
        buffers = [name.removeprefix(BUFFERS) for name in manifest.tensors if name.startswith(BUFFERS)]
        names += [name for name in buffers if name in known]
        mapped = theirs
    elif config and not reason:
        # One more than there are is enough to detect another model, whatever its config says.
        mapped = list(itertools.islice(hugging.mappings(config.model), len(names) + 1))
        zeros = list(itertools.islice(hugging.absent(config.model), len(names) + 1))
    told = {mapping.ours for mapping in mapped}
    if missing := sorted(told - set(names)):
        raise Damaged(f"it has no parameter {missing[0]}, which the model of its config has")
    if beside := sorted(set(names) - told):
        raise Damaged(f"it has a parameter {beside[0]}, which the model of its config does not have")
    with export_folder(out) as aside, Reader(path, manifest) as reader:
        rows: list[Row] = [*_entries(manifest, mapped, DTYPES[dtype])]
        rows += [(None, [Entry(name, DTYPES[dtype], (numel,))]) for name, numel in zeros]
        files = write_files(rows, aside, file_nbytes, functools.partial(_fill, reader))
        about: dict[str, Any] = {"torch_dtype": name_of(DTYPES[dtype])}
        if begun_from is not None and config and not reason:
            about = _as_begun(begun_from, config, manifest, source, about["torch_dtype"])
        elif config and not reason:
            about = hugging.config_json(config.model, config.train.seq, about["torch_dtype"])
        elif config:
            about = manifest.values["config"]
        write_text(aside / "config.json", json.dumps(about, indent=2) + "\n")
        if begun_from is not None:
            source_files.copy(str(source), aside)
    numel = sum(math.prod(manifest.tensors[_stored(manifest, name)].shape) for name in names)
    note = "" if config is None else f"Hugging Face names ({hugging.type_of(config.model) or config.model.family})"
    note = f"own names: {reason}" if reason else "the names of its folder" if theirs is not None else note
    named = config is not None
    return Exported(out, manifest.step, files, numel, note, named, f"{dtype} ({why})", folder=named and not reason)


def dtype_of(asked: str, begun: dict[str, Any] | None) -> tuple[str, str]:
    """Return the dtype to write and why: as asked, or as the config.json says of the weights that a run began from."""
    if asked:
        return asked, "as asked"
    if begun is None:
        return "fp32", "as they are trained"
    said = begun.get("dtype") or begun.get("torch_dtype")
    for name, dtype in DTYPES.items():
        if said == name_of(dtype):
            return name, "as the folder that the run began from"
    return "fp32", "the folder that the run began from does not say"


def dtype_key(about: dict[str, Any]) -> str:
    """Return the key under which a config.json says the dtype of its weights."""
    return "dtype" if "dtype" in about and "torch_dtype" not in about else "torch_dtype"


def _as_begun(begun: dict[str, Any], config: Config, manifest: Manifest, source: Path, dtype: str) -> dict[str, Any]:
    """Return the config.json that the run began from, with the dtype that is written and what the run changed."""
    about = dict(begun)
    if config.model.code != "transformers":
        rows = manifest.tensors.get("parameters/embed.positions.weight")
        seq = rows.shape[0] if rows is not None else config.train.seq
        if rows is not None and begun.get("n_positions", 1024) != seq:
            about["n_positions"] = seq
        if not _same_shape(config, source):
            ours = hugging.config_json(config.model, seq, dtype)
            kept = ("max_position_embeddings", "n_positions")
            about |= {key: value for key, value in ours.items() if value is not None and key not in kept}
    about[dtype_key(begun)] = dtype
    return about


def _same_shape(config: Config, source: Path) -> bool:
    """Return whether the run trained the very model that its folder's config.json describes."""
    try:
        begun = load(str(source / "config.json"), ["model.code=zerocli"]).model
    except UserError:
        return False
    beside: dict[str, Any] = {"folder": "", "code": "auto", "compile": "auto", "dropout": 0.0}
    return dataclasses.replace(begun, **beside) == dataclasses.replace(config.model, **beside)


def _stored(manifest: Manifest, name: str) -> str:
    """Return the name under which a checkpoint has one of the model's parameters or buffers."""
    return f"parameters/{name}" if f"parameters/{name}" in manifest.tensors else BUFFERS + name


@contextlib.contextmanager
def export_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder to write into, which becomes `out`; on failure it is removed.

    An existing folder (the current folder, a mount point) is not replaced: files are moved into it, the config last.
    """
    target = out.absolute()
    within = target if target.exists() else target.parent
    aside = within / f"{target.name}.export-{secrets.token_hex(8)}.tmp"
    try:
        within.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        sync_folder(aside)
        if within == target:
            for file in sorted(aside.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(target / file.name)
            aside.rmdir()
        else:
            aside.rename(target)
        sync_folder(within)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})", exit_code=FAILURE) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _config(manifest: Manifest) -> Config | None:
    saved = manifest.values.get("config")
    if not isinstance(saved, dict):
        return None
    # The run's tiers need not be installed where it is exported.
    return from_dict({key: value for key, value in saved.items() if key != "offload"}, "the checkpoint's config")


# -- laying out ----------------------------------------------------------------------------------------------------


def _entries(manifest: Manifest, mapped: list[Mapping], dtype: torch.dtype) -> Iterator[tuple[Mapping, list[Entry]]]:
    """Yield each of our parameters with the tensors that it becomes."""
    for mapping in mapped:
        tensor = manifest.tensors[_stored(manifest, mapping.ours)]
        kind = dtype if tensor.dtype.is_floating_point else tensor.dtype
        if mapping.shapes:
            if sum(map(math.prod, mapping.shapes)) != math.prod(tensor.shape):
                raise Damaged(f"{mapping.ours} has shape {list(tensor.shape)}, and other tensors in the model's files")
            yield mapping, [Entry(n, kind, shape) for n, shape in zip(mapping.theirs, mapping.shapes, strict=True)]
            continue
        rows = mapping.rows or tensor.shape[:1]
        if sum(rows) != sum(tensor.shape[:1]):
            raise Damaged(f"{mapping.ours} has {tensor.shape[0]} rows, not {sum(rows)}")
        shapes = [(n, *tensor.shape[1:]) for n in rows] or [()]
        if mapping.transposed:
            shapes = [tuple(reversed(shape)) for shape in shapes]
        yield mapping, [Entry(name, kind, shape) for name, shape in zip(mapping.theirs, shapes, strict=True)]


def write_files(
    rows: Sequence[Row], aside: Path, file_nbytes: int, fill: Callable[[Path, list[Row]], None]
) -> list[str]:
    """Write tensors to files of at most as many bytes, unless one row is larger, and their index; return the names.

    `fill` writes the rows of one file.
    """
    sizes = [sum(entry.nbytes for entry in entries) for _, entries in rows]
    refuse_full_disk(aside, sum(sizes))
    groups: list[list[Row]] = [[]]
    used = 0
    for row, nbytes in zip(rows, sizes, strict=True):
        if groups[-1] and used + nbytes > file_nbytes:
            groups.append([])
            used = 0
        groups[-1].append(row)
        used += nbytes
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else [safetensors.SINGLE]
    for name, group in zip(names, groups, strict=True):
        fill(aside / name, group)
    weight_map = {e.name: name for name, group in zip(names, groups, strict=True) for _, es in group for e in es}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    write_text(aside / safetensors.INDEX, json.dumps(index, indent=2) + "\n")
    return names


def refuse_full_disk(aside: Path, nbytes: int) -> None:
    """Raise UserError if a disk has no room for as many bytes."""
    free = shutil.disk_usage(aside).free
    if nbytes > free:
        raise UserError(
            f"{aside.parent}: {format_bytes(nbytes)} needed, {format_bytes(free)} free there",
            hint="an OUT on another disk, or --dtype bf16",
            exit_code=DOES_NOT_FIT,
        )


def write_parameters(path: Path, manifest: Manifest, mapped: list[Mapping], file: Path, dtype: torch.dtype) -> None:
    """Write some of a checkpoint's parameters to one file."""
    with Reader(path, manifest) as reader:
        _fill(reader, file, [*_entries(manifest, mapped, dtype)])


def _threads(manifest: Manifest, group: list[Row]) -> int:
    """Return the number of threads: a tensor that is held whole needs three times its size for a moment."""
    mapped = [(manifest.tensors[_stored(manifest, each.ours)], each) for each, _ in group if each is not None]
    whole = [math.prod(t.shape) * t.dtype.itemsize for t, mapping in mapped if _starts(t, mapping) is None]
    return max(1, min(NUM_THREADS, MEMORY_NBYTES // (3 * max(whole, default=1))))


def _starts(tensor: Tensor, mapping: Mapping) -> list[int] | None:
    """Return the index of each piece's first element in the file, None for a tensor that must be held whole."""
    starts = [flat_start(tensor.shape, piece.offsets, piece.sizes) for piece in tensor.pieces]
    known = [start for start in starts if start is not None]
    return known if len(known) == len(starts) and not mapping.transposed else None


def _fill(reader: Reader, path: Path, group: list[Row]) -> None:
    """Write one file."""
    number = _threads(reader.manifest, group)
    with contextlib.closing(safetensors.Writer(path, [entry for _, entries in group for entry in entries])) as writer:
        with ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            pieces = ((es, *piece) for mapping, es in group for piece in _pieces(reader, mapping, es))
            acts = (functools.partial(_place, writer, *piece) for piece in pieces)
            for _ in in_order(threads, acts, 2 * NUM_THREADS):
                pass
        writer.finish()


def _pieces(
    reader: Reader, mapping: Mapping | None, entries: list[Entry]
) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
    """Yield (first element, function that reads the values) of the pieces of one of our parameters (None: zeros)."""
    if mapping is None:
        yield 0, lambda: torch.zeros(entries[0].numel)
        return
    name = _stored(reader.manifest, mapping.ours)
    starts = _starts(reader.manifest.tensors[name], mapping)
    if starts is None:
        yield 0, lambda: reader.tensor(name).t() if mapping.transposed else reader.tensor(name)
        return
    for index, begin in enumerate(starts):
        yield begin, functools.partial(reader.piece, name, index)


def _place(writer: safetensors.Writer, entries: list[Entry], begin: int, read: Callable[[], torch.Tensor]) -> None:
    """Write values to the entries, as the elements from `begin` on of their concatenation."""
    values = read().reshape(-1)
    at = 0
    for entry in entries:
        low, high = max(begin, at), min(begin + values.numel(), at + entry.numel)
        if low < high:
            writer.write(entry.name, low - at, values[low - begin : high - begin])
        at += entry.numel


def flat_start(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
    """Return the index of a box's first element in a row-major tensor, None if the box is not contiguous there."""
    inner, start, cut = 1, 0, False
    for length, offset, size in reversed(list(zip(shape, offsets, sizes, strict=True))):
        if cut and size > 1:
            return None
        cut = cut or size < length
        start += offset * inner
        inner *= length
    return start
