"""Names for the memory of the engine's parts, on every tier."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload.mover import StagedStore
from offload.store import Store
from tiers.base import Block
from tiers.pages import resident_nbytes
from zerocli.engine.engine import Engine
from zerocli.profile.ledger import TIERS


@dataclass(frozen=True)
class Piece:
    """A block of a tier: its category, and the part of the engine that it belongs to."""

    category: str
    name: str
    block: Block


def pieces(engine: Engine) -> Iterator[Piece]:
    """Yield the blocks that the engine has on tiers other than the device's memory."""
    for flat in engine.flats():
        unit = flat.unit.title
        stores: list[tuple[str, Store | None]] = [
            ("parameters", flat.param_store),
            ("gradients", flat.gradient.store),
            ("optimizer_states", flat.record.store if flat.record is not None else None),
        ]
        for category, store in stores:
            if store is not None:
                yield Piece(category, f"{unit} {category}", store.block)
                copy = engine.mover.block_of(store) if isinstance(store, StagedStore) else None
                if copy is not None:
                    yield Piece("buffers", f"{unit} {category}, read ahead", copy)
    for block in engine.activations.stack.far():
        yield Piece("activations", "checkpoints of blocks", block)


def host_memory(engine: Engine) -> Iterator[torch.Tensor]:
    """Yield all memory that tiers have mapped on the host, arenas and staging."""
    for tier in engine.tiers.opened():
        yield from tier.host_memory()


def tier_rows(engine: Engine) -> dict[str, dict[str, int]]:
    """Return offloaded bytes by tier and category; `buffers` is what tiers took beyond the pieces."""
    sizes = footprint(engine)
    rows: dict[str, Counter[str]] = {tier: Counter() for tier in sizes}
    for piece in pieces(engine):
        if (tier := engine.tiers.name_of(piece.block.tier)) in rows:
            rows[tier][piece.category] += piece.block.nbytes
    for tier, taken in sizes.items():
        rows[tier]["buffers"] += taken - sum(rows[tier].values())
    return {tier: dict(found) for tier, found in rows.items()}


def footprint(engine: Engine) -> dict[str, int]:
    """Return the bytes that each tier but the device's memory has taken, with an entry for dram and nvme.

    dram is the host memory that tiers have mapped: all of it with a GPU, for which it is pinned (and torch's own pinned
    memory), else the pages in use. nvme is the files of all tiers. The bytes of a tier from another package are those
    that it reports itself.
    """
    cuda = engine.device.type == "cuda"
    mapped = sum(memory.nbytes if cuda else resident_nbytes(memory) for memory in host_memory(engine))
    if cuda:
        mapped += sum(memory.nbytes for _, _, memory in engine.updater.holdings() if memory.device.type == "cpu")
    found = {"dram": mapped, "nvme": sum(tier.file_nbytes for tier in engine.tiers.opened())}
    return found | {name: taken for name, taken in engine.tiers.footprint().items() if name not in TIERS}


def pinned_nbytes(engine: Engine) -> int:
    """Return the bytes of host memory that are page-locked: the tiers' own, and those of torch's allocator."""
    own = sum(tier.pinned_nbytes for tier in engine.tiers.opened())
    if engine.device.type != "cuda":
        return own
    return own + int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def holders(engine: Engine, tier: str) -> list[tuple[str, str, int]]:
    """Return (name, category, bytes) of the largest pieces on a tier, summed by name."""
    names: Counter[tuple[str, str]] = Counter()
    for piece in pieces(engine):
        if engine.tiers.name_of(piece.block.tier) == tier:
            names[piece.name, piece.category] += piece.block.nbytes
    return [(name, category, nbytes) for (name, category), nbytes in names.most_common(10)]


def rss() -> tuple[int, int]:
    """Return (resident bytes of this process, their peak), as the kernel counts them."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        with open("/proc/self/status") as status:
            for line in status:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except OSError:
        import resource

        found["VmRSS"] = found["VmHWM"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found["VmRSS"], found["VmHWM"]


def forget_rss_peak() -> None:
    """Reset the kernel's count of this process's peak RSS, where permitted."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
