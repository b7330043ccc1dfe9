"""Sizes that the engine's parts choose for themselves, for those who must not import torch.

`tests/plan/test_plan.py` holds each to the part that it is copied from.
"""

from __future__ import annotations

MAX_CHUNK_NUMEL = {"cuda": 128 * 2**20, "cpu": 16 * 2**20}
"""`models.loss`: bound on a chunk's logits, in elements."""
ROW_ALIGNMENT = 64
"""`models.loss`: elements to which a row of logits is padded."""
UPDATE_CHUNK = {"cpu": 1 << 20, "cuda": 16 << 20}
"""`update`: elements updated at a time."""
NUM_SLOTS = 6
"""`update`: chunks on their way at once."""
PAGE_NBYTES = 4096
"""`tiers.base`: what blocks off the device round up to."""
ARENA_NBYTES = 256 << 20
"""`tiers.dram`: an arena that blocks share."""
FIRST_ARENA_NBYTES = 16 << 20
"""`tiers.dram`: the smallest such arena."""
UNIT_NBYTES = 8 << 20
"""`tiers.nvme`: a stripe unit, and one staging buffer."""
GROW_NBYTES = 64 << 20
"""`tiers.nvme`: by how much a swap file grows."""
STAGING_NBYTES = 64 << 20
"""`tiers.nvme`: staging of one tier object."""
NUM_TAIL_PAGES = 32
"""`tiers.nvme`: pages for ends of blocks."""
PIECE_NUMEL = 4 << 20
"""`checkpoint.boxes`: largest piece of a saved tensor, in elements."""
SAVE_SLOT_NBYTES, MAX_SAVE_SLOT_NBYTES = 32 << 20, 128 << 20
"""`checkpoint.snapshot`: host memory that pieces are read into and written from together, the least and the most."""


def padded_vocab(vocab: int) -> int:
    """Return the length of a row of the logits' buffer."""
    return -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT


def chunk_tokens(vocab: int, device: str) -> int:
    """Return how many tokens a chunk of logits holds."""
    tokens = MAX_CHUNK_NUMEL[device] // padded_vocab(vocab)
    return tokens // 128 * 128 or max(tokens, 1)


def stream_chunk(staging_nbytes: int, num_states: int) -> int:
    """Return the elements of a chunk such that all slots together stay within the staging budget."""
    element = 4 * (num_states + 1) + 4 + 4
    return max(64, staging_nbytes // NUM_SLOTS // element // 64 * 64)


def save_slot(buffer_nbytes: int) -> int:
    """Return the bytes of each slot of the buffer that checkpoints pass through."""
    asked = buffer_nbytes // 64 // PAGE_NBYTES * PAGE_NBYTES
    return min(MAX_SAVE_SLOT_NBYTES, max(SAVE_SLOT_NBYTES, asked))
