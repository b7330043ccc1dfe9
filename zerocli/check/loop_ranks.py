"""The ranks of `zerocli.check`: each runs a user's loop again and again, in plain torch and under an engine."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from zerocli.check.compare import FP32_ROUNDING
from zerocli.check.plain import move_by_one_rounding
from zerocli.check.replica import Replica, plain_optimizer
from zerocli.check.rows import Row
from zerocli.errors import Refused, UserError

Numbers = dict[str, torch.Tensor]
LOSSES, NORMS, YIELDED = "losses", "gradient norms", "yielded values"


@dataclass(frozen=True)
class Spec:
    """What is checked, as it travels to the ranks."""

    make_model: Callable[[], nn.Module]
    loop: Callable[..., Any]
    optimizer: Any
    lr: Any
    weight_decay: float | None
    settings: Mapping[str, Any]
    """Further keywords of `shard`."""
    options: Mapping[str, Any]
    """Those of them that are the optimizer's."""
    seed: int
    device: str


@dataclass(frozen=True)
class Job:
    """One run: a row, or plain torch (None), with each weight moved by one rounding or not."""

    row: Row | None = None
    moved: bool = False


def serve(rank: int, world: int, folder: str, connection: Any, packed: bytes) -> None:
    """Run jobs until the connection is closed; answer each with (verdict, numbers or message)."""
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    spec: Spec = pickle.loads(packed)
    connection.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # the parent is gone, or done with us
        answer: tuple[str, Any]
        try:
            answer = ("ok", run(spec, job, folder))
        except (Refused, UserError) as error:
            answer = ("refused", str(error))
        except BaseException as error:
            answer = ("error", f"{type(error).__name__}: {error}{_where(error)}")
        connection.send_bytes(pickle.dumps(answer))


def run(spec: Spec, job: Job, folder: str) -> Numbers:
    """Run the loop once on this rank; return all numbers that must be equal."""
    rank = dist.get_rank()
    _seed(spec.seed)
    model = spec.make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model returned {type(model).__name__}, not an nn.Module")
    device = _device(spec.device, rank)
    model.to(device)
    if job.moved:
        floats = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        move_by_one_rounding(floats, FP32_ROUNDING)
    if job.row is None:
        optimizer = plain_optimizer(model, spec.optimizer, spec.lr, spec.weight_decay, spec.options)
        engine: Any = Replica(model, optimizer, spec.settings.get("clip"), spec.lr)
    else:
        engine = _sharded(spec, job.row, model, device, folder)

    record = _Record(engine)
    try:
        _seed(spec.seed + 1 + rank)
        record.follow(spec.loop, rank)
        return record.numbers(engine)
    finally:
        with contextlib.suppress(Exception):  # report the original failure
            engine.close()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def _device(name: str, rank: int) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def _sharded(spec: Spec, row: Row, model: nn.Module, device: torch.device, folder: str) -> Any:
    from zerocli.engine.api import shard

    choice = spec.optimizer
    if not isinstance(choice, str | type):
        choice = choice(list(model.parameters()))
    asked: dict[str, Any] = {"nvme_path": (folder,), "offload": row.offload, "recompute": row.recompute}
    if spec.weight_decay is not None:
        asked["weight_decay"] = spec.weight_decay
    asked |= dict(spec.settings) | {"options": dict(spec.options), "precision": "fp32", "device": device}
    return shard(model, choice, spec.lr, row.stage, **asked)


class _Record:
    """What a loop does with an engine: every loss of a backward, every norm of a step, and what the loop gives."""

    def __init__(self, engine: Any) -> None:
        self.values: dict[str, list[torch.Tensor]] = {LOSSES: [], NORMS: [], YIELDED: []}
        backward, step = engine.backward, engine.step

        def recorded_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.values[LOSSES].append(_flat(loss))
            return backward(loss, *args, **kwargs)

        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.values[NORMS].append(_flat(result.grad_norm))
            return result

        engine.backward, engine.step = recorded_backward, recorded_step
        self.engine = engine

    def follow(self, loop: Callable[..., Any], rank: int) -> None:
        """Call the loop; keep what it yields or returns."""
        given = loop(self.engine, rank) if _takes_rank(loop) else loop(self.engine)
        numbers = torch.Tensor | bool | int | float
        for value in given if inspect.isgenerator(given) else [given]:
            self.values[YIELDED] += [_flat(leaf) for leaf in tree_leaves(value) if isinstance(leaf, numbers)]

    def numbers(self, engine: Any) -> Numbers:
        """Return everything to compare, by name. Collective."""
        found = {name: torch.cat(values) for name, values in self.values.items() if values}
        state = engine.state_dict()
        return found | {name: _flat(value) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _takes_rank(loop: Callable[..., Any]) -> bool:
    parameters = inspect.signature(loop).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind == p.VAR_POSITIONAL for p in parameters)


def _flat(value: Any) -> torch.Tensor:
    flat = torch.as_tensor(value).detach().to("cpu", copy=True).reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()


def _where(error: BaseException) -> str:
    """Return the last line of the user's or our code that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename != __file__]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
