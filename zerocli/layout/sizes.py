"""Sizes as people write them: bytes (`GB` is 1e9, `GiB` is 2**30) and parameter counts (`7.5B`)."""

import re
from fractions import Fraction

from zerocli.errors import quote

BYTE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    BYTE_UNITS[_letter + "B"] = 1000**_power
    BYTE_UNITS[_letter + "IB"] = 1024**_power
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_QUANTITY = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([A-Za-z]*)")


def _split(text: str) -> tuple[Fraction, str] | None:
    matched = _QUANTITY.fullmatch(text.strip())
    return (Fraction(matched[1]), matched[2].upper()) if matched else None


def parse_bytes(value: str | int) -> int:
    """Return the bytes that `20GiB`, `80GB`, `1.5TB` or a bare integer mean, rounded down."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{quote(value)} is not a size: it is below 0")
        return value
    parts = _split(value) if isinstance(value, str) else None
    if parts is None:
        raise ValueError(f"{quote(value)} is not a size: write bytes, or a number and a unit, such as 20GiB or 80GB")
    number, unit = parts
    if unit in {"K", "M", "G", "T"}:
        raise ValueError(f"{quote(value)} is not a size: write {unit}B (powers of 1000) or {unit}iB (powers of 1024)")
    if unit not in BYTE_UNITS:
        raise ValueError(f"{quote(value)} is not a size: {unit} is not one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB")
    if not unit and number.denominator != 1:
        raise ValueError(f"{quote(value)} is not a size: a fraction needs a unit, such as 1.5GiB")
    return int(number * BYTE_UNITS[unit])


def parse_memory(value: str | int) -> int:
    """Return the bytes of a memory or a disk; a bare number from 1 to 1 MiB is refused: its unit is missing."""
    nbytes = parse_bytes(value)
    if 0 < nbytes < 2**20 and str(value).strip().isdigit():
        raise ValueError(f"{nbytes} has no unit: did you mean {nbytes}GiB?")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` in GiB with three digits or more; in MiB, KiB or B if that would print below 1."""
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        scaled = size / scale
        if round(scaled, 2) >= 1:
            digits = 2 if scaled < 9.995 else 1 if scaled < 999.95 else 0
            return f"{sign}{scaled:.{digits}f} {unit}"
    return f"{sign}{size:.0f} B"


def parse_count(value: str | int) -> int:
    """Return the number of parameters that `7.5B`, `124M`, `1T`, `300K` or a bare integer means."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    parts = _split(value) if isinstance(value, str) else None
    if parts is None or parts[1] not in COUNT_UNITS:
        raise ValueError(f"{quote(value)} is not a parameter count: write it as 124M, 7.5B or 1T (K, M, B, T)")
    count = int(parts[0] * COUNT_UNITS[parts[1]])
    if count < 1:
        raise ValueError(f"{quote(value)} is not a parameter count: it is below 1")
    if not parts[1] and parts[0].denominator != 1:
        raise ValueError(f"{quote(value)} is not a parameter count: did you mean {value}B?")
    return count


def format_count(count: int) -> str:
    """Return `count` with three significant digits and K, M, B or T: 124M, 7.5B, 1T."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        # The next unit begins where three digits would round up to it: 999_600 is 1M.
        if count >= scale * 0.9995:
            scaled = count / scale
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            text = f"{scaled:.{digits}f}"
            return (text.rstrip("0").rstrip(".") if digits else text) + unit
    return str(count)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits, in the unit that suits it."""
    if 0 < seconds < 1e-6:
        return "under 1 us"
    for limit, unit, scale in ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (600.0, "s", 1.0), (36e3, "min", 1 / 60)):
        if seconds < limit * 0.9995:  # the next unit begins where three digits would round up to it
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
