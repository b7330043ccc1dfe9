"""A run's output to the user: the opening lines, progress, the closing summary, the dry run's table."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from zerocli.checkpoint.folder import Folder
from zerocli.config import Config
from zerocli.config.options import RunOptions
from zerocli.config.placement import read_placement
from zerocli.console import bar, quoted, say
from zerocli.engine.engine import Engine
from zerocli.engine.precision import precision
from zerocli.layout.categories import HELD, model_states
from zerocli.layout.codecs import CODECS, encoded_nbytes
from zerocli.layout.sizes import count_of, format_bytes, format_count
from zerocli.models.packed_adapters import unadapted
from zerocli.plan.report.preflight import plan_config
from zerocli.plan.setup import setup_of
from zerocli.plan.time.rates import slower_than_fp32
from zerocli.profile import table
from zerocli.profile.lines import History, Line

SLOW = 1.5
"""A precision is called slow from this multiple of fp32's time on: less may be the noise of a short measurement."""


def opening(config: Config, engine: Engine, recomputed: str = "") -> str:
    """Return the lines that open a run: what is trained, and each automatic choice with its reason.

    `recomputed` is the choice of `activations.policy=auto`.
    """
    world, tp, train = engine.collectives.world, engine.tensor_parallel.world, config.train
    tokens = train.batch * train.accumulate * world * train.seq
    words = [f"{world} data-parallel x {tp} tensor-parallel"] if tp > 1 else []
    if engine.across.world > 1:
        has = "all states" if engine.replicas.world > 1 else "all parameters"
        words.append(f"{engine.across.world} groups of {engine.inside.world}, each with {has}")
    axes = f" ({'; '.join(words)})" if words else ""
    each = "data-parallel rank" if tp > 1 else "rank"
    where = "on the CPU" if engine.update.on_cpu else "on both" if engine.update.share else "through the device"
    update = f"; update {where} ({engine.update.reason})"
    offload = [f"offload {config.offload.placement}{update if any(f.offloaded for f in engine.flats()) else ''}"]
    return "\n".join(
        [
            f"{config.name}: {format_count(engine.numel)} parameters in {len(engine.units)} units, stage "
            f"{config.zero.stage}, {count_of(world * tp, 'rank')}{axes} on {engine.device.type}",
            *_origin(config, engine),
            *_trained(config, engine),
            precision_line(config.train.precision, engine.device),
            f"compile {'true' if engine.hooks.blocks.on else 'false'} ({engine.hooks.blocks.reason})",
            *([f"activations: {recomputed}"] if recomputed else []),
            *_vocabulary(config, engine),
            f"{train.steps} steps of {tokens} tokens: batch {train.batch} x {count_of(world, each)} x accumulate "
            f"{train.accumulate} x seq {train.seq}",
            *([*offload, *engine.tiers.notes] if engine.placement.tiers else []),
            *_update(engine),
        ]
    )


def _update(engine: Engine) -> list[str]:
    """Return whether updates on the CPU are compiled, and why; nothing if there are none."""
    on_cpu = engine.device.type == "cpu" or (engine.updater.on_cpu and any(flat.offloaded for flat in engine.flats()))
    compiled = str(engine.updater.compiled is not None).lower()
    return [f"compiled update {compiled} ({engine.compiled_reason})"] if on_cpu else []


def precision_line(asked: str, device: torch.device) -> str:
    """Return the precision and its reason; of one that this CPU has no instructions for, what that costs."""
    chosen, reason = precision(asked, device)
    if device.type == "cpu" and chosen.name != "fp32":
        slower = slower_than_fp32(chosen.compute)
        if slower > SLOW:
            reason += f"; a product takes this CPU {slower:.3g} times as long as in fp32"
    return f"precision {chosen.name} ({reason})"


def _origin(config: Config, engine: Engine) -> list[str]:
    """Return whose code a Hugging Face model runs with, and whether its weights are the folder's or random."""
    if not config.model.folder:
        return []
    ours = config.model.code != "transformers"
    code = f"zerocli's {config.model.family}" if ours else f"transformers' {type(engine.model).__name__}"
    start = f"weights from {config.train.init_from}" if config.train.init_from else "random weights (a config alone)"
    return [f"model from {config.model.folder}: code of {code}, {start}"]


def _trained(config: Config, engine: Engine) -> list[str]:
    """Return how many parameters are trained, if not all are: adapters, or what is not frozen."""
    trained, lora = engine.trained_numel, config.lora
    if trained == engine.numel:
        return []
    share = (
        f"{format_count(trained)} of {format_count(engine.numel)} parameters are trained ({trained / engine.numel:.2%})"
    )
    if not lora.rank:
        return [f"frozen: {', '.join(config.train.freeze)}; {share}"]
    rank, alpha = (f" ({', '.join(each)})" if each else "" for each in (lora.rank_pattern, lora.alpha_pattern))
    factor = f"{lora.rank}{rank}, alpha {lora.alpha or 2 * lora.rank:g}{alpha}"
    factor += (", rslora" if lora.rslora else "") + (", dora" if lora.dora else "")
    plain = unadapted(engine.model)
    without = f"; {count_of(len(plain), 'packed tensor')} of experts without one" if plain else ""
    stored = f"; the base's blocks are stored as {lora.base}" if lora.base in CODECS else ""
    return [f"adapters: rank {factor}, on {', '.join(lora.targets)}; {share}{without}{stored}"]


def _vocabulary(config: Config, engine: Engine) -> list[str]:
    """Return how tensor parallelism split the vocabulary, and why; nothing without tensor parallelism."""
    tp, vocab = engine.tensor_parallel, config.model.vocab
    if tp.world == 1 or config.model.external:
        return []
    if "head.weight" in tp.cuts:
        return [f"vocabulary split, {vocab // tp.world} tokens per rank (tp {tp.world} divides {vocab})"]
    return [f"vocabulary whole on every rank (tp {tp.world} does not divide {vocab})"]


MAX_SKIPPED_LINES = 5
BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining} {desc}"
"""The bar takes what the numbers leave of the terminal's width: about 15 of 80 columns."""


class Progress:
    """A bar on a terminal, a line every `every` steps elsewhere; silent on other ranks."""

    def __init__(self, steps: int, every: int, active: bool) -> None:
        self._steps, self._every, self._active = steps, every, active
        self._bar: Any = None
        self._stack = contextlib.ExitStack()
        self._skipped = 0

    def __enter__(self) -> Progress:
        if self._active and sys.stderr.isatty():
            self._bar = self._stack.enter_context(bar(total=self._steps, bar_format=BAR))
        return self

    def show(self, line: Line) -> None:
        if not self._active:
            return
        self._skipped += line.skipped
        if line.skipped and self._skipped <= MAX_SKIPPED_LINES:  # the closing summary counts them
            more = "; further ones are only counted" if self._skipped == MAX_SKIPPED_LINES else ""
            fact = "its gradients are not finite (in fp16 the loss scale is halved)"
            say(f"step {line.step} was not applied: {fact}{more}")
        text = f"loss {line.loss:.4f}  grad {line.grad_norm:.3f}  {line.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            rate = format_count(round(line.tokens_per_second))
            self._bar.set_description_str(f"loss {line.loss:.4f} lr {line.lr:.1e} {rate} tokens/s", refresh=False)
            self._bar.update()
        elif line.step == 1 or line.step % self._every == 0 or line.step == self._steps:
            say(f"step {line.step}/{self._steps}  {text}  lr {line.lr:.2e}")

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def gather_memory(engine: Engine) -> dict[str, int]:
    """Return the most bytes any rank holds, by category. Collective."""
    mine = torch.tensor([engine.memory()[c] for c in HELD], dtype=torch.float64, device=engine.device)
    most = engine.gather_control(mine).amax(0)
    return dict(zip(HELD, (int(value) for value in most.tolist()), strict=True))


def summary(
    config: Config,
    options: RunOptions,
    engine: Engine,
    lines: History,
    held: dict[str, int],
    checked: dict[str, Any] | None,
    profile: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the closing summary as one JSON document; `profile` is what the run recorded of its memory."""
    settled = lines[1:] or lines  # the first step also warms up
    saved = Folder(Path(options.run_dir, "checkpoints")).committed()
    commands = next_commands(config, options, bool(saved))
    width = engine.precision.compute.itemsize
    grads = engine.sizing.grad_width(width)
    states = engine.sizing.state_width(width)
    whole = model_states(engine.numel, 0, 1, width, grads, states, engine.trained_numel)
    for flat in (flat for flat in engine.flats() if flat.codec):
        whole["parameters"] += encoded_nbytes(flat.codec, flat.layout.total) - width * flat.layout.numel
    return {
        "schema": 1,
        "run_dir": options.run_dir,
        "config": config.name,
        "stage": config.zero.stage,
        "ranks": engine.collectives.world * engine.tensor_parallel.world,
        "tp": engine.tensor_parallel.world,
        "parameters": engine.numel,
        "steps": lines.num_steps,
        "first_loss": lines[0].loss,
        "final_loss": lines[-1].loss,
        "tokens_per_second": sum(x.tokens for x in settled) / sum(x.seconds for x in settled),
        "memory": {c: {"held": held[c], "stage_0": whole.get(c, 0)} for c in HELD},
        "peak": lines[-1].peak,
        "at_peak": at_peak(profile) if profile else None,
        "skipped": sum(line.skipped for line in lines),
        "precision": engine.precision.name,
        "check": checked,
        "checkpoint": str(saved[0].path) if saved else None,
        "next": commands[0],
        "commands": commands,
    }


def next_commands(config: Config, options: RunOptions, saved: bool) -> list[str]:
    """Return the commands to suggest after a run: what to do with its checkpoint, or another stage if there is none."""
    if saved:
        near = os.path.relpath(options.run_dir)  # as one would type it here, if it is below the working directory
        run = quoted(options.run_dir if near.startswith("..") else near)
        made = [f"zerocli export {run} OUT"]
        return made if config.model.factory else [f'zerocli generate {run} "..."', *made]
    source, tp = shlex.quote(options.source), f" --tp {config.parallel.tp}" if config.parallel.tp > 1 else ""
    data = "".join(f" --data {quoted(each)}" for each in config.data.mix or (config.data.path,) if each)
    more = "" if config.zero.stage < 3 else " --check 10" if config.offload.placement else " --offload cpu"
    return [f"zerocli train {source}{data} --stage 3{tp}{more}"]


def _title(what: str, stage: int, tp: int) -> str:
    """Return the head of a memory table that compares this run with unsharded training."""
    return f"{what:<20}{f'stage {stage}' + (f' tp {tp}' if tp > 1 else ''):>14}{'stage 0':>14}"


def _row(category: str, held: int, stage_0: int) -> str:
    return f"{category.replace('_', ' '):<20}{format_bytes(held):>14}{format_bytes(stage_0):>14}"


LARGEST_HOLDERS = 4
"""Categories of memory that the closing summary shows of the peak."""


def at_peak(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the device's peak, measured and predicted, and its categories, the largest first.

    Without a GPU nothing counts all of the device's memory, so `measured` is None.
    """
    rows = [
        {"category": row["category"], "measured": table.seen(profile, row), "predicted": row["predicted"]}
        for row in profile["rows"]
        if row["tier"] == "hbm"
    ]
    rows.sort(key=lambda row: -(row["predicted"] or row["measured"] or 0))
    peak = profile["peak"]["hbm"]
    return {
        "measured": peak["measured"] if table.whole(profile, "hbm") else None,
        "predicted": peak["predicted"],
        "rows": rows,
        "rss_peak": profile["system"]["rss_peak"],
    }


def _peak_lines(peak: dict[str, Any] | None) -> list[str]:
    """Return the table of the peak: its largest holders, of which activations are often the first."""
    if peak is None:
        return []

    def row(name: str, found: dict[str, Any]) -> str:
        shown = [format_bytes(found[key]) if found[key] is not None else "-" for key in ("measured", "predicted")]
        return f"{name:<20}{shown[0]:>14}{shown[1]:>14}"

    shown = [each for each in peak["rows"] if each["predicted"] or each["measured"]][:LARGEST_HOLDERS]
    return [
        "",
        f"{'peak of a rank':<20}{'measured':>14}{'predicted':>14}",
        *(row(each["category"].replace("_", " "), each) for each in shown),
        row("all", peak),
        f"OS view, largest rank: {format_bytes(peak['rss_peak'])} of host memory at most",
    ]


def skipped_line(summary: dict[str, Any]) -> list[str]:
    """Return a note on steps whose gradients were not finite; nothing if there were none."""
    count, steps = summary["skipped"], summary["steps"]
    if not count:
        return []
    fp16 = summary["precision"] == "fp16"
    why = "gradients overflowed in fp16, and the loss scale was halved" if fp16 else "gradients were not finite"
    what = "no step was applied" if count == steps else f"{count} of {steps} steps were not applied"
    return [f"note: {what}: {why}" + ("; --precision bf16 needs no scale" if fp16 else ""), ""]


def closing(summary: dict[str, Any]) -> str:
    """Return the summary as readable text."""
    rows = [*skipped_line(summary), _title("held between steps", summary["stage"], summary["tp"])]
    totals = [0, 0]
    for category, row in summary["memory"].items():
        totals = [totals[0] + row["held"], totals[1] + row["stage_0"]]
        if row["held"] or row["stage_0"]:
            rows.append(_row(category, row["held"], row["stage_0"]))
    rows.append(_row("total", *totals))
    rows += _peak_lines(summary["at_peak"])
    head = (
        f"\nloss {summary['first_loss']:.4f} -> {summary['final_loss']:.4f} in {summary['steps']} steps, "
        f"{summary['tokens_per_second']:,.0f} tokens/s on {count_of(summary['ranks'], 'rank')}\n"
    )
    others = [f"{tier} {format_bytes(n)}" for tier, n in summary["peak"].items() if n and tier != "hbm"]
    tail = [f"on other tiers: {', '.join(others)}"] if others else []
    tail += summary.get("notes", [])
    tail.append(f"\nmetrics: {summary['run_dir']}/metrics.jsonl")
    if summary["check"] is not None:
        tail.append(check_line(summary["check"]))
    if summary["checkpoint"]:
        tail.append(f"checkpoint: {summary['checkpoint']}")
    return "\n".join([head, *rows, *tail, *(f"try: {command}" for command in summary["commands"])])


def check_line(check: dict[str, Any]) -> str:
    """Return the result of the comparison with unsharded training."""
    verdict = "equal to unsharded training" if check["equal"] else "NOT equal to unsharded training"
    return (
        f"check: {verdict} over {check['steps']} steps: largest difference in loss "
        f"{check['largest_difference']:.3g} ({check['largest_relative_difference']:.2g} relative, "
        f"tolerance {check['tolerance']:g})"
    )


def planned_memory(config: Config, numel: int, local: int, trained: int) -> dict[str, dict[str, int]]:
    """Return the model states that each rank would hold, and those of stage 0, by arithmetic alone.

    `local` of the `numel` parameters are a rank's own share under tensor parallelism; `trained` are not frozen.
    """
    setup = setup_of(config, device="cuda" if torch.cuda.is_available() else "cpu")
    common = (setup.width, setup.grad_width, setup.state_width)
    mine = None if trained == numel else trained
    held = model_states(local, config.zero.stage, setup.shards, *common, mine)
    whole = model_states(numel, 0, 1, *common, trained)
    if setup.codec and not config.model.external:  # of other code than ours the encoded part is not known here
        held["parameters"], whole["parameters"] = (_stored(config, stage) for stage in (config.zero.stage, 0))
    return {category: {"held": held[category], "stage_0": whole[category]} for category in held}


def _stored(config: Config, stage: int) -> int:
    """Return the bytes of a rank's parameters at a stage, if those of the base are encoded."""
    config = config.with_values({"zero.stage": stage, "offload.placement": read_placement("")})
    plan = plan_config(config.with_values({"activations.policy": "keep"}), "cpu")
    assert plan is not None
    return plan.of("parameters")


def dry(config: Config, numel: int, held: dict[str, dict[str, int]]) -> str:
    """Return the dry run's text."""
    rows = [_row(category, row["held"], row["stage_0"]) for category, row in held.items()]
    title = _title("each rank holds", config.zero.stage, config.parallel.tp)
    ranks = count_of(config.parallel.ranks, "rank")
    where = f"{format_count(numel)} parameters on {ranks} (activations and buffers not counted)"
    return "\n".join(["", where, title, *rows])
