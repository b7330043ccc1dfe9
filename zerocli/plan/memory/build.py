"""The plan function: from a model's shape and a setup to bytes on every tier. Pure; nothing is allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable

from offload.placement import HBM
from zerocli.errors import DOES_NOT_FIT, UserError, user_error
from zerocli.layout import constants
from zerocli.layout.buffers import (
    SlotKey,
    bucket_limit,
    chunk_runs,
    cpu_copies,
    growing_slots,
    update_scratch,
    update_temporaries,
)
from zerocli.layout.categories import STATES, model_states
from zerocli.layout.flats import FP32, FlatSpec
from zerocli.layout.shards import check_shard_ranks, round_up
from zerocli.layout.sizes import format_bytes, format_count
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.memory import saves
from zerocli.plan.memory.flats import Flats, arenas, pages, plan_flats, swap
from zerocli.plan.memory.loading import host_nbytes
from zerocli.plan.memory.replayable import Replayable
from zerocli.plan.memory.replayable_shape import replayable_shape
from zerocli.plan.memory.runtime import DISK_THREADS, LAST_PAGES, SENTENCES, constant, process_nbytes
from zerocli.plan.memory.step import ROUNDING, Peaks, Replay
from zerocli.plan.rows import Plan, Row
from zerocli.plan.setup import Setup


def check(setup: Setup) -> None:
    """Raise UserError for an impossible setup: numbers below 1, or numbers that do not divide each other."""
    for name in ("ranks", "tp", "ranks_per_node", "batch", "seq", "accumulate"):
        if getattr(setup, name) < 1:
            raise UserError(f"{name.replace('_', ' ')} {getattr(setup, name)} is below 1")
    if setup.ranks % setup.tp:
        more = round_up(setup.ranks, setup.tp)
        raise UserError(f"tp {setup.tp} does not divide ranks {setup.ranks}", hint=f"--ranks {more}")
    if setup.ranks > setup.ranks_per_node and setup.ranks % setup.ranks_per_node:
        each, more = setup.ranks_per_node, round_up(setup.ranks, setup.ranks_per_node)
        raise UserError(f"{each} ranks per node do not divide ranks {setup.ranks}", hint=f"--ranks {more}")
    try:
        check_shard_ranks(setup.shard_ranks, setup.dp, setup.local_ranks // setup.tp)
    except ValueError as error:
        raise user_error(error) from error


def plan_model(shape: Shape, setup: Setup) -> Plan:
    """Return the bytes that one step of a model of this shape needs on every tier."""
    return plan_replayable(replayable_shape(shape), setup)


def plan_replayable(model: Replayable, setup: Setup) -> Plan:
    # Compiled blocks take less time, and are planned with the memory of eager ones.
    return dataclasses.replace(_plan_eager(model, dataclasses.replace(setup, compiled=False)), setup=setup)


@functools.lru_cache(maxsize=1024)
def _plan_eager(model: Replayable, setup: Setup) -> Plan:
    """Return the plan of a model whose blocks are not compiled.

    A search asks for some setups again, also for another machine; replaying a step takes tens of milliseconds.
    """
    check(setup)
    model.check(setup)
    flats = plan_flats(model, setup)
    peaks = Replay(model, setup, flats).run()
    if setup.device == "cpu" and setup.shards > 1:
        with_gloo = Replay(model, setup, flats, with_gloo=True).run().highest.nbytes
        peaks = dataclasses.replace(peaks, gloo_nbytes=with_gloo - peaks.highest.nbytes)
    return plan_peaks(model, setup, flats, peaks)


def plan_peaks(model: Replayable, setup: Setup, flats: Flats, peaks: Peaks) -> Plan:
    """Return the plan of a model whose device memory has these peaks."""
    kept = saves.saved(model.numel, setup, flats, model.numel - model.trainable_numel)
    process = process_nbytes(setup, model.rotary)
    fragments = _fragments(setup, peaks)
    rows = [*_device_rows(model, setup, peaks, fragments), *_host_rows(setup, flats, peaks, process)]
    rows += _tier_rows(setup, flats, peaks, "nvme", swap, "swap file")
    for tier in (each for each in setup.placement().tiers if each not in ("dram", "nvme")):
        rows += _tier_rows(setup, flats, peaks, tier)  # of another package: its overhead is not known
    rows += _on_nvme(kept)
    phases = {name: getattr(peaks, name).nbytes for name in ("initialisation", "first_step", "steady")}
    initialised, built = peaks.initialisation.nbytes, peaks.built
    if setup.device == "cuda":
        workspace = constant("workspace", setup.runtime)
        phases = {name: nbytes + workspace * (name != "initialisation") for name, nbytes in phases.items()}
        initialised = built = process
    loading = host_nbytes(setup, flats, initialised, built, model.transposes)
    about = (setup, model.numel, tuple(rows), phases, peaks.highest.moment)
    return Plan(*about, saved=kept, loading=loading, trained=model.trainable_numel, fragments=fragments)


def _on_nvme(kept: Row | None) -> list[Row]:
    """Return the run folder's row if it is on the node's disks."""
    return [kept] if kept is not None and kept.tier == "nvme" else []


def plan_count(numel: int, setup: Setup, frozen: int = 0) -> Plan:
    """Return the model states of a bare parameter count, as the paper counts them; the rest needs a shape.

    `frozen` of the parameters are not trained: they have no gradients and no optimizer states.
    """
    check(setup)
    each = -(-numel // setup.tp)
    state_width = FP32 * (setup.num_states + (setup.width < FP32))  # the paper's: its master is whole
    trained = -(-(numel - frozen) // setup.tp)
    held = model_states(each, setup.stage, setup.shards, setup.width, setup.grad_width, state_width, trained)
    placement = setup.placement()
    rows = []
    for kind, category in STATES.items():
        left, formula = held[category], _states_formula(kind, each, trained, setup, state_width)
        for share in placement.of(kind):
            part = left if share.budget is None else min(left, share.budget)
            left -= part
            times = 1 if share.tier == HBM else setup.local_ranks
            if part or share.tier == HBM:
                rows.append(Row(category, share.tier, part * times, formula + (f" x {times}" if times > 1 else "")))
        if left:
            raise UserError(
                f"{category}: {format_bytes(left)} have no place left in --offload {str(setup.offload)!r}",
                hint="a tier without a budget at the end",
                exit_code=DOES_NOT_FIT,
            )
    if setup.copies > 1 and setup.zero.parameters:
        here = sum(row.nbytes for row in rows if (row.category, row.tier) == ("parameters", HBM))
        formula = f"{setup.width} B x {format_count(each)} parameters / {setup.group} ranks of a group"
        rows.append(Row("gathered", HBM, here * setup.copies, formula))
    kept = saves.saved(numel, setup, Flats(), frozen)
    return Plan(setup, numel, (*rows, *_on_nvme(kept)), {}, "", whole=False, saved=kept, trained=numel - frozen)


# -- the device --------------------------------------------------------------------------------------------------------


def _states_formula(kind: str, numel: int, trained: int, setup: Setup, state_width: int) -> str:
    """Return what model states of a kind are, of so many parameters of which some are trained."""
    width = {"parameters": setup.width, "gradients": setup.grad_width, "optimizer": state_width}[kind]
    split = f" / {setup.shards} ranks" if getattr(setup.zero, kind) else ""
    if setup.codec and kind == "parameters":
        return f"blocks in {setup.codec}, {width} B x each other one of {format_count(numel)} parameters{split}"
    return f"{width} B x {format_count(numel if kind == 'parameters' else trained)} parameters{split}"


def _device_rows(model: Replayable, setup: Setup, peaks: Peaks, fragments: int) -> list[Row]:
    peak = peaks.highest
    parameters = ((each, times) for unit, times in model.units for each in unit.parameters)
    sizes = [(math.prod(each.local(setup.tp)) * times, each.trainable) for each, times in parameters]
    numels = sum(numel for numel, _ in sizes), sum(numel for numel, trainable in sizes if trainable)
    formulas = {each: _states_formula(kind, *numels, setup, setup.state_width) for kind, each in STATES.items()}
    formulas |= model.formulas(setup) | {
        "gathered": f"{setup.gather_buffers} buffers for each size of unit, whole, {setup.width} B per parameter",
        "buffers": "reduction buckets, update slots and scratch, the gradients of the unit in backward, tables",
    }
    for each in formulas.keys() & {"gradients", "activations", "logits", "buffers"}:
        formulas[each] += f" (at the peak: {peak.moment})"
    rows = [Row(each, "hbm", nbytes, formulas[each]) for each, nbytes in peak.held.items() if each in formulas]
    if setup.device != "cuda":
        return rows
    runtime = {name: constant(name, setup.runtime) for name in ("context", "workspace", "nccl")}
    runtime |= {"nccl": runtime["nccl"] * (setup.ranks > 1), "fragments": fragments}
    return rows + [Row("runtime", "hbm", nbytes, SENTENCES[name]) for name, nbytes in runtime.items()]


def _fragments(setup: Setup, peaks: Peaks) -> int:
    """Return what torch's CUDA allocator reserves beyond the live bytes of the peak."""
    if setup.device != "cuda":
        return 0
    beyond = peaks.reserved - peaks.highest.nbytes - constant("workspace", setup.runtime)
    return constant("fragments", setup.runtime) or max(0, beyond) + LAST_PAGES


# -- the host and its disks --------------------------------------------------------------------------------------------


def _tier_rows(
    setup: Setup, flats: Flats, peaks: Peaks, tier: str, taken: Callable[[list[int]], int] = sum, place: str = ""
) -> list[Row]:
    """Return what pieces and activation checkpoints take on a tier, and what is `taken` beyond them in each `place`."""
    times = setup.local_ranks
    sizes = flats.pieces(setup.sizing, tier)
    rows = [
        Row(category, tier, sum(blocks) * times, f"{len(blocks)} pieces per rank x {times}")
        for category, blocks in sizes.items()
        if blocks
    ]
    rest = sum(map(taken, flats.tier_objects(setup.sizing, tier))) - sum(map(sum, sizes.values()))
    if rest:
        rows.append(Row("buffers", tier, rest * times, f"{place}s beyond their pieces x {times}"))
    if kept := peaks.offloaded.get(tier, 0):
        rows.append(Row("activations", tier, kept * times, f"activation checkpoints per rank x {times}"))
        if rest := taken([kept]) - kept:
            rows.append(Row("buffers", tier, rest * times, f"the rest of their {place} x {times}"))
    return rows


def _host_rows(setup: Setup, flats: Flats, peaks: Peaks, process: int) -> list[Row]:
    times = setup.local_ranks
    rows = _tier_rows(setup, flats, peaks, "dram", _taken(setup), "arena")
    disks = _disk_tiers(setup, flats, peaks)
    for sentence, nbytes in _host_buffers(setup, flats, disks).items():
        if nbytes:
            rows.append(Row("buffers", "dram", nbytes * times, f"{sentence} x {times}"))
    if disks:
        formula = f"threads of {len(disks)} disk tiers x {times}"
        rows.append(Row("runtime", "dram", len(disks) * DISK_THREADS * times, formula))
    if peaks.gloo_nbytes:
        formula = f"gloo's copies of what it reduces, at the process's peak x {times}"
        rows.append(Row("runtime", "dram", peaks.gloo_nbytes * times, formula))
    if setup.device == "cuda":
        rows.append(Row("runtime", "dram", process * times, f"{SENTENCES['python']} x {times}"))
    return rows


def _taken(setup: Setup) -> Callable[[list[int]], int]:
    """Return what host memory tiers take for blocks: whole arenas where they are pinned, else the pages in use."""
    return arenas if setup.device == "cuda" else pages


def _host_buffers(setup: Setup, flats: Flats, disks: list[Uses]) -> dict[str, int]:
    """Return the host memory of a rank beyond its arenas of pieces, by purpose."""
    near = (HBM, "dram", "null")  # a tier of another package is assumed to be prefetched from, too
    far = flats.sizes(lambda flat: [flat.own_nbytes] * (flat.tiers["parameters"] not in near))
    budget = round_up(setup.read_ahead_nbytes, constants.PAGE_NBYTES)
    tails = any(flat.tiers["parameters"] == "nvme" for flat in flats.distinct)  # of copies read ahead, in place
    found = {
        "arenas of parameters read ahead": min(budget, _taken(setup)(far)),
        "staging buffers for disks, at most": constants.NUM_TAIL_PAGES * constants.PAGE_NBYTES * tails
        + sum(_buffers(setup, uses) for uses in disks),
        "buffer for saving checkpoints, at most": saves.buffer(setup, flats),
    }
    if setup.device == "cuda":
        trainable = [flat for flat in flats.distinct if flat.trainable]
        copies = (round_up(spec.nbytes, constants.PAGE_NBYTES) for spec in cpu_copies(trainable, setup.sizing))
        found["page-locked copies for the CPU's part of the update"] = sum(copies)
        if setup.updates_on_cpu:  # else its buffers are on the device
            found["page-locked buffers of the update"] = _update_pinned(setup, flats)
            rounding = ROUNDING.get(setup.precision, 0)
            arrays = update_temporaries(trainable, setup.sizing, setup.num_temporaries[0], rounding)
            found["arrays of an update on the CPU"] = sum(spec.nbytes for spec in arrays if spec.tier != HBM)
    return found


Transfer = tuple[int, ...]
"""The most that a transfer uses of each of its staging buffers."""
Uses = list[tuple[list[Transfer], int]]
"""Of a tier object: transfers, and how many are in flight."""
MOST_ALIKE = 1 + max(constants.NUM_SLOTS, constants.MAX_BUCKETS)
"""Equal units in a row whose transfers are looked at: what is in flight of more is alike."""


def _disk_tiers(setup: Setup, flats: Flats, peaks: Peaks) -> list[Uses]:
    """Return what uses each of a rank's disk tiers: that of parameters, of other states, of activation checkpoints."""
    if "nvme" not in setup.placement().tiers:
        return []
    sizing = setup.sizing

    def chunked(size: Callable[[FlatSpec, int], int]) -> list[Transfer]:
        """Return the transfers of the chunks that the update streams, of equal ones as many as are in flight."""

        def of(flat: FlatSpec) -> list[Transfer]:
            if not (flat.trainable and flat.offloaded):
                return []
            return _parts([(count, size(flat, numel)) for count, numel in chunk_runs(flat, sizing.chunk)], setup.verify)

        return flats.sizes(of, MOST_ALIKE)

    def reduced(flat: FlatSpec) -> list[Transfer]:
        """Return the transfers by which a flat's gradients are written."""
        if not flat.trainable or flat.tiers["gradients"] != "nvme":
            return []
        count, rest = divmod(flat.own.numel * sizing.grad_width(flat.width), sizing.bucket_nbytes)
        return _parts([*[(count, sizing.bucket_nbytes)] * bool(count), *[(1, rest)] * bool(rest)], setup.verify)

    parameters = chunked(lambda flat, numel: numel * flat.width * (flat.tiers["parameters"] == "nvme"))
    records = chunked(lambda flat, numel: sizing.record_nbytes(flat.width, numel) * (flat.tiers["optimizer"] == "nvme"))
    fetched = chunked(lambda flat, numel: numel * sizing.grad_width(flat.width) * (flat.tiers["gradients"] == "nvme"))

    def placed(flat: FlatSpec) -> list[Transfer]:
        """Return the transfer by which a flat's parameters are written or fetched whole."""
        return _parts([(1, flat.own.numel * flat.width * (flat.tiers["parameters"] == "nvme"))])

    whole, written = flats.sizes(placed, MOST_ALIKE), flats.sizes(reduced, MOST_ALIKE)
    slots = constants.NUM_SLOTS
    objects: list[Uses] = [
        # Written back in the update; whole when they are placed; fetched for the next unit while one is computed with.
        [(parameters, slots), (whole, 2)],
        [
            ([sum(each, ()) for each in zip(records, fetched, strict=True)], slots),
            (written, bucket_limit([flat for flat in flats.distinct if flat.trainable], sizing)),
        ],
        [(_parts([(1, peaks.checkpoint_nbytes * bool(peaks.offloaded.get("nvme")))]) * 3, 3)],  # one of them is read
    ]
    return [uses for uses in objects if any(any(sizes) for sizes, _ in uses)]


def _parts(runs: list[tuple[int, int]], verify: bool = False) -> list[Transfer]:
    """Return the transfers of a block that is moved in runs of (count, bytes) equal parts, at most NUM_SLOTS of a run.

    A part that does not begin at a page uses one page more. One that does not begin at a stripe unit has one more
    piece, and any of them may be the largest: in time each buffer that is lent has had such a one.
    With `verify` the whole unit around a part is read for its checksum.
    """
    unit, page, slots = constants.UNIT_NBYTES, constants.PAGE_NBYTES, constants.NUM_SLOTS
    total, many = sum(count * nbytes for count, nbytes in runs), sum(count for count, _ in runs) > 1
    lost = page - math.gcd(page, *(nbytes for _, nbytes in runs)) if many else 0
    found: list[Transfer] = []
    for count, nbytes in runs:
        number, largest = min(count, slots), min(unit, round_up(total if verify else nbytes + lost, page))
        if many and total > unit:
            pieces = min(number * (nbytes // unit + 2), number + number * nbytes // unit + 1)
            each, more = divmod(pieces, number)
            found += [(largest,) * (each + (at < more)) for at in range(number)]
        else:
            starts = range(0, min(nbytes, constants.STAGING_NBYTES), unit)
            pieces_of = tuple(min(unit, round_up(nbytes - start, page)) for start in starts)
            found += [(largest,) if many and nbytes else pieces_of] * number
    return found


def _buffers(setup: Setup, uses: Uses) -> int:
    """Return the bytes of the staging buffers of a disk tier.

    A transfer takes a buffer for each of its stripe units, and the buffer that was used as far before is reused first.
    A pinned buffer counts whole, any other by the pages that it uses.
    """
    unit = constants.UNIT_NBYTES
    most = [0] * (constants.STAGING_NBYTES // unit)
    for transfers, in_flight in uses:
        for window in {tuple(transfers[at : at + in_flight]) for at in range(max(1, len(transfers) - in_flight + 1))}:
            pieces = [piece for transfer in window for piece in transfer]
            for rank, piece in enumerate(sorted(pieces, reverse=True)[: len(most)]):
                most[rank] = max(most[rank], piece)
    return sum(1 for each in most if each) * unit if setup.device == "cuda" else pages(most)


def _update_pinned(setup: Setup, flats: Flats) -> int:
    """Return the bytes that torch's pinned allocator takes per rank for the update.

    It rounds sizes to powers of two. Each buffer of a slot replaces the one of its key; what is freed is kept for a
    buffer of the same size.
    """
    trainable = [flat for unit in flats.enough(setup.sizing) for flat in unit if flat.trainable]
    total = sum(_power_of_two(s.nbytes) for s in update_scratch(trainable, setup.sizing) if s.tier != HBM)
    held: dict[SlotKey, int] = {}
    kept: Counter[int] = Counter()
    for key, size in ((k, _power_of_two(s.nbytes)) for k, s in growing_slots(trainable, setup.sizing) if s.tier != HBM):
        if key in held:
            kept[held[key]] += 1
        held[key] = size
        if kept[size]:
            kept[size] -= 1
        else:
            total += size
    return total


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()
