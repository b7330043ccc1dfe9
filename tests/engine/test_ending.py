"""How ranks end: a script that just ends, or fails, keeps its exit code, whatever gloo's threads are in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = '''
import atexit, gc, os, sys, time

FOLDER, RANK, HOW = sys.argv[1], int(sys.argv[2]), sys.argv[3]
state = {}


def let_go_at_the_end():
    """Have gloo's thread wait for the interpreter's lock, to let go of a tensor, when the interpreter ends."""
    sys.setswitchinterval(1000)  # from here on this thread keeps the lock unless it gives it up itself
    open(f"{FOLDER}/ending", "w").close()  # and now rank 1 joins in
    while state["tensor"]._use_count() > state["own"]:
        pass
    for _ in range(10**7):
        pass


if RANK == 0 and HOW != "fails":
    atexit.register(let_go_at_the_end)  # first registered is last called: the interpreter ends right after

import torch
import torch.distributed as dist
from torch import nn

if HOW != "bare":
    import zerocli

dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=2)
tensor = torch.ones(4)
groups = [dist.new_group([0, 1])]  # referred to until the end
if HOW != "bare":
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    engine = zerocli.shard(model, stage=3)
    for _ in range(2):
        engine.backward(model(torch.ones(2, 8)).sum())
        engine.step()
if RANK == 1 and HOW == "fails":
    sys.stdin.read()  # alive, and in no collective, until the other rank has ended
    os._exit(0)
if RANK == 1:
    while not os.path.exists(f"{FOLDER}/ending"):
        time.sleep(0.01)
    dist.all_reduce(tensor, group=groups[0])
    os._exit(0)
dist.all_reduce(tensor, group=groups[0] if HOW != "fails" else None, async_op=True)
if HOW == "fails":
    del engine, model  # nothing but torch refers to the group any more
    gc.collect()
    raise ValueError("the user's own")


class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)  # gives the lock up once, while the interpreter ends


late = Late()
state.update(tensor=tensor, own=1 if HOW == "bare" else 2)
if HOW == "group":
    dist.destroy_process_group()
'''


def end_ranks(folder: Path, how: str) -> tuple[int, str]:
    """Run the script on two ranks; return how rank 0 ended, and what it said."""
    script = folder / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script), str(folder)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    other = subprocess.Popen([*command, "1", how], **pipes)
    try:
        done = subprocess.run([*command, "0", how], capture_output=True, text=True, timeout=600)
    finally:
        other.kill()
        other.communicate()
    return done.returncode, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", ["held", "group"])
def test_a_script_that_just_ends_does_not_abort(tmp_path, how):
    """Its engine is not closed and a group is still referred to, destroyed or not, while gloo lets go of a tensor."""
    code, said = end_ranks(tmp_path, how)
    assert code == 0 and "terminate" not in said, said


@pytest.mark.long
def test_a_script_that_fails_ends_at_once_with_its_own_error(tmp_path):
    """A collective that nobody else takes part in is under way: the end does not wait for it."""
    code, said = end_ranks(tmp_path, "fails")
    assert code == 1 and said.rstrip().endswith("ValueError: the user's own"), said
