"""`zerocli fit`: whether a model fits, at which stages and placements, and which is fastest."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from zerocli.cli.fit_judge import judge, largest_value
from zerocli.cli.fit_question import (
    Question,
    as_trained,
    budget_of,
    choose_hardware,
    flags_of,
    model_and_kind,
    split_sets,
)
from zerocli.cli.train import BASE_HELP
from zerocli.cli.types import FiniteRange
from zerocli.config import hub
from zerocli.config.hints import unknown_source
from zerocli.console import colours, printable, quoted, show_if_unfit, show_json
from zerocli.errors import DOES_NOT_FIT, OK, UserError
from zerocli.layout.sizes import count_of
from zerocli.plan.blocks.inputs import Source, read_source
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.model import Model
from zerocli.plan.report.text import arguments, render, render_machines
from zerocli.plan.report.verdict import Verdict, document, machines_document, unplanned
from zerocli.plan.time.hardware import PRESETS, Hardware

LONGEST_NAME = 60
"""Characters of MODEL that are repeated in the command that trains it."""


@click.command()
@click.argument("model", metavar="[MODEL]", default="")
@click.option("--stage", type=click.IntRange(0, 3), metavar="0..3", help="Only this ZeRO stage; all four otherwise.")
@click.option("--offload", metavar="PLACEMENT", help="Only this placement: cpu, nvme, or params=cpu,optimizer=nvme.")
@click.option(
    "--auto", is_flag=True, help="Choose stage, placement with budgets and recomputation: the fastest that fits."
)
@click.option("--ranks", type=int, metavar="N", help="GPUs in all; by default one node's.")
@click.option("--ranks-per-node", type=int, metavar="N", help="GPUs per node; they share its host memory and disks.")
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks among them.")
@click.option("--shard-ranks", type=int, metavar="N", help="Partition within groups of N ranks, which hold copies.")
@click.option("--gpu-memory", metavar="SIZE", help="Memory per GPU, such as 80GiB.")
@click.option("--host-memory", metavar="SIZE", help="Host memory per node.")
@click.option("--nvme-space", metavar="SIZE", help="Disk space per node; 0: no disks.")
@click.option("--batch", type=int, metavar="N", help="Sequences per data-parallel rank and micro-step.")
@click.option("--seq", type=int, metavar="N", help="Tokens per sequence.")
@click.option("--precision", metavar="NAME", help="bf16 (the default), fp16 or fp32.")
@click.option("--hardware", metavar="NAMES", help=f"Kinds of node, one or several with commas: {', '.join(PRESETS)}.")
@click.option("--tokens", metavar="N", help="Days and GPU-hours of a run of N tokens, such as 1T.")
@click.option("--price", type=FiniteRange(0, min_open=True), metavar="X", help="Price per GPU-hour; with --tokens.")
@click.option(
    *("--max", "most"),
    is_flag=False,
    flag_value="model",
    metavar="[model|batch|seq]",
    help="The largest model (MODEL gives the proportions), batch or sequence that fits.",
)
@click.option(
    "--lora", metavar="RANK[:LAYERS]", help="Train adapters of this rank alone, such as 16 or 16:q_proj,v_proj."
)
@click.option("--base", metavar="NAME", help=BASE_HELP)
@click.option("--explain", is_flag=True, help="Show every row with its formula.")
@click.option("--trace", is_flag=True, help="Run the model on tensors without memory instead of the formulas.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any key; also runtime.NAME, hardware.NAME."
)
def command(model: str, most: str | None, explain: bool, trace: bool, as_json: bool, **given: Any) -> int:
    """Needs no GPU and trains nothing: says whether MODEL fits, on which stage and tiers, and what is fastest.

    MODEL is a bundled name, a .toml or .yaml, a Hugging Face config.json, package.module:factory, or a count such as
    7.5B, for which only model states can be known. Device memory is per GPU; host memory and disk space are per node.
    Times are estimates. Exit code 0: it fits, 3: it does not.

    --set also takes what a process needs beside the model (runtime.context=600MiB) and rates of the machine
    (hardware.disk=4.5, in GB/s).
    """
    model, kind = model_and_kind(model, most)
    if not model and not kind:
        raise UserError("which MODEL?", hint="zerocli fit llama3-8b, or zerocli fit 7.5B")
    if model.startswith(("./", "../", "/", "~")) and not os.path.exists(model):
        raise unknown_source(model, ())
    if re.fullmatch(r"[1-9]\d{0,2}", model):
        raise UserError(f"{model}: a model of {count_of(int(model), 'parameter')}?", hint=f"zerocli fit {model}B")
    budget = budget_of(given)
    sets, runtime, rates = split_sets(given["sets"])
    tuned, notes = as_trained(model, sets, given)
    source = read_source(model or "zero-7.5b", (*tuned, *sets), flags_of(given))
    if not model:
        notes.append("proportions, batch and seq of zero-7.5b (no MODEL was named)")
    ignored = [f"--{name}" for name in ("batch", "seq") if given[name] is not None]
    if source.count and ignored:
        notes.append(
            f"{' and '.join(ignored)} change nothing: a bare count has no activations; name a model with a shape"
        )
    ask = Question(source, given, runtime, rates, kind, trace, budget)
    names = [name for name in (given["hardware"] or "").split(",") if name.strip()]
    if len(names) > 1:
        return _side_by_side(ask, names, [*source.notes, *notes], as_json)
    hardware, more = choose_hardware(given)
    with show_if_unfit(as_json, _unplanned(source, hardware, [*source.notes, *more, *notes])):
        verdict = judge(ask, hardware, [*more, *notes])
    if as_json:
        show_json(document(verdict))
    else:
        click.echo(render(verdict, explain, colours(), _train_command(model, ask, verdict, sets)))
    return OK if verdict.fits else DOES_NOT_FIT


def _side_by_side(ask: Question, names: list[str], notes: list[str], as_json: bool) -> int:
    """Print one row for each kind of machine; exit code 0 if the model fits one of them."""
    found: list[tuple[Hardware, Verdict | str]] = []
    refused: list[UserError] = []
    for name in names:
        hardware, _ = choose_hardware({**ask.given, "hardware": name})
        try:
            found.append((hardware, judge(ask, hardware, [])))
        except UserError as error:
            found.append((hardware, str(error)))
            refused.append(error)
    judged = [verdict for _, verdict in found if isinstance(verdict, Verdict)]
    if not judged:
        unfit = _unplanned(ask.source, found[0][0], notes) | {"machines": machines_document(found)}
        with show_if_unfit(as_json, unfit):
            raise refused[0]
    fitting = [each for each in judged if each.best is not None]
    if as_json:
        first = min(fitting, key=lambda each: each.seconds, default=judged[0])
        show_json(document(first) | {"machines": machines_document(found)})
    else:
        click.echo(render_machines(found, notes, colours()))
    return OK if fitting else DOES_NOT_FIT


def _train_command(model: str, ask: Question, verdict: Verdict, sets: tuple[str, ...]) -> str:
    """Return the whole command that trains what fits; empty where there is none, as of a count."""
    best, given = verdict.best, ask.given
    if best is None or ask.source.count or ask.largest == "model":
        return ""
    setup, flags = best.setup, arguments(verdict)
    named = quoted(model) if len(quoted(model)) <= LONGEST_NAME else "MODEL"  # else no terminal would keep its line
    words = ["zerocli", "train", named, flags]
    if setup.ranks > setup.ranks_per_node:
        nodes = setup.ranks // setup.ranks_per_node
        meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"  # without it each node waits for others on its own
        words[:2] = [f"torchrun --nnodes {nodes} --nproc-per-node {setup.ranks_per_node} {meeting} -m zerocli train"]
    else:
        words.append(f"--ranks {setup.ranks}")
    found = {name: given[name] for name in ("tp", "shard_ranks", "lora", "base", "batch", "seq", "precision")}
    if setup.precision == "fp16":
        found["precision"] = "fp16"
    if ask.largest:
        found[ask.largest] = largest_value(verdict)
    named_flags = {f"--{name.replace('_', '-')}": value for name, value in found.items() if value is not None}
    words += [f"{flag} {value}" for flag, value in named_flags.items() if f"{flag} " not in flags]
    words += [f"--set {quoted(text)}" for text in sets]
    if hub.is_model(model) and not any(text.startswith("data.") for text in sets):
        words.append("--data FILE")
    return " ".join(word for word in words if word)


def _unplanned(source: Source, hardware: Hardware, notes: list[str]) -> dict[str, Any]:
    """Return the document for states that have no place in the budgets of `--offload`: nothing can be planned."""
    model: Model | None = Formula(source.shape) if source.shape else Counted(source.count) if source.count else None
    return unplanned(printable(source.name), model, hardware, notes)
