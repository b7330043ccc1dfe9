"""The training run behind `zerocli train`: reads top to bottom."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tiers.errors import TierError
from zerocli import report
from zerocli.api import open_process_group
from zerocli.build import DoesNotFit
from zerocli.config import Config, to_dict
from zerocli.data import Batches, Prefetcher, open_source
from zerocli.engine import Engine
from zerocli.errors import UserError
from zerocli.launch import RunOptions, say
from zerocli.metrics import Line, MetricsFile, Recorder
from zerocli.models import Decoder, build
from zerocli.optim import arguments_of
from zerocli.plan.inputs import plan_config
from zerocli.precision import precision
from zerocli.schedule import make_schedule
from zerocli.settings import Settings


def work(config: Config, options: RunOptions) -> int:
    """Be one rank of a run; return the exit code."""
    refuse_unbuilt(config)
    open_process_group()
    try:
        return _train(config, options)
    except TierError as error:
        raise UserError(str(error), hint=error.hint or "", exit_code=1) from error
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _train(config: Config, options: RunOptions) -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = resolve(config, world)
    batches = open_batches(config, check=rank == 0)
    run_dir = Path(options.run_dir)
    engine = make_engine(config)
    if rank == 0:
        (run_dir / "config.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        say(report.opening(config, engine))
        if options.resume:
            say(f"nothing to resume: no checkpoint in {run_dir}; starting at step 1")
    # The reference starts from the very same values: take them before the first update.
    start = engine.state_dict() if options.check else None
    lines = run_steps(config, options, engine, batches, rank, world)
    checked = compare(config, options.check, start, lines, batches, rank, world) if start else None
    held = report.gather_memory(engine)
    if rank == 0:
        summary = report.summary(config, options, engine, lines, held, checked)
        say(report.closing(summary))
        if options.json:
            print(json.dumps(summary), flush=True)
    engine.close()
    return 1 if checked is not None and not checked["equal"] else 0


def resolve(config: Config, world: int) -> Config:
    """Return the config with what depends on the number of ranks worked out."""
    train = config.train
    if train.global_batch:
        each = train.batch * world
        if train.global_batch % each:
            raise UserError(
                f"global batch {train.global_batch} is not a multiple of batch {train.batch} x {world} ranks = {each}",
                hint=f"--set train.global_batch={max(1, round(train.global_batch / each)) * each}",
            )
        train = dataclasses.replace(train, accumulate=train.global_batch // each)
    parallel = dataclasses.replace(config.parallel, ranks=world)
    return dataclasses.replace(config, train=train, parallel=parallel)


def refuse_unbuilt(config: Config) -> None:
    """Say what this version cannot do yet, rather than ignore it."""
    unbuilt = {
        "--tp": config.parallel.tp > 1,
        "checkpoint.every": config.checkpoint.every > 0,
    }
    asked = [name for name, given in unbuilt.items() if given]
    if asked:
        raise UserError(f"not in this version yet: {', '.join(asked)}", hint="the same command without it")


def make_model(config: Config, device: str = "meta") -> nn.Module:
    """Return the model, without memory on the meta device."""
    if not config.model.factory:
        return build(config.model, config.train.seq, device)
    module, _, name = config.model.factory.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot import {config.model.factory}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    with torch.device(device):
        model = factory()
    if not isinstance(model, nn.Module):
        raise UserError(f"{config.model.factory} returned {type(model).__name__}, not an nn.Module")
    return model


def make_engine(config: Config, **changes: Any) -> Engine:
    """Return the engine of a config; `changes` are fields of its settings."""
    model = make_model(config)
    optimizer = config.optimizer
    units = model.unit_modules() if isinstance(model, Decoder) else None
    settings = Settings(
        stage=config.zero.stage,
        optimizer=optimizer.name,
        lr=make_schedule(optimizer.schedule, optimizer.lr, config.train.steps, optimizer.warmup, optimizer.min_lr),
        weight_decay=optimizer.weight_decay,
        options=arguments_of(optimizer),
        precision=config.train.precision,
        accumulate=config.train.accumulate,
        clip=config.train.clip or None,
        units=units,
        recompute=config.activations.policy == "recompute",
        compile=config.model.compile,
        seed=config.train.seed,
        bucket_nbytes=config.zero.bucket,
        gather_buffers=config.zero.buffers,
        reduce=config.zero.reduce,
        offload=config.offload.placement,
        update=config.offload.update,
        nvme_path=config.offload.nvme_path,
        staging_nbytes=config.offload.staging,
    )
    try:
        return Engine(model, dataclasses.replace(settings, **changes))
    except ValueError as error:
        raise UserError(str(error)) from error
    except DoesNotFit as error:
        raise UserError(str(error), hint=error.hint, exit_code=3) from error


def open_batches(config: Config, check: bool = True) -> Batches:
    vocab = 0 if config.model.factory else config.model.vocab
    source = open_source(config.data.path, config.data.tokenizer, config.data.dtype, vocab, config.train.seq, check)
    train = config.train
    return Batches(source, train.batch, train.seq, train.accumulate, train.seed)


def micro_step(engine: Engine, tokens: torch.Tensor, targets: torch.Tensor, seeds: tuple[int, ...]) -> torch.Tensor:
    """Run one forward and backward, with the random state that this micro-step always has; return its loss."""
    torch.manual_seed(hash(seeds) & (2**63 - 1))
    loss = engine(tokens, targets)
    engine.backward(loss)
    return loss.detach()


def run_steps(
    config: Config, options: RunOptions, engine: Engine, batches: Batches, rank: int, world: int
) -> list[Line]:
    """Train; return a line a step."""
    train = config.train
    steps = min(train.steps, options.check) if options.check else train.steps
    lines: list[Line] = []
    metrics = MetricsFile(Path(options.run_dir) / "metrics.jsonl") if rank == 0 else None
    progress = report.Progress(steps, train.log_every, active=rank == 0)
    with Prefetcher(batches, 1, rank, world, engine.device, steps) as loader, progress:
        recorder = Recorder(engine, train.batch * train.accumulate * world * train.seq, lambda: loader.waited_seconds)

        def keep(line: Line | None) -> None:
            if line is not None:
                lines.append(line)
                if metrics is not None:
                    metrics.write(line)
                progress.show(line)
                stop_if_broken(config, line)

        for step in range(1, steps + 1):
            total = torch.zeros((), device=engine.device)
            for micro in range(train.accumulate):
                tokens, targets = next(loader)
                total += micro_step(engine, tokens, targets, (train.seed, step, micro, rank))
            keep(recorder.record(engine.step(), total / train.accumulate))
        keep(recorder.flush())
    if metrics is not None:
        metrics.close()
    return lines


def stop_if_broken(config: Config, line: Line) -> None:
    """End the run at a loss that is not a number; fp16 merely skips such a step and lowers its scale."""
    broken = not math.isfinite(line.loss) or (line.skipped and config.train.precision != "fp16")
    if broken and config.train.on_nan == "stop":
        what = f"loss is {line.loss}" if not math.isfinite(line.loss) else "the gradients are not finite"
        raise UserError(
            f"{what} at step {line.step} (lr {line.lr:.3g}); the step was not applied; no checkpoint was written",
            hint="a lower --set optimizer.lr=..., or --set train.on_nan=continue",
            exit_code=1,
        )


def compare(
    config: Config,
    steps: int,
    start: dict[str, torch.Tensor],
    lines: list[Line],
    batches: Batches,
    rank: int,
    world: int,
) -> dict[str, Any]:
    """Train the same steps in one process without sharding, on rank 0, and compare the losses."""
    alone = dist.new_group([0]) if dist.is_initialized() else None
    result = [0.0, 0.0]
    if rank == 0:
        accumulate = config.train.accumulate
        engine = make_engine(config, stage=0, accumulate=accumulate * world, group=alone, offload="")
        engine.load_state_dict(start)
        for line in lines:
            total = torch.zeros((), dtype=torch.float64, device=engine.device)
            for micro in range(accumulate):
                for each in range(world):
                    tokens, targets = batches.batch(line.step, micro, each, world)
                    seeds = (config.train.seed, line.step, micro, each)
                    total += micro_step(engine, tokens.to(engine.device), targets.to(engine.device), seeds)
            engine.step()
            difference = abs(total.item() / (accumulate * world) - line.loss)
            result = [max(result[0], difference), max(result[1], difference / abs(line.loss))]
    if dist.is_initialized():
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, 0)
        result = shared[0]
    chosen, _ = precision(config.train.precision, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tolerance = 1e-4 if chosen.name == "fp32" else 2e-2
    return {
        "steps": len(lines),
        "largest_difference": result[0],
        "largest_relative_difference": result[1],
        "tolerance": tolerance,
        "equal": result[1] <= tolerance,
    }


def dry_run(config: Config, options: RunOptions) -> int:
    """Print the resolved config and what each rank would hold; train nothing."""
    began = time.perf_counter()
    refuse_unbuilt(config)
    config = resolve(config, max(1, config.parallel.ranks))
    open_batches(config)
    numel = sum(p.numel() for p in make_model(config).parameters())
    try:
        held = report.planned_memory(config, numel)
    except ValueError as error:
        raise UserError(str(error)) from error
    document = {"schema": 1, "config": to_dict(config), "parameters": numel, "memory": held}
    planned = plan_config(config, "cuda" if torch.cuda.is_available() else "cpu")
    if planned is not None:
        document["plan"] = planned.as_dict()
    if options.json:
        print(json.dumps(document), flush=True)
    else:
        print(report.dry(config, numel, held))
        if planned is not None:
            print("\n".join(["", "the whole plan of a rank's device, and of its node:", *planned.lines()]))
    say(f"nothing was trained ({time.perf_counter() - began:.1f} s)")
    return 0
