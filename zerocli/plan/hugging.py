"""Models that a Hugging Face `config.json` describes, built by `transformers` on the meta device: any family it has.

The file is data. No code outside the installed packages runs, and nothing is downloaded: keys that name code, kernels
or other files (`HELD_BACK`) are left out, and the hub is offline while a model is built.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerocli.errors import ConfigError, Problem, UserError, closest, quote
from zerocli.plan.fields import MAX_LAYERS, MAX_SIZE

if TYPE_CHECKING:
    import torch
    from torch import nn

HELD_BACK = (
    *("auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "transformers_version"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("quantization_config", "use_pretrained_backbone", "use_kernels", "dtype", "torch_dtype"),
)
"""Keys that are not given to transformers: they name code or files, or say how weights are stored."""
AUTO_CLASSES = (
    *("MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"),
    *("MODEL_FOR_MASKED_LM", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL"),
)
"""Tables of transformers that are asked in this order for a config without `architectures`.

The more special task comes first: BERT is in the table of causal models too, Gemma 3 in that of text models.
"""


def installed() -> bool:
    """Return whether `transformers` can be imported; does not import it."""
    return importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True)
class ConfigFile:
    """The values of a `config.json` and the places of its keys."""

    values: Mapping[str, Any]
    places: Mapping[str, str]
    path: str


def read_config(file: ConfigFile) -> Any:
    """Return the config of a file as transformers reads it; ConfigError if it knows no such family."""
    values, places, path = file.values, file.places, file.path
    family = values.get("model_type")
    place = places.get("model_type", path)
    with offline():
        from transformers import CONFIG_MAPPING, AutoConfig

        known = list(CONFIG_MAPPING.keys())
        if family not in known:
            fact = f"model_type {quote(family)} is not one of the {len(known)} that transformers has"
            if "auto_map" in values:
                fact += "; auto_map names code that comes with the model, which is not run"
            hint = "zerocli fit package.module:factory --trace, with a function that builds the model"
            meant = closest(family, known) if isinstance(family, str) else ""
            raise ConfigError([Problem(place, fact, meant)], hint=hint)
        kept = _kept(values)
        if problems := list(_too_large(kept, places, path)):
            raise ConfigError(problems)
        kept.pop("model_type")
        try:
            return AutoConfig.for_model(family, **kept)
        except Exception as error:  # of any kind: the family's own checks
            raise ConfigError([Problem(path, f"transformers refuses it: {first_line(error)}")]) from error


def max_positions(config: Any) -> int:
    """Return the longest sequence that the model supports; 0 if its config does not say."""
    number = getattr(config.get_text_config(), "max_position_embeddings", 0)
    return number if isinstance(number, int) and number > 0 else 0


def build(config: Any) -> nn.Module:
    """Return the model of a config on the meta device, in training mode; UserError if transformers cannot build it."""
    import torch

    with offline():
        try:
            with torch.device("meta"):
                model: nn.Module = _class_of(config)(config)
        except Exception as error:
            fact = f"transformers cannot build {config.model_type}: {type(error).__name__}: {first_line(error)}"
            raise UserError(fact) from error
    return model.train()


def batch_of(model: Any, batch: int, seq: int) -> dict[str, Any]:
    """Return zeros that the model's forward takes, and labels where it has a loss of its own.

    Images have the config's size. An encoder-decoder has `seq` tokens on both sides.
    """
    import torch

    config, main = model.config, model.main_input_name
    text = config.get_text_config()
    takes = inspect.signature(model.forward).parameters
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    made: dict[str, Any] = {}
    if main == "pixel_values":
        size = config.image_size
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        made[main] = torch.zeros((batch, config.num_channels, high, wide))
        labels = tokens[:, 0]
    elif main == "input_features":
        made[main] = torch.zeros((batch, config.num_mel_bins, 2 * config.max_source_positions))
        labels = tokens[:, : min(seq, getattr(config, "max_target_positions", seq))]
    elif main == "input_ids":
        made[main] = tokens
        labels = tokens
    else:
        raise ValueError(f"{type(model).__name__} takes {main}: only tokens, images and audio features are known")
    if "labels" in takes:
        made["labels"] = labels
    elif text.is_encoder_decoder:
        made["decoder_input_ids"] = tokens
    if "use_cache" in takes:
        made["use_cache"] = False
    return made


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model's output; of a model without one, the sum of its first tensor."""
    loss: torch.Tensor | None = getattr(output, "loss", None)
    return loss if loss is not None else output[0].float().sum()


def _class_of(config: Any) -> Any:
    """Return the model class that the config names, or the first that transformers has for its family."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        found: Any = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
            continue
        kind: Any = getattr(found, "config_class", None)
        if kind is None or kind is type(config):
            return found
    for table in AUTO_CLASSES:
        names = getattr(modeling_auto, f"{table}_MAPPING_NAMES").get(config.model_type)
        if names:
            return getattr(transformers, names if isinstance(names, str) else names[0])
    raise ValueError("it has a config, but no model of its own")


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without `HELD_BACK`, at any depth."""
    return {
        key: _kept(value) if isinstance(value, dict) else value for key, value in values.items() if key not in HELD_BACK
    }


def _too_large(values: Mapping[str, Any], places: Mapping[str, str], path: str) -> Iterator[Problem]:
    """Yield a problem for each size that no model has: its modules would never be built."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _too_large(value, places, path)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = MAX_LAYERS if "layer" in key or "experts" in key else MAX_SIZE
            if value > most and "token" not in key:
                yield Problem(places.get(key, path), f"{key} {quote(value)} is more than {most}")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While the body runs, the Hugging Face hub is not asked, and transformers prints no warnings."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    logging: Any = importlib.import_module("transformers.utils.logging")
    before, level = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(level)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
