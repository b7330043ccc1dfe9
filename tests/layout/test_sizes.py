"""Sizes read as they are written, and print so that they can be read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import CHARACTERS

from zerocli.layout.sizes import format_bytes, format_count, format_seconds, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        (" 1 kib ", 1024),
        (".5KB", 500),
        ("7", 7),
        (0, 0),
        (123, 123),
    ],
)
def test_bytes_are_powers_of_1000_or_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "20G", "20 XB", "-1", -1, True, None, "1e3", "1.5", "\u0663GB", "1" * 5000, 1.5]
)
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_a_bare_letter_is_told_apart():
    with pytest.raises(ValueError, match=r'"20G" is not a size: write GB \(powers of 1000\) or GiB'):
        parse_bytes("20G")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (512 * 2**20, "512.0 MiB"),
        (2**30, "1.00 GiB"),
        (1197 * 2**30 / 10, "119.7 GiB"),
        (16 * 2**40, "16384 GiB"),
        (-3 * 2**30, "-3.00 GiB"),
    ],
)
def test_memory_prints_in_gib(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**60))
def test_printed_bytes_read_back_within_half_a_percent(nbytes):
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= 0.0051 * nbytes + 1  # read back rounded down


@given(st.integers(0, 2**40), st.sampled_from(["B", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB"]))
def test_whole_units_are_exact(number, unit):
    base = 1024 if "i" in unit else 1000
    assert parse_bytes(f"{number}{unit}") == number * base ** ("BKMGT".index(unit[0]))


@given(st.text(CHARACTERS))
def test_any_text_is_a_size_or_a_value_error(text):
    for parse in (parse_bytes, parse_count):
        try:
            assert parse(text) >= 0
        except ValueError:
            pass


@pytest.mark.parametrize(
    ("text", "count"), [("7.5B", 7_500_000_000), ("124M", 124_000_000), ("1T", 10**12), ("300K", 300_000), ("12", 12)]
)
def test_counts_round_trip(text, count):
    assert parse_count(text) == count
    assert format_count(count) == text


@pytest.mark.parametrize("text", ["", "B", "0", "0B", "-1B", "7.5G", 0, True, None])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match="is not a parameter count"):
        parse_count(text)


@given(st.integers(1, 10**15))
def test_printed_counts_read_back_to_three_digits(count):
    assert abs(parse_count(format_count(count)) - count) <= 0.0051 * count
    assert len(format_count(count)) <= 5 or count >= 10**13


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (1e-9, "under 1 us"),
        (9.994e-4, "999 us"),
        (9.996e-4, "1 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (599.0, "599 s"),
        (1234.0, "20.6 min"),
        (3 * 86400.0, "72 h"),
    ],
)
def test_seconds_are_three_digits_in_the_unit_that_suits_them(seconds, text):
    assert format_seconds(seconds) == text
