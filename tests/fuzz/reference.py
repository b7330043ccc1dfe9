"""What plain torch makes of a program: each rank's replica, the mean of their gradients, and torch's own optimizer."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fuzz.loop import Invalid, Side, changed_state, edit, evaluate, note_copy, run
from fuzz.model import Model, forward_both, make_models
from fuzz.program import WORLD, Event, Program, second_program
from fuzz.rules import make_optimizer

RANDOM = ("dropout", "random")


def seed_rank(rank: int) -> None:
    """Start the generators of a rank, torch's and Python's."""
    torch.manual_seed(1000 + rank)
    random.seed(rank)


class Replicas:
    """One model as plain data-parallel training has it: a copy on each rank, with its own optimizer and buffers."""

    def __init__(self, program: Program, models: list[Model]) -> None:
        self.program, self.models = program, models
        self.parameters = [list(model.parameters()) for model in models]
        self.optimizers = [make_optimizer(program, model) for model in models]
        self.zero_grad()

    def zero_grad(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        """Of the gradients of all ranks and passes, by the parameter's position."""
        self.passes = 0
        """Backward passes of all ranks."""
        for model in self.models:
            model.zero_grad()

    def collect(self, rank: int) -> None:
        """Take a rank's gradients."""
        for index, p in enumerate(self.parameters[rank]):
            if p.grad is not None:
                self.sums[index] = self.sums[index] + p.grad if index in self.sums else p.grad.clone()
                p.grad = None

    def means(self) -> dict[int, torch.Tensor]:
        return {index: total / self.passes for index, total in self.sums.items()}

    def step(self) -> float:
        """Update every replica; return the norm of the mean gradient."""
        means = self.means()
        grads = list(means.values())
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item() if grads else 0.0
        if self.program.setting.clip is not None:
            for grad in grads:
                grad.mul_(min(1.0, self.program.setting.clip / (norm + 1e-6)))
        for parameters, optimizer in zip(self.parameters, self.optimizers, strict=True):
            for index, mean in means.items():
                parameters[index].grad = mean.clone()
            optimizer.step()
        self.zero_grad()
        return norm


class Reference(Side):
    """Replicas that play all ranks in turn; `nudge` moves all weights by one rounding at the start."""

    def __init__(self, program: Program, stop_at: str = "", nudge: bool = False) -> None:
        super().__init__(program, tuple(range(WORLD)))
        self.stop_at = stop_at
        built = [make_models(program) for _ in self.ranks]
        self.note_all("dtypes", _dtypes(program, built[0][0]))
        for models in built:
            for model in models:
                model.float()
                if nudge:
                    _nudge(model)
        programs = [program, *([second_program(program)] if program.second else [])]
        self.nets = [Replicas(one, [models[i] for models in built]) for i, one in enumerate(programs)]
        self.averages = {
            id(p): p.detach().clone() for models in built for p in models[0].parameters() if p.requires_grad
        }
        """Of parameters that are or were trainable, by id."""
        self.averaging: set[int] = set()
        """Ranks that have averaged: the first time copies the parameters."""
        self.draws = any(kind in block.state for block in program.all_blocks for kind in RANDOM)
        self.generators: dict[int, tuple[torch.Tensor, Any]] = {}
        if self.draws:
            self._seed()

    def _seed(self) -> None:
        before = random.getstate()
        for rank in self.ranks:
            seed_rank(rank)
            self.generators[rank] = (torch.get_rng_state(), random.getstate())
        random.setstate(before)

    def models(self, rank: int) -> list[Model]:
        return [net.models[rank] for net in self.nets]

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        if not self.draws:
            yield
            return
        state, python = self.generators[rank]
        before = random.getstate()  # the test's own
        torch.set_rng_state(state)
        random.setstate(python)
        try:
            yield
        finally:
            self.generators[rank] = (torch.get_rng_state(), random.getstate())
            random.setstate(before)

    def forward(self, rank: int, batch: dict[str, Any]) -> Any:
        with self.as_rank(rank):
            models = self.models(rank)
            return forward_both(models, self.program, batch, models)

    def backward(self, rank: int, loss: torch.Tensor, retain: bool = False) -> None:
        if not loss.requires_grad:
            raise Invalid("a loss that no parameter leads to")
        for index in self.trained:
            self.nets[index].passes += 1
            most = WORLD * self.program.setting.accumulate + bool(self.program.uneven)
            if self.nets[index].passes > most:
                raise Invalid("more backward passes than accumulate allows")
        with self.as_rank(rank):  # a checkpoint of the user's own draws again
            loss.backward(retain_graph=retain)
        for net in self.nets:
            net.collect(rank)

    def zero_grad(self, after_error: bool = False) -> None:
        for net in self.nets:
            net.zero_grad()

    def step(self) -> Any:
        norms = [self.nets[index].step() for index in self.trained]
        return norms[0] if len(norms) == 1 else dict(enumerate(norms))

    def state(self, rank: int) -> dict[str, Any]:
        return {
            f"{index}.{name}" if index else name: value.float().numpy().copy()
            for index, model in enumerate(self.models(rank))
            for name, value in model.state_dict().items()
        }

    @torch.no_grad()
    def averaged(self, rank: int) -> dict[str, Any]:
        model, decay = self.models(rank)[0], self.program.setting.average
        named = dict(model.named_parameters(remove_duplicate=False))
        for p in model.parameters():
            if id(p) not in self.averages and p.requires_grad:
                self.averages[id(p)] = p.detach().clone()
            elif id(p) in self.averages:
                self.averages[id(p)].lerp_(p, 1 - decay if rank in self.averaging else 1.0)
        self.averaging.add(rank)
        state = {name: self.averages.get(id(named.get(name)), value) for name, value in model.state_dict().items()}
        return {name: value.float().numpy().copy() for name, value in state.items()}

    def must_refuse(self, what: str, operation: Callable[[], Any]) -> None:
        for rank in self.ranks:
            self.note(rank, what, "refused")

    def note_all(self, what: str, value: Any) -> None:
        for rank in self.ranks:
            self.note(rank, what, value)

    def event(self, event: Event, step: int, number: int) -> None:
        for rank in self.ranks:
            self._event(rank, event, step, number)

    @torch.no_grad()
    def _event(self, rank: int, event: Event, step: int, number: int) -> None:
        model = self.models(rank)[0]
        part = model.blocks[event.block % len(model.blocks)]
        match event.kind:
            case "freeze" | "unfreeze":
                part.requires_grad_(event.kind == "unfreeze")
            case "deepcopy" | "unsharded":
                note_copy(self, copy.deepcopy(model), rank, step, number)
            case "no_grad" | "inference":
                self.note(rank, "loss", evaluate(self, model, rank, step, number))
            case "state":
                self.note(rank, "state", self.state(rank))
            case "gathered":
                self.note(rank, "parameters", {n: p.float().numpy().copy() for n, p in model.named_parameters()})
            case "edit" | "plain_edit":
                edit(part.parameters())
            case "load" | "plain_load":
                model.load_state_dict(changed_state(model.state_dict(), model))
            case "grad":
                means, places = self.nets[0].means(), {id(p): i for i, p in enumerate(model.parameters())}
                for name, p in part.named_parameters():
                    self.note(rank, f"gradient of {name}", means.get(places[id(p)]))
            case "hand_grad":
                self.note(rank, "a gradient changed by hand", "refused")
            case "optimizer_state":
                pass
            case _:
                raise AssertionError(event)


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.mul_(1 + (torch.randint(0, 2, p.shape, generator=generator) * 2 - 1) * 1.2e-7)


def _dtypes(program: Program, model: nn.Module) -> dict[str, str]:
    """Return the dtype that each parameter must have: a mixed model keeps its own, a uniform one is cast."""
    named = dict(model.named_parameters())
    mixed = len({p.dtype for p in named.values()}) > 1
    cast = program.setting.precision == "bf16" and not mixed
    kept = program.setting.keep_fp32
    return {
        name: str(torch.bfloat16 if cast and not (kept and re.search(kept, name)) else p.dtype)
        for name, p in named.items()
    }


def expected(program: Program, stop_at: str = "", nudge: bool = False) -> dict[int, list[tuple[str, Any]]]:
    """Return each rank's records by plain torch, up to the operation `stop_at`; Invalid if torch cannot run it."""
    side = Reference(program, stop_at, nudge)
    run(side)
    return side.records
