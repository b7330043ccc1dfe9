"""Laws of the profile: the books balance on every tier, options move their own rows, no number changes."""

from __future__ import annotations

import html
import json
import time
from pathlib import Path

import pytest
import torch
from lengths import LONG
from profiled import SMALL, after_forward, profile, rows
from ranks import run_ranks
from toys import Uneven, split, uneven_batch

import zerocli
from zerocli import config as configs
from zerocli.config import Config, ModelConfig
from zerocli.engine.events import Probe
from zerocli.engine.streams import Waits
from zerocli.layout.categories import CATEGORIES
from zerocli.layout.recompute import Recompute
from zerocli.layout.sizes import format_bytes
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.build import plan_model
from zerocli.plan.search.recompute import MARGIN, needed_by
from zerocli.plan.setup import setup_of
from zerocli.plan.time.compute import model_flops
from zerocli.profile import clock as clocks
from zerocli.profile import page, table
from zerocli.profile.clock import Segment, Span
from zerocli.profile.ledger import UNATTRIBUTED, Ledger
from zerocli.profile.peak_rates import best_links, peak_tflops
from zerocli.profile.profiler import links

TOKENS, HIDDEN, LAYERS = 2 * 32, 32, 3
STAGE_0, STAGE_3 = ("zero.stage=0",), ("zero.stage=3",)
OFFLOAD = (*STAGE_3, "offload.placement=cpu")
RECOMPUTE = (*STAGE_3, "activations.policy=recompute")


def test_the_finding_is_what_the_numbers_say(tmp_path):
    """The largest category with its share; what is said to be saved is what a run with that change does save."""
    kept = profile(tmp_path / "kept", "train.batch=8", "train.seq=64", world=1)
    again = profile(tmp_path / "again", "train.batch=8", "train.seq=64", "activations.policy=recompute", world=1)
    share = 100 * rows(kept, "hbm")["activations"] / kept["peak"]["hbm"]["measured"]
    saved = kept["peak"]["hbm"]["predicted"] - again["peak"]["hbm"]["predicted"]
    said = kept["finding"]
    assert said.startswith(f"{share:.0f} % of the device's peak of ") and " are activations; " in said
    assert f"recomputation (--set activations.policy=recompute) would save {format_bytes(saved)}" in said
    measured = kept["peak"]["hbm"]["measured"] - again["peak"]["hbm"]["measured"]
    assert 0 < measured and saved == pytest.approx(measured, rel=0.1)
    assert "recomputation" not in again["finding"]
    assert f"finding: {said}" in table.render(kept) and html.escape(said) in page.render([("kept", kept)])


SELECTIVE = (*STAGE_3, "activations.policy=selective")


def auto(recompute: Recompute) -> tuple[str, ...]:
    """Return the settings of a run whose device has room for what is then kept."""
    config = configs.load("tiny", [*SMALL, *STAGE_3])
    setup = setup_of(config, ranks=2, ranks_per_node=2, device="cpu", recompute=recompute)
    needed = needed_by(plan_model(shape_of(config.model, config.train.seq), setup))
    return (*STAGE_3, "activations.policy=auto", f"train.gpu_memory={int(needed / (1 - MARGIN)) + 1}B")


TIMED = ("stage 0", "stage 3")
"""Runs of six steps, of which three are timed; of the others only the memory and the first losses are compared."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """One profiled run of each way to train that the laws compare."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {"stage 0": STAGE_0, "stage 3": STAGE_3, "offload": OFFLOAD, "recompute": RECOMPUTE}
    ways |= {"selective": SELECTIVE, "auto": auto(Recompute(1, 2))} if LONG else {}
    nvme = (*STAGE_3, "offload.placement=nvme", f"offload.nvme_path={json.dumps([str(folder)])}")
    found = {}
    for name, sets in (ways | {"nvme": nvme}).items():
        place = folder / name.replace(" ", "-")
        short = () if name in TIMED else ("train.steps=3",)
        found[name] = profile(place, *sets, *short) | {"folder": str(place)}
    return found


@pytest.mark.parametrize(
    "way", ["stage 0", "stage 3", "offload", "recompute", pytest.param("selective", marks=pytest.mark.long), "nvme"]
)
def test_rows_and_unattributed_add_up_to_the_peak_on_every_tier(documents, way):
    document = documents[way]
    for tier, peak in document["peak"].items():
        found = rows(document, tier)
        assert sum(found.values()) == peak["measured"]
        assert set(found) <= {*CATEGORIES, UNATTRIBUTED}
        assert abs(found.get(UNATTRIBUTED, 0)) <= 0.02 * peak["measured"]
        if peak["measured"]:
            assert UNATTRIBUTED in found  # shown even where it is nothing
    used = {tier for tier, peak in document["peak"].items() if peak["measured"]}
    assert used == {"hbm", *{"offload": ["dram"], "nvme": ["dram", "nvme"]}.get(way, [])}


@pytest.mark.parametrize(
    "way",
    ["stage 0", "stage 3", "offload", "recompute"]
    + [pytest.param(each, marks=pytest.mark.long) for each in ("selective", "auto")],
)
def test_predicted_is_beside_measured(documents, way):
    document = documents[way]
    if way == "auto":  # two of three blocks are selective, the other is recomputed whole
        held = {each: document["peak"]["hbm"]["measured"] for each, document in documents.items()}
        assert held["recompute"] < held["auto"] < held["stage 3"]
        assert held["recompute"] < held["selective"] < held["stage 3"]
    for tier, peak in document["peak"].items():
        assert peak["measured"] * 0.999 <= peak["predicted"] <= peak["measured"] * 1.05 + 8192, tier
    for row in document["rows"]:  # and so are the rows: the plan's categories are the ledger's
        if row["category"] != UNATTRIBUTED:
            assert abs(row["predicted"] - row["measured"]) <= 0.03 * row["measured"] + 8192, row


def test_the_peak_has_a_moment_and_names_its_holders(documents):
    peak = documents["stage 0"]["peak"]["hbm"]
    assert "blocks." in peak["moment"] or "the rest" in peak["moment"]
    assert len(peak["holders"]) == 10
    assert any(holder["name"] == "blocks.0 activations" for holder in peak["holders"])
    assert [holder["bytes"] for holder in peak["holders"]] == sorted(
        (h["bytes"] for h in peak["holders"]), reverse=True
    )


def test_the_system_is_asked_too(documents):
    """What the kernel counts of a process is beside the books, of the largest rank."""
    system = documents["nvme"]["system"]
    assert system["rss_peak"] >= system["rss"] > 32 << 20  # torch alone is more
    assert system["nvme"] == documents["nvme"]["peak"]["nvme"]["measured"] // 2  # two ranks, alike
    assert documents["stage 0"]["system"]["nvme"] == 0
    assert all(
        holder["bytes"] > 0 for tier in ("dram", "nvme") for holder in documents["nvme"]["peak"][tier]["holders"]
    )
    assert any(holder["name"] == "blocks.0 optimizer_states" for holder in documents["nvme"]["peak"]["nvme"]["holders"])


# -- each option moves the rows it should, and no other ----------------------------------------------------------------


def padded(document):
    """Elements of the units with their padding: (of one block, of the rest)."""
    model = document["settings"]["model"]
    from zerocli.plan.memory.flats import plan_flats
    from zerocli.plan.setup import Setup

    shape = shape_of(ModelConfig(**model), 32)
    totals = [flat.total for flat in plan_flats(shape, Setup(stage=3, ranks=2))]
    return totals[1], totals[0]


def test_stage_3_halves_the_states_of_stage_0_and_gathers_instead(documents):
    zero, three = after_forward(documents["stage 0"]), after_forward(documents["stage 3"])
    block, rest = padded(documents["stage 0"])
    numel = LAYERS * block + rest
    assert (zero["parameters"], zero["gradients"], zero["optimizer_states"]) == (4 * numel, 4 * numel, 8 * numel)
    halves = (three["parameters"], three["gradients"], three["optimizer_states"])
    assert halves == (4 * numel // 2, 4 * numel // 2, 8 * numel // 2)
    assert (zero["gathered"], three["gathered"]) == (0, 4 * (2 * block + rest))  # two buffers a size, one of one unit
    # Reduction buckets come with partitioned gradients: two, each of the largest unit.
    assert abs(three["buffers"] - zero["buffers"] - 2 * 4 * max(block, rest)) < 512
    for same in ("activations", "logits", "runtime"):
        assert zero[same] == three[same]


def test_offload_moves_states_to_the_host_and_nothing_else(documents):
    here, there = after_forward(documents["stage 3"]), after_forward(documents["offload"])
    host = rows(documents["offload"], "dram")
    for states in ("parameters", "gradients", "optimizer_states"):
        assert there[states] == 0
        assert host[states] == 2 * here[states]  # dram is a node's: both ranks'
    for same in ("gathered", "activations", "logits", "runtime"):
        assert here[same] == there[same]
    # In fp32 the parameters are the masters: they pass through the update's slots, at most one chunk each.
    block, rest = padded(documents["offload"])
    assert 0 < there["buffers"] - here["buffers"] <= 6 * 4 * max(block, rest) // 2 + 512
    assert not rows(documents["stage 3"], "dram")


@pytest.mark.longer
def test_recomputing_keeps_the_inputs_of_blocks_and_nothing_else_changes(documents):
    keep, again = after_forward(documents["stage 3"]), after_forward(documents["recompute"])
    for same in ("parameters", "gradients", "optimizer_states", "gathered", "logits", "runtime"):
        assert keep[same] == again[same]
    checkpoints = LAYERS * TOKENS * HIDDEN * 4
    # Beside them only the embedding's and the final norm's outputs, the batch and statistics are there.
    assert checkpoints <= again["activations"] <= checkpoints + 4 * TOKENS * HIDDEN * 4
    assert keep["activations"] > LAYERS * 14 * TOKENS * HIDDEN * 4
    assert abs(keep["buffers"] - again["buffers"]) < 512
    for way in {"recompute", "selective", "auto"} & set(documents):
        assert documents[way]["losses"] == documents["stage 3"]["losses"][:3]


# -- two axes of ranks, and models of other people's -------------------------------------------------------------------


def balances(document) -> None:
    for tier, peak in document["peak"].items():
        found = rows(document, tier)
        assert sum(found.values()) == peak["measured"] and abs(found.get(UNATTRIBUTED, 0)) <= 0.02 * peak["measured"]


@pytest.mark.long
def test_tensor_parallel_rows_are_of_what_a_rank_has(tmp_path):
    document = profile(tmp_path, *STAGE_3, "parallel.tp=2", "activations.policy=recompute", "train.steps=3", world=4)
    balances(document)
    assert (document["ranks"], document["tp"]) == (4, 2)
    assert document["parameters"] == sum(each["numel"] for each in LEAVES)  # of the whole model
    held = rows(document, "hbm")
    # The larger matrices are halved, norms and such are not; then ZeRO halves all of it again, with padding.
    numel = sum(each["numel"] // (2 if each["split"] else 1) for each in LEAVES)
    assert numel / 2 * 4 <= held["parameters"] <= numel / 2 * 4 * 1.03
    assert held["gradients"] == held["parameters"] and held["optimizer_states"] == 2 * held["parameters"]
    for row in document["rows"]:
        if row["category"] in ("parameters", "gradients", "optimizer_states", "gathered"):
            assert row["predicted"] == row["measured"], row
    peak = document["peak"]["hbm"]
    assert peak["measured"] <= peak["predicted"] <= 1.05 * peak["measured"]
    # Activations are summed over the axis in forward and in backward of every block: its lane has them.
    sums = [
        span for span in document["timeline"]["spans"] if span[0] == "reduce" and span[4] == 2 * 4 * TOKENS * HIDDEN
    ]
    assert len(sums) >= 4 * LAYERS
    step = document["step"]
    assert step["wait"] + step["compute"] == pytest.approx(step["seconds"], rel=0.02)


def _leaves() -> list[dict]:
    """Parameters of the runs' model, and whether tensor parallelism splits them."""
    H, V = HIDDEN, 256
    block = [(H * 3 * H, True), (3 * H, True), (H * H, True), (H, False), (2 * H, False), (2 * H, False)]
    block += [(H * 4 * H, True), (4 * H, True), (4 * H * H, True), (H, False)]
    leaves = [*block * LAYERS, (V * H, True), (32 * H, False), (2 * H, False)]
    return [{"numel": numel, "split": split} for numel, split in leaves]


LEAVES = _leaves()


class Words(torch.nn.Module):
    """A language model that zerocli does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, tokens, targets):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), targets.flatten())


def test_a_factorys_model_has_its_books_and_only_its_states_predicted(tmp_path):
    document = profile(tmp_path, *STAGE_0, "model.factory=test_profile:Words")
    balances(document)
    numel = 256 * 16 + 3 * 16 * 16
    held = rows(document, "hbm")
    assert document["parameters"] == numel and document["step"]["tflops"] is None
    assert (held["parameters"], held["gradients"], held["optimizer_states"]) == (4 * numel, 4 * numel, 8 * numel)
    predicted = {row["category"]: row["predicted"] for row in document["rows"]}
    assert predicted["parameters"] == 4 * numel and predicted.get("activations") is None
    assert any("only model states are predicted" in note for note in document["notes"])
    assert held["logits"] >= 2 * 4 * TOKENS * 256  # its own loss: logits, and their softmax
    assert {unit for phase, unit, *_ in document["timeline"]["compute"] if phase == "forward"} >= {
        "layers.0",
        "the rest",
    }


SECRET = torch.frombuffer(bytearray(1 << 16), dtype=torch.float32)  # made by no operation


class Secretive(Words):
    """Uses memory that nobody saw made, and that no engine knows of."""

    def forward(self, tokens, targets):
        return super().forward(tokens, targets) + 0 * SECRET.sum()


def test_memory_that_nobody_knows_is_shown_as_unattributed(tmp_path):
    document = profile(tmp_path, *STAGE_0, "model.factory=test_profile:Secretive", "train.steps=3")
    found, peak = rows(document, "hbm"), document["peak"]["hbm"]
    assert sum(found.values()) == peak["measured"]
    assert SECRET.nbytes <= found[UNATTRIBUTED] < SECRET.nbytes + 64
    assert {"name": "the rest sum", "category": UNATTRIBUTED, "bytes": SECRET.nbytes} in peak["holders"]


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", TIMED)
def test_wait_and_compute_are_the_step(documents, way):
    step = documents[way]["step"]
    assert step["wait"] == pytest.approx(sum(step["waits"].values()))
    text = Path(documents[way]["folder"], "metrics.jsonl").read_text()
    told = [sum(json.loads(line)["wait"].values()) for line in text.splitlines()[3:]]
    assert sum(told) / 3 <= step["wait"] + 1e-6  # one clock has all of a step, and what the metrics call waits is in it
    # Of six steps two are followed, and the third may show some of their time.
    assert step["steps"] == 3 and documents[way]["timeline"]["step"] in (4, 5, 6)
    assert step["wait"] + step["compute"] == pytest.approx(step["seconds"], rel=0.02)
    assert step["utilisation"] is None  # of a CPU nobody knows the peak
    assert step["tokens_per_second"] == pytest.approx(2 * TOKENS / step["seconds"])  # two ranks'
    shape = shape_of(ModelConfig(**documents[way]["settings"]["model"]), 32)
    each = model_flops(shape, 32, TOKENS)  # of one rank's tokens
    assert step["tflops"] == pytest.approx(each / step["seconds"] / 1e12)


def test_a_wait_inside_another_is_charged_once():
    waits = Waits(torch.device("cpu"))
    began = time.perf_counter()
    with waits.waiting("optimizer"):
        with waits.waiting("collectives"), waits.waiting("transfers"):
            sum(range(200_000))
        sum(range(100_000))
    elapsed = time.perf_counter() - began
    found = waits.take().seconds()
    assert 0 < sum(found.values()) <= elapsed  # not the inner ones twice and three times
    assert all(found[cause] > 0 for cause in ("optimizer", "transfers"))


def test_the_timeline_has_phases_units_and_lanes(documents):
    timeline = documents["offload"]["timeline"]
    labels = {(phase, unit) for phase, unit, *_ in timeline["compute"]}
    for unit in ("the rest", *(f"blocks.{i}" for i in range(LAYERS))):
        assert ("forward", unit) in labels and ("backward", unit) in labels
    assert any(phase == "optimizer" or (phase, unit) == ("wait", "optimizer") for phase, unit in labels)
    assert {"compute", "gather", "reduce", "host to device", "device to host", "update"} <= set(timeline["lanes"])
    assert {"disk read", "disk write"} <= set(documents["nvme"]["timeline"]["lanes"])
    begins = [span[2] for span in timeline["compute"]]
    ends = [span[3] for span in timeline["compute"]]
    assert begins[1:] == ends[:-1]  # no gap, no overlap
    moved = sum(span[4] for span in timeline["spans"] if span[0] == "reduce")
    block, rest = padded(documents["offload"])
    assert moved == 4 * (LAYERS * block + rest)  # every gradient once
    memory = timeline["memory"]
    assert {"hbm", "dram"} == set(memory)
    assert memory["hbm"]["times"] == sorted(memory["hbm"]["times"])
    assert (
        max(map(sum, zip(*memory["hbm"]["bytes"].values(), strict=True)))
        <= documents["offload"]["peak"]["hbm"]["measured"]
    )


def _taken_by_tiers(folder: str) -> list[tuple[set[str], set[int]]]:
    """For host memory and for a disk: what was taken of it, and the slots in use, at all moments of the later steps."""
    from zerocli.models import build
    from zerocli.profile import places

    def look(offload: str, tier: str) -> tuple[set[str], set[int]]:
        taken: set[str] = set()
        slots: set[int] = set()
        engine = None

        def probe(name: str) -> None:
            if engine is not None and engine.steps:
                taken.add(json.dumps(places.tier_rows(engine)[tier], sort_keys=True))
                slots.add(sum(slot.taken for slot in engine.activations.stack._slots))

        model = build(ModelConfig(family="gpt2", vocab=32, layers=3, hidden=16, heads=2), 8, "meta")
        where = {"offload": offload, "nvme_path": (folder,), "events": Probe(probe), "recompute": True}
        engine = zerocli.shard(model, stage=3, units=model.unit_modules(), **where)
        tokens = torch.ones(2, 8, dtype=torch.long)
        for _ in range(3):
            engine.backward(engine(tokens, tokens))
            engine.step()
        engine.close()
        return taken, slots

    return [look("activations=cpu,params=cpu", "dram"), look("activations=nvme,optimizer=nvme", "nvme")]


def test_a_step_takes_nothing_new_from_host_memory_or_disks(tmp_path):
    """Which is why they are flat in a timeline: checkpoints come and go in slots of an arena that is taken once."""
    for taken, slots in run_ranks(2, _taken_by_tiers, str(tmp_path))[0]:
        assert len(taken) == 1 and '"activations"' in taken.pop() and len(slots) > 1


# -- and changes nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(STAGE_0, marks=pytest.mark.long),
        (*OFFLOAD, "activations.policy=recompute", "train.accumulate=2"),
    ],
)
def test_losses_are_bit_identical_with_profiling_on_and_off(tmp_path, sets):
    sets += ("train.steps=3",)
    watched, plain = profile(tmp_path / "on", *sets), profile(tmp_path / "off", *sets, plain=True)
    assert watched["losses"] == plain["losses"] and len(plain["losses"]) == 3

    def norms(folder: str) -> list[float]:
        text = (tmp_path / folder / "metrics.jsonl").read_text()
        return [json.loads(line)["grad_norm"] for line in text.splitlines()]

    assert norms("on") == norms("off")
    states = ("parameters", "gradients", "optimizer_states", "gathered")
    cheap = rows(plain, "hbm")  # what train records always is part of the same books
    assert {name: cheap.get(name, 0) for name in states} == {name: after_forward(watched)[name] for name in states}
    assert rows(plain, "dram") == rows(watched, "dram")


def _attributes() -> list[list[str]]:
    from zerocli.models import loss
    from zerocli.profile.profiler import Profiler

    torch.manual_seed(7)
    engine = zerocli.shard(Uneven(), stage=3, offload="cpu")

    def look() -> list[str]:
        parts = [engine, engine.waits, engine.collectives, engine.gatherer, engine.reducer, engine.updater]
        parts += list(engine.tiers._open.values())
        return [f"{type(part).__name__}.{name}" for part in parts for name in vars(part)]

    before, forward = look(), loss._LinearCrossEntropy.forward
    profiler = Profiler()
    profiler.attach(engine)
    assert look() == before and engine.events.on  # it has subscribed, and that is all
    for step in range(3):
        engine.backward(engine(*uneven_batch(step, split(engine.collectives.rank, 2))))
        engine.step()
    peak = profiler.ledger.peak()
    assert peak.rows[UNATTRIBUTED] <= 0.02 * peak.nbytes and peak.rows["activations"] > 0
    profiler.detach()
    assert loss._LinearCrossEntropy.forward is forward and not engine.events.on
    return [before, look()]


def test_an_engine_that_is_no_longer_profiled_is_as_it_was():
    for before, after in run_ranks(2, _attributes):
        assert [name for name in after if name not in before] == []


def _unfollowed() -> tuple[dict[str, int], dict[str, int], str]:
    from zerocli.profile.profiler import Profiler

    torch.manual_seed(7)
    engine = zerocli.shard(Uneven(), stage=3)
    profiler = Profiler(follow=False)
    profiler.attach(engine)
    for step in range(3):
        engine.backward(engine(*uneven_batch(step, split(engine.collectives.rank, 2))))
        engine.step()
    profiler.detach()
    hbm = profiler.local(engine)["hbm"]
    return hbm["rows"], engine.memory(), hbm["moment"]


def test_where_operations_cannot_be_followed_what_the_engine_keeps_is_in_the_books():
    """As with compiled blocks: gather buffers and buckets come in the first step, and are asked for after it."""
    for found, held, moment in run_ranks(2, _unfollowed):
        states = ("parameters", "gradients", "optimizer_states", "gathered")
        assert {name: found[name] for name in states} == {name: held[name] for name in states}
        assert held["buffers"] <= found["buffers"] <= held["buffers"] + 64 and "activations" not in found
        assert moment == ""  # nobody knows when the peak was


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_ledger_reads_its_peak_off_the_log():
    ledger = Ledger(granularity=512, clock=iter(range(100)).__next__)
    ledger.moment = ("forward", "a")
    ledger.take(1, 1000, "activations", "x")
    kept = ledger.take(2, 512, UNATTRIBUTED, "y")
    ledger.give(1)
    ledger.moment = ("backward", "a")
    ledger.take(3, 100, "buffers", "z")
    kept.category, kept.name = "gathered", "pool"  # named late, from its birth on
    peak = ledger.peak()
    assert (peak.nbytes, peak.moment) == (1536, "forward of a")
    assert {name: n for name, n in peak.rows.items() if n} == {"activations": 1024, "gathered": 512}
    assert peak.holders == [("x", "activations", 1024), ("pool", "gathered", 512)]
    assert ledger.held(len(ledger.events) - 1).nbytes == 1024
    assert ledger.series(0, 4) == [
        (0, {"activations": 1024}),
        (1, {"activations": 1024, "gathered": 512}),
        (2, {"gathered": 512}),
        (3, {"gathered": 512, "buffers": 512}),
    ]
    assert max(sum(held.values()) for _, held in ledger.series(0, 4, num_points=2)) == 1536


def test_overlap_is_the_share_of_moves_behind_compute():
    segments = [
        Segment(("forward", "a"), 0, 4),
        Segment((clocks.WAIT, "collectives"), 4, 6),
        Segment(("forward", "b"), 6, 8),
    ]
    spans = [Span("gather", "a", 2, 5), Span("reduce", "b", 3, 6), Span("update", "b", 0, 8)]
    assert clocks.overlap(segments, spans) == 0.5  # moving from 2 to 6, computing until 4
    assert clocks.overlap(segments, spans[2:]) is None
    assert clocks.split(segments) == (6, {"collectives": 2})


def test_a_links_rate_is_of_the_time_it_was_busy():
    gather = [Span("gather", "a", 0, 2, 3 * 10**9), Span("gather", "b", 1, 3, 3 * 10**9)]  # busy from 0 to 3
    steps = [gather, [Span("gather", "a", 10, 11, 2 * 10**9, bounded=True), Span("update", "a", 10, 20)]]
    (found,) = links(steps, Config())
    assert (found["lane"], found["bytes"], found["seconds"]) == ("gather", 4 * 10**9, 2)  # a step's, in the mean
    assert found["achieved"] == 2 and found["at_least"]


def test_spans_belong_to_the_steps_that_they_touch():
    clock = clocks.Clock(torch.device("cpu"))
    clock._marks = [(float(at), ("forward", "a")) for at in range(7)]
    clock.cuts = [2, 4, 6]
    for name, begin, end in (("a", 0.5, 1.0), ("b", 1.5, 2.5), ("c", 1.0, 5.0), ("d", 4.0, 5.0), ("e", 6.5, 7.0)):
        clock.add("gather", name, begin, end)
    assert ["".join(span.name for span in clock.step(number)[1]) for number in (1, 2, 3)] == ["abc", "bc", "cd"]
    clock.add("gather", "f", 2.5, 3.0)  # told late
    assert "".join(span.name for span in clock.step(2)[1]) == "bcf"


def test_an_unknown_gpu_has_no_peak_rate():
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989
    assert peak_tflops("NVIDIA H100 PCIe", "bf16") == 756
    assert peak_tflops("NVIDIA H200", "bf16") == 989
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp16") == 312
    for name in (
        "NVIDIA H1000",
        "NVIDIA RTX 4090 Laptop GPU",
        "NVIDIA A1000 Laptop GPU",
        "Tesla K80",
        "",
        "A100 MIG 1g",
    ):
        assert peak_tflops(name, "bf16") is None
    assert peak_tflops("NVIDIA H200", "fp32") is None
    assert peak_tflops("Tesla V100-SXM2-32GB", "bf16") is None


def test_operations_are_those_of_matrices_that_are_multiplied_with():
    """2 a weight and token forward, 4 backward, and attention's scores and values, of which half are masked."""
    H, L, V, S = 32, 3, 256, 16
    block = 3 * H * H + 3 * H + H * H + H + 2 * H + 2 * H + H * 4 * H + 4 * H + 4 * H * H + H
    attention = 2 * 2 * L * H * S / 2 * 3  # scores and values; half; forward once and backward twice
    tied = shape_of(ModelConfig(family="gpt2", vocab=V, layers=L, hidden=H, heads=2), S)
    assert model_flops(tied, S, 10) == 10 * (6 * (L * block + 2 * H + V * H) + attention)  # no positions
    untied = shape_of(ModelConfig(family="llama", vocab=V, layers=L, hidden=H, heads=2, tie=False), S)
    double = shape_of(ModelConfig(family="llama", vocab=2 * V, layers=L, hidden=H, heads=2, tie=False), S)
    assert not untied.tie
    assert model_flops(double, S, 10) - model_flops(untied, S, 10) == 10 * 6 * V * H  # the head's, not the table's


def test_best_rates_are_those_remembered():
    found = best_links(
        {"dram_hbm": {"result": {"up": 55, "down": 54.5}}, "/scratch": {"result": {"read": 3.9}}, "x": {}}
    )
    assert found == {"host to device": 55.0, "device to host": 54.5, "disk read": 3.9}


def test_a_page_holds_what_it_needs(tmp_path, documents):
    from zerocli.profile import page

    document = documents["stage 3"] | {"config": "</script><script>alert(1)"}
    target = tmp_path / "page.html"
    page.write(str(target), [("a", document), ("b", documents["offload"])])
    text = Path(target).read_text()
    assert "http:" not in text and "https:" not in text and "src=" not in text
    assert "</script><script>" not in text and "blocks.0 activations" in text
