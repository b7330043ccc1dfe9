"""The program: finds the command, runs it, and turns every failure into a few lines and an exit code.

Exit codes: 0 ok, 1 failure, 2 usage or config, 3 does not fit, 75 preempted after saving, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from zerocli import allocator, console
from zerocli.errors import DOES_NOT_FIT, FAILURE, INTERRUPTED, OK, USAGE, ShownElsewhere, UserError, closest

# Name of a command, and of its module here -> the line shown by --help; imported only when the command runs.
COMMANDS = {
    "fit": "Say whether a model fits, and the fastest way that does; needs no GPU.",
    "train": "Train a model under a ZeRO stage, on one machine or many.",
    "profile": "Run a few steps and show where the bytes and the seconds go, predicted beside measured.",
    "check": "Say whether sharding changes a model's numbers.",
    "generate": "Continue a prompt with the model of a run or a folder.",
    "export": "Write a checkpoint's weights as safetensors, for other programs.",
    "configs": "List, show and copy the bundled configs.",
    "env": "Show this machine: cores, memory and its limits, GPUs, disks.",
    "completion": "Print the completion script of bash, zsh or fish.",
}


COMPLETING = "_ZEROCLI_COMPLETE"
"""The variable by which a shell asks for completions."""


class LazyGroup(click.Group):
    """A group whose commands are names of modules, so that `--help` and completion import none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"zerocli.cli.{cmd_name}").command
        if COMPLETING in os.environ:
            from zerocli.cli import completion

            return completion.attach(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            meant = closest(args[0], COMMANDS)
            ctx.fail(f"there is no command {args[0]}" + (f"; did you mean {meant}?" if meant else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from zerocli import machine

        click.echo(f"zerocli {machine.version('zerocli') or '(not installed, run from its folder)'}")
        ctx.exit()


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks (also: ZEROCLI_DEBUG=1).")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.pass_context
def group(ctx: click.Context, debug: bool) -> None:
    """Train models with ZeRO: optimizer states, gradients and parameters partitioned over ranks.

    `zerocli train` alone trains a small model on this machine.
    """
    if debug:
        os.environ["ZEROCLI_DEBUG"] = "1"  # in the environment, so that the ranks see it
    allocator.choose()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the program and leave with its exit code."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; every failure has been reported to the user by then."""
    console.open_standard_streams()
    words = list(sys.argv[1:] if args is None else args)
    if COMPLETING in os.environ:
        from zerocli.cli import completion  # noqa: F401, its shells answer
    try:
        result = group.main(args, prog_name="zerocli", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except BrokenPipeError:  # the reader of our output has ended (`| head`)
        console.silence_stdout()
        return FAILURE
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        console.say(error.format_message())
        return USAGE
    except click.UsageError as error:
        from zerocli.cli import usage

        return _fail(describe(*usage.explain(error, words, COMMANDS)), USAGE)
    except click.ClickException as error:
        return _fail(describe(error.format_message()), error.exit_code)
    except UserError as error:
        from zerocli.cli import usage

        text = describe(str(error), usage.way_on(error, words, COMMANDS))
        return _fail(text, error.exit_code, shown_elsewhere=isinstance(error, ShownElsewhere))
    except MemoryError:
        return _fail(describe("host memory ran out (or its limit: ulimit -v, a cgroup's)"), FAILURE)
    except OSError as error:
        console.drop_unwritten()
        if _wants_traceback() or not error.strerror:
            return _fail(_describe_bug(error), FAILURE)
        where = f"{error.filename}: " if error.filename else ""  # a full or failing disk, or permissions
        hint = f"ulimit -n 4096 (it is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
        text = describe(f"{where}{error.strerror}", hint if error.errno == errno.EMFILE else "")
        return _fail(text, FAILURE)
    except Exception as error:
        return _fail(_describe_bug(error), FAILURE)


def describe(message: str, hint: str | None = None) -> str:
    """Return a user's error as lines: `error:` before each fact (its further lines are indented), `try:` the hint."""
    lines = [line if line.startswith(" ") or not line else f"error: {line}" for line in message.splitlines()]
    return "\n".join(lines + [f"try: {line}" for line in (hint or "").splitlines()])


def _describe_bug(error: Exception) -> str:
    summary = f"error: a bug in zerocli: {type(error).__name__}: {error}"
    if _wants_traceback() or _is_rank():
        return f"{_own_traceback(error)}{summary}"
    return f"{summary}\ntry: the same command with `zerocli --debug` for the traceback, and report it with that"


def _own_traceback(error: Exception) -> str:
    """Return the traceback from the command on, without the frames of this module and click."""
    frame = error.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_globals.get("__name__", "").startswith((__name__, "click.")):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def _fail(text: str, code: int, shown_elsewhere: bool = False) -> int:
    """Report a failure, unless another rank shows it; return its exit code."""
    if _wants_traceback() and code in (USAGE, DOES_NOT_FIT):
        text = f"{traceback.format_exc()}{text}"
    from zerocli.ranks import worker

    if not (_is_rank() and worker.record_failure(text, code)) and not shown_elsewhere:
        console.say(text)
    if _is_rank():
        _tell_others(text)
    return code


def _tell_others(text: str) -> None:
    """Tell ranks on other nodes that wait for this one in their start why it does not come."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) == os.environ.get("WORLD_SIZE"):
        return
    from zerocli.ranks.attempts import tell_failure  # imports torch

    tell_failure(text.splitlines()[0].removeprefix("error: "))


def _wants_traceback() -> bool:
    return os.environ.get("ZEROCLI_DEBUG", "") not in ("", "0")


def _is_rank() -> bool:
    """Return whether this process is one rank of a run: tracebacks of ranks are always shown."""
    return "RANK" in os.environ
