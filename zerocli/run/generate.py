"""`zerocli generate` in one rank: a frozen, sharded model from a checkpoint or a folder, and the text it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from zerocli.checkpoint import loader
from zerocli.checkpoint.export import candidates
from zerocli.checkpoint.imports import load_weights
from zerocli.checkpoint.manifest import Damaged, Unreadable, read
from zerocli.checkpoint.state import Mismatch
from zerocli.config import Config, hub
from zerocli.config.file import read_values
from zerocli.config.options import RunOptions
from zerocli.console import printable, say, show_json, silence_stdout
from zerocli.data.prompts import Prompt
from zerocli.data.texts import CHAT_KINDS, Codec, open_codec
from zerocli.engine.engine import Engine
from zerocli.errors import FAILURE, OK, UserError
from zerocli.layout.sizes import count_of, format_count
from zerocli.run.complete import PADDED_TO, Sampling, complete
from zerocli.run.engines import make_engine, make_model
from zerocli.run.folders.resume import start_adapters
from zerocli.run.processes.watchdog import Watchdog
from zerocli.run.trainer import join_ranks

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Weights:
    """Where the weights are: a run (or one checkpoint of it), or a folder of safetensors."""

    path: str
    is_run: bool
    step: int | None = None
    """The checkpoint of this step; None = the newest."""
    positions: int = 0
    """The longest sequence that a folder's model was made for; 0 = not known."""


@dataclass(frozen=True)
class Asked:
    """What is asked for: the prompts, and how each is continued."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    fixed: bool = False
    """Whether the user gave the most tokens; else fewer are made where a model has fewer positions."""
    several: bool = False
    """Whether the prompts are of a file."""
    stops: tuple[str, ...] = ()
    """A text ends before any of these."""
    chat: bool | None = None
    """Whether prompts are messages; None = if the run was trained on such."""


class Start(NamedTuple):
    """A prompt as the model gets it."""

    prompt: Prompt
    ids: list[int]
    shown: str
    """What is printed before the text that is made."""
    max_tokens: int


def work(config: Config, weights: Weights, asked: Asked, as_json: bool, run_dir: str) -> int:
    """Run one rank of a generation; rank 0 prints the text on stdout. Return the exit code."""
    codec = open_codec(config, "" if weights.is_run else weights.path)
    tell = say if int(os.environ.get("RANK", "0")) == 0 else (lambda text: None)
    starts = encode_prompts(config, weights, asked, codec, tell)
    config = with_window(config, weights, max(len(each.ids) + each.max_tokens for each in starts))
    with Watchdog(config.train.watchdog, run_dir) as watchdog:
        join_ranks(config, RunOptions(run_dir), watchdog, shared=False)
        rank = dist.get_rank() if dist.is_initialized() else 0
        model = make_model(config)
        model.requires_grad_(False)  # no gradients and no optimizer states
        engine = make_engine(config, model, compile=False, watch=watchdog.attach)
        load(engine, config, weights, tell)
        made = [_print(engine, config, codec, start, asked, rank == 0 and not as_json) for start in starts]
        if rank == 0 and as_json:
            show_json({"schema": 1, **({"texts": made} if asked.several else made[0])})
        if rank == 0:
            tokens, seconds = sum(len(each["tokens"]) for each in made), sum(each["seconds"] for each in made)
            say(f"{count_of(tokens, 'token')} in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s)")
        watchdog.close()
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return OK


def encode_prompts(config: Config, weights: Weights, asked: Asked, codec: Codec, tell: Tell) -> list[Start]:
    """Return the ids of all prompts and how many may follow each; raise UserError if one cannot be continued."""
    kind = trained_on(weights)
    chat = asked.chat if asked.chat is not None else kind in CHAT_KINDS
    if chat and asked.chat is None:
        tell(f"chat: the run was trained on {kind} (--plain continues the prompt as it is)")
    if chat:
        codec.open_chat(kind)
    most, starts = longest(config, weights), []
    for prompt in asked.prompts:
        text, ids = codec.encode_chat(prompt) if chat else (prompt.text, codec.encode(prompt.text))
        if not ids:
            raise UserError(f"{prompt.place} is empty", hint="a prompt of at least one token")
        refuse_unknown(ids, config)
        room = refuse_long(prompt, len(ids), most, asked, tell)
        shown = text if not chat else f"{prompt.text}\n" if asked.several else ""
        starts.append(Start(prompt, ids, shown, room))
    return starts


def refuse_long(prompt: Prompt, length: int, most: int, asked: Asked, tell: Tell) -> int:
    """Return how many tokens may follow a prompt; UserError if it, or what the user asks for, is too long."""
    wanted = asked.sampling.max_tokens
    if not most or length + wanted <= most:
        return wanted
    fact = f"{prompt.place} has {count_of(length, 'token')}, and the model has {most} positions"
    if length >= most:
        raise UserError(f"{fact}: nothing can follow", hint="a shorter prompt")
    room = most - length
    if asked.fixed:
        raise UserError(f"{fact}: {count_of(room, 'token')} can follow, not {wanted}", hint=f"--max-tokens {room}")
    tell(f"{fact}: at most {count_of(room, 'token')} can follow")
    return room


def trained_on(weights: Weights) -> str:
    """Return the kind of rows that a run was trained on; empty if nobody knows, as of a folder."""
    for path in candidates(weights.path, weights.step) if weights.is_run else []:
        with contextlib.suppress(Damaged, Unreadable):
            return str(read(path).values.get("kind", ""))
    return ""


def longest(config: Config, weights: Weights) -> int:
    """Return the most tokens that the model takes; 0 = no bound is known."""
    if weights.positions or config.model.code == "transformers":
        return weights.positions
    return config.model.positions or config.train.seq


def refuse_unknown(ids: list[int], config: Config) -> None:
    """Raise UserError if the prompt has ids that the model does not know: the tokenizer is another model's."""
    if not config.model.external and max(ids) >= config.model.vocab:
        raise UserError(
            f"the prompt has token id {max(ids)}, and the model knows 0 to {config.model.vocab - 1}: "
            f"its tokenizer is another one than {config.data.tokenizer or 'bytes'}",
            hint="--set data.tokenizer=PATH of its tokenizer.json",
        )


def with_window(config: Config, weights: Weights, needed: int) -> Config:
    """Return the config with the length that the model is built for: what is needed, as far as its positions allow."""
    positions = weights.positions or config.model.positions
    seq = config.train.seq
    if positions:
        wanted = -(-needed // PADDED_TO) * PADDED_TO
        seq = min(positions, max(seq, wanted) if weights.is_run else wanted)
    elif config.model.code == "transformers":
        seq = needed
    return config.with_values({"train.seq": seq})


def load(engine: Engine, config: Config, weights: Weights, tell: Tell) -> None:
    """Fill the engine; say from where. Collective."""
    sharded = f"stage {config.zero.stage} on {count_of(engine.collectives.world, 'rank')}, {engine.precision.name}"
    if not weights.is_run:
        names = load_weights(engine, weights.path, config.model)
        start_adapters(engine, config, tell)
        tell(f"{format_count(engine.numel)} parameters from {weights.path}, {names}; {sharded}")
        return
    found = candidates(weights.path, weights.step)
    if engine.settings.loaded_base is not None and config.train.init_from:
        load_weights(engine, config.train.init_from, config.model)
    for path in found:
        try:
            loader.load(engine, path, training=False)
        except Damaged as error:
            tell(f"{path.name} skipped: {error}")
        except Unreadable as error:
            raise UserError(str(error), exit_code=FAILURE) from None
        except Mismatch as error:
            raise UserError(f"{path}: is of another model than its run's config: {error}", exit_code=FAILURE) from None
        else:
            tell(f"{format_count(engine.numel)} parameters from {path}; {sharded}")
            return
    fact = f"{weights.path}: none of its {len(found)} checkpoints is whole"
    raise UserError(fact, hint="another copy of the run; what is left of it cannot be used", exit_code=FAILURE)


def _print(engine: Engine, config: Config, codec: Codec, start: Start, asked: Asked, prints: bool) -> dict[str, Any]:
    """Generate, print the prompt with what follows it as it comes, and return what the JSON document says of it."""
    began = time.perf_counter()
    stream = Stream(prints, asked.stops)
    stream.write(start.shown)
    sampling = dataclasses.replace(asked.sampling, max_tokens=start.max_tokens)
    made: list[int] = []
    text, stopped = "", False
    for each in complete(engine, start.ids, sampling, config.train.seq, codec.ends):
        made.append(each)
        text, stopped = cut(codec.continuation(start.ids, made), asked.stops)
        if stopped:
            break
        stream.follow(text)
    stream.end(text)
    if prints and asked.several:
        stream.write("\n")
    about = {"prompt": start.prompt.text, "text": text, "tokens": made, "prompt_tokens": start.ids}
    ended = "stop" if stopped else "length" if len(made) == start.max_tokens else "end"
    return {**about, "ended": ended, "seconds": time.perf_counter() - began}


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first of `stops` in it, and whether one is in it."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


class Stream:
    """Prints a text that grows; its end is held back while it may change: half a character, the begin of a stop."""

    def __init__(self, active: bool, stops: Sequence[str] = ()) -> None:
        self._active, self._printed, self._stops = active, 0, stops

    def write(self, text: str) -> None:
        if self._active:
            try:
                sys.stdout.write(printable(text))
                sys.stdout.flush()
            except BrokenPipeError:  # whoever has read enough of it fails nothing
                self._active = False
                silence_stdout()

    def follow(self, text: str) -> None:
        """Print what is new in `text`."""
        if not text.endswith("\ufffd"):
            begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
            sure = max(self._printed, len(text) - max(begun, default=0))
            self.write(text[self._printed : sure])
            self._printed = sure

    def end(self, text: str) -> None:
        self.write(text[self._printed :] + "\n")


def positions_of(folder: str) -> int:
    """Return the longest sequence that the model of a Hugging Face folder was made for; 0 = it does not say."""
    if not folder:
        return 0
    with contextlib.suppress(UserError):
        values, _, _ = read_values(hub.config_path(folder))
        return hub.size_of(values, *hub.POSITIONS, "seq_length")
    return 0
