"""Bits flipped in what a tier holds of an engine."""

from __future__ import annotations

import os

from offload.mover import StagedStore
from tiers.base import Block
from zerocli.engine.engine import Engine

KINDS = ["params", "grads", "optimizer", "activations"]
NAMES = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer states", "activations": "activations"}


def flip(block: Block, at: int, bit: int = 7) -> None:
    """Flip a bit in the tier's own pages, or in its file, once no transfer of the block is under way."""
    for use in block._uses:
        use.transfer.synchronize()
    if block.tier.addressable:
        block.tier.view(block)[at] ^= 1 << bit
        return
    unit = block._handle.units[at // block.tier._unit_nbytes]
    fd = os.open(f"/proc/self/fd/{unit.file.fd}", os.O_RDWR)
    place = unit.start + at % block.tier._unit_nbytes
    os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1 << bit]), place)
    os.close(fd)


def block_of(engine: Engine, kind: str, unit: int = 2) -> Block:
    """The block that holds a unit's piece of this kind, and no copy of it anywhere; of activations the first one."""
    flat = engine.units[unit].flats[0]
    if isinstance(flat.param_store, StagedStore):
        engine.mover.forget(flat.param_store)
    if kind == "activations":
        return engine.activations.stack._slots[0].block
    store = {"params": flat.param_store, "grads": flat.gradient.store, "optimizer": flat.record and flat.record.store}[
        kind
    ]
    assert store is not None
    return store.block
