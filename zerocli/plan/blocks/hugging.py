"""Models that a Hugging Face `config.json` describes, built by `transformers` on the meta device: any family it has.

`zerocli.config.hub` reads the file, which is data: no code outside the installed packages runs, and nothing is
downloaded.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from zerocli.config.hub import first_line, offline
from zerocli.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

AUTO_CLASSES = (
    *("MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"),
    *("MODEL_FOR_MASKED_LM", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL"),
)
"""Tables of transformers that are asked in this order for a config without `architectures`.

The more special task comes first: BERT is in the table of causal models too, Gemma 3 in that of text models.
"""


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
