"""Law: the built-in code computes what transformers computes, for every family and every kind of position scaling."""

from __future__ import annotations

import pytest
import torch
from hf_models import CASES, SEQ, load_config, our_model, their_model, tokens_of, values_of

from zerocli.models import hugging

pytest.importorskip("transformers", reason="transformers is an optional extra")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = their_model(values_of(name))
    config = load_config(values_of(name), tmp_path)
    ours = our_model(config, theirs.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad():
        for seq in (SEQ, 5):  # 5 tokens are within every window
            expected = theirs(tokens_of(seq)).logits
            torch.testing.assert_close(ours(tokens_of(seq)), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_written_as_it_was_read(name, tmp_path):
    """transformers builds the same model from what an export writes, under the same type, and we read it again."""
    values = values_of(name)
    config = load_config(values, tmp_path)
    written = hugging.config_json(config.model, SEQ, "float32")
    assert written["model_type"] == values["model_type"]
    assert load_config(written, tmp_path).model == config.model
    theirs, again = their_model(values), their_model(written)
    assert type(again) is type(theirs)
    again.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tokens_of()).logits, theirs(tokens_of()).logits)
    key = "n_positions" if values["model_type"] == "gpt2" else "max_position_embeddings"
    assert written[key] == 64, "not cut to the sequences of training"


def test_a_shape_that_no_type_has_keeps_its_own_names(tmp_path):
    import dataclasses

    model = load_config(values_of("qwen3"), tmp_path).model
    assert hugging.known(dataclasses.replace(model, mlp_bias=True))
    assert hugging.type_of(dataclasses.replace(model, type="llama")) == "qwen3"
    assert hugging.type_of(dataclasses.replace(model, type="llama", qk_norm=False)) == "llama"
