"""A training program as plain data: a model, the calls of its forward, and a loop of a few steps.

Programs are drawn by hypothesis (draw.py), so their defaults are the simplest choice: what is left of a shrunk program
is what it takes to fail. `repr` leaves defaults out and is Python that `parse` reads again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

WORLD = 2
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
    """linear, mlp, norm, embedding, gru, conv, scale, complex, ctx_attr or nested."""
    hidden: int = WIDTH
    """Inner width of an mlp: blocks of equal and unequal sizes."""
    frozen: bool = False
    half: bool = False
    """Its parameters are bf16 in a model whose others are fp32."""
    children: tuple[Block, ...] = ()
    """Of a nested block, run in order."""


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
    """How inputs and outputs are passed: plain, kwargs, tuple, dict, or object (a class torch does not know)."""
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
    steps: tuple[Step, ...] = (Step(),)
    seed: int = 0

    @property
    def moves(self) -> bool:
        """Whether parameters are released between their uses."""
        return self.setting.stage == 3


def simplest_setting(program: Program) -> Program:
    """Return the program unsharded in all that must not change its numbers."""
    plain = replace(
        program.setting, stage=0, offload="", gather_buffers=2, bucket_nbytes=1 << 16, recompute=False, reduce="fp32"
    )
    return replace(program, setting=plain)


def parse(text: str) -> Program:
    """Return the program that was printed as `text`."""
    names: dict[str, Any] = {kind.__name__: kind for kind in (Block, Call, Pass, Event, Step, Setting, Program)}
    program = eval(text, {"__builtins__": {}}, names)
    assert isinstance(program, Program), text
    return program
