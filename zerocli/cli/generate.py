"""`zerocli generate`: text from a run's checkpoint or a folder of weights."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from offload.placement import Placement
from zerocli import config as configs
from zerocli import machine
from zerocli.checkpoint import source_files
from zerocli.checkpoint.best import best_step
from zerocli.checkpoint.folder import MANIFEST
from zerocli.cli.run_dirs import nearest_run
from zerocli.cli.train import has_checkpoint, option_words, own_config
from zerocli.cli.types import FiniteRange
from zerocli.config.hints import LIST, unknown_source, with_base
from zerocli.config.lora import ADAPTER_CONFIG
from zerocli.console import quoted, say
from zerocli.data.prompts import read_prompts
from zerocli.errors import OK, UserError
from zerocli.layout.sizes import format_bytes
from zerocli.ranks.worker import die_with_parent, worker_environment
from zerocli.run.processes import launch
from zerocli.run.recipe import refuse_bytes

FITS = 0.85
"""Share of a GPU's memory that weights may take for one GPU to be enough."""
_WHERE = "zerocli train CONFIG --run-dir RUN, then zerocli generate RUN; or the folder of an export or of the hub"


@click.command()
@click.argument("source", metavar="RUN|FOLDER")
@click.argument("prompt", required=False)
@click.option("--max-tokens", type=click.IntRange(1), default=64, metavar="N", help="Most tokens; by default 64.")
@click.option("--temperature", type=FiniteRange(0), default=0.0, metavar="T", help="0 (default): the likeliest token.")
@click.option("--top-k", type=click.IntRange(0), default=0, metavar="N", help="Choose among the N likeliest tokens.")
@click.option(
    "--top-p",
    type=FiniteRange(0, 1, min_open=True),
    default=1.0,
    metavar="P",
    help="Choose among the likeliest tokens of total probability P.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--prompts", metavar="FILE", help="One prompt per line, or .jsonl with prompt or messages; no PROMPT.")
@click.option("--chat", is_flag=True, help="PROMPT is a user's message; by default if the run was trained on such.")
@click.option("--plain", is_flag=True, help="PROMPT is a text to continue; by default for all else.")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the choices; by default 0.")
@click.option("--best", is_flag=True, help="The checkpoint of the best evaluation; by default the newest.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="The checkpoint of step N; by default the newest.")
@click.option("--ranks", type=int, metavar="N", help="Processes; by default as few as hold the weights.")
@click.option("--stage", type=int, metavar="0..3", help="3 (default with several ranks) partitions the weights.")
@click.option("--offload", metavar="PLACEMENT", help="Where weights live, such as params=cpu.")
@click.option("--precision", metavar="NAME", help="fp32, bf16, fp16 or auto; by default the run's.")
@click.option("--lora", metavar="ADAPTER", help="Adapters beside the weights of FOLDER: of an export or of peft.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any key; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def command(
    ctx: click.Context, /, source: str, prompt: str | None, best: bool, step: int | None, as_json: bool, **given: Any
) -> int:
    """Continue PROMPT with the model of RUN (a training run's folder) or FOLDER (weights in safetensors, config.json).

    The text is printed on stdout as it is made: the prompt and what follows, or with --chat the answer.
    """
    worker = worker_environment()
    if worker:
        die_with_parent()
    asked = read_prompts(prompt, given["prompts"])
    if given["ranks"] is not None and given["ranks"] < 1:
        raise UserError(f"--ranks {given['ranks']}: is below 1")
    if given["chat"] and given["plain"]:
        raise UserError("--chat and --plain: a prompt is a message or a text", hint="one of them")
    is_run = find(source)
    if not is_run and (best or step is not None):
        raise UserError(
            f"{source}: is not a run, so it has no checkpoints to choose from", hint="without --best, --step"
        )
    if is_run and given["lora"] is not None:
        fact = f"--lora {given['lora']}: {source} is a run, whose own adapters are used"
        raise UserError(fact, hint="the same without --lora, or with the folder of the base in place of the run")
    step = best_step(source) if best else step
    config = read_config(source, is_run, given)
    if not is_run and config.lora.rank and not config.lora.start:
        fact = f"{source}: holds no adapters, and new ones of rank {config.lora.rank} would add nothing"
        raise UserError(fact, hint="--lora ADAPTER, the folder of an export or of peft")
    if not is_run:
        refuse_bytes(config.data.tokenizer, source)
    if worker is None:
        ranks, reason = choose_ranks(config, given["ranks"] or 0)
        if ranks > 1:
            say(f"ranks {ranks} ({reason})")
            words = [source] if prompt is None else [source, prompt]
            return start_ranks(ranks, [str(ctx.info_name), *option_words(ctx), "--", *words])
    else:
        ranks = int(worker["WORLD_SIZE"])
        os.environ.update(worker)
    config = with_placement(config, ranks, given["stage"])
    from zerocli.run import generate
    from zerocli.run.complete import Sampling

    weights = generate.Weights(source, is_run, step, generate.positions_of(config.model.folder if is_run else source))
    sampling = Sampling(*(given[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")))
    asks = generate.Asked(
        asked,
        sampling,
        fixed=ctx.get_parameter_source("max_tokens") is ParameterSource.COMMANDLINE,
        several=given["prompts"] is not None,
        stops=given["stop"],
        chat=True if given["chat"] else False if given["plain"] else None,
    )
    run_dir = os.environ.get("ZEROCLI_RUN_DIR", ".")
    return generate.work(launch.with_ranks(config, ranks), weights, asks, as_json, run_dir)


def with_placement(config: configs.Config, ranks: int, stage: int | None) -> configs.Config:
    """Return the config with its stage, and without a placement that changes nothing.

    Without a GPU and with one process, parameters that are placed on the host are where they would be anyway.
    """
    placement = config.offload.placement
    tiers = {share.tier for share in placement.shares.get("parameters", ())} | {placement.policy or "dram"}
    if placement and ranks == 1 and tiers <= {"hbm", "dram"} and not machine.gpus():
        say(f"offload {placement}: no GPU, so the weights are in host memory anyway")
        placement, stage = Placement(), 0
    stage = stage if stage is not None else 3 if ranks > 1 or placement else 0
    configs.refuse_placement(placement, stage)
    return config.with_values({"zero.stage": stage, "offload.placement": placement})


def find(source: str) -> bool:
    """Return whether `source` is a run or a checkpoint of one; False if it is a folder of weights."""
    path = Path(source)
    if not path.is_dir():
        fact = "is a file, not a folder" if path.exists() else "no such folder"
        meant = "" if path.exists() else nearest_run(source)
        hint = f'zerocli generate {quoted(meant)} "..."' if meant else _WHERE
        if not meant and "/" in source:  # perhaps a name of the hub
            hint = unknown_source(source, ()).hint
        raise UserError(f"{source}: {fact}", hint=hint)
    if (path / MANIFEST).is_file() or has_checkpoint(path):
        return True
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return False
    if (path / "metrics.jsonl").is_file():
        raise UserError(f"{source}: the run has no checkpoint", hint="zerocli train --save-every 100")
    error = unknown_source(source, ())
    if (path / ADAPTER_CONFIG).is_file():
        raise UserError(*error.lines, hint=with_base(source, 'zerocli generate {base} "..." --lora {folder}'))
    if error.hint != LIST:  # an adapter, GGUF, a tokenizer
        raise UserError(*error.lines, hint=error.hint)
    raise UserError(f"{source}: has neither checkpoints nor config.json and safetensors", hint=_WHERE)


def read_config(source: str, is_run: bool, given: dict[str, Any]) -> configs.Config:
    """Return the config of a run or a folder, for generation: no tensor parallelism, nothing saved."""
    run_dir = Path(source).absolute()
    if (run_dir / MANIFEST).is_file():
        run_dir = run_dir.parents[1]
    path = own_config(str(run_dir), "") if is_run else str(Path(source, "config.json"))
    if not path:
        raise UserError(f"{run_dir}: has no config.json", hint="zerocli export RUN FOLDER, then generate from FOLDER")
    flags = {"train.precision": given["precision"], "zero.stage": given["stage"], "parallel.tp": 1}
    flags["lora.rank"] = given.get("lora")
    flags["parallel.shard_ranks"] = 0
    flags |= {"train.accumulate": 1, "train.global_batch": 0, "train.log_to": ()}
    if not any(text.startswith("offload.") for text in given["sets"]):
        flags["offload.placement"] = given["offload"] or ""
    config = configs.load(path, sets=given["sets"], flags=flags)
    folder = source_files.with_kept(config, str(run_dir)) if is_run else config.model.folder
    return config.with_values({"model.folder": folder})


def choose_ranks(config: configs.Config, asked: int) -> tuple[int, str]:
    """Return (number of ranks, the reason): as few as hold the weights."""
    gpus = machine.gpus()
    if asked:
        return launch.choose_ranks(asked, 1, len(gpus))
    if len(gpus) < 2 or config.offload.placement:
        return 1, "one process"
    from zerocli.run.engines import count_parameters

    width = 4 if config.train.precision == "fp32" else 2
    nbytes, least = count_parameters(config)[0] * width, min(gpu.nbytes for gpu in gpus)
    if nbytes < FITS * least:
        return 1, "the weights fit one GPU"
    return len(gpus), f"one per GPU: weights of {format_bytes(nbytes)} do not fit one of {format_bytes(least)}"


def start_ranks(ranks: int, words: list[str]) -> int:
    """Run one process per rank until all have ended; rank 0 prints the text."""
    from zerocli.run.processes.job import Job

    machine.allow_open_files(launch.open_files(ranks))
    folder = Path(tempfile.mkdtemp(prefix="zerocli-generate-"))
    (folder / "logs").mkdir()
    job = Job([sys.executable, "-m", "zerocli", *words], ranks, folder)
    code = job.run()
    job.report()
    if code == OK:
        shutil.rmtree(folder, ignore_errors=True)
    return code
