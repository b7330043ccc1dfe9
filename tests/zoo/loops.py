"""Training loops: accumulation, clipping, gradients by hand, schedulers, optimizers, errors in between."""

from __future__ import annotations

import torch
from torch import nn

import zerocli
from zoo.blocks import Stack
from zoo.case import case, refused, trained


@case("partial-accumulation-with-clip", also=("stage0", "stage1", "stage2-cpu", "stage3-cpu"), gpu=True)
def partial(run):
    """The last step of an epoch comes before all its passes were made."""
    trainer = run.shard(Stack, accumulate=4, clip=0.1)
    for step, passes in enumerate((4, 1, 3, 2)):
        for half in range(passes):
            trainer.backward(trainer(run.tokens(4 * step + half, 4, 8)))
        trainer.step()


trained("clip", Stack, settings={"clip": 0.1}, also=("stage3-cpu",))


@case("clip-grad-norm-of-torch", below3=refused("clip="), at3=refused("clip="), also=("stage0", "stage3-cpu"))
def torch_clip(run):
    trainer = run.shard(Stack)
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)
    trainer.step()


@case("edit-grad-by-hand", below3=refused("engine.grad"), at3=refused("engine.grad"), also=("stage0", "stage3-cpu"))
def edit_grad(run):
    trainer = run.shard(Stack)
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    for p in trainer.model.parameters():
        p.grad.mul_(0.5)
    trainer.step()


@case("assign-grad-by-hand", below3=refused("grad"), at3=refused("grad"))
def assign_grad(run):
    trainer = run.shard(Stack)
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    for p in trainer.model.parameters():
        p.grad = torch.zeros_like(p)
    trainer.step()


@case("refused-grad-then-going-on", also=("stage0",))
def edit_then_on(run):
    """After the refusal, training goes on as if nothing had been tried."""
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        run.refused(lambda: trainer.model.head.weight.grad.zero_(), "grad")
        trainer.step()


@case("zero-grad-of-the-model", below3=refused("engine.zero_grad"), at3=refused("engine.zero_grad"))
def model_zero_grad(run):
    """Between backward and step, `model.zero_grad()` would have to drop what the engine holds."""
    trainer = run.shard(Stack)
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    trainer.model.zero_grad()
    trainer.backward(trainer(run.tokens(1, 4, 8)))
    trainer.step()


@case("zero-grad-where-it-is-customary")
def customary(run):
    """`model.zero_grad()` before the backward, as most loops have it, changes nothing."""
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.model.zero_grad()
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


@case("zero-grad-of-the-engine", also=("stage0", "stage1", "stage3-cpu"))
def zero_grad(run):
    """A pass is thrown away; the step is the next pass's alone."""
    trainer = run.shard(Stack, accumulate=2)
    for step in range(3):
        trainer.backward(trainer(run.tokens(50 + step, 4, 8)))
        trainer.zero_grad()
        for half in range(2):
            trainer.backward(trainer(run.tokens(2 * step + half, 4, 8)))
        trainer.step()


@case("gradient-by-name", also=("stage0", "stage1", "stage3-cpu"), gpu=True)
def gradient(run):
    trainer = run.shard(Stack)
    for step in range(2):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        for name in ("embed.weight", "blocks.1.up.weight", "blocks.2.norm.bias"):
            run.log(name, trainer.grad(name))
        trainer.step()


@case("gradient-by-name-between-passes")
def gradient_between(run):
    trainer = run.shard(Stack, accumulate=2)
    for step in range(2):
        for part in range(2):
            trainer.backward(trainer(run.tokens(2 * step + part, 4, 8)))
            run.log("so far", trainer.grad("blocks.1.up.weight"))
        trainer.step()


@case("gradient-by-name-of-an-unused-parameter")
def no_gradient(run):
    def make():
        model = Stack()
        model.spare = nn.Linear(3, 3)
        return model

    trainer = run.shard(make)
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    run.log("has none", trainer.grad("spare.weight") is None)
    trainer.step()


# -- what decides an update --------------------------------------------------------------------------------------------


@case("torch-scheduler", also=("stage3-cpu",))
def scheduler(run):
    trainer = run.shard(Stack, lr=3e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=4)
    for step in range(4):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        schedule.step()
        run.log("lr", schedule.get_last_lr()[0])


@case("optimizer-facade-in-the-loop")
def facade(run):
    """`engine.optimizer.step()` is the engine's step."""
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.optimizer.zero_grad()
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        if run.sharded:
            trainer.optimizer.step()
            run.log("gradient norm", 0.0)
        else:
            trainer.step()
            run.values[-1] = ("gradient norm", torch.tensor(0.0))


trained("learning-rate-by-a-function", Stack, settings={"lr": lambda step: 1e-2 / step})
trained(
    "optimizer-class",
    Stack,
    settings={"optimizer": torch.optim.AdamW, "weight_decay": 0.0, "eps": 1e-5},
    also=("stage0", "stage3-cpu"),
)


@case("optimizer-instance", also=("stage3-cpu",))
def instance(run):
    """An optimizer built on the model's parameters; its groups are taken over."""
    model = run.build(Stack)
    first = [*model.embed.parameters(), *model.blocks[0].parameters()]
    known = {id(p) for p in first}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": first, "lr": 1e-3, "weight_decay": 0.3}, {"params": rest}]
    rule = torch.optim.AdamW(groups, lr=2e-2, weight_decay=0.1, eps=1e-5)
    sharded = {"optimizer": rule, "lr": None, "weight_decay": None}  # the instance has its own
    settings = sharded if run.sharded else {"plain_optimizer": lambda masters, settings: rule}
    trainer = run.shard(model, **settings)
    run.train(trainer, 3)


def _grouped(masters, settings):
    heads = [p for name, p in masters.items() if "head" in name]
    norms = [p for name, p in masters.items() if ".norm." in name]
    known = {id(p) for p in (*heads, *norms)}
    rest = [p for p in masters.values() if id(p) not in known]
    groups = [
        {"params": heads, "lr": 1e-3, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.5},
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)


@case("parameter-groups", also=("stage0", "stage3-cpu"))
def groups(run):
    settings = {"plain_optimizer": _grouped}
    if run.sharded:
        settings["groups"] = [
            zerocli.ParamGroup("head", lr_factor=0.1),
            zerocli.ParamGroup(lambda name, p: ".norm." in name, weight_decay=0.5),
        ]
    run.train(run.shard(Stack, **settings), 3)


trained("optimizer-sgd-momentum", Stack, settings={"optimizer": "sgd", "momentum": 0.9})
trained("optimizer-rmsprop-by-name", Stack, settings={"optimizer": "rmsprop"})
trained("optimizer-adafactor", Stack, settings={"optimizer": "adafactor"}, also=("stage3-cpu",))


# -- other orders of calls ---------------------------------------------------------------------------------------------


@case("exception-in-forward", also=("stage3-cpu",), gpu=True)
def exception(run):
    class Fails(Stack):
        def body(self, x):
            x = self.blocks[0](x)
            if self.fails:
                raise KeyError("a bad sample")
            return self.blocks[2](self.blocks[1](x))

    trainer = run.shard(Fails)
    for step in range(4):
        trainer.model.fails = step == 1
        try:
            trainer.backward(trainer(run.tokens(step, 4, 8)))
            trainer.step()
        except KeyError:
            run.log("failed", step)


@case("exception-in-backward", also=("stage3-cpu",))
def exception_in_backward(run):
    """A hook raises in the middle of a backward; the pass counts for nothing."""
    trainer = run.shard(Stack)

    def fail(grad):
        raise KeyError("a bad gradient")

    for step in range(4):
        tokens = run.tokens(step, 4, 8)
        if step == 1:
            handle = trainer.model.blocks[1].register_forward_hook(
                lambda m, i, output: output.register_hook(fail) and None
            )
            loss = trainer(tokens)
            handle.remove()
            if run.sharded:
                try:
                    trainer.engine.backward(loss)
                except KeyError:
                    continue
                raise AssertionError("the hook's error did not arrive")
            continue
        trainer.backward(trainer(tokens))
        trainer.step()


@case("evaluation-between-steps")
def evaluation(run):
    def make():
        model = Stack()
        model.blocks.insert(1, nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)))
        return model

    trainer = run.shard(make)
    for step in range(3):
        trainer.model.train()
        loss = trainer(run.tokens(step, 4, 8))
        trainer.model.eval()
        with torch.no_grad():  # before the backward of the pass above
            run.log("evaluation", trainer(run.tokens(step + 20, 2, 8)))
        trainer.model.train()
        trainer.backward(loss)
        trainer.step()
        trainer.model.eval()
        with torch.inference_mode():
            run.log("evaluation", trainer(run.tokens(step + 40, 2, 8)))


@case("evaluation-on-one-rank-below-stage-3", also=("stage0", "stage1"))
def evaluation_on_one(run):
    """Below stage 3 a rank may evaluate by itself; at stage 3 every rank takes part, on data of its own."""
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        with torch.no_grad():
            if run.rank == 0:
                run.log("evaluation", trainer(run.tokens(step + 20, 2, 8)))
            elif run.sharded and run.variant["stage"] == 3:
                trainer(run.tokens(step + 20, 3, 8))


@case("inference-mode-before-training", also=("stage0", "stage3-cpu"), gpu=True)
def inference_first(run):
    trainer = run.shard(Stack)
    with torch.inference_mode():
        run.log("before", trainer(run.tokens(30, 4, 8)))
    run.train(trainer, 3)


@case("forward-without-backward")
def no_backward(run):
    """Losses that nobody differentiates, with gradients on."""
    trainer = run.shard(Stack)
    for step in range(3):
        run.log("ignored", trainer(run.tokens(step + 20, 4, 8)))
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


@case("dropout-with-fixed-seeds", also=("stage3-cpu",))
def dropout(run):
    def make():
        model = Stack()
        model.blocks = nn.ModuleList(nn.Sequential(b, nn.Dropout(0.2)) for b in model.blocks)
        return model

    run.train(run.shard(make, recompute=True), 3)


@case("save-and-resume", also=("stage3-cpu",))
def resume(run):
    """States saved in the middle go into a new model, which goes on as the old one would have."""
    trainer = run.shard(Stack)
    for step in range(2):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
    if run.sharded:
        saved, states = trainer.engine.state_dict(), trainer.engine.optimizer_state_dict()
        trainer = run.shard(lambda: Stack())
        run.trainers.pop(0)
        trainer.engine.load_state_dict(saved)
        trainer.engine.load_optimizer_state_dict(states)
    run.train(trainer, 2)
