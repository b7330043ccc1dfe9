"""Constant sizes of the engine's parts and of the tiers.

`tiers/` cannot import this module, so its constants are copied here; `tests/plan/test_plan.py` compares the copies.
"""

from __future__ import annotations

MAX_CHUNK_NUMEL = {"cuda": 128 * 2**20, "cpu": 16 * 2**20}
"""Bound on the logits that the loss holds at a time, in elements. On a GPU a chunk is long enough that reading and
writing the fp32 weight gradient once per chunk hides behind its matmul; on a CPU a shorter one stays in cache."""
ROW_ALIGNMENT = 64
"""Elements to which a row of logits is padded: matmuls on rows that are not aligned (GPT-2's 50257) run much slower."""
UPDATE_CHUNK = {"cpu": 1 << 20, "cuda": 16 << 20}
"""Elements updated at a time, through an fp32 copy of their gradients. On a CPU the working set stays in cache; on a
GPU torch's fused kernel gives a block of threads 64 K elements, so fewer would leave multiprocessors idle."""
SPLIT_PIECE = 1 << 16
"""Elements per thread that a CPU updates at a time within such a chunk if their master is split: several passes over
them, which then go through the cache of the thread's core (on 16 cores 3.6 s for a billion parameters with one such
piece at a time, 0.6 s with 16)."""
NARROWED_AT_A_TIME = 4 << 20
"""Elements that are rounded from fp32 to bf16 at a time, through an fp32 copy."""
MIN_COMPILED_STEPS = 200
"""`model.compile=auto` compiles runs of at least this many steps: compiling takes as long as tens of steps, or more."""
CPU_GROUP = 3
"""Chunks that the CPU updates at once where it takes a part in the update beside a device, at most."""
NUM_CPU_COPIES = 4
"""Groups of chunks whose gradients or parameters are copied for the CPU at once: the link has much else to carry, and a
copy that is asked for one group ahead comes too late (measured on an H200)."""
LEAST_CPU_SHARE = 0.1
"""It takes no smaller part: copies and its thread take time of the host's."""
NUM_SLOTS = 4
"""Chunks of an update that are in flight at once: two are fetched while others are updated and written back. The host
takes 0.4 to 1 ms for a chunk of any size, so that six smaller ones in the same memory kept it as busy as the link
(measured beside an H200)."""
MAX_BUCKETS = 8
"""Reduction buckets of one kind, at most."""
PAGE_NBYTES = 4096
"""`tiers.base`: sizes of offloaded blocks round up to a multiple of this."""
ARENA_NBYTES = 256 << 20
"""`tiers.dram`: size of an arena that blocks share."""
FIRST_ARENA_NBYTES = 16 << 20
"""`tiers.dram`: size of the smallest such arena."""
UNIT_NBYTES = 8 << 20
"""`tiers.nvme`: size of a stripe unit and of a staging buffer."""
GROW_NBYTES = 64 << 20
"""`tiers.nvme`: step in which a swap file grows."""
STAGING_NBYTES = 64 << 20
"""`tiers.nvme`: staging of one tier object."""
NUM_TAIL_PAGES = 32
"""`tiers.nvme`: pages for ends of blocks."""
PIECE_NUMEL = 4 << 20
"""Largest piece of a saved tensor, in elements. A piece has one checksum, so reading any of it reads all of it."""
SAVE_SLOT_NBYTES, MAX_SAVE_SLOT_NBYTES = 32 << 20, 128 << 20
"""Bounds on the host memory through which pieces of a save pass together. At the minimum a piece of any dtype fits. Up
to the maximum copies get fewer and longer: a stream queues a limited number of copies, then the host has to wait."""


def padded_vocab(vocab: int) -> int:
    """Return the length of a row of the logits' buffer."""
    return -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT


def chunk_tokens(vocab: int, device: str) -> int:
    """Return the tokens per chunk of logits, within the bound and a multiple of 128 where possible."""
    tokens = MAX_CHUNK_NUMEL.get(device, MAX_CHUNK_NUMEL["cuda"]) // padded_vocab(vocab)
    return tokens // 128 * 128 or max(tokens, 1)


def stream_chunk(staging_nbytes: int, num_states: int) -> int:
    """Return the elements of a chunk such that all slots together stay within the staging budget."""
    element = 4 * (num_states + 1) + 4 + 4  # master and states, a gradient, a new parameter
    return max(64, staging_nbytes // NUM_SLOTS // element // 64 * 64)


def save_slot(buffer_nbytes: int) -> int:
    """Return the bytes of each slot of the buffer that checkpoints pass through."""
    asked = buffer_nbytes // 64 // PAGE_NBYTES * PAGE_NBYTES
    return min(MAX_SAVE_SLOT_NBYTES, max(SAVE_SLOT_NBYTES, asked))


# -- reading weights ---------------------------------------------------------------------------------------------------

LOAD_THREADS = 8
"""Threads that read a folder's weights, at most; each has a buffer."""
LOAD_COPIES = 6
"""Bytes of host memory per byte of a read at most: the buffer, its values in fp32, the two parts of a split master."""
LOAD_SHARE = 25
"""All reads under way take at most 1/25 of the parameters that a rank keeps, unless each would be below 1 MiB."""


def load_nbytes(kept_nbytes: int, threads: int = LOAD_THREADS) -> int:
    """Return how much a thread reads at once, for a rank that keeps this many bytes of parameters."""
    return min(32 << 20, max(1 << 20, kept_nbytes // (LOAD_SHARE * LOAD_COPIES * threads)))
