"""A Hugging Face config without a formula, as a plan takes it: traced, or counted where it cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerocli.errors import UserError
from zerocli.plan.blocks import hugging
from zerocli.plan.blocks.inputs import Source, model_of
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.model import Model
from zerocli.plan.setup import Setup

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


def plan_source(source: Source, traced: bool, setup: Setup, stages: Sequence[int], notes: list[str]) -> Model | None:
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
        found = _trace(source.name, config, setup, stages)
    except Exception as error:  # whatever the model's own code raises on tensors without values
        notes.append(f"{name} of transformers is counted: model states alone; activations are not counted, since")
        notes.append(f"  its step could not be traced: {hugging.first_line(error)[:200]}")
        return Counted(numel)
    notes.append(f"{name} of transformers, traced: the real engine on tensors without memory, with a CPU's operations")
    if config.get_text_config() is not config:
        notes.append("traced on text alone: the activations of images are not counted")
    return found


def _trace(name: str, config: Any, setup: Setup, stages: Sequence[int]) -> Model:
    from zerocli.plan.models.trace import kinds_of_step, trace

    with hugging.offline():
        return trace(name, lambda: hugging.build(config), kinds_of_step(setup, stages), loss, whole=False)


def loss(engine: Engine, setup: Setup) -> Any:
    """Run a model of transformers on a batch that it takes, and return its loss."""
    return hugging.loss_of(engine(**hugging.batch_of(engine.model, setup.batch, setup.seq)))
