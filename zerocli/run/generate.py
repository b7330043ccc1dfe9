"""`zerocli generate` in one rank: a frozen, sharded model from a checkpoint or a folder, and the text it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zerocli.checkpoint.export import candidates
from zerocli.checkpoint.imports import load_weights
from zerocli.checkpoint.loader import load_parameters
from zerocli.checkpoint.manifest import Damaged, Unreadable
from zerocli.checkpoint.state import Mismatch
from zerocli.config import Config, hub
from zerocli.config.file import read_values
from zerocli.console import printable, say, show_json, silence_stdout
from zerocli.data.texts import Codec, open_codec
from zerocli.engine.engine import Engine
from zerocli.errors import FAILURE, OK, UserError
from zerocli.layout.sizes import count_of, format_count
from zerocli.run.complete import PADDED_TO, Sampling, complete
from zerocli.run.processes.watchdog import Watchdog, end_process
from zerocli.run.trainer import join_ranks, make_engine, make_model


@dataclass(frozen=True)
class Weights:
    """Where the weights are: a run (or one checkpoint of it), or a folder of safetensors."""

    path: str
    is_run: bool
    step: int | None = None
    """The checkpoint of this step; None = the newest."""
    positions: int = 0
    """The longest sequence that a folder's model was made for; 0 = not known."""


def work(config: Config, weights: Weights, prompt: str, sampling: Sampling, as_json: bool, run_dir: str) -> int:
    """Run one rank of a generation; rank 0 prints the text on stdout. Return the exit code."""
    codec = open_codec(config, "" if weights.is_run else weights.path)
    ids = codec.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty", hint="a prompt of at least one token")
    refuse_unknown(ids, config)
    config = with_window(config, weights, len(ids) + sampling.max_tokens)
    watchdog = Watchdog(None, config.train.watchdog, lambda text: end_process(text, run_dir))
    with watchdog:
        join_ranks(config, watchdog)
        rank = dist.get_rank() if dist.is_initialized() else 0
        model = make_model(config)
        model.requires_grad_(False)  # no gradients and no optimizer states
        engine = make_engine(config, model, compile=False, watch=watchdog.attach)
        tell = say if rank == 0 else (lambda text: None)
        load(engine, config, weights, tell)
        _print(engine, config, codec, prompt, ids, sampling, rank == 0, as_json)
        watchdog.close()
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return OK


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
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seq=seq))


def load(engine: Engine, config: Config, weights: Weights, tell: Any) -> None:
    """Fill the engine; say from where. Collective."""
    sharded = f"stage {config.zero.stage} on {count_of(engine.collectives.world, 'rank')}, {engine.precision.name}"
    if not weights.is_run:
        names = load_weights(engine, weights.path, config.model)
        tell(f"{format_count(engine.numel)} parameters from {weights.path}, {names}; {sharded}")
        return
    found = candidates(weights.path, weights.step)
    for path in found:
        try:
            load_parameters(engine, path)
        except Damaged as error:
            tell(f"{path.name} skipped: {error}")
        except Unreadable as error:
            raise UserError(str(error), exit_code=FAILURE) from None
        except Mismatch as error:
            raise UserError(f"{path}: is of another model than its run's config: {error}", exit_code=FAILURE) from None
        else:
            tell(f"{format_count(engine.numel)} parameters from {path}; {sharded}")
            return
    raise UserError(f"{weights.path}: none of its {len(found)} checkpoints is whole", exit_code=FAILURE)


def _print(
    engine: Engine,
    config: Config,
    codec: Codec,
    prompt: str,
    ids: list[int],
    sampling: Sampling,
    prints: bool,
    as_json: bool,
) -> None:
    """Generate, and print the prompt with what follows it as it comes, or one JSON document at the end."""
    began = time.perf_counter()
    stream = Stream(prints and not as_json)
    stream.write(prompt)
    made: list[int] = []
    for each in complete(engine, ids, sampling, config.train.seq, codec.ends):
        made.append(each)
        stream.follow(codec.continuation(ids, made))
    text = codec.continuation(ids, made)
    stream.end(text)
    seconds = time.perf_counter() - began
    if prints and as_json:
        about = {"prompt": prompt, "text": text, "tokens": made, "prompt_tokens": ids, "seconds": seconds}
        show_json({"schema": 1, **about})
    if prints:
        say(f"{count_of(len(made), 'token')} in {seconds:.1f} s ({len(made) / seconds:.1f} tokens/s)")


class Stream:
    """Prints a text that grows; the end of one that may still change (half a character) is held back."""

    def __init__(self, active: bool) -> None:
        self._active, self._printed = active, 0

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
            self.write(text[self._printed :])
            self._printed = len(text)

    def end(self, text: str) -> None:
        self.write(text[self._printed :] + "\n")


def positions_of(folder: str) -> int:
    """Return the longest sequence that the model of a Hugging Face folder was made for; 0 = it does not say."""
    with contextlib.suppress(UserError):
        values, _, _ = read_values(hub.config_path(folder))
        return hub.size_of(values, *hub.POSITIONS, "seq_length")
    return 0
