"""Training steps, replayed on a ledger in the engine's order of events."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from offload.placement import ACTIVATIONS, HBM
from zerocli.layout import buffers
from zerocli.layout.buffers import Spec
from zerocli.layout.flats import FlatSpec
from zerocli.plan.memory.arena import COMPUTE
from zerocli.plan.memory.checkpoints import Checkpoints
from zerocli.plan.memory.flats import Flats
from zerocli.plan.memory.initialisation import Initialisation
from zerocli.plan.memory.ledger import Peak, Storage
from zerocli.plan.memory.repeats import Repeats, replayed
from zerocli.plan.memory.replayable import NO_UNIT, MicroStep, Replayable
from zerocli.plan.memory.tape import TIED, Tape, Tensor
from zerocli.plan.setup import Setup

FETCHES, UPDATES, REDUCTIONS = "fetches", "updates", "reductions"
"""Streams of the engine that allocate device memory, beside the compute stream."""
TRANSIENT = 3
"""Blocks of a run after which each further one changes what is held by the same bytes: two checkpoints are in flight,
and one is prefetched."""
REPLAYED_BLOCKS = 16
"""Blocks at each end of a run that are replayed where the allocator is followed: the gaps between their tensors decide
where others go. With it, plans of 40 random models of 24 to 40 blocks are within 1 % of those with all replayed."""
DEEP_LAYERS, REPLAYED_IF_DEEP = 40, 8
"""Of a model with more blocks than the first, the second many are replayed: its plans take too long otherwise."""
STEADY_STEPS = 2
"""Steps after the first that are replayed where the allocator is followed: all hold the same bytes, but the second of
them begins with other gaps between what is held."""
ROUNDING = {"bf16": 6, "fp16": 2}
"""Bytes per element that rounding a master allocates (`engine.master.narrow`): bf16 has an fp32 copy between."""


@dataclass(frozen=True)
class Peaks:
    """Peaks of one rank's device memory, and the bytes of activation checkpoints on other tiers."""

    initialisation: Peak
    first_step: Peak
    steady: Peak
    offloaded: dict[str, int]
    built: int = 0
    """Bytes held after initialisation."""
    checkpoint_nbytes: int = 0
    """Bytes of one activation checkpoint, a rank's part of it."""
    gloo_nbytes: int = 0
    """Bytes by which gloo's copies raise the peak of a CPU rank's process."""
    reserved: int = 0
    """What torch's CUDA allocator reserves for all of it, cuBLAS's workspaces included."""

    @property
    def highest(self) -> Peak:
        return max((self.steady, self.first_step, self.initialisation), key=lambda peak: peak.nbytes)


@dataclass(frozen=True)
class StepPeak:
    """The peak of what a step allocates."""

    rest: int
    """Without gradients."""
    both: int
    """With all of them on the device."""
    gradients: int
    """Bytes of all gradients of this rank."""
    offloaded: dict[str, int]
    checkpoint_nbytes: int

    def with_gradients(self, nbytes: int) -> int:
        """Return the peak, or more, with this many bytes of gradients on the device: it is convex in those."""
        share = nbytes / self.gradients if self.gradients else 0.0
        return int(self.rest + share * (self.both - self.rest))


class Replay(Initialisation):
    """One rank's device memory through initialisation and a step."""

    def __init__(
        self, model: Replayable, setup: Setup, flats: Flats, with_gloo: bool = False, arenas: bool = True
    ) -> None:
        """Take `with_gloo` to count gloo's copies of what it reduce-scatters, which are in the process's memory."""
        super().__init__(model, setup, flats, arenas)
        self._with_gloo = with_gloo and setup.shards > 1 and setup.zero.optimizer
        self._copies: deque[Storage] = deque()
        """gloo's copies: one of each bucket in flight, or of every gradient that is reduced whole."""
        self._grads: dict[int, list[Storage]] = defaultdict(list)
        """Gradients of units in backward, until they are reduced."""
        self._flat_grads: dict[int, list[Storage]] = {}
        """Gradients of flats, by unit, if they do not stay allocated: from backward to the update."""
        self._pending_grads: dict[int, list[Storage]] = {}
        """Those that the next forward's updates read, until it enters their unit."""
        self._slot_buffers: dict[buffers.SlotKey, Storage] = {}
        self._tied: list[Storage] = []
        """The head's part of a tied weight's gradient, which autograd keeps until the embedding's part arrives."""
        self._checkpoints = Checkpoints(self._ledger, setup, functools.partial(self._keep_bytes, "activations"))
        self._waiting: dict[tuple[str, int], list[Spec]] = defaultdict(list)
        self._made: Counter[tuple[str, int]] = Counter()
        """Gather buffers and buckets that are not there yet, and how many are, by name and bytes per element."""
        followed = REPLAYED_BLOCKS if model.layers <= DEEP_LAYERS else REPLAYED_IF_DEEP
        self._lead = followed if self._arenas else TRANSIENT
        """How many blocks are replayed at both ends of a run of equal ones, beside a period."""
        self._updates_pending = False
        """Whether the last step's updates of offloaded states are left to this step's forward."""
        self._is_first = True
        """Whether no pass has run yet."""
        self._entering = False
        """Whether this forward runs them."""
        self._recompute = setup.blocks(model.layers)
        self._replayed: list[tuple[int, int]] = []
        """The blocks that are replayed, each with the number of blocks before it that are not."""
        self._repeats = Repeats(self._ledger)
        """What the others hold in a step."""
        self._ends: list[dict[str, int]] = []
        """What is held after the backward of each replayed block."""

    def run(self) -> Peaks:
        """Replay initialisation, the first step and later ones."""
        ledger = self._ledger
        ledger.begin("initialisation")
        self.initialise()
        initialisation, built = ledger.peak, ledger.total
        ledger.begin("first step")
        self._keep_bytes("gathered", *self._flats.pieces(self._sizing, HBM).get("gathered", ()))  # copies in groups
        gathered = buffers.gather_buffers(self._some, self._sizing)
        for spec in (*gathered, *buffers.buckets(self._trainable, self._sizing)):
            self._waiting[spec.name, spec.width].append(spec)
        self._step()
        first = ledger.peak
        ledger.begin("steady state")
        for name, width in list(self._waiting):  # units are prefetched from now on
            self._make(name, width, len(self._waiting[name, width]))
        self._keep_slots()
        for _ in range(STEADY_STEPS if self._arenas else 1):
            before = self._left()
            self._step()
            if self._left() == before:  # the next one would be the same
                break
        checkpoints = dict(self._checkpoints.offloaded), built, self._checkpoints.nbytes
        return Peaks(initialisation, first, ledger.peak, *checkpoints, reserved=ledger.reserved)

    def _left(self) -> tuple[object, ...]:
        """Return what decides where a step's allocations go: how much is held, and where lies what comes and goes."""
        pending = [storage.address for grads in self._pending_grads.values() for storage in grads]
        return len(self._kept), self._ledger.total, self._ledger.reserved, pending, tuple(self._ledger.uncounted)

    def run_step(self) -> StepPeak:
        """Replay one step of an engine whose states and buffers take no memory."""
        if not self._setup.offload.shares.get(ACTIVATIONS):
            self._lead = 1
        self._ledger.begin("a step")
        self._step()
        # Wherever they rest.
        gradients = self._flats.total(lambda flat: flat.trainable and buffers.gradients(flat, self._sizing).nbytes)
        both, rest = self._ledger.peak.nbytes, self._ledger.without_gradients
        offloaded, nbytes = dict(self._checkpoints.offloaded), self._checkpoints.nbytes
        return StepPeak(rest, both if self._frees_grads else rest + gradients, gradients, offloaded, nbytes)

    def _keep_slots(self) -> None:
        """Allocate the update's slots, which grow with the chunks of the first update."""
        for key, spec in buffers.growing_slots(self._trainable, self._sizing):
            if spec.tier == HBM:
                stream = UPDATES if spec.name == buffers.WRITTEN_SLOTS else FETCHES
                self._slot_buffers.pop(key, None)
                self._slot_buffers[key] = Storage(self._ledger, spec.nbytes, spec.category, stream)

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Replay micro-steps and the update: from the second micro-step on, all find the same gradients there."""
        setup, ledger = self._setup, self._ledger
        for number in range(min(2, setup.accumulate)):
            self._micro_step(first=number == 0)
        ledger.moment = "update"
        if not self._updates_pending:  # the first one makes scratch memory
            streamed = any(flat.offloaded for flat in self._trainable)
            self._keep(*buffers.update_scratch(self._trainable, self._sizing), stream=UPDATES if streamed else COMPUTE)
        if setup.updates_whole:
            self._update_whole()
        self._update(self._trainable, offloaded=False, count=setup.num_temporaries[self._updates_pending])
        self._updates_pending = True
        self._pending_grads = {unit: each for unit, each in self._flat_grads.items() if self._update_is_pending(unit)}
        self._flat_grads.clear()
        self._repeats.end_step()
        self._ends.clear()

    def _micro_step(self, first: bool) -> None:
        """Replay a forward and a backward; the first of a step runs updates that the last step has left to it."""
        setup, model, ledger = self._setup, self._model, self._ledger
        step = model.micro_step(setup, ledger)
        tape = Tape(ledger, self._on_grad)
        inputs = [Storage(ledger, nbytes) for nbytes in step.inputs()]
        if not self._replayed and model.layers:
            part = -(-step.hidden // setup.parts)
            self._checkpoints.assign(self._recompute.count, part, frozen_input=model.frozen_input)
            self._keep_bytes("activations", model.copied_nbytes(self._recompute.count))
            self._choose_blocks()
        self._entering = first and self._updates_pending
        x = self._forward(tape, step)
        ledger.moment = "head and loss"
        mark = functools.partial(self._mark, tape, before=self._unit_before(model.layers))
        loss = step.end(tape, x, self._enter, mark)
        del x, step
        ledger.moment = "backward of the head"
        root = loss.node
        assert root is not None
        del loss
        tape.backward(root, [Storage(ledger, 4)])
        for unit in list(self._grads) if setup.zero.gradients else [0]:
            self._reduce(unit)
        del inputs
        self._copies.clear()
        self._is_first = False
        self._repeats.end_pass()
        self._ends.clear()

    def _update_is_pending(self, unit: int) -> bool:
        """Whether the next forward's update reads a unit's gradients; without a GPU they are freed before."""
        return self._setup.device == "cuda" and any(flat.offloaded for flat in self._units[unit] if flat.trainable)

    def _update(self, flats: Iterable[FlatSpec], offloaded: bool, count: int) -> None:
        """Replay the temporaries of updating flats, `count` arrays at once: states on the device on the compute stream,
        others on their own.
        """
        flats = [flat for flat in flats if flat.trainable and flat.offloaded is offloaded]
        rounding = ROUNDING.get(self._setup.precision, 0)
        arrays = buffers.update_temporaries(flats, self._sizing, count, rounding)
        left, held = sum(spec.nbytes for spec in arrays if spec.tier == HBM), []
        for number in range(max(1, count), 0, -1):
            held.append(Storage(self._ledger, left // number, "buffers", UPDATES if offloaded else COMPUTE))
            left -= left // number

    def _update_whole(self) -> None:
        """Replay updates of whole matrices, wherever their states are; the first one makes a state of each."""
        made = bool(self._setup.options.get("nesterov", True)) + (not self._updates_pending)
        rounding = ROUNDING.get(self._setup.precision, 0)
        held = []
        for spec in buffers.whole_update(self._trainable, self._sizing, made, rounding):
            held.append(Storage(self._ledger, spec.nbytes, spec.category))

    def _enter(self, unit: int) -> None:
        """Replay what a unit's forward begins with: updates of offloaded states that wait for it, and its gather."""
        if not self._entering:
            self._gather(unit, 1)
            return
        last = unit
        if not all(flat.resident(self._sizing) for flat in self._units[0]):  # the next units are gathered now
            last += self._setup.gather_buffers - 1
        for each in self._units[unit if unit == 0 else last : last + 1]:
            self._update(each, offloaded=True, count=self._setup.num_temporaries[0])  # the first step's
        self._pending_grads.pop(unit, None)

    def _gather(self, unit: int, number: int) -> None:
        """Allocate gather buffers for a unit's flats, unless there are `number` of their size."""
        for flat in self._units[unit]:
            name = buffers.gather_name(flat.gather_size[0])
            self._make(name, flat.width, number - self._made[name, flat.width])
            if flat.codec:
                self._make(buffers.DECODING, 1, 1 - self._made[buffers.DECODING, 1])
            if flat.staged_nbytes:
                name = buffers.staged_name(flat.staged_nbytes)
                self._make(name, 1, number - self._made[name, 1])

    def _make(self, name: str, width: int, number: int) -> None:
        """Allocate `number` buffers of a kind, or as many as are not there yet."""
        waiting = self._waiting.get((name, width), [])
        for _ in range(min(number, len(waiting))):
            self._keep(waiting.pop(), stream=REDUCTIONS if name == buffers.BUCKET_SUMS else COMPUTE)
            self._made[name, width] += 1

    def _forward(self, tape: Tape, step: MicroStep) -> Tensor:
        """Replay the embedding, and the first and last blocks of each run of equal ones; the others are counted."""
        self._ledger.moment = "embedding"
        self._enter(0)
        x = step.begin(tape, self._enter)
        period = self._model.period
        begins: list[dict[str, int]] = []
        for block, skipped in self._replayed:
            if skipped:
                self._repeats.add(begins[-period], skipped // period)
                self._checkpoints.skip_forward(block, skipped)
            begins.append(dict(self._ledger.held))
            self._ledger.moment = f"forward of block {block + 1}"
            x = self._block(tape, step, x, block, skipped)
        return x

    def _unit_before(self, block: int) -> int:
        """Return the unit whose backward comes after that of a block."""
        return self._model.unit(block - 1) if block else 0

    def _choose_blocks(self) -> None:
        layers, period = self._model.layers, self._model.period
        tiers = [*self._checkpoints.tiers, *[""] * (layers - len(self._checkpoints.tiers))]
        units = map(id, map(self._units.__getitem__, map(self._model.unit, range(layers))))
        whole = [True] * self._recompute.whole + [False] * (layers - self._recompute.whole)
        keys = list(zip(units, tiers, self._model.kinds, whole, strict=True))
        self._replayed = list(replayed(keys, self._lead + period, period))

    def _block(self, tape: Tape, step: MicroStep, x: Tensor, block: int, skipped: int) -> Tensor:
        """Replay a block's forward; `skipped` blocks before it are not replayed."""
        unit = self._model.unit(block)
        self._enter(unit)

        def run(t: Tape, y: Tensor) -> Tensor:
            return step.block(t, y, block)

        moment = f"end of backward of block {block + 1}"
        self._mark(tape, x, moment, unit, before=self._unit_before(block), skipped=skipped)
        if block < self._recompute.count:
            size = x.storage.nbytes
            self._checkpoints.keep(x, block)
            selective = block >= self._recompute.whole
            gathered = not all(flat.resident(self._sizing) for flat in self._units[unit])
            whole = step.compared and self._is_first
            bring_back = functools.partial(self._checkpoints.bring_back, block, size)
            out = tape.checkpoint(run, x, bring_back, selective, gathered, whole)
        else:
            out = run(tape, x)
        self._mark(tape, out, f"backward of block {block + 1}")
        return step.between(tape, out, block)

    def _mark(self, tape: Tape, x: Tensor, moment: str, done: int = NO_UNIT, before: int = 0, skipped: int = 0) -> None:
        """Record the moment in backward when the gradient of `x` exists; the unit `done` is then reduced and freed, and
        the unit `before` it gathered.

        Then `skipped` blocks before it are counted, as if they had run too.
        """
        if x.node is None:  # no gradient comes here: what made it is frozen
            return
        node = tape.record([x])

        def reached(gradient: list[Storage]) -> list[Storage]:
            self._ledger.moment = moment
            if done != NO_UNIT:
                self._gather(before, 2 if before != self._unit_before(self._model.layers) else 1)
                self._reduce(done)
                self._ends.append(dict(self._ledger.held))
            if skipped:
                period = self._model.period
                self._repeats.add(self._ends[-1 - period], skipped // period, pending=self._update_is_pending(done))
                self._checkpoints.skip_backward(skipped)
            return [gradient.pop()]

        node.backward = reached
        x.node = node

    def _on_grad(self, unit: int, grad: Storage) -> None:
        """Record a parameter's gradient: kept until its unit is reduced, or added at once to the full gradient."""
        if unit == TIED:
            self._tied.append(grad)
            return
        if unit == 0 and self._tied and grad.nbytes == self._tied[0].nbytes:
            if self._setup.device == "cpu":  # autograd adds them in new memory; on a GPU to the head's (torch 2.11)
                grad = Storage(self._ledger, grad.nbytes, "buffers")
                self._tied.clear()
            else:
                grad = self._tied.pop()
        if self._setup.zero.gradients:
            self._grads[unit].append(grad)
        else:
            self._open_grads(unit)

    def _reduce(self, unit: int) -> None:
        """Reduce a unit's gradients into those of its flats, and free them; buckets are made as it needs them."""
        sizing = self._sizing
        for flat in (flat for flat in self._units[unit] if flat.trainable):
            wire = sizing.wire_width(flat.width)
            number = buffers.num_buckets([flat], sizing, buffers.bucket_numel(self._trainable, sizing, wire))
            if flat.tiers["gradients"] != HBM or sizing.world > 1:
                self._make(buffers.BUCKETS, wire, number)
                self._make(buffers.BUCKET_SUMS, sizing.grad_width(flat.width), number)
        if self._with_gloo:
            self._copy(unit)
        if unit in self._grads:
            self._open_grads(unit)
            del self._grads[unit]

    def _copy(self, unit: int) -> None:
        """Add gloo's copies of a unit's gradients; those of the buckets that are used again are freed."""
        sizing, trainable = self._sizing, self._trainable
        for flat in (flat for flat in self._units[unit] if flat.trainable):
            wire = sizing.wire_width(flat.width)
            left = flat.total
            each = buffers.bucket_numel(trainable, sizing, wire) if sizing.stage.gradients else flat.total
            while left > 0:
                if sizing.stage.gradients and len(self._copies) >= buffers.bucket_limit(trainable, sizing):
                    self._copies.popleft()
                self._copies.append(Storage(self._ledger, min(left, each) * wire, "buffers"))
                left -= each

    def _open_grads(self, unit: int) -> None:
        """Allocate the gradients of a unit's flats, unless they are there."""
        if self._frees_grads and unit not in self._flat_grads:
            specs = [buffers.gradients(flat, self._sizing) for flat in self._units[unit] if flat.trainable]
            self._flat_grads[unit] = [
                Storage(self._ledger, spec.nbytes, spec.category) for spec in specs if spec.nbytes and spec.tier == HBM
            ]
