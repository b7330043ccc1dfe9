"""What a user is told when ranks are lost: what stands saved, and the command that goes on from there. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zerocli.checkpoint.folder import Folder
from zerocli.errors import FAILURE, UserError


def standing(run_dir: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return what a run has saved, in words, and the command that goes on from it."""
    saved = Folder(Path(run_dir, "checkpoints")).committed()
    ours = (
        "RANK" not in environ or "ZEROCLI_PARENT" in environ
    )  # not torchrun's or SLURM's, whose command we do not know
    if not saved:
        again = "the same command again; --set checkpoint.every=N saves every N steps"
        return "no checkpoint was written", again
    command = "zerocli train --resume" if ours else "the same launch, with train --resume"
    return f"step {saved[0].step} is saved", f"{command} --run-dir {run_dir}"


def explain(what: str, reason: str, missing: str, run_dir: str) -> UserError:
    """Return the loss of a rank as an error for people: what was under way, who is gone, what is saved."""
    fact, hint = standing(run_dir)
    who = missing or "which one is not known"
    return UserError(f"another rank was lost during {what}: {who} ({reason}); {fact}", hint=hint, exit_code=FAILURE)
