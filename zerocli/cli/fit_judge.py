"""The verdict of `zerocli fit` on one kind of machine: what is planned, searched and compared."""

from __future__ import annotations

import dataclasses
from typing import Any

from offload.placement import Placement
from zerocli.cli.fit_question import Question, choose_setup, free_keys
from zerocli.config import AUTO
from zerocli.console import printable
from zerocli.errors import UserError
from zerocli.garbage import paused
from zerocli.layout.sizes import format_bytes, format_seconds
from zerocli.plan.blocks.inputs import Source, model_of
from zerocli.plan.blocks.lora import left_out
from zerocli.plan.memory.build import check
from zerocli.plan.memory.saves import SHARED, folder_of
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.model import Model
from zerocli.plan.models.resolve import plan_source, trace_built_in
from zerocli.plan.models.traced import trace
from zerocli.plan.report.verdict import Verdict
from zerocli.plan.rows import Row
from zerocli.plan.search import automatic, largest
from zerocli.plan.search import candidates as search
from zerocli.plan.search.auto import kind_of, with_budgets, with_margins
from zerocli.plan.search.recompute import MARGIN
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware

STAGES = (0, 1, 2, 3)
SHOWN = 8
"""Rows of the table of `--auto`."""


@paused()
def judge(ask: Question, hardware: Hardware, notes: list[str]) -> Verdict:
    """Return the verdict for one kind of machine."""
    source, given = ask.source, ask.given
    hardware = dataclasses.replace(hardware, **ask.rates)
    if ask.largest == "batch":  # the config's own batch need not divide a global batch
        source = dataclasses.replace(source, config=source.config.with_values({"train.batch": 1}))
    free = free_keys(given) if given["auto"] else frozenset()
    setup, more = choose_setup(source, given, hardware, ask.runtime, free)
    setup = dataclasses.replace(setup, saves_elsewhere=not hardware.nvme_space)
    notes = [*source.notes, *notes, *more]
    stages = STAGES if given["stage"] is None else (given["stage"],)
    offload = setup.offload if given["offload"] is not None else None
    if source.config.lora.rank:
        _refuse_lora(source, setup)
    check(setup)  # before a model is run on fake tensors, which may take a minute
    if offload is not None and given["stage"] is not None:
        dataclasses.replace(setup, stage=given["stage"]).placement()
    undecided = dataclasses.replace(setup, recompute=AUTO) if "activations.policy" in free else setup
    planned = _model(source, ask.trace, undecided, notes, chooses=bool(given["auto"]))
    notes += planned.notes(setup)
    if ask.largest:
        if not planned.resizable:
            notes.append("--max counts model states alone; with a MODEL that has a shape it counts everything")
        verdict = _largest(ask, planned, undecided, hardware, stages, offload)
        if (
            ask.largest == "seq"
            and source.shape is not None
            and 0 < source.shape.max_positions < largest_value(verdict)
        ):
            notes.append(f"longer than the {source.shape.max_positions} positions that the config names")
    elif given["auto"]:
        verdict = _chosen(ask, planned, setup, hardware, notes)
    else:
        candidates = search.weigh_each(planned, search.setups(setup, stages, offload), hardware)
        if offload is None:
            candidates += with_budgets(planned, setup, hardware, stages, search.best_of(candidates))
        best = search.best_of(candidates)
        asked = dataclasses.replace(candidates[-1].setup, recompute=setup.recompute)
        change = None if best else search.smallest_change(planned, asked, hardware)
        verdict = Verdict(planned, printable(source.name), hardware, candidates, best, change)
    if (saved := verdict.candidates[0].plan.saved) is not None:
        notes.append(_on_saves(saved, setup))
    if ask.budget is not None and verdict.candidates[0].estimate is None:
        notes.append("--tokens needs the time of a step, which is estimated for models with a shape")
    groups: list[search.Candidate] = []
    if given["shard_ranks"] is not None and not ask.largest:
        groups = search.weigh_groups(planned, verdict.nearest.setup, hardware)
    elif not (ask.largest or given["auto"]) and verdict.best is not None:
        notes += _on_groups(search.faster_groups(planned, verdict.best, hardware))
    return dataclasses.replace(verdict, notes=tuple(notes), budget=ask.budget, groups=tuple(groups))


def _largest(
    ask: Question, planned: Model, setup: Setup, hardware: Hardware, stages: tuple[int, ...], offload: Placement | None
) -> Verdict:
    """Return the verdict on the largest model, batch or sequence."""
    count = largest.largest_count(setup, hardware, stages, offload)
    room = hardware.leaving(gpu_memory=MARGIN, host_memory=MARGIN) if planned.resizable else hardware
    found = largest.find(
        ask.largest,
        planned,
        largest.Search(setup, hardware, room, stages, offload),
        count,
        whole=ask.source.config.train.global_batch,
    )
    name = printable(ask.source.name)
    if ask.largest == "model":
        name = "the largest"
        if planned.family:
            name = f"the {'largest' if found.value else 'smallest'} {planned.family}"
    return Verdict(found.model, name, room, found.candidates, found.best, None, largest=found)


def largest_value(verdict: Verdict) -> int:
    return verdict.largest.value if verdict.largest else 0


def _chosen(ask: Question, model: Model, setup: Setup, hardware: Hardware, notes: list[str]) -> Verdict:
    """Return the verdict of `--auto`: the best few choices."""
    given, free = ask.given, free_keys(ask.given)
    config = ask.source.config
    whole = setup.batch * setup.accumulate * setup.dp if config.train.global_batch else 0
    setup = dataclasses.replace(setup, stage=given["stage"] if given["stage"] is not None else setup.stage)
    steps = automatic.may_compile(config, setup, free) if model.whole else 0  # a count has no times
    choice = automatic.choose_setup(model, setup, hardware, free, whole, steps)
    named = automatic.named_keys(free, whole, steps)
    if choice.best is not None:
        notes += automatic.describe(choice, hardware, lambda chosen: automatic.flags(chosen, named))
    kinds: dict[object, search.Candidate] = {}
    for each in choice.fitting:  # the fastest of each kind: the others differ in numbers only
        kinds.setdefault(kind_of(each.setup), each)
    shown = list(kinds.values())[:SHOWN]
    change = None
    if choice.best is None and choice.nearest is not None:
        hardware = with_margins(hardware)
        shown = [dataclasses.replace(choice.nearest, hardware=hardware)]
        change = search.smallest_change(model, choice.nearest.setup, hardware)
        notes.append(f"sizes of memory are without what --auto leaves free: {automatic.LEFT_FREE}")
    return Verdict(model, printable(ask.source.name), hardware, shown, choice.best, change, chosen=named)


def _on_groups(faster: search.Candidate | None) -> list[str]:
    """Return a note on groups of ranks that would be faster, if there is such a candidate."""
    if faster is None or faster.estimate is None:
        return []
    size, seconds = faster.setup.shard_ranks, format_seconds(faster.estimate.seconds)
    states = " --set parallel.shard_states=all" if faster.setup.copies > 1 else ""
    return [f"faster in groups of a node's {size} ranks: about {seconds} per step (--shard-ranks {size}{states})"]


def _on_saves(saved: Row, setup: Setup) -> str:
    """Return notes on how the verdict counts the run folder."""
    size = format_bytes(saved.nbytes)
    if saved.tier == SHARED:
        return f"saved checkpoints: up to {size} in {folder_of(setup)}; no tier counts them"
    return (
        f"saved checkpoints: up to {size} in the run folder, counted as nvme: it may be on the same disks "
        "(--set checkpoint.every=0 leaves them out)"
    )


def _refuse_lora(source: Source, setup: Setup) -> None:
    """Raise UserError where adapters are not planned: of a bare count, and under tensor parallelism."""
    if source.count:
        raise UserError(
            "--lora: a bare count has no layers that could have adapters", hint="zerocli fit llama3-8b --lora 16"
        )
    if setup.tp > 1:
        raise UserError(f"--lora with --tp {setup.tp} is not planned", hint="--tp 1")


def _model(source: Source, traced: bool, setup: Setup, notes: list[str], chooses: bool = False) -> Model:
    """Return what is planned; a factory's model is traced if something `chooses` by its memory and time."""
    lora = source.config.lora
    traced = traced or ((chooses or lora.rank > 0) and bool(source.factory))
    dense = source.shape is not None and not (source.shape.experts or source.shape.latent)
    if source.shape is not None and (left_out(source.config) or (lora.rank and not dense)):
        traced = True  # formulas have adapters of dense blocks alone
    if (found := plan_source(source, traced, setup, notes)) is not None:
        return found
    if traced:
        notes.append("traced on tensors without memory, with a CPU's operations and a GPU's chunks")
        return _trace(source, setup)
    if source.shape is not None:
        formula = Formula(source.shape, grows=source.file is None and not source.config.model.positions)
        return formula.adapted(lora) if lora.rank else formula
    if source.factory:
        from zerocli.plan.blocks.factory import count_both

        notes.append("a factory's model is counted: model states alone; --trace runs it and counts the rest")
        numel, frozen = count_both(source.factory)
        if frozen:
            notes.append(
                f"{frozen:,} parameters are frozen, and counted here as if they were trained; --trace is exact"
            )
        return Counted(numel)
    return Counted(source.count)


def _trace(source: Source, setup: Setup) -> Model:
    """Trace a model that can be built here."""
    shape = source.shape
    built_in = model_of(shape) if shape is not None else None
    if not source.factory and built_in is None:
        raise UserError(
            f"--trace runs a model, and {source.name} names none that is built in",
            hint="zerocli fit package.module:factory --trace, with a function that builds the model",
        )
    if built_in is not None and shape is not None:
        config = dataclasses.replace(source.config, model=built_in)  # whose layers targets name
        return trace_built_in(config, shape.positions or setup.seq, setup)
    from zerocli.plan.blocks.factory import build_factory

    def make() -> Any:
        from zerocli.models.lora import adapted

        return adapted(build_factory(source.factory), source.config)

    return trace(source.name, make, setup)
