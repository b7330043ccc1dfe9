"""`--auto` in a run: what every rank's machine has, and one choice for all ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from zerocli import machine
from zerocli.config import AUTO, Config, load, with_dividing_batch
from zerocli.config.options import RunOptions
from zerocli.errors import UserError
from zerocli.plan.models.model import Model
from zerocli.plan.models.resolve import run_model
from zerocli.plan.search import automatic
from zerocli.plan.search.auto import Choice
from zerocli.plan.search.candidates import weigh
from zerocli.plan.search.recompute import room_here
from zerocli.plan.setup import Setup, setup_of
from zerocli.plan.time import bench
from zerocli.plan.time.hardware import Hardware
from zerocli.regular_files import read_regular, write_text

FILE = "auto.json"
"""In the run folder: the choice, what it was made from, (of a run on GPUs) the command that repeats it, and changes."""
_MOST_NBYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A config with its choice, the lines that say so, and what the choice was made from."""

    config: Config
    lines: tuple[str, ...] = ()
    document: dict[str, Any] = dataclasses.field(default_factory=dict)
    hardware: Hardware | None = None
    """The machine that it was made for."""
    model: Model | None = None
    recomputes: bool = False
    """Whether what is recomputed was free to choose."""

    def save(self, run_dir: Path) -> None:
        if self.document:
            write_text(run_dir / FILE, json.dumps(self.document, indent=2) + "\n")


def choose_here(config: Config, options: RunOptions) -> Chosen:
    """Return the choice for a config with its ranks set, by what this process knows without torch; exit code 3 if
    nothing fits. Of an external model nothing is known before it is built.
    """
    ranks = max(1, config.parallel.ranks)
    config = with_open_batch(config, options, ranks)
    if not options.auto or config.model.external:
        return Chosen(config)
    gpus = machine.gpus()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (min(ranks, len(gpus)) if gpus else ranks)
    device = "cuda" if gpus else "cpu"
    setup = setup_of(config, device=device, ranks=ranks, ranks_per_node=math.gcd(ranks, local))
    room = room_here(device, setup.local_ranks, config.train.gpu_memory)
    hardware = automatic.hardware_here(config.offload.nvme_path, setup, room)
    return _choose(config, options, setup, hardware, None, _compiled_steps(config, options, setup))


def with_open_batch(config: Config, options: RunOptions, ranks: int) -> Config:
    """Return the config; where `--auto` chooses its batch, with one that divides the global batch."""
    return with_dividing_batch(config, ranks, config.parallel.tp) if "train.batch" in options.auto else config


def choose_together(
    config: Config, options: RunOptions, setup: Setup, room: int, gather: Any, model: Model | None = None
) -> Chosen:
    """Return the same choice on all ranks, for the least that any machine has. `gather(value)` returns every rank's
    value. Collective.
    """
    paths = config.offload.nvme_path if "offload.placement" in options.auto else ()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    # One rank of each node measures; the others wait, and find what it measured in the node's cache.
    lines = gather(bench.measure_unknown(bench.gather(paths), paths) if first and paths else [])
    hardware = least_of_all(automatic.hardware_here(config.offload.nvme_path, setup, room), gather)
    found = _before(config, options)
    if found is not None and (not options.auto or _fits(found.config, setup, hardware, model)):
        model = run_model(config, setup) if model is None else model
        return dataclasses.replace(found, hardware=hardware, model=model, lines=(*lines[0], *found.lines))
    steps = min(gather(_compiled_steps(config, options, setup)))
    chosen = _choose(config, options, setup, hardware, model, steps)
    return dataclasses.replace(chosen, lines=(*lines[0], *chosen.lines))


def adapts(config: Config, options: RunOptions) -> bool:
    """Whether a run changes its placement where its steps measure other than was planned: by default with `--auto`."""
    if config.train.adapt == AUTO:
        return "offload.placement" in options.auto
    return config.train.adapt is True


def _before(config: Config, options: RunOptions) -> Chosen | None:
    """Return how a run that is resumed goes on: with the config as it is, or with what it had changed to.

    None if it is to be chosen anew: a fresh run, one that had changed nothing, or one of other ranks or other shapes.
    """
    folder = Path(options.run_dir)
    try:
        document = json.loads(read_regular(folder / FILE, _MOST_NBYTES)) if options.resume else {}
        recomputes = bool(document.get("recomputes"))
        if not options.auto:
            return Chosen(config, document=document, recomputes=recomputes)
        saved = load(str(folder / "config.json")) if document.get("changes") else None
    except (OSError, ValueError, AttributeError, UserError):
        return None if options.auto else Chosen(config)
    if saved is None or (saved.parallel.ranks, saved.train.seq) != (config.parallel.ranks, config.train.seq):
        return None
    changed = automatic.with_keys_of(config, saved, options.auto)
    what = f"--stage {changed.zero.stage} --offload {changed.offload.placement or 'none'}"
    what += f" --set activations.policy={changed.activations.policy}"
    line = f"auto: {what}, which the run had changed to before it was resumed"
    return Chosen(changed, (line,), document, recomputes=recomputes)


def _fits(config: Config, setup: Setup, hardware: Hardware, model: Model | None) -> bool:
    """Whether a config fits the machine as it is now."""
    about = {name: getattr(setup, name) for name in ("device", "precision", "ranks", "ranks_per_node")}
    asked = dataclasses.replace(setup_of(config, **about), checkpoints=0)
    return weigh(run_model(config, asked) if model is None else model, asked, hardware).fits


def _compiled_steps(config: Config, options: RunOptions, setup: Setup) -> int:
    """Return the steps of a run whose blocks may be compiled on this machine; 0 if they may not."""
    steps = automatic.may_compile(config, setup, options.auto)
    return steps if steps and not machine.missing_compiler(on_gpu=True) else 0


def least_of_all(hardware: Hardware, gather: Any) -> Hardware:
    """Return the smallest of everything that the ranks' machines have, with the first rank's rates. Collective."""
    everyone = gather(dataclasses.asdict(hardware))
    least = {name: min(each[name] for each in everyone) for name in automatic.ROOMS}
    return Hardware(**(everyone[0] | least))


def _choose(
    config: Config, options: RunOptions, setup: Setup, hardware: Hardware, model: Model | None, steps: int
) -> Chosen:
    model = run_model(config, setup) if model is None else model
    setup = dataclasses.replace(setup, checkpoints=0)  # those are in the run folder, not on the nvme tier
    whole = config.train.batch * setup.accumulate * setup.dp if config.train.global_batch else 0
    choice: Choice = automatic.choose_setup(model, setup, hardware, options.auto, whole, steps)
    automatic.refuse(choice, options.source)
    assert choice.best is not None
    free = automatic.named_keys(options.auto, whole, steps)
    command = automatic.replay(str(Path(options.run_dir, "config.json")), setup, hardware, free)
    recomputes = "activations.policy" in options.auto
    return Chosen(
        automatic.with_choice(config, choice.best, steps),
        tuple(automatic.describe(choice, hardware, lambda chosen: automatic.flags(chosen, free))),
        automatic.as_dict(choice, hardware, command, free) | {"recomputes": recomputes},
        hardware,
        model,
        recomputes,
    )
