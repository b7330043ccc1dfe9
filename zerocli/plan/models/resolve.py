"""A Hugging Face config without a formula, as a plan takes it: traced, or counted where it cannot be traced."""

from __future__ import annotations

from typing import Any

from zerocli.errors import UserError
from zerocli.plan.blocks import hugging
from zerocli.plan.blocks.inputs import Source, model_of
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.model import Model
from zerocli.plan.setup import Setup


def plan_source(source: Source, traced: bool, setup: Setup, notes: list[str]) -> Model | None:
    """Return the model of a config that only transformers can build, None if `source` is another one.

    It is traced if it runs on fake tensors; otherwise its exact number of parameters is returned. `notes` say which.
    With `traced` this includes families that have a shape but are not built in.
    """
    if source.file is None:
        return None
    if source.shape is not None and not (traced and hugging.installed() and model_of(source.shape) is None):
        return None
    if setup.tp > 1:
        raise UserError(f"--tp {setup.tp}: models of transformers are not split over ranks", hint="--tp 1")
    config = hugging.read_config(source.file)
    model = hugging.build(config)
    numel = sum(each.numel() for each in model.parameters())
    name = type(model).__name__
    try:
        found = _trace(source.name, config, setup)
    except Exception as error:  # whatever the model's own code raises on tensors without values
        notes.append(f"{name} of transformers is counted: model states alone; activations are not counted, since")
        notes.append(f"  its step could not be traced: {hugging.first_line(error)[:200]}")
        return Counted(numel)
    notes.append(f"{name} of transformers, traced on tensors without memory, with a CPU's operations")
    if config.get_text_config() is not config:
        notes.append("traced on text alone: the activations of images are not counted")
    return found


def _trace(name: str, config: Any, setup: Setup) -> Model:
    from zerocli.plan.models.traced import trace

    with hugging.offline():
        return trace(name, lambda: hugging.build(config), setup, loss)


def loss(model: Any, setup: Setup) -> Any:
    """Run a model of transformers on a batch that it takes, and return its loss."""
    with hugging.rows_of_one_document():
        return hugging.loss_of(model(**hugging.batch_of(model, setup.batch, setup.seq)))
