"""Checkpoints: saved at any stage, placement and world size, loaded at any other, bit for bit, beside training."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import nothing_left_open
from lengths import LONG
from ranks import run_ranks
from saved_engines import Stateful, engine_of, everything, save_at, train
from torch import nn
from toys import split, uneven_batch

import zerocli
from tiers.limits import HostLimits
from zerocli.checkpoint import Folder, Mismatch, Saver, load, manifest, resume, sources, state
from zerocli.checkpoint import saver as savers
from zerocli.checkpoint import snapshot as snapshots
from zerocli.checkpoint.boxes import Block, Box, Extent, boxes, boxes_of, overlapping, tile, whole
from zerocli.checkpoint.manifest import Piece
from zerocli.checkpoint.sources import Memory, Part
from zerocli.checkpoint.writer import tensors_of
from zerocli.engine.events import Probe
from zerocli.layout import constants
from zerocli.layout.shards import Span

# -- arithmetic ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
@settings(max_examples=200 if LONG else 60, deadline=None)
@pytest.mark.longer
def test_boxes_tile_a_run_in_memory_order(shape, data):
    shape = tuple(shape)
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    limit = data.draw(st.integers(1, 20))
    tensor = torch.arange(numel).view(shape)
    seen = []
    at = 0
    for box in boxes(shape, Span(start, stop), limit):
        assert box.numel <= max(1, limit) and box.start == at
        view = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        seen += view.reshape(-1).tolist()
        at += box.numel
    assert seen == list(range(start, stop))


@given(st.lists(st.integers(0, 4), max_size=3), st.data())
@settings(max_examples=300 if LONG else 80, deadline=None, derandomize=True)
@pytest.mark.longer
def test_boxes_tile_exactly_if_every_element_is_covered_once(shape, data):
    shape = tuple(shape)
    spans = [st.integers(0, n).flatmap(lambda a, n=n: st.integers(a, n).map(lambda b, a=a: (a, b - a))) for n in shape]
    drawn = data.draw(st.lists(st.tuples(*spans), max_size=5))
    parts = [(tuple(a for a, _ in each), tuple(b for _, b in each)) for each in drawn]
    if data.draw(st.booleans()):  # such as a run is saved in, and perhaps one more or one less
        cut = data.draw(st.integers(0, math.prod(shape)))
        runs = (Span(0, cut), Span(cut, math.prod(shape)))
        parts = [(box.offsets, box.sizes) for run in runs for box in boxes(shape, run, 3)] + parts[:1]
        parts = parts[data.draw(st.integers(0, 1)) :]
    covered = torch.zeros(shape, dtype=torch.int32)
    for offsets, sizes in parts:
        covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert tile(shape, [offsets for offsets, _ in parts], [sizes for _, sizes in parts]) == bool((covered == 1).all())


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
@settings(max_examples=300 if LONG else 40, deadline=None, derandomize=True)
def test_the_pieces_of_a_box_are_those_that_have_elements_in_common_with_it(shape, data):
    numel = math.prod(shape)
    mine, theirs = (
        [box for run in (Span(0, at), Span(at, numel)) for box in boxes(tuple(shape), run, 3)]
        for at in (data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel)))
    )
    found = overlapping(mine, [box.offsets for box in theirs], [box.sizes for box in theirs])

    def elements(box):
        index = torch.arange(numel).view(shape)
        return set(
            index[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].flatten().tolist()
        )

    for box, indices in zip(mine, found, strict=True):
        assert indices == [at for at, other in enumerate(theirs) if elements(box) & elements(other)]


def test_what_two_ranks_write_of_a_tensor_is_listed_with_the_file_of_each():
    about = {"w": ["float32", (4, 2)]}
    both = [[about, {"w": [[[first, 0], [2, 2], 64 * first, "hash"]]}] for first in (0, 2)]
    (name, tensor), *others = tensors_of(both).items()
    assert (name, tensor.dtype, tensor.shape, others) == ("w", torch.float32, (4, 2), [])
    assert tensor.pieces == [
        Piece((0, 0), (2, 2), "rank-00000.bin", 0, "hash"),
        Piece((2, 0), (2, 2), "rank-00001.bin", 128, "hash"),
    ]


def test_a_block_of_a_split_parameter_is_described_in_global_coordinates():
    """What tensor parallelism will need: rank 1 of 2 holds columns 3..6 of (4, 6), or rows of three fused matrices."""
    full = torch.arange(24).view(4, 6)
    columns = Extent((4, 6), (Block(Span(0, 4), (0, 3)),))
    rows = Extent((4, 6), (Block(Span(0, 1), (1, 0)), Block(Span(1, 2), (3, 0))))
    for extent, local in ((columns, full[:, 3:]), (rows, full[[1, 3]])):
        for run in (Span(0, local.numel()), Span(2, local.numel() - 1)):
            got = {}
            for box in boxes_of(extent, tuple(local.shape), run):
                cut = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                got[box.start] = full[cut].reshape(-1).tolist()
            assert [v for k in sorted(got) for v in got[k]] == local.reshape(-1)[run.start : run.stop].tolist()
    assert whole(()).blocks == (Block(Span(0, 1), ()),)


# -- saved anywhere, loaded anywhere -------------------------------------------------------------------------------


def load_at(folder: str, settings: dict, steps: int):
    model, engine = engine_of(settings, seed=99)
    resumed = resume(engine, folder)
    assert resumed.step == steps
    loaded = everything(engine)
    after = train(engine, model, range(steps + 1, steps + 3))
    final = everything(engine), model.seen.tolist()
    engine.close()
    return loaded, after, final


STATES = [(stage, offload) for stage in (0, 1, 2, 3) for offload in ("", "cpu", "nvme") if stage or not offload]
# What a precision adds (a master beside the parameters, a loss scale) does not depend on the disk that holds it: every
# precision meets some stages and placements, and all of them in the long set.
PRECISIONS = {
    "fp32": [(0, "")],
    "bf16": [(2, "nvme")],
    "fp16": [(3, "cpu")],
}
if LONG:
    PRECISIONS = dict.fromkeys(PRECISIONS, STATES)
CASES = [(*state, precision) for precision, states in PRECISIONS.items() for state in states]


def each_case(act, folder: str) -> list:
    """Do `act` for every case, in one set of ranks: starting them costs more than the cases do."""
    results = []
    for stage, offload, precision in CASES:
        settings = {"stage": stage, "offload": offload, "precision": precision, "nvme_path": (folder,)}
        saves = {"asynchronous": stage % 2 == 0} if act is save_at else {}
        results.append(act(f"{folder}/{stage}{offload}{precision}", settings, 2, **saves))
    return results


@pytest.mark.longer
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    saved = run_ranks(2, each_case, save_at, str(tmp_path))
    resumed = run_ranks(2, each_case, load_at, str(tmp_path))
    for rank in range(2):
        for case, before, after in zip(CASES, saved[rank], resumed[rank], strict=True):
            # Parameters, states and counters when saved; the losses that follow; and where they lead.
            assert before == after, case


def test_a_split_master_is_joined_once_however_many_wait_for_it(monkeypatch):
    """The writer waits for a read, and so does an update: to join twice at a time would spoil what is written."""
    joined = []
    monkeypatch.setattr(sources, "join", lambda *parts, out: joined.append(out))

    class Elsewhere(sources.Source):
        dtype = torch.int16

        def read(self, start, target):
            return lambda: None

        def write(self, start, values):
            raise AssertionError

    target = torch.empty(4)
    wait = sources.SplitMaster(sources.Memory(torch.zeros(4, dtype=torch.bfloat16)), Elsewhere()).read(0, target)
    assert not joined
    wait()
    wait()
    assert len(joined) == 1 and joined[0] is target


class Backwards(nn.Module):
    """Units that are used in another order than they are declared in; sums of three ranks depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(5))

    def forward(self, x):
        for block in reversed(self.blocks):
            x = torch.tanh(block(x))
        return x.square().mean()


def backwards(folder: str, first: int) -> list[list[float]]:
    found = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(first)
        engine = zerocli.shard(Backwards(), lr=1e-2, stage=stage, bucket_nbytes=1 << 20)
        saver = Saver(engine, f"{folder}/{stage}", asynchronous=False)
        assert resume(engine, f"{folder}/{stage}").step == first - 1
        losses = []
        for step in range(first, 8):
            generator = torch.Generator().manual_seed(10 * step + engine.collectives.rank)
            loss = engine(torch.randn(5, 33, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 3 and first == 1:
                saver.save(step)
        saver.close()
        engine.close()
        found.append(losses[-4:])
    return found


@pytest.mark.long
def test_resumed_equals_uninterrupted_on_three_ranks_whatever_the_order_of_units(tmp_path):
    saved = run_ranks(3, backwards, str(tmp_path), 1)
    assert run_ranks(3, backwards, str(tmp_path), 4) == saved


@pytest.mark.longer
def test_a_checkpoint_loads_bitwise_at_every_stage_placement_and_world(tmp_path):
    """Chain 1 -> 2 -> 4 -> 3 ranks, each at another stage and placement, loading what the one before saved."""
    nvme = {"nvme_path": (str(tmp_path),)}
    chain = [
        (1, {"stage": 2}),
        (2, {"stage": 3, "offload": "cpu"}),
        (4, {"stage": 0}),
        (3, {"stage": 3, "offload": "nvme", **nvme}),
        (2, {"stage": 1, "offload": "optimizer=cpu", "update": "stream"}),
        (1, {"stage": 3, "offload": "nvme", **nvme}),
    ][: None if LONG else 4]
    world, settings = chain[0]
    run_ranks(world, save_at, str(tmp_path / "0"), settings, 3)
    first = None
    for number, (world, settings) in enumerate(chain[1:], 1):
        results = run_ranks(world, pass_on, str(tmp_path / str(number - 1)), str(tmp_path / str(number)), settings)
        first = first or results[0]
        assert all(result == first for result in results), (world, settings)


def pass_on(source: str, target: str, settings: dict):
    _, engine = engine_of(settings, seed=11)
    load(engine, Folder(source).of(3))
    saver = Saver(engine, target)
    saver.save(3)
    saver.close()
    assert saver.failure is None, saver.failure
    found = everything(engine)
    engine.close()
    return found


def continued(source: str, settings: dict, precision: str):
    model, engine = engine_of(settings | {"precision": precision}, seed=11)
    load(engine, Folder(source).of(3))
    rank, world = engine.collectives.rank, engine.collectives.world
    losses = []
    for step in range(4, 8):
        torch.manual_seed(step)  # one draw of noise for all worlds
        loss = model(*uneven_batch(step, split(rank, world)))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        if world > 1:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


@pytest.mark.long
def test_losses_agree_to_rounding_when_the_world_changes(tmp_path):
    run_ranks(1, save_at, str(tmp_path), {"stage": 1}, 3)
    reference = run_ranks(1, continued, str(tmp_path), {"stage": 0}, "fp32")[0]
    for world, stage in ((2, 3), (3, 1)):  # and to four: test_resume.py
        losses = run_ranks(world, continued, str(tmp_path), {"stage": stage}, "fp32")[0]
        assert losses == pytest.approx(reference, rel=1e-5), world


def save_and_load(folder: str, settings: dict):
    return save_at(folder, settings, 3, asynchronous=True), load_at(folder, settings, 3)


def pass_on_and_continue(source: str, target: str, settings: dict):
    return pass_on(source, target, settings), continued(source, settings, "fp32")


@pytest.mark.longer
def test_groups_of_ranks_write_one_copy_that_any_layout_resumes(tmp_path):
    first, second, third = (str(tmp_path / name) for name in "abc")
    groups = {"stage": 3, "shard_ranks": 2, "offload": "cpu"}
    both = run_ranks(4, save_and_load, first, groups)
    assert all(saved == loaded for saved, loaded in both)
    plain = run_ranks(2, pass_on_and_continue, first, second, {"stage": 1})
    layout = {"stage": 3, "shard_ranks": 2, "shard_states": "all"}
    again = run_ranks(4, pass_on_and_continue, second, third, layout) if LONG else plain
    assert all(state == both[0][0][0] for state, _ in (*plain, *again))
    assert again[0][1] == pytest.approx(plain[0][1], rel=1e-5)
    tensors = manifest.read(Folder(first).of(3)).tensors
    states = [tensor for name, tensor in tensors.items() if name.startswith(("parameters/", "optimizer/"))]
    assert len({piece.file for tensor in states for piece in tensor.pieces}) == 2


OPTIMIZERS = [("sgd", {"momentum": 0.9}), ("nadam", {})]  # a state, and states with a scalar beside them


def each_optimizer(act, folder: str) -> list:
    return [act(f"{folder}/{name}", {"stage": 3, "optimizer": name, **options}, 3) for name, options in OPTIMIZERS]


@pytest.mark.long
def test_other_optimizers_resume_too(tmp_path):
    saved = run_ranks(2, each_optimizer, save_at, str(tmp_path))
    assert run_ranks(2, each_optimizer, load_at, str(tmp_path)) == saved


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    model, engine = engine_of({"stage": 2})
    saver = Saver(engine, tmp_path)
    saver.save(1)
    saver.close()
    other = zerocli.shard(nn.Sequential(nn.Linear(15, 7), nn.Linear(7, 3)))
    with pytest.raises(Mismatch, match="no parameters/0.bias.*only the checkpoint has parameters/blocks"):
        load(other, Folder(tmp_path).of(1))
    _, sgd = engine_of({"stage": 2, "optimizer": "sgd", "momentum": 0.9})
    with pytest.raises(Mismatch, match="momentum_buffer"):
        load(sgd, Folder(tmp_path).of(1))


# -- saving beside training ----------------------------------------------------------------------------------------


def trained_with_saves(folder: str, settings: dict, every: bool):
    model, engine = engine_of(settings)
    saver = Saver(engine, folder, keep=3) if every else None
    losses, states = [], {}
    for step in range(1, 5):
        losses += train(engine, model, range(step, step + 1))
        if saver is not None:
            states[step] = everything(engine)
            saver.save(step)
    if saver is not None:
        saver.close()
        assert saver.failure is None, saver.failure
    engine.close()
    return losses, states


BESIDE = [
    {"stage": 0, "precision": "bf16"},
    {"stage": 2},
    {"stage": 3, "offload": "cpu", "update": "cpu", "precision": "bf16"},
    {"stage": 3, "offload": "cpu", "update": "stream"},
    {"stage": 3, "offload": "nvme"},
][:: 1 if LONG else 3]


def each_beside(folder: str):
    results = []
    for number, case in enumerate(BESIDE):
        case = case | {"nvme_path": (folder,)}
        plain = trained_with_saves(f"{folder}/{number}", case, False)[0]
        results.append((plain, *trained_with_saves(f"{folder}/{number}", case, True)))
    return results


@pytest.mark.longer
def test_asynchronous_saves_every_step_change_nothing_and_hold_their_own_step(tmp_path):
    for rank, results in enumerate(run_ranks(2, each_beside, str(tmp_path))):
        for number, (plain, losses, states) in enumerate(results):
            assert losses == plain, BESIDE[number]
            folder = tmp_path / str(number)
            assert [found.step for found in Folder(folder).newest_first()] == [4, 3, 2]
            for step in (4, 3, 2) if rank == 0 else ():
                assert _loaded(str(folder), step) == states[step], (BESIDE[number], step)


def _loaded(folder: str, step: int):
    _, engine = engine_of({"stage": 2}, seed=5)
    load(engine, Folder(folder).of(step))
    found = everything(engine)
    engine.close()
    return found


def test_an_update_waits_until_its_states_have_been_read(tmp_path):
    """The writer reads nothing until the next step's update asks for its turn, and has had time to go on without it."""
    model, engine = engine_of({"stage": 2})
    train(engine, model, range(1, 3))
    expected = everything(engine)
    asked, updated = threading.Event(), threading.Event()
    engine.events.add(Probe(lambda name: name == "checkpoint read" and asked.wait(5) and updated.wait(0.3)))
    saver = Saver(engine, tmp_path)
    saver.save(2)
    hold = engine.updater.chunks.before_update

    def watch(flat):
        if asked.is_set():  # the first unit is updated: it need not wait, or did not
            updated.set()
        asked.set()
        hold(flat)

    engine.updater.chunks.before_update = watch
    train(engine, model, range(3, 6))
    assert asked.is_set()
    saver.close()
    assert _loaded(str(tmp_path), 2) == expected != everything(engine)


def test_a_save_through_many_slots_holds_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "save_slot", lambda nbytes: 32 << 10)  # as long as the longest box
    model, engine = engine_of({"stage": 2})
    train(engine, model, range(1, 3))
    saver = Saver(engine, tmp_path)
    saver.save(2)
    saver.close()
    pieces = json.loads((Folder(tmp_path).of(2) / "manifest.json").read_text())["manifest"]["files"]
    assert pieces[0][1] > 2 * (32 << 10), pieces  # of more than two slots
    assert _loaded(str(tmp_path), 2) == everything(engine)


@pytest.mark.long
def test_the_buffer_bounds_memory_and_a_hundred_saves_leak_nothing(tmp_path):
    model, engine = engine_of({"stage": 3})
    saver = Saver(engine, tmp_path, keep=1)

    def save(steps: range) -> set[int]:
        """Return the sizes that the buffer had after each save."""
        sizes = set()
        for step in steps:
            if step % 10 == 1:
                train(engine, model, range(step, step + 1))
            saver.save(step)
            saver.wait()
            sizes.add(saver.nbytes)
        return sizes

    save(range(1, 3))
    with nothing_left_open():
        sizes = save(range(3, 101))
    assert sizes == {saver.nbytes} and saver.nbytes <= 2 * (32 << 20)
    assert os.listdir(tmp_path) == ["step-00000100"]
    saver.close()
    assert saver.nbytes == 0


def test_saves_that_fail_give_their_buffer_back(tmp_path):
    """A disk that cannot be read from, again and again: the next save that can be made is made."""
    _, engine = engine_of({"stage": 2})
    broken = True

    def probe(name: str) -> None:
        if broken and name == "checkpoint read":
            raise OSError(5, "Input/output error")

    engine.events.add(Probe(probe))
    saver = Saver(engine, tmp_path, buffer_nbytes=1)
    for step in range(1, 6):
        broken = step < 5
        saver.save(step)
        assert saver._thread is not None
        saver._thread.join(60)
        assert not saver._thread.is_alive() and bool(saver.failure) == broken
    saver.close()
    assert [found.step for found in Folder(tmp_path).committed()] == [5] and os.listdir(tmp_path) == ["step-00000005"]


# -- keeping -------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_those_at_multiples(tmp_path):
    _, engine = engine_of({"stage": 2})
    saver = Saver(engine, tmp_path, keep=2, keep_every=4, asynchronous=False)
    for step in range(1, 11):
        saver.save(step)
    saver.close()
    assert [found.step for found in Folder(tmp_path).newest_first()] == [10, 9, 8, 4]


def test_a_removal_that_is_cut_short_anywhere_leaves_nothing_after_the_next_start(tmp_path, monkeypatch):
    _, engine = engine_of({"stage": 2})
    saver = Saver(engine, tmp_path / "saved", keep=9, asynchronous=False)
    for step in (1, 2):
        saver.save(step)
    saver.close()
    num_cuts = 0
    for cut in range(1, 20):
        shutil.copytree(tmp_path / "saved", tmp_path / "copy")
        count = 0

        def counted(act, cut=cut):
            def dies(*args, **kwargs):
                nonlocal count
                count += 1
                if count == cut:
                    raise KeyboardInterrupt
                return act(*args, **kwargs)

            return dies

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "unlink", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                Folder(tmp_path / "copy").prune(2, 1, 0)
            except KeyboardInterrupt:
                num_cuts += 1
        Folder(tmp_path / "copy").sweep()
        assert [found.step for found in Folder(tmp_path / "copy").committed()] in ([2], [2, 1])
        assert sorted(os.listdir(tmp_path / "copy")) == [
            found.path.name for found in reversed(Folder(tmp_path / "copy").committed())
        ]
        shutil.rmtree(tmp_path / "copy")
    assert num_cuts >= 4


@pytest.mark.parametrize("stage", ["manifest", "rename", "commit"])
def test_a_commit_that_fails_gives_its_space_back(tmp_path, stage):
    _, engine = engine_of({"stage": 2})

    def probe(name: str) -> None:
        if broken and name == f"checkpoint {stage}":
            raise OSError(30, "Read-only file system")

    engine.events.add(Probe(probe))
    saver = Saver(engine, tmp_path, asynchronous=False)
    for step, broken in ((1, False), (2, True), (1, True)):
        saver.save(step)
        assert bool(saver.failure) == broken
        assert os.listdir(tmp_path) == ["step-00000001"] and resume(engine, tmp_path).step == 1
    saver.close()


def test_damaged_checkpoints_of_later_steps_never_take_the_place_of_whole_ones(tmp_path):
    """A resume that passed over steps 7 and 9 saves step 5: with one to keep, that is step 5."""
    _, engine = engine_of({"stage": 2})
    saver = Saver(engine, tmp_path, keep=1, asynchronous=False)
    for step in (4, 7):
        saver.save(step)
        Folder(tmp_path).of(step).rename(tmp_path / f"{step}")
    saver.save(9)
    for step in (4, 7):
        (tmp_path / f"{step}").rename(Folder(tmp_path).of(step))
    for step in (7, 9):
        (Folder(tmp_path).of(step) / "rank-00000.bin").write_bytes(b"")
    assert resume(engine, tmp_path).step == 4
    saver.save(5)
    saver.close()
    assert resume(engine, tmp_path).step == 5
    assert [found.step for found in Folder(tmp_path).committed()] == [9, 7, 5]


def test_nothing_is_resumed_from_an_empty_folder(tmp_path):
    _, engine = engine_of({"stage": 2})
    assert resume(engine, tmp_path / "nowhere").step == 0


def test_a_process_without_others_saves_and_loads_without_a_warning(tmp_path, recwarn):
    _, engine = engine_of({"stage": 2})
    filters = list(warnings.filters)
    saver = Saver(engine, tmp_path, asynchronous=False)
    saver.save(1)
    saver.close()
    assert resume(engine, tmp_path).step == 1
    assert [str(each.message) for each in recwarn if "torch.distributed" in str(each.message)] == []
    assert list(warnings.filters) == filters


@pytest.mark.long
def test_importing_the_loader_leaves_the_filters_of_warnings_alone():
    code = "import warnings, zerocli.checkpoint.loader; print([each[1] for each in warnings.filters])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "torch.distributed is disabled" not in shown


def test_a_manifest_is_json_that_names_every_tensor(tmp_path):
    _, engine = engine_of({"stage": 2})
    saver = Saver(engine, tmp_path)
    saver.save(1, {"note": "mine"})
    saver.close()
    document = json.loads((Folder(tmp_path).of(1) / "manifest.json").read_text())
    names = {name.removeprefix("parameters/") for name in document["manifest"]["tensors"] if name.startswith("para")}
    assert names == {name for name, _ in Stateful().named_parameters()}
    assert document["manifest"]["values"]["note"] == "mine"
    assert Path(tmp_path / "step-00000001").is_dir()


class FarAway(Memory):
    """Memory whose copies are under way until somebody waits for them."""

    def __init__(self, tensor, under_way):
        super().__init__(tensor)
        self.on_gpu, self.under_way = True, under_way

    def read(self, start, target):
        super().read(start, target)
        copy = object()
        self.under_way.append(copy)
        self.under_way.most = max(self.under_way.most, len(self.under_way))
        return lambda: self.under_way.remove(copy) if copy in self.under_way else None


class Counted(list):
    most = 0


def test_copies_off_a_gpu_are_long_and_few_are_under_way_at_once(monkeypatch):
    """A full queue of the driver's would hold up training's own launches."""
    monkeypatch.setattr(constants, "SAVE_SLOT_NBYTES", 4096)
    monkeypatch.setattr(constants, "MAX_SAVE_SLOT_NBYTES", 4096)
    under_way = Counted()
    values = torch.arange(40 * 1024, dtype=torch.float32)
    source = FarAway(values, under_way)
    parts = [
        Part(f"p{i}", (256,), source, [Box((0,), (128,), 256 * i), Box((128,), (128,), 256 * i + 128)])
        for i in range(160)
    ]
    slots = snapshots.Slots(1 << 20, torch.device("cpu"))
    snapshot = snapshots.Snapshot(parts, torch.device("cpu"), slots)
    assert len(snapshot.batches) == 40
    snapshot.start()
    assert 0 < under_way.most <= snapshots.NUM_UNDER_WAY + 1  # a copy a slot, though each holds eight boxes
    found = torch.cat([snapshot.fill(batch).bytes.view(torch.float32) for batch in snapshot.batches])
    assert torch.equal(found, values)
    snapshot.stop_holding()
    slots.close()


def test_a_snapshot_holds_every_flat_until_it_is_read():
    """Frozen ones too: a move between tiers would free what the writer has still to read."""
    _, engine = engine_of({"stage": 3, "offload": "cpu"})
    parts, _ = state.capture(engine)
    slots = snapshots.Slots(1 << 20, torch.device("cpu"))
    snapshot = snapshots.Snapshot(parts, torch.device("cpu"), slots)
    held = {owner for batch in snapshot.batches for owner in batch.owners()}
    assert held == {id(flat) for flat in engine.flats()} and any(not flat.trainable for flat in engine.flats())
    slots.close()


def test_a_wait_for_want_of_buffer_is_told_once_with_the_buffer_that_spares_it(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "SAVE_SLOT_NBYTES", 64 << 10)
    monkeypatch.setattr(savers, "MIN_ADVISED_SECONDS", 0.0)
    model, said = nn.Linear(300, 400), []
    engine = zerocli.shard(model, stage=3, lr=0.1)
    saver = Saver(engine, tmp_path, buffer_nbytes=1, say=said.append, keep=9)
    for step in (1, 2):
        saver.save(step)
        engine.backward(engine(torch.ones(2, 300)).sum())
        engine.step()
    saver.close()
    assert [("checkpoint.buffer=1GiB" in text) for text in said] == [True, False]
    said.clear()
    saver = Saver(engine, tmp_path, buffer_nbytes=1 << 30, say=said.append, keep=9)
    saver.save(3)
    saver.close()
    assert len(said) == 1 and "checkpoint.buffer" not in said[0]
    engine.close()


def test_a_buffer_beyond_what_the_host_can_spare_is_cut_and_said(tmp_path, monkeypatch):
    room = HostLimits(available=1 << 20, cgroup_limit=None, memlock=None)
    monkeypatch.setattr(savers, "read_limits", lambda: room)
    engine, said = zerocli.shard(nn.Linear(300, 400), stage=3), []
    Saver(engine, tmp_path, buffer_nbytes=1 << 40, say=said.append).close()  # 1.4 MB are written
    assert len(said) == 1 and "1024 GiB" in said[0] and "512.0 KiB" in said[0]
    monkeypatch.setattr(savers, "read_limits", lambda: HostLimits(1 << 30, None, None))
    Saver(engine, tmp_path, buffer_nbytes=1 << 40, say=said.append).close()  # never more is made than is written
    assert len(said) == 1
    engine.close()
