"""The ranks of a check: the unsharded run on rank 0, then every row on all ranks, each compared when it ends."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerocli.check.compare import Differences, Gap, Outcome, Tolerance, differences, rounding
from zerocli.check.plain import NotPlain, Plain, train
from zerocli.check.rows import COMPILED_FACTOR, FACTOR, Checklist, Row
from zerocli.checkpoint.imports import load_weights
from zerocli.config import Config, read_placement
from zerocli.console import progress, say
from zerocli.data.sources import open_batches, with_packing
from zerocli.engine.api import open_process_group
from zerocli.engine.engine import Engine
from zerocli.engine.precision import precision
from zerocli.errors import DOES_NOT_FIT, FAILURE, USAGE, Refused, UserError
from zerocli.models.lora import adapted
from zerocli.plan.blocks.factory import build_external
from zerocli.run.engines import cap_device, make_engine, make_model, resolve
from zerocli.run.output import report
from zerocli.run.steps import micro_steps

Result = dict[str, Any]
GRACE_SECONDS = 10.0
"""How long a rank whose row failed waits for the others: one that is stuck in a collective never arrives."""
REFERENCE_SECONDS = 24 * 3600.0
_MEETINGS = itertools.count()
"""Every rank reaches the same synchronisation points in one order; each number is used once in the store."""


def work(config: Config, checklist: Checklist, keep: Callable[[Result], None]) -> None:
    """Run one rank of a check; rank 0 passes `keep` the reference first, then each row's result.

    Returns early, with rows left, after a row that failed on only some ranks: new processes must continue.
    """
    open_process_group()
    clean = Ranks(config, checklist.steps).run(checklist, keep)
    if clean and dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """What every row of a check shares on one rank."""

    def __init__(self, config: Config, steps: int) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.config, self.steps = resolve(config, self.world), steps
        self.replicas = self.world // config.parallel.tp
        self.config = with_packing(self.config)[0]
        self.batches = open_batches(self.config, check=self.rank == 0)
        cap_device(self.config)
        self.alone = dist.new_group([0]) if dist.is_initialized() else None
        self.built = "meta"
        self._bits: dict[int, tuple[str, Row]] = {}

    def run(self, checklist: Checklist, keep: Callable[[Result], None]) -> bool:
        """Run the rows in turn; return whether the ranks are still synchronised at the end. Collective."""
        start = self._start()
        reference = tolerance = None
        if self.rank == 0 and checklist.first == 0:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            say(report.precision_line(self.config.train.precision, device))
            say(f"training {self.steps} steps without sharding, which {len(checklist.rows)} rows are compared with")
        if self.rank == 0:
            reference, tolerance, about = self._reference(start)
            keep(about)
        self._meet(None, REFERENCE_SECONDS)
        del start
        for index, row in enumerate(checklist.rows):
            if index < checklist.first:
                continue
            began = time.perf_counter()
            outcome, failure = self._row(row)
            seconds = REFERENCE_SECONDS if failure is None else GRACE_SECONDS
            failed, alike = self._meet(failure, seconds)
            if self.rank == 0:
                assert reference is not None and tolerance is not None
                result = failed or self._verdict(row, outcome, reference, tolerance)
                keep({"row": index, **result, "seconds": time.perf_counter() - began})
            if not alike:
                return False
            del outcome
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return True

    # -- models ----------------------------------------------------------------------------------------------------

    def _start(self) -> dict[str, torch.Tensor]:
        """Return the initial values of `zerocli train`, or the model's own if it cannot be built so. Collective."""
        try:
            engine = self._engine(Row(0))
        except UserError as error:
            if not self.config.model.external or error.exit_code != USAGE:
                raise
            self.built = "cpu"
            if self.rank == 0:
                say(f"note: built on the CPU with its own initial values, as it cannot be on the meta device: {error}")
            engine = self._engine(Row(0))
        start = engine.state_dict()
        engine.close()
        return start

    def _engine(self, row: Row) -> Engine:
        values = {"zero.stage": row.stage, "offload.placement": read_placement(row.offload)}
        values["activations.policy"] = "recompute" if row.recompute else "keep"
        config = self.config.with_values({**values, "model.compile": row.compiled})
        model = self._whole_model() if self.built == "cpu" else make_model(config)
        engine = make_engine(config, model, empty=bool(config.train.init_from))
        if config.train.init_from:
            load_weights(engine, config.train.init_from, config.model)
        return engine

    def _whole_model(self) -> nn.Module:
        """Return the model with memory, as without sharding."""
        torch.manual_seed(self.config.train.seed)
        if self.config.model.external:
            return adapted(build_external(self.config.model, self.config.train.seq, "cpu"), self.config)
        return make_model(self.config, "cpu")

    # -- runs ------------------------------------------------------------------------------------------------------

    def _micro_steps(self, run: Any, step: int, replicas: range, device: torch.device) -> Iterator[torch.Tensor]:
        return micro_steps(run, self.batches, self.config, step, replicas, self.replicas, device)

    def _reference(self, start: dict[str, torch.Tensor]) -> tuple[Outcome, Tolerance, Result]:
        """Return the unsharded run, the effect of rounding on it, and notes on both."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        chosen, reason = precision(self.config.train.precision, device)
        by, note = "plain torch", ""
        try:
            passes = 2 * self.steps * self.config.train.accumulate * self.replicas
            with progress("training without sharding", passes, "pass") as count:
                outcome, moved = (self._unsharded(start, device, off, count) for off in (False, True))
        except NotPlain as error:
            by, note = "the engine on one rank", str(error)
            outcome, moved = (self._by_engine(start, off * rounding(chosen.compute)) for off in (0, 1))
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise UserError(f"the unsharded run does not fit: {error}", exit_code=DOES_NOT_FIT) from error
            raise UserError(
                f"the model fails without sharding: {type(error).__name__}: {error}", exit_code=FAILURE
            ) from error
        for step, loss in enumerate(outcome.losses, start=1):
            if not math.isfinite(loss):
                raise UserError(
                    f"the unsharded loss is {loss} at step {step}: there is nothing to compare with",
                    hint="a lower --set optimizer.lr=..., or another --precision",
                    exit_code=FAILURE,
                )
        if outcome.skipped == self.steps:
            raise UserError(
                f"all {self.steps} steps overflowed in {chosen.name} and were skipped: nothing was trained",
                hint=f"--steps {self.steps + 8}",
            )
        tolerance = Tolerance(rounding(chosen.compute), differences(moved, outcome))
        about = {
            "reference": by,
            "note": note,
            "parameters": sum(each.numel() for each in outcome.parameters.values()),
            "precision": chosen.name,
            "precision_reason": reason,
            "device": device.type,
            "ranks": self.world,
            "skipped": outcome.skipped,
            "rounding": tolerance.rounding,
            "noise": _numbers(tolerance.noise),
            "losses": outcome.losses,
        }
        return outcome, tolerance, about

    def _unsharded(
        self, start: dict[str, torch.Tensor], device: torch.device, off: bool, count: Callable[[int], None]
    ) -> Outcome:
        """Return the numbers of plain torch; `count` is called after each forward and backward."""
        config = self.config

        chosen, _ = precision(config.train.precision, device)
        passes = config.train.accumulate * self.replicas
        about = (config.optimizer, config.train.steps, chosen, config.train.clip, passes, device, off)
        run = Plain(self._whole_model(), start, *about)
        passes_of = functools.partial(self._micro_steps, run, replicas=range(self.replicas), device=device)
        return run.outcome(*train(run, self.steps, passes_of, count))

    def _by_engine(self, start: dict[str, torch.Tensor], off: float) -> Outcome:
        """Return the unsharded run of an optimizer that torch does not have."""
        passes = self.config.train.accumulate * self.replicas
        engine = make_engine(self.config, stage=0, accumulate=passes, group=self.alone, tp=1, shard_ranks=0, offload="")
        generator = torch.Generator().manual_seed(0)
        signs = {name: torch.randint(0, 2, v.shape, generator=generator) * 2 - 1 for name, v in start.items()}
        moved = {name: v * (1 + signs[name] * off) if v.is_floating_point() else v for name, v in start.items()}
        tied = (
            dict(engine.model.named_parameters(remove_duplicate=False)).keys()
            - dict(engine.model.named_parameters()).keys()
        )
        engine.load_state_dict({name: v for name, v in moved.items() if name not in tied})  # one name of each weight
        return self._train(engine, range(self.replicas), engine.collectives.world)

    def _train(self, engine: Engine, replicas: range, world: int) -> Outcome:
        """Return the numbers of the steps, the mean of all ranks' losses among them. Collective."""
        losses, norms, skipped = [], [], 0
        for step in range(1, self.steps + 1):
            found = list(self._micro_steps(engine, step, replicas, engine.device))
            result = engine.step()
            total = torch.stack([loss.double() for loss in found]).sum()
            sums = engine.gather_control(total.reshape(1))
            losses.append((sums.sum() / (sums.numel() * len(found))).item())
            norms.append(result.grad_norm.item())
            skipped += int(result.skipped.item())
        parameters = {name: value.float() for name, value in engine.state_dict().items() if value.is_floating_point()}
        states = engine.optimizer_state_dict()["state"]
        return Outcome(losses, norms, parameters, states, skipped)

    def _row(self, row: Row) -> tuple[Outcome | None, Result | None]:
        """Return the row's numbers, or how it failed here."""
        engine = None
        try:
            engine = self._engine(row)
            replica = engine.collectives.rank
            outcome = self._train(engine, range(replica, replica + 1), self.world)
            engine.close()
            return outcome, None
        except Exception as error:
            if engine is not None:
                with contextlib.suppress(Exception):  # report the original failure
                    engine.close()
            refused = isinstance(error, UserError | Refused)
            text = str(error) if refused else f"{type(error).__name__}: {error}"
            return None, {"verdict": "refused" if refused else "error", "message": text}
        finally:
            if row.compiled:
                torch._dynamo.reset()

    def _meet(self, mine: Result | None, seconds: float) -> tuple[Result | None, bool]:
        """Return the first failure of any rank, once all have arrived here, and whether all ended the same way.

        Uses the store: ranks that failed at different places must not enter a collective. Raises on a rank that failed
        if the others do not arrive.
        """
        if self.world == 1:
            return mine, True
        store = dist.distributed_c10d._get_default_store()
        meeting = next(_MEETINGS)
        keys = [f"zerocli/check/{meeting}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], json.dumps(mine))
        try:
            store.wait(keys, datetime.timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            assert mine is not None
            raise UserError(f"rank {self.rank} alone: {mine['message']}", exit_code=FAILURE) from error
        found = [json.loads(store.get(key)) for key in keys]
        failures = [(rank, each) for rank, each in enumerate(found) if each is not None]
        if not failures:
            return None, True
        alike = all(each == found[0] for each in found)
        rank, first = failures[0]
        return first if alike else first | {"message": f"rank {rank} alone: {first['message']}"}, alike

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _verdict(self, row: Row, outcome: Outcome | None, reference: Outcome, tolerance: Tolerance) -> Result:
        assert outcome is not None
        outcome.parameters = {name: outcome.parameters[name] for name in reference.parameters}  # no buffers
        found = differences(outcome, reference)
        factor = COMPILED_FACTOR if row.compiled else FACTOR
        tensor, number = tolerance.first_over(found, factor), tolerance.first_step(found, factor)
        result: Result = {"verdict": "equal", "message": "", "first": None, **_numbers(found)}
        result["digest"] = outcome.digest()
        if result["digest"] == reference.digest():
            result["verdict"] = "identical"
        if tensor is not None:
            gap, allowed = tensor
            result["first"] = _gap(gap) | {"allowed": _finite(allowed)}
        if number is not None:
            what, step, value, allowed = number
            result["message"] = f"{what} of step {step} is off by {value:.1e} of itself (allowed: {allowed:.1e})"
        if tensor is not None or number is not None:
            result["verdict"] = "differs"
        elif not row.compiled and (other := self._other_bits(row, result["digest"])) is not None:
            result["verdict"], result["message"] = "differs", f"not the same bits as {other}"
        return result

    def _other_bits(self, row: Row, digest: str) -> Row | None:
        """Return an earlier row that should be equal bit for bit, but is not.

        Placement and recomputation never change a number; nor does the stage, as long as sums have the same order: with
        two ranks, or two groups of two, and one backward pass. Kernels of a GPU may vary.
        """
        if torch.cuda.is_available():
            return None
        shards = self.config.parallel.shard_ranks or self.world
        same_sums = max(shards, self.world // shards) <= 2 and self.config.train.accumulate == 1
        expected, first = self._bits.setdefault(0 if same_sums else row.stage, (digest, row))
        return first if digest != expected else None


def _numbers(found: Differences) -> Result:
    parameter, array = found.largest(parameters=True), found.largest(parameters=False)
    return {
        "loss": _finite(found.loss),
        "grad_norm": _finite(found.norm),
        "parameters": _gap(parameter) if parameter else None,
        "optimizer": _gap(array) if array else None,
    }


def _gap(gap: Gap) -> Result:
    return {"name": gap.name, "what": gap.what, "relative": _finite(gap.relative), "absolute": _finite(gap.largest)}


def _finite(value: float) -> float | None:
    """Return the value for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else None
