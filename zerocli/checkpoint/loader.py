"""The loader: fills an engine from a checkpoint, or from the newest whole one in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerocli.checkpoint import state
from zerocli.checkpoint.folder import Folder
from zerocli.checkpoint.manifest import Damaged, Manifest, Unfinished, Unreadable
from zerocli.checkpoint.manifest import read as read_manifest
from zerocli.checkpoint.members import control_group, rank_of
from zerocli.checkpoint.reader import Reader
from zerocli.checkpoint.sources import Part
from zerocli.checkpoint.writer import in_words
from zerocli.engine.engine import Engine
from zerocli.ranks.exchange import EXCHANGE, broadcast_json, first_problem
from zerocli.ranks.startup import STARTUP


@dataclass
class Resumed:
    """Where a run resumes; step 0 is the beginning."""

    step: int = 0
    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)


def load(engine: Engine, path: str | Path, training: bool = True) -> dict[str, Any]:
    """Fill the engine from one checkpoint, saved at any stage, placement and world size; return its values. Collective.

    Raises Damaged if a byte differs from what was written, and Unreadable if the system could not read it, on every
    rank, whichever rank found it; the engine is then unusable until a load succeeds. Raises state.Mismatch, and leaves
    the engine unchanged, if it is a checkpoint of another model. Without `training` only parameters and buffers are
    loaded, into an engine whose parameters are all frozen.
    """
    return _load(engine, Path(path), control_group(engine), training=training)


@torch.no_grad()
def _load(
    engine: Engine,
    path: Path,
    group: dist.ProcessGroup | None,
    judge: Callable[[Manifest], None] = lambda manifest: None,
    training: bool = True,
) -> dict[str, Any]:
    engine.synchronize()
    manifest: Manifest = _agreed(lambda: read_manifest(path, sizes=rank_of(engine) == 0), group)
    _agreed(lambda: judge(manifest), group)
    parts, afterwards = _agreed(lambda: state.wanted(engine, manifest, training), group)
    _agreed(lambda: _fill(path, manifest, parts), group, f"loading the checkpoint of step {manifest.step}")
    state.spread(engine)
    if training:
        state.restore_values(engine, manifest.values)
    _agreed(lambda: _finish(afterwards), group)
    return manifest.values


def _fill(path: Path, manifest: Manifest, parts: dict[str, Part]) -> None:
    """Fill this rank's parts; each rank plans by itself what it reads."""
    try:
        with Reader(path, manifest) as reader:
            reader.fill(parts.values())
    except (Damaged, Unreadable):
        raise
    except Exception as error:
        kind = Unreadable if isinstance(error, OSError) else Damaged
        raise kind(in_words(error)) from None


def _finish(acts: list[Callable[[], None]]) -> None:
    for act in acts:
        try:
            act()
        except RuntimeError as error:  # not a valid generator state
            raise Damaged(f"its random state is invalid ({str(error)[:200]})") from None


def _agreed(act: Callable[[], Any], group: dist.ProcessGroup | None, stage: str = EXCHANGE) -> Any:
    """Return the result of `act`; raise the first rank's Damaged, Unreadable or Mismatch on all ranks.

    `stage` is what the ranks wait for each other in.
    """
    result: Any = None
    problem: Exception | None = None
    try:
        result = act()
    except (Damaged, Unreadable, state.Mismatch) as error:
        problem = error
    except OSError as error:
        problem = Unreadable(f"{error.filename or 'a file of it'} cannot be read: {error.strerror or error}")
    problem = first_problem(problem, (Damaged, Unfinished, Unreadable, state.Mismatch), group, stage)
    if problem is not None:
        raise problem
    return result


def of_its_step(manifest: Manifest) -> None:
    """Raise Damaged if a checkpoint's step count differs from its name; those of `zerocli train` never do."""
    steps = manifest.values.get("steps")
    if steps != manifest.step:
        raise Damaged(f"it is of step {manifest.step}, and its values of step {str(steps)[:40]}")


def resume(
    engine: Engine,
    folder: str | Path,
    say: Callable[[str], None] = lambda text: None,
    judge: Callable[[Manifest], None] = lambda manifest: None,
) -> Resumed:
    """Fill the engine from a folder's newest whole checkpoint, and report which were skipped, and why. Collective.

    Returns step 0 if nothing was saved. Raises Damaged if there are checkpoints but none is whole, and Unreadable if
    one that may be whole cannot be read: an older one is not used instead. `judge` may raise Damaged for further
    reasons. The caller of `save` chooses a checkpoint's number; `zerocli train` uses the step.
    """
    group = control_group(engine)
    found: list[tuple[int, str]] = []
    if rank_of(engine) == 0:
        for step in Folder(folder).recover():
            say(f"checkpoint of step {step} restored: its replacement was not finished")
        found = [(each.step, str(each.path)) for each in Folder(folder).newest_first()]
    with STARTUP.waiting(EXCHANGE):  # rank 0's view counts: all must try the same ones
        found = broadcast_json(found, group)
    damaged = []
    for step, path in found:
        try:
            values = _load(engine, Path(path), group, judge)
        except Damaged as error:
            if not isinstance(error, Unfinished):
                damaged.append(step)
            say(f"checkpoint of step {step} skipped: {error} ({path})")
        else:
            return Resumed(step, Path(path), values)
    if damaged:
        raise Damaged(f"none of the {len(damaged)} checkpoints in {folder} is whole")
    return Resumed()
