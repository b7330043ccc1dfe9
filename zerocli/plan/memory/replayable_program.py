"""A traced model as a replayed step asks for it: its parts' allocations and frees, one after the other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from zerocli.plan.blocks.program import ALLOCATE, ENTER, FIRST, FREE, GRADIENT, LAST, OWN, SAVE, Part, Place, Program
from zerocli.plan.memory.ledger import Ledger, Storage
from zerocli.plan.memory.replayable import Enter, Mark, MicroStep, Replayable
from zerocli.plan.memory.tape import BACKWARD, FORWARD, Node, Tape, Tensor
from zerocli.plan.setup import Setup

MOST_PERIOD = 12
"""Blocks after which their kinds are looked for again."""
Held = dict[int, Storage]
"""Storages by their number in a part."""


class ReplayableProgram(Replayable):
    """A model of any kind, by what was traced of it."""

    rotary = True
    transposes = False

    def __init__(self, program: Program) -> None:
        self.program = program
        self.units = [(unit, sum(1 for _ in alike)) for unit, alike in itertools.groupby(program.units)]
        sizes = [(each.numel, each.trainable) for unit in program.units for each in unit.parameters]
        self.numel = sum(numel for numel, _ in sizes)
        self.trainable_numel = sum(numel for numel, trainable in sizes if trainable)
        self.layers = len(program.blocks)
        self.kinds = [(part, between) for _, part, between in program.blocks]
        self.period = next(n for n in (*range(1, MOST_PERIOD), self.layers or 1) if _repeats(self.kinds, n))
        first = program.parts[program.blocks[0][1]] if program.blocks else None
        self.frozen_input = first is not None and first.gradient is None

    def unit(self, block: int) -> int:
        return self.program.blocks[block][0]

    def micro_step(self, setup: Setup, ledger: Ledger) -> MicroStep:
        return _ProgramMicroStep(self.program, ledger)

    def copied_nbytes(self, blocks: int) -> int:
        called = [part for _, part, _ in self.program.blocks]
        own = [self.program.parts[part].copied_nbytes for part in called]
        # A part stands for several blocks. What is new to the first of them is shared, unless the last has some too.
        again = [called.index(part) < at for at, part in enumerate(called[:blocks])]
        return sum(min(nbytes, own[-1]) if is_again else nbytes for nbytes, is_again in zip(own, again, strict=False))

    def tables(self, setup: Setup) -> list[int]:
        return [self.program.buffers] if self.program.buffers else []

    def formulas(self, setup: Setup) -> dict[str, str]:
        tokens = f"{setup.batch} x {setup.seq} tokens"
        again = f", {setup.recomputed.policy}" if setup.recomputes else ""
        return {"activations": f"what the operations of {tokens} keep and use, as traced{again}"}


def _repeats(kinds: Sequence[Hashable], period: int) -> bool:
    """Whether all kinds but those of the first block and the last two are those `period` blocks before them."""
    inner = kinds[1:-2]
    return all(one == other for one, other in zip(inner, inner[period:], strict=False))


class _ProgramMicroStep(MicroStep):
    """Replays the parts of a micro-step. A storage is there as long as Python, or a part that saved it, holds it."""

    compared = True

    def __init__(self, program: Program, ledger: Ledger) -> None:
        self._program, self._ledger = program, ledger
        self._live: dict[int, Held] = defaultdict(dict)
        """What Python holds, by the part that made it; parts are numbered as they are replayed."""
        self._back: dict[int, Held] = defaultdict(dict)
        """What the backward of each part has made."""
        self._arguments: dict[int, list[Storage | None]] = {}
        """What the checkpoint of each recomputed block holds."""
        self._long_lived: list[Storage] = []
        self._num_parts = 0
        self._numbers: dict[int, int] = {}
        """The number of each block's part."""
        self.hidden = program.input_nbytes

    def begin(self, tape: Tape, enter: Enter) -> Tensor:
        self._ledger.multiply(FORWARD)
        return self._run(tape, self._program.parts[0], Tensor(Storage(self._ledger, 0)), self._next(), enter=enter)

    def block(self, tape: Tape, x: Tensor, block: int) -> Tensor:
        unit, part, _ = self._program.blocks[block]
        if tape.last_save is None:
            number = self._numbers[block] = self._next()
            if not tape.keep:
                called = self._program.parts[part]
                others = called.arguments
                self._arguments[number] = [self._made_by(self._live, number, back).get(at) for back, at in others]
        return self._run(tape, self._program.parts[part], x, self._numbers[block], unit)

    def between(self, tape: Tape, x: Tensor, block: int) -> Tensor:
        if block + 1 == len(self._program.blocks):
            return x
        return self._run(tape, self._program.parts[self._program.blocks[block][2]], x, self._next())

    def end(self, tape: Tape, x: Tensor, enter: Enter, mark: Mark) -> Tensor:
        part = self._program.parts[-1]
        for unit in {event[1] for event in part.forward if event[0] == ENTER}:  # a head of its own
            mark(x, "end of backward of the head", unit)
        return self._run(tape, part, x, self._next(), enter=enter)

    def _next(self) -> int:
        self._num_parts += 1
        return self._num_parts - 1

    def _run(self, tape: Tape, part: Part, x: Tensor, number: int, unit: int = 0, enter: Enter | None = None) -> Tensor:
        """Replay a part's forward. On a tape that keeps nothing, what it saves is not held; a recomputation ends with
        the last save, unless it runs whole, and holds nothing else.
        """
        again, left = tape.last_save is not None, part.num_saves
        live: Held = {} if again else self._live[number]
        saved: dict[Place, Storage] = {}
        for event, one, two, flag in part.forward:
            if again and not left and not tape.whole:
                break
            if event == ALLOCATE:
                live[one] = tape.product(two) if flag and (left or not again) else tape.new(two)
                if one in part.long_lived and not again:
                    self._long_lived.append(live[one])
            elif event == SAVE:
                left -= 1
                tape.num_saved += not again
                storage = x.storage if again and (one, two) == part.input else self._find(live, number, one, two)
                if storage is not None and (tape.keep or again):
                    saved[one, two] = storage
            elif event == ENTER and enter is not None:
                enter(one)
            elif event == FREE and not (again and one):
                (live if one == 0 else self._made_by(self._live, number, one)).pop(two, None)
        if not part.backward and x.node is None and not part.forward:
            return x
        out = self._find(live, number, *part.output) if part.output is not None else None
        node, before = None, x.node  # the node must not hold `x`, whose storage may go before backward
        if part.backward or before is not None:
            node, hand_over = tape.record([x]), tape.hand_over
            node.needs = True
            if tape.keep:  # else nothing ever runs it, and it would hold what this refers to
                node.backward = lambda incoming: self._backward(hand_over, part, number, unit, incoming, saved, before)
        return Tensor(out or x.storage, node)

    def _find(self, live: Held, number: int, back: int, storage: int) -> Storage | None:
        return (live if back == 0 else self._made_by(self._live, number, back)).get(storage)

    def _made_by(self, held: dict[int, Held], number: int, back: int) -> Held:
        """Return what the part so far back holds; nothing of one that was not replayed."""
        return held.get({FIRST: 0, LAST: self._num_parts - 1}.get(back, number - back), {})

    def _backward(
        self,
        hand_over: Callable[[int, Storage], None],
        part: Part,
        number: int,
        unit: int,
        incoming: list[Storage],
        saved: dict[Place, Storage],
        before: Node | None,
    ) -> list[Storage]:
        """Replay a part's backward; return the gradient of its input, if that has one."""
        made = self._back[number]
        incoming.clear()  # the part that made it frees it
        self._ledger.multiply(BACKWARD)
        own = {two for event, one, two, _ in part.backward if event == GRADIENT and one == 0}
        for event, one, two, more in part.backward:
            if event == ALLOCATE:
                made[one] = Storage(self._ledger, two, "buffers" if one in own else "activations")
            elif event == FREE:
                saved.pop((one, two), None)
                self._made_by(self._back, number, one).pop(two, None)
                self._made_by(self._live, number, one).pop(two, None)
            elif event == GRADIENT:
                grad = self._made_by(self._back, number, one).pop(two, None) or saved.pop((one, two), None)
                if grad is not None:
                    hand_over(unit if more == OWN else more, grad)
        # What the part made and nothing has freed goes on, as a gradient that forward computed already.
        made.update({at: storage for (back, at), storage in saved.items() if back == 0})
        saved.clear()
        self._live.pop(number, None)
        self._arguments.pop(number, None)
        if before is None:
            return []
        found = self._made_by(self._back, number, part.gradient[0]).get(part.gradient[1]) if part.gradient else None
        return [found or Storage(self._ledger, 0)]
