"""A training program as plain data: a model, the calls of its forward, and a loop of a few steps.

Programs are drawn by hypothesis (draw.py), so their defaults are the simplest choice: what is left of a shrunk program
is what it takes to fail. `repr` leaves defaults out and is Python that `parse` reads again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

WORLD = int(os.environ.get("ZEROCLI_FUZZ_WORLD", "2"))
WIDTH = 6
ROWS = 3
TOKENS = 7


class Plain:
    """A frozen dataclass that prints only what differs from its defaults."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print the defaults too


@dataclass(frozen=True, repr=False)
class Block(Plain):
    """One module of the model; all take and give values of WIDTH columns."""

    kind: str = "linear"
    """linear, mlp, norm, embedding, gru, conv, scale, complex, ctx_attr, stateful or nested."""
    hidden: int = WIDTH
    """Inner width of an mlp: blocks of equal and unequal sizes."""
    frozen: bool = False
    adapted: bool = False
    """Its linear layers are frozen and have adapters of low rank."""
    half: bool = False
    """Its parameters are bf16 in a model whose others are fp32."""
    children: tuple[Block, ...] = ()
    """Of a nested block, run in order."""
    caches: bool = False
    """Its first call keeps a view of its first parameter, which later calls use."""
    state: tuple[str, ...] = ()
    """What a stateful block has: counter, ema, expanded, strided, batchnorm, spectral (buffers), attribute (a count in
    Python), dropout, random (a draw from Python's own generator)."""


@dataclass(frozen=True, repr=False)
class Call(Plain):
    """One call in the model's forward; its result is a new value, which later calls may take."""

    block: int = 0
    inner: bool = False
    """Enter the first child of a nested block directly."""
    arg: int = 0
    """How many values back its input is; 0 is the result of the call before."""
    also: int = 0
    """How many values back its second input is."""
    raw: bool = False
    """Its inputs are the batch's own data, which autograd does not follow."""
    style: str = "plain"
    """How inputs and outputs are passed: plain, kwargs, tuple, dict, object (a class torch does not know), or kept (the
    block returns a dict that it keeps, and the caller compares the objects)."""
    when: str = "always"
    """always, rank0, rank1, data (a property of this rank's batch) or odd_step."""
    other: int = -1
    """The block that is called instead where `when` does not hold; -1 passes the input on."""
    detach: bool = False
    aux: bool = False
    """The result is also a term of the loss."""
    checkpoint: str = ""
    """`plain` or `reentrant`: the user's own torch.utils.checkpoint around the call."""


@dataclass(frozen=True, repr=False)
class Pass(Plain):
    """One forward with what follows it, on every rank."""

    kind: str = "train"
    """train; again (backward twice through one graph); two (of two losses of one graph); both and both_reversed (two
    forwards, then their backwards); fail_forward and fail_backward (then going on); drop (no backward); zero_grad
    (drops the step's gradients so far); plain_backward (`loss.backward()`); leaf (an input that needs a gradient);
    penalty (of a gradient, by create_graph)."""
    at: int = 0
    """The call that fails."""


@dataclass(frozen=True, repr=False)
class Event(Plain):
    """Something between two steps, or (`grad`, `hand_grad`, `state`) between backward and step."""

    kind: str = "state"
    """freeze, unfreeze, no_grad, inference, state, gathered, edit, load, optimizer_state, plain_edit, plain_load,
    deepcopy, unsharded; grad, hand_grad."""
    block: int = 0


@dataclass(frozen=True, repr=False)
class Step(Plain):
    """Events, the passes of one optimizer step, events between backward and step, and the step."""

    before: tuple[Event, ...] = ()
    passes: tuple[Pass, ...] = (Pass(),)
    after: tuple[Event, ...] = ()
    stale: bool = False
    """After the step, backward of a graph from before it."""
    uneven: str = ""
    """What rank 1 alone does: forward and no_grad (one more, before the passes), more (one more pass), fewer (the first
    pass is left out), no_step, state (a state dict of its own), freeze."""


@dataclass(frozen=True, repr=False)
class Setting(Plain):
    """What `zerocli.shard` is told."""

    stage: int = 0
    offload: str = ""
    gather_buffers: int = 2
    accumulate: int = 1
    precision: str = "fp32"
    reduce: str = "compute"
    keep_fp32: str = ""
    bucket_nbytes: int = 1 << 16
    clip: float | None = None
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    recompute: bool | str = False
    units: str = "default"
    """default, class (every block, the nested ones too), leaves (torch's own modules) or list (`chosen`)."""
    chosen: tuple[int, ...] = ()
    shard_ranks: int = 0
    shard_states: str = "group"
    streamed: bool = False
    """As on a GPU: gradients are freed after the update, and offloaded states pass through small slots."""
    average: float = 0.0
    """The decay of an EMA that is updated after each step; 0 is none."""


@dataclass(frozen=True, repr=False)
class Rule(Plain):
    """An optimizer that is no name: a class or an instance of torch.optim, or one of our own made of terms."""

    kind: str = ""
    """A class of torch.optim; `Own`; or empty for the optimizer that the setting names."""
    options: tuple[tuple[str, Any], ...] = ()
    terms: tuple[str, ...] = ()
    """Of an `Own` rule, in order: see rules.py."""
    instance: bool = False
    """The optimizer is made before `shard`, and not by it."""
    split: str = ""
    """Of an instance: one group, or two divided by `dim` (matrices and the rest) or `half` (first and second half)."""
    second: tuple[tuple[str, Any], ...] = ()
    """Options of the second group alone."""
    hook: bool = False
    """A hook on the instance halves the learning rates before each step."""


@dataclass(frozen=True, repr=False)
class Alias(Plain):
    """Another tensor on the memory of a block's first parameter, made before `shard` or in the first forward."""

    block: int = 0
    way: str = "view"
    """view, detach, data, chunk, transposed, or first_forward (a view that the first forward makes)."""
    use: str = "forward"
    """forward, or loop (the loop reads it after each step)."""
    listed: bool = False
    """It is in a list in the model, and not an attribute."""


@dataclass(frozen=True, repr=False)
class Second(Plain):
    """Another model with an engine of its own."""

    blocks: tuple[Block, ...] = (Block(),)
    calls: tuple[Call, ...] = (Call(),)
    stage: int = 0
    link: str = "chained"
    """chained (it takes the first model's output), towers (both take the batch), frozen (chained, and never trained),
    alternate (chained; even steps train the first model, odd ones this one)."""


@dataclass(frozen=True, repr=False)
class Program(Plain):
    """Everything that both sides run."""

    setting: Setting = Setting()
    blocks: tuple[Block, ...] = (Block(),)
    ties: tuple[tuple[int, int], ...] = ()
    """Pairs of blocks whose first parameters are one, where they have the same shape."""
    shared: int = -1
    """A block that the model holds under a second name."""
    unused: bool = False
    """The model also has a parameter that nothing uses."""
    calls: tuple[Call, ...] = (Call(),)
    entry: str = "root"
    """root (`engine(batch)`); method (another method of the model, registered); outside (the loop calls the blocks)."""
    returns: str = "dict"
    """dict, object (a class torch does not know), or kept (a dict that the model keeps and changes in each forward)."""
    fills: bool = False
    """The batch has a list into which the model puts a tensor."""
    rule: Rule = Rule()
    aliases: tuple[Alias, ...] = ()
    second: Second | None = None
    steps: tuple[Step, ...] = (Step(),)
    seed: int = 0

    @property
    def moves(self) -> bool:
        """Whether parameters are released between their uses."""
        return self.setting.stage == 3

    @property
    def all_blocks(self) -> list[Block]:
        blocks = [*self.blocks, *(self.second.blocks if self.second else ())]
        return [*blocks, *(child for block in blocks for child in block.children)]

    @property
    def uneven(self) -> str:
        """What one rank alone does in some step."""
        return next((step.uneven for step in self.steps if step.uneven), "")


def second_program(program: Program) -> Program:
    """Return the second model's own program."""
    second = program.second
    assert second is not None
    setting = replace(program.setting, stage=second.stage, units="default", chosen=(), keep_fp32="")
    if second.stage != program.setting.stage:
        setting = replace(setting, offload="")
    return Program(setting, second.blocks, calls=second.calls, rule=program.rule, seed=program.seed + 17)


def simplest_setting(program: Program) -> Program:
    """Return the program unsharded in all that must not change its numbers."""
    plain = replace(
        program.setting, stage=0, offload="", gather_buffers=2, bucket_nbytes=1 << 16, recompute=False, reduce="fp32",
        shard_ranks=0, shard_states="group", streamed=False,
    )  # fmt: skip
    return replace(program, setting=plain)


def parse(text: str) -> Program:
    """Return the program that was printed as `text`."""
    kinds = (Block, Call, Pass, Event, Step, Setting, Rule, Alias, Second, Program)
    names: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    program = eval(text, {"__builtins__": {}}, names)
    assert isinstance(program, Program), text
    return program
