"""Laws of events: no method is replaced to see what the engine does; subscribers see all of it, and change nothing."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from toys import Uneven, split, train_uneven, uneven_batch

import zerocli
from zerocli.engine.events import NOTHING, Events, Probe, ProfilerRanges, Subscribers

ROOT = Path(__file__).parents[2]
OURS = ("zerocli", "offload", "tiers")
STEPS, UNITS = 3, ("the rest", "blocks.0", "blocks.1", "blocks.2")
PLACEMENTS = {0: "", 1: "optimizer=cpu", 2: "optimizer=cpu,grads=cpu", 3: "cpu"}


# -- nothing is replaced -----------------------------------------------------------------------------------------------


def test_no_module_imports_mocks():
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"^\s*(import|from)\b.*\b(unittest|mock)\b", path.read_text(), re.MULTILINE), path


METHODS = (types.FunctionType, staticmethod, classmethod, property)


def of_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in OURS


def parts_of(engine: Any) -> list[Any]:
    """Return the engine and all objects of our own classes that it consists of, however deep."""
    found: dict[int, Any] = {}
    waiting = [engine]
    while waiting:
        thing = waiting.pop()
        if id(thing) in found:
            continue
        if of_ours(type(thing)) and hasattr(thing, "__dict__"):
            found[id(thing)] = thing
            waiting.extend(vars(thing).values())
        elif isinstance(thing, types.MethodType):
            waiting.append(thing.__self__)
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple | set):
            waiting.extend(thing)
    return list(found.values())


def shadowed(parts: list[Any]) -> list[str]:
    """Return the methods of these objects that an attribute of the object itself has taken the place of."""
    return [
        f"{type(part).__name__}.{name}"
        for part in parts
        for name in vars(part)
        if name not in getattr(part, "__dataclass_fields__", ())  # whose default may be a function
        and isinstance(inspect.getattr_static(type(part), name, None), METHODS[:3])
    ]


def methods() -> dict[str, int]:
    """Return all functions and methods of our modules, and which objects they are."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in OURS and module is not None:
            for key, value in vars(module).items():
                if inspect.isclass(value) and of_ours(value):
                    found |= {f"{name}.{key}.{k}": id(v) for k, v in vars(value).items() if isinstance(v, METHODS)}
                elif inspect.isfunction(value):
                    found[f"{name}.{key}"] = id(value)
    return found


def functions(parts: list[Any]) -> dict[tuple[int, str], Any]:
    """Return the functions that these objects hold as attributes of their own."""
    kinds = (types.FunctionType, types.MethodType)
    return {(i, k): v for i, part in enumerate(parts) for k, v in vars(part).items() if isinstance(v, kinds)}


def _profiled(stage: int, profiles: bool) -> tuple[set[str], list[float]]:
    import zerocli.models.loss
    import zerocli.profile.profiler

    torch.manual_seed(7)
    seen: set[str] = set()
    parts: list[Any] = []
    held: dict[tuple[int, str], Any] = {}
    known: dict[str, int] = {}

    def look(name: str) -> None:
        if known:
            seen.update(shadowed(parts_of(engine)))
            seen.update(key for key, value in methods().items() if known.get(key, value) != value)
            now = functions(parts)
            seen.update(f"{type(parts[i]).__name__}.{k}" for (i, k), v in held.items() if now.get((i, k), v) != v)

    engine = zerocli.shard(Uneven(), lr=1e-2, stage=stage, offload=PLACEMENTS[stage], events=Probe(look))
    profiler = zerocli.profile.profiler.Profiler()
    losses = []
    for step in range(5):
        if step == 1:  # the first has shown what an engine sets once
            parts += parts_of(engine)
            held |= functions(parts)
            known |= methods()
            assert {"Engine", "Gatherer", "Reducer", "Updater", "Waits"} <= {type(part).__name__ for part in parts}
            assert "zerocli.models.loss._LinearCrossEntropy.forward" in known and "tiers.base.Tier.read" in known
        if step == 2 and profiles:
            profiler.attach(engine)
            look("attached")
        if step == 4 and profiles:
            profiler.detach()
            look("detached")
        loss = engine(*uneven_batch(step, split(engine.collectives.rank, 2)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return seen, losses


@pytest.mark.long
@pytest.mark.parametrize("stage", [3])
def test_a_profile_replaces_no_method_and_changes_no_loss(stage):
    plain = run_ranks(2, _profiled, stage, False)
    assert run_ranks(2, _profiled, stage, True) == plain
    assert not any(seen for seen, _ in plain)


def test_the_look_would_notice_a_replaced_method():
    engine = zerocli.shard(torch.nn.Linear(2, 2))
    assert not shadowed(parts_of(engine))
    engine.gatherer.refresh = lambda flat: None
    assert shadowed(parts_of(engine)) == ["Gatherer.refresh"]


# -- what subscribers see ----------------------------------------------------------------------------------------------


class Log(Events):
    """Writes down all scopes as they begin and end, and what was moved."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        """(begin or end, kind, name)"""
        self.transfers: Counter[str] = Counter()
        self.moments: list[str] = []

    @contextlib.contextmanager
    def _scope(self, kind: str, name: str) -> Iterator[None]:
        self.lines.append(("begin", kind, name))
        try:
            yield
        finally:
            self.lines.append(("end", kind, name))

    def phase(self, name):
        return self._scope("phase", name)

    def unit(self, unit, phase, values):
        return self._scope("unit", unit.title)

    def gather(self, unit):
        return self._scope("gather", unit.title)

    def reduce(self, unit):
        return self._scope("reduce", unit.title)

    def update(self, unit):
        return self._scope("update", unit.title)

    def wait(self, cause):
        return self._scope("wait", cause)

    def collective(self, axis, issued):
        return self._scope("collective", issued.kind)

    def completion(self, pending):
        return self._scope("completion", "")

    def transfer(self, block, transfer, writes, began):
        self.transfers[f"{block.tier.name} {'write' if writes else 'read'}"] += transfer.nbytes

    def step(self):
        self.moments.append("step")

    def inside(self, kind: str) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
        """Return the names of a kind's scopes in order, each with the scopes around it; all of them end in order."""
        around: list[tuple[str, str]] = []
        found = []
        for edge, of, name in self.lines:
            if edge == "begin":
                if of == kind:
                    found.append((name, tuple(around)))
                around.append((of, name))
            else:
                assert around.pop() == (of, name)
        assert not around
        return found


def _logged(stage: int, recompute: bool) -> tuple[Any, ...]:
    settings = {"steps": STEPS, "stage": stage, "recompute": recompute, "offload": PLACEMENTS[stage]}
    plain = train_uneven(**settings)
    log, names = Log(), []
    watched = train_uneven(**settings, events=(ProfilerRanges(), log, Probe(names.append)))
    kinds = ("phase", "unit", "gather", "reduce", "update", "collective", "completion")
    return plain, watched, {kind: log.inside(kind) for kind in kinds}, Counter(names), log.transfers, log.moments


SUBSCRIBED = [(0, False), (2, False), (3, True)]
OTHERS = [
    pytest.param(s, r, marks=pytest.mark.long) for r in (False, True) for s in range(4) if (s, r) not in SUBSCRIBED
]


@pytest.mark.parametrize(("stage", "recompute"), [*SUBSCRIBED, *OTHERS])
def test_a_subscriber_sees_balanced_events_and_changes_no_loss(stage, recompute):
    for plain, watched, seen, names, transfers, moments in run_ranks(2, _logged, stage, recompute):
        assert plain == watched and len(plain) == STEPS
        phases = [name for name, _ in seen["phase"]]
        assert phases == ["forward", "backward", "optimizer"] * STEPS and moments == ["step"] * STEPS
        assert all(around == () for _, around in seen["phase"])

        # The rest's unit is the model itself; the blocks run inside it, and once more in backward if recomputed.
        forward = [name for name, around in seen["unit"] if ("phase", "forward") in around]
        assert forward == list(UNITS) * STEPS
        assert {around for name, around in seen["unit"] if name == UNITS[0]} == {(("phase", "forward"),)}

        gathered, reduced = Counter(n for n, _ in seen["gather"]), Counter(n for n, _ in seen["reduce"])
        updated = Counter(n for n, _ in seen["update"])
        assert sorted(updated) == sorted(UNITS) and all(count >= STEPS - 1 for count in updated.values())
        if stage:  # gathered after each update, or before each use
            assert sorted(gathered) == sorted(UNITS) and sum(gathered.values()) >= len(UNITS) * (STEPS - 1)
            assert sorted(reduced) == sorted(UNITS) and all(count >= STEPS for count in reduced.values())
        else:  # neighbours are reduced together
            assert not gathered and sum(reduced.values()) >= STEPS and set(reduced) <= set(UNITS)
        if stage == 3:
            assert all(count >= 2 * STEPS - 1 for name, count in gathered.items() if name != UNITS[-1])
        assert all(("phase", "backward") in around for _, around in seen["reduce"])

        # Each gather and reduction issues collectives of its own, which somebody waits for.
        kinds = Counter((around[-1][0], name) for name, around in seen["collective"] if around)
        assert kinds["gather", "all_gather"] == sum(gathered.values())
        wire = "reduce_scatter" if stage else "all_reduce"
        assert kinds["reduce", wire] >= sum(reduced.values())
        assert len(seen["completion"]) >= sum(gathered.values()) + sum(reduced.values())

        expected = {"forward": len(seen["unit"]), "optimizer": STEPS, "reduce": sum(reduced.values())}
        assert names == Counter(expected) + Counter(gather=sum(gathered.values()))
        moved = {0: set(), 1: {"dram write"}, 2: {"dram write"}, 3: {"dram write", "dram read"}}
        assert moved[stage] <= set(transfers)


def _joined_late() -> tuple[list[str], list[str]]:
    """A subscriber that comes after two steps and goes after the third, while parameters are unfrozen."""
    torch.manual_seed(7)
    model, log = Uneven(), Log()
    model.blocks[1].requires_grad_(False)
    engine = zerocli.shard(model, lr=1e-2, stage=3)
    for step in range(4):
        if step == 2:
            engine.events.add(log)
            model.blocks[1].requires_grad_(True)  # lays units out anew: the new parts report as well
        if step == 3:
            engine.events.remove(log)
            assert not engine.events.on
        engine.backward(engine(*uneven_batch(step, split(engine.collectives.rank, 2))))
        engine.step()
    return sorted({name for name, _ in log.inside("gather")}), log.moments


def test_subscribers_come_and_go():
    for gathered, moments in run_ranks(2, _joined_late):
        assert gathered == sorted(UNITS) and moments == ["step"]


def test_several_scopes_end_in_reverse_and_whatever_happens():
    order: list[str] = []

    class Named(Events):
        def __init__(self, name: str, fails: bool = False) -> None:
            self._name, self._fails = name, fails

        @contextlib.contextmanager
        def wait(self, cause):
            if self._fails:
                raise ValueError(self._name)
            order.append(f"+{self._name}")
            try:
                yield
            finally:
                order.append(f"-{self._name}")

    events = Subscribers([Named("a"), Named("b")])
    with pytest.raises(KeyError), events.wait("data"):
        raise KeyError
    assert order == ["+a", "+b", "-b", "-a"]
    events.add(Named("c", fails=True))
    order.clear()
    with pytest.raises(ValueError, match="c"), events.wait("data"):
        order.append("body")
    assert order == ["+a", "+b", "-b", "-a"]
    assert events.phase("forward") is NOTHING  # which none of them hears
    assert Subscribers().wait("data") is NOTHING


# -- an engine that nobody observes ------------------------------------------------------------------------------------


def test_without_subscribers_every_scope_is_the_same_object():
    """So an event builds nothing; benchmarks hold what the calls cost."""
    events = Subscribers()
    given: dict[str, tuple[Any, ...]] = {
        "unit": (None, "", ()),
        "collective": (None, None),
        "copy": ("up", 1),
        "loss": (),
    }
    for name in ("phase", "unit", "gather", "reduce", "update", "wait", "collective", "completion", "loss", "copy"):
        call = getattr(events, name)
        arguments = given.get(name, (None,))
        assert call(*arguments) is NOTHING
        blocks = sys.getallocatedblocks()
        for _ in range(100):
            call(*arguments)
        assert sys.getallocatedblocks() - blocks < 10


# -- torch's own profiler ----------------------------------------------------------------------------------------------


def _ranges() -> dict[str, tuple[float, float]]:
    model = Uneven()
    engine = zerocli.shard(model, lr=1e-2, stage=3, offload="cpu", events=ProfilerRanges())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(2):
            engine.backward(engine(*uneven_batch(step, split(engine.collectives.rank, 2))))
            engine.step()
    found = [event for event in profile.events() if event.name.startswith("zerocli ")]
    return {event.name: (event.time_range.start, event.time_range.end) for event in reversed(found)}


def test_torchs_profiler_shows_ranges():
    for found in run_ranks(2, _ranges):
        expected = {f"zerocli {name}" for name in ("forward", "backward", "optimizer")}
        expected |= {f"zerocli {kind} {unit}" for kind in ("forward", "gather", "reduce", "update") for unit in UNITS}
        assert expected <= set(found)
        (begin, end), (inner_begin, inner_end) = found["zerocli forward"], found["zerocli forward blocks.1"]
        assert begin <= inner_begin <= inner_end <= end
