"""The starting point of a run that does not begin fresh: its newest whole checkpoint, or given weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerocli.checkpoint.adapters import load_adapters, set_magnitudes
from zerocli.checkpoint.imports import load_weights
from zerocli.checkpoint.loader import Resumed, of_its_step, resume
from zerocli.checkpoint.manifest import Damaged, Unreadable
from zerocli.checkpoint.state import Mismatch
from zerocli.config import Config, to_dict
from zerocli.config.options import RunOptions
from zerocli.console import quoted
from zerocli.data.batches import Batches
from zerocli.engine.engine import Engine
from zerocli.errors import FAILURE, UserError
from zerocli.models.lora import names_there, trained_whole

NO_NUMBERS = {"data.cache", "model.folder"} | {
    f"train.{key}"
    for key in ("accumulate", "adapt", "batch", "log_every", "watchdog", "eval_every", "eval_batches", "patience")
    + ("log_to", "sample_every", "sample_prompt", "sample_tokens")
}
"""Keys that change how a step is computed, but not its result."""


def begin(config: Config, options: RunOptions, engine: Engine, batches: Batches, tell: Callable[[str], None]) -> int:
    """Fill the engine with what the run starts from; return its first step. Collective."""
    found = Resumed()
    based = engine.settings.loaded_base is not None and bool(config.train.init_from)
    names = load_weights(engine, config.train.init_from, config.model) if based else ""
    if options.resume:
        try:
            found = resume(engine, Path(options.run_dir) / "checkpoints", tell, of_its_step)
        except Damaged as error:
            raise UserError(str(error), hint="another --run-dir starts anew", exit_code=FAILURE) from error
        except Unreadable as error:
            raise UserError(
                f"{error}; it may be whole, so no older checkpoint was taken instead",
                hint="the same command once it can be read; or move that checkpoint's folder away, and the newest of "
                "the others is taken",
                exit_code=FAILURE,
            ) from error
        except Mismatch as error:
            raise UserError(f"the checkpoint is of another run: {error}", hint="the run's own CONFIG") from error
        if found.step and options.check:
            raise UserError(
                f"--check compares with training from the start, and step {found.step} is resumed from",
                hint="--check without --resume, in another --run-dir",
            )
        if found.step:
            tell(f"resuming after step {found.step}: {found.path}")
            for line in changes(config, found.values.get("config")):
                tell(line)
            batches.begun = (found.step, samples_of(found))
            before = found.values.get("windows", batches.num_windows)
            if before != batches.num_windows:
                tell(f"note: the data had {before} windows and has {batches.num_windows} now: their order is another")
        else:
            tell(f"nothing to resume: no checkpoint in {options.run_dir}; starting at step 1")
    if config.train.init_from and not found.step:
        names = names or load_weights(engine, config.train.init_from, config.model)
        tell(f"weights from {config.train.init_from}, {names}")
    if config.lora.rank and not found.step:
        start_adapters(engine, config, tell)
    return found.step + 1


def start_adapters(engine: Engine, config: Config, tell: Callable[[str], None]) -> None:
    """Give adapters what they start from beside their random values: a folder's, and the base's own. Collective."""
    if config.lora.dora:
        set_magnitudes(engine)
    if config.lora.start:
        kept = trained_whole(engine.model, config.lora.save_modules, names_there(config.model))
        load_adapters(engine, config.lora.start, config.model, kept)
        tell(f"adapters from {config.lora.start}")


def samples_of(found: Resumed) -> int:
    """Return how many samples the run had seen; raise UserError if the checkpoint does not say."""
    samples = found.values.get("samples")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise UserError(
            f"{found.path}: does not say how far in its data it is: it was not saved by zerocli train",
            hint=f"zerocli export {quoted(found.path or '')} DIR, then --init-from DIR in another --run-dir",
            exit_code=FAILURE,
        )
    return samples


def changes(config: Config, saved: Any) -> list[str]:
    """Return a line for each key that affects results and has changed since the checkpoint was saved."""
    if not isinstance(saved, dict):
        return []
    now = to_dict(config)
    before, after = global_batch(saved), global_batch(now)
    lines = [f"note: a step was of {before} sequences and is of {after} now"] if before and before != after else []
    return lines + [
        f"note: {section}.{key} was {saved[section][key]!r} and is {value!r} now"
        for section in ("train", "optimizer", "data", "model", "lora")
        for key, value in now[section].items()
        if isinstance(saved.get(section), dict)
        and saved[section].get(key, value) != value
        and f"{section}.{key}" not in NO_NUMBERS
    ]


def global_batch(config: dict[str, Any]) -> int:
    """Return the sequences per step of a run's config, 0 if it does not say."""
    try:
        train, parallel = config["train"], config["parallel"]
        return int(train["batch"] * train["accumulate"] * (parallel["ranks"] // parallel["tp"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return 0
