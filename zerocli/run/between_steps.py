"""What a run does between two steps if asked: evaluations and samples. Neither changes a number of training."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from zerocli.config import Config
from zerocli.config.options import RunOptions
from zerocli.console import say
from zerocli.data.held_out import HeldOut
from zerocli.data.texts import Codec, open_codec
from zerocli.engine.engine import Engine
from zerocli.regular_files import lines_of, open_regular, write_text
from zerocli.run.complete import Sampling, complete
from zerocli.run.evaluate import Evaluated, Evaluations, evaluate
from zerocli.run.output.writers import Writers

SAMPLES = "samples.jsonl"
"""In the run folder: one line per sample."""


class BetweenSteps:
    """Evaluates and samples when due; all calls are collective."""

    def __init__(
        self, config: Config, options: RunOptions, engine: Engine, held_out: HeldOut | None, rank: int, first: int
    ) -> None:
        self._config, self._engine, self._held_out = config, engine, held_out
        self._run_dir, self._tells = Path(options.run_dir), rank == 0
        self.writers = Writers()
        self.evaluations = Evaluations(options.run_dir, writes=rank == 0)
        if held_out is not None:
            self.evaluations.resume(engine, first - 1)
        if self._tells:
            drop_after(self._run_dir / SAMPLES, first - 1)

    def due(self, step: int, last: int) -> bool:
        """Return whether anything is to be done after `step`, of a run that ends with step `last`."""
        return self._evaluates(step, last) or self._samples(step)

    def _evaluates(self, step: int, last: int) -> bool:
        every = self._config.train.eval_every
        return self._held_out is not None and (step == last or bool(every and step % every == 0))

    def _samples(self, step: int) -> bool:
        every = self._config.train.sample_every
        return bool(every and step % every == 0)

    def run(self, step: int, last: int) -> Evaluated | None:
        """Do what is due; return the evaluation if it is the best so far."""
        best = None
        if self._evaluates(step, last):
            best = self._evaluate(step)
        if self._samples(step):
            self._sample(step)
        return best

    def _evaluate(self, step: int) -> Evaluated | None:
        assert self._held_out is not None
        row = evaluate(self._engine, self._held_out, step, self._config.train.eval_batches)
        self.evaluations.add(row)
        is_best = self.evaluations.best is row
        if self._tells:
            self.writers.evaluation(row)
            lowest = "" if is_best or self.evaluations.best is None else f", lowest {self.evaluations.best.loss:.4f}"
            say(
                f"evaluation after step {step}: loss {row.loss:.4f}, perplexity {row.perplexity:.4g}{lowest} "
                f"({row.tokens:,} tokens in {row.seconds:.1f} s)"
            )
        return row if is_best else None

    @functools.cached_property
    def _codec(self) -> Codec:
        return open_codec(self._config)

    def _sample(self, step: int) -> None:
        train = self._config.train
        prompt = train.sample_prompt or "\n"
        codec = self._codec
        ids = codec.encode(prompt)[: train.seq - 1]
        sampling = Sampling(min(train.sample_tokens, train.seq - len(ids)), temperature=0.8, seed=train.seed)
        text = codec.continuation(ids, list(complete(self._engine, ids, sampling, train.seq, codec.ends)))
        if self._tells:
            line = json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n"
            fd = open_regular(self._run_dir / SAMPLES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(fd, "ab") as file:
                file.write(line.encode())
            say(f"sample after step {step}: {prompt.lstrip()}{text}")


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of a file that are of later steps, which a resumed run writes again."""
    if not path.exists():
        return
    kept = []
    for line in lines_of(path):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line.decode())
        except (ValueError, TypeError, KeyError):
            continue
    write_text(path, "".join(kept))
