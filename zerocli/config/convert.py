"""Convert values from a file or a command line to a field's type; ValueError says what is wrong with a value."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from offload.placement import Placement, PlacementError
from zerocli.config import file as configfile
from zerocli.config.placement import read_placement
from zerocli.errors import quote
from zerocli.layout.sizes import parse_bytes, parse_memory


def convert(field: dataclasses.Field[Any], value: object, raw: str | None) -> object:
    """Return `value` converted to the field's type; raise ValueError that says what is wrong with it."""
    kind = field.type
    if kind is str:
        return _text(value if isinstance(value, str) or raw is None else raw)
    if kind is Placement:
        return _placement(value if isinstance(value, (str, Placement)) or raw is None else raw)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{quote(value)} is not true or false")
        return value
    if kind == bool | str:
        if not isinstance(value, bool | str):
            raise ValueError(f"{quote(value)} is not text, true or false")
        return value
    if kind is int and field.metadata.get("memory") and (raw is not None or isinstance(value, str)):
        return _whole(parse_memory(value if isinstance(value, str) else str(raw)))
    if kind is int and field.metadata.get("share") and isinstance(value, float) and 0 < value < 1:
        return value
    if kind is int:
        return _whole(parse_bytes(value) if field.metadata.get("size") and isinstance(value, str) else value)
    if kind is float:
        return _number(value)
    if field.name in ("options", "rope_scaling"):
        return _options(value)
    if raw is not None and isinstance(value, str):
        # A list on the command line needs no brackets: 0.9,0.95
        value = configfile.parse_set(f"value=[{raw}]")[1] if kind == tuple[float, float] else raw.split(",")
    if kind == tuple[str, ...]:
        return tuple(map(_text, [value] if isinstance(value, str) else _listed(value)))
    pair = tuple(map(_number, _listed(value)))
    if len(pair) != 2:
        raise ValueError(f"{quote(value)} is not two numbers")
    return pair


def _listed(value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{quote(value)} is not a list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quote(value)} is not text: it needs quotes")
    if "\0" in value:
        raise ValueError(f"{quote(value)} has a zero byte in it")
    return value


def _placement(value: object) -> Placement:
    try:
        return read_placement(value if isinstance(value, Placement) else _text(value))
    except PlacementError as error:
        raise ValueError(f"{error.text!r}: {error.fact}") from error  # the caller prefixes the key's name


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        raise ValueError(f"{quote(value)} is not a whole number" + (f": write {int(value)}" if exact else ""))  # type: ignore[call-overload]
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{quote(value)} is beyond 64 bits")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{quote(value)} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{quote(value)} is not finite")
    return float(value)


def _options(value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{quote(value)} is not a table")

    def plain(item: object) -> object:
        if isinstance(item, Mapping):
            return {_text(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        if isinstance(item, (str, bool)):
            return item
        return _whole(item) if isinstance(item, int) else _number(item)

    return {_text(key): plain(item) for key, item in value.items()}
