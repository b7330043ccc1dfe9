"""What a program changes after the model was sharded: options and globals that a rule reads, forwards of classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, refused
from zoo.optimizers import SGD, entered, given, over, tokens
from zoo.rules import Own

FLAGS = {"centred": False}


class Config:
    """A user's own object with switches."""

    centred = False


CONFIG = Config()


class Switched(Own):
    """Elementwise until one of its switches is on."""

    def setup(self):
        self.centred = False

    def update(self, p, grad, state, group):
        if group["centred"] or self.centred or FLAGS["centred"] or CONFIG.centred:
            grad = grad - grad.mean()
        if group["limit"] is not None:
            grad = grad.clamp(-group["limit"], group["limit"])
        p.sub_(grad, alpha=group["lr"])


def _late(name: str, switch, **about) -> None:
    @case(f"later-{name}", **about)
    def program(run):
        trainer, rule = given(run, over(Switched, centred=False, limit=None, betas=(0.9, [1, None])), Stack)
        run.train(trainer, 2)
        try:
            switch(rule)
            run.train(trainer, 2)
        finally:
            FLAGS["centred"] = CONFIG.centred = False


for _name, _switch in {
    "option-makes-a-rule-another": lambda rule: rule.param_groups[0].update(centred=True),
    "attribute-makes-a-rule-another": lambda rule: setattr(rule, "centred", True),
    "global-makes-a-rule-another": lambda rule: FLAGS.update(centred=True),
    "object-makes-a-rule-another": lambda rule: setattr(CONFIG, "centred", True),
}.items():
    _refused = refused("Switched", "has changed", "mean", "before shard")
    _late(_name, _switch, below3=_refused, at3=_refused)
_late("option-that-stays-elementwise", lambda rule: rule.param_groups[0].update(limit=0.01))


class Joining(Own):
    """Treats parameters one by one until it has a limit on the norm of all of them."""

    def setup(self):
        self.limit = None

    def before(self):
        if self.limit:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.factor = min(1.0, self.limit / torch.nn.utils.get_total_norm(grads).item())

    def update(self, p, grad, state, group):
        factor = self.factor if self.limit else 1.0
        p.sub_(grad * factor / (grad.norm() + 0.1), alpha=group["lr"])


@case("later-rule-that-joins-parameters")
def joins(run):
    trainer, rule = given(run, over(Joining), Stack)
    run.train(trainer, 2)
    rule.limit = 0.05
    run.train(trainer, 2)


MEMORY = refused("was 0 when the model was sharded")


@case("later-momentum", below3=MEMORY, at3=MEMORY)
def momentum(run):
    trainer, rule = given(run, over(SGD, lr=0.1), Stack)
    run.train(trainer, 1)
    rule.param_groups[0]["momentum"] = 0.5
    run.train(trainer, 1)


class OneVector(torch.optim.Optimizer):
    """Makes its step on one vector of all parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.momentum = None

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grad, values = torch.cat([p.grad.flatten() for p in params]), nn.utils.parameters_to_vector(params)
        self.momentum = grad if self.momentum is None else 0.9 * self.momentum + grad
        nn.utils.vector_to_parameters(values - self.param_groups[0]["lr"] * self.momentum, params)


entered("one-vector-that-needs-all-gradients", over(OneVector))


@case("later-cycled-momentum")
def cycled(run):
    """A schedule that was made before the model was sharded, and changes the momentum too."""
    model = run.build(Stack)
    rule = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(rule, 0.02, total_steps=8)
    sharded = {"optimizer": rule, "lr": None, "weight_decay": None}
    trainer = run.shard(model, **(sharded if run.sharded else {"plain_optimizer": lambda masters, settings: rule}))
    for step in range(4):
        trainer.backward(trainer(*tokens(run, step)))
        trainer.step()
        schedule.step()


# -- the model ---------------------------------------------------------------------------------------------------------


@case("later-forward-of-a-class")
def patched(run):
    """Libraries replace forwards on the class, of models that exist already."""

    class Patched(Block):
        pass

    def make():
        model = Regressor(0)
        model.blocks = nn.ModuleList(Patched() for _ in range(3))
        return model

    trainer = run.shard(make)
    for step in range(3):
        if step == 1:
            Patched.forward = lambda self, x: x + 0.5 * Block.forward(self, x)  # type: ignore[method-assign]
        trainer.backward(trainer(*pairs(run, step)))
        trainer.step()


class Headed(Regressor):
    """The head's weight is the only parameter of the rest that decays: what updates it is a view of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        return self.head(super().body(x))


@case("later-parameters-from-a-vector", at3=refused("gathered"))
def from_vector(run):
    trainer = run.shard(Headed)
    for step in range(2):
        trainer.backward(trainer(*pairs(run, step)))
        trainer.step()
        values = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
        nn.utils.vector_to_parameters(values * 0.9, trainer.model.parameters())


@case("later-traced", at3=refused("jit.trace", "unsharded_model"))
def traced(run):
    trainer = run.shard(lambda: nn.Sequential(Block(), Block()))
    x, y = pairs(run, 0)
    run.log("traced", torch.jit.trace(trainer.model, x)(y).sum())
    trainer.backward(F.mse_loss(trainer(x), y))
    trainer.step()


@case("later-moved")
def moved(run):
    """Gradients are read between the passes of a step, and states move between steps."""
    trainer = run.shard(Regressor, accumulate=2)
    stage3 = run.sharded and run.variant["stage"] == 3
    if run.sharded and run.variant["stage"]:
        trainer.engine.move("cpu" if stage3 else "optimizer=cpu")
    for step in range(3):
        for part in range(2):
            trainer.backward(trainer(*pairs(run, 2 * step + part)))
            run.log("so far", trainer.grad("blocks.1.up.weight"))
        trainer.step()
        if run.sharded:
            trainer.engine.move("")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)

    def forward(self, query, key, value):
        return query + self.heads(query, key, value, need_weights=False)[0]


class SelfAttention(nn.Module):
    """Attention projects its inputs together if all three are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x):
        x = x + 0
        for block in self.blocks:
            x = block(x, x, x)
        return x.square().mean()


@case("recompute-one-tensor-three-times")
def one_tensor(run):
    trainer = run.shard(SelfAttention, recompute=True)
    run.train(trainer, 2, lambda run, step: (run.randn(step, 2, 4, WIDTH),))
