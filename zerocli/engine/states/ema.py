"""EMA: an exponential moving average of a sharded model's parameters; each rank keeps the part it holds.

The average is of the fp32 masters, so it takes 4 bytes per parameter whose optimizer state this rank holds: all of them
at stage 0, and 1/N of them on N ranks from stage 1 on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from zerocli.engine.engine import Engine
from zerocli.engine.states import states
from zerocli.engine.states.held import joined, load_whole, read_held, whole_of
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.errors import Refused
from zerocli.layout.shards import Layout


@dataclass(frozen=True)
class Part:
    """This rank's part of the average of one flat: the elements whose master it holds."""

    layout: Layout
    average: torch.Tensor


class EMA:
    """Averages the engine's trainable parameters: `update()` after each step, `applied()` to compute with them.

    `device` is where the average is kept; by default the engine's own, or the host where states are offloaded.
    """

    def __init__(self, engine: Engine, decay: float = 0.999, device: torch.device | str | None = None) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, not {decay}")
        self._engine, self.decay = engine, decay
        self._device = torch.device(device) if device is not None else None
        self.updates = 0
        """Number of updates so far; the first one copies the parameters."""
        self._applied = False
        engine.synchronize()
        self._parts = {_key(flat): self._part(flat) for flat in engine.trainable()}

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Move the average towards the parameters: average = decay * average + (1 - decay) * parameters."""
        self._refuse_applied("update()")
        decay = self.decay if decay is None else decay
        engine = self._engine
        engine.synchronize()
        for flat in self._flats():
            average = self._parts[_key(flat)].average
            now = read_held(flat, MASTER, engine.device).to(average.device)
            if self.updates == 0:
                average.copy_(now)
            else:
                average.lerp_(now, 1.0 - decay)
        self.updates += 1

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averaged parameters, whole, fp32, on the CPU, with the model's frozen parameters and buffers.

        It uses the model's own names, so a plain model can load it. Collective: every rank gets all of it.
        """
        self._refuse_applied("state_dict()")
        engine = self._engine
        engine.meet("ema.state_dict", f"{self.updates} updates")
        averages = {id(flat): self._parts[_key(flat)].average for flat in self._flats()}
        engine.synchronize()
        return states.model_state(engine, averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `state_dict`, saved at any stage, placement and world size; every rank passes the same."""
        self._refuse_applied("load_state_dict()")
        engine = self._engine
        flats = self._flats()
        engine.synchronize()
        averages = {id(flat): self._parts[_key(flat)].average for flat in flats}
        current = functools.partial(states.parameter_values, engine, averages)
        loaded = states.read_state(engine.model, state, False, engine.tensor_parallel, current).tensors
        members = [(e.name, p) for flat in flats for e, p in zip(flat.layout.entries, flat.parameters, strict=True)]
        if missing := sorted(name for name, p in members if id(p) not in loaded):
            raise ValueError(f"the state has no average of {missing}")
        for flat in flats:
            rows = zip(flat.layout.entries, flat.parameters, strict=True)
            whole = joined(flat, (engine.tensor_parallel.part(e.name, loaded[id(p)]) for e, p in rows), engine.device)
            self._parts[_key(flat)].average.copy_(whole[flat.held.start : flat.held.stop])
        self.updates = max(self.updates, 1)  # what was loaded is an average: the next update does not replace it

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged parameters in the model while the body runs, then restore its own bit for bit.

        Collective. Training steps inside the body are refused when it ends: they would be lost.
        """
        self._refuse_applied("applied()")
        engine = self._engine
        engine.meet("ema.applied", f"{self.updates} updates")
        engine.synchronize()
        steps, flats = engine.steps, self._flats()
        trained = {_key(flat): self._copy(flat) for flat in flats}
        self._applied = True
        try:
            for flat in flats:
                self._put(flat, self._parts[_key(flat)].average)
            engine.hooks.parameters_changed(flats)
            yield
        finally:
            engine.meet("the end of ema.applied")
            engine.synchronize()
            for flat in flats:
                self._put(flat, trained[_key(flat)])
            engine.hooks.parameters_changed(flats)
            self._applied = False
        if engine.steps != steps:
            raise Refused(
                f"{engine.steps - steps} steps were made inside ema.applied(), and the parameters that they changed "
                "are the trained ones again; call engine.step() outside of it"
            )

    def _flats(self) -> list[Flat]:
        """Return the trainable flats; if they were laid out again (a parameter was unfrozen), so is the average."""
        flats = list(self._engine.trainable())
        gone = self._parts.keys() - {_key(flat) for flat in flats}
        new = [flat for flat in flats if _key(flat) not in self._parts]
        if gone or new:
            self._lay_out_anew(sorted(gone), new)
        return flats

    @torch.no_grad()
    def _lay_out_anew(self, gone: list[tuple[str, ...]], new: list[Flat]) -> None:
        """Move averages to the current flats of their parameters; a newly trained parameter starts at its value."""
        engine = self._engine
        engine.meet("ema after unfreezing", len(gone), len(new))
        averages: dict[str, torch.Tensor] = {}
        for key in gone:
            part = self._parts.pop(key)
            whole = whole_of(engine.shards, part.layout.total, part.average.to(engine.device))
            averages |= {e.name: whole[e.offset : e.offset + e.numel].view(e.shape) for e in part.layout.entries}
        for flat in new:
            part = self._parts[_key(flat)] = self._part(flat)
            whole = whole_of(engine.shards, flat.layout.total, part.average.to(engine.device))
            for entry, view in zip(flat.layout.entries, flat.views(whole), strict=True):
                if entry.name in averages:
                    view.copy_(averages[entry.name])
            part.average.copy_(whole[flat.held.start : flat.held.stop])

    def _part(self, flat: Flat) -> Part:
        return Part(flat.layout, self._copy(flat))

    @torch.no_grad()
    def _copy(self, flat: Flat) -> torch.Tensor:
        held = read_held(flat, MASTER, self._engine.device)
        device = self._device or (torch.device("cpu") if flat.record is not None else self._engine.device)
        return held.detach().to(device, torch.float32, copy=True)

    @torch.no_grad()
    def _put(self, flat: Flat, held: torch.Tensor) -> None:
        """Set the flat's parameters from every rank's held part. Collective."""
        engine = self._engine
        whole = whole_of(engine.shards, flat.layout.total, held.to(engine.device))
        load_whole(flat, whole.to(engine.device))
        engine.forget_traffic()

    def _refuse_applied(self, call: str) -> None:
        if self._applied:
            raise Refused(f"{call} inside ema.applied(): the parameters are the average there; call it outside")


def _key(flat: Flat) -> tuple[str, ...]:
    """Return a key that identifies a flat: its unit, and the names and positions of its parameters."""
    return (flat.unit.name, *(f"{entry.name}@{entry.offset}" for entry in flat.layout.entries), str(flat.held))
