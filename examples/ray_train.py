"""`zerocli train` on Ray Train: each of Ray's workers is a rank; Ray restarts them, and they resume by themselves.

python examples/ray_train.py --workers 2 --run-dir /shared/runs/ray1 -- tiny --stage 3 --steps 40 --save-every 20
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Be one rank of `zerocli train` with `config["arguments"]`, in `config["run_dir"]`; for Ray's TorchTrainer.

    The run folder is on storage that all nodes share. Rank 0 reports the newest checkpoint and its step's metrics.
    """
    import ray.train

    from zerocli.checkpoint.folder import Folder
    from zerocli.cli import main

    run_dir = Path(config["run_dir"])
    checkpoints = Folder(run_dir / "checkpoints")
    again = ["--resume"] if checkpoints.committed() else []
    code = main.run(["train", *config["arguments"], "--run-dir", str(run_dir), *again])
    if code:
        raise RuntimeError(f"zerocli train ended with exit code {code}: see the worker's log")
    if ray.train.get_context().get_world_rank():
        ray.train.report({})  # every worker reports, those but the first nothing
        return
    newest = checkpoints.committed()[0]
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    metrics = {line["step"]: {"step": line["step"], "loss": line["loss"]} for line in lines}[newest.step]
    ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(str(newest.path)))


def start() -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpu", action="store_true", help="one GPU per rank")
    parser.add_argument("--run-dir", required=True, help="run folder, on storage that all nodes share")
    parser.add_argument("arguments", nargs="*", default=["tiny"], help="CONFIG and flags of `zerocli train`, after --")
    given = parser.parse_args()
    run_dir = os.path.abspath(given.run_dir)
    result = TorchTrainer(
        train,
        train_loop_config={"arguments": given.arguments, "run_dir": run_dir},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=RunConfig(name="ray", storage_path=f"{run_dir}.ray", failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.4f}, {result.checkpoint.path}")


if __name__ == "__main__":
    start()
