"""A dry run: the config of a run, the memory of each rank, and whether this machine has it. Nothing is trained."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from zerocli import machine
from zerocli.checkpoint.imports import check_weights
from zerocli.config import AUTO, Config, notes_of, to_dict
from zerocli.config.options import RunOptions
from zerocli.console import say, show, show_if_unfit, show_json
from zerocli.data.sources import check_data
from zerocli.errors import DOES_NOT_FIT, OK, user_error
from zerocli.plan.report.preflight import preflight, refuse_disks, smallest_change
from zerocli.plan.search import automatic
from zerocli.profile import table
from zerocli.run.automatic import Chosen, choose_here, with_open_batch
from zerocli.run.engines import count_parameters, make_model, resolve
from zerocli.run.output import report


def dry_run(config: Config, options: RunOptions, profiled: bool = False) -> int:
    """Print the memory of each rank, as a profile has it if `profiled`, and whether this machine has it.

    Return 0, or 3 if it does not.
    """
    began = time.perf_counter()
    ranks = max(1, config.parallel.ranks)
    config = resolve(with_open_batch(config, options, ranks), ranks)
    refuse_disks(config, options.auto)
    for line in check_data(config):
        say(line)
    document: dict[str, Any] = {"schema": 1, "config": to_dict(config), "tiers": {}, **table.predicted(None)}
    refused = None
    with show_if_unfit(options.json, document):
        try:
            chosen = choose_here(config, options)
        except automatic.NothingFits as error:
            if not options.json:
                raise
            # The document has the nearest; the error is raised once it is printed.
            chosen, refused = Chosen(automatic.with_choice(config, error.nearest)), error
    config = chosen.config
    for line in (*notes_of(options.source), *chosen.lines):
        say(line)
    try:
        if config.train.init_from and (config.lora.rank or not options.resume):
            names = check_weights(make_model(config), config.train.init_from, config.model)
            say(f"weights from {config.train.init_from}, {names}")
        numel, local, trained = count_parameters(config)
        held = report.planned_memory(config, numel, local, trained)
    except ValueError as error:
        raise user_error(error) from error
    if config.model.external and config.activations.policy == AUTO:
        say("activations: chosen when a run starts: the model is traced then")
    document |= {"config": to_dict(config), "parameters": numel, "memory": held}
    local = math.gcd(config.parallel.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.ranks)))
    gpus = machine.gpus()
    with show_if_unfit(options.json, document):
        verdict = preflight(config, gpus, local if "LOCAL_WORLD_SIZE" in os.environ else 0, numel)
    planned = verdict.plan
    if planned is not None:
        document |= {"plan": planned.as_dict(), **table.predicted(planned)}
        if profiled and planned.activations:
            document["activations"] = planned.activations
            say(f"activations: {planned.activations}")
    document |= verdict.as_dict()
    if refused is not None:
        with show_if_unfit(options.json, document):
            raise refused
    if options.json:
        show_json(document)
    else:
        lines = [*table.memory(document)] if profiled else [report.dry(config, numel, held)]
        if planned is not None and not profiled:
            lines += ["", "the whole plan of a rank's device, and of its node:", *planned.lines()]
        show("\n".join([*lines, "", *verdict.lines()]))
        if not verdict.fits:
            show(f"try: {smallest_change(config, verdict.setup, gpus)}")
    say(f"nothing was run ({time.perf_counter() - began:.1f} s)")
    return OK if verdict.fits else DOES_NOT_FIT
