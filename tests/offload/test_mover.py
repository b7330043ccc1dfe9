"""Laws of reading ahead: what is fetched is what was last put, within the budget, from the disk as seldom as can be."""

from __future__ import annotations

import functools
import random
import weakref
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from deep import BLOCK_NUMEL, WIDTH, Deep
from lengths import LONG
from ranks import run_ranks
from toy_tiers import NVME, Tardy
from toys import train_uneven

import zerocli
from offload import tierset
from offload.mover import Mover, StagedStore
from offload.store import Store
from tiers.dram import DramTier
from tiers.errors import TierError
from tiers.registry import open_tier
from tiers.transfer import Transfer
from zerocli.layout.constants import NUM_SLOTS

PAGE = 4096


class Disk(Tardy):
    """A slow tier without an address, whose transfers finish in any order; it can be told to fail."""

    name = "disk"
    addressable = False
    failing = False

    def _read(self, handle, target, offset, after):
        if self.failing:
            raise TierError("the disk is gone", tier=self.name)
        return super()._read(handle, target, offset, after)


def make(sizes: list[int], budget: int) -> tuple[list[StagedStore], Mover, Counter]:
    disk, traffic = Disk(1 << 26, pin=False), Counter()
    mover = Mover(budget, functools.cache(lambda nbytes: DramTier(nbytes, pin=False)))
    stores = [StagedStore(mover, disk, "parameters", size, torch.int32, traffic) for size in sizes]
    for number, store in enumerate(stores):
        store.put(0, torch.full((store.numel,), number, dtype=torch.int32)).synchronize()
    return stores, mover, traffic


def test_freeing_an_array_raises_what_its_transfers_failed_with(monkeypatch):
    store, future = Store(Disk(1 << 20, pin=False), "parameters", 100, torch.int32, Counter()), Future()
    monkeypatch.setattr(Disk, "_read", lambda self, handle, target, *_: Transfer(target.numel(), future=future))
    store.fetch(0, torch.empty(100, dtype=torch.int32))
    future.set_exception(TierError("the disk is gone", tier="disk"))
    with pytest.raises(TierError, match="the disk is gone"):
        store.free()


@pytest.mark.parametrize("seed", range(6))
def test_a_fetch_gives_what_was_last_put(seed):
    dice = random.Random(seed)
    stores, mover, _ = make([dice.randrange(1, 3000) for _ in range(6)], dice.choice([0, 9000, 3 * PAGE, 1 << 20]))
    truth = [torch.full((store.numel,), number, dtype=torch.int32) for number, store in enumerate(stores)]
    fetched: list[tuple[torch.Tensor, torch.Tensor, Transfer]] = []
    for turn in range(300):
        number = dice.randrange(6)
        start = dice.randrange(stores[number].numel)
        stop = dice.randrange(start, stores[number].numel) + 1
        deed = dice.randrange(3)
        if deed == 0:
            source = torch.full((stop - start,), turn + 10, dtype=torch.int32)
            truth[number][start:stop] = source
            put = stores[number].put(start, source)
            if dice.random() < 0.5:
                put.wait()
        elif deed == 1:
            target = torch.empty(stop - start, dtype=torch.int32)
            fetched.append((target, truth[number][start:stop].clone(), stores[number].fetch(start, target)))
        else:
            mover.expect([(stores[n], dice.random() < 0.7) for n in dice.choices(range(6), k=4)])
            assert mover.cache.used <= mover.budget
    for target, expected, transfer in fetched:
        transfer.synchronize()
        assert torch.equal(target, expected)


def test_the_furthest_next_use_makes_room():
    stores, mover, traffic = make([1024] * 5, 3 * PAGE)
    uses = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]  # a forward and a backward
    for at, number in enumerate(uses):
        mover.expect([(stores[n], True) for n in uses[at:] + uses[:at]])
        target = torch.empty(1024, dtype=torch.int32)
        stores[number].fetch(0, target).synchronize()
        assert torch.equal(target, torch.full((1024,), number, dtype=torch.int32))
    # Before the first use 3 of 5 are in memory. Forward brings in two, each for the one that is used last again (0,
    # then 1), and backward those two: by any order of eviction at least four, of ten uses.
    already = 3
    assert traffic["parameters staged"] <= (already + 4) * PAGE


class Event:
    """The end of a copy on a device, which the host has not waited for."""

    over = False

    def query(self) -> bool:
        return self.over

    def wait(self, stream: object = None) -> None: ...


class Streaming(DramTier):
    """Host memory whose reads end with an event, as copies to a GPU do."""

    def _read(self, handle, target, offset, after):
        source = handle.bytes(offset, target.numel())
        target.copy_(source)
        self.last = Event()
        return Transfer(target.numel(), event=self.last, hold=(source, target), tier=self.name)


def test_copies_that_made_room_take_no_memory_though_nobody_waits_for_their_reads():
    stores, mover, _ = make([1024, 3 * 1024], 3 * PAGE)
    mover._open_cache = functools.cache(lambda nbytes: Streaming(nbytes, pin=False, arena_nbytes=PAGE))
    mover._copies.clear()
    mover.expect([(stores[0], True)])
    mapping = weakref.ref(mover.cache._arenas[0].pages._mapping)
    stores[0].fetch(0, torch.empty(1024, dtype=torch.int32)).wait()
    mover.cache.last.over = True
    mover.expect([(stores[1], True)])  # needs all of the budget
    assert mover.block_of(stores[1]) is not None and mover.cache.footprint == 3 * PAGE
    assert stores[0]._open and mapping() is None


def test_a_failed_read_ahead_is_heard_by_whoever_fetches():
    stores, mover, _ = make([1024] * 2, 4 * PAGE)
    copy = mover.copy_of(stores[0])
    assert copy is not None  # put left it there
    mover._evict(stores[0])

    def broken() -> None:
        raise TierError("half a sector", tier="disk")

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        bad = mover.admit(stores[0])
        assert bad is not None
        bad.valid, bad.arriving = stores[0].numel, Transfer(PAGE, future=pool.submit(broken), tier="disk")
    stores[0].tier.failing = True
    with pytest.raises(TierError, match="the disk is gone"):
        stores[0].fetch(0, torch.empty(1024, dtype=torch.int32))
    stores[0].tier.failing = False
    target = torch.empty(1024, dtype=torch.int32)
    stores[0].fetch(0, target).synchronize()
    assert torch.equal(target, torch.zeros(1024, dtype=torch.int32))


LOW = {"precision": "bf16", "accumulate": 2}


def _losses(settings: dict) -> list[float]:
    return train_uneven(steps=4, stage=3, **settings)


def _every_room(settings: dict, folder: str) -> list[list[float]]:
    away = {"offload": "params=nvme", "nvme_path": (folder,), **NVME}
    return [
        _losses(settings),
        *(_losses(settings | away | {"read_ahead_nbytes": n}) for n in (0, 1, 20_000, 1 << 20)[:: 1 if LONG else 2]),
    ]


@pytest.mark.longer
@pytest.mark.parametrize("variant", [pytest.param({}, marks=pytest.mark.long), LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_reading_ahead_never_changes_a_loss(tmp_path, world, variant):
    for plain, *others in run_ranks(world, _every_room, variant, str(tmp_path)):
        assert others == [plain] * len(others)


def test_slots_of_the_update_and_copies_read_ahead_have_a_budget_each(tmp_path):
    def budgets(**room: int) -> tuple[int, int]:
        engine = zerocli.shard(Deep(2), stage=3, offload="nvme", nvme_path=(str(tmp_path),), **room, **NVME)
        found = engine.mover.budget, engine.sizing.chunk
        engine.close()
        return found

    ahead, chunk = budgets()
    assert ahead == 512 << 20
    assert budgets(staging_nbytes=1 << 20) == (ahead, (1 << 20) // NUM_SLOTS // 20 // 64 * 64)
    assert budgets(read_ahead_nbytes=1 << 20) == (1 << 20, chunk)


def _staged(folder: str, layers: int, blocks_of_room: int) -> list[tuple[Counter, int]]:
    torch.manual_seed(0)
    model = Deep(layers)
    room = blocks_of_room * (2 * BLOCK_NUMEL + PAGE)
    settings = {"offload": "params=nvme", "nvme_path": (folder,), "read_ahead_nbytes": room, **NVME}
    engine = zerocli.shard(model, stage=3, precision="bf16", **settings)
    seen = []
    for _ in range(4):
        engine.tiers.traffic.clear()
        engine.backward(model(torch.randn(4, WIDTH)))
        engine.step()
        engine.updater.issue_updates()
        seen.append((Counter(engine.tiers.traffic), engine.mover.cache.peak))
    engine.close()
    return seen


@pytest.mark.parametrize("layers", [4, 8])
def test_reading_ahead_stays_within_its_budget_and_spares_the_disk(tmp_path, layers):
    room = 5
    seen = _staged(str(tmp_path), layers, room)
    padded = sum(flat.layout.total for flat in zerocli.shard(Deep(layers), stage=3).flats())
    for moved, peak in seen[1:]:
        assert moved["parameters read"] == 3 * 2 * padded  # two gathers and the update, two bytes each
        assert peak <= room * (2 * BLOCK_NUMEL + PAGE)
        if layers < room:
            assert moved["parameters staged"] == 0  # all of it fits, and every write kept its copy
        else:
            assert 0 < moved["parameters staged"] < 3 * 2 * padded


def test_the_cache_is_opened_once(monkeypatch):
    """A second call returns the tier of the first, and opens no other that nobody would close."""
    opened = []

    def open_one(name, **options):
        opened.append(open_tier(name, **options))
        return opened[-1]

    monkeypatch.setattr(tierset, "open_tier", open_one)
    tiers = tierset.TierSet(1, torch.device("cpu"), options={"dram": {"pin": False}})
    cache = tiers.open_cache(PAGE)
    assert tiers.open_cache(2 * PAGE) is cache and opened == [cache] and tiers.opened() == [cache]
    assert cache.capacity == PAGE
    tiers.close()
