"""Agreement: ranks make the same calls, and issue the same collectives in one order, even if they run different units.

A gather is a collective: all ranks must issue it, in the same order. Experts, dropped layers or task heads may differ
from rank to rank. So before each gather the ranks exchange which flat they need next. Every flat that any rank needs is
then gathered by all ranks, one after another. A rank at the end of its pass reports that, and takes part in the others'
gathers until all ranks are there. The exchange also carries how many flats are ready to be reduced; every rank launches
the minimum over the ranks.

The calls that are collective (backward, step, state_dict, ...) begin with a meeting: an exchange of what each rank
calls. If that differs, all ranks raise the same error, before any of them waits for another or changes a number.

All engines over the same ranks exchange their messages through one `Channel`: a message names the engine, so a rank
that is still in a call of one engine takes part in what another rank needs for the next one.

Between GPUs an exchange before each gather would cost too much. There, ranks compare at the end of each step what they
have gathered. If it differs, some ranks have computed with another unit's parameters: the step updates nothing, and all
ranks refuse it.
"""

from __future__ import annotations

import functools
import operator
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from zerocli.engine.comm import Collectives, Disagreed, separate_gloo_group
from zerocli.engine.streams import Readback
from zerocli.errors import Refused
from zerocli.ranks.deadlock import Monitor
from zerocli.ranks.exchange import gather_json, gather_padded
from zerocli.ranks.issued import Issued
from zerocli.ranks.startup import STARTUP
from zerocli.ranks.words import said_of

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine
    from zerocli.engine.units.unit import Flat

FORWARD = -1
"""End of a model call; needs no flat. Returns when no rank needs one, so that ranks leave the call together."""
NOTHING = -2
"""Needs no flat; only launches reductions. Returns after one exchange and the gather that follows from it."""
MEETING = -3
"""Makes a collective call. Returns when all ranks make one."""

_FAILED = "failed"
_WANT, _SLOT, _CALL, _NUMBER, _DETAIL, _READY = range(6)
"""Columns of a message. From _READY on: for each engine of the channel, how many of its flats are ready to reduce."""


class Member:
    """An engine as a member of a channel; a message names it by its slot."""

    def __init__(self, title: str) -> None:
        self.title, self.slot = title, 0
        self.agreement: Agreement | None = None
        """The agreement for the engine's current flats; None before they are made, and once the engine is closed."""


class Channel:
    """The messages between the ranks of one group, for all engines over it, on a gloo group of its own.

    A group of its own keeps messages apart from collectives that the user's code issues, and from those in flight.
    """

    _of_group: weakref.WeakKeyDictionary[Any, Channel] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        with STARTUP.waiting("opening the channel between the ranks"):
            self.gloo = separate_gloo_group(group)
        self._members: list[weakref.ref[Member] | None] = []
        self._begun: Callable[[], object] | None = None
        """Ends the meeting that `begin` began."""
        self._resize()
        Monitor.start_once()

    @classmethod
    def of(cls, collectives: Collectives) -> Channel:
        """Return the channel of a group of ranks. Collective on the first call."""
        group = collectives.group or dist.group.WORLD
        assert group is not None
        if group not in cls._of_group:
            cls._of_group[group] = cls(group)
        return cls._of_group[group]

    @property
    def num_slots(self) -> int:
        """Number of engines over these ranks; changes only when one is made, at the same point on all ranks."""
        return len(self._members)

    def meet_to_shard(self, member: Member, collectives: Collectives, number: int, say: Callable[[], str]) -> None:
        """Give an engine a slot, the same on all ranks, once all shard the same model in the same way. Collective."""
        call = "zerocli.shard"
        self.meet((MEETING, -1, _code(call), number, 0), collectives, call, say, member.title)
        dead = [float(self.agreement(slot) is None) for slot in range(self.num_slots)]
        # Python frees an engine at another time on each rank: a slot is free if its engine is gone on all of them.
        free = self.gather(torch.tensor([1.0, *dead]), collectives).all(0).tolist()
        self._members = [None if gone else ref for ref, gone in zip(self._members, free[1:], strict=True)]
        while self._members and self._members[-1] is None:
            self._members.pop()
        member.slot = next((slot for slot, ref in enumerate(self._members) if ref is None), self.num_slots)
        if member.slot == self.num_slots:
            self._members.append(None)
        self._members[member.slot] = weakref.ref(member)
        self._resize()

    def agreement(self, slot: int) -> Agreement | None:
        """Return the agreement of the engine in a slot; None if that engine is gone or closed on this rank."""
        found = self._members[slot]
        member = found() if found is not None else None
        return member.agreement if member is not None else None

    def _resize(self) -> None:
        width = _READY + self.num_slots
        # Written through numpy: torch.func forbids writes to a tensor made outside of its transform.
        self._said = np.zeros(width, dtype=np.int64)
        self._mine = torch.from_numpy(self._said)
        self._everyone = np.zeros((len(self.ranks), width), dtype=np.int64)
        self._rows = [torch.from_numpy(row) for row in self._everyone]
        """Each rank's last message. Reused: a new tensor each time would live until a gloo thread releases it, and
        would show up in memory measurements."""

    def exchange(self, row: tuple[int, ...], collectives: Collectives, about: tuple[str, str]) -> list[list[int]]:
        """Return every rank's message; launch the reductions that are ready on all ranks."""
        self.finish_meeting()
        return self._receive(self._send(row, collectives, about), collectives)

    def _send(self, row: tuple[int, ...], collectives: Collectives, about: tuple[str, str]) -> Issued:
        agreements = [self.agreement(slot) for slot in range(self.num_slots)]
        ready = [each.reducer.ready if each is not None else 0 for each in agreements]
        self._said[:] = (*row, *ready)
        return collectives.send(self._rows, self._mine, self.gloo, *about)

    def _receive(self, sent: Issued, collectives: Collectives) -> list[list[int]]:
        collectives.receive(sent)
        rows: list[list[int]] = self._everyone.tolist()
        for slot in range(self.num_slots):
            if (agreement := self.agreement(slot)) is not None:
                agreement.reducer.launch(min(each[_READY + slot] for each in rows))
        return rows

    def begin(
        self, row: tuple[int, ...], collectives: Collectives, call: str, say: Callable[[], str], title: str
    ) -> None:
        """Begin a meeting; this rank goes on, and waits for the others before its next collective."""
        self.finish_meeting()
        sent = self._send(row, collectives, ("", call))
        self._begun = lambda: self.meet(row, collectives, call, say, title, sent=sent)

    def finish_meeting(self) -> None:
        """Wait for the other ranks in a meeting that has begun; raise Disagreed on all if they make different calls."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun()

    def meet(
        self,
        row: tuple[int, ...],
        collectives: Collectives,
        call: str,
        say: Callable[[], str],
        title: str,
        about: tuple[str, str] | None = None,
        sent: Issued | None = None,
    ) -> list[list[int]]:
        """Return every rank's message once all ranks make a call; raise Disagreed on all if they make different ones.

        Until then this rank takes part in the gathers that others need. A rank that failed itself returns in any case,
        and raises its own error. `sent` is this rank's first message, if it is on its way.
        """
        while True:
            rows = self._receive(sent, collectives) if sent else self.exchange(row, collectives, about or ("", call))
            sent = None
            if (chosen := _most_wanted(rows)) is not None:
                self.join(chosen)
            elif all(each[_WANT] == MEETING for each in rows):
                break
        if len({tuple(each[_SLOT:_DETAIL]) for each in rows}) > 1:
            several = len({each[_SLOT] for each in rows}) > 1
            mine = f"{say()} ({title}, engine {row[_SLOT]})" if several else say()
            said = gather_json(mine, lambda tensor: self.gather(tensor, collectives))
            if call != _FAILED:
                facts = said_of(dict(zip(self.ranks, said, strict=True)), ", ")
                raise Disagreed(
                    f"the ranks do not make the same calls: {facts}. Every rank must call backward, step and the "
                    "engine's other collective methods equally often, in the same order"
                )
        return rows

    def gather(self, tensor: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        """Return every rank's copy of a small tensor on the CPU, stacked in rank order. Collective."""
        everyone = tensor.new_empty((len(self.ranks), *tensor.shape))
        self.finish_meeting()
        collectives.receive(collectives.send(list(everyone.unbind()), tensor, self.gloo))
        return everyone

    def join(self, want: int) -> None:
        """Take part in a gather that another rank needs."""
        slot, place = want >> 32, want & 0xFFFFFFFF
        if (agreement := self.agreement(slot)) is None:
            raise Disagreed("another rank runs a model whose engine is closed on this rank: close it on all ranks")
        agreement.join(place)


_COMPARED = (
    *("stage", "shard_ranks", "shard_states", "offload", "precision", "accumulate", "clip", "reduce", "lr"),
    *("weight_decay", "seed"),
)
"""Settings that must be equal on all ranks."""


def open_channel(engine: Engine) -> Channel | None:
    """Return the channel between the ranks, with a slot for the engine; None where ranks do not exchange messages.

    All ranks must shard with equal settings. Whether the models are alike is compared where they are built: see
    `refuse_different_models`. Collective.
    """
    collectives, settings = engine.collectives, engine.settings
    if collectives.world == 1 or not (settings.uneven or collectives.backend == "gloo"):
        return None
    channel = Channel.of(collectives)
    if collectives.device.type == "cpu" and settings.uneven is not False:
        # With messages and collectives in one group, neither runs beside the other on the processor that computes.
        # Without messages before each gather, ranks may gather differently: then messages need a group of their own.
        collectives.issuer = channel.gloo
    given = {name: getattr(settings, name) for name in _COMPARED}
    plain = {name: value for name, value in given.items() if isinstance(value, int | float | str | None)}
    words = ", ".join(f"{name}={value!r}" for name, value in plain.items())
    say = f"shards {engine.member.title} with {words}"
    channel.meet_to_shard(engine.member, collectives, _code(words), lambda: say)
    return channel


class Agreement:
    """One engine's side of the channel; without a channel all ranks are assumed to need and call the same."""

    def __init__(self, engine: Engine) -> None:
        self._collectives, self._waits = engine.collectives, engine.waits
        self.channel, self._member, self.passes = engine.channel, engine.member, engine.passes
        self._flats, self._gatherer, self.reducer = list(engine.flats()), engine.gatherer, engine.reducer
        self._places = {id(flat): place for place, flat in enumerate(self._flats)}
        self.active = engine.agrees
        """Whether ranks exchange what they need before each gather."""
        self._trace: list[int] = []
        """The flats gathered in this step, in order."""
        self._suspect: tuple[Readback, list[int]] | None = None
        """Whether ranks differed in the last step (on its way to the host), and this rank's trace."""
        self._member.agreement = self

    def join(self, place: int) -> None:
        """Take part in the gather of a flat."""
        self._gatherer.join(self._flats[place])

    def _about(self, place: int) -> tuple[str, str]:
        """Return (kind, what) of the collective being prepared: the gather of the flat at `place`, or a reduction."""
        if place >= 0:
            return "all_gather", f"parameters of {self._flats[place].unit.title}"
        flat = self.reducer.newest
        return ("reduce_scatter", f"gradients of {flat.unit.title}") if flat is not None else ("all_gather", "")

    # -- gathers ---------------------------------------------------------------------------------------------------

    def agree_on(self, flat: Flat) -> None:
        """Return when all ranks are about to gather the flat."""
        self.agree(self._places[id(flat)])

    def agree(self, want: int) -> None:
        """Return when all ranks are about to gather the flat `want`, or as FORWARD and NOTHING describe."""
        if want >= 0:
            self._trace.append(want)
        if self.channel is None:
            return
        if not self.active:
            self.channel.finish_meeting()
            return
        wanted = self._member.slot << 32 | want if want >= 0 else want
        while True:
            with self._waits.waiting("collectives"):
                rows = self.channel.exchange((wanted, self._member.slot, 0, 0, 0), self._collectives, self._about(want))
            chosen = _most_wanted(rows)
            if chosen is None or chosen == wanted:
                return
            self.channel.join(chosen)
            if want == NOTHING:
                return

    # -- calls -----------------------------------------------------------------------------------------------------

    def meet(
        self, call: str, key: Callable[[], object], say: Callable[[], str], bits: Callable[[], int] = lambda: 0
    ) -> int:
        """Return when all ranks make this call of this engine with this key; else raise Disagreed on all of them.

        `say` describes this rank's call for the error. Returns the `bits` that any rank has set. Collective.
        """
        if self.channel is None:
            return 0
        rows = self._meet(call, _code(repr(key())), bits(), say)
        return functools.reduce(operator.or_, (row[_DETAIL] for row in rows), 0)

    def announce_pass(self, made: int) -> None:
        """Tell the other ranks that a backward pass begins, the one after `made` others of the step.

        They meet at this rank's first collective, up to which it computes on: waiting here for a rank that is later
        would cost the difference.
        """
        if self.channel is not None:
            call = "engine.backward(loss)"
            row = (MEETING, self._member.slot, _code(call), made, 0)
            say = f"called {call} for pass {made + 1} of its step"
            self.channel.begin(row, self._collectives, call, lambda: say, self._member.title)

    def end_pass(self, engines: int) -> int:
        """Meet at the end of a backward pass; return the engines that take part in it on any rank, as a set of bits.

        `engines` are those that take part on this rank.
        """
        say = "is at the end of its backward pass"
        rows = self._meet("engine.backward", 0, engines, lambda: say, self._about(NOTHING))
        for row in rows:
            engines |= row[_DETAIL]
        return engines

    def fail_pass(self, error: BaseException) -> None:
        """Tell the other ranks, at the end of their backward pass, that it failed on this one."""
        fact = str(error).partition("\n")[0][:300]
        self._meet(_FAILED, 0, 0, lambda: f"failed in backward with {type(error).__name__}: {fact}")

    def _meet(
        self, call: str, number: int, detail: int, say: Callable[[], str], about: tuple[str, str] | None = None
    ) -> list[list[int]]:
        """See `Channel.meet`; `about` is (kind, what) of what this rank waits for, by default the call."""
        if self.channel is None:
            return []
        row = (MEETING, self._member.slot, _code(call), number, detail)
        with self._waits.waiting("collectives"):
            return self.channel.meet(row, self._collectives, call, say, self._member.title, about)

    # -- without a channel -----------------------------------------------------------------------------------------

    def compare(self, passes: int) -> torch.Tensor | None:
        """Return whether ranks gathered different flats in this step, or made different numbers of backward passes.

        1.0 if so, on the device. Ends the trace. None if the ranks have compared that already. Collective.
        """
        trace, self._trace = [passes, *self._trace], []
        alone = self._collectives.world == 1 or self._collectives.backend == "fake"
        if alone or self.active or (self.channel is not None and len(trace) == 1):
            return None
        differs = 1 - self._collectives.alike(_code(repr(trace)))
        self._suspect = Readback(differs), trace
        return differs.squeeze()

    def refuse(self) -> None:
        """Raise Refused if ranks differed in the step compared last; the host waits for that result."""
        suspect, self._suspect = self._suspect, None
        if suspect is None or not suspect[0].values()[0]:
            return
        mine = torch.tensor(suspect[1], device=self._collectives.device)
        everyone, _ = gather_padded(mine, self._collectives.gather_control, padding=-1)
        at = int((everyone != everyone[0]).any(0).nonzero()[0])
        if at == 0:
            made = said_of({rank: str(count) for rank, count in enumerate(everyone[:, 0].tolist())}, ", ")
            raise Refused(
                f"the ranks made different numbers of backward passes before step(): {made}. Nothing was updated. "
                "Every rank must make as many"
            )
        units = [self._flats[place].unit.title if place >= 0 else "none" for place in everyone[:, at].tolist()]
        ran = said_of(dict(enumerate(units)), ", ")
        raise Refused(
            f"the ranks gathered different units in one step: {ran}. Nothing was updated. Pass shard(..., "
            "uneven=True) if that is meant: ranks then agree on each unit before they gather it"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory did not suffice on this rank, or on another one that has told this rank so."""
    name = torch.OutOfMemoryError.__name__
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, Disagreed) and f"with {name}" in str(error))


def _code(call: str) -> int:
    return zlib.crc32(call.encode())


def _most_wanted(rows: list[list[int]]) -> int | None:
    """Return the flat that most ranks wait for, the lowest of several; None if no rank waits for one."""
    needed = [row[_WANT] for row in rows if row[_WANT] >= 0]
    return max(sorted(set(needed)), key=needed.count) if needed else None
