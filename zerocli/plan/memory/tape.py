"""The tape: replays on a ledger what autograd saves in a forward pass and allocates in backward.

An operation has four properties: the bytes of its output, the storages it saves, the bytes of each input's gradient,
and its temporary memory. The rules are autograd's: nodes run in the reverse of the order they were recorded in; what a
node saved is released once it has run; a gradient for an input that already has one is added in place if nothing else
refers to the earlier one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zerocli.plan.memory.ledger import Ledger, Storage

FORWARD, BACKWARD = "forward", "backward"
TIED = -2
"""Stands for a unit: the gradient is the head's part of a tied weight's."""
SHARED = -1
"""Stands for a gradient that is the incoming one, passed on without a copy."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A view of a storage, and the node that made it (None: it needs no gradient)."""

    storage: Storage
    node: Node | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One recorded operation."""

    edges: list[Node | None] = field(default_factory=list)
    grads: Sequence[int] = ()
    temporary: int = 0
    params: Sequence[int] = ()
    unit: int = 0
    product: bool = False
    last: int = 0
    """Bytes that are allocated for a moment once all gradients are there: sums that make up a bias's gradient."""
    saved: list[Storage] = field(default_factory=list)
    needs: bool = False
    """Whether its backward needs a tensor that it saved."""
    collects: bool = False
    """Whether incoming gradients belong to different outputs (a split) and are not summed."""
    incoming: list[Storage] = field(default_factory=list)
    holds_view: bool = False
    """Whether the gradient that has come is a view, as a product's is: autograd does not add to it in place."""
    backward: Callable[[list[Storage]], list[Storage]] | None = None
    """Replaces the default backward: takes the output's gradient from the list, returns the input's."""


class Tape:
    """Records operations on a ledger; `keep` is false inside a checkpoint, whose operations run again in backward."""

    def __init__(
        self, ledger: Ledger, on_grad: Callable[[int, Storage], None], keep: bool = True, thread: str = FORWARD
    ) -> None:
        self.ledger = ledger
        self.keep = keep
        self.thread = thread
        """Which of torch's two threads runs the operations that are recorded: backward's, if they are recomputed."""
        self.num_saved = 0
        self.last_save: int | None = None
        """Recomputation stops here, as torch's does: operations after the last saved tensor do not run again."""
        self.whole = False
        """Whether these operations do run again, so that what they allocate counts: see `MicroStep.compared`."""
        self.outputs: list[tuple[int, Storage]] | None = None
        """Of a selective checkpoint: in forward the outputs of expensive operations, each with the number of tensors
        saved before it; in recomputation those that are kept, in order."""
        self.hand_over = on_grad
        """Takes the unit of a parameter, and its gradient."""
        self._nodes: list[Node] = []

    @property
    def stopped(self) -> bool:
        return self.last_save is not None and self.num_saved >= self.last_save

    def new(self, nbytes: int) -> Storage:
        """Return a storage that lives until its last reference is dropped."""
        return Storage(self.ledger, 0 if self.stopped and not self.whole else nbytes)

    def product(self, nbytes: int) -> Storage:
        """Return the output of an expensive operation (a matrix product, attention): selective checkpoints keep it."""
        if self.outputs is None or self.stopped:
            return self.new(nbytes)
        if self.last_save is not None:
            return self.outputs.pop(0)[1]
        out = self.new(nbytes)
        self.outputs.append((self.num_saved, out))
        return out

    def op(
        self,
        inputs: Sequence[Tensor],
        nbytes: int,
        saved: Sequence[Storage] = (),
        grads: Sequence[int] = (),
        temporary: int = 0,
        backward_temporary: int = 0,
        params: Sequence[int] = (),
        unit: int = 0,
        product: bool = False,
        output_first: bool = False,
        last: int = 0,
        late: bool = False,
    ) -> Tensor:
        """Run one operation: temporaries, output, saves. `grads` default to one gradient of each input's size.

        With `output_first` the output is allocated before the temporaries; `last` is `Node.last`. Autograd saves inputs
        before it computes, so a recomputation that stops at its last save never makes the output. What the operation
        itself makes it saves `late`, after that.
        """
        node = None
        out = self.new(nbytes) if late else None
        if params or any(each.node is not None for each in inputs):
            node = self.record(inputs, saved, grads, backward_temporary, params, unit)
        scratch = self.new(temporary) if temporary and not output_first else None
        if out is None:
            out = self.product(nbytes) if product else self.new(nbytes)
        scratch = self.new(temporary) if temporary and output_first else scratch
        if product and not self.stopped:
            self.ledger.multiply(self.thread)
        if node is not None:
            node.product, node.last = product, last
        del scratch
        return Tensor(out, node)

    def record(
        self,
        inputs: Sequence[Tensor],
        saved: Sequence[Storage] = (),
        grads: Sequence[int] = (),
        backward_temporary: int = 0,
        params: Sequence[int] = (),
        unit: int = 0,
    ) -> Node:
        """Record a node without an output of its own."""
        grads = grads or [each.storage.nbytes for each in inputs]
        node = Node([each.node for each in inputs], grads, backward_temporary, params, unit)
        if saved:
            node.needs = True
            self.num_saved += len(saved)
            if self.keep:
                node.saved = list(saved)
        self._nodes.append(node)
        return node

    def split(self, source: Tensor, nbytes: int) -> Tensor:
        """Return a view whose parts' gradients are concatenated into one of `nbytes`."""
        if source.node is None:
            return source
        node = self.record([source], grads=[nbytes])
        node.collects = True
        return Tensor(source.storage, node)

    def backward(self, root: Node, gradient: list[Storage], up_to_saved: bool = False) -> list[Storage]:
        """Run backward from `root`, taking its gradient out of the list, so that the tape holds the only reference.

        Returns the gradient of the tape's input, if there is one. With `up_to_saved` it stops before the first
        operation that needs a saved tensor, and returns the gradients that are there then too.
        """
        root.incoming.append(gradient.pop())
        reached: list[Storage] = []
        while self._nodes:
            node = self._nodes[-1]
            if up_to_saved and node.incoming and (node.needs or node.params):
                break
            self._nodes.pop()
            if node.incoming:
                self._run(node, reached)
        found = [each for node in self._nodes for each in node.incoming]
        self._nodes.clear()
        return [*found, *reached]

    def checkpoint(
        self,
        run: Callable[[Tape, Tensor], Tensor],
        x: Tensor,
        bring_back: Callable[[], Storage],
        selective: bool,
        gathered: bool,
        whole: bool,
    ) -> Tensor:
        """Run a block that saves nothing; backward fetches its input and runs it again.

        With `selective` the outputs of expensive operations are kept, but those that recomputation stops before. torch
        runs the block again where backward first needs a tensor that it saved: weights that are `gathered` are none.
        With `whole` it runs to its end.
        """
        first = Tape(self.ledger, self.hand_over, keep=False)
        first.outputs = [] if selective else None
        entry = INPUT if x.node is not None else None
        end = run(first, Tensor(x.storage, entry))
        out, end_node = Tensor(end.storage, self.record([x])), end.node
        del end
        if first.outputs is not None:
            first.outputs = [each for each in first.outputs if each[0] < first.num_saved]
        assert out.node is not None

        def backward(gradient: list[Storage]) -> list[Storage]:
            again = Tape(self.ledger, self.hand_over, thread=BACKWARD)
            again.last_save, again.outputs, again.whole = first.num_saved, first.outputs, whole
            source = bring_back()
            made = first.backward(end_node, [*gradient], up_to_saved=True) if gathered and end_node is not None else []
            root = run(again, Tensor(source, entry)).node
            assert root is not None
            made.clear()
            return again.backward(root, gradient)

        out.node.backward = backward
        return out

    def _run(self, node: Node, reached: list[Storage]) -> None:
        ledger = self.ledger
        if node.backward is not None:
            made = node.backward(node.incoming)
            node.backward = None  # and with it what it refers to
        else:
            # A product without a bias makes the gradient of its weight first: autograd goes by the inputs' names.
            own = self._gradients(node) if node.product and len(node.params) == 1 else []
            made = [
                node.incoming[0] if size == SHARED else Storage(ledger, size)
                for size, edge in zip(node.grads, node.edges, strict=True)
                if edge is not None
            ]
            scratch = Storage(ledger, node.temporary) if node.temporary else None
            own = own or self._gradients(node)
            del scratch
            if node.last:
                if self.thread == BACKWARD:  # what is recomputed is handed over to the node, and gone when it has run
                    node.saved.clear()
                Storage(ledger, node.last)
            node.incoming.clear()
            node.saved.clear()
            while own:
                self.hand_over(node.unit, own.pop())
        node.saved.clear()
        targets = [edge for edge in node.edges if edge is not None]
        node.edges = []
        for target in reversed(targets):
            self._deliver(target, made.pop(), reached, node.product)

    def _gradients(self, node: Node) -> list[Storage]:
        """Allocate the gradients of a node's own parameters."""
        own = [Storage(self.ledger, nbytes, "buffers") for nbytes in node.params]
        if node.product:
            self.ledger.multiply(BACKWARD)
        return own

    def _deliver(self, target: Node, gradient: Storage, reached: list[Storage], view: bool) -> None:
        waiting = reached if target is INPUT else target.incoming
        if not waiting or target.collects:
            waiting.append(gradient)
            target.holds_view = view
            return
        # Added in place when only the list (and the argument of getrefcount) refers to it.
        if target.holds_view or sys.getrefcount(waiting[0]) > 2:
            total = Storage(self.ledger, waiting[0].nbytes)
            waiting[0], target.holds_view = total, False


INPUT = Node()
"""Stands for the node that made the tape's input."""
