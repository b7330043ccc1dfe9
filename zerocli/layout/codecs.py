"""Codecs of frozen parameters: how many bytes a flat takes when it is stored in 4 or 8 bits. Integers only.

A flat is encoded in grains of consecutive elements, each of which can be encoded and decoded by itself. Parameters and
slices of ranks are whole grains, so what is stored depends neither on the number of ranks nor on a parameter's
neighbours.
"""

from __future__ import annotations

import re

GRAIN = 16384
"""Elements of a grain."""
NF4_BLOCK, NF4_SCALES = 64, GRAIN // 64
"""Elements that share a scale, and the scales of a grain, which share two numbers."""
INT8_BLOCK = 256
GRAIN_NBYTES = {
    "nf4": GRAIN // 2 + NF4_SCALES + 2 * 4,  # 4.13 bits per element
    "int8": GRAIN + GRAIN // INT8_BLOCK * 4,  # 8.13 bits
}
"""Bytes of an encoded grain, by codec."""
CODECS = tuple(GRAIN_NBYTES)
BASES = ("", "bf16", *CODECS)
"""What a frozen base may be stored in; empty and bf16: as it computes."""
DECODED_AT_A_TIME = 64 * GRAIN
"""Elements that are decoded together by torch's operations, through scratch memory; a GPU's kernel needs none."""
SCRATCH_NBYTES = {"nf4": 6, "int8": 4}
"""Bytes of scratch memory per element that is being decoded."""
_ENCODING_WIDTHS = {"nf4": (4, 8, 1), "int8": (4, 1)}
"""Bytes per element of what is there while elements are encoded: scaled values and codes, beside their fp32 values."""
_KEPT = re.compile(r"(^|\.)(router|gate|lora|lora_[A-Za-z_]+)(\.|$)")
"""Modules of a block whose matrices are not encoded: routers, and adapters, which generation freezes too."""


def encoded_nbytes(codec: str, numel: int) -> int:
    """Return the bytes of as many elements, a multiple of the grain."""
    assert numel % GRAIN == 0
    return numel // GRAIN * GRAIN_NBYTES[codec]


def scratch_nbytes(codec: str, numel: int, device: str) -> int:
    """Return the bytes of scratch memory that is kept for decoding as many elements."""
    return min(numel, DECODED_AT_A_TIME) * SCRATCH_NBYTES[codec] if device == "cpu" else 0


def encoded_at_a_time(device: str) -> int:
    """Return the elements that are encoded together; a GPU takes more, which needs fewer launches."""
    return DECODED_AT_A_TIME * (8 if device == "cuda" else 1)


def encoding_nbytes(codec: str, numel: int, width: int, device: str) -> list[int]:
    """Return the sizes of the buffers that are there at once while as many elements of this width are encoded."""
    together = min(numel, encoded_at_a_time(device))
    copy = [4] if width < 4 else []
    scales = together // (NF4_BLOCK if codec == "nf4" else INT8_BLOCK) * 4
    return [scales, *(together * each for each in (*copy, *_ENCODING_WIDTHS[codec]))]


def is_encoded(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a frozen parameter of a repeated block is encoded: a matrix, or several, but not a router's."""
    return len(shape) >= 2 and not _KEPT.search(name.rpartition(".")[0])
