"""Models that formulas do not describe, as a plan takes them: traced, or counted where they cannot be traced.

A trace of a Hugging Face config takes a second and transformers some more, so both are done once: what was found is
kept in the user's cache, under everything that it depends on.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerocli import __version__, machine
from zerocli.config import Config, hub
from zerocli.errors import UserError
from zerocli.plan.blocks import hugging
from zerocli.plan.blocks.inputs import Source, model_of, run_shape
from zerocli.plan.blocks.lora import left_out
from zerocli.plan.blocks.program import FORMAT, Program
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.model import Model
from zerocli.plan.models.traced import Traced, trace
from zerocli.plan.setup import Setup
from zerocli.regular_files import read_regular, write_text

MAX_NBYTES = 64 << 20


def run_model(config: Config, setup: Setup) -> Model:
    """Return the built-in model that a run trains: its formulas, or a trace where these leave out what it computes."""
    return trace_built_in(config, config.train.seq, setup) if left_out(config) else Formula(run_shape(config))


def trace_built_in(config: Config, seq: int, setup: Setup) -> Traced:
    """Trace a config's built-in model, for sequences of up to `seq` tokens, with its adapters."""

    def make() -> Any:
        from zerocli.models import build
        from zerocli.models.lora import adapted

        return adapted(build(config.model, seq, "meta"), config)

    return trace(config.name, make, setup)


def plan_source(source: Source, traced: bool, setup: Setup, notes: list[str]) -> Model | None:
    """Return the model of a config that only transformers can build, None if `source` is another one.

    It is traced if it runs on fake tensors; otherwise its exact number of parameters is returned. `notes` say which.
    With `traced` this includes families that have a shape but are not built in.
    """
    if source.file is None:
        return None
    if source.shape is not None and not (traced and hub.installed() and model_of(source.shape) is None):
        return None
    if setup.tp > 1:
        raise UserError(f"--tp {setup.tp}: models of transformers are not split over ranks", hint="--tp 1")
    traces = Traces(source.name, source.file, source.config)
    found = traces.find(setup)
    if found.program is None:
        notes.append(f"{found.kind} of transformers is counted: model states alone; activations are not counted, since")
        notes.append(f"  its step could not be traced: {found.problem}")
        return Counted(found.numel)
    notes.append(f"{found.kind} of transformers, traced on tensors without memory, with a CPU's operations")
    if found.has_images:
        notes.append("traced on text alone: the activations of images are not counted")
    return Traced(traces.describe, setup, resizable=True, longest=found.longest)


@dataclass(frozen=True)
class Found:
    """What is known of a model of transformers."""

    kind: str
    """The name of its class."""
    numel: int
    longest: int
    """The longest sequence that it supports; 0: it does not say."""
    has_images: bool
    program: Program | None = None
    problem: str = ""
    """Why it could not be traced."""


class Traces:
    """The traces of one config, one of each batch and precision; those in the user's cache need no torch."""

    def __init__(self, name: str, file: hub.ConfigFile, config: Config) -> None:
        self._name, self._file, self._run = name, file, config

    def describe(self, setup: Setup) -> Program:
        """Return the program of a setup; UserError if it cannot be traced."""
        found = self.find(setup)
        if found.program is None:
            raise UserError(f"its step could not be traced: {found.problem}")
        return found.program

    def find(self, setup: Setup) -> Found:
        """Return what is in the cache; else trace, and keep what was found."""
        path = self._path(setup)
        try:
            values = json.loads(read_regular(path, MAX_NBYTES))
            program = values.pop("program")
            return Found(**values, program=Program.of(program) if program else None)
        except (OSError, ValueError, TypeError, KeyError, LookupError, UserError):
            found = self._trace(setup)
        values = vars(found) | {"program": found.program and found.program.as_dict()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(values), sync=False)
        except OSError:
            pass  # a cache that cannot be written costs the next command a second
        return found

    def _path(self, setup: Setup) -> Path:
        """Return the file of a trace: its name stands for everything that the trace depends on."""
        versions = [machine.version(name) or "" for name in ("torch", "transformers")]
        asked: list[Any] = [setup.batch, setup.seq, setup.precision, setup.device]
        if self._run.lora.rank:
            asked.append(repr(self._run.lora))
        key = json.dumps([FORMAT, __version__, versions, asked, self._file.values], sort_keys=True, default=str)
        return machine.cache_folder() / "traces" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    @functools.cached_property
    def _config(self) -> Any:
        return hub.read_config(self._file)

    def _trace(self, setup: Setup) -> Found:
        from zerocli.models.lora import adapted
        from zerocli.plan.models.record import record

        config = self._config
        model = adapted(hugging.build(config), self._run)
        known: dict[str, Any] = {
            "kind": type(model).__name__,
            "numel": sum(each.numel() for each in model.parameters()),
            "longest": hub.max_positions(config),
            "has_images": config.get_text_config() is not config,
        }
        try:
            with hub.offline():
                return Found(**known, program=record(self._name, model, setup, loss))
        except Exception as error:  # whatever the model's own code raises on tensors without values
            return Found(**known, problem=hub.first_line(error)[:200])


def loss(model: Any, setup: Setup) -> Any:
    """Run a model of transformers on a batch that it takes, and return its loss."""
    from zerocli.models.transformers_model import keeping_apart

    # On tensors without values models could not tell that a row is one document.
    with keeping_apart(None):
        return hugging.loss_of(model(**hugging.batch_of(model, setup.batch, setup.seq)))
