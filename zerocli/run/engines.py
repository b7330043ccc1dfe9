"""What a run trains, from its config: the model, and its engine on this rank."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import nn

from zerocli.checkpoint.adapters import base_of
from zerocli.config import Config, num_micro_steps, refuse_shard_ranks, sharding_of
from zerocli.data.held_out import split_share
from zerocli.engine.build import DoesNotFit
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.engine.tensor_parallel import local_numel
from zerocli.errors import DOES_NOT_FIT, UserError, user_error
from zerocli.models import Decoder, build_model
from zerocli.models.lora import adapted, is_adapter
from zerocli.plan.blocks.factory import build_external
from zerocli.plan.blocks.lora import left_out
from zerocli.run.schedule import make_schedule


def resolve(config: Config, world: int) -> Config:
    """Return the config with all values that depend on the number of ranks filled in, and the share held out."""
    refuse_shard_ranks(config.parallel, world, int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
    accumulate = num_micro_steps(config.train, world, config.parallel.tp)
    # The share is recorded, so that a run that is resumed with other evaluations trains on the same data.
    return config.with_values(
        {"train.accumulate": accumulate, "parallel.ranks": world, "data.split": split_share(config)}
    )


def cap_device(config: Config) -> None:
    """Limit the allocator to the GPU memory that the config allows."""
    if config.train.gpu_memory and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.train.gpu_memory / total))


def make_model(config: Config, device: str = "meta") -> nn.Module:
    """Return the model on `device`, with its adapters; a factory's model is always on meta, without memory."""
    if config.model.factory:
        model = build_external(config.model, config.train.seq)
    else:
        model = build_model(config.model, config.train.seq, device)
    return adapted(model, config)


def make_engine(config: Config, model: nn.Module | None = None, **changes: Any) -> Engine:
    """Return the engine of a config, for its model or the one given; `changes` override fields of its settings."""
    model = make_model(config) if model is None else model
    units = model.unit_modules() if isinstance(model, Decoder) else None
    base = base_of(config, model) if config.lora.rank else None
    settings = Settings(
        **sharding_of(config).shared(),
        lr=make_schedule(config.optimizer, config.train.steps),
        weight_decay=config.optimizer.weight_decay,
        units=units,
        compile=config.model.compile,
        compile_update=config.optimizer.compile,
        steps=config.train.steps,
        seed=config.train.seed,
        loaded_base=base,
        keep_fp32=(lambda name, _: is_adapter(name)) if config.lora.dtype == "fp32" else None,
        defer_update=True,  # nothing here reads a parameter between a step and the next forward
    )
    try:
        return Engine(model, dataclasses.replace(settings, **changes))
    except ValueError as error:
        raise user_error(error) from error
    except DoesNotFit as error:
        raise UserError(str(error), hint=error.hint, exit_code=DOES_NOT_FIT) from error


def count_parameters(config: Config) -> tuple[int, int, int]:
    """Return (the model's parameters, those of one rank under tensor parallelism, those that are trained).

    Does not build every block.
    """

    def count(model: nn.Module) -> tuple[int, int, int]:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return sum(p.numel() for p in model.parameters()), local_numel(model, config.parallel.tp), trained

    layers = config.model.layers
    if config.model.external or layers < 3 or left_out(config):  # then blocks differ in what is trained
        return count(make_model(config))
    counts = [count(make_model(config.with_values({"model.layers": num}))) for num in (1, 2)]
    numel, local, trained = (one + (layers - 1) * (two - one) for one, two in zip(*counts, strict=True))
    return numel, local, trained
