"""A model without a formula: its plans and seconds come from traces, one of each batch that is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.placement import Placement
from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING
from zerocli.plan.blocks.program import Program
from zerocli.plan.blocks.work import Work
from zerocli.plan.memory.build import check
from zerocli.plan.memory.replayable_program import ReplayableProgram
from zerocli.plan.models.model import Model
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import (
    HOST_COMPILED,
    HOST_FORWARD,
    USUAL,
    Computed,
    num_chunks,
    recomputing,
    whole_update,
)
from zerocli.plan.time.hardware import HostTimes

if TYPE_CHECKING:
    from zerocli.plan.models.fake_run import Loss

# The host's times are from steps of eleven families of transformers with 4 and 12 narrow blocks, on an H200, and from
# 28 random models of the same families on three more such machines. What recomputation adds was raised after 22 more,
# of which those that the host bounds were planned up to 38 % too fast.
HOST_OPERATION = 16e-6
"""Seconds in which the host launches one operation, with what a model's Python and autograd do around it."""
KERNEL_NBYTES = 9e6
"""A kernel begins and ends in 3 µs, as an H200 moves so many bytes: those of five narrow models of transformers took
1.5 to 5 µs longer than their operations and bytes do."""
UNIT, UNIT_FORWARD = 0.7, 0.41
"""The share of the host's time for a block (`hardware.HostTimes`) that is not for launching its operations (a block of
GPT-2 has 13 in forward and 21 in backward), and forward's share of that."""
WHOLE_UNIT, REPEATED = 0.8, 2.4
"""The share of the host's time for recomputing a whole block that does not depend on its operations; and the time for
an operation that is repeated, relative to one that runs once: what it saves passes through Python."""
SELECTIVE_UNIT, LOOKED_AT = 0.6, 5.0
"""The same for a block that is recomputed selectively, and for each operation of its forward, which Python looks at."""
PER_PARAMETER = 3
"""Operations that the engine adds to backward for each parameter: its gradient is taken, copied and dropped."""
TRACED_COMPILED = 0.3
"""Bytes that compiled blocks move, relative to the operations of eager ones one by one (transformers' Llama 8B)."""
Describe = Callable[[Setup], Program]


class Traced(Model):
    """A model that is run on tensors without memory, in the batch, precision and device of each setup."""

    def __init__(self, describe: Describe, asked: Setup, resizable: bool = False, longest: int = 0) -> None:
        """Describe the model as `asked`; if `resizable`, also with other batches and sequences up to the `longest`."""
        self._describe, self._asked, self.resizable, self._longest = describe, asked, resizable, longest
        self._known: dict[Any, ReplayableProgram] = {}
        first = self.replayable(asked)
        self.program, self.numel, self.trainable_numel = first.program, first.numel, first.trainable_numel
        self.active_numel = self.numel
        called = [unit for unit, _, _ in self.program.blocks]
        if len(set(called)) == len(called) == self.program.repeated:  # else some are called again, or never
            self.blocks = len(called)
        self.summary = f"{self.numel:,} parameters in {len(self.program.units)} units; traced"

    def replayable(self, setup: Setup) -> ReplayableProgram:
        # What in a setup changes the description of a model.
        key = (setup.batch, setup.seq, setup.precision, setup.device, setup.tp, setup.packed)
        if key not in self._known:
            check(setup)
            same = replace(setup, stage=0, offload=Placement(), recompute=NOTHING, compiled=False)
            self._known[key] = ReplayableProgram(self._interpolated(same) or self._describe(same))
        return self._known[key]

    def _interpolated(self, setup: Setup) -> Program | None:
        """Return the program of a batch between two powers of two from theirs, if they allocate alike."""
        below = 1 << (setup.batch.bit_length() - 1)
        if setup.batch in (below, self._asked.batch) or not self.resizable:
            return None
        one, other = (self.replayable(replace(setup, batch=each)).program for each in (below, 2 * below))
        return one.resized(other, setup.batch / below - 1)

    def sequences(self, step: int, most: int) -> tuple[Sequence[int], str]:
        if self._longest:
            whole = [*range(step, self._longest, step), self._longest]
            return whole, f"the model has {self._longest} positions"
        return range(step, most + 1, step), "longer ones are not searched"

    def with_seq(self, seq: int) -> Traced:
        return self

    def computed(self, setup: Setup, host: HostTimes = USUAL) -> Computed:
        model = self.replayable(setup)
        program, launch = model.program, HOST_OPERATION * host.pace
        units, layers = len(program.units), len(program.blocks)
        recompute = setup.recomputed.of(layers)
        calls = list(program.calls())
        once = _total(part.computed for part in calls), _total(part.computed_back for part in calls)
        forward, backward = (each.launched(launch, KERNEL_NBYTES) for each in once)
        blocks = [program.parts[part] for _, part, _ in program.blocks]
        whole = _total(part.repeated for part in blocks[: recompute.whole])
        part = _total(part.cheap for part in blocks[recompute.whole : recompute.count])
        selective = recompute.count - recompute.whole
        if setup.compiled:
            hosted = recomputing(host, setup, recompute.whole, selective)
        else:
            hosted = recomputing(host, setup, WHOLE_UNIT * recompute.whole, SELECTIVE_UNIT * selective)
            hosted += REPEATED * whole.calls * launch
            hosted += LOOKED_AT * forward.host * selective / max(1, layers)
        again = (whole + part).launched(0.0, KERNEL_NBYTES)  # its launches are counted
        forward += Work(host=host.block * UNIT * UNIT_FORWARD * units)
        backward += Work(host=host.block * UNIT * (1 - UNIT_FORWARD) * units)
        trained = sum(each.trainable for unit in program.units for each in unit.parameters)
        backward += Work(host=PER_PARAMETER * trained * launch)
        if setup.compiled:
            launched = host.block * HOST_COMPILED * units
            forward = forward.compiled(TRACED_COMPILED, launched * UNIT_FORWARD)
            backward = backward.compiled(TRACED_COMPILED, launched * (1 - UNIT_FORWARD))
            again = again.compiled(TRACED_COMPILED, 0.0)
        forward, again = forward + Work(host=hosted * HOST_FORWARD), again + Work(host=hosted * (1 - HOST_FORWARD))
        # As MFU counts them: without repetition.
        operations = sum(each.products for each in once) + 3 * once[0].attention
        own = {unit for unit, _, _ in program.blocks}
        ends = sum(p.numel for at, unit in enumerate(program.units) if at not in own for p in unit.parameters)
        of_step = operations * setup.accumulate * setup.dp, ends, num_chunks(model.units, setup)
        updates = whole_update(model.units, setup, host)
        return Computed(forward, backward, again, Work(), *of_step, max(1, layers), 0, *updates)


def trace(name: str, make: Any, setup: Setup, loss: Loss | None = None, resizable: bool = True) -> Traced:
    """Trace the model that `make()` builds on the meta device; UserError if it cannot run on tensors without values.

    `loss(model, setup)` runs it on a batch; by default `model(tokens, targets)` gives the loss.
    """
    import torch

    from zerocli.plan.models.record import record

    def describe(setup: Setup) -> Program:
        try:
            with torch.random.fork_rng(devices=()):  # a run's own random numbers stay what they are
                return record(name, make(), setup, loss)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            if setup.tp > 1 and isinstance(error, ValueError):
                raise UserError(f"--trace: {error}", hint="--tp 1") from error
            raise UserError(
                f"the model did not run on (tokens, targets) of {setup.batch} x {setup.seq}: {error}",
                hint="forward(tokens, targets) gives the loss, and asks no tensor for its value",
            ) from error

    return Traced(describe, setup, resizable)


def _total(work: Iterable[Work]) -> Work:
    return sum(work, Work())
