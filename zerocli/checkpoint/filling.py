"""Filling training state from files: large reads by several threads, straight to where the values stay.

A `Read` is a run of consecutive elements of one tensor in a file. Where the state is host memory of the file's own
dtype, the file is read into it directly. Otherwise a thread reads into a buffer of its own (pinned for a GPU, which
then converts), so host memory beyond the state is a buffer per thread, and reading and copying overlap.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tiers.pages import memory_of
from zerocli import machine
from zerocli.checkpoint.reader import in_order
from zerocli.checkpoint.sources import Memory, Source, SplitMaster
from zerocli.engine.units.master import split
from zerocli.errors import FAILURE, UserError
from zerocli.layout.constants import LOAD_THREADS, load_nbytes
from zerocli.ranks.startup import STARTUP


@dataclass(frozen=True)
class Read:
    """Elements of one tensor in a file, and where they go: element `at` of a source."""

    file: Path
    start: int
    """Offset in bytes."""
    numel: int
    dtype: torch.dtype
    target: Source
    at: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def cut(self, nbytes: int) -> Iterator[Read]:
        """Yield reads of at most `nbytes` bytes."""
        each, width = max(1, nbytes // self.dtype.itemsize), self.dtype.itemsize
        for first in range(0, self.numel, each):
            numel = min(each, self.numel - first)
            yield Read(self.file, self.start + first * width, numel, self.dtype, self.target, self.at + first)


class Filler:
    """Runs reads, and other functions that fill state, once, in several threads; raises the first failure."""

    def __init__(self, device: torch.device, kept_nbytes: int) -> None:
        self._device = device
        self._num_threads = max(2, min(LOAD_THREADS, machine.cores()))
        self._nbytes = load_nbytes(kept_nbytes, self._num_threads)
        self._files: dict[Path, int] = {}
        self._own = threading.local()
        self._one_at_a_time = threading.Lock()
        """Held where a tier is written to: tiers are not made for several threads."""

    def run(self, reads: Iterable[Read], others: Iterable[Callable[[], None]] = ()) -> None:
        """Do all reads, in the order of the files, and then the others one after the other."""
        ordered = sorted(reads, key=lambda read: (str(read.file), read.start))
        self._nbytes = min(self._nbytes, max((read.nbytes for read in ordered), default=1))
        parts = (part for read in ordered for part in read.cut(self._nbytes))
        threads = ThreadPoolExecutor(self._num_threads, initializer=torch.set_num_threads, initargs=(1,))
        with contextlib.ExitStack() as stack, threads:
            for file in {read.file: None for read in ordered}:
                self._files[file] = _open(file)
                stack.callback(os.close, self._files[file])
            acts = (functools.partial(self._do, part) for part in parts)
            for _ in in_order(threads, acts, 2 * self._num_threads):
                STARTUP.move()
        for act in others:
            act()
            STARTUP.move()

    def _do(self, read: Read) -> None:
        with torch.no_grad():
            memory = in_place(read)
            if memory is not None:
                self._read(read, memory)
                return
            buffer = self._buffer()[: read.nbytes]
            self._read(read, buffer)
            self._deliver(read, buffer.view(read.dtype))

    def _read(self, read: Read, memory: torch.Tensor) -> None:
        view, done = memory_of(memory), 0
        try:
            while done < len(view):
                got = os.preadv(self._files[read.file], [view[done:]], read.start + done)
                if not got:
                    raise UserError(f"{read.file}: ends at byte {read.start + done}, within a tensor")
                done += got
        except OSError as error:
            raise UserError(f"{read.file}: cannot be read ({error.strerror})", exit_code=FAILURE) from None

    def _buffer(self) -> torch.Tensor:
        """Return this thread's buffer."""
        if not hasattr(self._own, "buffer"):
            on_gpu = self._device.type == "cuda"
            self._own.buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=on_gpu)
            if on_gpu:
                torch.cuda.set_device(self._device)
                self._own.stream = torch.cuda.Stream(self._device)
        buffer: torch.Tensor = self._own.buffer
        return buffer

    def _deliver(self, read: Read, values: torch.Tensor) -> None:
        """Write a buffer's values to the source, which may be used again on return."""
        if read.target.on_gpu:
            with torch.cuda.stream(self._own.stream):
                put(read.target, read.at, values.to(self._device, non_blocking=True))
                self._own.stream.synchronize()
        elif isinstance(read.target, Memory):
            put(read.target, read.at, values)
        else:
            with self._one_at_a_time:
                put(read.target, read.at, values)


def in_place(read: Read) -> torch.Tensor | None:
    """Return the bytes of the state itself, if the file's can be read there: host memory of the file's dtype.

    A split master of bf16 values is those values and a remainder of zero.
    """
    target = read.target
    part = slice(read.at, read.at + read.numel)
    if isinstance(target, SplitMaster) and read.dtype == torch.bfloat16:
        if not (isinstance(target.parameters, Memory) and isinstance(target.remainder, Memory)) or target.on_gpu:
            return None
        target.remainder.tensor[part].zero_()
        target = target.parameters
    if not isinstance(target, Memory) or target.tensor.is_cuda or target.dtype != read.dtype:
        return None
    return target.tensor[part].view(torch.uint8)


def put(target: Source, at: int, values: torch.Tensor) -> None:
    """Write values of a file, on the host or already on the target's device, to a source."""
    part = slice(at, at + values.numel())
    if isinstance(target, Memory):
        target.tensor[part].copy_(values)
    elif isinstance(target, SplitMaster) and isinstance(target.parameters, Memory) and target.on_gpu:
        assert isinstance(target.remainder, Memory)
        if values.dtype == torch.bfloat16:
            target.parameters.tensor[part].copy_(values)
            target.remainder.tensor[part].zero_()
            return
        for array, half in zip((target.parameters, target.remainder), split(values.float()), strict=True):
            array.tensor[part].copy_(half)
    else:
        target.write(at, values.to(target.dtype))


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})", exit_code=FAILURE) from None
