"""Write what `zerocli fit` answers for many models and flags as JSON, or compare two such files.

    python benchmarks/compare_plans.py before.json             # plan all cases, about two minutes of one core
    python benchmarks/compare_plans.py after.json --against before.json

A change of the plan is compared this way: what differs in bytes, seconds, verdict or choice is printed, and must be
explained. `--only TEXT` plans the cases whose command has the text in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zerocli.cli.main import run

CONFIGS = ("tiny", "gpt2-124m", "gpt2-xl", "llama3-8b", "llama3-70b", "zero-7.5b", "zero-128b", "zero-1t")
LLAMA = "--set model.layers=32 --set model.hidden=4096 --set model.heads=32 --set model.vocab=32000"
BERT = {"model_type": "bert", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
BERT |= {"intermediate_size": 1024, "vocab_size": 3000}
MAMBA = {"model_type": "mamba", "hidden_size": 128, "num_hidden_layers": 4, "state_size": 16, "vocab_size": 3000}
QWEN = {"model_type": "qwen2", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
QWEN |= {"num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000}
FILES = {"bert": BERT, "mamba": MAMBA, "qwen2": QWEN}
"""Hugging Face configs, written as DIR/NAME.json."""
FIXED = [
    "7.5B --ranks 64",
    "1T --ranks 1024 --auto",
    "7.5B --offload cpu --ranks 1",
    "--max --ranks 1 --hardware h100",
    "--max --ranks 16 --ranks-per-node 16 --gpu-memory 32GB --host-memory 1.5TB --hardware h100",
    "llama3-8b --max batch --ranks 8",
    "llama3-8b --max seq --ranks 8 --stage 3 --offload cpu",
    "gpt2-xl --max model --ranks 2 --stage 3 --offload cpu",
    "llama3-8b --lora 16 --ranks 1 --auto",
    "llama3-70b --lora 16:q,v --ranks 8",
    "llama3-8b --tp 4 --ranks 16",
    "gpt2-xl --tp 2 --ranks 4 --auto",
    "llama3-8b --auto --ranks 8 --tokens 1T --price 2",
    "llama3-70b --auto --ranks 8 --set model.compile=auto --set train.steps=1000",
    "llama3-8b --auto --ranks 1 --gpu-memory 24GiB --host-memory 256GiB --nvme-space 2TiB",
    "llama3-8b --hardware a100,h100,v100 --ranks 8",
    f"llama3-8b {LLAMA} --batch 4 --seq 2048 --ranks 1 --gpu-memory 31GiB --host-memory 115GiB --nvme-space 0 --auto",
    f"llama3-8b {LLAMA} --batch 1 --seq 8192 --ranks 4 --gpu-memory 40GiB --host-memory 200GiB --nvme-space 0 --auto",
    "DIR/qwen2.json --ranks 2",
    "DIR/qwen2.json --ranks 2 --auto --gpu-memory 6GiB",
    "DIR/bert.json --ranks 2 --batch 8 --seq 128",
    "DIR/bert.json --ranks 2 --batch 64 --seq 256 --auto --gpu-memory 2GiB",
    "DIR/mamba.json --ranks 1 --batch 2 --seq 64 --stage 3",
    "gpt2-124m --trace --ranks 4 --stage 2",
    "tiny --trace --tp 2 --ranks 4 --stage 3 --set activations.policy=auto",
]


def commands() -> list[str]:
    """Return the arguments of `zerocli fit` for all cases; DIR stands for the folder of Hugging Face configs."""
    made = []
    for name in CONFIGS:
        for ranks in (1, 8, 64):
            made.append(f"{name} --ranks {ranks}")
        for policy in ("keep", "selective", "recompute", "auto"):
            made.append(f"{name} --ranks 8 --stage 3 --offload cpu --set activations.policy={policy}")
        made += [f"{name} --ranks 8 --auto", f"{name} --ranks 1 --auto --gpu-memory 40GiB --host-memory 200GiB"]
        made.append(f"{name} --ranks 4 --stage 3 --offload params=cpu,optimizer=hbm:1GiB+cpu:4GiB+nvme")
        made.append(f"{name} --ranks 8 --stage 1 --precision fp32 --set optimizer.name=sgd --set train.accumulate=4")
    return made + FIXED


def answer(command: str, folder: str) -> dict[str, Any]:
    """Return what `fit` says: exit code, choices, bytes and seconds of every candidate."""
    start = time.process_time()
    out, problem = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problem):
        code = run(["fit", *shlex.split(command.replace("DIR", folder)), "--json"])
    took = round(time.process_time() - start, 2)
    try:
        document = json.loads(out.getvalue())
    except ValueError:
        return {"exit": code, "error": problem.getvalue().strip()[-300:], "took": took}
    shown = [_candidate(each) for each in document["candidates"]]
    best = document["best"] and document["best"]["index"]
    made = {"exit": code, "took": took, "numel": document["model"]["parameters"], "best": best}
    made |= {"candidates": shown, "change": (document["change"] or {}).get("arguments")}
    if largest := document.get("max"):
        made["max"] = {key: largest[key] for key in ("value", "parameters", "model_states_parameters")}
    machines = document.get("machines", [])
    made["machines"] = [[each["hardware"], each["fits"], _candidate(each["candidate"])] for each in machines]
    return made


def _candidate(each: dict[str, Any]) -> dict[str, Any]:
    names = ("stage", "offload", "batch", "exact_policy", "update", "compile", "fits", "moment", "loading")
    step = each["step"]
    rows = [f"{row['category']} {row['tier']} {row['bytes']}" for row in each["rows"]]
    found = {name: each[name] for name in names} | {"rows": rows, "peaks": each["peaks"]}
    return found | {"seconds": step and round(step["seconds"], 9), "bound": step and step["bound"]}


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    """Return where two answers differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if key != "took"]
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{at}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [line for n in range(len(before)) for line in differences(before[n], after[n], f"{at}[{n}]")]
    return [] if before == after else [f"{at}: {str(before)[:300]} -> {str(after)[:300]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        for name, values in FILES.items():
            Path(folder, f"{name}.json").write_text(json.dumps(values))
        found = {each: answer(each, folder) for each in commands() if asked.only in each}
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} cases, {sum(each['took'] for each in found.values()):.1f} s")
    before = json.loads(asked.against.read_text()) if asked.against else found
    lines = {each: differences(before.get(each), found[each]) for each in found}
    for each, changed in lines.items():
        if changed:
            print(
                "\n  ".join(
                    [f"fit {each}", *changed[:6], *([f"... {len(changed)} in all"] if len(changed) > 6 else [])]
                )
            )
    print(f"{sum(map(bool, lines.values()))} cases differ")
    return int(any(lines.values()))


if __name__ == "__main__":
    sys.exit(main())
