"""One case: a run with a fault, what is left of it, the resume, and the numbers of both beside an undisturbed run's."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torture import kinds, leftovers
from torture.faults import Fault
from torture.processes import Ended, Place, command, forked
from torture.setups import Setup, draw_setup
from torture.tally import Result

NO_FAULT = Fault()
CODES = {0, 1, 75, 130}
"""With which a run may end that was not ended by a signal."""
WORDS = ("a bug in zerocli", "Traceback (most recent call last)", "Segmentation fault")
"""That no user is to see, whatever happened."""
NO_NUMBERS = ("checkpoint.", "train.watchdog=", "offload.nvme_path=", "offload.verify=")
"""Keys that must not change a number."""


# -- numbers -----------------------------------------------------------------------------------------------------------


@dataclass
class Numbers:
    """What a run came to: losses and norms by step, and every tensor and counter of its last checkpoint."""

    lines: dict[int, tuple[str, ...]]
    tensors: dict[str, str]
    values: dict[str, Any]
    num_lines: int = 0

    def differences(self, other: Numbers) -> list[str]:
        found = []
        for what in ("lines", "tensors", "values"):
            mine, theirs = getattr(self, what), getattr(other, what)
            odd = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            if odd:
                key = odd[0]
                found.append(f"{len(odd)} {what} differ, such as {key}: {mine.get(key)} and {theirs.get(key)}")
        return found


def numbers_of(run: Path, steps: int) -> Numbers:
    """Return what a finished run came to; the later line of a step counts."""
    from zerocli.checkpoint.folder import Folder
    from zerocli.checkpoint.reader import Reader

    lines = {}
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        lines[row["step"]] = tuple(repr(row[key]) for key in ("loss", "grad_norm", "lr", "skipped"))
    newest = Folder(run / "checkpoints").committed()[0]
    if newest.step != steps or sorted(lines) != list(range(1, steps + 1)):
        raise ValueError(f"the newest checkpoint is of step {newest.step}, and lines are of steps {sorted(lines)}")
    with Reader(newest.path) as reader:
        tensors = {name: tensor_digest(reader.tensor(name)) for name in reader.manifest.tensors}
        kept = ("steps", "updates", "loss_scale", "samples", "optimizer", "precision")
        values = {key: reader.manifest.values.get(key) for key in kept}
    return Numbers(lines, tensors, values)


def tensor_digest(tensor: Any) -> str:
    import torch

    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class References:
    """Undisturbed runs, each made once; safe from several threads."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        self._made: dict[str, Numbers] = {}
        self._locks: dict[str, threading.Lock] = {}

    def of(self, setup: Setup, count_lines: bool = False) -> Numbers:
        last = {each.partition("=")[0]: each for each in setup.sets if not each.startswith(NO_NUMBERS)}
        key = " ".join([f"{setup.world} {setup.steps}", *sorted(last.values())])
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made or (count_lines and not self._made[key].num_lines):
                place = Place(self._root / f"undisturbed-{hashlib.sha256(key.encode()).hexdigest()[:12]}")
                ended = forked(setup, place, NO_FAULT, count_lines=count_lines)
                if any(ended.codes):
                    raise RuntimeError(f"undisturbed, the run ended with {ended.codes}: {setup.key}\n{ended.text}")
                self._made[key] = numbers_of(place.run, setup.steps)
                self._made[key].num_lines = ended.lines
                shutil.rmtree(place.path)
            return self._made[key]


# -- a case ------------------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """What all cases share."""

    seed: int
    root: Path
    only: str = ""
    keep: bool = False
    references: References = field(init=False)

    def __post_init__(self) -> None:
        self.references = References(self.root)

    def run(self, index: int) -> Result:
        """Run a case and return how it went; nothing of it is left, unless it failed and is to be kept."""
        draw = random.Random(f"{self.seed}:run:{index}")
        fault, setup = kinds.draw_fault(draw, draw_setup(self.seed, index), self.only)
        name = f"{self.seed}:run:{index}" + (f":{self.only}" if self.only else "")
        result = Result(name, fault.kind, f"{fault}; {setup.key}")
        place = Place(self.root / f"run-{index}")
        began = time.monotonic()
        try:
            reference = self.references.of(setup, count_lines=fault.where == "line")
            if fault.where == "line":
                fault = replace(fault, at=fault.at % max(1, reference.num_lines) + 1)
            Case(setup, fault, place, reference, result, draw).run()
        except Exception as error:  # the program's own mistake, or a folder that nobody could read: to be looked at
            result.wrong.append(f"{type(error).__name__}: {error}")
        result.seconds = time.monotonic() - began
        if self.keep and result.failed:
            result.notes.append(f"its folder: {place.path}")
        else:
            shutil.rmtree(place.path, ignore_errors=True)
        return result


@dataclass
class Case:
    """The stages of a case, in order."""

    setup: Setup
    fault: Fault
    place: Place
    reference: Numbers
    result: Result
    draw: random.Random

    def run(self) -> None:
        if self.fault.on_resume:
            dying = Fault("", "kill", "event", tuple(range(self.setup.world)), self.draw.randint(60, 120))
            self.start(dying, resume=False)
        ended = self.start(self.fault, resume=self.fault.on_resume)
        self.judge(ended)
        if self.result.hangs:
            return
        if any(ended.codes) or self.fault.act == "delete":
            if self.fault.damages:
                self.damage()
            self.resume()
        else:
            self.result.outcome = "finished"
        self.compare()

    def start(self, fault: Fault, resume: bool) -> Ended:
        if fault.act == "command":
            ended = command(self.setup, self.place, fault, f"{id(self)}-{self.result.case}", resume)
        else:
            ended = forked(self.setup, self.place, fault, resume)
        self.result.struck = self.result.struck or ended.struck
        kills = -signal.SIGKILL == fault.number * -1 and ended.struck if fault.act == "command" else 0
        self.result.kills += int(kills) + sum(code == -signal.SIGKILL for code in ended.codes if fault.act == "kill")
        if ended.hung:
            self.result.hangs.append(f"{ended.codes}: {ended.hung}")
        self.result.leftovers += ended.left
        # A run that is killed between its last commit and the removal after it has nothing left to do on resume.
        keep = int(self.setup.value("checkpoint.keep") or 2) + ("nothing is left" in ended.text)
        self.result.leftovers += leftovers.files(self.place.path, self.setup.world, keep, finished=not any(ended.codes))
        return ended

    # -- laws ----------------------------------------------------------------------------------------------------------

    def judge(self, ended: Ended) -> None:
        """Look at how the run with the fault ended: in good order, with a reason that a user can read."""
        fault, wrong = self.fault, self.result.wrong
        allowed = CODES | ({-fault.number} if fault.act in ("signal", "command") else set())
        allowed |= {-signal.SIGKILL} if fault.act == "kill" else set()
        if fault.where == "line":  # before it trains, a rank that waits for a dead one is ended by its launcher
            allowed |= {-signal.SIGTERM, -signal.SIGKILL, -signal.SIGABRT}
        if self.result.hangs:
            return
        if fault.harmless and any(ended.codes):
            wrong.append(f"nothing should have come of it, and it ended with {ended.codes}: {ended.text[-3000:]}")
        if not set(ended.codes) <= allowed:
            wrong.append(f"it ended with {ended.codes}: {ended.text[-3000:]}")
        # Of ranks that lost another, one says so; the others end in silence, or tell of an error of their own.
        if 1 in ended.codes and "error:" not in ended.text and fault.act != "command":
            wrong.append(f"it ended with {ended.codes}, and no rank said why: {ended.text[-3000:]}")
        self._look_for_words(ended)
        if fault.act == "delete" and ended.struck and not any(ended.codes):
            wrong.append("the run folder was removed under it, and it ended with 0")
        damaged = re.search(r"skipped: (?!it was not finished)", ended.text)
        if fault.on_resume and fault.act == "error" and damaged:
            wrong.append(f"an error of the disk was taken for damage: {ended.text[-3000:]}")

    def _look_for_words(self, ended: Ended) -> None:
        for word in WORDS:
            if word in ended.text:
                at = ended.text.index(word)
                self.result.wrong.append(
                    f"{word!r} was said ({ended.codes}): {ended.text[max(0, at - 300) : at + 2500]}"
                )
                return

    def damage(self) -> None:
        """Damage one file of the newest checkpoint, where there is one before it."""
        from test_corruption import cut, empty, flip, remove, scramble

        from zerocli.checkpoint.folder import Folder

        saved = Folder(self.place.run / "checkpoints").committed()
        if len(saved) > 1:
            target = self.draw.choice(sorted(saved[0].path.iterdir()))
            self.draw.choice([flip, cut, empty, remove, scramble])(target, self.draw)

    def resume(self) -> None:
        from zerocli.checkpoint.folder import Folder
        from zerocli.cli.run_dirs import has_run

        saved, begun = Folder(self.place.run / "checkpoints").committed(), has_run(self.place.run)
        ended = self.start(NO_FAULT, resume=True)
        self.result.outcome = "resumed"
        if any(ended.codes):
            self.result.wrong.append(f"it could not be resumed, {ended.codes}: {ended.text[-4000:]}")
            return
        self._look_for_words(ended)
        wanted = f"resuming after step {saved[0].step}" if saved else "nothing to resume" if begun else ""
        if not self.fault.damages and wanted not in ended.text and "nothing is left" not in ended.text:
            self.result.wrong.append(f"it did not say {wanted!r}: {ended.text[-3000:]}")

    def compare(self) -> None:
        if not self.result.wrong:
            self.result.wrong += numbers_of(self.place.run, self.setup.steps).differences(self.reference)
