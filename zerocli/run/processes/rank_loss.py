"""Messages for lost or stuck ranks: what is saved, and the command that resumes the run. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zerocli.checkpoint.folder import Folder
from zerocli.console import quoted
from zerocli.ranks.worker import within

PATIENCE_SECONDS = 2.0
"""How long to wait for an answer from a disk or the ranks' store, which may be gone too."""


def standing(run_dir: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return what a run has saved, in words, and the command that resumes it; does not hang on a dead disk."""
    saved = within(PATIENCE_SECONDS, Folder(Path(run_dir, "checkpoints")).committed)
    # The command that started ranks under torchrun or SLURM is not known here.
    ours = "RANK" not in environ or "ZEROCLI_PARENT" in environ
    command = "zerocli train --resume" if ours else "the same launch, with train --resume"
    if saved is None:
        return f"what is saved cannot be read: {run_dir} does not answer", f"{command} --run-dir {quoted(run_dir)}"
    if not saved:
        return "no checkpoint was written", "the same command again; --set checkpoint.every=N saves every N steps"
    return f"step {saved[0].step} is saved", f"{command} --run-dir {quoted(run_dir)}"
