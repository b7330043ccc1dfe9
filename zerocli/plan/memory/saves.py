"""Saved checkpoints: the bytes that a run folder holds at most, and the host memory for writing each.

A checkpoint is the fp32 master and every optimizer state of the whole model, once, whatever the ranks and the stage;
frozen parameters are saved as they are, unless they are the base of adapters, which is read or drawn again. It is in
the run folder, which may or may not be on the disks of the nvme tier; a plan cannot know. The rule:

- On one node the run folder is assumed to be on that node's disks, so checkpoints count as `nvme`, like swap files:
  what fits then fits wherever the folder is. `--set checkpoint.every=0` leaves them out.
- Several nodes write into one folder on a shared file system, and so does a node without disks: the plan states its
  size, and counts it on no tier.
"""

from __future__ import annotations

from zerocli.layout import constants
from zerocli.layout.sizes import format_count
from zerocli.plan.memory.flats import Flats
from zerocli.plan.rows import Row
from zerocli.plan.setup import Setup

SHARED = "shared"
"""Stands for a tier: a file system that nodes share."""
_PIECE_NBYTES = 256
"""Bytes of a piece's entry in the manifest, and of its alignment."""
_RANK_NBYTES = 16 << 10
"""Bytes of a rank's random states, and of padding at the end of its file."""


def saved(numel: int, setup: Setup, flats: Flats, frozen: int = 0) -> Row | None:
    """Return what checkpoints take in the run folder: on tier `nvme`, or `shared` with several nodes or no disks.

    `frozen` of the `numel` parameters are not trained, and are saved as they are.
    """
    if not setup.checkpoints:
        return None
    arrays = setup.num_states + 1
    kept = 0 if setup.base_elsewhere else frozen
    each = 4 * arrays * (numel - frozen) + setup.width * kept + _beside(arrays, numel - frozen + kept, setup, flats)
    formula = (
        f"checkpoints in {folder_of(setup)}: {setup.checkpoints - 1} kept and one being written"
        f" x {4 * arrays} B x {format_count(numel - frozen)} parameters"
    )
    if kept:
        formula += f", and {setup.width} B x {format_count(kept)} frozen ones"
    shared = setup.saves_elsewhere or setup.ranks > setup.ranks_per_node
    return Row("runtime", SHARED if shared else "nvme", setup.checkpoints * each, formula)


def folder_of(setup: Setup) -> str:
    """Return the run folder in words, with where it is."""
    if setup.ranks > setup.ranks_per_node:
        return "the run folder, which all nodes share"
    return "the run folder, elsewhere than on this node" if setup.saves_elsewhere else "the run folder"


def _beside(arrays: int, numel: int, setup: Setup, flats: Flats) -> int:
    """Return an upper bound on the bytes of a checkpoint beyond its tensors: each piece has an entry."""
    sections = 1 if setup.tp == 1 else 3 * setup.tp  # a rank's rows of queries, keys and values are apart
    pieces = flats.total(lambda flat: len(flat.layout.entries) * sections + setup.ranks)
    pieces = arrays * (pieces + numel // constants.PIECE_NUMEL)
    return pieces * _PIECE_NBYTES + setup.ranks * _RANK_NBYTES if flats else 0


def buffer(setup: Setup, flats: Flats) -> int:
    """Return the host memory per rank for writing checkpoints: the slots they fill, up to `checkpoint.buffer`."""
    if not setup.checkpoints:
        return 0
    slot = constants.save_slot(setup.checkpoint_buffer)
    arrays = setup.num_states + 1
    frozen = 0 if setup.base_elsewhere else 1
    written = flats.total(lambda flat: flat.own.numel * (4 * arrays if flat.trainable else frozen * flat.width))
    largest = max((entry.numel for flat in flats.distinct for entry in flat.layout.entries), default=0)
    # A slot is closed when the next piece does not fit.
    filled = -(-written // (slot - 4 * min(constants.PIECE_NUMEL, largest)))
    return min(filled, max(2, setup.checkpoint_buffer // slot)) * slot
