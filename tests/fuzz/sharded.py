"""A program on one rank of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocli
from fuzz.defects import DEFECTS
from fuzz.loop import Side, changed_state, edit, evaluate, note_copy, run
from fuzz.model import Model, forward_both, make_models
from fuzz.parts import Part
from fuzz.plain import PLAIN, PlainEngine
from fuzz.program import Event, Program, second_program
from fuzz.reference import seed_rank
from fuzz.rules import asked_of_shard

Refused = zerocli.Refused


@dataclass(frozen=True)
class Outcome:
    """What a rank reports of a program."""

    records: list[tuple[str, Any]]
    refused: str = ""
    """The operation that was refused, and ended the program."""
    message: str = ""


def leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def shard(program: Program, model: nn.Module, nvme_path: str) -> Any:
    setting = program.setting
    more: dict[str, Any] = {}
    if setting.keep_fp32:
        more["keep_fp32"] = setting.keep_fp32
    if setting.units == "list":
        more["units"] = [model.blocks[index % len(model.blocks)] for index in setting.chosen]  # type: ignore[union-attr]
    elif setting.units != "default":
        more["units"] = Part if setting.units == "class" else leaf
    more |= asked_of_shard(program, model)
    return zerocli.shard(
        model,
        stage=setting.stage,
        precision=setting.precision,
        accumulate=setting.accumulate,
        clip=setting.clip,
        recompute=setting.recompute,
        bucket_nbytes=setting.bucket_nbytes,
        gather_buffers=setting.gather_buffers,
        reduce=setting.reduce,
        offload=setting.offload,
        shard_ranks=setting.shard_ranks,
        shard_states=setting.shard_states,
        nvme_path=(nvme_path,),
        staging_nbytes=6 * 24 * 64 if setting.streamed else 1 << 20,
        update="stream" if setting.streamed else "auto",
        keep_gradients=not setting.streamed,
        read_ahead_nbytes=1 << 20,
        **more,
    )


class Sharded(Side):
    """`defect` names a defect, the engine `plain`, or both with a plus between them."""

    def __init__(self, program: Program, nvme_path: str, defect: str = "") -> None:
        self.rank = dist.get_rank()
        found = [DEFECTS[name] for name in defect.split("+") if name in DEFECTS]
        if found:
            program = found[0].changed(program)
        super().__init__(program, (self.rank,))
        self._models = make_models(program)
        self.model = self._models[0]
        self.engines: list[Any] = []
        programs = [program, *([second_program(program)] if program.second else [])]
        plain = PLAIN in defect.split("+")
        for one, model in zip(programs, self._models, strict=True):
            self.engines.append(PlainEngine(one, model) if plain else shard(one, model, nvme_path))
        self.engine = self.engines[0]
        self.average = zerocli.EMA(self.engine, program.setting.average) if program.setting.average else None
        if plain and program.second and program.second.link in ("chained", "towers"):
            self.engine.partners = self.engines
        self.note(self.rank, "dtypes", {name: str(p.dtype) for name, p in self.model.named_parameters()})
        if program.entry == "method":
            self.engine.register_forward_method(self.model, "graph")
        self.defect = found[0](self.model, program, self.rank) if found else None
        seed_rank(self.rank)

    def models(self, rank: int) -> list[Model]:
        return self._models

    def forward(self, rank: int, batch: dict[str, Any]) -> Any:
        if self.defect is not None:
            self.defect.before_forward()
        result = forward_both(self._models, self.program, batch, self.engines)
        return result if self.defect is None else self.defect.result(result)

    def backward(self, rank: int, loss: torch.Tensor, retain: bool = False) -> None:
        if self.defect is not None:
            loss = self.defect.loss(loss)
        self.engines[self.trained[0]].backward(loss, **({"retain_graph": True} if retain else {}))

    def zero_grad(self, after_error: bool = False) -> None:
        for engine in self.engines:
            if not after_error or hasattr(engine, "zero_grad"):
                engine.zero_grad()

    def step(self) -> Any:
        norms = [self.engines[index].step().grad_norm.item() for index in self.trained]
        return norms[0] if len(norms) == 1 else dict(enumerate(norms))

    def state(self, rank: int) -> dict[str, Any]:
        return {
            f"{index}.{name}" if index else name: value.float().numpy()
            for index, engine in enumerate(self.engines)
            for name, value in engine.state_dict().items()
        }

    def averaged(self, rank: int) -> dict[str, Any]:
        assert self.average is not None
        self.average.update()
        return {name: value.float().numpy() for name, value in self.average.state_dict().items()}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def must_refuse(self, what: str, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except Refused:
            self.note(self.rank, what, "refused")
        else:
            self.note(self.rank, what, "accepted")

    def event(self, event: Event, step: int, number: int) -> None:
        part = self.model.blocks[event.block % len(self.model.blocks)]
        engine, rank = self.engine, self.rank
        match event.kind:
            case "freeze" | "unfreeze":
                part.requires_grad_(event.kind == "unfreeze")
            case "no_grad" | "inference":
                with torch.no_grad() if event.kind == "no_grad" else torch.inference_mode():
                    self.note(rank, "loss", evaluate(self, self.model, rank, step, number, engine))
            case "state":
                self.note(rank, "state", self.state(rank))
            case "gathered":
                with engine.gathered(), torch.no_grad():
                    whole = {n: p.detach().float().numpy().copy() for n, p in self.model.named_parameters()}
                self.note(rank, "parameters", whole)
            case "edit":
                with engine.gathered(part, write=True):
                    edit(part.parameters())
            case "plain_edit":
                edit(part.parameters())
            case "load" | "plain_load":
                state = changed_state(engine.state_dict(), self.model)
                (engine if event.kind == "load" else self.model).load_state_dict(state)
            case "deepcopy" | "unsharded":
                other = copy.deepcopy(self.model) if event.kind == "deepcopy" else engine.unsharded_model()
                note_copy(self, other, rank, step, number)
            case "grad":
                names = {id(p): name for name, p in self.model.named_parameters()}
                for name, p in part.named_parameters():
                    self.note(rank, f"gradient of {name}", engine.grad(names[id(p)]))
            case "hand_grad":
                self.must_refuse("a gradient changed by hand", self._by_hand(part, event.block % 3))
            case "optimizer_state":
                engine.load_optimizer_state_dict(engine.optimizer_state_dict())
            case _:
                raise AssertionError(event)

    def _by_hand(self, part: nn.Module, way: int) -> Callable[[], Any]:
        if way == 0:
            return lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return self.model.zero_grad if way == 1 else lambda: next(part.parameters()).grad


def run_program(program: Program, nvme_path: str, defect: str = "") -> Outcome:
    """Run a program on this rank; a refusal ends it, and then only its state is noted."""
    try:
        side = Sharded(program, nvme_path, defect)
    except Refused as error:
        return Outcome([], "shard", str(error))
    try:
        run(side)
        return Outcome(side.records[side.rank])
    except Refused as error:
        records, label = side.records[side.rank], side.label
        if not program.uneven:  # ranks that are at different calls could not meet for it
            side.label = "end"
            side.note(side.rank, "state", side.state(side.rank))
        return Outcome(records, label, str(error))
    finally:
        if not program.uneven:
            side.close()
