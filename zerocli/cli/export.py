"""`zerocli export`: the weights of a run's checkpoint, for other programs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from zerocli.cli.run_dirs import refuse_no_export
from zerocli.console import quoted, say, show_json
from zerocli.errors import OK, UserError
from zerocli.layout.sizes import format_bytes, format_count, parse_memory


@click.command()
@click.argument("run")
@click.argument("out")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Which checkpoint; by default the newest whole one.")
@click.option("--best", is_flag=True, help="The checkpoint of the best evaluation (RUN/best.json).")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Of the weights; by default that of the folder the run began from, else fp32.",
)
@click.option("--merge", is_flag=True, help="Of a run with adapters: the whole model, with them added to its weights.")
@click.option(
    "--base-dir", "base", default="", metavar="DIR", help="With --merge: the model that the adapters are for, if moved."
)
@click.option("--file-size", default="5GB", metavar="SIZE", help="Largest file, unless one tensor is larger.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    run: str,
    out: str,
    step: int | None,
    best: bool,
    dtype: str | None,
    merge: bool,
    base: str,
    file_size: str,
    as_json: bool,
) -> int:
    """Write the weights of RUN's checkpoint to the folder OUT: safetensors with an index, and config.json.

    A run that began from a Hugging Face folder gives one back, with that folder's names, config and tokenizer. Other
    Llama and GPT-2 models get Hugging Face names, so that `transformers` loads OUT; the rest keep the model's own.
    `zerocli train OUT` goes on from such a folder, `zerocli train --init-from OUT` starts from the weights.

    Adapters (--lora) are written as peft's folder, which peft loads and `zerocli train MODEL --lora OUT` goes on from.
    """
    try:
        file_nbytes = parse_memory(file_size)
    except ValueError as error:
        raise UserError(f"--file-size {file_size}: {error}") from None
    refuse_no_export(run)
    from zerocli.checkpoint import export
    from zerocli.checkpoint.best import best_step

    if best and step is not None:
        raise UserError(f"--best and --step {step}: one checkpoint is exported", hint="one of the two")
    step = best_step(run) if best else step
    began = time.perf_counter()
    done = export.export(run, step, Path(out), dtype or "", max(1, file_nbytes), say, merge=merge, base=base)
    seconds = time.perf_counter() - began
    rate = done.nbytes / seconds / 1e9
    say(
        f"step {done.step}: {format_count(done.parameters)} parameters in {len(done.files)} "
        f"{'file' if len(done.files) == 1 else 'files'}, {format_bytes(done.nbytes)} in {seconds:.1f} s "
        f"({rate:.2f} GB/s); {done.dtype}; {done.note}"
    )
    config = f"{out}/config.json " if done.model else ""
    if done.adapters is not None:
        say(f"try: zerocli train {quoted(done.adapters or 'MODEL')} --lora {quoted(out)} --data FILE")
        say(f"try: zerocli export {quoted(run)} OUT --merge, for a whole model")
    elif done.tokenizer:
        say(f'try: zerocli generate {quoted(out)} "..."')
    more = "--data FILE" if done.tokenizer else "--data FILE --set data.tokenizer=bytes"
    if done.adapters is None:
        say(f"try: zerocli train {f'{out} {more}' if done.folder else f'{config}--init-from {out}'}")
    if as_json:
        document = {"schema": 1, "step": done.step, "out": out, "files": done.files, "parameters": done.parameters}
        show_json(
            document
            | {"bytes": done.nbytes, "seconds": seconds, "names": done.note, "dtype": done.dtype.partition(" ")[0]}
        )
    return OK
