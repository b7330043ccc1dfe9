"""Evaluation between steps: what it measures, and that training does not notice it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from commands import lines
from ranks import run_ranks

from zerocli import config as configs
from zerocli.checkpoint import best
from zerocli.checkpoint.folder import Folder
from zerocli.data.held_out import SamplePass, TokenPass, split_share, training_part
from zerocli.data.tokens import Part, TokenSource
from zerocli.engine.api import shard
from zerocli.errors import ConfigError, UserError
from zerocli.models import build
from zerocli.run.evaluate import Evaluated, Evaluations, best_of, evaluate, read

SPLIT = ["data.split=0.01", "train.eval_batches=3", "model.dropout=0.2"]


def evaluations(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def source(numel: int) -> TokenSource:
    return TokenSource([Part("ids", np.arange(numel) * 7919 % 61)], 64)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_evaluation_and_samples_never_change_training(tmp_path, stage):
    """Dropout on, deferred updates: losses, norms and bytes moved are those of a run without either."""
    sets = [*SPLIT, f"zero.stage={stage}"]
    plain = runs.train(tmp_path / "plain", *sets)
    sample = ["train.sample_every=3", "train.sample_tokens=3"]
    busy = runs.train(tmp_path / "busy", *sets, "train.eval_every=2", "checkpoint.best=true", *sample)
    assert plain.codes == busy.codes == [0, 0], plain.said + busy.said
    for name in ("loss", "grad_norm", "comm", "lr"):
        assert [row[name] for row in lines(tmp_path / "busy")] == [row[name] for row in lines(tmp_path / "plain")]
    assert [row["step"] for row in evaluations(tmp_path / "busy")] == [2, 4, 6]
    # The weights after the last step are the same, and so is their evaluation.
    last = [evaluations(tmp_path / name)[-1] for name in ("plain", "busy")]
    assert last[0]["loss"] == last[1]["loss"] and last[0]["tokens"] == 3 * 2 * 8
    assert math.isclose(last[0]["perplexity"], math.exp(last[0]["loss"]))
    samples = [json.loads(line) for line in (tmp_path / "busy/samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [3, 6]


def test_held_out_tokens_are_each_a_target_once_and_never_trained_on():
    whole = source(1003)
    config = configs.load("tiny", ["train.seq=8", "data.split=0.1"])
    training = training_part(whole, config)
    assert len(training) == 1003 - 100
    rest = training.rest()
    held = TokenPass(rest, batch=3, seq=8)
    batches = [held.batch(index) for index in range(held.num_batches)]
    targets = torch.cat([batch[1].flatten() for batch in batches])
    assert targets.tolist() == whole.slice(904, 99).tolist()  # the first held-out token is a context only
    assert [tuple(batch[0].shape) for batch in batches] == [(3, 8)] * 4 + [(1, 3)]
    with pytest.raises(IndexError):
        training.slice(900, 4)
    with pytest.raises(UserError, match="too few to hold out"):
        training_part(source(10), config)


def test_samples_of_one_pass_are_counted_once():
    class Samples:
        num_windows, positions = 5, True

        def take(self, samples: range) -> tuple[torch.Tensor, ...]:
            rows = torch.tensor([[index] for index in samples])
            return rows, rows

    held = SamplePass(Samples(), 2)
    assert held.positions
    assert torch.cat([held.batch(i)[0] for i in range(held.num_batches)]).flatten().tolist() == [0, 1, 2, 3, 4]


def _evaluated(stage: int, batch: int, limit: int) -> tuple[float, int]:
    torch.manual_seed(3)
    config = configs.load("tiny", ["model.layers=2", "model.hidden=16", "model.heads=2", "model.dropout=0.5"])
    model = build(config.model, 8)
    engine = shard(model, stage=stage, lr=1e-3)
    engine.load_state_dict(build_state(config))
    row = evaluate(engine, TokenPass(source(180), batch, 8), 1, limit)
    assert model.training and all(module.training for module in model.modules())
    return row.loss, row.tokens


def build_state(config: configs.Config) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return build(config.model, 8).state_dict()


def test_the_result_does_not_depend_on_ranks_or_batches():
    """179 targets: 22 windows and a rest of 3, in batches that no number of ranks divides."""
    one = run_ranks(1, _evaluated, 0, 3, 0)[0]
    two = run_ranks(2, _evaluated, 3, 3, 0)
    assert two == [one, one] and one[1] == 179  # bit for bit
    assert run_ranks(2, _evaluated, 2, 7, 0)[0][0] == pytest.approx(one[0], rel=1e-6)
    assert run_ranks(2, _evaluated, 0, 3, 1)[1][1] == 24  # a limit of fewer batches than ranks


@pytest.mark.long
def test_a_validation_file_is_evaluated_and_changes_no_data(tmp_path):
    (tmp_path / "held.txt").write_text("held out, every byte of it\n" * 5)
    plain = runs.train(tmp_path / "plain")
    ended = runs.train(tmp_path / "run", f"data.validation={tmp_path / 'held.txt'}", "train.accumulate=1")
    assert plain.codes == ended.codes == [0, 0], ended.said
    [row] = evaluations(tmp_path / "run")  # without eval_every, at the end
    assert row["step"] == 6 and row["tokens"] == 27 * 5 - 1 and "held.txt" in ended.said[0]
    assert [each["loss"] for each in lines(tmp_path / "run")] == [each["loss"] for each in lines(tmp_path / "plain")]


def test_a_run_ends_early_and_resumes_to_the_same_decision(tmp_path):
    """A rate of zero never improves: the first evaluation stays the best."""
    still = [*SPLIT, "train.eval_every=1", "train.patience=2", "optimizer.lr=0", "checkpoint.best=true"]
    ended = runs.train(tmp_path / "run", *still)
    assert ended.codes == [0, 0], ended.said
    assert "early stop at step 3: 2 evaluations without a lower loss" in ended.said[0]
    assert len(lines(tmp_path / "run")) == 3 and best.best_step(tmp_path / "run") == 1
    assert [found.step for found in Folder(tmp_path / "run/checkpoints").committed()] == [3, 2, 1]
    again = runs.train(tmp_path / "run", *still, resume=True)
    assert again.codes == [0, 0] and len(lines(tmp_path / "run")) == 3, again.said
    assert "early stop at step 3" in again.said[0]
    longer = runs.train(tmp_path / "run", *still[:-3], "train.patience=9", *still[-2:], resume=True)
    assert longer.codes == [0, 0] and lines(tmp_path / "run")[-1]["step"] == 6, longer.said
    assert [row["step"] for row in evaluations(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    # Kept beyond the two newest, as it is the best.
    assert [found.step for found in Folder(tmp_path / "run/checkpoints").committed()] == [6, 4, 1]


def test_a_resumed_run_forgets_evaluations_of_later_steps(tmp_path):
    rows = [Evaluated(step, loss, 1.0, 8, 0.1) for step, loss in ((2, 3.0), (4, 2.0), (6, 1.0))]
    kept = Evaluations(tmp_path, writes=True)
    for row in rows:
        kept.add(row)
    assert read(tmp_path / "eval.jsonl") == rows and kept.best == rows[2]
    with open(tmp_path / "eval.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    run_ranks(1, _resumed, str(tmp_path))
    assert read(tmp_path / "eval.jsonl") == rows[:2]
    assert best_of([Evaluated(1, math.nan, 1, 1, 1), *rows[:1]]) == rows[0]


def _resumed(folder: str) -> None:
    engine = shard(torch.nn.Linear(2, 2), stage=0, lr=0.1)
    kept = Evaluations(folder, writes=True)
    kept.resume(engine, 5)
    assert kept.best is not None and kept.best.step == 4 and kept.since_best == 0


def test_the_best_checkpoint_is_named_once_it_is_committed(tmp_path):
    kept = best.Best(tmp_path)
    kept.expect({"step": 4, "loss": 1.5})
    assert best.read(tmp_path) is None
    kept.commit(3)
    assert best.read(tmp_path) is None
    kept.commit(4)
    assert best.best_step(tmp_path) == 4 and kept.step == 4
    # A resume from step 3: step 4 belongs to a future that is trained again.
    for step in (2, 3):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step:08d}/manifest.json").touch()
    again = best.Best(tmp_path)
    again.resume(3, [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.9}])
    assert again.step == best.best_step(tmp_path) == 3
    best.Best(tmp_path).resume(0, [])
    with pytest.raises(UserError, match="did not keep its best"):
        best.best_step(tmp_path)


def test_keys_that_contradict_each_other_are_refused():
    assert split_share(configs.load("tiny", ["train.eval_every=5"])) == 0.05
    assert split_share(configs.load("tiny", ["train.eval_every=5", "data.validation=x"])) == 0
    for sets, fact in (
        (["train.patience=2"], "patience needs evaluations"),
        (["checkpoint.best=true"], "best needs evaluations"),
        (["data.split=0.1", "data.validation=x"], "one or the other"),
        (["train.log_to=tensorbord"], "did you mean tensorboard"),
    ):
        with pytest.raises(ConfigError, match=fact):
            configs.load("tiny", sets)
