"""What a model computes on one rank: operations of products and attention, bytes of the other kernels, kernel launches.

Bytes count each input that a kernel reads and each output that it writes once, as `zerocli.models` runs them eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zerocli.layout import constants
from zerocli.layout.buffers import is_matrix
from zerocli.plan.blocks.shape import NORMS, Shape, Unit
from zerocli.plan.blocks.work import Work
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware, HostTimes

# Shares of the data sheet's rates, measured on an H200 with torch 2.11: 1.41B GPT-2, 16 x 1024 tokens, bf16.
PRODUCTS = 0.73
"""Matrix products of at least a thousand rows and columns."""
ATTENTION, HALF_RATE_TOKENS = 0.60, 512
"""Causal attention, forward, reaches the first share for long sequences and half of it for this many tokens; its
backward reaches 0.7 of that."""
MEMORY = 0.64
"""Element-wise kernels, norms and sums, of the memory bandwidth."""
UPDATE = 0.83
"""The update's one pass over all that a parameter has, of the memory bandwidth."""
COMPILED = 0.9
"""Bytes that compiled blocks move, relative to eager ones, whose kernels of ours are fused too."""
FP32_PRODUCTS = 0.068
"""fp32 products without tensor cores, relative to half precision (an H200's 67 of 989 TFLOPS)."""
BACKWARD_OPS = 2.5 / 0.7
"""Attention's backward relative to its forward: 2.5 times the operations, at 0.7 of the rate."""

HOST_FORWARD = 0.4
"""Forward's share of the host's time for a block, recomputed or not (`hardware.HostTimes`)."""
HOST_COMPILED, HOST_AGAIN = 1.25, 0.7
"""The host's time for a compiled block, and what its recomputation adds, relative to an eager block that is kept."""
HOST_WHOLE_MATRIX, HOST_WHOLE_OTHER = 0.5, 0.08
"""The host's time for the update of a matrix of a unit that is updated whole, and of another of its parameters,
relative to that for a block."""
ODD_WIDTH = 7
"""How much longer products of a matrix take whose longer side is no multiple of 8 (96 of 655 TFLOPS on an H200)."""
WHOLE_UPDATE_NBYTES = 200
"""Bytes per parameter that such an update moves beyond those of any other: master, gradient and states are copied in
fp32, pass through the rule in several kernels, and are written back."""
USUAL = HostTimes()


def device_seconds(work: Work, setup: Setup, hardware: Hardware) -> float:
    """Return the device's seconds: the kinds of kernels run one after the other."""
    peak = hardware.tflops * 1e12 * (FP32_PRODUCTS if setup.width == 4 else 1.0)
    rate = hardware.products * 1e12 if hardware.products and setup.width < 4 else peak * PRODUCTS
    attention = work.attention / (peak * ATTENTION * setup.seq / (setup.seq + HALF_RATE_TOKENS))
    return work.products / rate + attention + work.moved / (hardware.hbm * 1e9 * MEMORY)


@dataclass(frozen=True)
class Computed:
    """What a model computes in a step, as far as its seconds depend on it; work is one rank's, of a micro-step."""

    forward: Work
    backward: Work
    again: Work
    """What recomputation adds to backward."""
    head: Work
    """The part of forward that comes last: it waits for the update of the last unit."""
    operations: float
    """Of a step of all ranks, as MFU counts them."""
    ends: int
    """Parameters before and after the blocks, whose gathers nothing hides."""
    chunks: float
    """Chunks in which a rank updates what passes through the update's slots, if everything does."""
    layers: int
    hidden: int = 0
    """Elements per token of the sums over tensor-parallel ranks; 0: not known."""
    update: Work = Work()
    """What a rule that updates whole matrices computes on every rank; other updates only move their states."""
    whole: float = 0.0
    """The share of the trained parameters that such a rule updates: their states come, are updated and go in turn."""


def computed(shape: Shape, setup: Setup, host: HostTimes = USUAL) -> Computed:
    """Return what a model computes in a step, by the formulas of its shape."""
    (forward, backward), again = _ends(shape, setup, host), Work()
    head = forward
    recompute = setup.blocks(shape.layers)
    for first, number in shape.runs:
        there, back = _block(shape, setup, first, host)
        forward, backward = forward + there.times(number), backward + back.times(number)
        whole = max(0, min(number, recompute.whole - first))
        part = max(0, min(number, recompute.count - first)) - whole
        # Recomputation stops before a block's last product, whose result is not used, as a compiled block's graph does.
        rows, mlp = list(_mlps(shape, first))[-1]
        last = 2 * setup.batch * setup.seq * rows * mlp * shape.hidden / setup.tp
        again += Work(there.products - last, there.attention, there.moved).times(whole)
        again += Work(moved=there.moved).times(part)
    hosted = recomputing(host, setup, recompute.whole, recompute.count - recompute.whole)
    forward, again = forward + Work(host=hosted * HOST_FORWARD), again + Work(host=hosted * (1 - HOST_FORWARD))
    operations = model_flops(shape, setup.seq, setup.batch * setup.seq * setup.accumulate * setup.dp)
    ends = sum(each.numel for each in (*shape.embed_parameters(), *shape.head_parameters()))
    chunks, updates = num_chunks(shape.units, setup), whole_update(shape.units, setup, host)
    return Computed(forward, backward, again, head, operations, ends, chunks, shape.layers, shape.hidden, *updates)


def whole_update(units: Iterable[tuple[Unit, int]], setup: Setup, host: HostTimes) -> tuple[Work, float]:
    """Return `Computed.update` and `Computed.whole`: all units that have a matrix are updated whole."""
    found, numel, trained = Work(), 0.0, 0.0
    for unit, number in units if setup.updates_whole else ():
        parameters = [each for each in unit.parameters if each.trainable]
        matrices = [each.local(setup.tp) for each in parameters if is_matrix(each.name, each.shape)]
        here = number * sum(math.prod(each.local(setup.tp)) for each in parameters)
        trained += here
        if matrices:
            numel += here
            products = sum(setup.update_operations(each) * (ODD_WIDTH if max(each) % 8 else 1) for each in matrices)
            launched = HOST_WHOLE_MATRIX * len(matrices) + HOST_WHOLE_OTHER * (len(parameters) - len(matrices))
            found += Work(products, host=launched * host.block).times(number)
    return found + Work(moved=WHOLE_UPDATE_NBYTES * numel), numel / max(1.0, trained)


def num_chunks(units: Iterable[tuple[Unit, int]], setup: Setup) -> float:
    shared, chunk, found = setup.tp * (setup.shards if setup.zero.optimizer else 1), setup.sizing.chunk, 0.0
    for unit, number in units:
        trained = sum(each.numel for each in unit.parameters if each.trainable)
        found += number * math.ceil(trained / shared / chunk)
    return found


def model_flops(shape: Shape, seq: int, tokens: int) -> float:
    """Return the operations in forward and backward of `tokens` tokens, as MFU counts them: no repetition.

    Lookup tables take none: the position embedding, and the token embedding if the head has its own matrix.
    """
    names = {"positions"} if shape.tie else {"positions", "tokens"}
    tables = [each for each in shape.embed_parameters() if each.name in names]
    numel = shape.active_numel - sum(each.numel for each in tables)
    # A frozen weight has no gradient: 4 operations for each of its elements and a token instead of 6.
    frozen = shape.numel - shape.trainable_numel - sum(each.numel for each in tables if not each.trainable)
    attention = 6 * shape.layers * seq * (shape.width_q + shape.width_out) / 2  # causal: half of 12
    return tokens * (6.0 * numel - 2.0 * frozen + attention)


def _block(shape: Shape, setup: Setup, block: int, host: HostTimes) -> tuple[Work, Work]:
    tokens, tp, width = setup.batch * setup.seq, setup.tp, setup.width
    hidden, queries, keys = shape.hidden, shape.width_q // tp, shape.width_kv // tp
    trained = shape.trainable_numel / shape.numel  # a frozen weight has no gradient: one product less
    products = sum(2 * rows * inputs * outputs / tp for rows, inputs, outputs in _matrices(shape, block))
    inner = sum(rows * mlp / tp for rows, mlp in _mlps(shape, block))
    attention = setup.seq * (shape.width_q + shape.width_out) / tp  # two products, each causal
    norms = NORMS[shape.norms] * hidden + (queries + keys if shape.q_norm else 0)
    rotated = queries + keys if shape.rotary else 0
    visits = shape.experts_per_token * hidden if shape.sparse[block] else 0
    dropped = 2 * hidden if shape.dropout else 0
    biases = (queries + 2 * keys) * shape.qkv_bias + hidden * shape.out_bias + (inner + hidden) * shape.mlp_bias
    gate, back = (3, 5) if shape.gated else (2, 3)
    there = 2 * norms + 6 * hidden + gate * inner + 2 * rotated + 4 * visits + 2.5 * dropped
    again = 5 * norms + 6 * hidden + back * inner + 2 * rotated + 6 * visits + 2.5 * dropped
    again += biases + 2 * (queries + 2 * keys)  # sums over rows; gradients of queries, keys and values joined
    for inputs, outputs in _adapted(shape):
        # The input is read, the output read and written. In backward the output's gradient is read twice and the input
        # once; the input's gradient is written, and added to the layer's.
        there, again = there + (inputs + 2 * outputs) / tp, again + (5 * inputs + 2 * outputs) / tp
    factor = tokens * width * (COMPILED if setup.compiled else 1.0)
    launched = HOST_COMPILED if setup.compiled else 1.0
    hosted, later = (host.block * share * launched for share in (HOST_FORWARD, 1 - HOST_FORWARD))
    both, attended = (1 + trained) * products * tokens, attention * tokens * BACKWARD_OPS
    forward = Work(products * tokens, attention * tokens, there * factor, host=hosted)
    return forward, Work(both, attended, again * factor, host=later)


def recomputing(host: HostTimes, setup: Setup, whole: float, selective: float) -> float:
    """Return the host's time for recomputing this many blocks; compiled ones run the same graphs in any case."""
    if setup.compiled:
        return host.block * HOST_AGAIN * (whole + selective)
    return host.whole * whole + host.selective * selective


def _matrices(shape: Shape, block: int) -> Iterator[tuple[float, int, int]]:
    """Yield (rows per token, inputs, outputs) of a block's products."""
    hidden, latent = shape.hidden, shape.latent
    if latent:
        if latent.q_rank:
            yield 1, hidden, latent.q_rank
        yield 1, latent.q_rank or hidden, shape.width_q
        yield 1, hidden, latent.kv_rank + latent.rope
        yield 1, latent.kv_rank, shape.heads * (latent.nope + latent.value)
    else:
        yield 1, hidden, shape.width_q + 2 * shape.width_kv
    yield 1, shape.width_out, hidden
    if shape.sparse[block]:
        yield 1, hidden, shape.experts
    for rows, mlp in _mlps(shape, block):
        yield rows, hidden, mlp * (2 if shape.gated else 1)
        yield rows, mlp, hidden


def _adapted(shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield (inputs, outputs) of a block's layers that have adapters; queries, keys and values are one layer."""
    sizes = shape.projections()
    for names in (("q", "k", "v"), ("out",), ("gate", "up") if shape.gated else ("up",), ("down",)):
        found = shape.matrices(*names)
        if shape.lora is not None and shape.lora.of(found):
            yield sizes[found[0]][0], sum(sizes[name][1] for name in found)


def _mlps(shape: Shape, block: int) -> Iterator[tuple[int, int]]:
    """Yield (rows per token, width) of a block's MLPs."""
    if not shape.sparse[block]:
        yield 1, shape.mlp_hidden
        return
    if shape.shared_hidden:
        yield 1, shape.shared_hidden
    yield shape.experts_per_token, shape.expert_hidden


def _ends(shape: Shape, setup: Setup, host: HostTimes) -> tuple[Work, Work]:
    """Return forward and backward work of embedding and head; the loss computes its gradients in forward."""
    tokens, width = setup.batch * setup.seq, setup.width
    vocab, inputs = shape.local_vocab(setup.tp), shape.embed_dim or shape.hidden
    hidden = tokens * shape.hidden * width
    logits = tokens * vocab * width
    table = vocab * inputs * width
    # The head's gradient is summed over chunks of tokens in fp32: read and written for each.
    chunks = -(-tokens // min(tokens, constants.chunk_tokens(vocab, setup.device)))
    summed = 2 * chunks * vocab * inputs * 4
    moved = 3 * logits + 4 * hidden + 3 * table + summed
    products = 6.0 if shape.trains_head else 4.0  # a frozen head has no gradient
    forward = Work(products * tokens * vocab * inputs, moved=moved, host=2 * host.block * HOST_FORWARD)
    return forward, Work(moved=10 * hidden + 2 * table, host=2 * host.block * (1 - HOST_FORWARD))
