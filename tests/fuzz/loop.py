"""The training loop of a program: one order of operations for both sides, and the record of what each saw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fuzz.model import Boom, Model, forward, losses, make_batch
from fuzz.program import Event, Pass, Program, Step


class Invalid(Exception):
    """The program is not one that plain torch could run: nothing is expected of it."""


class Stopped(Exception):
    """The other side refused this operation; the program ends before it."""


class Side(ABC):
    """A way to run a program for some ranks. Records are (label, value), by rank, in the program's order."""

    def __init__(self, program: Program, ranks: tuple[int, ...]) -> None:
        self.program, self.ranks = program, ranks
        self.at = 0
        """The step that runs."""
        self.held: dict[int, Any] = {}
        """By rank: the output of the first forward, if the model keeps it."""
        self.records: dict[int, list[tuple[str, Any]]] = {rank: [] for rank in ranks}
        self.label = "shard"
        self.stop_at = ""

    def note(self, rank: int, what: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().float().numpy().copy()
        self.records[rank].append((f"{self.label}: {what}", value))

    def begin(self, label: str) -> None:
        self.label = label
        if label == self.stop_at:
            raise Stopped

    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        """Surround what draws random numbers on a rank."""
        return nullcontext()

    @property
    def trained(self) -> tuple[int, ...]:
        """Which models this step trains."""
        second = self.program.second
        if second is None or second.link == "frozen":
            return (0,)
        return (self.at % 2,) if second.link == "alternate" else (0, 1)

    @abstractmethod
    def models(self, rank: int) -> list[Model]: ...

    @abstractmethod
    def forward(self, rank: int, batch: dict[str, Any]) -> Any: ...

    @abstractmethod
    def backward(self, rank: int, loss: torch.Tensor, retain: bool = False) -> None: ...

    @abstractmethod
    def zero_grad(self, after_error: bool = False) -> None: ...

    @abstractmethod
    def step(self) -> Any: ...

    @abstractmethod
    def state(self, rank: int) -> dict[str, Any]: ...

    @abstractmethod
    def averaged(self, rank: int) -> dict[str, Any]:
        """Update the average of the first model, and return its state."""

    @abstractmethod
    def event(self, event: Event, step: int, number: int) -> None: ...

    @abstractmethod
    def must_refuse(self, what: str, operation: Callable[[], Any]) -> None: ...


def run(side: Side) -> None:
    """Run the program on one side; at its end, and where a permitted refusal ended it, note the state."""
    try:
        for at, step in enumerate(side.program.steps):
            run_step(side, at, step)
    except Stopped:
        pass
    side.label = "end"
    for rank in side.ranks:
        side.note(rank, "state", side.state(rank))


def run_step(side: Side, at: int, step: Step) -> None:
    side.at = at
    if side.program.second and side.program.second.link == "alternate":
        for rank in side.ranks:
            side.models(rank)[1].requires_grad_(at % 2 == 1)
    for number, event in enumerate(step.before):
        side.begin(f"step {at} event {number} {event.kind}")
        side.event(event, at, 50 + number)
    if step.uneven and UNEVEN in side.ranks:
        side.begin(f"step {at} uneven {step.uneven}")
        run_uneven(side, at, step.uneven)
    if side.program.setting.streamed:  # as most loops do, while updates of the step before may still be made
        side.begin(f"step {at} zero_grad")
        side.zero_grad()
    made = 0
    for number, one in enumerate(step.passes):
        side.begin(f"step {at} pass {number} {one.kind}")
        left_out = (UNEVEN,) if step.uneven == "fewer" and number == 0 else ()
        made = run_pass(side, at, number, one, made, left_out)
    if not made:
        return
    second = side.program.second
    for number, event in enumerate(step.after):
        if event.kind == "hand_grad" and second and second.link == "alternate" and at % 2:
            continue  # the first model has no gradients in such a step
        side.begin(f"step {at} after {number} {event.kind}")
        side.event(event, at, 70 + number)
    stale: dict[int, torch.Tensor] = {}
    if step.stale:
        side.begin(f"step {at} stale forward")
        for rank in side.ranks:
            stale[rank] = train_forward(side, at, 90, rank)[0]
    side.begin(f"step {at} step")
    if step.uneven == "no_step" and side.ranks == (UNEVEN,):
        return
    norm = side.step()
    for rank in side.ranks:
        side.note(rank, "gradient norm", norm)
        read_aliases(side, rank)
    for rank in side.ranks if side.program.setting.average and not side.program.uneven else ():
        side.note(rank, "average", side.averaged(rank))
    if step.stale:
        side.begin(f"step {at} stale backward")
        rank = side.ranks[0]
        side.must_refuse("backward of a graph older than the step", lambda: side.backward(rank, stale[rank]))


UNEVEN = 1
"""The rank that does more or less than the others."""


def run_uneven(side: Side, at: int, kind: str) -> None:
    """Do what one rank alone does before the passes of a step."""
    if kind == "forward":
        train_forward(side, at, 40, UNEVEN)
    elif kind == "no_grad":
        with torch.no_grad():
            train_forward(side, at, 40, UNEVEN)
    elif kind == "more":
        side.backward(UNEVEN, train_forward(side, at, 40, UNEVEN)[0])
    elif kind == "state":
        side.note(UNEVEN, "state", side.state(UNEVEN))
    elif kind == "freeze":
        side.models(UNEVEN)[0].blocks[0].requires_grad_(False)


def read_aliases(side: Side, rank: int) -> None:
    model = side.models(rank)[0]
    for index, alias in enumerate(side.program.aliases):
        made = model.aliases[index] if alias.listed else getattr(model, f"alias_{index}")
        if alias.use == "loop" and made is not None:
            side.note(rank, f"alias {index}", made)


def train_forward(side: Side, at: int, number: int, rank: int, **batch_options: Any) -> tuple[torch.Tensor, ...]:
    batch = make_batch(side.program, at, number, rank, **batch_options)
    result = side.forward(rank, batch)
    if side.program.returns == "kept" and side.program.entry != "outside":
        held = side.held.setdefault(rank, result)
        side.note(rank, "the model's own output", result is side.models(rank)[0].result and result is held)
        side.note(rank, "calls seen in the first output", float(held["calls"]))
    if side.program.fills:
        side.note(rank, "tensors in the list", float(len(batch["more"]["sink"])))
    pair = losses(result, batch)
    side.note(rank, "loss", pair[0])
    return pair


def run_pass(side: Side, at: int, number: int, one: Pass, made: int, left_out: tuple[int, ...] = ()) -> int:
    """Run one pass on each rank; return the backward passes that the step's gradients are of."""
    if one.kind == "zero_grad":
        side.zero_grad()
        return 0
    if one.kind == "plain_backward":
        kept = {rank: train_forward(side, at, number, rank)[0] for rank in side.ranks}
        side.must_refuse("loss.backward()", lambda: next(iter(kept.values())).backward())
        return made
    if one.kind in ("fail_forward", "fail_backward"):
        raised = [_fails(side, at, number, rank, one) for rank in side.ranks]
        if any(raised) != all(raised):
            raise Invalid("only one rank fails")
        if one.kind == "fail_forward":
            return made
        if not raised[0]:
            raise Invalid("a backward that was to fail does not")
        side.zero_grad(after_error=True)
        return 0
    for rank in side.ranks:
        if rank not in left_out:
            PASSES[one.kind](side, at, number, rank)
    return made + BACKWARDS[one.kind]


def _fails(side: Side, at: int, number: int, rank: int, one: Pass) -> bool:
    options = {"fails": one.kind.removeprefix("fail_"), "fails_at": one.at}
    try:
        loss = train_forward(side, at, number, rank, **options)[0]
        side.backward(rank, loss)
    except Boom:
        side.note(rank, "raised", True)
        return True
    return False


def _train(side: Side, at: int, number: int, rank: int) -> None:
    side.backward(rank, train_forward(side, at, number, rank)[0])


def _drop(side: Side, at: int, number: int, rank: int) -> None:
    train_forward(side, at, number, rank)


def _again(side: Side, at: int, number: int, rank: int) -> None:
    loss = train_forward(side, at, number, rank)[0]
    side.backward(rank, loss, retain=True)
    side.backward(rank, loss)


def _two(side: Side, at: int, number: int, rank: int) -> None:
    first, second = train_forward(side, at, number, rank)
    side.backward(rank, first, retain=True)
    side.backward(rank, second)


def _both(side: Side, at: int, number: int, rank: int) -> None:
    kept = [train_forward(side, at, number + extra, rank)[0] for extra in (0, 20)]
    for loss in kept:
        side.backward(rank, loss)


def _both_reversed(side: Side, at: int, number: int, rank: int) -> None:
    kept = [train_forward(side, at, number + extra, rank)[0] for extra in (0, 20)]
    for loss in reversed(kept):
        side.backward(rank, loss)


def _leaf(side: Side, at: int, number: int, rank: int) -> None:
    batch = make_batch(side.program, at, number, rank)
    batch["x"].requires_grad_()
    side.backward(rank, losses(side.forward(rank, batch), batch)[0])
    side.note(rank, "gradient of the input", batch["x"].grad)


def _penalty(side: Side, at: int, number: int, rank: int) -> None:
    batch = make_batch(side.program, at, number, rank)
    batch["x"].requires_grad_()
    loss, other = losses(side.forward(rank, batch), batch)
    (grad,) = torch.autograd.grad(other, batch["x"], create_graph=True, allow_unused=True)
    if grad is not None:
        loss = loss + grad.square().sum()
    side.note(rank, "loss", loss)
    side.backward(rank, loss)


PASSES: dict[str, Callable[[Side, int, int, int], None]] = {
    "train": _train,
    "drop": _drop,
    "again": _again,
    "two": _two,
    "both": _both,
    "both_reversed": _both_reversed,
    "leaf": _leaf,
    "penalty": _penalty,
}
BACKWARDS = {"train": 1, "drop": 0, "again": 2, "two": 2, "both": 2, "both_reversed": 2, "leaf": 1, "penalty": 1}


@torch.no_grad()
def edit(parameters: Iterable[torch.Tensor]) -> None:
    """Change parameters in place, by more than bf16 rounds."""
    for p in parameters:
        p.mul_(0.5).add_(0.1)


@torch.no_grad()
def note_copy(side: Side, model: Model, rank: int, step: int, number: int) -> None:
    """Note what a copy of the model gives, as it is and after an edit of its own parameters."""
    side.note(rank, "loss of the copy", evaluate(side, model, rank, step, number))
    edit(model.parameters())
    side.note(rank, "loss of the copy, edited", evaluate(side, model, rank, step, number))


def evaluate(side: Side, model: Model, rank: int, step: int, number: int, call: Any = None) -> torch.Tensor:
    """Return what the model gives without gradients."""
    batch = make_batch(side.program, step, number, rank)
    with side.as_rank(rank):
        result = forward(model, side.program, batch, call)
    return losses(result, batch)[0]


def changed_state(state: Mapping[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """Return another state of the model; buffers, which each rank has its own of, become equal on all ranks."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: v * 0.5 + 0.1 if name in parameters else torch.full_like(v, 3) for name, v in state.items()}
