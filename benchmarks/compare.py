"""Trains one model on the same batches with zerocli, DDP, FSDP2 and DeepSpeed, turn by turn, and compares their speed.

    python benchmarks/compare.py --preset cpu
    python benchmarks/compare.py --preset h200 --json compare.json
    python benchmarks/compare.py --family hf-llama --heads 6 --kv-heads 2 --contestants zero3,fsdp2

Every turn is a fresh set of processes, so no contestant inherits another's memory or caches, and the contestants
alternate, so a machine that slows down slows all of them down. A ratio is the median over rounds of the ratio of two
turns of the same round.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from contestants import CONTESTANTS, Job, Turn, why_not

REPOSITORY = Path(__file__).resolve().parents[1]
CONTESTANT = REPOSITORY / "benchmarks" / "contestants.py"
POLL_SECONDS = 0.05

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "ranks": 2},
    "h200": {
        "device": "cuda", "precision": "bf16", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304, "tie": False,
        "seq": 1024, "batch": 16, "recompute": True, "clip": 1.0, "steps": 15, "warmup": 3,
    },
}  # fmt: skip
FAMILIES = ("gpt2", "llama", "hf-llama", "hf-gpt2")
LOSSES = ("built-in", "plain")
PEERS = {"zero0": "ddp", "zero1": "ds1", "zero2": "fsdp2-keep", "zero3": "fsdp2"}
"""Who does the same partitioning: the ratio in the table."""
TARGETS = {
    "cpu": {("zero0", "ddp"): 0.97, ("zero2", "fsdp2-keep"): 1.05, ("zero3", "fsdp2"): 1.10},
    "cuda": {(f"zero{stage}", "fsdp2"): 1.0 for stage in range(4)},
}
"""Least ratio of tokens/s that zerocli is meant to reach, by device."""
H200_PEAK_GIB = 25.0
"""Largest peak that zerocli is meant to have, at every stage of the h200 preset."""


# -- the rounds --------------------------------------------------------------------------------------------------------


class TurnFailed(Exception):
    """A contestant did not finish; the message is the end of what its first failed rank had to say."""


def run_turn(job: Job, name: str, timeout_seconds: float) -> Turn:
    """Train one contestant once, in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(CONTESTANT), json.dumps(dataclasses.asdict(job)), name, str(result)]
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(job.ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        shared = shared_environment(job)
        try:
            for rank, log in enumerate(logs):
                own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as file:
                    ranks.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
            failed = wait(ranks, timeout_seconds)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is not None:
            last = logs[failed].read_text(errors="replace").splitlines()[-15:]
            code = ranks[failed].returncode
            raise TurnFailed("\n".join([f"rank {failed} of {job.ranks} ended with code {code}", *last]))
        return Turn(**json.loads(result.read_text()))


def shared_environment(job: Job) -> dict[str, str]:
    """Return the environment that all ranks of a turn have in common."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = str(job.ranks)
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "PYTHONPATH": os.pathsep.join(paths)}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return found | {"OMP_NUM_THREADS": "1"} if job.device == "cpu" else found


def wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_seconds: float) -> int | None:
    """Wait until all have ended well, or return the first that has not."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            raise TurnFailed(f"not finished after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def run_rounds(job: Job, names: Sequence[str], rounds: int, timeout_seconds: float) -> dict[str, list[Turn | None]]:
    """Let every contestant have a turn a round; one that failed is shown why and is None there and from there on."""
    turns: dict[str, list[Turn | None]] = {name: [] for name in names}
    for index in range(rounds):
        # Every other round runs backwards: nobody always comes first, or always after the same neighbour.
        for name in names if index % 2 == 0 else reversed(names):
            turn, failed_before = None, None in turns[name]
            if not failed_before:
                try:
                    turn = run_turn(job, name, timeout_seconds)
                    shown = f"{turn.tokens_per_second:,.0f} tokens/s, {turn.step_seconds:.3f} s a step"
                    shown += f" ({turn.cpu_seconds:.3f} s of processor)"
                except TurnFailed as failure:
                    shown = f"failed: {failure}"
                click.echo(f"round {index + 1}/{rounds}  {name:<10}  {shown}", err=True)
            turns[name].append(turn)
    return turns


# -- what came of it ---------------------------------------------------------------------------------------------------


def ratio(turns: Mapping[str, Sequence[Turn | None]], name: str, peer: str) -> float | None:
    """Return the median over rounds of `name`'s tokens/s over `peer`'s, or None if a turn is missing."""
    pairs = list(zip(turns.get(name, ()), turns.get(peer, ()), strict=False))
    each = [mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in pairs if mine and theirs]
    return statistics.median(each) if each and len(each) == len(pairs) else None


def loss_difference(turns: Mapping[str, Sequence[Turn | None]], name: str, peer: str) -> float | None:
    """Return the largest difference between the two losses of any step, or None if a turn is missing."""
    pairs = list(zip(turns.get(name, ()), turns.get(peer, ()), strict=False))
    both = [zip(mine.losses, theirs.losses, strict=True) for mine, theirs in pairs if mine and theirs]
    each = [abs(a - b) for steps in both for a, b in steps]
    return max(each) if each and len(both) == len(pairs) else None


def summarise(turns: Mapping[str, Sequence[Turn | None]]) -> list[dict[str, Any]]:
    """Return a row for each contestant that finished every turn."""
    rows = []
    for name, given in turns.items():
        done = [turn for turn in given if turn]
        if not done or len(done) < len(given):
            continue
        rates = [turn.tokens_per_second for turn in done]
        peer = PEERS.get(name, "")
        row = {
            "contestant": name,
            "tokens_per_second": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "step_seconds": statistics.median(turn.step_seconds for turn in done),
            "cpu_seconds": statistics.median(turn.cpu_seconds for turn in done),
            "peak_nbytes": max(turn.peak_nbytes for turn in done),
            "first_loss": done[-1].losses[0],
            "last_loss": done[-1].losses[-1],
            "peer": peer,
            "ratio": ratio(turns, name, peer),
            "loss_difference": loss_difference(turns, name, peer),
        }
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]], device: str) -> Iterator[str]:
    peak = "peak GiB" if device == "cuda" else "RSS GiB"
    head = ("contestant", "tokens/s", "lowest", "highest", peak, "first loss", "last loss", "ratio")
    yield "{:<11} {:>10} {:>10} {:>10} {:>9} {:>11} {:>11}  {}".format(*head)
    for row in rows:
        compared = f"{row['ratio']:.3f} of {row['peer']}" if row["ratio"] is not None else "-"
        yield (
            f"{row['contestant']:<11} {row['tokens_per_second']:>10,.0f} {row['lowest']:>10,.0f}"
            f" {row['highest']:>10,.0f} {row['peak_nbytes'] / 2**30:>9.2f} {row['first_loss']:>11.6f}"
            f" {row['last_loss']:>11.6f}  {compared}"
        )


def check_targets(
    turns: Mapping[str, Sequence[Turn | None]], rows: Sequence[Mapping[str, Any]], device: str, preset: str | None
) -> list[dict[str, Any]]:
    """Return each target that this run can speak of, with what was measured."""
    found = []
    for (name, peer), least in TARGETS[device].items():
        measured = ratio(turns, name, peer)
        if measured is not None:
            what = f"{name} tokens/s, at least {least:.2f} of {peer}"
            found.append({"target": what, "measured": measured, "reached": measured >= least})
    for row in rows if preset == "h200" else ():
        if row["contestant"].startswith("zero"):
            gib = row["peak_nbytes"] / 2**30
            what = f"{row['contestant']} peak, under {H200_PEAK_GIB:.0f} GiB"
            found.append({"target": what, "measured": gib, "reached": gib < H200_PEAK_GIB})
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def apply_preset(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Make the preset's values the defaults of the other options."""
    context.default_map = PRESETS[value] if value else None
    return value


def choose_names(text: str, job: Job) -> tuple[list[str], dict[str, str]]:
    """Return (the contestants that can run, those that cannot with the reason)."""
    asked = list(dict.fromkeys(filter(None, map(str.strip, text.split(","))))) if text else list(CONTESTANTS)
    unknown = [name for name in asked if name not in CONTESTANTS]
    if unknown:
        raise click.UsageError(f"no contestant {', '.join(unknown)}: choose of {','.join(CONTESTANTS)}")
    reasons = {name: why_not(name, job) for name in asked}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    if len(skipped) == len(asked):
        raise click.UsageError("nothing to run: " + "; ".join(f"{n}: {reason}" for n, reason in skipped.items()))
    return [name for name in asked if name not in skipped], skipped


def resolve(device: str, ranks: int) -> tuple[str, int]:
    """Return the device and number of ranks that `auto` and 0 stand for on this machine."""
    gpus = torch.cuda.device_count()
    device = ("cuda" if gpus else "cpu") if device == "auto" else device
    if device == "cpu":
        return device, ranks or 2
    if not gpus:
        raise click.UsageError("there is no CUDA device here; try --device cpu")
    if ranks > gpus:
        raise click.UsageError(f"{ranks} ranks need {ranks} GPUs, and there are {gpus}; try --ranks {gpus}")
    return device, ranks or gpus


def check_shape(job: Job) -> None:
    """Refuse a model that cannot be built here."""
    if job.hidden % job.heads:
        raise click.UsageError(f"hidden {job.hidden} does not divide into {job.heads} heads")
    if job.kv_heads and job.family.endswith("gpt2"):
        raise click.UsageError("gpt2 has no --kv-heads; try --family llama")
    if job.kv_heads and job.heads % job.kv_heads:
        raise click.UsageError(f"{job.heads} heads do not divide into {job.kv_heads} heads of keys and values")
    if job.lora and (job.family != "hf-llama" or importlib.util.find_spec("peft") is None):
        raise click.UsageError("--lora needs --family hf-llama and peft: pip install 'zerocli[hf]' peft")
    if job.family.startswith("hf-") and importlib.util.find_spec("transformers") is None:
        raise click.UsageError(f"{job.family} needs transformers: pip install 'zerocli[hf]'")


def describe(job: Job, parameters: int, rounds: int) -> str:
    """Return the line that says what was compared, and on what."""
    where = torch.cuda.get_device_name() if job.device == "cuda" else f"{platform.machine()}, one thread a rank"
    extras = "".join(f", {name}" for name in ("recompute", "compile") if getattr(job, name))
    extras += "".join(f", {name} {value}" for name in ("lora", "offload") if (value := getattr(job, name)))
    loss = "plain" if job.family.startswith("hf-") else job.loss
    heads = f"{job.heads} heads" + (f" ({job.kv_heads} of keys and values)" if job.kv_heads else "")
    return (
        f"{job.family} {parameters / 1e6:,.1f}M ({job.layers} layers x {job.hidden}, {heads},"
        f" vocab {job.vocab}), {loss} loss, seq {job.seq}, batch {job.batch} x {job.ranks} ranks, {job.precision},"
        f" clip {job.clip:g}{extras}; {where}, torch {torch.__version__}; medians of {rounds} rounds"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--preset", type=click.Choice([*PRESETS]), is_eager=True, callback=apply_preset, help="Other defaults.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to train.")
@click.option("--ranks", type=click.IntRange(0), default=0, help="Processes; 0: two on a CPU, one a GPU.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", help="What parameters compute in.")
@click.option("--family", type=click.Choice(FAMILIES), default="gpt2", help="Model; hf-: transformers' own.")
@click.option("--layers", type=click.IntRange(1), default=6, help="Blocks.")
@click.option("--hidden", type=click.IntRange(1), default=384, help="Width.")
@click.option("--heads", type=click.IntRange(1), default=6, help="Attention heads.")
@click.option("--kv-heads", type=click.IntRange(0), default=0, help="Heads of keys and values (Llamas); 0: all.")
@click.option("--vocab", type=click.IntRange(2), default=4096, help="Token ids.")
@click.option("--tie/--no-tie", default=True, help="Whether the head is the embedding.")
@click.option("--loss", type=click.Choice(LOSSES), default="built-in", help="plain: cross-entropy of whole logits.")
@click.option("--seq", type=click.IntRange(1), default=128, help="Tokens a sequence.")
@click.option("--batch", type=click.IntRange(1), default=2, help="Sequences a rank and step.")
@click.option("--recompute/--no-recompute", default=False, help="Recompute each block in backward.")
@click.option("--compile/--no-compile", default=False, help="torch.compile each block.")
@click.option("--mlp", type=click.IntRange(0), default=0, help="Feed-forward width of hf-llama; 0: by its hidden.")
@click.option("--lora", type=click.IntRange(0), default=0, help="Rank of peft's adapters on hf-llama; 0: none.")
@click.option("--offload", default="", help="zerocli's placement, such as params=cpu.")
@click.option("--clip", type=click.FloatRange(0), default=1.0, help="Largest gradient norm; 0: no clipping.")
@click.option("--contestants", default="", help="Comma-separated; all by default: " + ",".join(CONTESTANTS))
@click.option("--rounds", type=click.IntRange(1), default=3, help="Turns of each contestant.")
@click.option("--steps", type=click.IntRange(1), default=6, help="Timed steps a turn.")
@click.option("--warmup", type=click.IntRange(1), default=2, help="Steps before those.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, help="Seconds after which a turn has failed.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def main(
    preset: str | None, contestants: str, rounds: int, timeout: float, json_path: Path | None, **options: Any
) -> None:
    """Train the same model and batches with zerocli and its peers, turn by turn, and compare them."""
    options["device"], options["ranks"] = resolve(options["device"], options["ranks"])
    job = Job(**options)
    check_shape(job)
    names, skipped = choose_names(contestants, job)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves no rank behind
    turns = run_rounds(job, names, rounds, timeout)
    rows = summarise(turns)
    failed = [name for name, given in turns.items() if None in given]
    first = next((turn for given in turns.values() for turn in given if turn), None)
    what = describe(job, first.parameters if first else 0, rounds)
    targets = check_targets(turns, rows, job.device, preset)

    click.echo(what)
    for line in table(rows, job.device):
        click.echo(line)
    for row in rows:
        if row["loss_difference"] is not None:
            pair = f"{row['contestant']} and {row['peer']}"
            click.echo(f"losses of {pair} differ by at most {row['loss_difference']:.3g}")
    for name, reason in skipped.items():
        click.echo(f"{name:<11} skipped: {reason}")
    for name in failed:
        click.echo(f"{name:<11} failed: see above")
    for target in targets:
        verdict = "reached" if target["reached"] else "missed"
        click.echo(f"target: {target['target']}: {target['measured']:.3f}, {verdict}")
    if json_path:
        document = {
            "schema": 1,
            "what": what,
            "job": dataclasses.asdict(job),
            "rounds": rounds,
            "rows": rows,
            "targets": targets,
            "skipped": skipped,
            "failed": failed,
            "turns": {name: [turn and dataclasses.asdict(turn) for turn in given] for name, given in turns.items()},
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
