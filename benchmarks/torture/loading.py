"""An in-process case: a copy of a good run folder is damaged and resumed from, and what was loaded is looked at."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torture import damage
from torture.tally import Result
from zerocli import config as configs
from zerocli.checkpoint import Damaged, Folder, Mismatch, Saver, Unreadable, load, resume
from zerocli.checkpoint.loader import of_its_step
from zerocli.engine.engine import Engine
from zerocli.errors import UserError
from zerocli.profile.lines import Line
from zerocli.run import engines
from zerocli.run.output.metrics import MetricsFile

CLEAR = (Damaged, Mismatch, Unreadable, UserError, OSError)
"""What a resume may end with; the command makes a line of each."""


@dataclass
class Fixture:
    """A good run folder, an engine to load its checkpoints into, and what that must hold after each step."""

    run: Path
    engine: Engine
    states: dict[int, str]

    @classmethod
    def of(cls, run: Path) -> Fixture:
        config = engines.resolve(configs.load(str(run / "config.json"), ["train.global_batch=0", "parallel.tp=1"]), 1)
        engine = engines.make_engine(config, offload="")
        states = {}
        for found in Folder(run / "checkpoints").committed():
            load(engine, found.path)
            states[found.step] = digest(engine)
        assert len(set(states.values())) == len(states) > 2
        return cls(run, engine, states)


def digest(engine: Engine) -> str:
    """Return a hash of every parameter, state and counter of an engine; rates follow from the step and the config."""
    whole = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        whole.update(name.encode())
        if isinstance(value, torch.Tensor):
            whole.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}/{key}", value[key])
        else:
            whole.update(repr(value).encode())

    add("parameters", engine.state_dict())
    add("optimizer", {key: value for key, value in engine.optimizer_state_dict().items() if key != "param_groups"})
    add("counters", (engine.steps, engine.updates.tolist()))
    return whole.hexdigest()


def case(name: str, draw: random.Random, fixtures: list[Fixture], scratch: Path) -> Result:
    """Damage a copy of a run folder in a random way, resume from it, and return how that went."""
    kinds = damage.KINDS
    [kind] = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])
    order = draw.sample(fixtures, len(fixtures))
    base = order[0]
    result = Result(name, kind, f"{kind} in {base.run.name}", struck=True)
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(base.run, scratch / "run")
    outside = scratch / "outside"
    other = max((order[1].run / "checkpoints").iterdir())
    shutil.copytree(other, outside / "checkpoints" / other.name)
    scene = damage.Scene(scratch / "run", outside, [each.run for each in order], draw, len(base.states))
    during = kinds[kind][1](scene) or contextlib.nullcontext()
    before = damage.tree(outside)
    try:
        _resume(result, scene, base, kind, during)
    except Exception:
        result.wrong.append(traceback.format_exc())
    if damage.tree(outside) != before:
        result.wrong.append("something outside the run folder was changed")
    return result


def _resume(result: Result, scene: damage.Scene, base: Fixture, kind: str, during: Any) -> None:
    said: list[str] = []
    newest = max(base.states)
    saved = scene.run / "checkpoints"
    try:
        with during:
            found = resume(base.engine, saved, said.append, of_its_step)
    except CLEAR as error:
        result.outcome = "refused"
        if not str(error):
            result.wrong.append(f"{type(error).__name__} without a word")
        return
    result.outcome = "resumed"
    if digest(base.engine) != base.states.get(found.step):
        result.wrong.append(f"what was loaded as step {found.step} is not what was saved; said: {said}")
        return
    if found.step != newest and kind in damage.NO_FALLBACK:
        result.wrong.append(f"step {newest} could not be read, and step {found.step} was taken instead; said: {said}")
    if found.step != newest and not said:
        result.wrong.append(f"step {found.step} was taken instead of {newest} without a word")
    _go_on(result, scene, base, found.step)


def _go_on(result: Result, scene: damage.Scene, base: Fixture, step: int) -> None:
    """Do what a resumed run does next: sweep, write a line of metrics, save and prune; read all of it back."""
    folder, engine = Folder(scene.run / "checkpoints"), base.engine
    with contextlib.suppress(UserError):
        configs.load(str(scene.run / "config.json"))
    if scene.draw.random() < 0.5 and not result.kind.startswith("folder"):
        return
    folder.sweep()
    metrics = MetricsFile(scene.run / "metrics.jsonl")
    metrics.write(Line(step + 1, 1.0, 1.0, 1.0, 1, 1.0, 1.0, {}, 0, {}, {}, {}, {}, False))
    metrics.close()
    last = (scene.run / "metrics.jsonl").read_bytes().splitlines()[-1]
    if not last.startswith(b'{"step": %d,' % (step + 1)):
        result.wrong.append(f"the last line of metrics.jsonl is {last[:80]!r}")
    engine.steps = step + 1
    state = digest(engine)
    saver = Saver(engine, folder.path, asynchronous=False, keep=scene.draw.choice([1, 2]))
    saver.save(step + 1)
    saver.close()
    if saver.failure is not None:
        if step + 1 > max(base.states) or result.kind != "folder: odd names":
            result.wrong.append(f"nothing could be saved: {saver.failure}")
        return
    load(engine, folder.of(step + 1))
    if digest(engine) != state:
        result.wrong.append(f"the save of step {step + 1} after the resume does not load as it was")
