"""The law: a program's numbers are plain torch's, or an operation that may be refused is, on every rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fuzz.loop import Invalid
from fuzz.program import Program, Step, simplest_setting
from fuzz.reference import expected
from fuzz.rules import may_be_refused
from fuzz.server import Ranks

TOLERANCE = {"fp32": 5e-6, "bf16": 0.1}
"""Absolute and relative, against torch in fp32."""
BETWEEN_STAGES = 3e-2
"""In bf16: two stages may round a parameter to different neighbours, 1/256 apart."""


class Differs(AssertionError):
    """The sharded program is not what torch makes of it."""


@dataclass(frozen=True)
class MayRefuse:
    """An operation that zerocli may refuse instead of being exact."""

    operation: str
    applies: Callable[[Program, str], bool]
    """Whether the program has the operation at this label (`step 0 pass 1 train`)."""
    keeps_state: bool = True
    """Whether the parameters are then what they were before the refused operation."""


def _has_event(program: Program, kind: str) -> bool:
    return any(event.kind == kind for step in program.steps for event in step.before)


def _kinds(program: Program) -> set[str]:
    return {block.kind for block in program.all_blocks}


def _state(program: Program) -> set[str]:
    return {kind for block in program.all_blocks for kind in block.state}


MAY_REFUSE = (
    MayRefuse(
        "an in-place edit of a parameter outside engine.gathered(write=True)",
        lambda p, label: _has_event(p, "plain_edit"),
        keeps_state=False,
    ),
    MayRefuse(
        "model.load_state_dict instead of engine.load_state_dict",
        lambda p, label: _has_event(p, "plain_load"),
        keeps_state=False,
    ),
    MayRefuse("copy.deepcopy(model) while parameters are released", lambda p, label: p.moves and "deepcopy" in label),
    MayRefuse("a gradient of a gradient (create_graph=True)", lambda p, label: "penalty" in label),
    MayRefuse(
        "reentrant torch.utils.checkpoint around a block",
        lambda p, label: any(call.checkpoint == "reentrant" for call in p.calls),
    ),
    MayRefuse(
        "a view of a released weight kept as an attribute of an autograd.Function's ctx",
        lambda p, label: p.moves and "ctx_attr" in _kinds(p),
    ),
    MayRefuse(
        "a released weight that left its block inside an object torch does not know, read outside",
        lambda p, label: p.moves and "scale" in _kinds(p) and any(call.style == "object" for call in p.calls),
        keeps_state=False,  # the forward has begun, and counters that its blocks changed stay changed
    ),
    MayRefuse(
        "a part of a unit called without the unit, whose parameters are released then",
        lambda p, label: p.moves and any(call.inner for call in p.calls),
        keeps_state=False,  # as above
    ),
    MayRefuse(
        "a module entered from outside whose parameters are not a unit's own: the model's forward has them",
        lambda p, label: p.moves and p.entry == "outside" and (p.setting.units != "class" or bool(p.ties)),
    ),
    MayRefuse(
        "an optimizer that needs more than the elements of one parameter",
        lambda p, label: may_be_refused(p.rule) and (label == "shard" or label.endswith(" step")),
    ),
    MayRefuse(
        "a tensor that shares a parameter's memory",
        lambda p, label: bool(p.aliases) or any(block.caches for block in p.all_blocks),
        keeps_state=False,  # a forward or a step has begun when the alias is touched
    ),
    MayRefuse(
        "recomputation of a forward that changes its module, or draws from Python's generator",
        lambda p, label: bool(p.setting.recompute) and bool(_state(p) - {"dropout", "expanded"}),
        keeps_state=False,
    ),
    MayRefuse("ranks that do different amounts of work", lambda p, label: bool(p.uneven), keeps_state=False),
)


def may_refuse(program: Program, label: str) -> MayRefuse | None:
    return next((rule for rule in MAY_REFUSE if rule.applies(program, label)), None)


def compare(got: list[tuple[str, Any]], want: list[tuple[str, Any]], tolerance: float) -> str:
    """Return the first difference between two records in words, or nothing."""
    for (label, value), (right_label, right) in zip(got, want, strict=False):
        if label != right_label:
            return f"did {label!r} where torch does {right_label!r}"
        if difference := _difference(value, right, tolerance):
            return f"{label}: {difference}"
    return f"{len(got)} records instead of {len(want)}" if len(got) != len(want) else ""


def _difference(got: Any, want: Any, tolerance: float) -> str:
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return f"names {sorted(got.keys() ^ want.keys())} on one side only"
        found = {name: _difference(got[name], want[name], tolerance) for name in want}
        return "; ".join(f"{name} {text}" for name, text in found.items() if text)
    if want is None or got is None or isinstance(want, str | bool):
        return "" if type(want) is type(got) and want == got else f"{got!r} instead of {want!r}"
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return f"shape {got.shape} instead of {want.shape}"
    if np.allclose(got, want, rtol=tolerance, atol=tolerance):
        return ""
    if got.ndim == 0:
        return f"{float(got):.7g} instead of {float(want):.7g}"
    return f"differs by up to {np.abs(got - want).max():.3g}"


def _explodes(records: dict[int, list[tuple[str, Any]]]) -> bool:
    """Whether a loss or a norm is so large that one rounding of it is more than the tolerance, or overflows."""
    values = [value for record in records.values() for _, value in record]
    arrays = [each for value in values for each in (value.values() if isinstance(value, dict) else [value])]
    numbers = [np.asarray(each) for each in arrays if not isinstance(each, str | bool | None)]
    return any(array.dtype.kind == "f" and not (np.abs(array) < 1e4).all() for array in numbers)


def _leaves_a_rank_behind(program: Program) -> bool:
    """Whether a rank may compare notes about a refusal while another is still in a call that needs it."""
    uneven = any(call.when != "always" or call.other >= 0 for call in program.calls)
    return program.moves and program.entry == "outside" and uneven and any(step.stale for step in program.steps)


def _refused_by_one_rank(program: Program) -> bool:
    """Whether one rank alone meets what may be refused: the other then waits for a rank that has failed."""
    escapes = [c for c in program.calls if c.style == "object" and (c.when != "always" or c.other >= 0)]
    inner = [c for c in program.calls if c.inner and (c.when != "always" or c.other >= 0)]
    cached = {at for at, block in enumerate(program.blocks) if block.caches or any(c.caches for c in block.children)}
    caches = [c for c in program.calls if {c.block, c.other} & cached and (c.when != "always" or c.other >= 0)]
    return program.moves and bool(("scale" in _kinds(program) and escapes) or inner or caches)


def check(program: Program, ranks: Ranks, defect: str = "") -> None:
    """Raise AssertionError unless the law holds; Invalid if plain torch cannot run the program."""
    try:
        want: Any = expected(program)
    except RuntimeError as error:  # such as a checkpoint of the user's around nothing that wants a gradient
        raise Invalid(f"torch cannot run it: {error}") from error
    if _explodes(want):
        raise Invalid("numbers so large that their rounding shows")
    if _leaves_a_rank_behind(program):
        raise Invalid("ranks make different numbers of calls from outside, and a refusal between two of them")
    if _refused_by_one_rank(program):
        raise Invalid("an operation that may be refused, on one rank alone")
    try:
        _judge(program, ranks, defect, want)
    except Differs:
        if compare(expected(program, nudge=True)[0], want[0], TOLERANCE["fp32"]):
            raise Invalid("rounding alone changes its numbers") from None
        raise


def _judge(program: Program, ranks: Ranks, defect: str, want: Any) -> None:
    got = ranks.run(program, defect)
    if program.uneven:
        return _judge_uneven(program, got, want)
    precision = program.setting.precision
    if any(outcome.refused for outcome in got):
        label, message = got[0].refused, got[0].message
        if len({outcome.refused for outcome in got}) > 1:
            raise Differs(f"refused by some ranks only: {[(o.refused, o.message) for o in got]}")
        rule = may_refuse(program, label)
        if rule is None:
            raise Differs(f"{label} was refused, and nothing in it may be: {message}")
        if label == "shard":
            return
        want = expected(program, stop_at=label)
        for rank, outcome in enumerate(got):
            *before, end = want[rank]
            _must_equal(outcome.records[: len(before)], before, TOLERANCE[precision], rank)
            if all(each.keeps_state for each in MAY_REFUSE if each.applies(program, label)):
                _must_equal(outcome.records[-1:], [end], TOLERANCE[precision], rank)
        return
    if precision != "fp32":
        unsharded = ranks.run(simplest_setting(program))
        refused = any(outcome.refused for outcome in unsharded)  # what may be, such as a reentrant checkpoint
        for rank, outcome in enumerate(() if refused else got):
            _must_equal(outcome.records, unsharded[rank].records, BETWEEN_STAGES, rank)
    for rank, outcome in enumerate(got):
        _must_equal(outcome.records, want[rank], TOLERANCE[precision], rank)


MUST_REFUSE = ("no_step",)
"""What one rank may not do alone: no average has a meaning then. The others may be exact instead."""


def _judge_uneven(program: Program, got: list[Any], want: Any) -> None:
    """Raise unless all ranks are refused, by their names, or plain torch's numbers are there."""
    said = [outcome.message for outcome in got]
    if all(outcome.refused for outcome in got):
        unnamed = [text for text in said if not re.search(r"\branks? \d", text)]
        if unnamed and may_refuse(replace(program, steps=_even(program)), got[0].refused) is None:
            raise Differs(f"a refusal of different work that names no rank: {unnamed[0]}")
        return
    if any(outcome.refused for outcome in got):
        raise Differs(f"refused by some ranks only: {[(o.refused, o.message) for o in got]}")
    if program.uneven in MUST_REFUSE:
        raise Differs(f"rank 1 alone did {program.uneven}, and nobody was refused")
    for rank, outcome in enumerate(got):
        _must_equal(outcome.records, want[rank], TOLERANCE["fp32"], rank)


def _even(program: Program) -> tuple[Step, ...]:
    return tuple(replace(step, uneven="") for step in program.steps)


def _must_equal(got: list[tuple[str, Any]], want: list[tuple[str, Any]], tolerance: float, rank: int) -> None:
    if difference := compare(got, want, tolerance):
        raise Differs(f"rank {rank}, {difference}")


def report(program: Program, error: BaseException) -> str:
    """Return what failed, the program, and the command that runs it alone."""
    text = repr(program)
    quoted = shlex.quote(text) if re.search(r'["$`\\\\]', text) else f'"{text}"'
    command = f"ZEROCLI_FUZZ_PROGRAM={quoted} python -m pytest tests/laws/test_fuzz.py -k this_program"
    return f"{error}\n\nprogram:\n{text}\n\nrun it alone:\n{command}"
