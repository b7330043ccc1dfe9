"""One training program, two ways to run it: plain torch with gradients averaged by hand, and `zerocli.shard`.

Both ways run on the same real ranks. Plain torch keeps a whole replica of the model on each rank; at a step the ranks'
gradients are summed and divided by the number of ranks, a rank without one counts as zero, and a parameter without a
gradient on any rank is left alone. A torch.optim optimizer then updates each replica.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import zerocli

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULTS: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1}


class Run:
    """What a program sees of the ranks and of the way it is run; it keeps everything that is compared at the end."""

    def __init__(self, variant: Mapping[str, Any] | None, device: str) -> None:
        self.variant, self.device = variant, torch.device(device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.values: list[tuple[str, torch.Tensor]] = []
        self.trainers: list[Trainer] = []

    @property
    def sharded(self) -> bool:
        """Whether this is the run under test and not the reference."""
        return self.variant is not None

    def shard(self, model: nn.Module | Callable[[], nn.Module], **settings: Any) -> Trainer:
        """Return the trainer of a model; a callable builds it, with the same values on every rank and every run."""
        if not isinstance(model, nn.Module):
            model = self.build(model)
        trainer = (ShardedTrainer if self.sharded else PlainTrainer)(self, model, settings)
        self.trainers.append(trainer)
        torch.manual_seed(100 + self.rank)
        return trainer

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return what `make` builds under a fixed seed, on the run's device."""
        torch.manual_seed(7)
        return make().to(self.device)

    def log(self, label: str, value: Any) -> None:
        """Keep a number or tensor that must be the same both ways."""
        self.values.append((label, torch.as_tensor(value).detach().to("cpu", copy=True)))

    def refused(self, action: Callable[[], Any], *words: str) -> None:
        """In the run under test, demand that `action` raises `zerocli.Refused` with these words."""
        if not self.sharded:
            return
        try:
            action()
        except Exception as error:
            if not is_refusal(error):
                raise
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"the refusal lacks {missing}: {error}"
            return
        raise AssertionError(f"not refused: expected a refusal with {words}")

    def randn(self, step: int, *shape: int, same: bool = False) -> torch.Tensor:
        """Return the step's random input of this rank; with `same`, of all ranks."""
        return torch.randn(*shape, generator=self._generator(step, same)).to(self.device)

    def tokens(self, step: int, *shape: int, high: int = 11, same: bool = False) -> torch.Tensor:
        """Return the step's random tokens of this rank; with `same`, of all ranks."""
        return torch.randint(0, high, shape, generator=self._generator(step, same)).to(self.device)

    def _generator(self, step: int, same: bool) -> torch.Generator:
        return torch.Generator().manual_seed(10 * (step + 1) + (0 if same else 1 + self.rank))

    def train(self, trainer: Trainer, steps: int, batch: Callable[[Run, int], Any] | None = None) -> None:
        """Train on one batch per step (by default tokens for a `Stack`), then evaluate without gradients.

        A batch is a tuple of arguments or a dict of keyword arguments; the model returns its loss, or an object or
        tuple with the loss in it.
        """
        take = batch or (lambda run, step: (run.tokens(step, 4, 8),))
        for step in range(steps):
            trainer.backward(loss_of(self.call(trainer, take(self, step))))
            trainer.step()
        with torch.no_grad():
            self.log("last loss", loss_of(self.call(trainer, take(self, steps))))

    def call(self, trainer: Trainer, batch: Any) -> Any:
        return trainer(**batch) if isinstance(batch, dict) else trainer(*batch)

    def finish(self) -> dict[str, torch.Tensor]:
        """Return everything to compare, by label; a collective."""
        found = {f"{label} #{i}": value for i, (label, value) in enumerate(self.values)}
        for index, trainer in enumerate(self.trainers):
            for name, value in trainer.state().items():
                if not isinstance(value, torch.Tensor):  # extra state
                    continue
                value = value.to_dense() if value.layout != torch.strided else value
                found[f"state {name}" if index == 0 else f"state {index} {name}"] = value.detach().cpu().clone()
        return found


def is_refusal(error: BaseException) -> bool:
    return isinstance(error, zerocli.Refused)


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple | list):
        return output[0]
    return output["loss"] if isinstance(output, Mapping) else output.loss


class Trainer:
    """What a program trains with: the same calls as an engine's."""

    model: nn.Module
    engine: zerocli.Engine | None = None

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class PlainTrainer(Trainer):
    """The reference."""

    def __init__(self, run: Run, model: nn.Module, settings: Mapping[str, Any]) -> None:
        super().__init__(run)
        settings = DEFAULTS | dict(settings)
        self.model, self.clip, self.lr = model, settings.get("clip"), settings["lr"]
        self.half = HALVES.get(settings.get("precision", "fp32"))
        initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        if self.half is not None:
            _to_half(model, self.half, settings.get("plain_fp32", ""))
        # Each parameter that computes in fewer bits has an fp32 copy, which the optimizer updates.
        self.masters = {
            name: p if p.dtype not in HALVES.values() else nn.Parameter(initial[name].float())
            for name, p in model.named_parameters()
        }
        make = settings.get("plain_optimizer") or _optimizer_by_name
        self.optimizer = make(self.masters, settings)
        self.casts = settings.get("plain_cast", True)
        self.passes, self.steps = 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.half is not None and self.casts:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return self.model(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self.half) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        self.run.log("loss", loss)
        loss.backward(**keywords)
        self.passes += 1

    def averaged(self) -> dict[str, torch.Tensor | None]:
        """Return each parameter's gradient, averaged over ranks and passes; None if it has none on any rank."""
        named = dict(self.model.named_parameters())
        grads = [_flat_grad(p) for p in named.values()]
        packed = torch.cat([torch.tensor([float(p.grad is not None) for p in named.values()]).double(), *grads])
        dist.all_reduce(packed)
        there, values = packed[: len(named)], packed[len(named) :] / (self.run.world * max(self.passes, 1))
        parts = values.split([grad.numel() for grad in grads])
        return {
            name: _like(part, self.masters[name]) if some else None
            for (name, _), part, some in zip(named.items(), parts, there.tolist(), strict=True)
        }

    def step(self) -> None:
        grads = self.averaged()
        self.steps += 1
        if callable(self.lr):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr(self.steps)
        for name, master in self.masters.items():
            master.grad = grads[name]
        given = [master for master in self.masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm([master.grad for master in given])
        self.run.log("gradient norm", norm)
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(given, self.clip, norm)
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if p is not self.masters[name] and self.masters[name].grad is not None:
                    p.copy_(self.masters[name])
        self.zero_grad()

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.optimizer.zero_grad()
        self.passes = 0

    def grad(self, name: str) -> torch.Tensor | None:
        return self.averaged()[name]

    @contextlib.contextmanager
    def gathered(self, *what: Any, write: bool = False) -> Iterator[None]:
        yield
        if write:
            self.edited()

    def edited(self) -> None:
        """Take over what the program wrote into the model's parameters by itself."""
        for name, p in self.model.named_parameters():
            if p is not self.masters[name]:
                changed = p.detach() != self.masters[name].detach().to(p.dtype)
                self.masters[name].data[changed] = p.detach()[changed].float()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state)
        for name, p in self.model.named_parameters():
            if p is not self.masters[name]:
                self.masters[name].data.copy_(state[name])

    def whole_copy(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Plain torch needs none."""

    def state(self) -> dict[str, torch.Tensor]:
        whole = {name: value.float() if value.is_floating_point() else value for name, value in _states(self.model)}
        return whole | {name: master.detach() for name, master in self.masters.items()}


class ShardedTrainer(Trainer):
    """The run under test."""

    engine: zerocli.Engine

    def __init__(self, run: Run, model: nn.Module, settings: Mapping[str, Any]) -> None:
        super().__init__(run)
        assert run.variant is not None
        own = {key: value for key, value in settings.items() if not key.startswith("plain_")}
        # Gradients travel in fp32, as the reference averages them; small buckets make several of them.
        fixed = {"device": run.device, "bucket_nbytes": 2048, "reduce": "fp32"} | dict(run.variant)
        if own.get("optimizer", "adamw") == "adamw":
            own = {"eps": 1e-5} | own
        self.model = model
        self.engine = zerocli.shard(model, **(DEFAULTS | fixed | own))

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        self.run.log("loss", loss)
        self.engine.backward(loss, **keywords)

    def step(self) -> None:
        result = self.engine.step()
        assert not result.skipped.item(), "the step was skipped: gradients were not finite"
        self.run.log("gradient norm", result.grad_norm)

    def __getattr__(self, name: str) -> Any:
        if name in ("zero_grad", "grad", "gathered", "register_forward_method", "optimizer"):
            return getattr(self.engine, name)
        raise AttributeError(name)

    def edited(self) -> None:
        """The engine has to notice by itself."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.engine.load_state_dict(state)

    def whole_copy(self) -> nn.Module:
        return self.engine.unsharded_model(self.run.device)

    def state(self) -> dict[str, torch.Tensor]:
        return self.engine.state_dict()


def _states(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's state by name; what is tied, and nothing else, may be left out by a sharded state."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield name, value.detach()


def _to_half(model: nn.Module, half: torch.dtype, fp32: str) -> None:
    """Cast a model of fp32 alone, but for parameters whose name contains `fp32`; a mixed model stays as it is."""
    if all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point()):
        for name, p in model.named_parameters():
            if p.is_floating_point() and not (fp32 and fp32 in name):
                p.data = p.data.to(half)


def _optimizer_by_name(masters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the torch.optim optimizer; weight decay spares parameters of fewer than two dimensions."""
    kind = settings["optimizer"]
    kinds = {name.lower(): value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    kind = kinds[kind.lower()] if isinstance(kind, str) else kind
    decays = [p for p in masters.values() if p.dim() >= 2]
    others = [p for p in masters.values() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": settings["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    options = {key: settings[key] for key in ("betas", "eps", "momentum") if key in settings}
    if settings["optimizer"] == "adamw":
        options.setdefault("eps", 1e-5)
    lr = settings["lr"](1) if callable(settings["lr"]) else settings["lr"]
    return kind([group for group in groups if group["params"]], lr=lr, **options)


def _flat_grad(p: nn.Parameter) -> torch.Tensor:
    grad = torch.zeros_like(p) if p.grad is None else p.grad.detach()
    grad = grad.to_dense() if grad.is_sparse else grad
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    return grad.flatten().double().cpu()


def _like(part: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    if p.is_complex():
        return torch.view_as_complex(part.view(*p.shape, 2)).to(p)
    return part.view(p.shape).to(p)
