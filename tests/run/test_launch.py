"""Launch: however a run ends, no process is left, and the rank that failed first is the one that is told of."""

import contextlib
import io
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerocli.config.options import RunOptions
from zerocli.console import say
from zerocli.errors import FAILURE, USAGE, UserError
from zerocli.ranks import worker
from zerocli.run.folders import folder
from zerocli.run.processes import launch
from zerocli.run.processes.job import Tee

WAIT = "import time; time.sleep(600)"
# A stub rank writes its pid, then does `body`, in which `rank` is its number.
STUB = """
import os, signal, sys
from pathlib import Path
from zerocli.ranks import worker
worker.die_with_parent()
rank = int(os.environ["RANK"])
run = Path(os.environ["ZEROCLI_RUN_DIR"])
(run / f"pid{rank}.part").write_text(str(os.getpid()))
(run / f"pid{rank}.part").rename(run / f"pid{rank}")
"""
DRIVER = """
import sys
from types import SimpleNamespace
from zerocli.ranks import worker
from zerocli.config.options import RunOptions
from zerocli.run.processes import launch
config = SimpleNamespace(parallel=SimpleNamespace(ranks=2, tp=1))
sys.exit(launch.launch(config, RunOptions(sys.argv[1]), worker=[sys.executable, "-c", sys.argv[2]]))
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_stub(run_dir: Path, body: str, ranks: int = 2) -> int:
    config = SimpleNamespace(parallel=SimpleNamespace(ranks=ranks, tp=1))
    return launch.launch(config, RunOptions(str(run_dir)), worker=[sys.executable, "-c", STUB + body])


def start_driver(run_dir: Path, body: str = WAIT) -> subprocess.Popen:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run_dir), STUB + body], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: all((run_dir / f"pid{rank}").exists() for rank in range(2)))
    return driver


def pids(run_dir: Path, ranks: int = 2) -> list[int]:
    return [int((run_dir / f"pid{rank}").read_text()) for rank in range(ranks)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_ranks_get_the_variables_torch_wants(tmp_path, capfd, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    body = "import json; (run / f'env{rank}').write_text(json.dumps(dict(os.environ)))"
    assert run_stub(tmp_path, body, ranks=3) == 0
    seen = [json.loads((tmp_path / f"env{rank}").read_text()) for rank in range(3)]
    assert [each["RANK"] for each in seen] == [each["LOCAL_RANK"] for each in seen] == ["0", "1", "2"]
    for name, value in {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        assert {each[name] for each in seen} == {value}
    assert len({each["MASTER_PORT"] for each in seen}) == 1
    assert int(seen[0]["OMP_NUM_THREADS"]) >= 1
    assert "torchrun --standalone --nproc-per-node 3 -m zerocli train" in capfd.readouterr().err


def test_only_rank_0_reaches_the_terminal_and_every_rank_its_log(tmp_path, capfd):
    assert run_stub(tmp_path, "print('out', rank); print('err', rank, file=sys.stderr)") == 0
    captured = capfd.readouterr()
    assert captured.out == "out 0\n"
    assert "err 0" in captured.err and "err 1" not in captured.err
    assert (tmp_path / "logs/rank0.log").read_text() == "err 0\n"
    assert sorted((tmp_path / "logs/rank1.log").read_text().splitlines()) == ["err 1", "out 1"]


def test_the_first_failure_ends_the_others_and_its_traceback_is_shown(tmp_path, capfd):
    body = f"""
import time
while not (run / "pid0").exists(): time.sleep(0.01)
if rank == 1: raise KeyError('the cause')
{WAIT}
"""
    assert run_stub(tmp_path, body) == 1
    err = capfd.readouterr().err
    assert "rank 1 failed, exit code 1" in err and "KeyError: 'the cause'" in err
    assert str(tmp_path / "logs") in err
    assert not any(runs(pid) for pid in pids(tmp_path))


def test_the_earliest_failure_is_the_cause_and_the_consequences_stay_in_the_logs(tmp_path, capfd):
    # Rank 0 fails because rank 1 did, and may well end before it; it must get its word in, so it ignores our SIGTERM.
    body = """
import time
if rank == 1:
    while not (run / "ready").exists(): time.sleep(0.01)
    worker.record_failure("the cause", 1)
    time.sleep(600)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / "ready").touch()
while not (run / "logs/rank1.error").exists(): time.sleep(0.01)
worker.record_failure("a consequence", 1)
sys.exit(1)
"""
    assert run_stub(tmp_path, body) == 1
    err = capfd.readouterr().err
    assert "rank 1 failed, exit code 1:\nthe cause" in err and "a consequence" not in err
    assert "a consequence" in (tmp_path / "logs/rank0.log").read_text()


def test_a_killed_rank_is_said_to_be_with_the_memory_it_had_reached(tmp_path, capfd):
    held = 200 * 2**20
    body = f"""
if rank == 1:
    block = b"x" * {held}
    os.kill(os.getpid(), signal.SIGKILL)
{WAIT}"""
    assert run_stub(tmp_path, body) == 1
    err = capfd.readouterr().err
    assert "rank 1 was killed by the kernel (SIGKILL); it had reached" in err and "try: " in err
    reached = float(err.split("it had reached ")[1].split(" GiB")[0])
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # a child begins as a copy of this process
    assert held / 2**30 <= reached + 0.01 < max(1, own + 0.5)


@pytest.mark.parametrize("code", [2, 3])
def test_a_user_error_of_all_ranks_is_printed_once(tmp_path, capfd, code):
    assert run_stub(tmp_path, f"worker.record_failure('error: too large', {code}); sys.exit({code})") == code
    err = capfd.readouterr().err
    assert err.count("error: too large") == 1 and "failed" not in err


def test_what_is_wrong_with_a_command_is_shown_by_rank_0_alone(tmp_path, monkeypatch):
    """torchrun's ranks all find it; each leaves it for torchrun's summary."""
    monkeypatch.delenv("ZEROCLI_PARENT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    shown = {}
    for rank, code in itertools.product(("0", "1"), (USAGE, FAILURE)):
        monkeypatch.setenv("RANK", rank)
        shown[rank, code] = not worker.record_failure("wrong", code)
    assert [key for key in shown if not shown[key]] == [("1", USAGE)] and (tmp_path / "error").exists()


def test_preempted_passes_through(tmp_path):
    assert run_stub(tmp_path, "sys.exit(75)") == 75


def test_rank_0_inherits_the_port_that_the_others_are_told(tmp_path):
    """It listens from before the first rank starts: no other program can take it in between."""
    body = """
import socket
fd = os.environ.get("ZEROCLI_STORE_FD")
if rank == 0:
    listener = socket.socket(fileno=int(fd))
    assert listener.getsockname() == ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    listener.accept()
else:
    assert fd is None
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=600)
"""
    assert run_stub(tmp_path, body) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_ends_all_ranks(tmp_path, number):
    driver = start_driver(tmp_path)
    driver.send_signal(number)
    _, err = driver.communicate(timeout=600)
    assert driver.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert not any(runs(pid) for pid in pids(tmp_path))


def test_ranks_that_ignore_sigterm_and_their_children_are_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROCLI_GRACE_SECONDS", "0.3")
    body = f"""
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "{WAIT}"])
(run / f"child{{rank}}.part").write_text(str(child.pid))
(run / f"child{{rank}}.part").rename(run / f"child{{rank}}")
{WAIT}"""
    driver = start_driver(tmp_path, body)
    wait_until(lambda: all((tmp_path / f"child{rank}").exists() for rank in range(2)))
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=600)
    children = [int((tmp_path / f"child{rank}").read_text()) for rank in range(2)]
    assert driver.returncode == 130
    wait_until(lambda: not any(runs(pid) for pid in pids(tmp_path) + children))


def test_ranks_saved_after_a_signal_are_preempted(tmp_path):
    driver = start_driver(
        tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n(run / f'set{{rank}}').touch()\n{WAIT}"
    )
    wait_until(lambda: all((tmp_path / f"set{rank}").exists() for rank in range(2)))
    driver.send_signal(signal.SIGTERM)
    driver.communicate(timeout=600)
    assert driver.returncode == 75


@pytest.mark.skipif(sys.platform != "linux", reason="a killed parent is noticed at once on Linux alone")
def test_ranks_die_with_a_killed_parent(tmp_path):
    driver = start_driver(tmp_path)
    started = pids(tmp_path)
    assert len(started) == 2 and all(runs(pid) for pid in started)
    driver.kill()
    driver.communicate(timeout=600)
    wait_until(lambda: not any(runs(pid) for pid in started))


def test_on_a_terminal_rank_0_has_a_terminal(tmp_path):
    ours, theirs = os.openpty()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), STUB + "print('tty', os.isatty(2), file=sys.stderr)"],
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 4096):
            text += chunk
    except OSError:
        pass
    os.close(ours)
    assert driver.wait(timeout=600) == 0
    assert b"tty True\r\n" in text and (tmp_path / "logs/rank0.log").read_text() == "tty True\n"


def test_number_of_ranks_is_chosen_with_a_reason(monkeypatch):
    monkeypatch.delenv("ZEROCLI_SHARE_GPU", raising=False)
    assert launch.choose_ranks(0, 1, 0) == (2, "no GPU: two processes so that partitioning is real")
    assert launch.choose_ranks(0, 4, 0)[0] == 4
    assert launch.choose_ranks(0, 1, 8)[0] == 8
    assert launch.choose_ranks(3, 1, 8)[0] == 3
    assert launch.choose_ranks(3, 1, 0)[0] == 3
    with pytest.raises(UserError, match="4 ranks, but 1 GPU ") as caught:
        launch.choose_ranks(4, 1, 1)
    assert caught.value.exit_code == 2 and "--ranks 1" in caught.value.hint
    with pytest.raises(UserError, match="tp 2 does not divide"):
        launch.choose_ranks(0, 2, 3)
    monkeypatch.setenv("ZEROCLI_SHARE_GPU", "1")
    assert launch.choose_ranks(4, 1, 1)[0] == 4


def test_an_unwritable_run_folder_is_a_user_error_with_its_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/file/run") as caught:
        folder.create(str(tmp_path / "file" / "run"))
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="File exists"):
        folder.create(str(tmp_path / "file"))


def test_a_fresh_run_folder_is_nobody_elses(tmp_path):
    made = [folder.create(str(tmp_path / "run"), fresh=True).path.name for _ in range(3)]
    assert made == ["run", "run-2", "run-3"]
    assert folder.create(str(tmp_path / "run")).path.name == "run"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[01-04,7]", "node01"),
        ("node[7,9-11],login", "node7"),
        ("alpha,beta[1-3]", "alpha"),
        ("rack[1-2]n[05,07]", "rack1n05"),
        ("a-b-3", "a-b-3"),
        ("n[003]", "n003"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert worker.first_host(nodes) == host


def test_slurm_makes_a_rank():
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "7",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_TASKS_PER_NODE": "2(x3),1",
        "SLURM_NODELIST": "gpu[03-06]",
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
    }
    assert worker.worker_environment(environ) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(10000 + 123456 % 20000),
    }
    for other in ("4294967290", ""):  # an interactive shell; a batch script has none
        assert worker.worker_environment({**environ, "SLURM_STEP_ID": other}) is None
    named = worker.worker_environment({**environ, "MASTER_ADDR": "here", "MASTER_PORT": "1"})
    assert named and named["MASTER_ADDR"] == "here" and named["MASTER_PORT"] == "1"


def test_torchrun_makes_a_rank_and_comes_before_slurm():
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    assert worker.worker_environment({**torchrun, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == torchrun
    assert worker.worker_environment({}) is None
    alone = worker.worker_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert alone and alone["LOCAL_RANK"] == "0" and int(alone["MASTER_PORT"]) > 0
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT"):
        worker.worker_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_no_room_for_a_log_takes_nothing_from_the_terminal(capfd):
    """And rank 0, which writes to both, hears of no broken pipe."""
    with open("/dev/full", "wb", buffering=0) as log:
        tee = Tee(log)
        writer = os.dup(tee.writer)
        tee.start()
        for text in (b"one\n", b"two\n"):
            os.write(writer, text)
        os.close(writer)
        tee.join(30)
    assert capfd.readouterr().err == "one\ntwo\n"


def test_nobody_listening_ends_no_run():
    with open("/dev/full", "wb", buffering=0) as full:
        nobody = io.TextIOWrapper(full, write_through=True)
        with pytest.raises(OSError):
            print("to nobody", file=nobody, flush=True)
        with contextlib.redirect_stderr(nobody):
            say("to nobody")  # would raise as well
