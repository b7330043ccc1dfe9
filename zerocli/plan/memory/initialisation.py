"""Initialisation of the engine, replayed on a ledger: one rank's device memory until its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from offload.placement import HBM
from zerocli.layout import buffers
from zerocli.layout.buffers import Spec, chunk_runs
from zerocli.layout.codecs import encoding_nbytes
from zerocli.layout.constants import NARROWED_AT_A_TIME
from zerocli.layout.flats import FP32, REMAINDER, FlatSpec
from zerocli.plan.memory.arena import COMPUTE, Arenas
from zerocli.plan.memory.flats import WHOLE, Flats
from zerocli.plan.memory.ledger import Ledger, Storage
from zerocli.plan.memory.repeats import replayed
from zerocli.plan.memory.replayable import Replayable
from zerocli.plan.memory.runtime import constant
from zerocli.plan.setup import Setup

GRANULARITY = {"cuda": 512, "cpu": 1}
"""Bytes to which the device's allocator rounds."""
THREADS = 2
"""Threads that compute, one in forward and one in backward: cuBLAS has a workspace for each."""
REPLAYED_UNITS = 24
"""So many units at the start and at the end of a run of equal ones are replayed, as their order decides what is between
them in the allocator's memory; the others are counted."""


class Initialisation:
    """One rank's device memory while its units are initialised, and what it keeps from then on."""

    def __init__(self, model: Replayable, setup: Setup, flats: Flats, arenas: bool = True) -> None:
        """Follow the GPU's allocator with `arenas`, which takes most of the time."""
        self._model, self._setup, self._flats = model, setup, flats
        self._arenas = arenas and setup.device == "cuda"
        self._sizing = setup.sizing
        self._ledger = Ledger(
            GRANULARITY[setup.device],
            Arenas() if self._arenas else None,
            constant("workspace", setup.runtime) // THREADS,
        )
        self._frees_grads = not self._sizing.keep_gradients
        self._units = flats.units
        """The flats of each unit: the first one, each block, and a head of its own."""
        self._some = flats.enough(self._sizing)
        """Enough of the units to tell how many buffers there are."""
        self._trainable = [flat for unit in self._some for flat in unit if flat.trainable]
        self._written: Storage | None = None
        """The last record that was given to a disk, which is slower than the next unit's first allocation."""
        self._kept: list[Storage] = []
        """Allocations that live as long as the engine."""

    def initialise(self) -> None:
        """Initialise unit by unit: full values in fp32 are sliced and freed before the next unit; then gradients."""
        ledger, tables = self._ledger, self._model.tables(self._setup)
        # Scalars: loss scale, counters, norms, and what released parameters show.
        self._keep_bytes("buffers", *tables, 4096 + 128 * len(self._flats))
        held = [dict(ledger.held)]
        period = self._model.period
        lead = max(period, REPLAYED_UNITS) if self._arenas else period
        for at, skipped in replayed(list(map(id, self._units)), lead, period):
            if skipped:
                for category, nbytes in ledger.since(held[-1 - period], skipped // period).items():
                    self._keep_bytes(category, nbytes)
            self._initialise_unit(self._units[at])
            held.append(dict(ledger.held))
        self._written = None
        if not self._frees_grads:
            self._keep_gradients()
        Storage(ledger, 8 * sum(tables), "buffers")  # the tables' angles, in fp64, with copies

    def initial_peak(self) -> int:
        """Return the most bytes that initialisation holds."""
        self._ledger.begin("initialisation")
        self.initialise()
        return self._ledger.peak.nbytes

    def _initialise_unit(self, flats: Sequence[FlatSpec]) -> None:
        setup, ledger = self._setup, self._ledger
        for flat in flats:
            ledger.moment = f"initialising {flat.unit}"
            if setup.loads and not flat.trainable:  # the engine allocates zeros, which files then fill
                spec = buffers.parameters(flat, self._sizing)
                if spec.tier == HBM:
                    self._keep(spec)
                continue
            wide = FP32 * flat.total
            # The check for uninitialised values reads one parameter at a time, one byte per element.
            checked = max(entry.numel for entry in flat.layout.entries)
            parts = [entry.numel for entry in flat.layout.entries if entry.group < WHOLE] if setup.tp > 1 else []
            if parts:  # a part is sliced from the full parameter, which is initialised as without tensor parallelism
                Storage(ledger, FP32 * max(parts) * (setup.tp + 1) + wide, "buffers")
            if flat.width == FP32 and flat.resident(self._sizing):
                self._keep(buffers.parameters(flat, self._sizing))
                Storage(ledger, checked, "buffers")
                whole = None
            else:
                whole = Storage(ledger, wide, "buffers")
                self._written = None
                Storage(ledger, checked, "buffers")
                self._place_parameters(flat)
            if flat.trainable:
                self._place_states(flat)
            del whole

    def _keep_gradients(self) -> None:
        """Allocate the gradients of all flats: one by one if they are partitioned, else in arenas."""
        sizing = self._sizing
        sizes: Counter[str] = Counter()
        for unit, times in self._flats.runs:
            trainable = [flat for flat in unit if flat.trainable]
            specs = list(buffers.gradient_arenas(trainable, sizing))
            sizes["arenas"] += times * sum(spec.nbytes for spec in specs)
            if sizing.stage.gradients:
                own = [buffers.gradients(flat, sizing) for flat in trainable]
                sizes["own"] += times * sum(self._ledger.rounded(spec.nbytes) for spec in own if spec.tier == HBM)
        self._keep_bytes("gradients", *sizes.values())

    def _place_parameters(self, flat: FlatSpec) -> None:
        setup, spec = self._setup, buffers.parameters(flat, self._sizing)
        numel = flat.own.numel if flat.codec else spec.numel
        rounded = None
        if spec.tier == HBM and not flat.codec:
            self._keep(spec)
        elif flat.width < FP32:  # the slice, on its way to its tier or to be encoded
            rounded = Storage(self._ledger, flat.width * numel, "buffers")
        if setup.precision == "bf16":
            Storage(self._ledger, FP32 * min(numel, NARROWED_AT_A_TIME), "buffers")
        if flat.codec:
            self._keep(spec)
            sizes = [spec.nbytes] * (spec.tier != HBM) + encoding_nbytes(flat.codec, numel, flat.width, setup.device)
            temporary = [Storage(self._ledger, nbytes, "buffers") for nbytes in sizes]
            del temporary
        del rounded

    def _place_states(self, flat: FlatSpec) -> None:
        setup, sizing, ledger, numel = self._setup, self._sizing, self._ledger, flat.held.numel
        kept = list(buffers.optimizer_states(flat, sizing)) if flat.tiers["optimizer"] == HBM else []
        remainder = None
        if sizing.master_width(flat.width) == REMAINDER:
            # Split: the parameters once more, the remainder, and two fp32 copies.
            again = Storage(ledger, flat.width * numel, "buffers")
            if kept:
                self._keep(kept.pop(0))
            else:
                remainder = Storage(ledger, REMAINDER * numel, "buffers")
            copies = [Storage(ledger, FP32 * numel, "buffers") for _ in range(2)]
            del again, copies
        self._keep(*kept)
        if flat.tiers["optimizer"] != HBM:
            # A chunk's record is made while the one before it is still there.
            chunks = [size for count, size in chunk_runs(flat, sizing.chunk) for _ in range(min(count, 2))]
            largest = sorted((sizing.record_nbytes(flat.width, size) for size in chunks), reverse=True)[:2]
            records = [Storage(ledger, nbytes, "buffers") for nbytes in largest]
            if flat.tiers["optimizer"] != "dram" and setup.device == "cuda":
                last = [sizing.record_nbytes(flat.width, size) for _, size in chunk_runs(flat, sizing.chunk)][-1]
                del records[0]
                self._written = Storage(ledger, last, "buffers")
            del records
        del remainder

    def _keep(self, *specs: Spec, stream: str = COMPUTE) -> None:
        """Allocate the device part of these buffers for the lifetime of the engine."""
        here = [spec for spec in specs if spec.nbytes and spec.tier == HBM]
        self._kept += [Storage(self._ledger, spec.nbytes, spec.category, stream) for spec in here]

    def _keep_bytes(self, category: str, *sizes: int) -> None:
        self._kept += [Storage(self._ledger, size, category) for size in sizes if size]
