"""The compiled update on the CPU gives the bits of torch's operations, and a run does without it where it must."""

from __future__ import annotations

import functools
import gc
import math
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerocli
from zerocli import machine
from zerocli.engine import engine as engine_module
from zerocli.engine.optimizer import compiled_update, update_place
from zerocli.engine.optimizer.chunk import ChunkUpdate
from zerocli.engine.optimizer.compiled_update import CompiledAdam, Unavailable, open_compiled, table_of
from zerocli.engine.optimizer.optim import FusedAdam, FusedSGD, Group, StepValues
from zerocli.engine.optimizer.piece import PieceUpdate
from zerocli.engine.optimizer.update import LEAD
from zerocli.engine.optimizer.update_place import UpdatePlace
from zerocli.engine.units.master import REMAINDER, narrow, split
from zerocli.engine.units.unit import MASTER
from zerocli.layout import buffers
from zerocli.layout.constants import NUM_SLOTS
from zerocli.layout.flats import Sizing
from zerocli.layout.stage import STAGES
from zerocli.plan.measure import LiveBytes

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler on this machine"
)
CPU = torch.device("cpu")
SIZES = [1, 15, 16, 17, 127, 128, 129, 1000, 3 * 128 + 16, 65 * 128 + 5]
STORED = {"split": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
HARD = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1.17549435e-38,
    3.4e38,
    -3.4e38,
    65504.0,
    1e-7,
    1.00390625,
    float("inf"),
    float("nan"),
]


def values(numel: int, generator: torch.Generator, hard: list[float]) -> torch.Tensor:
    """Return values of all sizes, some of them `hard`."""
    size = torch.empty(numel).uniform_(-40, 10, generator=generator).exp_()
    made = torch.randn(numel, generator=generator).mul_(size)
    chosen = torch.tensor(hard)[torch.randint(len(hard), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.1, chosen, made)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bits are the same; which NaN is not said."""
    whole = one.view({4: torch.int32, 2: torch.int16}[one.itemsize])
    equal = whole == other.view(whole.dtype)
    return bool((equal | (one.isnan() & other.isnan()) if one.is_floating_point() else equal).all())


@needs_compiler
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    numel=st.sampled_from(SIZES),
    stored=st.sampled_from(sorted(STORED)),
    grad_type=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    decoupled=st.booleans(),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    lr=st.sampled_from([0.0, 1e-8, 3e-4, 1.0, 1e6]),
    decay=st.sampled_from([0.0, 0.1, 3.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.5, 0.9), (0.3, 0.0)]),
    eps=st.sampled_from([1e-8, 0.0, 1e-3]),
    count=st.sampled_from([1.0, 7.0, 100_000.0]),
    scale=st.sampled_from([1.0, 3.0, 65536.0]),
    finite=st.booleans(),
    skip=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    threads=st.sampled_from([1, 2]),
)
def test_compiled_updates_have_the_bits_of_torchs(
    *, seed, numel, stored, grad_type, decoupled, amsgrad, maximize, lr, decay, betas, eps, count, scale, finite, skip,
    threads,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    rule = FusedAdam(decoupled, betas, eps, amsgrad, maximize)
    group = Group(lr, decay, rule.defaults)
    step = StepValues((group,), torch.tensor([count]), torch.tensor(scale), torch.tensor(skip))
    master = values(numel, generator, HARD[:-2])
    grad = values(numel, generator, HARD[:-2] if finite else HARD).to(grad_type)
    arrays = {name: values(numel, generator, HARD[:-2]) for name in rule.state_names}
    for name in rule.state_names[1:]:
        arrays[name] = arrays[name].abs()
    target, remainder = split(master) if stored == "split" else (None, None)
    if stored in ("bf16", "fp16"):
        target = narrow(master, STORED[stored])
    arrays |= {MASTER: master} if remainder is None else {REMAINDER: remainder}

    def updated(compiled):
        own = {name: array.clone() for name, array in arrays.items()}
        out = None if target is None else target.clone()
        sizing = Sizing(STAGES[1], device="cpu", update_on_cpu=True, split_master=stored == "split")
        pieces = PieceUpdate(rule, CPU, sizing, compiled)
        pieces.update(slice(0, numel), own, grad.clone(), out, step, group, step.at(0))
        return own, out

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (theirs, their_parameters), (ours, our_parameters) = updated(None), updated(kernel_of(rule))
    finally:
        torch.set_num_threads(before)
    if target is not None:
        assert same(our_parameters, their_parameters)
        if remainder is not None:  # beside a NaN it says nothing
            known = ~their_parameters.isnan()
            ours[REMAINDER], theirs[REMAINDER] = ours[REMAINDER][known], theirs[REMAINDER][known]
    for name in arrays:
        assert same(ours[name], theirs[name]), name


def kernel_of(rule: FusedAdam) -> CompiledAdam:
    """Return the rule's kernel, as proved once for all rules."""
    return CompiledAdam(rule, compiled_update._library(), proved()._rounding)


@functools.cache
def proved() -> CompiledAdam:
    return open_compiled(FusedAdam(True))


class Toy(torch.nn.Module):
    """Two matrices and a vector of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(37, 51), torch.nn.Linear(51, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))).square().mean()


def trained(compiled: bool, **settings: object) -> tuple[list[float], dict[str, torch.Tensor], object]:
    torch.manual_seed(3)
    engine = zerocli.shard(Toy(), compile_update=compiled, lr=0.01, weight_decay=0.1, clip=0.5, **settings)
    losses = []
    for _ in range(4):
        loss = engine(torch.randn(8, 37))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    states = {
        f"{name} {key}": value
        for name, row in engine.optimizer.state_dict()["state"].items()
        for key, value in row.items()
        if isinstance(value, torch.Tensor)
    }
    states |= {key: value.clone() for key, value in engine.state_dict().items()}
    used = engine.updater.compiled
    engine.close()
    return losses, states, used


@needs_compiler
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16", "offload": "cpu"},
        {"precision": "bf16", "offload": "nvme", "accumulate": 1},
        {"precision": "bf16", "master": "fp32", "offload": "optimizer=cpu"},
        {"precision": "fp32", "optimizer": "adam"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_training_is_the_same_with_and_without(settings, tmp_path):
    settings = settings | ({"nvme_path": str(tmp_path)} if settings.get("offload") == "nvme" else {})
    (losses, states, used), (plain_losses, plain_states, unused) = trained(True, **settings), trained(False, **settings)
    assert used is not None and unused is None
    assert losses == plain_losses and states.keys() == plain_states.keys()
    assert all(torch.equal(states[name], plain_states[name]) for name in states)


class Deep(torch.nn.Module):
    """Layers whose chunks two devices can share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def shared(share: float, monkeypatch, model: torch.nn.Module, **settings: object) -> zerocli.Engine:
    """Return an engine whose updates the thread takes this share of, in bf16."""
    place = UpdatePlace(share=share, kernel=proved())
    monkeypatch.setattr(engine_module, "choose_update", lambda *args: place)
    monkeypatch.setattr(buffers, "fuses", lambda flat, sizing: True)
    monkeypatch.setattr(
        ChunkUpdate,
        "numbers",
        lambda self: (table_of(self._values["cpu"], True), 1 / self._values["cpu"].grad_scale),
    )
    about = {"staging_nbytes": 6 * 20 * 512, "units": torch.nn.Linear, "precision": "bf16", "lr": 0.01}
    return zerocli.shard(model, **about, **settings)


def deep(
    share: float,
    monkeypatch,
    steps: int = 5,
    frozen: Collection[int] = (),
    before: Callable[[zerocli.Engine], None] = lambda engine: None,
    **settings: object,
) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses, parameters and states, and the chunks that the thread updated, if it has this share of them.

    The first layer is frozen in the steps `frozen`; `before` is called before each forward.
    """
    torch.manual_seed(5)
    model = Deep()
    groups = [zerocli.ParamGroup("layers.1.weight", weight_decay=0.0), zerocli.ParamGroup("layers.2", lr_factor=0.3)]
    engine = shared(share, monkeypatch, model, weight_decay=0.1, clip=0.5, groups=groups, **settings)
    losses = []
    for step in range(steps):
        before(engine)
        model.layers[0].requires_grad_(step not in frozen)
        loss = engine(torch.randn(8, 64)) * (math.inf if step == 2 else 1.0)  # one step is skipped
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        chunks = [engine.updater._chunks_of(flat) for flat in engine.trainable()]
        again = [engine.updater._chunks_of(flat) for flat in engine.trainable()]
        assert all(first is second for first, second in zip(chunks, again, strict=True))  # one choice for all of a step
    row = engine.optimizer.state_dict()["state"]
    kept = [value for each in row.values() for value in each.values() if isinstance(value, torch.Tensor)]
    kept += [value.clone() for value in engine.state_dict().values()]
    mine = sum(chunk.on_cpu for flat in engine.trainable() for chunk in engine.updater._chunks_of(flat))
    engine.close()
    return losses, kept, mine


@needs_compiler
@pytest.mark.parametrize(
    "settings", [{}, {"master": "fp32"}, {"accumulate": 1, "defer_update": True, "frozen": (0, 1, 4)}], ids=str
)
@pytest.mark.parametrize(
    "text",
    ["cpu", "optimizer=cpu", "optimizer=cpu,grads=cpu", "optimizer=hbm:30KB+cpu", "optimizer=cpu,grads=hbm:14KB+cpu"],
)
def test_a_threads_part_of_the_update_changes_no_bit(text, settings, monkeypatch):
    plain = deep(0.0, monkeypatch, stage=3, offload=text, **settings)
    for share in (0.3, 0.6, 1.0):
        losses, states, mine = deep(share, monkeypatch, stage=3, offload=text, **settings)
        assert mine > 0 and repr(losses) == repr(plain[0]), share
        assert all(map(torch.equal, states, plain[1])), share


@needs_compiler
@pytest.mark.parametrize("text", ["cpu", "optimizer=cpu"])
def test_a_step_waits_for_no_part_of_an_update_and_the_device_begins_its_own(text, monkeypatch):
    began, seen, run = threading.Event(), [], CompiledAdam.run

    def held_up(self, calls, threads):
        assert began.wait(10), "step() waits for the CPU's part"
        run(self, calls, threads)

    def look(engine):
        updater = engine.updater
        seen.append((updater._at, len(updater._queue), sum(map(updater.has_pending_update, engine.trainable()))))
        if engine.steps:
            began.set()

    proved()
    monkeypatch.setattr(CompiledAdam, "run", held_up)
    deep(0.5, monkeypatch, 2, stage=3, offload=text, defer_update=True, before=look)
    at, chunks, pending = seen[1]
    assert chunks > NUM_SLOTS and pending == 3
    # Parameters that are gathered from host memory: no chunk is updated before their place is known.
    assert at == (LEAD if text == "cpu" else NUM_SLOTS)


@needs_compiler
def test_what_a_step_completes_is_the_same_on_ranks_whose_cpus_take_a_part_and_on_others(monkeypatch):
    """Each completed update may be followed by a collective."""
    for share in (0.0, 0.5):
        engine = shared(share, monkeypatch, Deep(), stage=2, offload="optimizer=cpu", defer_update=True)
        engine.backward(engine(torch.randn(8, 64)))
        engine.step()
        assert all(map(engine.updater.has_pending_update, engine.trainable())), share
        engine.close()


@needs_compiler
@pytest.mark.parametrize("where", ["the thread", "the device"])
@pytest.mark.parametrize("text", ["cpu", "optimizer=cpu"])
def test_a_failed_update_is_raised_refused_from_then_on_and_leaves_nothing(where, text, monkeypatch):
    def fail(*args):
        raise MemoryError("no more")

    engine = shared(0.5, monkeypatch, Deep(), stage=3, offload=text, defer_update=True)
    owner, name = (CompiledAdam, "run") if where == "the thread" else (ChunkUpdate, "update")
    monkeypatch.setattr(owner, name, fail)
    engine.backward(engine(torch.randn(8, 64)))
    with pytest.raises(MemoryError, match="no more"):
        engine.step()
        engine(torch.randn(8, 64))
    for _ in range(2):
        with pytest.raises(zerocli.Refused, match="load the last checkpoint"):
            engine.state_dict()
    engine.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("cpu-update")]


@needs_compiler
def test_an_engine_that_is_dropped_is_freed_with_its_threads(monkeypatch):
    engine = shared(0.5, monkeypatch, Deep(), stage=3, offload="optimizer=cpu")
    engine.backward(engine(torch.randn(8, 64)))
    engine.step()
    engine.synchronize()
    held = weakref.ref(next(engine.trainable()).record)
    del engine
    for _ in range(200):  # the thread may be on its way out of its last job
        gc.collect()
        if held() is None:
            return
        time.sleep(0.05)
    raise AssertionError("something still holds the engine")


@needs_compiler
def test_a_larger_layer_that_is_unfrozen_later_has_room_for_its_copies(monkeypatch):
    def trained(share: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 256), torch.nn.Linear(256, 16))
        model[2].requires_grad_(False)
        model[1].requires_grad_(False)
        engine = shared(share, monkeypatch, model, stage=3, offload="optimizer=cpu")
        for step in range(3):
            model[1].requires_grad_(step > 0)
            engine.backward(engine(torch.randn(8, 16)).square().mean())
            engine.step()
        found = engine.state_dict()
        engine.close()
        return found

    alone, shares = trained(0.0), trained(1.0)
    assert all(torch.equal(alone[name], value) for name, value in shares.items())


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A user's cache without a kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled_update._library.cache_clear()
    yield tmp_path / "cache"
    compiled_update._library.cache_clear()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_or_is_missing_only_changes_the_reason(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    kernel, reason = update_place.choose_compiled(True, FusedAdam(True), 1 << 30)
    assert kernel is None and ("false failed: exit code 1" in reason or "there is no C compiler" in reason)
    losses, _, used = trained(True)
    assert used is None and len(losses) == 4


@needs_compiler
def test_a_kernel_that_rounds_in_another_way_is_not_used(monkeypatch):
    right = proved()._rounding
    others = tuple(each for each in compiled_update.ROUNDINGS if each != right)
    monkeypatch.setattr(compiled_update, "ROUNDINGS", others)
    with pytest.raises(Unavailable, match="does not round as torch"):
        open_compiled(FusedAdam(True))


@needs_compiler
def test_a_kernel_is_compiled_once_and_a_torn_one_again(fresh, monkeypatch, tmp_path):
    open_compiled(FusedAdam(True))
    (kept,) = (fresh / "zerocli" / "kernels").iterdir()
    calls = []
    compiles = compiled_update._compile
    monkeypatch.setattr(compiled_update, "_compile", lambda *args: calls.append(1) or compiles(*args))
    compiled_update._library.cache_clear()
    open_compiled(FusedAdam(True))
    assert not calls
    torn = tmp_path / "other" / kept.relative_to(fresh)  # a process loads a path once
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"torn")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    compiled_update._library.cache_clear()
    open_compiled(FusedAdam(True))
    assert calls and torn.stat().st_size > 1000


@needs_compiler
def test_a_cache_that_cannot_be_written_does_not_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiled_update._library.cache_clear()
    assert open_compiled(FusedAdam(False)) is not None
    compiled_update._library.cache_clear()


@needs_compiler
def test_it_is_chosen_where_it_is_faster(monkeypatch):
    def choose(asked, rule, numel, plain=2.0):
        monkeypatch.setattr(
            update_place, "measure_cpu", lambda split, numel, compiled=None, dtype=None: 1.0 if compiled else plain
        )
        kernel, reason = update_place.choose_compiled(asked, rule, numel, True)
        return kernel is not None, reason

    adam, many = FusedAdam(True), 1 << 30
    assert choose("auto", adam, many) == (True, "2 times as fast as torch's operations, measured")
    assert choose("auto", adam, many, plain=0.9) == (False, "no faster than torch's operations, measured")
    assert choose("auto", adam, 1000) == (False, "fewer than 4M parameters per rank")
    assert choose(True, adam, 1000, plain=0.9) == (True, "as asked")
    assert choose(False, adam, many) == (False, "as asked")
    assert choose(True, FusedSGD(), many) == (False, "only Adam and AdamW have a kernel")
    with pytest.raises(ValueError, match="is not one of auto, True, False"):
        choose("yes", adam, many)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_choosing_draws_no_random_number_of_a_run(monkeypatch, dtype):
    monkeypatch.setattr(update_place, "TRIAL_NUMEL", 1000)
    before = torch.get_rng_state()
    update_place.choose_compiled("auto", FusedAdam(True), 1 << 30, dtype == torch.bfloat16, dtype)
    assert torch.equal(torch.get_rng_state(), before)


@needs_compiler
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "bf16")])
def test_choosing_takes_no_memory_beside_the_states(monkeypatch, stage, precision):
    kernel = open_compiled(FusedAdam(True))  # whose proof takes a megabyte, of a model of any size
    share = update_place.TRIAL_NUMEL / update_place.LEAST_NUMEL
    monkeypatch.setattr(update_place, "LEAST_NUMEL", 300_000)
    monkeypatch.setattr(update_place, "TRIAL_NUMEL", int(300_000 * share))
    monkeypatch.setattr(update_place, "open_compiled", lambda rule: kernel)
    peaks = []
    for asked in ("auto", False):
        with torch.device("meta"):
            model = torch.nn.Linear(600, 501)
        with LiveBytes() as live:
            engine = zerocli.shard(model, stage=stage, precision=precision, compile_update=asked)
        assert engine.compiled_reason.startswith("as asked") == (asked is False)
        peaks.append(live.peak)
        engine.close()
    assert peaks[0] == peaks[1]


def test_the_processor_is_part_of_a_kernels_name(tmp_path):
    (tmp_path / "proc").mkdir()
    assert machine.processor(tmp_path) == machine.platform.processor()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor : 0\nmodel name\t: A\nflags\t\t: fma avx2\n\nprocessor : 1\nmodel name\t: A\n"
    )
    assert machine.processor(tmp_path) == "model name\t: A\nflags\t\t: fma avx2"
