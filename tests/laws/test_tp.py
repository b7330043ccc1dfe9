"""Laws: tensor parallelism under ZeRO computes what one process computes; whole states do not know of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lengths import LONG
from ranks import run_ranks
from split_models import BATCH, HIDDEN, LAYERS, MODELS, SEQ, STEPS, VOCAB, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toys import Uneven

import zerocli
from zerocli.config import ModelConfig, load
from zerocli.config.options import RunOptions
from zerocli.engine.states import held
from zerocli.engine.tensor_parallel import Cut, TensorParallel, local_numel
from zerocli.engine.units.unit import MASTER
from zerocli.errors import UserError
from zerocli.models import build
from zerocli.models.loss import IGNORED, Part, linear_cross_entropy
from zerocli.run import dry_run, engines, trainer

# The first is what the others are compared with.
CASES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "recompute 2": {"stage": 2, "recompute": True},
    "recompute 3": {"stage": 3, "recompute": True},
    "selective 0": {"stage": 0, "recompute": "selective"},
    "selective 3": {"stage": 3, "recompute": "selective"},
    "cpu": {"stage": 3, "offload": "cpu"},
    "mesh": {"stage": 3, "tp": "mesh"},
}
if not LONG:
    CASES = {name: CASES[name] for name in ("stage 0", "stage 3", "cpu")}
TOLERANCE = 1e-5
"""Relative, of losses and gradient norms in fp32 after a few steps; a sum over ranks is rounded in another order."""


def start(model: nn.Module, **settings):
    """Shard with everything on that a step can have; small buckets, so that many cut through parameters."""
    if settings.get("tp") == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        settings |= {"tp": mesh["tp"], "group": mesh["dp"].get_group()}
    # Adam divides by the gradient's size: a small eps would blow rounding of gradients that are zero up to updates.
    fixed = {"lr": 1e-2, "clip": 0.3, "weight_decay": 0.1, "eps": 1e-5, "seed": 3, "bucket_nbytes": 4096}
    return zerocli.shard(model, **(fixed | settings))


def loss_of(engine, tokens: torch.Tensor, targets: torch.Tensor, whole_logits: bool) -> torch.Tensor:
    tokens, targets = tokens.to(engine.device), targets.to(engine.device)
    if not whole_logits:
        return engine(tokens, targets)
    return F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())


def train_steps(engine, steps: range, whole_logits: bool = False) -> dict:
    """Train on the joined batch, split over the data-parallel ranks and micro-steps; return what each step showed."""
    rank, world, accumulate = engine.collectives.rank, engine.collectives.world, engine.settings.accumulate
    each = BATCH // (world * accumulate)
    losses, norms, skipped = [], [], []
    for step in steps:
        torch.manual_seed(1000 * step + rank)  # the same on all ranks that share a batch
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro in range(accumulate):
            first = (micro * world + rank) * each
            loss = loss_of(engine, *batch(step, slice(first, first + each)), whole_logits)
            engine.backward(loss)
            total += loss.detach().double()
        result = engine.step()
        losses.append(engine.collectives.gather_control(total).mean().item() / accumulate)
        norms.append(result.grad_norm.item())
        skipped.append(result.skipped.item())
    return {"losses": losses, "norms": norms, "skipped": skipped}


def replicated_digest(engine) -> str:
    """Return a digest of every bit of the parameters that all tensor-parallel ranks should hold alike."""
    engine.synchronize()
    digest = hashlib.sha256()
    for flat in engine.flats():
        whole = held.whole_of(engine.collectives, flat.layout.total, held.read_held(flat, MASTER, engine.device))
        digest.update(whole[flat.replicated :].numpy().tobytes())
    return digest.hexdigest()


def run(family: str, **settings) -> dict:
    model = build(MODELS[family], SEQ, "meta")
    engine = start(model, units=model.unit_modules(), **settings)
    first = engine.state_dict()
    shown = train_steps(engine, range(STEPS - 1))
    engine.tensor_parallel.take_nbytes()
    last = train_steps(engine, range(STEPS - 1, STEPS))
    moved = engine.tensor_parallel.take_nbytes()
    return {
        **{key: shown[key] + last[key] for key in shown},
        "start": first,
        "state": engine.state_dict(),
        "optimizer": engine.optimizer_state_dict(),
        "comm_tp": moved,
        "replicated": replicated_digest(engine),
        "held": sum(flat.layout.numel for flat in engine.flats()),
        "numel": engine.numel,
    }


def _run_all(family: str, cases: list[dict]) -> list[dict]:
    return [run(family, **case) for case in cases]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name == "gpt2")) for name in MODELS]
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def single(family) -> dict:
    return run(family, stage=0)


@pytest.fixture(scope="module")
def four(family) -> dict[str, list[dict]]:
    """By case what each of four ranks saw, two of them data-parallel and two tensor-parallel."""
    everyone = run_ranks(4, _run_all, family, [{"tp": 2} | case for case in CASES.values()])
    return {name: [rank[i] for rank in everyone] for i, name in enumerate(CASES)}


def assert_close(result: dict, expected: dict) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert result["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    assert result["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-5, msg=name)


def test_tp_equals_data_parallel_and_one_process(family, single, four):
    two = run_ranks(2, _run_all, family, [{"stage": 2}])[0][0]
    assert min(single["norms"]) > 0.3, "clipping is meant to be at work"
    assert_close(two, single)
    for rank in four["stage 0"]:
        assert_close(rank, single)
        assert_close(rank, two)
    assert four["stage 0"][0]["held"] < single["held"] == single["numel"] == four["stage 0"][0]["numel"]


@pytest.mark.longer
@pytest.mark.parametrize("case", list(CASES)[1:])
def test_stage_placement_and_recomputation_change_no_bit(four, case):
    for result in four[case]:
        for key in ("losses", "norms"):
            assert result[key] == four["stage 0"][0][key]
        for name, value in four["stage 0"][0]["state"].items():
            assert torch.equal(result["state"][name], value), name


def test_initial_values_are_those_of_one_process(single, four):
    for result in four["stage 3"]:
        for name, value in single["start"].items():
            assert torch.equal(result["start"][name], value), name


@pytest.mark.longer
def test_replicated_parameters_are_one_on_all_ranks(four):
    for case, ranks in four.items():
        assert len({rank["replicated"] for rank in ranks}) == 1, case


@pytest.mark.longer
def test_exchanges_are_four_sums_a_block_and_counted(four):
    tokens = (BATCH // 2) * SEQ  # of a data-parallel rank, in fp32
    one, ends = tokens * HIDDEN * 4, 2  # embedding and head sum once each
    loss = tokens * 3 * 4  # the highest logit, the sum, the target's
    for case, ranks in four.items():
        # Two in forward, two in backward. Recomputation repeats the attention's; the MLP's is the block's last
        # operation, and torch stops as soon as all that backward needs is there. A product that is kept is kept summed.
        sums = 5 if "recompute" in case else 4
        for rank in ranks:
            assert rank["comm_tp"]["all_reduce"] == 2 * ((LAYERS * sums + ends) * one + loss), case
            # Each block's checkpoint is gathered from its parts.
            assert rank["comm_tp"]["all_gather"] == (LAYERS * one if "recompute" in CASES[case] else 0)
            assert rank["comm_tp"]["reduce_scatter"] == 0


def test_the_plan_of_a_rank_is_what_it_holds(family, single, four):
    model = build(MODELS[family], SEQ, "meta")
    assert local_numel(model, 2) == four["stage 0"][0]["held"]
    assert local_numel(model, 1) == single["held"]


def _resume(family: str, saved: dict, settings: dict) -> dict:
    model = build(MODELS[family], SEQ, "meta")
    engine = start(model, **settings)
    engine.load_state_dict(saved["state"])
    engine.load_optimizer_state_dict(saved["optimizer"])
    return train_steps(engine, range(STEPS, STEPS + 2))


def test_states_go_on_at_another_degree(family, single, four):
    expected = _resume(family, single, {"stage": 0})
    from_tp = _resume(family, four["cpu"][3], {"stage": 0})
    into_tp = run_ranks(4, _resume, family, single, {"tp": 2, "stage": 3})[2]
    for result in (from_tp, into_tp):
        for key in ("losses", "norms"):
            assert result[key] == pytest.approx(expected[key], rel=TOLERANCE)


@pytest.mark.long
def test_accumulation_and_four_way_split_equal_one_process():
    expected = run("gpt2", stage=0)
    accumulated = run_ranks(4, _run_all, "gpt2", [{"tp": 2, "stage": s, "accumulate": 2} for s in (0, 2)])
    wide = run_ranks(4, _run_all, "gpt2", [{"tp": 4, "stage": 3}])
    for result in (*accumulated[0], *accumulated[3], wide[0][0]):
        assert_close(result, expected)


# -- the vocabulary ----------------------------------------------------------------------------------------------------


def _from_logits(family: str, tp: int) -> dict:
    return train_steps(start(build(MODELS[family], SEQ, "meta"), tp=tp, stage=3), range(2), whole_logits=True)


def test_logits_are_whole_on_every_rank(family, single):
    for result in run_ranks(2, _from_logits, family, 2):
        assert result["losses"] == pytest.approx(single["losses"][:2], rel=TOLERANCE)
        assert result["norms"] == pytest.approx(single["norms"][:2], rel=TOLERANCE)


def _loss_of_parts(num_tokens: int, vocab: int, ignored: int, chunk: int) -> tuple:
    axis = TensorParallel(init_device_mesh("cpu", (dist.get_world_size(),)), torch.device("cpu"))
    x, weight, targets = _loss_case(num_tokens, vocab, ignored)
    each = vocab // axis.world
    rows = weight.detach()[axis.rank * each : (axis.rank + 1) * each].clone().requires_grad_()
    loss = linear_cross_entropy(x, rows, targets, chunk, Part(axis, axis.rank * each))
    loss.backward(torch.tensor(3.0))
    return loss.detach(), x.grad, rows.grad


def _loss_case(num_tokens: int, vocab: int, ignored: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(num_tokens, 24, generator=generator), torch.randn(vocab, 24, generator=generator)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    targets[:ignored] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("ignored", [0, 11, 37])
def test_the_loss_of_a_split_vocabulary_equals_the_plain_one(ignored):
    x, weight, targets = _loss_case(37, 132, ignored)
    expected = F.cross_entropy(x @ weight.t(), targets, ignore_index=IGNORED, reduction="sum") / max(1, 37 - ignored)
    expected.backward(torch.tensor(3.0))
    ranks = run_ranks(3, _loss_of_parts, 37, 132, ignored, 8)
    for loss, grad_x, _ in ranks:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(grad_x, x.grad, rtol=1e-5, atol=1e-6)
        assert torch.equal(loss, ranks[0][0]) and torch.equal(grad_x, ranks[0][1])
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), weight.grad, rtol=1e-5, atol=1e-6)


def _beyond() -> tuple[float, str]:
    """Return the loss of a target beyond the vocabulary, and what the rank of the last tokens says to such a token."""
    engine = start(build(MODELS["gpt2"], SEQ, "meta"), tp=2, stage=0)
    tokens, targets = batch(0, slice(0, 2))
    targets[0, 0] = tokens[0, 0] = VOCAB
    with torch.no_grad():
        loss = engine(tokens.clamp_max(VOCAB - 1), targets).item()
        try:
            return loss, str(engine.model.embed.tokens(tokens)) if engine.tensor_parallel.rank else "not asked"
        except IndexError as error:
            return loss, str(error)


def test_a_token_beyond_the_vocabulary_is_not_taken_for_another():
    first, last = run_ranks(2, _beyond)
    assert first[0] == last[0] == float("inf")  # as in one process, whose rows of logits are padded
    assert "out of range" in last[1]


# -- random numbers, faults, values that ranks bring along -------------------------------------------------------------


def _dropped(cases: list[dict]) -> tuple[list[dict], list, list]:
    """Return what each case showed, random numbers drawn around an attention, and its heads' results before `out`."""
    shown = []
    for case in cases:
        config = ModelConfig(family="gpt2", layers=2, hidden=HIDDEN, heads=4, vocab=VOCAB, dropout=0.3)
        engine = start(build(config, SEQ, "meta"), tp=2, **case)
        seen = train_steps(engine, range(2))
        shown.append(seen | {"replicated": replicated_digest(engine)})
    attention, heads = engine.model.blocks[0].attention, []
    attention.out.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    with torch.no_grad():  # all heads alike, so that only their masks tell them apart
        attention.qkv.weight.zero_()
        attention.qkv.bias.fill_(1)
        torch.manual_seed(5)
        around = [torch.rand(4).tolist()]
        attention(torch.ones(1, SEQ, HIDDEN))
        around.append(torch.rand(4).tolist())
    return shown, around, heads[0].tolist()


@pytest.mark.longer
def test_dropout_is_alike_where_activations_are_and_each_ranks_own_in_its_heads():
    cases = [{"stage": 3}, {"stage": 3, "recompute": True}, {"stage": 3, "recompute": "selective"}, {"stage": 0}]
    ranks = run_ranks(4, _dropped, cases if LONG else cases[1::2])
    for shown, around, _ in ranks:
        assert all(each == ranks[0][0][0] for each in shown)
        assert around == ranks[0][1]
    heads = [rank[2] for rank in ranks]
    assert heads[0] == heads[2] and heads[1] == heads[3] and heads[0] != heads[1]


def _parted(stage: int, offload: str) -> tuple[str, list[float]]:
    """Give tensor-parallel rank 1 a slightly different gradient of a replicated weight, as another order would."""
    model = build(MODELS["gpt2"], SEQ)
    engine = start(model, tp=2, stage=stage, offload=offload)
    off = 1e-3 * engine.tensor_parallel.rank
    model.blocks[0].norm1.weight.register_hook(lambda grad: grad + off)
    shown = train_steps(engine, range(2))
    return replicated_digest(engine), shown["norms"]


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, ""), pytest.param(3, "", marks=pytest.mark.long), pytest.param(2, "grads=cpu", marks=pytest.mark.long)],
)
def test_copies_of_a_parameter_never_drift_apart(stage, offload):
    ranks = run_ranks(4, _parted, stage, offload)
    assert all(rank == ranks[0] for rank in ranks)


def _overflown(stage: int) -> tuple[list[float], bool]:
    model = build(MODELS["llama"], SEQ, "meta")
    engine = start(model, tp=2, stage=stage)
    weight = model.blocks[1].mlp.gate_up.weight
    hook = weight.register_hook(lambda grad: grad * float("inf")) if torch.distributed.get_rank() == 1 else None
    before = engine.state_dict()
    first = train_steps(engine, range(1))
    same = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    if hook is not None:
        hook.remove()
    return first["skipped"] + train_steps(engine, range(1, 2))["skipped"], same


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(stage):
    assert run_ranks(4, _overflown, stage) == [([1.0, 0.0], True)] * 4


def _seeded_by_rank() -> dict[str, list]:
    torch.manual_seed(torch.distributed.get_rank())
    engine = start(build(MODELS["llama"], SEQ), tp=2, stage=3)
    return {name: value.tolist() for name, value in engine.state_dict().items()}


def test_rank_zeros_values_win_over_both_axes():
    torch.manual_seed(0)
    expected = {name: value.tolist() for name, value in build(MODELS["llama"], SEQ).state_dict().items()}
    assert run_ranks(4, _seeded_by_rank) == [expected] * 4


def _given_different(what: str) -> str:
    config = ModelConfig(family="gpt2", layers=2, hidden=HIDDEN, heads=4, vocab=VOCAB, dropout=0.3)
    engine = start(build(config, SEQ, "meta"), tp=2)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank if what == "random numbers" else 0)
    with pytest.raises(ValueError) as caught:
        engine(*batch(rank if what == "batches" else 0, slice(0, 2)))
    return str(caught.value)


@pytest.mark.parametrize("what", ["batches", "random numbers"])
def test_ranks_that_share_a_layer_must_be_given_the_same(what):
    for message in run_ranks(2, _given_different, what):
        assert f"the 2 ranks that split each layer between them (tp) were given different {what}" in message


# -- cuts and mistakes -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 1))
def test_parts_of_all_ranks_join_to_the_whole(heads, world, dim):
    sections = tuple(world * number for number in heads)
    shape = (sum(sections), 5) if dim == 0 else (5, sum(sections))
    whole = torch.arange(sum(sections) * 5.0).view(shape)
    cut = Cut(shape, dim, sections)
    parts = [cut.part(whole, rank, world) for rank in range(world)]
    assert torch.equal(cut.join(parts), whole)
    assert all(part.shape[dim] * world == shape[dim] for part in parts)


def _refused(model: str, tp: int) -> str:
    made = Uneven() if model == "other" else build(MODELS[model], SEQ, "meta")
    with pytest.raises(ValueError) as caught:
        zerocli.shard(made, tp=tp)
    return str(caught.value)


def test_a_degree_that_does_not_divide_is_refused_with_the_nearest_that_does():
    assert _refused("gpt2", 2) == "tp 2 does not divide ranks 1; the nearest that works is tp 1"
    assert run_ranks(4, _refused, "llama", 4)[0] == "tp 4 does not divide kv_heads 2; the nearest that works is tp 2"
    assert "Uneven has no tensor_parallel_plan()" in run_ranks(2, _refused, "other", 2)[0]
    with pytest.raises(ValueError, match=r"tp 2 does not divide width 1 of blocks.0.mlp.up 33; .* is tp 1"):
        odd = ModelConfig(family="gpt2", hidden=HIDDEN, heads=4, vocab=VOCAB, mlp_hidden=33)
        local_numel(build(odd, SEQ, "meta"), 2)


@pytest.mark.long
def test_train_counts_data_parallel_ranks_and_checks_against_one_process(tmp_path):
    shape = ["--seq", "32", "--batch", "2", "--set", "model.layers=2", "--ranks", "2", "--tp", "2", "--stage", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "zerocli", "train", *shape, "--check", "2", "--run-dir", "r", "--json"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ranks"], document["tp"]) == (2, 2) and document["check"]["equal"]
    numel = document["parameters"]  # what ranks hold as copies counts once
    for kind, width in {"parameters": 4, "gradients": 4, "optimizer_states": 8}.items():
        assert document["memory"][kind]["stage_0"] == width * numel
    row = json.loads((tmp_path / "r/metrics.jsonl").read_text().splitlines()[1])
    assert row["tokens"] == 2 * 32  # both ranks see the same
    one, loss = 2 * 32 * 128 * 4, 2 * 32 * 3 * 4
    assert row["comm_tp"]["all_reduce"] == 2 * ((2 * 4 + 2) * one + loss)  # four a block, two at the ends
    assert "2 ranks (1 data-parallel x 2 tensor-parallel)" in done.stderr
    assert "vocabulary split, 128 tokens per rank (tp 2 divides 256)" in done.stderr
    assert "torchrun --standalone --nproc-per-node 2 -m zerocli train tiny --stage 3 --tp 2" in done.stderr


def test_a_mistaken_degree_is_a_users_error():
    with pytest.raises(UserError, match="tp 2 does not divide ranks 3; did you mean tp 1?"):
        load("tiny", flags={"parallel.tp": 2, "parallel.ranks": 3})
    with pytest.raises(UserError, match="tp 2 does not divide mlp_hidden 33; did you mean tp 1?"):
        load("tiny", sets=["model.mlp_hidden=33"], flags={"parallel.tp": 2, "parallel.ranks": 4})
    config = load("tiny", sets=["model.dropout=0.1"], flags={"parallel.tp": 2})
    with pytest.raises(UserError, match="other masks") as caught:
        trainer.refuse_check_of_masks(config, RunOptions("", check=1))
    assert caught.value.hint == "--set model.dropout=0"


def test_a_dry_run_counts_what_a_rank_would_hold(capsys):
    config = load("tiny", sets=["train.precision=fp32"], flags={"parallel.tp": 2, "parallel.ranks": 8, "zero.stage": 3})
    assert dry_run.dry_run(config, RunOptions("", json=True)) == 0
    document = json.loads(capsys.readouterr().out)
    local = local_numel(build(config.model, config.train.seq, "meta"), 2)
    assert document["parameters"] / 2 < local < 0.6 * document["parameters"]
    assert document["memory"]["parameters"] == {"held": -(-4 * local // 4), "stage_0": 4 * document["parameters"]}


def test_the_global_batch_counts_data_parallel_ranks():
    config = load("tiny", sets=["train.global_batch=12"], flags={"parallel.tp": 2, "train.batch": 2})
    assert engines.resolve(config, 4).train.accumulate == 3
    with pytest.raises(UserError, match=r"12 is not a multiple of batch 2 x 4 data-parallel ranks = 8"):
        engines.resolve(config, 8)


@pytest.mark.gpu
def test_tp_on_a_gpu_equals_one_process(family):
    """Two ranks share the GPU over gloo: real streams beside each other."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = run(family, stage=0)
    cases = [{"tp": 2} | case for name, case in CASES.items() if name != "mesh"]
    for rank in run_ranks(2, _run_all, family, cases):
        for result in rank:
            for key in ("losses", "norms"):
                assert result[key] == pytest.approx(expected[key], rel=1e-4)
