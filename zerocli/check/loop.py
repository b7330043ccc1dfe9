"""`zerocli.check`: a user's own loop and optimizer in plain torch and under every stage and placement, compared."""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerocli.check.pool import NOT_GUARDED, Pool
from zerocli.check.report import Report, RowResult, number
from zerocli.check.rows import FACTOR, NONE, Row, allows
from zerocli.errors import FAILURE, UserError

if TYPE_CHECKING:
    from torch import nn

    from zerocli.check.loop_ranks import Job, Numbers


def check(
    make_model: Callable[[], nn.Module],
    loop: Callable[..., Any],
    optimizer: Any = "adamw",
    lr: float | Callable[[int], float] | None = None,
    *,
    stages: Sequence[int] = (0, 1, 2, 3),
    offload: Sequence[str] = ("", "cpu"),
    recompute: Sequence[bool] = (False,),
    ranks: int = 2,
    weight_decay: float | None = None,
    seed: int = 0,
    seconds: float = 120.0,
    device: str = "cpu",
    **settings: Any,
) -> Report:
    """Run a loop in plain torch data parallelism and under each stage and placement; report what differs.

    `make_model()` returns the model; `loop(engine, rank)` trains it and may yield or return numbers and tensors to
    compare. Every loss, gradient norm, yielded value, parameter and buffer of every rank must be equal up to rounding.
    `optimizer` is a name, a class, or a function of the parameters that returns an optimizer. Further keywords are
    those of `zerocli.shard`. Ranks are new processes, which import the functions; `seconds` limits each run. fp32 only.
    """
    if getattr(mp.current_process(), "_inheriting", False):
        os._exit(NOT_GUARDED)
    refuse_settings(optimizer, settings)
    from zerocli.check.loop_ranks import LOSSES, NORMS, YIELDED, Job, Spec
    from zerocli.engine.optimizer.groups import DEFAULT_LR
    from zerocli.engine.settings import Settings

    known = {key: value for key, value in settings.items() if key in Settings.__dataclass_fields__}
    options = dict(known.pop("options", {})) | {key: value for key, value in settings.items() if key not in known}
    options.pop("options", None)
    if isinstance(optimizer, str):  # what `shard` takes for a name; a class has its own defaults
        lr, weight_decay = DEFAULT_LR if lr is None else lr, weight_decay or 0.0
    spec = Spec(make_model, loop, optimizer, lr, weight_decay, known, options, seed, device)
    chosen = [
        Row(stage, text, text or NONE, again)
        for stage in stages
        for text in ("" if each == NONE else each for each in offload)
        for again in recompute
        if allows(stage, text)
    ]
    pool = Pool(ranks, _pack(spec), seconds)
    try:
        reference, moved = (_plain_numbers(pool, Job(None, off)) for off in (False, True))
        if not any(each[name].numel() for each in reference for name in (LOSSES, NORMS, YIELDED) if name in each):
            raise UserError(
                "the loop made no step and yielded nothing: its numbers would be equal whatever the engine does",
                hint="a loop that calls engine.backward(loss) and engine.step()",
            )
        rows = tuple(_judge(pool, row, reference, moved) for row in chosen)
    finally:
        pool.close()
    compared = sum(value.numel() for each in reference for value in each.values())
    return Report(_name(make_model), _name(loop), ranks, compared, rows)


def refuse_settings(optimizer: Any, settings: dict[str, Any]) -> None:
    """Raise UserError for what plain torch has no counterpart of here."""
    for name in ("groups", "tp", "group", "state", "keep_fp32", "nvme_path"):
        if name in settings:
            raise UserError(f"check has no {name}=: plain torch beside it would need it too", hint=_HINTS.get(name, ""))
    if settings.get("precision", "fp32") != "fp32":
        raise UserError(
            f"check compares in fp32, not in {settings['precision']}: roundings of fewer bits would hide much"
        )
    if isinstance(optimizer, str) and optimizer.lower() == "muon":
        raise UserError(
            "plain torch has no optimizer for matrices and other parameters together, as muon is",
            hint="optimizer=a class or a function of the parameters",
        )
    if hasattr(optimizer, "param_groups"):
        raise UserError(
            f"this {type(optimizer).__name__} was made for the parameters of another model",
            hint="optimizer=functools.partial(MyOptimizer, lr=...), which each run calls with its own parameters",
        )


_HINTS = {"groups": "optimizer=a function of the parameters that returns an optimizer with these groups"}


def _pack(spec: Any) -> bytes:
    """Return the spec for other processes; UserError if they could not import one of its functions."""
    for what in ("make_model", "loop", "optimizer", "settings", "options", "lr"):
        value = getattr(spec, what)
        try:
            pickle.loads(pickle.dumps(value))
        except Exception as error:
            raise UserError(
                f"{what} cannot be sent to the ranks, which are new processes: {error}",
                hint="functools.partial(MyOptimizer, lr=0.1)"
                if what == "optimizer"
                else "a function at the top level of a file (not a lambda, nor one inside another function)",
            ) from error
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is not None and not os.path.exists(file):
            raise UserError(
                f"this program is {file}, which the ranks, new processes, cannot read again",
                hint="write it into a file and run that",
            )
        if getattr(value, "__module__", "") == "__main__" and file is None:
            raise UserError(
                f"{what} is defined in a notebook or an interactive session, where the ranks cannot import it",
                hint="write it into a file (in a notebook: %%writefile my_loop.py) and import it from there",
            )
    return pickle.dumps(spec)


def _plain_numbers(pool: Pool, job: Job) -> list[Numbers]:
    verdict, found = pool.run(job)
    if verdict != "ok":
        raise UserError(f"the loop fails in plain torch: {found}", exit_code=FAILURE)
    for rank, numbers in enumerate(found):
        for name, value in numbers.items():
            if not value.isfinite().all():
                raise UserError(
                    f"plain torch's {name} of rank {rank} are not finite: there is nothing to compare with",
                    hint="a lower lr",
                    exit_code=FAILURE,
                )
    return list(found)


def _judge(pool: Pool, row: Row, reference: list[Numbers], moved: list[Numbers]) -> RowResult:
    from zerocli.check.loop_ranks import Job

    began = time.perf_counter()
    verdict, found = pool.run(Job(row))
    result = _compared(found, reference, moved) if verdict == "ok" else {"verdict": verdict, "message": found}
    return RowResult(row.stage, row.offload, row.recompute, **result, seconds=time.perf_counter() - began)


def _compared(found: list[Numbers], reference: list[Numbers], moved: list[Numbers]) -> dict[str, Any]:
    """Return the verdict on a row's numbers; see [Note: tolerance] in compare.py."""
    from zerocli.check.compare import FP32_ROUNDING, Outcome, Tolerance, differences

    for rank, (mine, right) in enumerate(zip(found, reference, strict=True)):
        for name in (*right, *mine):
            count = [each[name].numel() if name in each else 0 for each in (mine, right)]
            if count[0] != count[1]:
                message = f"{name} of rank {rank}: {count[0]} numbers instead of {count[1]}"
                return {"verdict": "differs", "message": message, "name": f"{name} (rank {rank})"}
    gaps, first = [], ""
    for rank, (mine, right, other) in enumerate(zip(found, reference, moved, strict=True)):
        expected = Outcome([], [], right)
        tolerance = Tolerance(FP32_ROUNDING, differences(Outcome([], [], other), expected))
        here = differences(Outcome([], [], mine), expected)
        over = tolerance.first_over(here, FACTOR)
        gaps += [(gap, rank) for gap in here.gaps]
        if over is not None and not first:
            gap, allowed = over
            first = f"first to differ: {gap.name} of rank {rank}{_element(mine[gap.name], right[gap.name])}, off by "
            first += f"{number(gap.relative)} of itself (allowed: {number(allowed)})"
    worst, rank = max(gaps, key=lambda each: math.inf if math.isnan(each[0].relative) else each[0].relative)
    relative = worst.relative if math.isfinite(worst.relative) else None
    verdict = "differs" if first else "identical" if worst.relative == 0 else "equal"
    return {"verdict": verdict, "message": first, "name": f"{worst.name} (rank {rank})", "relative": relative}


def _element(mine: Any, right: Any) -> str:
    """Return which number of several differs most."""
    if mine.numel() < 2:
        return ""
    index = int((mine - right).abs().nan_to_num(math.inf).argmax())
    return f" (number {index}: {mine[index].item():.6g} instead of {right[index].item():.6g})"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
