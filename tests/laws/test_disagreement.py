"""Law: ranks that make different calls all raise one error that names the ranks and the calls; none hangs."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths import LONG
from ranks import _context, run_ranks
from torch import nn

import zerocli

SECONDS = 120.0
"""How long a rank may take to notice, on a machine with other work: a rank that waits for good takes longer."""
BETWEEN = ("state_dict", "gathered", "write", "optimizer_state", "load", "ema")
SETTINGS = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload": "cpu"}, {"stage": 2}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(x, torch.ones_like(x))


def draw(seed: int) -> tuple[dict, list[str], list[str], int]:
    """Return settings, the calls of a loop, the calls of the rank that makes one more or one less, and that rank."""
    chance = random.Random(seed)
    accumulate = chance.choice((1, 1, 2, 3))
    calls: list[str] = []
    for _ in range(3):
        calls += ["forward", "backward"] * accumulate
        calls += chance.choice(([], [], ["grad"]))
        calls += ["step"]
        calls += chance.choice(
            ([], [], ["state_dict"], ["gathered"], ["write"], ["optimizer_state"], ["load"], ["ema"])
        )
    at = chance.randrange(len(calls))
    odd = calls[:at] + ([calls[at]] * 2 if chance.random() < 0.5 else []) + calls[at + 1 :]
    return dict(chance.choice(SETTINGS), accumulate=accumulate), calls, odd, chance.randrange(2)


class Loop:
    """Makes the calls of a loop by their names."""

    def __init__(self, settings: dict) -> None:
        torch.manual_seed(3)
        self.engine = zerocli.shard(Net(), optimizer="adamw", lr=1e-2, **settings)
        self.ema = zerocli.EMA(self.engine)
        self.loss = torch.zeros((), requires_grad=True) * 1.0

    def call(self, name: str) -> None:
        engine = self.engine
        match name:
            case "forward":
                self.loss = engine(torch.randn(4, 6))
            case "backward":
                engine.backward(self.loss)
            case "step":
                engine.step()
            case "grad":
                engine.grad("blocks.1.weight")
            case "state_dict":
                engine.state_dict()
            case "gathered" | "write":
                with engine.gathered("blocks.0.weight", write=name == "write"):
                    engine.model.blocks[0].weight.sum().item()
            case "optimizer_state":
                engine.optimizer_state_dict()
            case "load":
                engine.load_optimizer_state_dict(engine.optimizer_state_dict())
            case "ema":
                self.ema.update()
                self.ema.state_dict()


def _run(seeds: list[int]) -> list[tuple[str, str, float, list[torch.Tensor]]]:
    import torch.distributed as dist

    found = []
    for seed in seeds:
        settings, calls, odd, rank = draw(seed)
        torch.manual_seed(seed)
        loop = Loop(settings)
        began, kind, text, state = time.monotonic(), "done", "", []
        try:
            for call in odd if dist.get_rank() == rank else calls:
                loop.call(call)
            loop.engine.meet("the end of the loop")  # as the ranks' last call is: a rank that ends is another law's
            state = list(loop.engine.state_dict().values())
        except zerocli.Refused as error:
            kind, text = "refused", str(error)
        except RuntimeError as error:
            kind, text = "local", str(error)
        found.append((kind, text, time.monotonic() - began, state))
        loop.engine.close()
    return found


def _names_ranks_and_calls(text: str) -> bool:
    return "rank 0 " in text and "rank 1 " in text and ("called " in text or "failed" in text)


@pytest.mark.longer
def test_a_call_left_out_or_doubled_on_one_rank_is_named_on_all_ranks():
    """200 drawn loops in the long set: both ranks end alike and within seconds, by an error that names rank and call.

    A loop may also end well, if the ranks' numbers are then the same: an additional forward changes nothing.
    """
    seeds = list(range(200 if LONG else 16))
    results = run_ranks(2, _run, seeds)
    refused = 0
    for seed, ends in zip(seeds, zip(*results, strict=True), strict=True):
        about = f"seed {seed}: {draw(seed)}: {[end[:3] for end in ends]}"
        assert all(seconds < SECONDS for _, _, seconds, _ in ends), about
        kinds = {kind for kind, _, _, _ in ends}
        if kinds == {"done"}:
            assert all(torch.equal(*pair) for pair in zip(ends[0][3], ends[1][3], strict=True)), about
            continue
        refused += 1
        assert "done" not in kinds, about
        assert any(_names_ranks_and_calls(text) for _, text, _, _ in ends), about
        # A rank whose call failed by itself raises its own error, which the other rank's error quotes.
        texts = [text for _, text, _, _ in ends]
        assert all(_names_ranks_and_calls(one) or one[:200] in other for one, other in (texts, texts[::-1])), about
    assert refused > len(seeds) // 2


def _backward_of_two_losses_on_rank_1() -> str:
    import torch.distributed as dist

    model = torch.nn.Linear(3, 3)
    engine = zerocli.shard(model, stage=2)
    loss = model(torch.ones(3)).sum()
    with pytest.raises((ValueError, zerocli.Refused)) as caught:
        engine.backward(loss.expand(2) if dist.get_rank() == 1 else loss)
    engine.backward(model(torch.ones(3)).sum())
    engine.step()
    return str(caught.value)


def test_a_loss_that_is_refused_on_one_rank_is_named_on_the_others():
    """They launch no reduction for which they would wait: the rank has not begun its pass."""
    there, here = run_ranks(2, _backward_of_two_losses_on_rank_1)
    assert here == "backward needs a loss of one element, not of shape (2,)" and here in there


def _ends_alone(rank: int, store: str, end: Any, how: str, stage: int) -> None:
    """Train for three steps; rank 0 leaves the loop before the last one, as `how` says."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    loop = Loop({"stage": stage})
    try:
        for step in range(3):
            if rank == 0 and step == 2:
                if how == "barrier":
                    dist.barrier()
                return
            for call in ("forward", "backward", "step"):
                loop.call(call)
    except RuntimeError as error:
        end.send(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("end", "another rank was lost: rank 0 has ended"),
        pytest.param("barrier", "rank 0 is in torch.distributed.barrier()", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_waits_for_one_that_does_not_come_names_it(tmp_path, how, words, stage):
    """The other rank has ended, or waits in a collective of its own."""
    pipes = [_context.Pipe(duplex=False) for _ in range(2)]
    args = [(rank, str(tmp_path / "store"), pipes[rank][1], how, stage) for rank in range(2)]
    processes = [_context.Process(target=_ends_alone, args=each, daemon=True) for each in args]
    for process in processes:
        process.start()
    try:
        assert pipes[1][0].poll(600), "no error in ten minutes"
        assert words in pipes[1][0].recv()
    finally:
        for process in processes:
            process.join(10)
            process.kill()
