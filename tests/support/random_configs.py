"""Configs of random legal values."""

from __future__ import annotations

from hypothesis import strategies as st

from zerocli.config import FIELDS, draft

OF_LLAMA = {f"model.{key}" for key in ("head_dim", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "window")}


@st.composite
def configs(draw):
    """Configs of random legal values."""
    values = {}
    for key, field in FIELDS.items():
        law = field.metadata
        if law.get("choices"):
            values[key] = draw(st.sampled_from(law["choices"]))
        elif field.type is int and key not in ("model.heads", "model.kv_heads", "model.hidden", "parallel.tp"):
            values[key] = draw(st.integers(law["least"], law.get("most", 2**62)))
        elif field.type is bool:
            values[key] = draw(st.booleans())
        elif field.type is float:
            values[key] = draw(st.floats(0.01, 0.99))
    if values["model.code"] == "transformers":
        values["model.code"] = "auto"  # it needs a folder
    if not values["train.eval_every"]:
        values |= {"checkpoint.best": False, "train.patience": 0}  # which need evaluations
    if not values["lora.rank"]:
        values = {key: value for key, value in values.items() if not key.startswith("lora.")}
    values["parallel.shard_ranks"] = draw(st.sampled_from((0, 1, values["parallel.ranks"])))
    values["data.path"] = draw(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    values["optimizer.options"] = draw(st.dictionaries(st.text("ab", min_size=1), st.lists(st.integers(0, 9))))
    values["offload.nvme_path"] = tuple(draw(st.lists(st.text("/ab", min_size=1), max_size=3)))
    if values["model.family"] == "gpt2":
        values = {key: value for key, value in values.items() if key not in OF_LLAMA}
    else:
        values["model.head_dim"] *= 2
        values["model.head_dim"] %= 2**62
        values["model.window_layers"] = draw(st.sampled_from(("", "0")))
        values["model.rope_scaling"] = draw(st.sampled_from(({}, {"rope_type": "linear", "factor": 2.0})))
    values["model.positions"] = draw(st.sampled_from((0, values["train.seq"], 2**62)))
    return draft.build(values)
