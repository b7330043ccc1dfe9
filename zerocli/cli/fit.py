"""`zerocli fit`: whether a model fits, at which stages and placements, and which is fastest."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import click

from offload.placement import Placement
from zerocli import config as configs
from zerocli import machine
from zerocli.cli.types import FiniteRange
from zerocli.config import AUTO, hub, with_dividing_batch
from zerocli.config.hints import unknown_source
from zerocli.config.options import automatic_keys
from zerocli.console import colours, printable, quoted, show_if_unfit, show_json
from zerocli.errors import DOES_NOT_FIT, OK, UserError, quote
from zerocli.layout.sizes import count_of, format_bytes, parse_count, parse_memory
from zerocli.plan.blocks.inputs import Source, model_of, read_source
from zerocli.plan.blocks.lora import Lora, parse_lora
from zerocli.plan.memory.runtime import RUNTIME
from zerocli.plan.memory.saves import SHARED, folder_of
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.model import Model
from zerocli.plan.models.resolve import plan_source
from zerocli.plan.report.text import arguments, render, render_machines
from zerocli.plan.report.verdict import Budget, Verdict, document, machines_document, unplanned
from zerocli.plan.rows import Row
from zerocli.plan.search import automatic, largest
from zerocli.plan.search import candidates as search
from zerocli.plan.search.auto import kind_of, with_budgets, with_margins
from zerocli.plan.setup import Setup, setup_of
from zerocli.plan.time.hardware import PRESETS, RATES, Hardware, preset, this_machine

DEFAULT_HARDWARE = "h100"
RANKS = 8
"""GPUs of a node, for the batch of a fine-tuning on several kinds of nodes."""
STAGES = (0, 1, 2, 3)
SHOWN = 8
"""Rows of the table of `--auto`."""

LONGEST_NAME = 60
"""Characters of MODEL that are repeated in the command that trains it."""
HIGHEST_PRICE = 1e12
"""Above it a price is a mistake, and the cost of a run could be beyond a float."""
LOWEST_RATE, HIGHEST_RATE = 1e-9, 1e9
"""Bounds of a rate that is given for the machine; beyond them the times of a step could be beyond a float."""


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
@click.option("--lora", metavar="RANK[:TARGETS]", help="Train adapters of this rank alone, such as 16 or 16:q,v.")
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
    model, kind = _what(model, most)
    if not model and not kind:
        raise UserError("which MODEL?", hint="zerocli fit llama3-8b, or zerocli fit 7.5B")
    if model.startswith(("./", "../", "/", "~")) and not os.path.exists(model):
        raise unknown_source(model, ())
    if re.fullmatch(r"[1-9]\d{0,2}", model):
        raise UserError(f"{model}: a model of {count_of(int(model), 'parameter')}?", hint=f"zerocli fit {model}B")
    budget = _budget(given)
    sets, runtime, rates = _split_sets(given["sets"])
    tuned, notes = _as_trained(model, sets, given)
    source = read_source(model or "zero-7.5b", (*tuned, *sets), _flags(given))
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
        verdict = _judge(ask, hardware, [*more, *notes])
    if as_json:
        show_json(document(verdict))
    else:
        click.echo(render(verdict, explain, colours(), _train_command(model, ask, verdict, sets)))
    return OK if verdict.fits else DOES_NOT_FIT


def _train_command(model: str, ask: Question, verdict: Verdict, sets: tuple[str, ...]) -> str:
    """Return the whole command that trains what fits; empty where there is none: of a count, or of adapters."""
    best, given = verdict.best, ask.given
    if best is None or ask.source.count or given["lora"] or ask.largest == "model":
        return ""
    setup, flags = best.setup, arguments(verdict)
    named = quoted(model) if len(quoted(model)) <= LONGEST_NAME else "MODEL"  # else no terminal would keep its line
    words = ["zerocli", "train", named, flags]
    if setup.ranks > setup.ranks_per_node:
        nodes = setup.ranks // setup.ranks_per_node
        words[:2] = [f"torchrun --nnodes {nodes} --nproc-per-node {setup.ranks_per_node} -m zerocli train"]
    else:
        words.append(f"--ranks {setup.ranks}")
    found = {name: given[name] for name in ("tp", "batch", "seq", "precision")}
    if setup.precision == "fp16":
        found["precision"] = "fp16"
    if ask.largest:
        found[ask.largest] = _value(verdict)
    words += [f"--{name} {value}" for name, value in found.items() if value is not None and f"--{name} " not in flags]
    words += [f"--set {quoted(text)}" for text in sets]
    if hub.is_model(model) and not any(text.startswith("data.") for text in sets):
        words.append("--data FILE")
    return " ".join(word for word in words if word)


def _as_trained(model: str, sets: tuple[str, ...], given: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Return the shape of a step that `train` gives to a folder of weights, as texts for `--set`, and a note on it."""
    from zerocli.run import recipe

    flags = _flags(given)
    try:
        config = configs.load(model, sets, flags) if hub.stored(model) else None
    except UserError:  # `train` does not take it; its memory may be known all the same
        config = None
    if config is None or not recipe.is_fine_tuning(config):
        return (), []
    lengths = recipe.measure(config) if config.data.path else recipe.Lengths()
    several = "," in (given["hardware"] or "")
    ranks = given["ranks"] or config.parallel.ranks or (RANKS if several else choose_hardware(given)[0].gpus)
    plan = recipe.Plan(ranks, auto=bool(given["auto"]))
    if given["tp"]:
        config = recipe.with_values(config, [recipe.Default("parallel.tp", given["tp"], "")])
    known = configs.given_keys(model, sets, flags)
    made = recipe.shape(config, known, plan, lengths)
    saves = [recipe.Default("checkpoint.every", recipe.SAVE_SHARE, "")] if "checkpoint.every" not in known else []
    texts = tuple(each.text for each in (*made, *saves))
    if not made:
        return texts, []
    shown = ", ".join(f"{each.key.partition('.')[2]} {each.value} ({each.reason})" for each in made)
    data = "" if config.data.path else "; --set data.path=FILE takes it from your data"
    return texts, [f"as train does: {shown}{data}"]


@dataclasses.dataclass(frozen=True)
class Question:
    """What the command line asks, apart from the machine."""

    source: Source
    given: Mapping[str, Any]
    runtime: dict[str, int]
    rates: dict[str, Any]
    largest: str
    """Of `--max`: model, batch or seq; empty without it."""
    trace: bool
    budget: Budget | None


def _unplanned(source: Source, hardware: Hardware, notes: list[str]) -> dict[str, Any]:
    """Return the document for states that have no place in the budgets of `--offload`: nothing can be planned."""
    model: Model | None = Formula(source.shape) if source.shape else Counted(source.count) if source.count else None
    return unplanned(printable(source.name), model, hardware, notes)


def _judge(ask: Question, hardware: Hardware, notes: list[str]) -> Verdict:
    """Return the verdict for one kind of machine."""
    source, given = ask.source, ask.given
    hardware = dataclasses.replace(hardware, **ask.rates)
    if ask.largest == "batch":  # the config's own batch need not divide a global batch
        train = dataclasses.replace(source.config.train, batch=1)
        source = dataclasses.replace(source, config=dataclasses.replace(source.config, train=train))
    free = _free(given) if given["auto"] else frozenset()
    setup, more = choose_setup(source, given, hardware, ask.runtime, free)
    setup = dataclasses.replace(setup, saves_elsewhere=not hardware.nvme_space)
    notes = [*source.notes, *notes, *more]
    stages = STAGES if given["stage"] is None else (given["stage"],)
    offload = setup.offload if given["offload"] is not None else None
    lora = parse_lora(given["lora"]) if given["lora"] is not None else None
    if lora is not None:
        _refuse_lora(source, ask.trace, setup)
    planned = _model(source, ask.trace, _undecided(setup, free), notes, lora, chooses=bool(given["auto"]))
    notes += planned.notes(setup)
    if ask.largest:
        if not planned.resizable:
            notes.append("--max counts model states alone; with a MODEL that has a shape it counts everything")
        verdict = _largest(ask, planned, _undecided(setup, free), hardware, stages, offload)
        if ask.largest == "seq" and source.shape is not None and 0 < source.shape.max_positions < _value(verdict):
            notes.append(f"longer than the {source.shape.max_positions} positions that the config names")
    elif given["auto"]:
        verdict = _chosen(ask, planned, setup, hardware, notes)
    else:
        candidates = search.weigh_all(planned, setup, hardware, stages, offload)
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
    return dataclasses.replace(verdict, notes=tuple(notes), budget=ask.budget)


def _largest(
    ask: Question,
    planned: Model,
    setup: Setup,
    hardware: Hardware,
    stages: tuple[int, ...],
    offload: Placement | None,
) -> Verdict:
    """Return the verdict on the largest model, batch or sequence."""
    count = largest.largest_count(setup, hardware, stages, offload)
    room = largest.with_margin(hardware) if planned.resizable else hardware
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


def _value(verdict: Verdict) -> int:
    return verdict.largest.value if verdict.largest else 0


def _chosen(ask: Question, model: Model, setup: Setup, hardware: Hardware, notes: list[str]) -> Verdict:
    """Return the verdict of `--auto`: the best few choices."""
    given, free = ask.given, _free(ask.given)
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
        shown = [choice.nearest.on(hardware)]
        change = search.smallest_change(model, choice.nearest.setup, hardware)
        notes.append(f"sizes of memory are without what --auto leaves free: {automatic.LEFT_FREE}")
    return Verdict(model, printable(ask.source.name), hardware, shown, choice.best, change, chosen=named)


def _free(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that `--auto` chooses: those that the command line does not set."""
    return automatic_keys(given["sets"], {**_flags(given), "zero.stage": given["stage"]})


def _undecided(setup: Setup, free: frozenset[str]) -> Setup:
    return dataclasses.replace(setup, recompute=AUTO) if "activations.policy" in free else setup


def _side_by_side(ask: Question, names: list[str], notes: list[str], as_json: bool) -> int:
    """Print one row for each kind of machine; exit code 0 if the model fits one of them."""
    found: list[tuple[Hardware, Verdict | str]] = []
    refused: list[UserError] = []
    for name in names:
        hardware, _ = choose_hardware({**ask.given, "hardware": name})
        try:
            found.append((hardware, _judge(ask, hardware, [])))
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


def _what(model: str, kind: str | None) -> tuple[str, str]:
    """Return MODEL and what `--max` asks for; `fit --max llama3-8b` names a MODEL, as if the value were left out."""
    if kind is None or kind in largest.KINDS:
        return model, kind or ""
    if model:
        raise UserError(f"--max {printable(kind)}: there are {', '.join(largest.KINDS)}", hint="--max batch")
    return kind, "model"


def _budget(given: Mapping[str, Any]) -> Budget | None:
    if given["tokens"] is None:
        if given["price"] is not None:
            raise UserError("--price is of a run's GPU-hours: how many tokens?", hint="--tokens 1T --price 2.5")
        return None
    if given["price"] is not None and given["price"] >= HIGHEST_PRICE:
        raise UserError(f"--price {given['price']:g}: a GPU-hour costs less than {HIGHEST_PRICE:g}", hint="--price 2.5")
    try:
        return Budget(parse_count(given["tokens"]), given["price"] or 0.0)
    except ValueError as error:
        raise UserError(f"--tokens {str(error).replace('parameter count', 'number of tokens')}") from error


def _on_saves(saved: Row, setup: Setup) -> str:
    """Return notes on how the verdict counts the run folder."""
    size = format_bytes(saved.nbytes)
    if saved.tier == SHARED:
        return f"saved checkpoints: up to {size} in {folder_of(setup)}; no tier counts them"
    return (
        f"saved checkpoints: up to {size} in the run folder, counted as nvme: it may be on the same disks "
        "(--set checkpoint.every=0 leaves them out)"
    )


def _flags(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the config keys that flags set; ranks are checked with the machine."""
    flags = {"train.batch": given["batch"], "train.seq": given["seq"], "train.precision": given["precision"]}
    return {**flags, "offload.placement": given["offload"]}


def _split_sets(sets: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, int], dict[str, Any]]:
    """Return (the sets of config keys, overrides of the runtime's constants, of the hardware's rates)."""
    runtime: dict[str, int] = {}
    rates: dict[str, Any] = {}
    kept = []
    for text in sets:
        key, _, value = text.partition("=")
        section, _, name = key.strip().partition(".")
        known = {"runtime": tuple(RUNTIME), "hardware": RATES}.get(section)
        if known is None:
            kept.append(text)
            continue
        if name not in known:
            raise UserError(f"--set {text}: there is no {section}.{name}; there are {', '.join(known)}")
        if section == "runtime":
            runtime[name] = _size(f"--set {key.strip()}", value, zero=True)
        else:
            rates[name] = _rate(f"--set {key.strip()}", value, zero=name == "products")
    return tuple(kept), runtime, rates


def _rate(flag: str, text: str, zero: bool = False) -> float:
    """Return a rate in GB/s (tflops: TFLOPS; adam: billions of parameters per second); `zero`: 0 is not measured."""
    try:
        rate = float(text)
    except ValueError as error:
        raise UserError(f"{flag}={text}: not a number", hint=f"{flag}=4.5") from error
    if not LOWEST_RATE <= rate < HIGHEST_RATE and not (zero and rate == 0):
        raise UserError(
            f"{flag}={text}: a rate is above 0, in GB/s, from {LOWEST_RATE:g} to {HIGHEST_RATE:g}", hint=f"{flag}=4.5"
        )
    return rate


def _size(flag: str, text: str, zero: bool = False) -> int:
    try:
        nbytes = parse_memory(text.strip())
    except ValueError as error:
        raise UserError(f"{flag} {error}") from error
    if nbytes <= 0 and not zero:
        raise UserError(f"{flag} {text} is not above 0", hint=f"{flag} 80GiB")
    return nbytes


def choose_hardware(given: Mapping[str, Any]) -> tuple[Hardware, list[str]]:
    """Return the machine to plan for, and notes about assumptions."""
    notes = []
    if given["hardware"]:
        hardware = preset(given["hardware"])
    else:
        from zerocli.plan.time import bench

        here = None
        if gpus := machine.driver_gpus():
            facts = bench.gather(()) | {"gpus": [{"name": gpu.name, "memory": gpu.nbytes} for gpu in gpus]}
            here = this_machine(facts, bench.remembered(facts, ()))
        hardware = here or PRESETS[DEFAULT_HARDWARE]
        if not hardware.known:
            notes.append(
                f"{printable(hardware.name)} is in no preset: its memory is the driver's figure, and times use the "
                f"rates of an {DEFAULT_HARDWARE.upper()} (--set hardware.tflops=... and others change them)"
            )
        asked = [name for name in ("gpu_memory", "host_memory", "nvme_space") if given[name]]
        if here is None and len(asked) < 3:
            rest = "the rest of the node" if asked else "the node"
            notes.append(f"{rest} as of {hardware.name} (no GPU here; --hardware names another)")
    changes: dict[str, Any] = {
        name: _size(f"--{name.replace('_', '-')}", given[name], zero=name == "nvme_space")
        for name in ("gpu_memory", "host_memory", "nvme_space")
        if given[name] is not None
    }
    return dataclasses.replace(hardware, **changes), notes


def choose_setup(
    source: Source,
    given: Mapping[str, Any],
    hardware: Hardware,
    runtime: dict[str, int],
    free: frozenset[str] = frozenset(),
) -> tuple[Setup, list[str]]:
    """Return the setup from config and flags, and notes about assumptions; `free` are the keys of `--auto`."""
    notes = []
    for name in ("ranks", "ranks_per_node", "tp"):
        if (given[name] or 0) >= 2**63:
            raise UserError(f"--{name.replace('_', '-')} {quote(given[name])} is beyond 64 bits")
    ranks, tp = given["ranks"], given["tp"] if given["tp"] is not None else source.config.parallel.tp
    if ranks is None:
        ranks = source.config.parallel.ranks or math.lcm(hardware.gpus, max(tp, 1))
        notes.append(f"ranks {ranks} (one node of {hardware.name}; --ranks)")
    per_node = given["ranks_per_node"]
    if per_node is None:
        per_node = min(ranks, hardware.gpus) if ranks > 0 else 1
        if ranks > per_node and ranks % per_node:
            per_node = math.gcd(ranks, per_node)
    config = with_dividing_batch(source.config, ranks, tp) if "train.batch" in free else source.config
    setup = setup_of(config, ranks=ranks, tp=tp, ranks_per_node=per_node, runtime=runtime)
    if setup.precision == "bf16" and not hardware.bf16:
        sets = [text.partition("=")[0].strip() for text in given["sets"]]
        asked = given["precision"] is not None or "train.precision" in sets
        if asked and source.config.train.precision == "bf16":
            raise UserError(f"precision bf16: {hardware.name} does not compute in bf16", hint="--precision fp16")
        setup = dataclasses.replace(setup, precision="fp16")
        notes.append(f"precision fp16 ({hardware.name} has no bf16; train with --precision fp16)")
    return setup, notes


def _refuse_lora(source: Source, traced: bool, setup: Setup) -> None:
    """Raise UserError where adapters are not planned: without a shape, in a trace, and under tensor parallelism."""
    if traced or source.shape is None:
        raise UserError(
            "--lora is planned by formulas, for models with a shape",
            hint="zerocli fit package.module:factory --trace, with a function that freezes and adapts the model",
        )
    if setup.tp > 1:
        raise UserError(f"--lora with --tp {setup.tp} is not planned", hint="--tp 1")


def _model(
    source: Source,
    traced: bool,
    setup: Setup,
    notes: list[str],
    lora: Lora | None = None,
    chooses: bool = False,
) -> Model:
    """Return what is planned; a factory's model is traced if something `chooses` by its memory and time."""
    traced = traced or (chooses and bool(source.factory))
    if (found := plan_source(source, traced, setup, notes)) is not None:
        return found
    if traced:
        notes.append("traced on tensors without memory, with a CPU's operations and a GPU's chunks")
        return _trace(source, setup)
    if source.shape is not None:
        formula = Formula(source.shape, grows=source.file is None and not source.config.model.positions)
        return formula if lora is None else formula.adapted(lora)
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
    from zerocli.plan.blocks.factory import build_factory
    from zerocli.plan.models.traced import trace

    def make() -> Any:
        if built_in is None or shape is None:
            return build_factory(source.factory)
        from zerocli.models import build

        return build(built_in, shape.positions or setup.seq, "meta")

    return trace(source.name, make, setup)
