"""Hostile run folders, files, limits and terminals: nothing outside is touched, nothing hangs."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import Death, train
from saved_engines import engine_of, everything
from saved_engines import train as train_engine

from zerocli import console, machine
from zerocli.checkpoint import Damaged, Folder, Saver, Unreadable, load, resume
from zerocli.cli import main as cli
from zerocli.console import printable
from zerocli.errors import UserError
from zerocli.regular_files import NotRegular, lines_of, open_regular, own_folder, read_regular, write_text

QUICK = ["--ranks", "1", "--steps", "2", "--batch", "1", "--seq", "8", "--set", "model.layers=1"]


def zerocli(*arguments: str, seconds: float = 600, **given) -> subprocess.CompletedProcess:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "zerocli", *arguments], env=environ, timeout=seconds, text=True, **given
    )


# -- files by the name of ours ---------------------------------------------------------------------------------------


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "elsewhere")


def link_to_folder(path: Path) -> None:
    (path.parent.parent / "elsewhere").mkdir()
    link(path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [link, link_to_folder, pipe, Path.mkdir], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["lock", "logs/rank0.log"])
def test_a_run_folder_with_something_else_by_a_files_name_is_refused(tmp_path, capfd, name, make):
    """The ranks are never started: nothing waits for a pipe's reader, nothing is written through a link."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    make(run / name)
    listed = sorted(tmp_path.rglob("*"))
    assert cli.run(["train", "--run-dir", str(run), *QUICK]) == 2
    assert f"{run / name} is a" in capfd.readouterr().err
    if name == "lock":
        assert sorted(tmp_path.rglob("*")) == listed
    elsewhere = tmp_path / "elsewhere"
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["logs", "checkpoints"])
def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / name).symlink_to(outside)
    with pytest.raises(NotRegular, match="is a link"):
        own_folder(tmp_path / name)
    assert not list(outside.iterdir())


def test_metrics_and_checkpoints_are_not_written_through_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "metrics.jsonl").write_text("theirs\n")
    for name in ("metrics.jsonl", "checkpoints"):
        run = tmp_path / f"run-{name}"
        run.mkdir()
        (run / name).symlink_to(outside / name)
        ended = train(run, "train.steps=2", world=1)
        assert ended.codes == [2] and f"{run / name} is a link" in ended.said[0]
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"metrics.jsonl": "theirs\n"}


def test_a_part_file_is_never_one_that_was_there(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / f"config.json.{os.getpid()}.part").symlink_to(tmp_path / "theirs")
    write_text(tmp_path / "config.json", "ours")
    assert ((tmp_path / "theirs").read_text(), (tmp_path / "config.json").read_text()) == ("theirs", "ours")


@pytest.mark.parametrize("make", [link, pipe, Path.mkdir], ids=lambda make: make.__name__)
def test_opening_never_waits_and_never_follows(tmp_path, make):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "file"
    make(path)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(NotRegular):
            open_regular(path, flags)
    assert not (tmp_path / "elsewhere").exists()


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return engine_of({"stage": 3})


def save(engine, folder: Path, *steps: int, keep: int = 9) -> None:
    saver = Saver(engine[1], folder, asynchronous=False, keep=keep)
    for step in steps:
        train_engine(engine[1], engine[0], range(step, step + 1))
        saver.save(step)
        assert saver.failure is None
    saver.close()


def test_pruning_neither_follows_links_nor_counts_them(tmp_path, engine):
    ours, other = tmp_path / "ours", tmp_path / "other"
    save(engine, other, 10)
    save(engine, ours, 1)
    (ours / "step-00000004").symlink_to(Folder(other).of(10))
    (ours / "step-00000009.tmp").symlink_to(other)
    theirs = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    save(engine, ours, 5, 6, keep=2)
    Folder(ours).sweep()
    assert [found.step for found in Folder(ours).committed()] == [6, 5]  # the link took nobody's place
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == theirs
    save(engine, ours, 4, keep=9)  # and a save that bears its name replaces the link, not what it leads to
    assert not Folder(ours).of(4).is_symlink()
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == theirs


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_what_cannot_be_read_is_not_taken_for_damaged(tmp_path, engine, monkeypatch, call, number):
    """An older checkpoint is whole, and must not be taken: the newest may be whole too."""
    save(engine, tmp_path, 1, 2)
    real = getattr(os, call)

    def fails(target, *args, **kwargs):
        name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if "step-00000002/rank" in name:
            raise OSError(number, os.strerror(number), name)
        return real(target, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(Unreadable, match=os.strerror(number)):
            resume(engine[1], tmp_path)
    assert resume(engine[1], tmp_path).step == 2


def test_a_checkpoint_folder_that_cannot_be_looked_into_is_no_empty_one(tmp_path, engine, monkeypatch):
    save(engine, tmp_path, 1)
    real = os.lstat

    def fails(path, *args, **kwargs):
        if os.fspath(path).endswith("manifest.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "lstat", fails)
    with pytest.raises(PermissionError):  # or a new run would be let in to replace it
        Folder(tmp_path).committed()


def rewritten(path: Path, change) -> None:
    from saved_engines import rewrite

    rewrite(path, change)


def swap(manifest: dict) -> None:
    """Let two pieces of equal size change places, hashes and all."""
    pieces = [
        (name, piece)
        for name, tensor in manifest["tensors"].items()
        if name.startswith(("parameters/", "optimizer/"))
        for piece in tensor["pieces"]
    ]
    (_, one), (_, two) = next(
        (a, b) for a in pieces for b in pieces if a[0] != b[0] and a[1][1] == b[1][1] and a[1][4] != b[1][4]
    )
    one[2:], two[2:] = two[2:], one[2:]


def test_pieces_that_changed_places_are_found_under_a_checksum_that_holds(tmp_path, engine):
    save(engine, tmp_path, 1)
    rewritten(Folder(tmp_path).of(1), swap)
    with pytest.raises(Damaged, match="is damaged within"):
        load(engine[1], Folder(tmp_path).of(1))


def test_a_piece_of_another_step_is_found(tmp_path, engine):
    save(engine, tmp_path, 1, 2)
    one, two = Folder(tmp_path).of(1), Folder(tmp_path).of(2)
    old = json.loads((one / "manifest.json").read_text())["manifest"]["tensors"]
    (two / "rank-00000.bin").write_bytes((one / "rank-00000.bin").read_bytes())
    rewritten(two, lambda manifest: manifest.update(tensors=old))
    with pytest.raises(Damaged, match="is damaged within"):
        load(engine[1], two)


def test_a_checkpoint_of_the_first_format_is_still_read(tmp_path, engine):
    import hashlib

    save(engine, tmp_path, 1)
    path, expected = Folder(tmp_path).of(1), everything(engine[1])
    data = (path / "rank-00000.bin").read_bytes()

    def change(manifest):
        manifest["version"] = 1
        for tensor in manifest["tensors"].values():
            itemsize = getattr(torch, tensor["dtype"]).itemsize
            for piece in tensor["pieces"]:
                nbytes = torch.Size(piece[1]).numel() * itemsize
                piece[4] = hashlib.sha256(data[piece[3] : piece[3] + nbytes]).hexdigest()

    rewritten(path, change)
    train_engine(engine[1], engine[0], range(2, 3))
    load(engine[1], path)
    assert everything(engine[1]) == expected


def test_values_of_another_step_are_refused(tmp_path):
    ended = train(tmp_path / "run", "train.steps=4", world=1)
    assert ended.codes == [0], ended.said
    folder = Folder(tmp_path / "run" / "checkpoints")
    rewritten(folder.of(4), lambda manifest: manifest["values"].update(steps=9))
    ended = train(tmp_path / "run", "train.steps=4", world=1, resume=True)
    assert ended.codes == [0]
    assert "checkpoint of step 4 skipped: it is of step 4, and its values of step 9" in ended.said[0]
    assert "resuming after step 2" in ended.said[0]


# -- a run folder that goes away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_whose_folder_was_removed_does_not_end_well(tmp_path, every):
    run = tmp_path / "run"
    death = Death((0,), 1, "optimizer", act=functools.partial(shutil.rmtree, run))
    ended = train(run, "train.steps=6", f"checkpoint.every={every}", world=1, death=death)
    assert ended.codes == [1], ended.said
    assert f"{run} was removed or replaced while the run was writing there" in ended.said[0]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_no_file_is_read_beyond_its_size(tmp_path, capfd):
    """Sparse files of a terabyte: read whole, each would end as a MemoryError."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("huge.toml", "run/config.json", "run/metrics.jsonl", "run/profile.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)
    for arguments in (["train", str(tmp_path / "huge.toml")], ["train", str(run / "config.json")],
                      ["fit", str(run / "config.json")], ["profile", str(run)]):  # fmt: skip
        assert cli.run(arguments) == 2, arguments
        assert "1099511627776 bytes" in capfd.readouterr().err
    with pytest.raises(UserError, match="1099511627776 bytes"):
        read_regular(run / "profile.json", 1 << 20)
    assert len(next(lines_of(run / "metrics.jsonl", 1 << 10))) == 1 << 10


def test_a_model_of_millions_of_layers_is_refused_at_once(capfd):
    for command in ("train", "fit"):
        assert cli.run([command, "tiny", "--set", "model.layers=3000000"] + ["--dry-run"] * (command == "train")) == 2
        assert "layers 3000000 is above 10000" in capfd.readouterr().err


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_dry_run_counts_what_is_built(family, tp):
    from zerocli import config as configs
    from zerocli.engine.tensor_parallel import local_numel
    from zerocli.run.engines import count_parameters, make_model

    config = configs.load("tiny", [f"model.family={family}", "model.layers=5", f"parallel.tp={tp}"])
    model = make_model(config)
    numel = sum(p.numel() for p in model.parameters())
    assert count_parameters(config) == (numel, local_numel(model, tp), numel)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_low_limit_of_open_files_is_told(tmp_path):
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); from zerocli.cli.main import run; "
    )
    program = limited + f"sys.exit(run(['train', '--run-dir', {str(tmp_path / 'run')!r}, '--ranks', '1']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "try: ulimit -n 4096" in ended.stderr
    assert "may have 40 files open" in ended.stderr and "bug" not in ended.stderr


def test_a_limit_that_may_be_raised_is(monkeypatch):
    calls = []
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (40, 5000))
    monkeypatch.setattr(machine.resource, "setrlimit", lambda kind, limits: calls.append(limits))
    machine.allow_open_files(144)
    assert calls == [(144, 5000)]


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, os.strerror(errno.EMFILE))], ids=repr)
def test_what_the_system_refuses_is_no_bug_of_ours(monkeypatch, capfd, error):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(cli.group, "main", fails)
    assert cli.run([]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "bug" not in said


# -- terminals ---------------------------------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path, capfd):
    assert printable("a\x1b[2J\r\x9b1m\u202eb\ttab\nline ä") == "a\\x1b[2J\\r\\x9b1m\\u202eb\ttab\nline ä"
    name = str(tmp_path / "\x1b]0;owned\x07.toml")
    Path(name).write_text("[model]\nno\u202e_such = 1\n")
    for arguments in (["train", name], ["profile", name + "x"], ["fit", "\x1b[31mx"], ["export", name, name]):
        assert cli.run(arguments) != 0
        out, err = capfd.readouterr()
        assert "\x1b" not in out + err and "\u202e" not in out + err and "\x07" not in out + err
        assert "\\x1b" in err, arguments


def test_hints_can_be_pasted(tmp_path, capfd):
    run = tmp_path / "my run; rm -rf x"
    (run / "logs").mkdir(parents=True)
    (run / "lock").symlink_to("/nowhere")
    cli.run(["train", "--run-dir", str(run), *QUICK])
    hint = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("try: "))
    assert f"'{run / 'lock'}'" in hint


def closed(*fds: int):
    return lambda: [os.close(fd) for fd in fds]


@pytest.mark.long
def test_a_run_without_standard_streams_ends_as_it_should(tmp_path):
    """Closed streams would lend their numbers to the next files opened, and those get what was meant for people."""
    run = tmp_path / "run"
    ended = zerocli("train", "--run-dir", str(run), *QUICK, "--json", preexec_fn=closed(0, 1, 2))
    assert ended.returncode == 0
    assert (run / "lock").read_text().startswith("process ") and len((run / "lock").read_text().splitlines()) == 1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 2


def test_whoever_stops_reading_gets_no_traceback(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    ended = zerocli("configs", "ls", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert "Traceback" not in ended.stderr and "bug" not in ended.stderr
    with open("/dev/full", "w") as full:
        ended = zerocli("configs", "ls", stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 1 and "No space left on device" in ended.stderr and "Traceback" not in ended.stderr


def test_an_interrupt_while_importing_gives_no_traceback():
    """At any import of the program's start: the signal is sent from a hook that sees each of them."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from zerocli.entry import main\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
        "main()\n"
    )
    for module in ("zerocli.cli.main", "click", "zerocli.console"):
        ended = subprocess.run([sys.executable, "-c", program, module], capture_output=True, text=True, timeout=300)
        assert (ended.returncode, ended.stderr) == (130, "interrupted\n"), module


def test_streams_that_are_open_are_left_alone():
    before = [os.fstat(fd).st_ino for fd in (0, 1, 2)]
    console.open_standard_streams()
    assert [os.fstat(fd).st_ino for fd in (0, 1, 2)] == before


def test_signals_are_handled_as_before_once_the_program_runs():
    program = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from zerocli import entry\n"
        "from zerocli.cli import main as cli\n"
        "cli.main = lambda: print(signal.getsignal(2))\n"
        "entry.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "default_int_handler" in ended.stdout
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
