"""Host memory while a model is built and loaded, before its first step. Needs no torch.

A run initialises its model on the device, flat by flat; what its placement keeps in host memory goes there at once.
With `--init-from` nothing is initialised: each rank reads the elements that it owns (`checkpoint/filling.py`), and
holds in host memory, beside what it keeps:

    8 x b            a buffer of b bytes for each thread that reads (b: `load_nbytes`, or the largest tensor's part)
    8 x 5b           the same values in fp32 and in the halves of a split master, unless a GPU converts them
    10m              an fp32 master rounded to parameters, `m` elements of a flat at a time (at most 4 M)
    2n + n/2         a slice of a flat that is stored encoded, of n elements: whole, and as nf4 (a GPU has it itself)
    2N + 4N          only GPT-2's matrices, which Hugging Face transposes: a 16-bit tensor whole, and in fp32
"""

from __future__ import annotations

from collections.abc import Iterator

from offload.placement import HBM
from zerocli.layout import constants
from zerocli.layout.flats import FP32, FlatSpec
from zerocli.plan.memory.flats import Flats, arenas
from zerocli.plan.setup import Setup


def host_nbytes(setup: Setup, flats: Flats, initialised: int, built: int, transposes: bool) -> dict[str, int]:
    """Return the peak of one node's host memory while a model is loaded: `random`ly, or by `--init-from`.

    `initialised` is the peak of a rank's process during initialisation, `built` what it holds afterwards, without what
    the tiers hold. `transposes`: the weights may be GPT-2's under Hugging Face names.
    """
    ranks = setup.local_ranks
    kept = _kept(setup, flats)
    read = max((nbytes for flat in flats.distinct for nbytes in _read(setup, flat, transposes)), default=0)
    read = max(read, _buffers(setup, flats))
    return {"random": ranks * (initialised + kept), "init_from": ranks * (built + kept + read)}


def _buffers(setup: Setup, flats: Flats) -> int:
    """Return what a rank's threads take that read weights."""
    own = sum(flats.sizes(lambda flat: [flat.own.numel * flat.width]))
    parts = (min(entry.numel, flat.own.numel) for flat in flats.distinct for entry in flat.layout.entries)
    each = min(constants.load_nbytes(own), FP32 * max(parts, default=0))
    placement = setup.placement()
    there = {share.tier for kind in ("parameters", "optimizer") for share in placement.of(kind)}
    copies = 1 if setup.device == "cuda" and there <= {HBM} else constants.LOAD_COPIES
    return min(constants.LOAD_THREADS * copies * each, constants.LOAD_COPIES * FP32 * own)


def _kept(setup: Setup, flats: Flats) -> int:
    """Return what a rank's tiers hold in host memory once its states are placed."""
    here, there = (flats.tier_objects(setup.sizing, tier) for tier in ("dram", "nvme"))
    staging = constants.STAGING_NBYTES + constants.NUM_TAIL_PAGES * constants.PAGE_NBYTES
    return sum(map(arenas, here)) + staging * sum(map(bool, there))


def _read(setup: Setup, flat: FlatSpec, transposes: bool) -> Iterator[int]:
    """Yield the bytes that a rank holds while it reads each tensor of a flat."""
    if flat.codec and setup.device == "cpu":  # the flat's slice whole, then encoded
        yield flat.own.numel * flat.width + flat.own_nbytes
    master = setup.sizing.master_width(flat.width) if flat.trainable else 0
    if master == FP32:
        yield 10 * min(flat.own.numel, constants.PIECE_NUMEL)
    for entry in flat.layout.entries:
        own = min(entry.numel, flat.own.numel)
        if transposes and len(entry.shape) == 2 and flat.unit == "block":
            yield max(6 * entry.numel, 4 * entry.numel + 4 * own)
