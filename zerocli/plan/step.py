"""Training steps, replayed on a ledger in the engine's order of events."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload.placement import ACTIVATIONS, HBM
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout import buffers, constants
from zerocli.layout.buffers import Spec
from zerocli.layout.categories import CATEGORIES
from zerocli.layout.flats import FP32, FlatSpec
from zerocli.plan.arena import COMPUTE
from zerocli.plan.decoder import Batch, Decoder
from zerocli.plan.flats import Flats
from zerocli.plan.initialisation import Initialisation
from zerocli.plan.ledger import Peak, Storage
from zerocli.plan.repeats import replayed
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Shape
from zerocli.plan.tape import Tape, Tensor

FETCHES, UPDATES, REDUCTIONS = "fetches", "updates", "reductions"
"""Streams of the engine that allocate device memory, beside the compute stream."""
TRANSIENT = 3
"""Blocks of a run after which each further one changes what is held by the same bytes: two checkpoints are in flight,
and one is prefetched."""
FOLLOWED = 16
"""Blocks at each end of a run that are replayed where the allocator is followed: the gaps between their tensors decide
where others go. With it, plans of 40 random models of 24 to 40 blocks are within 1 % of those with all replayed."""
DEEP, FOLLOWED_IF_DEEP = 40, 8
"""Of a model with more blocks than the first, the second many are replayed: its plans take too long otherwise."""
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
        """Return the peak, or more, with so many bytes of gradients on the device: it is convex in those."""
        share = nbytes / self.gradients if self.gradients else 0.0
        return int(self.rest + share * (self.both - self.rest))


class Replay(Initialisation):
    """One rank's device memory through initialisation and a step."""

    def __init__(self, shape: Shape, setup: Setup, flats: Flats, with_gloo: bool = False, arenas: bool = True) -> None:
        """Take `with_gloo` to count gloo's copies of what it reduce-scatters, which are in the process's memory."""
        super().__init__(shape, setup, flats, arenas)
        self._with_gloo = with_gloo and setup.dp > 1 and setup.zero.optimizer
        self._copies: deque[Storage] = deque()
        """gloo's copies: one of each bucket in flight, or of every gradient that is reduced whole."""
        self._grads: dict[int, list[Storage]] = defaultdict(list)
        """Gradients of units in backward, until they are reduced."""
        self._flat_grads: dict[int, list[Storage]] = {}
        """Gradients of flats, by unit, if they do not stay allocated: from backward to the update."""
        self._spent: dict[int, list[Storage]] = {}
        """Those that the next forward's updates read, until it enters their unit."""
        self._spent_repeated = 0
        """Bytes of the same of blocks that are not replayed."""
        self._slot_buffers: dict[buffers.SlotKey, Storage] = {}
        self._tied: list[Storage] = []
        """The head's part of a tied weight's gradient, which autograd keeps until the embedding's part arrives."""
        self._slots: list[str] = []
        """The tier of each recomputed block's checkpoint."""
        self._has_slots = False
        self._num_near = 0
        """Slots on the device."""
        self._first_input: list[Storage] = []
        """The first block's input, if it needs no gradient."""
        self._in_flight: dict[int, Storage] = {}
        """Checkpoints that are still being written to their tier, by block: two at most."""
        self._ahead: dict[int, Storage] = {}
        """Checkpoints prefetched before their block's backward."""
        self._checkpoints_away: dict[str, int] = {}
        self._checkpoint_nbytes = 0
        self._waiting: dict[tuple[str, int], list[Spec]] = defaultdict(list)
        self._made: Counter[tuple[str, int]] = Counter()
        """Gather buffers and buckets that are not there yet, and how many are, by name and bytes per element."""
        self._lead = (FOLLOWED if shape.layers <= DEEP else FOLLOWED_IF_DEEP) if self._arenas else TRANSIENT
        """How many blocks are replayed at both ends of a run of equal ones, beside a period."""
        self._owes = False
        """Whether the last step's updates of offloaded states are left to this step's forward."""
        self._entering = False
        """Whether this forward runs them."""
        self._recompute = setup.blocks(shape.layers)
        self._replayed: list[tuple[int, int]] = []
        """The blocks that are replayed, each with the number of blocks before it that are not."""
        self._repeated: dict[str, int] = dict.fromkeys(self._ledger.held, 0)
        """What the blocks that are not replayed hold in a step, by category."""
        self._ends: list[dict[str, int]] = []
        """What is held after the backward of each replayed block."""

    def run(self) -> Peaks:
        """Replay initialisation, the first step and a later one."""
        ledger = self._ledger
        ledger.begin("initialisation")
        self.initialise()
        initialisation, built = ledger.peak, ledger.total
        ledger.begin("first step")
        for spec in (
            *buffers.gather_buffers(self._some, self._sizing),
            *buffers.buckets(self._trainable, self._sizing),
        ):
            self._waiting[spec.name, spec.width].append(spec)
        self._step()
        first = ledger.peak
        ledger.begin("steady state")
        for name, width in list(self._waiting):  # units are prefetched from now on
            self._make(name, width, len(self._waiting[name, width]))
        self._keep_slots()
        self._step()
        return Peaks(
            initialisation,
            first,
            ledger.peak,
            dict(self._checkpoints_away),
            built,
            self._checkpoint_nbytes,
            reserved=ledger.reserved,
        )

    def run_step(self) -> StepPeak:
        """Replay one step of an engine whose states and buffers take no memory."""
        if not self._setup.offload.shares.get(ACTIVATIONS):
            self._lead = 1
        self._ledger.begin("a step")
        self._step()
        gradients = sum(self._grads_of(unit) for unit in self._units)
        both, rest = self._ledger.peak.nbytes, self._ledger.without_gradients
        away = dict(self._checkpoints_away)
        return StepPeak(rest, both if self._frees_grads else rest + gradients, gradients, away, self._checkpoint_nbytes)

    def _grads_of(self, unit: Sequence[FlatSpec]) -> int:
        """Return the bytes of a unit's gradients, wherever they rest."""
        return sum(buffers.gradients(flat, self._sizing).nbytes for flat in unit if flat.trainable)

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
        if not self._owes:  # the first one makes scratch memory
            streamed = any(flat.offloaded for flat in self._trainable)
            self._keep(*buffers.update_scratch(self._trainable, self._sizing), stream=UPDATES if streamed else COMPUTE)
        self._update(self._trainable, offloaded=False, count=setup.num_temporaries[self._owes])
        self._owes = True
        self._spent = {index: grads for index, grads in self._flat_grads.items() if self._spends(index)}
        self._flat_grads.clear()
        self._end_repeats(CATEGORIES, self._spent_repeated)
        self._spent_repeated = 0

    def _micro_step(self, first: bool) -> None:
        """Replay a forward and a backward; the first of a step runs updates that the last step has left to it."""
        setup, shape, ledger = self._setup, self._shape, self._ledger
        batch = Batch(setup.batch, setup.seq, setup.width, setup.device == "cuda", setup.tp, setup.packed)
        decoder = Decoder(shape, batch)
        tape = Tape(ledger, self._on_grad)
        inputs = [Storage(ledger, 2 * 8 * batch.tokens)]  # token ids and targets
        inputs += [Storage(ledger, nbytes) for nbytes in decoder.shared_inputs()]
        if setup.tp > 1:  # an unfinished all-reduce keeps its buffer alive
            inputs.append(Storage(ledger, decoder.hidden))
        if not self._replayed:
            self._assign_slots(-(-decoder.hidden // setup.parts))
            self._choose_blocks()
        self._entering = first and self._owes
        x = self._forward(tape, decoder)
        ledger.moment = "head and loss"
        loss = self._head(tape, decoder, x)
        del x
        ledger.moment = "backward of the head"
        root = loss.node
        assert root is not None
        del loss
        tape.backward(root, [Storage(ledger, 4)])
        for unit in list(self._grads) if setup.zero.gradients else [0]:
            self._reduce(unit)
        del inputs
        self._copies.clear()
        self._end_repeats([category for category in CATEGORIES if category != "gradients"])  # those stay

    def _spends(self, unit: int) -> bool:
        """Whether the next forward's update reads a unit's gradients; without a GPU they are freed before."""
        return self._setup.device == "cuda" and any(flat.offloaded for flat in self._units[unit] if flat.trainable)

    def _end_repeats(self, categories: Iterable[str], spent: int = 0) -> None:
        """Free what the blocks that are not replayed hold, but for gradients that are `spent` in the next step."""
        for category in categories:
            left = spent if category == "gradients" else 0
            self._ledger.add({category: self._repeated[category] - left}, -1)
            self._repeated[category] = left
        self._ends.clear()

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
        self._spent.pop(unit, None)

    def _gather(self, unit: int, number: int) -> None:
        """Allocate gather buffers for a unit's flats, unless there are `number` of their size."""
        for flat in self._units[unit]:
            name = buffers.gather_name(flat.total)
            self._make(name, flat.width, number - self._made[name, flat.width])

    def _make(self, name: str, width: int, number: int) -> None:
        """Allocate `number` buffers of a kind, or as many as are not there yet."""
        waiting = self._waiting.get((name, width), [])
        for _ in range(min(number, len(waiting))):
            self._keep(waiting.pop(), stream=REDUCTIONS if name == buffers.BUCKET_SUMS else COMPUTE)
            self._made[name, width] += 1

    def _forward(self, tape: Tape, decoder: Decoder) -> Tensor:
        """Replay the embedding, and the first and last blocks of each run of equal ones; the others are counted."""
        self._ledger.moment = "embedding"
        self._enter(0)
        x = decoder.embed(tape)
        Storage(self._ledger, decoder.mask_scratch)
        period = self._shape.period
        begins: list[dict[str, int]] = []
        for block, skipped in self._replayed:
            if skipped:
                self._repeat(begins[-period], skipped // period)
                if self._slots[block : block + 1] not in ([HBM], []):  # else those in flight are of earlier blocks
                    self._in_flight = {each + skipped: storage for each, storage in self._in_flight.items()}
            begins.append(dict(self._ledger.held))
            self._ledger.moment = f"forward of block {block + 1}"
            x = self._block(tape, decoder, x, block, skipped)
        return x

    def _choose_blocks(self) -> None:
        layers, period = self._shape.layers, self._shape.period
        slots = [*self._slots, *[""] * (layers - len(self._slots))]
        units = map(id, self._units[1 : layers + 1])
        whole = (block < self._recompute.whole for block in range(layers))
        keys = list(zip(units, slots, self._shape.sparse, whole, strict=True))
        self._replayed = list(replayed(keys, self._lead + period, period))

    def _repeat(self, before: Mapping[str, int], times: int) -> dict[str, int]:
        """Count what has changed since `before` another `times`, until the end of the step; return that."""
        change = self._ledger.since(before, times)
        self._ledger.add(change)
        for category, nbytes in change.items():
            self._repeated[category] += nbytes
        return change

    def _block(self, tape: Tape, decoder: Decoder, x: Tensor, block: int, skipped: int) -> Tensor:
        """Replay a block's forward; `skipped` blocks before it are not replayed."""
        unit = block + 1
        self._enter(unit)

        def run(t: Tape, y: Tensor) -> Tensor:
            return decoder.block(t, y, block, unit)

        self._mark(tape, x, f"end of backward of block {unit}", done=unit, skipped=skipped)
        if block < self._recompute.count:
            size = x.storage.nbytes
            self._keep_checkpoint(x, block)
            selective, before = block >= self._recompute.whole, decoder.before_recomputation
            out = tape.checkpoint(run, x, lambda: self._bring_back(block, size), selective, before)
        else:
            out = run(tape, x)
        self._mark(tape, out, f"backward of block {unit}")
        return out

    # -- checkpoints: the rules of offload/stack.py and activations.py -------------------------------------------------

    def _keep_checkpoint(self, x: Tensor, block: int) -> None:
        """Copy a rank's part of a block's input into its slot; for another tier the copy lives until it is written."""
        if x.node is None:  # computed from frozen parameters: it stays as it is
            self._first_input.append(x.storage)
            return
        part = -(-x.storage.nbytes // self._setup.parts)
        if not self._has_slots:
            self._keep_bytes("activations", self._num_near * self._slot_nbytes(HBM, part))
            self._has_slots = True
        if self._slots[block] == HBM:
            return
        while len(self._in_flight) >= 2:
            self._in_flight.pop(min(self._in_flight))
        self._in_flight[block] = x.storage if self._setup.parts == 1 else Storage(self._ledger, part)

    def _slot_nbytes(self, tier: str, part: int) -> int:
        align = {HBM: 512 if self._setup.device == "cuda" else 64}.get(tier, constants.PAGE_NBYTES)
        return -(-part // align) * align

    def _assign_slots(self, part: int) -> None:
        """Assign the recomputed blocks to the tiers that keep their inputs."""
        checkpoints, self._checkpoint_nbytes = self._recompute.count, part
        for share in self._setup.checkpoint_shares():
            each = self._slot_nbytes(share.tier, part)
            left = checkpoints - len(self._slots)
            count = left if share.budget is None else min(left, share.budget // each)
            self._slots += [share.tier] * count
            if share.tier != HBM and count:
                self._checkpoints_away[share.tier] = self._checkpoints_away.get(share.tier, 0) + count * each
        if (left := checkpoints - len(self._slots)) > 0:
            fact = f"activations: {left} of {checkpoints} checkpoints have no place left in their budgets"
            raise UserError(fact, hint="name another tier after them: activations=cpu+nvme", exit_code=DOES_NOT_FIT)
        self._num_near = self._slots.count(HBM)
        if self._shape.lora is not None and self._slots:  # the first block's input takes no slot
            self._slots = [HBM, *self._slots[:-1]]

    def _bring_back(self, block: int, size: int) -> Storage:
        """Return a block's input, and start prefetching that of the previous block."""
        if block == 0 and self._first_input:
            return self._first_input.pop()
        if self._setup.parts == 1 and self._slots[block] == HBM:
            return Storage(self._ledger, 0)  # it is read in place
        source = self._in_flight.pop(block, None) if self._setup.parts == 1 else None
        source = source or self._ahead.pop(block, None) or Storage(self._ledger, size)
        before = block - 1
        resting = self._setup.parts == 1 and (before in self._in_flight or self._slots[before] == HBM)
        if before >= 0 and not resting:
            self._ahead[before] = Storage(self._ledger, size)
        if self._setup.parts > 1:
            self._in_flight.pop(block, None)
        return source

    def _mark(self, tape: Tape, x: Tensor, moment: str, done: int = 0, skipped: int = 0) -> None:
        """Record the moment in backward when the gradient of `x` exists; the unit `done` is then reduced and freed.

        Then `skipped` blocks before it are counted, as if they had run too.
        """
        if x.node is None:  # no gradient comes here: what made it is frozen
            return
        node = tape.record(moment, [x])

        def reached(gradient: list[Storage]) -> list[Storage]:
            self._ledger.moment = moment
            if done:
                self._gather(done - 1, 2 if done <= self._shape.layers else 1)  # for the backward that comes next
                self._reduce(done)
                self._ends.append(dict(self._ledger.held))
            if skipped:
                period = self._shape.period
                change = self._repeat(self._ends[-1 - period], skipped // period)
                self._spent_repeated += change["gradients"] if self._spends(done) else 0
                self._ahead = {block - skipped: storage for block, storage in self._ahead.items()}
            return [gradient.pop()]

        node.backward = reached
        x.node = node

    def _head(self, tape: Tape, decoder: Decoder, x: Tensor) -> Tensor:
        """Replay the final norm and the chunked loss, whose two gradients are computed in the forward pass."""
        shape, setup, ledger = self._shape, self._setup, self._ledger
        unit = 0 if shape.tie else shape.layers + 1
        if unit:
            self._enter(unit)
        if shape.final_norm:
            self._mark(tape, x, "end of backward of the head", done=unit)
            norm = [each for each in shape.head_parameters() if each.name.startswith("norm") and each.trainable]
            x = decoder.norm(tape, x, [each.numel * setup.width for each in norm], unit)
        tokens, width, vocab = decoder.batch.tokens, setup.width, shape.local_vocab(setup.tp)
        chunk = min(constants.chunk_tokens(vocab, setup.device), tokens)
        rows = chunk * constants.padded_vocab(vocab)
        grad_x = Storage(ledger, tokens * shape.hidden * width, "logits")
        frozen = shape.lora is not None
        grad_weight = None if frozen else Storage(ledger, vocab * shape.hidden * FP32, "logits")
        small = Storage(ledger, 5 * tokens, "logits")  # losses, and which targets count
        buffer = Storage(ledger, rows * width, "logits")
        if not decoder.batch.has_kernels or vocab != shape.vocab:
            # Indices and masks of a chunk, its maxima and sums, and in half precision its logits in fp32.
            few = (29 if setup.tp == 1 else 54) * chunk
            Storage(ledger, few + (rows * FP32 if width < FP32 else 0), "logits")
        if width < FP32 and setup.device == "cpu" and not frozen:
            Storage(ledger, chunk * (vocab + shape.hidden) * FP32, "logits")
        del buffer, small
        kept = [grad_weight, grad_x] if grad_weight is not None else [grad_x]
        del grad_weight, grad_x
        node = tape.record("loss", [x])
        node.backward = lambda incoming: self._loss_backward(incoming, kept, unit)
        return Tensor(Storage(ledger, 4), node)

    def _loss_backward(self, incoming: list[Storage], kept: list[Storage], unit: int) -> list[Storage]:
        incoming.clear()
        grad_x = kept.pop()
        if not kept:
            return [grad_x]
        weight = kept.pop()
        if self._setup.width < FP32:
            weight = Storage(self._ledger, weight.nbytes // FP32 * self._setup.width, "buffers")
        if self._shape.tie:
            self._tied.append(weight)
        else:
            self._on_grad(unit, weight)
        return [grad_x]

    def _on_grad(self, unit: int, grad: Storage) -> None:
        """Record a parameter's gradient: kept until its unit is reduced, or added at once to the full gradient."""
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
