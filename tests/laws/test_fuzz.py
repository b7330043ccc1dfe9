"""Law: any training program gives plain torch's numbers, at every stage and placement, or is refused clearly.

Programs are random (tests/fuzz), run on two gloo ranks that serve all of them: 12, or 100 with ZEROCLI_TEST_LONG.
ZEROCLI_FUZZ=5000 runs more of them, ZEROCLI_FUZZ_SEED=1 others, ZEROCLI_FUZZ_FEATURES=-bf16,-nvme leaves features out,
ZEROCLI_FUZZ_PROGRAM runs one (with the defect of tests/fuzz/defects.py that ZEROCLI_FUZZ_DEFECT names).

With ZEROCLI_FUZZ_KEEP_GOING=1 a failure does not end the run: each distinct one is made smaller (for at most
ZEROCLI_FUZZ_SHRINK seconds) and written to the file ZEROCLI_FUZZ_REPORT. Runs share nothing, so a machine of 16 cores
takes 5,000 programs in 8 of them: `for k in {0..7}; do ZEROCLI_FUZZ=625 ZEROCLI_FUZZ_SEED=$k ZEROCLI_FUZZ_KEEP_GOING=1
ZEROCLI_FUZZ_REPORT=found$k.jsonl python -m pytest -n 0 tests/laws/test_fuzz.py -k any_program & done`.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace

import pytest
from fuzz.check import check, report
from fuzz.defects import DEFECTS
from fuzz.draw import FEATURES, chosen_features, programs
from fuzz.keep import Collection
from fuzz.loop import Invalid
from fuzz.plain import NOT_OFFERED
from fuzz.plain import PLAIN as PLAIN_ENGINE
from fuzz.program import Block, Call, Event, Program, Setting, Step, parse
from fuzz.reference import expected
from fuzz.server import Ranks
from fuzz.sharded import Outcome
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

NUMBER = int(os.environ.get("ZEROCLI_FUZZ", "100" if "ZEROCLI_TEST_LONG" in os.environ else "12"))
SEED = int(os.environ.get("ZEROCLI_FUZZ_SEED", "0"))
KEEP_GOING = bool(os.environ.get("ZEROCLI_FUZZ_KEEP_GOING"))
NO_CHECKS = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
]


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.close()


def law(program: Program, ranks: Ranks, engine: str = "") -> None:
    failure = ""
    try:
        check(program, ranks, engine)
    except AssertionError as error:
        failure = report(program, error)
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.mark.parametrize("number", [NUMBER])
def test_any_program_is_exact_or_refused(ranks, number):
    """The number is in the test's name: few programs that passed leave out no run of more."""
    collection = Collection(ranks, os.environ.get("ZEROCLI_FUZZ_REPORT", ""))

    @seed(SEED)
    @settings(max_examples=number, deadline=None, database=None, print_blob=False, suppress_health_check=NO_CHECKS)
    @given(program=programs(chosen_features()))
    def holds(program: Program) -> None:
        try:
            if KEEP_GOING:
                collection.judge(program)
            else:
                law(program, ranks)
        except Invalid:
            reject()

    holds()
    if collection.found:
        pytest.fail(collection.summary(), pytrace=False)


@pytest.mark.skipif("ZEROCLI_FUZZ_PROGRAM" not in os.environ, reason="runs the program in ZEROCLI_FUZZ_PROGRAM")
def test_this_program(ranks):
    law(parse(os.environ["ZEROCLI_FUZZ_PROGRAM"]), ranks, os.environ.get("ZEROCLI_FUZZ_DEFECT", ""))


def test_a_reentrant_checkpoint_beside_a_call_that_one_rank_makes(ranks):
    """Rank 0 once took a unit's gradients as complete before the checkpoint's came, and raised alone: a hang."""
    calls = (Call(when="rank1", other=1), Call(checkpoint="reentrant"), Call())
    for stage in (0, 2, 3):
        setting = Setting(stage=stage, gather_buffers=1 if stage == 0 else 2)
        law(Program(setting, (Block(), Block()), calls=calls, steps=(Step(), Step())), ranks)


def test_a_reported_program_fails_with_the_defect_and_passes_without(ranks, monkeypatch):
    """The command that a failure prints, run as a shell would run it."""
    with pytest.raises(pytest.fail.Exception) as failure:
        law(Program(Setting(stage=2), steps=(Step(), Step())), ranks, "lost_gradient")
    assignment, *command = shlex.split(str(failure.value).rpartition("\n")[2])
    assert " ".join(command) == "python -m pytest tests/laws/test_fuzz.py -k this_program"
    name, _, program = assignment.partition("=")
    assert name == "ZEROCLI_FUZZ_PROGRAM"
    monkeypatch.setenv(name, program)
    test_this_program(ranks)
    monkeypatch.setenv("ZEROCLI_FUZZ_DEFECT", "lost_gradient")
    with pytest.raises(pytest.fail.Exception) as again:
        test_this_program(ranks)
    assert str(again.value) == str(failure.value)


PLAIN = frozenset(("stage0", "stage1", "stage2", "mlp", "norm", "adamw", "buckets", "accumulate", "reuse", "tuple"))
NEEDED = {
    "unused_moves": frozenset(("unused", "decay", "odd_step")),
    "first_groups_options": frozenset(("torch_rule", "instance", "groups")),
    "lost_term": frozenset(("own_whole",)),
    "old_memory": frozenset(("view", "detached", "chunk", "transposed", "read_alias")),
    "updated_twice": frozenset(("counter", "ema")),
    "drawn_again": frozenset(("dropout", "random")),
    "copied_output": frozenset(("kept_output",)),
    "frozen_second": frozenset(("chained", "towers")),
    "unnoticed": frozenset(("uneven_no_step",)),
}
"""Features without which a defect changes nothing."""
BESIDE_PLAIN = ("first_groups_options", "lost_term", "old_memory", "copied_output", "unnoticed")
"""Defects of programs that the engine may refuse: looked for beside the plain engine alone."""


EXAMPLES = 300


def concerned(defect: str, program: Program) -> bool:
    """Whether a program has what the defect changes: nobody needs to run the others."""
    state = {kind for block in program.blocks[:1] for kind in block.state}
    there: dict[str, object] = {
        "first_groups_options": program.rule.second,
        "lost_term": program.rule.terms,
        "old_memory": program.aliases,
        "updated_twice": state & {"counter", "ema"},
        "drawn_again": state & {"dropout", "random"},
        "copied_output": program.returns == "kept",
        "frozen_second": program.second,
        "unnoticed": program.uneven,
    }
    return bool(there.get(defect, True))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["", PLAIN_ENGINE])
@pytest.mark.parametrize(
    "defect", [pytest.param(name, marks=[pytest.mark.long] * (row % 3 > 0)) for row, name in enumerate(DEFECTS)]
)
def test_the_fuzzer_finds_a_known_defect(defect, engine, ranks):
    """Each defect is found by few programs that are exact without it."""
    if not engine and defect in BESIDE_PLAIN:
        pytest.skip("looked for beside the plain engine")
    found: list[Program] = []

    @seed(1)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=NO_CHECKS, phases=[Phase.generate]
    )
    @given(program=programs(PLAIN | NEEDED.get(defect, frozenset())))
    def look(program: Program) -> None:
        if found or not concerned(defect, program):
            return
        try:
            check(program, ranks, engine)
            law(program, ranks, f"{engine}+{defect}")  # as every program is judged, one given by hand too
        except pytest.fail.Exception:
            found.append(program)
        except Invalid:
            reject()

    look()
    assert found, f"{defect} was found by none of {EXAMPLES} programs"


@pytest.mark.long
def test_the_fuzzer_finds_nothing_wrong_with_plain_data_parallel_training(ranks):
    @seed(3)
    @settings(
        max_examples=int(os.environ.get("ZEROCLI_FUZZ_PLAIN", "60")),
        deadline=None,
        database=None,
        suppress_health_check=NO_CHECKS,
    )
    @given(program=programs(FEATURES - NOT_OFFERED))
    def holds(program: Program) -> None:
        try:
            law(program, ranks, PLAIN_ENGINE)
        except Invalid:
            reject()

    holds()


class Answers(Ranks):
    """Ranks that give prepared outcomes."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes

    def run(self, program: Program, defect: str = "") -> list[Outcome]:
        return self.outcomes


def test_a_refusal_counts_only_where_it_may_be_on_every_rank_and_with_the_state_kept():
    copied = Step(before=(Event("deepcopy"),))
    program = Program(Setting(stage=3), steps=(Step(), copied))
    where = "step 1 event 0 deepcopy"
    right = [Outcome(records, where, "not here") for records in expected(program, stop_at=where).values()]
    check(program, Answers(right))
    with pytest.raises(AssertionError, match="some ranks only"):
        check(program, Answers([right[0], replace(right[1], refused="")]))
    with pytest.raises(AssertionError, match="nothing in it may be"):
        check(program, Answers([replace(outcome, refused="step 1 pass 0 train") for outcome in right]))
    with pytest.raises(AssertionError, match="nothing in it may be"):
        check(replace(program, setting=Setting(stage=1)), Answers(right))
    moved = [replace(o, records=[*o.records[:-1], expected(program)[0][-1]]) for o in right]
    with pytest.raises(AssertionError, match="end: state"):
        check(program, Answers(moved))


def test_a_printed_program_is_the_program():
    @seed(2)
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=NO_CHECKS)
    @given(program=programs(FEATURES))
    def same(program: Program) -> None:
        assert parse(repr(program)) == program

    same()
