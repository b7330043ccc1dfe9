"""`fit --max batch|seq|model`: the largest that fits with a margin, and the next that does not."""

from __future__ import annotations

import json

import pytest

from zerocli.cli import main as cli
from zerocli.plan.search.recompute import MARGIN

FEW_BLOCKS = ("gpt2-124m", "--set", "model.layers=4")
SMALL = (*FEW_BLOCKS, "--ranks", "2", "--hardware", "rtx4090")


pytestmark = pytest.mark.usefixtures("no_gpu")


def ask(capsys, *words):
    code = cli.run(["fit", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


OFFLOADED = ["--stage", "2", "--offload", "optimizer=cpu"]
LONG = [("batch", OFFLOADED), ("batch", ["--stage", "0"]), ("seq", []), ("seq", ["--stage", "0"])]


@pytest.mark.parametrize(
    ("kind", "more"),
    [("batch", []), ("seq", OFFLOADED), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
    ids=str,
)
def test_the_largest_fits_with_the_margin_and_the_next_does_not(kind, more, capsys):
    code, answer = ask(capsys, *SMALL, "--max", kind, *more)
    found = answer["max"]
    assert code == 0 and found["kind"] == kind and found["margin"] == MARGIN
    assert found["parameters"] == answer["model"]["parameters"] and found["model_states_parameters"] > 0
    best = answer["candidates"][answer["best"]["index"]]
    assert best[kind] == found["value"] and best["fits"]
    room = int(23.5 * 2**30)
    assert best["tiers"]["hbm"]["needed"] <= (1 - MARGIN) * room
    assert found["next"]["value"] == found["value"] + {"batch": 1, "seq": 64}[kind]
    assert found["next"]["over"] and not found["next"]["fits"]
    # The same by hand, without --max: it fits, and the next one leaves less than the margin.
    plain = [f"--{kind}", str(found["value"]), *more]
    assert ask(capsys, *SMALL, *plain)[0] == 0
    _, larger = ask(capsys, *SMALL, f"--{kind}", str(found["next"]["value"]), *more)
    for each in larger["candidates"]:
        tiers = each["tiers"]
        assert any(tiers[t]["needed"] > (1 - MARGIN) * tiers[t]["available"] for t in ("hbm", "dram"))


ALL = "params=cpu,grads=cpu,optimizer=cpu,activations=cpu"
ONE = ("llama3-8b", "--hardware", "h200", "--ranks", "1")
V100 = ("gpt2-xl", "--hardware", "v100-16", "--set", "activations.policy=auto")
LORA = ("llama3-8b", "--lora", "16", "--ranks", "1", "--gpu-memory", "24GiB")


@pytest.mark.parametrize(
    ("kind", "words", "placements"),
    [
        pytest.param("batch", (*SMALL, "--set", "activations.policy=recompute"), ["activations=cpu"], id="small"),
        pytest.param("batch", ONE, [ALL, "optimizer=cpu,activations=cpu"], id="one", marks=pytest.mark.long),
        pytest.param("seq", LORA, ["params=cpu,activations=cpu"], id="lora", marks=pytest.mark.long),
        pytest.param("batch", V100, [ALL, "cpu", ""], id="auto", marks=pytest.mark.long),
        pytest.param("model", V100, [ALL], id="model", marks=pytest.mark.long),
        pytest.param("batch", (*SMALL, "--auto"), ["", ALL], id="auto flag", marks=pytest.mark.long),
    ],
)
def test_no_placement_by_hand_holds_more(kind, words, placements, capsys):
    code, answer = ask(capsys, *words, "--max", kind)
    assert code == 0 and answer["candidates"][answer["best"]["index"]]["fits"]
    for placement in placements:
        _, by_hand = ask(capsys, *words, "--max", kind, "--stage", "3", "--offload", placement)
        assert (by_hand["max"]["value"] or 0) <= answer["max"]["value"], placement


FLAT = ("model.family=gpt2", "model.layers=4", "model.hidden=4096", "model.heads=32", "model.vocab=128256")
"""A shape whose width is most of its size: a model of these proportions grows by its depth."""


@pytest.mark.long
def test_the_deepest_model_is_not_cut_short(capsys):
    sets = [word for each in (*FLAT, "model.tie=false", "activations.policy=selective") for word in ("--set", each)]
    room = ["--ranks", "4", "--hardware", "h200", "--gpu-memory", "6GiB", "--host-memory", "128GiB"]
    code, answer = ask(capsys, "tiny", *sets, "--precision", "bf16", "--batch", "2", "--seq", "512", *room, "--max")
    found = answer["max"]
    assert code == 0 and found["value"] > 830e6  # with six blocks it has 829 M parameters, and more fit
    assert found["next"]["over"] and not found["next"]["fits"]


@pytest.mark.long
def test_what_is_called_the_fastest_is_faster_than_states_in_host_memory(capsys):
    words = ("tiny", "--set", "model.family=llama", "--set", "model.layers=4", "--set", "model.hidden=1536")
    words += ("--set", "model.heads=24", "--set", "model.vocab=128256", "--set", "model.tie=false")
    words += ("--precision", "bf16", "--ranks", "4", "--hardware", "l40s", "--set", "activations.policy=auto")
    _, answer = ask(capsys, *words, "--batch", "1", "--gpu-memory", "6GiB", "--max", "seq")
    best = answer["candidates"][answer["best"]["index"]]
    # A little shorter, so that it fits with all blocks recomputed too, whose memory is more fragmented.
    shorter = answer["max"]["value"] * 49 // 50
    room = ("--gpu-memory", f"{answer['hardware']['gpu_memory']}B", "--seq", str(shorter))
    # Gradients stay: on their way to host memory they would need more of the GPU.
    away = "optimizer=cpu,params=cpu,activations=cpu"
    code, by_hand = ask(capsys, *words, "--batch", "1", *room, "--stage", "3", "--offload", away)
    rates = (each["step"]["tokens_per_second"] for each in (best, by_hand["candidates"][0]))
    assert code == 0 and next(rates) >= 0.98 * next(rates)


@pytest.mark.long
def test_max_parses_as_before(capsys):
    """Bare `--max` means the model; MODEL may be before it, after it, or left out."""
    words = ("--ranks", "1", "--gpu-memory", "10GiB")
    found = [
        ask(capsys, *each)[1]["max"]
        for each in (
            ("gpt2-124m", "--max", *words),
            ("--max", "gpt2-124m", *words),
            ("gpt2-124m", *words, "--max"),
            ("gpt2-124m", "--max", "model", *words),
            ("gpt2-124m", "--max=model", *words),
        )
    ]
    assert all(each == found[0] and each["kind"] == "model" and each["value"] == each["parameters"] for each in found)
    assert ask(capsys, "--max", *words)[1]["max"]["kind"] == "model"
    assert ask(capsys, "--max", "batch", *words)[1]["max"]["kind"] == "batch"
    assert cli.run(["fit", "gpt2-124m", "--max", "layers"]) == 2
    assert "there are model, batch, seq" in capsys.readouterr().err


def test_the_text_says_the_number_the_next_and_the_margin(capsys):
    assert cli.run(["fit", *SMALL, "--max", "batch"]) == 0
    shown = capsys.readouterr().out
    assert "largest batch per rank and micro-step: " in shown and " does not fit: --stage " in shown
    assert "GPU over by " in shown and "margin: 4% of GPU and host memory stay free" in shown


def test_nothing_fits_is_exit_code_3(capsys):
    for kind, said in (("batch", "smallest batch"), ("seq", "shortest sequence")):
        words = [*FEW_BLOCKS, "--ranks", "1", "--gpu-memory", "1GiB", "--max", kind]
        code, answer = ask(capsys, *words)
        assert code == 3 and answer["max"]["value"] is None and answer["best"] is None
        assert cli.run(["fit", *words]) == 3
        assert f"not even the {said} fits" in capsys.readouterr().out


def test_a_batch_divides_the_global_batch(capsys):
    words = (*SMALL, "--max", "batch", "--set", "train.global_batch=24")
    _, answer = ask(capsys, *words)
    best = answer["candidates"][answer["best"]["index"]]
    assert answer["max"]["value"] == 12 and answer["max"]["next"] is None and best["batch"] == 12
    assert "global_batch=24" in answer["max"]["end"]


def test_a_table_of_positions_ends_the_sequence_and_rotary_ones_do_not(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_positions": 1000, "n_layer": 2}))
    _, answer = ask(capsys, str(path), "--max", "seq", "--ranks", "1")
    assert answer["max"]["value"] == 1000 and "1000 positions" in answer["max"]["end"]
    llama = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 512}
    path.write_text(json.dumps(llama))
    _, answer = ask(capsys, str(path), "--max", "seq", "--ranks", "1")
    assert answer["max"]["value"] > 512 and any("512 positions" in note for note in answer["notes"])


def test_a_count_has_no_batch(capsys):
    assert cli.run(["fit", "7.5B", "--max", "batch"]) == 2
    assert "needs a model with a shape" in capsys.readouterr().err


@pytest.mark.long
def test_machines_are_compared_by_their_largest(capsys):
    words = (*FEW_BLOCKS, "--hardware", "rtx4090,h200", "--max", "batch", "--ranks", "1")
    _, answer = ask(capsys, *words)
    small, large = (each["max"]["value"] for each in answer["machines"])
    assert 0 < small < large
    assert cli.run(["fit", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("max batch" in line for line in lines) and all(len(line) <= 80 for line in lines)
    assert any(f"{small:,}" in line for line in lines)
