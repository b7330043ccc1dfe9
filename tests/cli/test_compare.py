from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare.py"
SMALL = "--device cpu --ranks 2 --layers 2 --hidden 32 --heads 2 --vocab 64 --seq 16 --rounds 1 --steps 2 --warmup 1"


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt2", "gpt2 --loss plain", "hf-llama --kv-heads 1"])
def test_contestants_train_alike(tmp_path, model):
    if model.startswith("hf"):
        pytest.importorskip("transformers")
    document = tmp_path / "compare.json"
    options = [*SMALL.split(), "--family", *model.split(), "--contestants", "zero3,fsdp2", "--json", str(document)]
    command = [sys.executable, str(COMPARE), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(document.read_text())
    ours, theirs = (result["turns"][name][0]["losses"] for name in ("zero3", "fsdp2"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(ours) == 3
    assert result["rows"][0]["loss_difference"] == max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert [target["target"].split()[0] for target in result["targets"]] == ["zero3"]


@pytest.mark.long
def test_random_runs_are_measured_beside_their_plans(tmp_path):
    """The harness alone is asked: its bounds on a process's memory are those of a quiet machine."""
    document = tmp_path / "bytes.json"
    options = ["--random", "13", "--seed", "20261120", "--only", "12", "--json", str(document)]
    accuracy = COMPARE.with_name("accuracy.py")
    subprocess.run([sys.executable, str(accuracy), *options], capture_output=True, text=True, timeout=300)
    (row,) = json.loads(document.read_text())["rows"]
    assert "failed" not in row, row["failed"]
    assert 0.99 < row["hbm"]["predicted"] / row["hbm"]["measured"] < 1.05
