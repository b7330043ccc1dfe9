"""Colours of the profile's page: one for each meaning, the same in every chart and every run.

A phase has the colour of what it makes or updates (forward: activations, backward: gradients, optimizer: optimizer
states), and so has the stream that carries it.
"""

from __future__ import annotations

CATEGORIES = {
    "parameters": "#4477aa",
    "gradients": "#ee6677",
    "optimizer_states": "#228833",
    "gathered": "#66ccee",
    "activations": "#ccbb44",
    "logits": "#aa3377",
    "buffers": "#9a8c78",
    "runtime": "#7f7f7f",
    "unattributed": "#e02020",
}
_TO_DEVICE, _TO_HOST, _READ, _WRITE, _COMPUTE = "#7a5cc0", "#b39ddb", "#8d5524", "#c68642", "#5b6472"
PHASES = {
    "forward": CATEGORIES["activations"],
    "backward": CATEGORIES["gradients"],
    "optimizer": CATEGORIES["optimizer_states"],
    "between steps": "#b9bfca",
}
LANES = {
    "compute": _COMPUTE,
    "gather": CATEGORIES["gathered"],
    "reduce": CATEGORIES["gradients"],
    "host to device": _TO_DEVICE,
    "device to host": _TO_HOST,
    "disk read": _READ,
    "disk write": _WRITE,
    "update": CATEGORIES["optimizer_states"],
}
CAUSES = {
    "compute": _COMPUTE,
    "collectives": CATEGORIES["gathered"],
    "transfers": _TO_DEVICE,
    "optimizer": CATEGORIES["optimizer_states"],
    "data": _READ,
    "wait": "#b9bfca",
}
OTHER = "#a0a7b4"
"""Of a name that is none of these: one that another version wrote."""
