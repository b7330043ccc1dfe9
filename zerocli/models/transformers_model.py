"""Causal language models of `transformers`, trained as they are: its module and its code, with our arguments.

`build` returns the very module that transformers makes of a config, with the names of its parameters; only its class
gets a `forward(tokens, targets, positions)` on top, like that of our own models. Where the family's logits are nothing
but `hidden @ head.T` (`has_plain_head` proves it), the head computes the loss itself, chunk by chunk, and the whole
logits never exist.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerocli.config import file as configfile
from zerocli.config import hub, quantized
from zerocli.engine.units.divide import repeated_blocks
from zerocli.errors import Refused, UserError
from zerocli.models.loss import IGNORED, linear_cross_entropy

FACTORY = "zerocli train package.module:factory, with a function that builds the model and whose forward gives the loss"
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers whose mask keeps documents apart; a layer with a running state would carry one into the next."""

CACHES = ("past_key_values", "cache_params", "state")
"""Names under which models of transformers return what they keep for the next token, and take it."""

_OWN_MASKS = "{} does not keep packed documents apart: it makes its masks itself"


def build(folder: str, seq: int, device: str | torch.device = "meta") -> nn.Module:
    """Return the causal language model of a folder's config in training mode; UserError if there is none.

    On the meta device it takes no memory; elsewhere it has random weights.
    """
    if not hub.installed():
        raise UserError(f"{folder}: transformers is not installed", hint="pip install 'zerocli[hf]'")
    config = read(folder)
    with hub.offline():
        kind = _class_of(config, folder)
        try:
            with torch.device(device):
                model: nn.Module = kind(config)
        except Exception as error:  # whatever the family's own code raises
            fact = f"transformers cannot build {config.model_type}: {type(error).__name__}: {hub.first_line(error)}"
            raise UserError(fact) from error
        _refuse_other_losses(model, folder)
        _take_any_width(model)
        longest = hub.max_positions(config)
        if longest and seq > longest:
            raise UserError(f"seq {seq} is beyond the {longest} positions the model was made for", hint="--seq")
        model.__dict__["takes"] = frozenset(inspect.signature(model.forward).parameters)
        model.__dict__["computes_loss"] = has_plain_head(model)
    if model.__dict__["computes_loss"]:
        output_head(model).__class__ = LossHead
    model.__class__ = _causal_class(type(model))  # type: ignore[arg-type]
    return model.train()


def read(folder: str) -> Any:
    """Return the config of a folder as transformers reads it, for training: nothing cached, nothing else returned."""
    path = hub.config_path(folder)
    values, places, _ = configfile.read_values(path)
    quantized.refuse(path, values)
    config = hub.read_config(hub.ConfigFile(values, places, path))
    for each in (config, config.get_text_config()):
        for name, value in (("use_cache", False), ("return_dict", True), ("output_hidden_states", False)):
            if hasattr(each, name):
                setattr(each, name, value)
        if getattr(each, "output_attentions", False):
            each.output_attentions = False
    return config


def _class_of(config: Any, folder: str) -> Any:
    """Return the class that AutoModelForCausalLM takes for this config; UserError if it is not a causal model."""
    import transformers
    from transformers.models.auto import modeling_auto

    def refuse(fact: str) -> UserError:
        return UserError(f"{folder}: {config.model_type} {fact}", hint=FACTORY)

    found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if config.is_encoder_decoder:
        raise refuse("is an encoder-decoder, not a causal language model")
    if not found:
        raise refuse("is not a causal language model of transformers")
    masked = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked and not getattr(config, "is_decoder", False):
        raise refuse("attends to both sides: it is no causal language model unless its config says is_decoder")
    return getattr(transformers, found if isinstance(found, str) else found[0])


def _take_any_width(model: Any) -> None:
    """Let experts of any width compute in 16 bits: torch's grouped product needs rows of a multiple of 16 bytes."""
    sides = [side for name, each in model.named_parameters() if "experts" in name for side in each.shape[1:]]
    ways: dict[str, str] = getattr(model, "get_experts_implementation", dict)()  # which transformers 4 has not
    if any(side % 8 for side in sides) and "grouped_mm" in ways.values():
        model.set_experts_implementation("batched_mm")


def _refuse_other_losses(model: Any, folder: str) -> None:
    """Raise UserError if transformers would train the model by another loss than ours."""
    loss = getattr(model, "loss_function", None)
    name = getattr(getattr(loss, "func", loss), "__name__", "ForCausalLMLoss")
    if name != "ForCausalLMLoss":
        raise UserError(f"{folder}: {type(model).__name__} has a loss of its own, {name}", hint=FACTORY)
    if _routes(model) and _router_coefficient(model) is None:
        fact = "output_router_logits, and it does not say how much the balance of its experts counts in the loss"
        raise UserError(f"{folder}: {type(model).__name__}: {fact}", hint='"output_router_logits": false')


# -- the module ------------------------------------------------------------------------------------------------------


class LossHead(nn.Linear):
    """A model's output layer; with `targets` set it returns the loss instead of the logits."""

    targets: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.targets is None:
            return F.linear(input, self.weight)
        return linear_cross_entropy(input, self.weight, self.targets)


class Cache:
    """What transformers itself keeps of the tokens before: keys and values, or the states of a recurrent model."""

    def __init__(self, takes: frozenset[str]) -> None:
        self._given: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in takes:
            self._given["logits_to_keep"] = 1

    def run(self, forward: Callable[..., Tensor], tokens: Tensor) -> Tensor:
        """Return the logits that transformers' own `forward` gives for tokens that follow those before."""
        output: Any = forward(input_ids=tokens, **self._given)
        kept = {name: getattr(output, name, None) for name in CACHES}
        self._given |= {name: value for name, value in kept.items() if value is not None}
        if not self._given.keys() & set(CACHES):
            raise Refused("the model keeps nothing of the tokens before, though it takes use_cache")
        logits: Tensor = output.logits
        return logits


class CausalLM(nn.Module):
    """What a class of transformers gets on top of it: `forward` and units like those of our own models."""

    computes_loss: bool
    """Whether the head is a `LossHead`."""
    takes: frozenset[str]
    """The arguments of transformers' own forward."""

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the mean loss of (batch, seq) targets in fp32, or without targets the (batch, seq, vocab) logits.

        Targets of -100 do not count. `positions` restart at 0 with each document; attention stays within one. With a
        `cache` the tokens follow those in it, and at least the last one's logits are returned.
        """
        theirs: Callable[..., Any] = super().forward  # transformers' own
        if cache is not None:
            return cache.run(theirs, tokens)
        own: dict[str, Any] = {"use_cache": False} if "use_cache" in self.takes else {}
        if positions is not None:
            _refuse_states(self)
            own["position_ids"] = positions
        if targets is not None and _routes(self):
            own["output_router_logits"] = True
        with keeping_apart(positions) as masks, self._head_computes(targets):
            output = theirs(input_ids=tokens, **own)
        if positions is not None and not masks:
            raise Refused(_OWN_MASKS.format(type(self).__name__))
        logits: Tensor = output.logits
        if targets is None:
            return logits
        loss = logits if self.computes_loss else cross_entropy(logits, targets)
        if _routes(self):
            if output.aux_loss is None:
                raise Refused(f"{type(self).__name__} gave no aux_loss, though its config has output_router_logits")
            loss = loss + _router_coefficient(self) * output.aux_loss.float()
        return loss

    def make_cache(self, capacity: int) -> Cache | None:
        """Return an empty cache of this model; None if it has none."""
        return Cache(self.takes) if "use_cache" in self.takes else None

    @contextlib.contextmanager
    def _head_computes(self, targets: Tensor | None) -> Iterator[None]:
        """While the body runs, the head returns the loss of these targets, if it can."""
        head: Any = output_head(self) if self.computes_loss else None
        if head is not None:
            head.targets = targets
        try:
            yield
        finally:
            if head is not None:
                head.targets = None

    def unit_modules(self) -> list[nn.Module] | None:
        """Return the modules that are units: the repeated blocks, and embedding and head if they are not tied."""
        blocks = [module for _, module in repeated_blocks(self)]
        if not blocks:  # a model of one block
            names = set(getattr(self, "_no_split_modules", None) or ())
            blocks = [module for module in self.modules() if type(module).__name__ in names]
        head, embedding = output_head(self), input_embedding(self)
        inside = {id(p) for block in blocks for p in block.parameters()}
        if not self.computes_loss or embedding is None:
            return blocks or None
        ends = [*embedding.parameters(), *head.parameters()]
        if len({id(p) for p in ends}) < len(ends) or inside.intersection(map(id, ends)):
            return blocks or None
        return [embedding, *blocks, head]


@functools.cache
def _causal_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class with our forward on top, under its own name: transformers looks names up."""
    return type(kind.__name__, (CausalLM, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def output_head(model: nn.Module) -> Any:
    """Return the output layer; None if the model does not name one."""
    return model.get_output_embeddings()  # type: ignore[operator]


def input_embedding(model: nn.Module) -> Any:
    """Return the table of tokens; None if the model does not name one."""
    try:
        return model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over targets that count, in fp32; 0 if none does."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp_min(1)


def _routes(model: Any) -> bool:
    """Return whether the config makes the balance of a mixture's experts a part of the loss."""
    return bool(getattr(model.config, "output_router_logits", False))


def _router_coefficient(model: Any) -> Any:
    return getattr(model, "router_aux_loss_coef", getattr(model.config, "router_aux_loss_coef", None))


# -- the head --------------------------------------------------------------------------------------------------------


def has_plain_head(model: nn.Module) -> bool:
    """Return whether the logits are exactly `hidden @ head.weight.T`: no bias, scale or cap before or after it.

    transformers' own forward runs once on the meta device, around a body that returns a known tensor. It is plain if
    the head gets that tensor's memory, unchanged, and the head's output is returned as it is, also where it is a loss.
    """
    head, body = output_head(model), getattr(model, "base_model", model)
    if type(head) is not nn.Linear or head.bias is not None or body is model:
        return False
    with torch.device("meta"):
        hidden, given = torch.empty(1, 2, head.in_features), torch.zeros(1, 2, dtype=torch.int64)
    for made in (torch.empty(1, 2, head.out_features, device="meta"), torch.empty((), device="meta")):
        seen: list[Tensor] = []

        def answer(x: Tensor, made: Tensor = made, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x)
            return made

        before = hidden._version, made._version
        try:
            with _instead(body, _Answer(hidden)), _instead(head, answer), torch.no_grad():
                output = model(input_ids=given)
            same = len(seen) == 1 and _same_memory(seen[0], hidden) and _same_memory(output.logits, made)
        except Exception:  # the family's code does something else with its head
            return False
        if not same or (hidden._version, made._version) != before:
            return False
    return True


class _Answer:
    """A body's output: a known tensor, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __call__(self, *args: Any, **kwargs: Any) -> _Answer:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward while the body runs."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _same_memory(left: Any, right: Tensor) -> bool:
    return (
        isinstance(left, Tensor)
        and left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and (left.shape, left.stride(), left.storage_offset()) == (right.shape, right.stride(), right.storage_offset())
    )


# -- documents -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def keeping_apart(positions: Tensor | None) -> Iterator[list[Any]]:
    """While the body runs, masks keep apart the documents of these positions; yields a list of the masks made.

    Without positions each row is one document.
    transformers finds documents in the positions itself. It asks a GPU whether there are any, though, which makes the
    host wait in every forward, so it is told here.
    """
    made: list[Any] = []
    try:
        masking: Any = importlib.import_module("transformers.masking_utils")
        before = masking.find_packed_sequence_indices
    except (ImportError, AttributeError):  # an older version
        yield made
        return
    index = None
    if positions is not None:
        index = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def find(position_ids: Tensor) -> Tensor | None:
        made.append(position_ids)
        return index

    masking.find_packed_sequence_indices = find
    try:
        yield made
    finally:
        masking.find_packed_sequence_indices = before


class _Reached(Exception):
    """The first block is about to run."""


def unpackable(model: Any) -> str:
    """Return why documents cannot share a window with this model, which is on the meta device; empty if they can.

    Masks are made before the first block, so its forward runs up to there.
    """

    def reach(*args: Any, **kwargs: Any) -> None:
        raise _Reached

    given = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    try:
        _refuse_states(model)
        with contextlib.ExitStack() as stack:
            masks = stack.enter_context(keeping_apart(given))
            for _, block in repeated_blocks(model):
                stack.enter_context(_instead(block, reach))
            with contextlib.suppress(_Reached), torch.no_grad():
                super(CausalLM, model).forward(input_ids=given, position_ids=given, use_cache=False)
    except Refused as error:
        return str(error)
    except Exception:  # of the family's own code, on the meta device: the run itself will tell
        return ""
    return "" if masks else _OWN_MASKS.format(type(model).__name__)


def _refuse_states(model: Any) -> None:
    """Raise Refused if packed documents would not be kept apart by masks."""
    config = model.config.get_text_config()
    other = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(ATTENTION))
    if getattr(model, "_is_stateful", False) or other:
        what = f"layers of type {other[0]}" if other else "layers with a running state"
        raise Refused(f"{type(model).__name__} has {what}, which carry one packed document into the next")
    if "position_ids" not in model.takes:
        raise Refused(f"{type(model).__name__} takes no positions, so documents cannot be packed")
