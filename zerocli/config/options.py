"""The options of a run that are not part of its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerocli.errors import UserError

AUTOMATIC = (
    *("zero.stage", "offload.placement", "activations.policy", "train.batch", "model.compile"),
    "parallel.shard_ranks",
)
"""The keys that `--auto` chooses unless the command line sets them."""


def automatic_keys(sets: Sequence[str], flags: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that `--auto` chooses: those that the command line does not set."""
    given = {text.partition("=")[0].strip() for text in sets if text.replace(" ", "") != "model.compile=auto"}
    return frozenset(AUTOMATIC) - given - {key for key, value in flags.items() if value is not None}


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that are not part of its config."""

    run_dir: str
    """Folder of metrics, config, checkpoints and logs; the same on all ranks."""
    resume: bool = False
    """Continue from the newest checkpoint in `run_dir`."""
    check: int = 0
    """Train this many steps unsharded too and report the largest difference in loss; 0 is no check."""
    dry_run: bool = False
    """Print the config and what each rank would hold; train nothing, write nothing."""
    json: bool = False
    """Rank 0 prints one JSON document on stdout."""
    source: str = "tiny"
    """CONFIG as it was given, for the command to try next."""
    auto: frozenset[str] = frozenset()
    """What `--auto` chooses, of `AUTOMATIC`; empty without it."""
    events: Sequence[Any] = ()
    """Subscribers to the run's events, from its start: objects of `zerocli.engine.events.Events`."""
    refused: UserError | None = field(default=None, compare=False)
    """Why the run does not fit this node, one of several: rank 0 shows it."""
    command: str = field(default="", compare=False)
    """The command line, for the profile's page."""
