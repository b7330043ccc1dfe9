"""Adam and AdamW on the CPU in one pass over all that a parameter has, compiled by the machine's C compiler.

torch's operations need 13 passes for a split master. The kernel (adam.c) is compiled when it is first needed on a
machine, which takes about half a second, and is kept in the user's cache. [Note: rounding of the compiled update]
torch's fused kernel rounds a product and a sum once or twice, as its own compiler and the processor's instructions had
it. So a kernel is tried with each of these roundings, and is used only if one gives the same bits as torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from zerocli import machine
from zerocli.engine.optimizer.optim import Arrays, At, FusedAdam, Group, Piece, StepValues

SOURCE = Path(__file__).with_name("adam.c")
FLAGS = [
    *("-std=c11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fopenmp"),
]
TIMEOUT = 120.0
"""Seconds after which a compiler that has not ended is given up."""
VECTOR = 16
"""torch's kernel rounds a piece's last elements, beyond a multiple of this, in another way: they are left to it."""
ROUNDINGS = (11, 0, 7, 2)
"""Values of `rounding` in adam.c that torch's builds have, the most frequent first."""
DEVICE_ROUNDING = 11
"""The rounding of the update kernel of a GPU (update_kernels.py)."""
VALUES = ("decay", "keep", "weight", "beta2", "square_weight", "step_size", "correction", "eps")
"""The numbers of a group in a step: Adam's decay, which is added to gradients; what AdamW's leaves of the master;
1 - beta1, beta2, 1 - beta2; what the average is multiplied by; what the root of the squares is divided by; eps."""
TRIED_NUMEL = 1 << 15
"""Elements with which two kernels are compared."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, None: 3}
"""As adam.c numbers them."""


class Unavailable(Exception):
    """The kernel cannot be compiled or used here; the message says why in a few words."""


class Values(ctypes.Structure):
    """What an update does with an element, as adam.c has it."""

    _fields_ = tuple((name, ctypes.c_float) for name in VALUES)


class Call(ctypes.Structure):
    """The arguments of an update, as adam.c has them."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("parameters", "master", "grad", "average", "square", "maximum")),
        *((name, ctypes.c_int32) for name in ("parameter_type", "grad_type", "split", "rounding")),
        ("factor", ctypes.c_float),
        ("values", Values),
    )


class CompiledAdam:
    """Updates pieces in host memory, bit for bit as `FusedAdam` does between conversions and clipping."""

    def __init__(self, rule: FusedAdam, library: ctypes.CDLL, rounding: int) -> None:
        self._decoupled, self._library, self._rounding = rule.decoupled, library, rounding
        self._types = set(TYPES) if library.has_fp16() else set(TYPES) - {torch.float16}

    def takes(self, grad: torch.Tensor, target: torch.Tensor | None) -> bool:
        """Whether it updates parameters `target` (None: the master is the parameters) by such a gradient."""
        return grad.device.type == "cpu" and {grad.dtype, target.dtype if target is not None else None} <= self._types

    def update(self, piece: Piece, factor: float) -> int:
        """Update a piece, whose gradient is first multiplied by `factor`, and return how many elements are done.

        Fewer than `VECTOR` elements, at the end, are left.
        """
        group, count, decay = piece.group, piece.at.count.item(), piece.group.weight_decay
        (beta1, beta2), options = group.options["betas"], group.options
        maximum = piece.states["max_exp_avg_sq"] if options["amsgrad"] else None
        numel = piece.grad.numel() // VECTOR * VECTOR
        call = self.call(numel, piece.parameters, piece.master, piece.grad, piece.states, maximum)
        call.factor = -factor if options["maximize"] else factor
        call.values = Values(
            *((0.0, 1 - group.lr * decay) if self._decoupled else (decay, 1.0)),
            *(1 - beta1, beta2, 1 - beta2, -group.lr / (1 - beta1**count), math.sqrt(1 - beta2**count), options["eps"]),
        )
        self.run([call], torch.get_num_threads())
        return numel

    def call(
        self,
        numel: int,
        parameters: torch.Tensor | None,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Arrays,
        maximum: torch.Tensor | None = None,
    ) -> Call:
        """Return the arguments of an update of this memory, without the step's values."""
        arrays = (parameters, master, grad, states["exp_avg"], states["exp_avg_sq"], maximum)
        assert all(each is None or (each.is_contiguous() and each.device.type == "cpu") for each in arrays)
        return Call(
            numel,
            *(None if each is None else each.data_ptr() for each in arrays),
            *(TYPES[None if parameters is None else parameters.dtype], TYPES[grad.dtype], master.dtype == torch.int16),
            self._rounding,
        )

    def run(self, calls: Sequence[Call], threads: int) -> None:
        """Make several updates, of memory that they do not share."""
        self._library.update_all((Call * len(calls))(*calls), len(calls), threads)


def open_compiled(rule: FusedAdam) -> CompiledAdam:
    """Return the kernel of a rule, compiled or from the cache; raises Unavailable if it would not give torch's bits."""
    library = _library()
    for rounding in ROUNDINGS:
        kernel = CompiledAdam(rule, library, rounding)
        if _agrees(kernel, rule):
            return kernel
    raise Unavailable("it does not round as torch does on this machine")


def table_of(values: StepValues, decoupled: bool) -> torch.Tensor:
    """Return a row of numbers for each class of counts and, within it, each group: `VALUES`, and the gradient's sign.

    They are on the values' device, so that the host does not wait for the counts.
    """
    rows = []
    for group in values.groups:
        (beta1, beta2), decay = group.options["betas"], group.weight_decay
        row = [*((0.0, 1 - group.lr * decay) if decoupled else (decay, 1.0)), 1 - beta1, beta2, 1 - beta2]
        sign = -1.0 if group.options["maximize"] else 1.0
        rows.append([*row, -group.lr, 1.0, group.options["eps"], sign, beta1, beta2])
    given = torch.tensor(rows, dtype=torch.float64).to(values.counts.device, non_blocking=True)
    corrections = 1 - given[:, -2:] ** values.counts.double()[:, None, None]
    table = given[:, :-2].repeat(values.counts.numel(), 1, 1)
    table[:, :, VALUES.index("step_size")] /= corrections[:, :, 0]
    table[:, :, VALUES.index("correction")] = corrections[:, :, 1].sqrt()
    return table.float()


def open_beside(rule: FusedAdam) -> CompiledAdam:
    """Return the kernel that rounds as a GPU's kernel does; raises Unavailable if it cannot be compiled."""
    return CompiledAdam(rule, _library(), DEVICE_ROUNDING)


def trials(rule: FusedAdam) -> Iterator[tuple[Group, Callable[[], torch.Tensor]]]:
    """Yield several ways of stepping, each with a function that draws `TRIED_NUMEL` numbers of all sizes."""
    generator = torch.Generator().manual_seed(TRIED_NUMEL)  # its own: a run draws from torch's

    def values() -> torch.Tensor:
        size = torch.empty(TRIED_NUMEL).uniform_(-30, 5, generator=generator).exp_()
        return torch.randn(TRIED_NUMEL, generator=generator).mul_(size)

    for lr, decay, beta1 in ((1e-3, 0.1, 0.9), (0.3, 0.0, 0.9), (1.0, 0.5, 0.3)):
        yield Group(lr, decay, {**rule.defaults, "betas": (beta1, 0.95)}), values


def _agrees(kernel: CompiledAdam, rule: FusedAdam) -> bool:
    """Whether the kernel gives torch's bits for masters and states."""
    for group, values in trials(rule):
        master, grad = values(), values()
        states = {name: values().square_() for name in rule.state_names}
        at = At(torch.tensor(3.0), torch.zeros(()))
        ours = [each.clone() for each in (master, *states.values())]
        kernel.update(Piece(None, ours[0], grad, dict(zip(states, ours[1:], strict=True)), group, at), 1.0)
        rule.update(master, grad, None, states, group, at)
        theirs = (master, *states.values())
        if not all(map(torch.equal, *([each.view(torch.int32) for each in all_] for all_ in (ours, theirs)))):
            return False
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the kernel's library from the user's cache, or compile it and keep it there."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    if not shutil.which(compiler):
        raise Unavailable("there is no C compiler (cc, gcc, clang, or CC)")
    source = SOURCE.read_bytes()
    key = "\n".join([compiler, *FLAGS, platform.machine(), machine.processor()]).encode()
    kept = machine.cache_folder() / "kernels" / f"adam-{hashlib.sha256(source + key).hexdigest()[:24]}.so"
    with contextlib.suppress(OSError):
        if kept.stat().st_uid == os.geteuid():
            return _open(kept)
    for folder in (kept.parent, Path(tempfile.gettempdir())):  # one of them may be read-only, or not for programs
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as own:
                made = _compile(compiler, Path(own))
                library = _open(made)
                with contextlib.suppress(OSError):  # it is compiled again next time
                    made.replace(kept)
            return library
    raise Unavailable(f"neither {kept.parent} nor {tempfile.gettempdir()} takes a library")


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.update_all.argtypes = [ctypes.POINTER(Call), ctypes.c_int, ctypes.c_int]
    library.update_all.restype = None
    library.has_fp16.argtypes, library.has_fp16.restype = [], ctypes.c_int
    return library


def _compile(compiler: str, folder: Path) -> Path:
    """Compile the kernel for this processor or, where the compiler does not know it, for any of its kind."""
    made, errors = folder / "adam.so", ""
    for native in (["-march=native"], []):
        command = [compiler, *FLAGS, *native, str(SOURCE), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{compiler} failed: {error}") from error
        if done.returncode == 0:
            return made
        errors = errors or next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
    raise Unavailable(f"{compiler} failed: {errors}")
