"""Laws of what a plan counts off the device: copies read ahead, staging, and the checkpoints a run folder keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lengths import LONG
from ranks import run_cases, run_ranks

from tiers.pages import resident_nbytes
from zerocli.checkpoint.saver import Saver
from zerocli.cli import main as cli
from zerocli.config import ModelConfig, load, read_placement
from zerocli.engine.engine import Engine
from zerocli.engine.events import Probe
from zerocli.engine.settings import Settings
from zerocli.layout import constants
from zerocli.models import build
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.flats import plan_flats
from zerocli.plan.memory.runtime import DISK_THREADS
from zerocli.plan.memory.saves import buffer
from zerocli.plan.models.resolve import run_model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup, setup_of
from zerocli.profile import places

MODEL = ModelConfig(layers=4, hidden=128, heads=4, vocab=1500)
SEQ = 32


def trained(steps: int = 2, **settings: Any) -> Engine:
    """Return an engine that has taken its steps."""
    decoder = build(MODEL, SEQ, "meta")
    engine = Engine(decoder, Settings(units=decoder.unit_modules(), device="cpu", **settings))
    for _ in range(steps):
        tokens = torch.randint(MODEL.vocab, (2, 2, SEQ))
        engine.backward(engine(tokens[0], tokens[1]))
        engine.step()
    engine.synchronize()
    return engine


def planned(world: int, **setup: Any) -> Plan:
    common: dict[str, Any] = {"ranks": world, "ranks_per_node": world, "batch": 2, "seq": SEQ, "device": "cpu"}
    return plan_model(shape_of(MODEL, SEQ), Setup(**(common | {"precision": "fp32"} | setup)))


# -- host memory beside what lies there --------------------------------------------------------------------------------

OFFLOADS = ["nvme", "params=nvme,optimizer=cpu", "params=cpu,grads=cpu,optimizer=nvme"]


ROOM, CHUNKS = 512 << 20, 512 << 20
PLACES = [*((ROOM, offload, CHUNKS) for offload in OFFLOADS), (1 << 20, "nvme", CHUNKS)]
PLACES += [(ROOM, "optimizer=nvme", 1 << 18), (ROOM, "optimizer=nvme", 160 << 10)]
"""Room for copies that are read ahead, for all of them or for few, a placement, and memory for chunks of the update.

Small chunks begin within pages of the disk.
"""


def _footprints(folder: str) -> list[tuple[int, int]]:
    """Return, for each room and placement, the bytes in RAM of the tiers' arenas, and those with staging."""
    found = []
    for room, offload, chunks in PLACES:
        common = {"read_ahead_nbytes": room, "staging_nbytes": chunks}
        engine = trained(stage=3, offload=offload, nvme_path=(folder,), **common)
        arenas = [memory for tier in engine.tiers.opened() if tier.name == "dram" for memory in tier.host_memory()]
        found.append((sum(map(resident_nbytes, arenas)), places.footprint(engine)["dram"]))
        engine.close()
    return found


def test_host_memory_of_disks_is_counted_as_it_is_taken(tmp_path):
    measured = run_ranks(2, _footprints, str(tmp_path))
    for at, (room, offload, chunks) in enumerate(PLACES):
        plan = planned(2, stage=3, offload=offload, read_ahead_nbytes=room, staging_nbytes=chunks)
        rows = [row for row in plan.rows if row.tier == "dram"]
        [staged] = [row for row in rows if "staging" in row.formula]
        host = sum(row.nbytes for row in rows if row.category != "runtime")
        arenas, mapped = (sum(rank[at][which] for rank in measured) for which in (0, 1))
        # With room for few, what is read ahead fills its budget only as far as whole copies do.
        fewer = 0 if room > 1 << 20 else 2 * room // 4
        assert -fewer <= arenas - (host - staged.nbytes) <= 0, offload
        assert mapped <= host and mapped - arenas <= staged.nbytes, offload
        assert staged.nbytes < 2 * (8 << 20), offload  # a small model's transfers use little of their buffers


def test_slots_of_the_update_and_copies_read_ahead_are_each_counted_by_their_own_key():
    def counted(**room: int) -> tuple[int, int]:
        plan = planned(2, stage=3, offload="params=nvme,optimizer=nvme", **room)
        [ahead] = [row.nbytes for row in plan.rows if "read ahead" in row.formula] or [0]
        return ahead, plan.of("buffers")

    ahead, slots = counted()
    assert counted(staging_nbytes=1 << 18)[0] == ahead and counted(staging_nbytes=1 << 18)[1] < slots
    assert counted(read_ahead_nbytes=1 << 18) == (2 << 18, slots) and counted(read_ahead_nbytes=0) == (0, slots)


def test_an_encoded_base_is_read_ahead_as_it_is_stored():
    def ahead(*sets: str) -> int:
        config = load("tiny", ["lora.rank=2", "offload.placement=nvme", "zero.stage=3", *sets])
        setup = setup_of(config, device="cpu", precision="fp32", ranks=2, ranks_per_node=2)
        [row] = [row for row in run_model(config, setup).plan(setup).rows if "read ahead" in row.formula]
        return row.nbytes

    layers, blocks = 4, 12 * 128**2  # norms, biases and embeddings are stored as they are
    rounded = 2 * layers * constants.PAGE_NBYTES
    saved = ahead() - ahead("lora.base=nf4")
    assert saved == pytest.approx(layers * blocks * (32 - 4.13) / 8, abs=rounded)


def test_page_locked_buffers_of_an_update_are_rounded_one_by_one():
    """As torch does it: four for chunks of parameters, two for records, and scratch memory."""
    model = ModelConfig(layers=16, hidden=768, heads=12, kv_heads=6, vocab=50257, bias=False)
    offload = "params=hbm:64MiB+nvme,optimizer=cpu:1GiB+nvme,activations=cpu:256MiB+nvme"
    setup = Setup(
        stage=3, ranks=1, ranks_per_node=1, batch=1, seq=1024, device="cuda", offload=read_placement(offload),
        update="cpu", optimizer="adam", clip=1.0, recompute=16,
    )  # fmt: skip
    plan = plan_model(shape_of(model, 1024), setup)
    (row,) = [row for row in plan.rows if "page-locked" in row.formula]
    assert row.nbytes == (4 * 16 + 2 * 128 << 20) + 3 * (256 << 10)


def test_what_the_cpu_allocates_for_an_update_is_host_memory_beside_a_gpu():
    setup: dict[str, Any] = {"stage": 3, "offload": "optimizer=cpu", "precision": "bf16", "optimizer": "adamax"}
    beside = {update: planned(1, device="cuda", update=update, **setup) for update in ("cpu", "stream")}
    rows = {update: [row for row in plan.rows if "on the CPU" in row.formula] for update, plan in beside.items()}
    assert not rows["stream"] and [row.tier for row in rows["cpu"]] == ["dram"]
    longest = max(flat.own.numel for flat in plan_flats(shape_of(MODEL, SEQ), beside["cpu"].setup))
    assert 0 < rows["cpu"][0].nbytes <= 4 * 4 * longest  # four arrays of fp32


def test_checkpoints_of_blocks_on_disks_have_staging_of_their_own():
    common: dict[str, Any] = {"stage": 3, "recompute": True}
    without = planned(2, **common, offload="params=nvme")
    plan = planned(2, **common, offload="params=nvme,activations=nvme")
    each = 2 * SEQ * MODEL.hidden * 4  # two are written and one is read at a time
    assert plan.needed("dram") - without.needed("dram") == 2 * (3 * each + DISK_THREADS)
    assert plan.needed("nvme") - without.needed("nvme") == 2 * (64 << 20)  # swap files grow by so much


# -- the run folder ----------------------------------------------------------------------------------------------------


def nbytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _save(folder: str, stage: int, tp: int) -> tuple[int, int, int]:
    """Save three times, two of which are kept; return bytes of one, the most there ever were, the buffer's."""
    engine = trained(1, stage=stage, tp=tp)
    most = 0

    def look(moment: str) -> None:
        nonlocal most
        if moment == "checkpoint commit":
            most = max(most, nbytes_in(Path(folder)))

    engine.events.add(Probe(look))
    saver = Saver(engine, folder, asynchronous=False, keep=2)
    saver.save(1)
    one = nbytes_in(Path(folder))
    for step in (2, 3):
        saver.save(step)
    used = saver.nbytes
    saver.close()
    engine.close()
    return one, most, used


def test_saved_checkpoints_are_as_large_as_planned(tmp_path):
    cases = [(str(tmp_path / f"{stage}"), stage, tp) for stage, tp in ((0, 1), (3, 1), (2, 2))]
    for (_, stage, tp), results in zip(cases, run_cases(2, _save, cases), strict=True):
        one, most, _ = results[0]  # which commits
        plan = planned(2, stage=stage, tp=tp, checkpoints=3)
        assert plan.saved is not None and plan.saved in plan.rows and plan.saved.tier == "nvme"
        assert 3 * 12 * plan.numel < most == pytest.approx(3 * one, rel=1e-3), stage
        assert most <= plan.saved.nbytes <= most * 1.02, stage
        [row] = [row for row in plan.rows if row.tier == "dram" and "checkpoint" in row.formula]
        assert max(used for *_, used in results) <= row.nbytes // 2 <= 2 * 32 << 20, stage


def test_a_saves_buffer_is_within_its_key():
    setup = Setup(stage=3, ranks=8, checkpoints=3, checkpoint_buffer=1 << 30)
    from zerocli.plan.blocks.families import read_shape
    from zerocli.plan.memory.flats import plan_flats

    flats = plan_flats(read_shape({"model_type": "llama"}, {}, "llama"), setup)
    assert buffer(setup, flats) == 1 << 30 and constants.SAVE_SLOT_NBYTES == 32 << 20


def ask(capsys: Any, *words: str) -> dict[str, Any]:
    cli.run(["fit", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_run_folder_counts_as_nvme_on_one_node_and_on_no_tier_on_several(capsys, no_gpu):
    words = ("llama3-8b", "--stage", "3", "--offload", "optimizer=nvme", "--ranks-per-node", "8")
    every = ("--set", "checkpoint.every=100")
    each = 12 * 8_030_261_248
    for ranks, sets, count, on_nvme in (
        (8, (), 0, False),
        (8, every, 3, True),
        (8, (*every, "--set", "checkpoint.keep=5"), 6, True),
        (8, (*every, "--set", "checkpoint.keep_every=500", "--set", "train.steps=2000"), 7, True),
        (32, every, 3, False),
    ):
        answer = ask(capsys, *words, "--ranks", str(ranks), *sets)
        [candidate] = answer["candidates"]
        swap = 10 * 8_030_261_248 * min(8, ranks) // ranks
        needed = candidate["tiers"]["nvme"]["needed"]
        assert needed == pytest.approx(swap + count * each * on_nvme, rel=2e-3)
        assert needed == sum(row["bytes"] for row in candidate["rows"] if row["tier"] == "nvme")
        saved = candidate["checkpoints"]
        assert saved is None if not count else saved["bytes"] == pytest.approx(count * each, rel=1e-3)
        assert any("saved checkpoints" in note for note in answer["notes"]) is bool(count)
    # The swap alone would fit in this space; what the command says leaves the checkpoints out does.
    tight = (*words, "--ranks", "8", "--nvme-space", "120GiB")
    assert (
        not ask(capsys, *tight, *every)["fits"] and ask(capsys, *tight, *every, "--set", "checkpoint.every=0")["fits"]
    )


@pytest.mark.longer
def test_a_node_without_disks_is_planned(capsys, no_gpu):
    """Nothing fits on its nvme tier; its run folder is elsewhere, so checkpoints count on no tier."""
    for space in ("0", "0B")[0 if LONG else 1 :]:
        words = ("gpt2-124m", "--ranks", "2", "--nvme-space", space, "--set", "checkpoint.every=10")
        answer = ask(capsys, *words)
        for each in answer["candidates"]:
            assert each["fits"] is ("nvme" not in each["offload"]), each["offload"]
            assert each["checkpoints"]["tier"] == "shared"
        assert answer["fits"] and ask(capsys, *words, "--auto")["fits"]
    for flag in ("--gpu-memory", "--host-memory"):
        assert cli.run(["fit", "gpt2-124m", flag, "0B"]) == 2
        assert f"{flag} 0B is not above 0" in capsys.readouterr().err


@pytest.mark.long
def test_the_largest_count_is_of_model_states_alone(capsys, no_gpu):
    words = ("--max", "--ranks", "8", "--stage", "3", "--offload", "nvme", "--nvme-space", "100GiB")
    without = ask(capsys, *words)["max"]
    saving = ask(capsys, *words, "--set", "checkpoint.every=10")["max"]
    assert saving["model_states_parameters"] == without["model_states_parameters"]
    assert saving["parameters"] < without["parameters"]


# -- what a GPU pins ---------------------------------------------------------------------------------------------------


def test_pinned_memory_counts_whole_and_other_memory_by_its_pages():
    common: dict[str, Any] = {"stage": 3, "offload": "params=nvme,optimizer=cpu,grads=cpu", "update": "stream"}
    cpu, gpu = planned(1, **common), planned(1, **common, device="cuda", precision="fp32")

    def rows(plan: Plan, words: str) -> int:
        return sum(row.nbytes for row in plan.rows if row.tier == "dram" and words in row.formula)

    states = sum(row.nbytes for row in cpu.rows if row.tier == "dram" and row.category not in ("buffers", "runtime"))
    assert rows(cpu, "beyond their pieces") < 4096 * 15
    assert (states + rows(gpu, "beyond their pieces")) % (16 << 20) == 0  # whole arenas
    assert rows(gpu, "staging") % (8 << 20) == 32 * 4096 > 0 and rows(cpu, "staging") < rows(gpu, "staging")
