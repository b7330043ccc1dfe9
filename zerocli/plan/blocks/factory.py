"""Foreign models, which a function or transformers builds: counted on the meta device, where they take no memory."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from zerocli.config import ModelConfig
from zerocli.errors import UserError

if TYPE_CHECKING:
    from torch import nn


WANTED = "package.module:function, a function that takes no arguments and returns the model"


def build_factory(factory: str, device: str = "meta") -> nn.Module:
    """Return the module that `package.module:callable` builds, by default on meta; UserError if it cannot.

    Only the command line can name the function: no code named in a config file is run.
    """
    import torch
    from torch import nn

    module, _, name = factory.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        with torch.device(device):
            model = found()  # type: ignore[operator]
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot import {factory}: {error}", hint="the folder that holds it, as PYTHONPATH") from error
    except (Exception, SystemExit) as error:
        fact = f"{factory} failed: {type(error).__name__}: {error}"
        raise UserError(fact, hint=WANTED) from error
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(model, nn.Module):
        raise UserError(f"{factory} returned {type(model).__name__}, not an nn.Module", hint=WANTED)
    return model


def build_external(model: ModelConfig, seq: int, device: str = "meta") -> nn.Module:
    """Return the model that a factory or transformers builds, by default on meta; UserError if it cannot."""
    if model.factory:
        return build_factory(model.factory, device)
    from zerocli.models import build_model

    return build_model(model, seq, device)


def count_external(model: ModelConfig, seq: int) -> int:
    """Return the parameters of the model that a factory or transformers builds."""
    return sum(each.numel() for each in build_external(model, seq).parameters())


def count_both(factory: str) -> tuple[int, int]:
    """Return the parameters of the model that a factory builds, and how many of them are frozen."""
    parameters = list(build_factory(factory).parameters())
    frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    return sum(each.numel() for each in parameters), frozen
