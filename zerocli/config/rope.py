"""Scaling of rotary positions (`rope_scaling` or `rope_parameters` of a Hugging Face config): its types and their keys.

The frequencies themselves are computed in `zerocli.models.rope`. (No torch.)
"""

from collections.abc import Mapping
from typing import Any

from zerocli.errors import quote

_ORIGINAL = "original_max_position_embeddings"
# Required keys and optional ones, by type. `dynamic` changes nothing up to the positions of the model, and longer
# sequences are refused.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
TYPES = ("default", *_KEYS)


def read_rope(values: Mapping[str, Any], positions: int) -> tuple[dict[str, Any], object]:
    """Return (scaling, theta) of a Hugging Face config, as transformers reads them; `{}` is no scaling.

    `rope_scaling` goes before `rope_parameters`, and a theta inside either before one beside it. Values are not
    checked: `broken_rope` does that.
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        return {"rope_type": given}, values.get("rope_theta")
    found = {key: value for key, value in given.items() if value is not None and key not in ("type", "rope_theta")}
    theta = given.get("rope_theta", values.get("rope_theta"))
    kind = given.get("rope_type", given.get("type", "default"))
    if found.get("partial_rotary_factor") == 1:
        del found["partial_rotary_factor"]
    found.pop("rope_type", None)
    if kind == "default" and not found:
        return {}, theta
    if kind in ("llama3", "yarn"):
        original = values.get(_ORIGINAL)
        found[_ORIGINAL] = found.get(_ORIGINAL, positions) if original is None else original
    if kind == "yarn" and "factor" not in found and isinstance(found[_ORIGINAL], int) and found[_ORIGINAL] > 0:
        found["factor"] = positions / found[_ORIGINAL]
    return {"rope_type": kind, **found}, theta


def broken_rope(scaling: Mapping[str, Any]) -> str:
    """Return why the built-in models cannot scale positions like this; empty if they can."""
    if not scaling:
        return ""
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in TYPES:
        return f"type {quote(kind)} is not built in: {', '.join(TYPES)} are"
    required, optional = _KEYS.get(kind, ((), ()))
    for key in required:
        if key not in scaling:
            return f"of type {kind} has no {key}"
    for key, value in scaling.items():
        if key == "rope_type":
            continue
        if key not in (*required, *optional):
            return f"of type {kind} has a key {quote(key)}, which is not built in"
        if key == "truncate":
            if not isinstance(value, bool):
                return f"{key} {quote(value)} is not true or false"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            return f"{key} {quote(value)} is not a number above 0"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return "high_freq_factor is not above low_freq_factor"
    return ""
