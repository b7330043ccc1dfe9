"""Small things that cost a new user time: folders of failed starts, colours, completion, rates, skipped steps."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerocli import console
from zerocli.cli import completion
from zerocli.cli import main as cli
from zerocli.cli.run_dirs import refuse_no_run
from zerocli.config.options import RunOptions
from zerocli.config.schema import FIELDS
from zerocli.console import progress, say
from zerocli.errors import DOES_NOT_FIT, FAILURE, INTERRUPTED, OK, USAGE, UserError
from zerocli.profile.lines import Line
from zerocli.ranks import store
from zerocli.run.folders import folder
from zerocli.run.output import report
from zerocli.run.processes import launch
from zerocli.run.processes.job import Job

# -- run folders -------------------------------------------------------------------------------------------------------


def start(monkeypatch, path: Path, code: int, write: str = "") -> None:
    """Launch a run whose ranks leave their logs, what `write` names, and this exit code."""

    def run(job: Job) -> int:
        (job.run_dir / "logs" / "rank0.log").write_text("it says why")
        if write:
            (job.run_dir / write).parent.mkdir(exist_ok=True)
            (job.run_dir / write).write_text("")
        return code

    monkeypatch.setattr(Job, "run", run)
    monkeypatch.setattr(Job, "report", lambda job: None)
    config = SimpleNamespace(parallel=SimpleNamespace(ranks=1, tp=1))
    assert launch.launch(config, RunOptions(str(path))) == code


@pytest.mark.parametrize("code", [USAGE, DOES_NOT_FIT, INTERRUPTED])
def test_a_start_that_failed_leaves_no_folder(monkeypatch, tmp_path, code):
    start(monkeypatch, tmp_path / "runs" / "one", code)
    assert os.listdir(tmp_path) == []  # nor the folder around it


@pytest.mark.parametrize(
    ("code", "write"),
    [
        (OK, ""),
        (FAILURE, ""),  # its logs say more than the terminal
        (USAGE, "config.json"),
        (INTERRUPTED, "metrics.jsonl"),
        (INTERRUPTED, "checkpoints/step-00000001"),
        (USAGE, "logs/notes.txt"),
    ],
)
def test_a_run_that_wrote_something_keeps_its_folder(monkeypatch, tmp_path, code, write):
    start(monkeypatch, tmp_path / "run", code, write)
    assert (tmp_path / "run" / "logs" / "rank0.log").exists() and (tmp_path / "run" / write).exists()


def test_what_was_there_before_stays(monkeypatch, tmp_path):
    for name in ("run", "run/checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "mine.txt").write_text("")
    start(monkeypatch, tmp_path / "run", USAGE)
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints", "mine.txt"]


def test_a_rank_that_raises_removes_what_it_created(tmp_path):
    with pytest.raises(UserError), folder.run_folder(str(tmp_path / "a" / "run")):
        raise UserError("no")
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError), folder.run_folder(str(tmp_path / "run")) as made:
        (made.path / "logs" / "rank3.log").write_text("why")
        raise UserError("no")
    assert (tmp_path / "run" / "logs" / "rank3.log").exists()


def test_a_restarted_rank_may_find_nothing_to_resume(monkeypatch, tmp_path):
    ctx = SimpleNamespace(info_name="train", get_parameter_source=lambda name: None)
    rank = {"RANK": "0"}
    for name in ("ZEROCLI_PARENT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nothing to resume in run"):
        refuse_no_run(ctx, "run", ["tiny", "--run-dir", "run", "--resume"], rank)
    refuse_no_run(ctx, "run", [], {"RANK": "1"})  # its folder may be on another node
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            refuse_no_run(ctx, "run", [], rank)
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    refuse_no_run(ctx, "run", [], None)  # a run that had not saved yet starts again


# -- the store's port --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_a_port_in_use_is_named_with_a_free_one(monkeypatch, own):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if not own:  # as where MASTER_ADDR is a name that only others use for this machine
            monkeypatch.setattr(store, "listen", lambda *_, **__: None)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"port {port}.* is taken by another program") as caught:
            store.open_store(0, 2, 1.0)
    assert "another MASTER_PORT, such as " in caught.value.hint and caught.value.exit_code == FAILURE


def test_a_master_that_does_not_exist_is_named_at_once(monkeypatch):
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setenv("MASTER_ADDR", "nosuchhost.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match="MASTER_ADDR nosuchhost.invalid: no such host"):
        store.open_store(0, 2, 1.0)


# -- output ------------------------------------------------------------------------------------------------------------


def test_a_document_has_null_where_a_number_is_not_finite(capsys):
    document = {"a": [1.5, float("nan"), {"b": float("inf")}], "c": (float("-inf"), "NaN", True), "d": 3}
    console.show_json(document)
    assert capsys.readouterr().out == '{"a": [1.5, null, {"b": null}], "c": [null, "NaN", true], "d": 3}\n'


def test_documents_are_printed_in_one_place():
    """Elsewhere NaN, which JSON does not have, could reach stdout."""
    modules = Path(console.__file__).parent.rglob("*.py")
    assert [path.name for path in modules if re.search(r"(show|echo|print)\(json\.dumps", path.read_text())] == []


def test_no_color_is_obeyed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.colours()
    monkeypatch.setenv("TERM", "dumb")
    assert not console.colours()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not console.colours()
    monkeypatch.setenv("NO_COLOR", "")  # set but empty: as if unset (no-color.org)
    assert console.colours()


def test_measured_rates_are_shown_with_units():
    from zerocli.plan.time.bench import in_words

    result = {"device": "cpu", "nbytes": 1 << 30, "paths": ["x"], "raw_read": 2.0, "read": 1.9, "read_ratio": 0.95}
    assert in_words(result) == "read 1.9 GB/s"
    assert in_words({"products": 400.0, "adam": 3.0}) == "products 400 TFLOPS, adam 3 billion parameters/s"


def line(step: int, skipped: bool) -> Line:
    return Line(step, 1.0, 1.0, 1e-3, 8, 0.1, 80.0, {"hbm": 1}, 0, {}, {}, {}, {}, skipped)


def test_steps_that_were_not_applied_are_said_and_counted(capsys):
    with report.Progress(9, 100, active=True) as progress:
        for step in range(1, 9):
            progress.show(line(step, True))
    said = [text for text in capsys.readouterr().err.splitlines() if "was not applied" in text]
    assert len(said) == report.MAX_SKIPPED_LINES and "step 1 was not applied" in said[0] and "counted" in said[-1]
    summary = {"skipped": 3, "steps": 9, "precision": "fp16"}
    assert "3 of 9 steps were not applied: gradients overflowed in fp16" in report.skipped_line(summary)[0]
    assert "no step was applied" in report.skipped_line(summary | {"skipped": 9})[0]
    assert report.skipped_line(summary | {"skipped": 0}) == []


def terminal(columns: int, write: Callable[[], None]) -> str:
    """Return what `write` sends to stderr if that is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as stderr, contextlib.redirect_stderr(stderr):
        write()
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as screen:  # an error is the end
        while more := screen.read(2**16):
            shown += more
    return shown.decode()


def test_the_bar_has_the_learning_rate_in_80_columns_and_messages_stand_above_it():
    def train() -> None:
        with report.Progress(12_345, 100, active=True) as progress:
            for step in range(1, 4):
                progress.show(dataclasses.replace(line(step, False), loss=12.3456, tokens_per_second=1_234_567.0))
                say(f"evaluation after step {step}: loss 1.0")
        say("the end")

    frames = terminal(80, train).replace("\r\n", "\n").replace("\x1b[A", "")
    for frame in re.split(r"[\r\n]", frames):
        assert len(frame) <= 80, frame
    assert re.search(r"3/12345 \|.{4,}\| \d\d:\d\d<\S+ loss 12.3456 lr 1.0e-03 1.23M tokens/s", frames)
    for said in ("evaluation after step 1: loss 1.0", "evaluation after step 3: loss 1.0", "the end"):
        assert re.search(rf"(^|[\r\n]){said}\n", frames), frames


def test_counting_shows_how_much_is_done(monkeypatch, capsys):
    def count() -> None:
        with progress("reading", 4, "pass") as done:
            done(3)
            say("meanwhile")

    assert re.search(r"reading:  75%.* 3/4 ", terminal(80, count)) and "\rmeanwhile\r\n" in terminal(80, count)
    monkeypatch.setattr("zerocli.console.LINE_SECONDS", 0.0)
    count()
    assert capsys.readouterr().err == "reading: 75 %\nmeanwhile\n"


def test_the_summary_shows_the_peak_and_its_largest_holders():
    rows = [("parameters", 10, 10), ("activations", 0, 2 << 20), ("logits", 0, 1 << 20), ("buffers", 5, 5)]
    document = {
        "followed": False,
        "gpu": None,
        "rows": [{"category": c, "tier": "hbm", "measured": m, "predicted": p} for c, m, p in rows],
        "peak": {"hbm": {"measured": 15, "predicted": 3 << 20}},
        "system": {"rss_peak": 300 << 20},
    }
    peak = report.at_peak(document)
    assert peak["measured"] is None and [row["category"] for row in peak["rows"][:2]] == ["activations", "logits"]
    text = "\n".join(report._peak_lines(peak))
    assert text.index("activations") < text.index("parameters") and "3.00 MiB" in text and "300.0 MiB" in text
    assert report.at_peak(document | {"gpu": "H200"})["measured"] == 15


# -- completion --------------------------------------------------------------------------------------------------------


def complete(monkeypatch, capsys, text: str) -> list[str]:
    """Return what bash is told for a line."""
    words = text.split(" ")
    monkeypatch.setenv("_ZEROCLI_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", text)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        cli.run([])
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def commands(monkeypatch):
    """The commands' own parameters again, after a test has changed their types."""
    import copy

    from zerocli.cli import check, configs, env, export, fit, profile, train

    for module in (train, profile, fit, check, env, export, configs):
        monkeypatch.setattr(module, "command", copy.deepcopy(module.command))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zerocli train ti", ["plain,tiny", "file,ti"]),
        ("zerocli fit llama3-7", ["plain,llama3-70b", "file,llama3-7"]),
        ("zerocli train --offload optimizer=n", ["plain,optimizer=nvme"]),
        ("zerocli fit --hardware h200,b", ["plain,h200,b200"]),
        ("zerocli profile --set model.compile=", [f"plain,model.compile={each}" for each in ("auto", "true", "false")]),
        ("zerocli train --set model.tie=f", ["plain,model.tie=false"]),
        ("zerocli train --set zero.sta", ["plain,zero.stage="]),
        ("zerocli check --precision f", ["plain,fp16", "plain,fp32"]),
        ("zerocli configs show zero-1", ["plain,zero-128b", "plain,zero-1t"]),
        ("zerocli train --run-dir ru", ["dir,ru"]),
        ("zerocli train --data te", ["file,te"]),
        ("zerocli completion f", ["plain,fish"]),
    ],
)
def test_values_are_completed(monkeypatch, capsys, commands, text, expected):
    assert complete(monkeypatch, capsys, text) == expected


def test_every_key_is_offered(monkeypatch, capsys, commands):
    offered = {each.removeprefix("plain,") for each in complete(monkeypatch, capsys, "zerocli train --set ")}
    assert offered == {f"{key}=" for key in FIELDS if "." in key}


@pytest.mark.parametrize("shell", list(completion.SHELLS))
def test_a_script_is_printed_for_each_shell(shell, capsys):
    assert cli.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_ZEROCLI_COMPLETE={shell}_complete" in script and "zerocli" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0


TRY = """
complete() { :; }; compopt() { :; }
eval "$SCRIPT"
COMP_LINE="zerocli train --set model.compile=t"; COMP_POINT=${#COMP_LINE}
COMP_WORDS=(zerocli train --set model.compile = t); COMP_CWORD=5
_zerocli_completion zerocli; printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_behind_an_equals_sign(tmp_path, capsys):
    """Bash has cut the word there, and replaces only what follows."""
    assert cli.run(["completion", "bash"]) == 0
    program = tmp_path / "zerocli"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zerocli "$@"\n')
    program.chmod(0o755)
    root = str(Path(cli.__file__).parents[2])
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    environ["SCRIPT"] = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", TRY], env=environ, text=True, capture_output=True, timeout=300)
    assert done.stdout.split() == ["true"], done.stderr
