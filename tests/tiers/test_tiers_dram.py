"""Host memory: what the machine allows is read and respected, pinning is counted, and nothing is rounded away."""

from __future__ import annotations

import gc
import resource
from unittest import mock

import pytest
import torch

from tiers.conformance import MIB
from tiers.dram import DramTier
from tiers.errors import TierError, TierFull
from tiers.limits import HostLimits, read_limits
from tiers.pages import Pages, Registrar

GIB = 1 << 30


class PretendRegistrar(Registrar):
    """A GPU's word on pinning, up to `limit` bytes."""

    available = True

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> str | None:
        if sum(self.held.values()) + nbytes > self.limit:
            return "cudaHostRegister gave error 2"
        self.held[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        del self.held[address]


def machine(tmp_path, meminfo="MemAvailable: 104857600 kB\n", cgroup="0::/\n", memlock=resource.RLIM_INFINITY, **files):
    """Lay out the files of a machine below `tmp_path` and return what is read from them."""
    files = {name.replace("__", "/"): text for name, text in files.items()}
    files |= {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with mock.patch("resource.getrlimit", return_value=(memlock, resource.RLIM_INFINITY)):
        return read_limits(tmp_path)


def test_without_cgroup_limits_the_system_decides(tmp_path):
    limits = machine(tmp_path)
    assert limits == HostLimits(100 * GIB, None, None)
    assert limits.describe() == "100 GiB free (no cgroup limit), memlock unlimited"


def test_a_v2_limit_less_usage_decides_and_idle_cache_is_not_usage(tmp_path):
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{20 * GIB}\n")
    (group / "memory.current").write_text(f"{8 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    limits = machine(tmp_path, cgroup="0::/job/step\n", memlock=8388608)
    assert limits == HostLimits(14 * GIB, 20 * GIB, 8 * MIB)
    assert limits.describe() == "14 GiB free (cgroup limit 20 GiB), memlock 8 MiB"


def test_the_tightest_parent_decides(tmp_path):
    top = tmp_path / "sys/fs/cgroup"
    for folder, limit, usage in ((top / "a", 10 * GIB, 9 * GIB), (top / "a/b", 5 * GIB, 1 * GIB)):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(str(limit))
        (folder / "memory.current").write_text(str(usage))
    assert machine(tmp_path, cgroup="0::/a/b\n") == HostLimits(1 * GIB, 10 * GIB, None)


def test_a_v1_limit_is_read_where_the_container_shows_it(tmp_path):
    top = tmp_path / "sys/fs/cgroup/memory"
    top.mkdir(parents=True)
    (top / "memory.limit_in_bytes").write_text(str(6 * GIB))
    (top / "memory.usage_in_bytes").write_text(str(2 * GIB))
    (top / "memory.stat").write_text(f"total_inactive_file {GIB}\n")
    cgroup = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"
    assert machine(tmp_path, cgroup=cgroup) == HostLimits(5 * GIB, 6 * GIB, None)


def test_no_limit_has_many_spellings(tmp_path):
    top = tmp_path / "sys/fs/cgroup"
    (top / "memory").mkdir(parents=True)
    (top / "memory.max").write_text("max\n")
    (top / "memory.current").write_text("1\n")
    (top / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine(tmp_path, cgroup="4:memory:/\n0::/\n") == HostLimits(100 * GIB, None, None)


def test_a_machine_that_says_nothing_is_survived(tmp_path):
    assert read_limits(tmp_path).available > 0


def test_this_machine_can_be_read():
    limits = read_limits()
    assert 0 < limits.available < 1 << 50
    assert "free" in limits.describe()


def test_capacity_is_what_the_machine_has_left(monkeypatch):
    monkeypatch.setattr("tiers.dram.read_limits", lambda: HostLimits(3 * MIB, 4 * MIB, None))
    with DramTier() as tier:
        assert tier.capacity == 3 * MIB
        tier.free(tier.allocate(3 * MIB))
        with pytest.raises(TierFull) as full:
            tier.allocate(3 * MIB + 1)
        assert full.value.available == 3 * MIB


def test_a_budget_beyond_the_machine_is_full_where_the_machine_is(monkeypatch):
    monkeypatch.setattr("tiers.dram.read_limits", lambda: HostLimits(3 * MIB, 4 * MIB, None))
    with DramTier(100 * MIB) as tier:
        with pytest.raises(TierFull, match="8 MiB needed, 3 MiB free .*cgroup limit 4 MiB") as full:
            tier.allocate(8 * MIB)
        assert (full.value.needed, full.value.available) == (8 * MIB, 3 * MIB)
        assert full.value.hint


def test_sizes_are_exact_and_pages_aligned():
    with DramTier(64 * MIB, arena_nbytes=4096) as tier:
        block = tier.allocate(9 * MIB + 1)
        assert tier.footprint == tier.used == 9 * MIB + 4096
        assert tier.view(block).data_ptr() % 4096 == 0 and tier.view(block).numel() == 9 * MIB + 1


def test_arenas_are_pinned_when_first_needed_and_counted():
    registrar = PretendRegistrar()
    with DramTier(64 * MIB, arena_nbytes=MIB, registrar=registrar) as tier:
        assert tier.pinned and tier.pinned_nbytes == 0
        blocks = [tier.allocate(100_000) for _ in range(15)]
        assert tier.pinned_nbytes == tier.footprint == sum(registrar.held.values()) == 2 * MIB
        assert tier.describe().endswith("pinned") and "not pinned" not in tier.describe()
        for block in blocks:
            tier.free(block)
        assert tier.pinned_nbytes == 2 * MIB
    assert registrar.held == {}


def test_empty_arenas_make_way_for_a_larger_block():
    registrar = PretendRegistrar()
    with DramTier(8 * MIB, arena_nbytes=MIB, registrar=registrar) as tier:
        blocks = [tier.allocate(MIB) for _ in range(8)]
        for block in blocks[1:]:
            tier.free(block)
        tier.allocate(7 * MIB)
        assert tier.pinned_nbytes == tier.footprint == tier.used == 8 * MIB
    assert registrar.held == {}


def test_refused_pinning_names_the_limit_and_the_bytes(monkeypatch):
    registrar = PretendRegistrar(limit=2 * MIB)
    monkeypatch.setattr("tiers.dram.read_limits", lambda: HostLimits(GIB, None, 2 * MIB))
    with DramTier(64 * MIB, pin=True, arena_nbytes=MIB, registrar=registrar) as tier:
        tier.allocate(2 * MIB)
        with pytest.raises(TierError, match=r"pinning 5 MiB .*refused .*memlock limit 2 MiB") as error:
            tier.allocate(3 * MIB)
        assert error.value.tier == "dram" and "ulimit -l" in error.value.hint
        assert tier.used == tier.footprint == 2 * MIB


def test_refused_pinning_may_be_lived_with():
    registrar = PretendRegistrar(limit=MIB)
    with DramTier(64 * MIB, pin="auto", arena_nbytes=MIB, registrar=registrar) as tier:
        blocks = [tier.allocate(MIB) for _ in range(3)]
        assert not tier.pinned and tier.pinned_nbytes == MIB
        assert len(tier.notes) == 1 and "unpinned" in tier.notes[0] and "not pinned" in tier.describe()
        tier.write(blocks[2], torch.ones(MIB, dtype=torch.uint8)).wait()
        assert bool(tier.view(blocks[2]).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_pinning_without_a_gpu():
    with pytest.raises(TierError, match="no GPU"):
        DramTier(MIB, pin=True)
    with DramTier(MIB) as tier:
        tier.allocate(1)
        assert not tier.pinned and tier.notes == []


def test_memory_outlives_its_tier_for_whoever_still_views_it():
    tier = DramTier(MIB)
    view = tier.view(tier.allocate(1000))
    view.fill_(7)
    tier.close()
    assert int(view.sum()) == 7000


def test_pinned_memory_is_unpinned_before_it_is_unmapped_though_nobody_closed_it():
    """Whatever is mapped there next would otherwise be taken for pinned."""

    class Watching(PretendRegistrar):
        def unregister(self, address: int) -> None:
            super().unregister(address)
            with open("/proc/self/maps") as maps:
                spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
            mapped.append(any(begin <= address < end for begin, end in spans))

    mapped: list[bool] = []
    registrar = Watching()
    tier = DramTier(8 * MIB, registrar=registrar)
    view = tier.view(tier.allocate(1000))
    tier.itself = tier  # as an engine and its hooks are: only the collector finds it
    del tier
    gc.collect()
    assert registrar.held and not mapped  # the view is still there to copy into
    del view
    assert registrar.held == {} and mapped == [True]

    tier = DramTier(8 * MIB, registrar=registrar)
    view = tier.view(tier.allocate(1000))
    tier.close()
    assert registrar.held == {} and mapped == [True, True]  # and a closed one is unpinned once
    del tier, view
    assert len(mapped) == 2


@pytest.mark.parametrize("nbytes", (1, 4096, 100 * MIB))
def test_prefaulted_pages_are_zero(nbytes):
    pages = Pages(nbytes)
    pages.prefault()
    assert not pages.bytes.any()
    pages.release()
