"""Defects put into the code one at a time: which test finds each? The measure of what a change to the tests costs.

    python benchmarks/defects.py                      # every defect against the suite, until the first failure: hours
    python benchmarks/defects.py --near               # against the tests that are meant to find it: about a minute each
    python benchmarks/defects.py --only 3,17 tests/engine tests/laws -- -n 2

A defect is a text that occurs once in the three packages, and what it is replaced by. The tree is copied for each, so
the checkout is not touched. Exit code 1 if a defect was not found or its text is gone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zerocli", "offload", "tiers")


class Defect(NamedTuple):
    what: str
    old: str
    new: str
    near: str
    """The tests that are meant to find it, separated by spaces."""


def left_out(what: str, statement: str, near: str, before: str = "") -> Defect:
    """A statement that is missing; `before` is what follows it, where it takes that to find it."""
    indent = statement[: len(statement) - len(statement.lstrip())]
    return Defect(what, statement + before, f"{indent}pass{before}", near)


LAWS, ENGINE, OFFLOAD, TIERS = "tests/laws", "tests/engine", "tests/offload", "tests/tiers"
STAGES, CASES, ZOO = "tests/laws/test_stages.py", "tests/laws/test_engine_cases.py", "tests/laws/test_zoo.py"
SAVED, RUN, DATA = "tests/checkpoint", "tests/run", "tests/data tests/run/test_data.py"
SAVES = "tests/checkpoint/test_checkpoint.py"
STEPS = "tests/run/test_steps.py tests/run/test_train.py"

TARGETS = "for start in starts])\n        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, "
NOT_DIVIDED = (
    "if number % tp:\n                nearest = nearest_divisor(tp, math.gcd(*numbers.values()))\n                yield"
)

DEFECTS = [
    # -- layout and engine ---------------------------------------------------------------------------------------------
    Defect("a rank's slice ends one alignment early", "return Span(rank * each, (rank + 1) * each)",
           "return Span(rank * each, (rank + 1) * each - SHARD_ALIGN)", "tests/layout"),
    Defect("parameters of a flat are not aligned",
           "at = round_up(at, PARAM_ALIGN)", "at = round_up(at, 1)", "tests/layout"),
    Defect("a bucket's columns are copied to the wrong place", "part.start - row * each - columns.start",
           "part.start - row * each", f"{STAGES} {CASES}"),
    Defect("padding of a bucket is not zeroed", "if zeroed and not add:", "if False:", f"{STAGES} {CASES} {ZOO}"),
    Defect("a bucket is filled again while its reduction runs",
           "                bucket.busy.run()", "                pass",
           f"{STAGES} {CASES} {LAWS}/test_delays.py"),
    Defect("accumulated gradients overwrite each other at stage 0 and 1", "flat.grad_views[index].add_(grad)",
           "flat.grad_views[index].copy_(grad)", f"{STAGES} {CASES}"),
    Defect("accumulated gradients overwrite each other at stage 2 and 3",
           "target.copy_(part) if self._first else target.add_(part)", "target.copy_(part)", f"{STAGES} {CASES}"),
    Defect("a gradient that did not arrive keeps its old values",
           "flat.grad_full[entry.offset : entry.offset + entry.numel].zero_()", "pass", f"{CASES} {ZOO}"),
    Defect("the last flat's reduction is not launched", "self.launch(len(self._order))",
           "self.launch(len(self._order) - 1)", STAGES),
    left_out("reductions are not waited for", "                    rest.run()", STAGES,
             before="\n        self._forget()\n\n    def abandon"),
    Defect("gradients are clipped by another norm", "(clip / (norm + 1e-6)).clamp(max=1.0)",
           "(clip / (norm + 1e-2)).clamp(max=1.0)", f"{CASES} {ENGINE}/test_optim.py {LAWS}/test_against_torch.py"),
    Defect("the norm counts replicated gradients once per rank", ".double().square().sum() / copies",
           ".double().square().sum()", f"{LAWS}/test_tp.py"),
    Defect("a step with infinite gradients is not skipped", "skip = (~finite).float() if uneven is None",
           "skip = torch.zeros_like(norm) if uneven is None", f"{LAWS}/test_precision.py {CASES}"),
    Defect("the loss scale does not grow again",
           "overflow, 2.0, 0.5, self._interval", "overflow, 1.0, 0.5, self._interval",
           f"{LAWS}/test_precision.py {CASES}"),
    left_out("a gather does not wait for a deferred update",
             "        self._before_gather(flat)  # a pending update must be issued before the parameters are read",
             f"{OFFLOAD} {LAWS}/test_deferred.py"),
    Defect("buffers outlive the update of their parameters", "                if flat.state is State.GATHERED:",
           "                if flat.state is State.GATHERING:", f"{STAGES} {CASES} {ZOO}"),
    Defect("a graph made before the step is accepted after it", "if saved.num_changes != saved.flat.num_changes:",
           "if False:", f"{CASES} {ZOO}"),
    Defect("a buffer that other code views is refilled",
           "        if buffers[at].aliased:", "        if False:", f"{ZOO} {CASES}"),
    Defect("updated parameters of stage 1 and 2 are not gathered",
           "and flat.shard is not None and flat.held == flat.own:", "and flat.shard is None:", STAGES),
    Defect("a parameter without a gradient is counted as updated", "                active[at] = 0.0",
           "                active[at] = 1.0", f"{ENGINE}/test_optim_activity.py {ENGINE}/test_optim.py"),
    Defect("the average moves the wrong way", "average.lerp_(now, 1.0 - decay)", "average.lerp_(now, decay)",
           f"{ENGINE}/test_ema.py"),
    left_out("ranks do not meet before the average is applied",
             '        engine.meet("ema.applied", f"{self.updates} updates")',
           f"{ENGINE}/test_ema.py {LAWS}/test_disagreement.py"),
    left_out("an activation is gathered before it has come back",
             "            arrival.transfer.wait()", f"{ENGINE}/test_activations.py",
           before="\n            arrival.gather"),
    Defect("Adam's second moment decays as the first", 'beta2=options["betas"][1]', 'beta2=options["betas"][0]',
           f"{ENGINE}/test_optim.py {LAWS}/test_against_torch.py"),
    # -- offload and tiers ---------------------------------------------------------------------------------------------
    left_out("a slot is filled again before its write-back has ended",
             "        for transfer in slot.leaving:\n            transfer.wait()", OFFLOAD),
    Defect("a streamed update does not wait for its chunk",
           "            transfer.wait() if place == self._device else transfer.synchronize()", "            pass",
           OFFLOAD),
    Defect("an offloaded gradient is not added to the earlier ones", "                piece.add_(part)",
           "                piece.copy_(part)", OFFLOAD),
    Defect("a copy in host memory goes stale when its store is written",
           "kept = self._mover.cache.write(copy.block, source, start * self.dtype.itemsize)", "kept = written",
           OFFLOAD),
    Defect("a copy is read before it has arrived",
           "                copy.arriving.wait_for_host()", "                pass",
           f"{OFFLOAD}/test_mover.py"),
    Defect("an array is freed under its transfers",
           '        """Free the array\'s memory once no transfer touches it."""\n        self.finish_transfers()',
           '        """Free the array\'s memory once no transfer touches it."""', f"{OFFLOAD} {TIERS}"),
    Defect("neighbouring free spans are not merged", "if start + nbytes in self._length_at:", "if False:", TIERS),
    Defect("the second piece of a striped transfer is the first one's bytes", "data[first - offset : last - offset]",
           "data[: last - first]", TIERS),
    Defect("a page is written without the bytes around the piece",
           "if piece.start > first or piece.end < min(last, unit.nbytes):", "if False:", TIERS),
    Defect("checksums of the disk are not compared", "await worker.call(zlib.crc32, memory) != unit.checksum",
           "False", TIERS),
    # -- checkpoints ---------------------------------------------------------------------------------------------------
    Defect("the manifest is there before the data is", "fd = os.open(self.aside / UNFINISHED,",
           "fd = os.open(self.aside / MANIFEST,", SAVED),
    left_out("a rank's file is not synced", "                file.sync()",
             f"{SAVED}/test_power.py {SAVED}/test_files.py"),
    left_out("the manifest is not synced", "            os.fsync(fd)", f"{SAVED}/test_power.py {SAVED}/test_files.py",
             before="\n        finally:\n            os.close(fd)\n        sync_folder(self.aside)"),
    left_out("an update overtakes the save of its states",
             "        self._engine.updater.before_update = snapshot.hold_update", SAVES),
    Defect("the next slot overlaps the one before", "at += round_up(batch.nbytes, PAGE_NBYTES)",
           "at += batch.nbytes // PAGE_NBYTES * PAGE_NBYTES", SAVES),
    Defect("one checkpoint too few is kept", "if found.step <= newest][keep:]", "if found.step <= newest][keep - 1:]",
           f"{SAVES} {RUN}/test_resume.py"),
    Defect("the best checkpoint is removed", "if found.step == best or (", "if (", f"{SAVED} {RUN}/test_evaluate.py"),
    Defect("a checkpoint that was set aside is not restored",
           "                aside.rename(path)", "                pass",
           f"{SAVED} {RUN}/test_resume.py"),
    # -- data and runs -------------------------------------------------------------------------------------------------
    Defect("a resumed run skips a step",
           "    return found.step + 1\n", "    return found.step + 2\n", f"{RUN}/test_resume.py"),
    Defect("a resumed run sees the first step's data again", "((step - 1 - steps) * self.accumulate + micro)",
           "((step - 1) * self.accumulate + micro)", f"{DATA} {RUN}/test_resume.py"),
    Defect("every epoch has the first one's order", "permute(place, self.num_windows, self.seed, epoch) * self.seq",
           "permute(place, self.num_windows, self.seed, 0) * self.seq", DATA),
    Defect("targets are the tokens themselves", f"{TARGETS}1:].copy())", f"{TARGETS}:-1].copy())", DATA),
    Defect("the loss mask of a document is ignored", "targets[at : at + length][counted] = ids[1:][counted]",
           "targets[at : at + length] = ids[1:]", DATA),
    Defect("positions go on over the end of a document", "positions[at : at + length] = np.arange(length)",
           "positions[at : at + length] = np.arange(at, at + length)", DATA),
    Defect("a micro-step's weight forgets the number of ranks", "passes = self.accumulate * world",
           "passes = self.accumulate", f"{DATA} {RUN}/test_documents_run.py"),
    Defect("warm-up lasts one step more",
           "            return lr * step / warmup", "            return lr * step / (warmup + 1)",
           STEPS),
    Defect("the loss of a step is not divided by its micro-steps", "engine.step(), total / train.accumulate",
           "engine.step(), total", STEPS),
    Defect("micro-steps of a step draw the same random numbers", "(train.seed, step, micro, replica)",
           "(train.seed, step, 0, replica)", STEPS),
    Defect("a target beyond the held-out data counts twice", "if first + rank < num_batches else 0", "if True else 0",
           f"{RUN}/test_evaluate.py"),
    # -- plan and config -----------------------------------------------------------------------------------------------
    Defect("the plan forgets a bucket",
           "        return 2\n    smallest = min(", "        return 1\n    smallest = min(",
           "tests/plan tests/layout"),
    Defect("the plan forgets the prefetched unit", "near = units[first : first + sizing.gather_buffers + 1]",
           "near = units[first : first + 1]", "tests/plan"),
    Defect("the plan forgets one of two scratch arrays", "if flat.width < FP32 and sizing.split_master], 2),",
           "if flat.width < FP32 and sizing.split_master], 1),", "tests/plan"),
    Defect("a global batch is divided by all ranks instead of the replicas",
           "replicas = max(1, ranks // max(1, tp))\n    each",
           "replicas = ranks\n    each", "tests/config"),
    Defect("tp may fail to divide the heads", NOT_DIVIDED, NOT_DIVIDED.replace("% tp", "< tp"),
           "tests/config tests/cli"),
    Defect("patience without evaluations is accepted",
           "if value and not train.eval_every:", "if False:", "tests/config tests/cli"),
]  # fmt: skip


def place_of(defect: Defect, root: Path) -> Path | None:
    """Return the file that has the defect's text; None unless it occurs exactly once."""
    counts = {path: path.read_text().count(defect.old) for each in PACKAGES for path in (root / each).rglob("*.py")}
    found = [path for path, count in counts.items() if count]
    return found[0] if len(found) == 1 and counts[found[0]] == 1 else None


def copy_tree(root: Path, folder: Path) -> None:
    """Copy what git would: the tracked files, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def try_defect(defect: Defect, root: Path, arguments: list[str], seconds: float) -> str:
    """Return the first test that fails with the defect, "nothing" if none does, or why it was not tried."""
    with tempfile.TemporaryDirectory(prefix="zerocli-defect-") as name:
        copy_tree(root, Path(name))
        path = place_of(defect, Path(name))
        if path is None:
            return "its text is gone"
        path.write_text(path.read_text().replace(defect.old, defect.new))
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", *arguments]
        environ = os.environ | {"PYTHONPATH": name}
        try:
            done = subprocess.run(command, cwd=name, env=environ, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"no end in {seconds:.0f} s"
        if done.returncode == 0:
            return "nothing"
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return found[1] if found else f"exit code {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="paths and options for pytest; default: the suite")
    parser.add_argument("--near", action="store_true", help="run the tests that are meant to find each defect")
    parser.add_argument("--only", default="", help="numbers of defects, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the defects and where they are")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy (default: this one)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit for one defect")
    chosen = parser.parse_args()
    numbers = [int(each) for each in chosen.only.split(",")] if chosen.only else range(len(DEFECTS))
    missed = 0
    for number in numbers:
        defect, began = DEFECTS[number], time.monotonic()
        if chosen.list:
            path = place_of(defect, chosen.tree)
            result = str(path.relative_to(chosen.tree)) if path else "its text is gone"
            missed += path is None
        else:
            arguments = [*(defect.near.split() if chosen.near else ()), *chosen.tests]
            result = try_defect(defect, chosen.tree, arguments, chosen.seconds)
            missed += "::" not in result and not result.startswith("no end")
        seconds = "" if chosen.list else f" | {time.monotonic() - began:.0f} s"
        print(f"{number} | {defect.what} | {result}{seconds}", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} found", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
