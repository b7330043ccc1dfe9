"""Saved checkpoints: what a run's folder holds of them at most, and the host memory that each passes through.

A checkpoint is the fp32 master and every optimizer state of the whole model, once, whatever the ranks and the stage. It
lies in the run folder, which need not be on the disks of the nvme tier, and no plan can know whether it is. The rule:

- On one node the run folder is taken to be on that node's disks, so its checkpoints count as `nvme`, beside the swap:
  what then fits, fits wherever the folder is. `--set checkpoint.every=0` leaves them out.
- Several nodes write into one folder, which is on a file system that they share and no node's own: the plan says how
  much it holds, and counts it on no tier.
"""

from __future__ import annotations

from zerocli.layout import constants
from zerocli.layout.flats import FlatSpec
from zerocli.layout.sizes import format_count
from zerocli.plan.rows import Row
from zerocli.plan.setup import Setup

SHARED = "shared"
"""In the place of a tier: a file system that no node has to itself."""
_PIECE_NBYTES = 256
"""A piece's line in the manifest, and what is lost to its alignment."""
_RANK_NBYTES = 16 << 10
"""A rank's random states, and the rest of its file's last pages."""


def saved(numel: int, setup: Setup, flats: list[FlatSpec]) -> Row | None:
    """Return what checkpoints take in the run folder; on tier `nvme`, or `shared` where several nodes have it."""
    if not setup.checkpoints:
        return None
    arrays = setup.num_states + 1
    each = 4 * arrays * numel + _beside(arrays, numel, setup, flats)
    one_node = setup.ranks <= setup.ranks_per_node
    where = "the run folder" if one_node else "the run folder, which all nodes share"
    formula = (
        f"checkpoints in {where}: {setup.checkpoints - 1} kept and one being written"
        f" x {4 * arrays} B x {format_count(numel)} parameters"
    )
    return Row("runtime", "nvme" if one_node else SHARED, setup.checkpoints * each, formula)


def _beside(arrays: int, numel: int, setup: Setup, flats: list[FlatSpec]) -> int:
    """Return a bound on the bytes of a checkpoint beside its tensors: each is saved in pieces, of which a list is."""
    sections = 1 if setup.tp == 1 else 3 * setup.tp  # a rank's rows of queries, keys and values are apart
    pieces = sum(len(flat.layout.entries) * sections + setup.ranks for flat in flats)
    pieces = arrays * (pieces + numel // constants.PIECE_NUMEL)
    return pieces * _PIECE_NBYTES + setup.ranks * _RANK_NBYTES if flats else 0


def buffer(setup: Setup, flats: list[FlatSpec]) -> int:
    """Return the host memory of a rank through which checkpoints pass: slots, as many as they fill, within the key."""
    if not setup.checkpoints:
        return 0
    slot = constants.save_slot(setup.checkpoint_buffer)
    written = 4 * (setup.num_states + 1) * sum(flat.own.numel for flat in flats)
    largest = max((entry.numel for flat in flats for entry in flat.layout.entries), default=0)
    # A slot is closed when the next piece does not fit.
    filled = -(-written // (slot - 4 * min(constants.PIECE_NUMEL, largest)))
    return min(filled, max(2, setup.checkpoint_buffer // slot)) * slot
