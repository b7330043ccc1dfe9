"""Building: turns a model into units whose states are placed as the stage and the placement say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.mover import StagedStore
from offload.placement import HBM, Placement, Share
from offload.record import Record
from offload.store import Store
from offload.tierset import shortage
from zerocli.engine.guards.aliases import Aliases
from zerocli.engine.states import materialise
from zerocli.engine.states.buffers import place_buffers
from zerocli.engine.states.named import given, load_buffers
from zerocli.engine.units.codecs import encode
from zerocli.engine.units.divide import claim_parameters, find_units, repeated_units
from zerocli.engine.units.master import REMAINDER, narrow, split
from zerocli.engine.units.unit import MASTER, REPLICATED, Flat, Unit
from zerocli.errors import Refused
from zerocli.layout.buffers import gradient_arenas, gradients
from zerocli.layout.codecs import is_encoded
from zerocli.layout.flats import FlatSpec, align_of, flat_spec, place
from zerocli.layout.shards import lay_out
from zerocli.layout.sizes import format_bytes
from zerocli.ranks.startup import STARTUP

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


class DoesNotFit(Exception):
    """A tier is too small for what the placement puts there; `hint` is the nearest placement that fits."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Builder:
    """Builds the units of a model for one rank."""

    def __init__(self, engine: Engine) -> None:
        self._model, self._settings, self._sizing = engine.model, engine.settings, engine.sizing
        self._compute, self._states = engine.precision.compute, tuple(engine.rule.state_names)
        self._groups = engine.arranged.group_of
        self.placement, self._tiers, self._mover = engine.placement, engine.tiers, engine.mover
        self._collectives, self._shards = engine.collectives, engine.shards
        self._tensor_parallel = engine.tensor_parallel
        self._device = engine.device
        self._mixed = mixes(self._model, self._compute)

    def build(self) -> list[Unit]:
        """Return the units, filled with initial values; raise DoesNotFit before anything is allocated."""
        self._given = given(self._model, self._settings.state, self._tensor_parallel)
        fresh = materialise.replace_meta(self._model, self._device)
        claimed = claim_parameters(self._model, find_units(self._model, self._settings.units))
        units = [unit for unit, _ in claimed]
        self._blocks = {unit.index for unit in repeated_units(units)}
        for unit, named in claimed:
            self.lay_out(unit, named, lambda p: p.requires_grad)
        if self._settings.codec and all(flat.trainable for flat in _flats(units)):
            fact = f"base={self._settings.codec!r} stores what is frozen in fewer bits, and every parameter is trained"
            raise ValueError(f"{fact}: zerocli.lora(model, rank=16) before shard, or requires_grad_(False)")
        self._preflight(units)
        self.aliases = Aliases(self._model, self._device)
        self.aliases.find(_flats(units), fresh)
        place_buffers(self._model, fresh, self._collectives, self._device)
        for flat in _flats(units):
            self._fill(flat, fresh)
            STARTUP.move()
        self._allocate_gradients([flat for unit in reversed(units) for flat in unit.trainable])
        materialise.reset_buffer_owners(self._model, fresh, self._settings.seed, self._device)
        if self._settings.state is not None:
            load_buffers(self._model, self._settings.state)
        return units

    def _group_of(self, name: str, parameter: nn.Parameter) -> int:
        if name not in self._groups:
            raise ValueError(f"{name} is trainable, but the optimizer instance was made without it")
        return self._groups[name] + REPLICATED * self._tensor_parallel.replicates(name)

    def place(self, units: list[Unit], flats: list[Flat], values: Callable[[Flat], torch.Tensor]) -> None:
        """Place and fill `flats`, the new flats of `units`; their other flats are placed already."""
        everything = list(_flats(units))
        placed = place([flat.spec for flat in everything], self.placement, self._sizing)
        for flat, spec in zip(everything, placed, strict=True):
            if flat in flats:
                flat.spec = spec
                self._place(flat, values(flat))
        self._allocate_gradients([flat for flat in flats if flat.trainable])

    def lay_out(
        self, unit: Unit, named: Sequence[tuple[str, nn.Parameter]], trains: Callable[[nn.Parameter], bool]
    ) -> None:
        """Lay out a unit's parameters in flats for this rank, by what trains, dtype and codec; allocates nothing.

        Frozen matrices of repeated blocks are encoded, if a codec is given; beside a base that is loaded, only its own.
        """
        codec, base = self._settings.codec if unit.index in self._blocks else "", self._settings.loaded_base
        kinds: dict[tuple[bool, torch.dtype, str], list[tuple[str, nn.Parameter]]] = {}
        for name, p in named:
            if trains(p) and not p.dtype.is_floating_point:
                raise Refused(
                    f"{name} is {p.dtype}: only real floating-point parameters can be trained; keep a complex one as a "
                    "real tensor of shape (..., 2) and use torch.view_as_complex in forward"
                )
            dtype, frozen = self._dtype_of(name, p), not trains(p)
            real = dtype.is_floating_point and dtype.itemsize > 1
            encoded = frozen and real and is_encoded(name, tuple(p.shape)) and (base is None or base.holds(name))
            kinds.setdefault((not frozen, dtype, codec if encoded else ""), []).append((name, p))
        world, rank, stage = self._shards.world, self._shards.rank, self._sizing.stage
        for (trainable, dtype, used), members in kinds.items():
            places = [(n, tuple(p.shape), self._group_of(n, p) if trainable else 0) for n, p in members]
            layout, by_name = lay_out(places, world, align_of(used)), dict(members)
            ordered = [by_name[entry.name] for entry in layout.entries]
            spec = flat_spec(unit.name or "rest", layout, dtype.itemsize, stage, world, rank, trainable, used)
            unit.flats.append(Flat(unit, spec, ordered, dtype))

    def _dtype_of(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """Return a parameter's compute dtype: fp32 if the user asked to keep it so, else the precision's."""
        if not parameter.dtype.is_floating_point:
            return parameter.dtype
        if parameter.dtype == torch.float64:
            raise Refused(f"{name} is float64, and training is in fp32, bf16 or fp16: call model.float() before shard")
        if parameter.dtype.itemsize == 1:
            if parameter.requires_grad:
                raise Refused(f"{name} is {parameter.dtype}: freeze it, or train it in fp32, bf16 or fp16")
            return parameter.dtype
        if matches(self._settings.keep_fp32, name, parameter) or (self._mixed and parameter.dtype == torch.float32):
            return torch.float32
        return self._compute

    # -- where things go -------------------------------------------------------------------------------------------

    def _preflight(self, units: list[Unit]) -> None:
        """Assign every piece to a tier; raise DoesNotFit if a tier is too small."""
        specs = place([flat.spec for flat in _flats(units)], self.placement, self._sizing)
        for flat, spec in zip(_flats(units), specs, strict=True):
            flat.spec = spec
        over = shortage(self.placement, self._needed(specs), self._tiers)
        if over:
            facts = "; ".join(f"{n}: {format_bytes(need)} needed, {format_bytes(has)} there" for n, need, has in over)
            raise DoesNotFit(f"it does not fit (each rank's share of the node): {facts}", self._nearest(units))

    def _needed(self, specs: list[FlatSpec]) -> Counter[str]:
        """Return the bytes that placed flats need on each tier."""
        needed: Counter[str] = Counter()
        for spec in specs:
            for kind, nbytes in spec.pieces(self._sizing).items():
                needed[spec.tiers[kind]] += nbytes
        return needed

    def _nearest(self, units: list[Unit]) -> str:
        """Return the first placement that fits, trying small changes first."""
        kinds = list(self.placement.shares)
        for word, tier in (("nvme", "nvme"), ("cpu", "dram")):
            for moved in (["optimizer"], ["optimizer", "parameters"], kinds):
                shares = dict(self.placement.shares) | {kind: (Share(tier),) for kind in moved if kind in kinds}
                other = Placement(shares)
                specs = place([flat.spec for flat in _flats(units)], other, self._sizing)
                if not shortage(other, self._needed(specs), self._tiers):
                    short = {"parameters": "params", "gradients": "grads", "dram": "cpu"}
                    now = {k: "+".join(short.get(s.tier, s.tier) for s in self.placement.of(k)) for k in kinds}
                    text = ",".join(f"{short.get(k, k)}={word if k in moved else now[k]}" for k in kinds)
                    return f"--offload {text}"
        return "more ranks, or a larger machine"

    def arrays(self, flat: Flat) -> dict[str, torch.dtype]:
        """Return the dtype of the master beside the parameters, if there is one, and of the states, by name."""
        arrays = dict.fromkeys(self._states, torch.float32)
        if flat.dtype == torch.float32:
            return arrays
        return ({REMAINDER: torch.int16} if self._sizing.split_master else {MASTER: torch.float32}) | arrays

    # -- filling ---------------------------------------------------------------------------------------------------

    def _fill(self, flat: Flat, fresh: materialise.Fresh) -> None:
        """Fill a flat with its initial values and create this rank's states of it, each on its tier."""

        def initialise() -> None:
            materialise.initialise_modules(self._model, flat, self._settings.seed, self._device)

        # If all values of a flat are loaded next; beside a base, adapters have initial values of their own.
        base = self._settings.loaded_base
        empty = self._settings.empty and (base is None or all(base.holds(each.name) for each in flat.layout.entries))
        with torch.no_grad():
            if empty and all(id(parameter) in fresh for parameter in flat.parameters):
                self._place(flat, torch.zeros((), device=self._device).expand(flat.layout.total), empty=True)
                return
            whole = materialise.whole_values(flat, fresh, initialise, self._collectives, self._device, self._given)
            self._place(flat, whole)

    def _place(self, flat: Flat, whole: torch.Tensor, empty: bool = False) -> None:
        """Place a flat's values and states; with `empty`, `whole` is one zero, expanded, and takes no memory."""
        self._place_parameters(flat, whole, flat.spec.tiers["parameters"], empty)
        if flat.trainable:
            self._place_states(flat, whole[flat.held.start : flat.held.stop], flat.spec.tiers["optimizer"], empty)

    def _place_parameters(self, flat: Flat, whole: torch.Tensor, tier: str, empty: bool) -> None:
        mine = whole[flat.own.start : flat.own.stop]
        if flat.spec.resident(self._sizing):
            flat.resident = _zeros(whole, flat.dtype) if empty else narrow(whole, flat.dtype)
            flat.shard = flat.resident[flat.own.start : flat.own.stop]
            flat.attach(flat.resident, flat.views(flat.resident))
            return
        kept = self._stored(flat, mine, tier == HBM, empty)
        if tier == HBM:
            flat.shard = kept
        else:
            flat.param_store = self.open_parameters(flat, tier, kept.numel(), kept.dtype)
            flat.param_store.put(0, kept).synchronize()
        flat.detach()

    def _stored(self, flat: Flat, mine: torch.Tensor, copy: bool, empty: bool) -> torch.Tensor:
        """Return this rank's slice as it is stored: in the compute dtype, or encoded."""
        if flat.codec and empty:
            return torch.zeros(flat.spec.own_nbytes, dtype=torch.uint8, device=mine.device)
        if flat.codec:
            return encode(flat.codec, narrow(mine, flat.dtype))
        # On the device a copy, as a slice would keep the whole buffer's memory alive.
        return _zeros(mine, flat.dtype) if empty else narrow(mine, flat.dtype, copy=copy)

    def open_parameters(self, flat: Flat, tier: str, numel: int, dtype: torch.dtype) -> Store:
        """Return an empty store for a flat's own slice; tiers that the device cannot read directly are staged."""
        opened = self._tiers.open(tier, "parameters")
        about = (opened, "parameters", numel, dtype, self._tiers.traffic, self._tiers.verifier)
        store = Store(*about) if opened.addressable or not opened.stores else StagedStore(self._mover, *about)
        store.what = f"the parameters of {flat.unit.title}"
        return store

    def open_states(self, flat: Flat, tier: str) -> Record:
        """Return an empty record for a flat's master and optimizer states."""
        cuts = [0, *(span.stop for span in flat.spec.chunks(self._sizing.chunk))]
        opened = self._tiers.open(tier, "optimizer")
        record = Record(opened, self.arrays(flat), cuts, self._tiers.traffic, self._tiers.verifier)
        record.store.what = f"the optimizer states of {flat.unit.title}"
        return record

    def open_gradient(self, flat: Flat, tier: str) -> Store:
        """Return an empty store for a flat's gradient."""
        about = (self._tiers.open(tier, "gradients"), "gradients", flat.held.numel, flat.gradient.dtype)
        store = Store(*about, self._tiers.traffic, self._tiers.verifier)
        store.what = f"the gradients of {flat.unit.title}"
        return store

    def _place_states(self, flat: Flat, held: torch.Tensor, tier: str, empty: bool) -> None:
        arrays = self.arrays(flat)
        master = {MASTER: held} if MASTER in arrays else {}
        if REMAINDER in arrays:
            master = {REMAINDER: _zeros(held, torch.int16) if empty else split(held)[1]}
        if tier != HBM:
            flat.record = self.open_states(flat, tier)
            flat.record.fill(master)
        elif MASTER in arrays:
            flat.master = _zeros(held, torch.float32) if empty else held.clone()
        elif REMAINDER in arrays:
            flat.remainder = master[REMAINDER]
        if flat.dtype == torch.float32 and flat.param_store is None:  # the parameters are the master
            flat.master = flat.held_parameters
        if flat.record is None:
            flat.states = {name: _zeros(held, torch.float32) for name in self._states}

    def _allocate_gradients(self, flats: list[Flat]) -> None:
        """Allocate the gradients of trainable flats that stay: a shard each, or a part of one arena in backward order.

        In one arena, gradients of neighbouring flats are contiguous and can be reduced together.
        """
        for flat in flats:
            STARTUP.move()
            as_computed = self._sizing.grad_width(flat.spec.width) == flat.spec.width
            flat.gradient.dtype = flat.dtype if as_computed else torch.float32
            flat.gradient.is_whole = not self._sizing.stage.gradients
            flat.gradient.stays = self._sizing.keep_gradients
            if flat.gradient.is_whole:
                continue
            spec = gradients(flat.spec, self._sizing)
            if spec.tier != HBM:
                flat.gradient.store = self.open_gradient(flat, spec.tier)
            elif flat.gradient.stays:
                flat.gradient.open(self._device)
        for spec in gradient_arenas([flat.spec for flat in flats], self._sizing):
            alike = [flat for flat in flats if self._sizing.grad_width(flat.spec.width) == spec.width]
            arena = torch.zeros(spec.numel, dtype=alike[0].gradient.dtype, device=self._device)
            at = 0
            for flat in alike:
                flat.gradient.place(arena[at : at + flat.layout.total])
                at += flat.layout.total


def _zeros(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return as many zeros, which take memory once they are written."""
    return torch.zeros(values.shape, dtype=dtype, device=values.device)


def _flats(units: list[Unit]) -> Iterator[Flat]:
    for unit in units:
        yield from unit.flats


def matches(choice: Any, name: str, parameter: nn.Parameter) -> bool:
    """Whether `choice` matches: a regular expression (or several) found in the name, or a function."""
    if choice is None:
        return False
    if callable(choice):
        return bool(choice(name, parameter))
    patterns = [choice] if isinstance(choice, str) else choice
    return any(re.search(pattern, name) for pattern in patterns)


def mixes(model: nn.Module, compute: torch.dtype) -> bool:
    """Whether some parameters of the model are already in a compute dtype other than fp32."""
    return compute != torch.float32 and any(p.dtype == compute for p in model.parameters())
