"""Packing: every document is in one window, whole or cut as said; a window predicts within documents only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from document_models import VOCAB, Attentive, some_rows, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from test_documents import tokenise

from zerocli.data import cache, documents, packing
from zerocli.data.batches import DocumentBatches, steps_of_epochs
from zerocli.data.sources import split_documents
from zerocli.errors import UserError

LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=40)


def made(sizes, start=0):
    """Return documents of these sizes; their tokens are numbered and all but the first of each count."""
    ends = np.cumsum(sizes)
    counted = np.ones(ends[-1], bool)
    counted[ends - sizes] = False
    flips = np.flatnonzero(np.diff(counted, prepend=False, append=False))
    return documents.Documents(np.arange(start, start + ends[-1]), ends, flips, "text", {})


def windows_of(tmp_path, found, seq, pack=True, long="split", seed=0):
    packing.write_windows(tmp_path, tmp_path / "x.windows", found, seq, pack, long, seed)
    return packing.open_windows(cache.Reader(tmp_path / "x.windows"), found, seq)


@settings(deadline=None, max_examples=60)
@given(sizes=LENGTHS, seq=st.integers(1, 12), pack=st.booleans(), seed=st.integers(0, 5))
def test_every_prediction_of_every_document_is_made_once(tmp_path_factory, sizes, seq, pack, seed):
    found = made(np.array(sizes))
    windows = windows_of(tmp_path_factory.getbasetemp(), found, seq, pack, "split", seed)
    predictions = []
    for index in range(len(windows)):
        tokens, targets, positions = windows.window(index)
        kept = targets != packing.IGNORED
        assert kept.sum() == windows.counts[index] > 0
        assert (targets[kept] == tokens[kept] + 1).all()
        predictions += tokens[kept].tolist()
        begins = np.flatnonzero(positions == 0)
        for first, end in zip(begins, [*begins[1:], seq], strict=True):
            assert positions[first:end].tolist() == list(range(end - first))
            if kept[first]:
                assert (np.diff(tokens[first:end]) == 1).all()  # of one document, one after the other
    assert sorted(predictions) == sorted(set(range(sum(sizes))) - set((found.ends - 1).tolist()))
    if not pack:
        assert len(windows) == sum(-(-(size - 1) // seq) for size in sizes)


@given(sizes=LENGTHS, seed=st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_windows_are_as_full_as_those_of_first_fit(tmp_path_factory, sizes, seed):
    windows = windows_of(tmp_path_factory.getbasetemp(), made(np.array(sizes)), 29, seed=seed)
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = next((k for k, room in enumerate(rooms) if room >= size - 1), len(rooms))
        rooms[place:] = rooms[place:] or [29]
        rooms[place] -= size - 1
    assert len(windows) <= len(rooms) + 1


def test_the_seed_decides_which_documents_share_a_window(tmp_path):
    found = made(np.full(200, 5))
    orders = [tuple(windows_of(tmp_path, found, 16, seed=seed).starts.tolist()) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_documents_that_are_too_long_are_split_truncated_or_dropped_and_counted(tmp_path):
    found = made(np.array([4, 25, 9]))
    assert windows_of(tmp_path, found, 10).about == {
        "split": 1,
        "truncated": 0,
        "left_out": 0,
        "dropped": 0,
        "longest": 24,
        "blank": 0,
    }
    cut = windows_of(tmp_path, found, 10, long="truncate")
    assert cut.about == {"split": 0, "truncated": 1, "left_out": 0, "dropped": 14, "longest": 24, "blank": 0}
    assert sorted(cut.lengths.tolist()) == [3, 8, 10]
    kept = windows_of(tmp_path, found, 10, long="drop")
    assert kept.about == {"split": 0, "truncated": 0, "left_out": 1, "dropped": 25, "longest": 24, "blank": 0}
    assert sorted(kept.lengths.tolist()) == [3, 8]


def test_pieces_without_a_counted_target_are_left_out(tmp_path):
    rows = [{"prompt": "p" * 30, "completion": "abc"}, {"prompt": "p", "completion": "c" * 4}]
    found = tokenise(write_rows(tmp_path / "x.jsonl", rows))
    split = windows_of(tmp_path, found, 10)
    assert split.about["blank"] == 2 and split.counts.sum() == 7
    truncated = windows_of(tmp_path, found, 10, long="truncate")
    assert truncated.about["dropped"] == 22 and truncated.about["blank"] == 1 and truncated.counts.sum() == 4
    assert len(windows_of(tmp_path, tokenise(write_rows(tmp_path / "y.jsonl", rows[:1])), 10, long="truncate")) == 0


def test_packed_and_unpacked_documents_have_the_same_losses(tmp_path):
    found = tokenise(write_rows(tmp_path / "x.jsonl", some_rows()))
    torch.manual_seed(0)
    model = Attentive().double()

    def losses(pack):
        """Return, by a document's first bytes, the sum of its losses."""
        by_document = {}
        windows = windows_of(tmp_path, found, 64, pack)
        for index in range(len(windows)):
            tokens, targets, positions = (torch.from_numpy(part)[None] for part in windows.window(index))
            each = model.token_losses(tokens, targets, positions if pack else None)[0]
            begins = np.flatnonzero(positions[0].numpy() == 0)
            for first, end in zip(begins, [*begins[1:], 64], strict=True):
                if (targets[0, first:end] != -100).any():
                    by_document[bytes(tokens[0, first : first + 4].tolist())] = each[first:end].sum().item()
        return by_document, len(windows)

    (packed, few), (alone, many) = losses(True), losses(False)
    assert few < many == 40 and len(packed) == 40
    assert packed == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("split", [(6, 1, 1), (1, 2, 3), (2, 3, 1), (3, 1, 2)])
def test_a_steps_loss_is_the_mean_over_counted_tokens_however_it_is_split(tmp_path, split):
    batch, world, accumulate = split
    windows = windows_of(tmp_path, tokenise(write_rows(tmp_path / "x.jsonl", some_rows())), 48)
    torch.manual_seed(0)
    model = Attentive().double()
    batches = DocumentBatches(windows, batch, 48, accumulate, seed=3)
    for step in (1, 2, 5):  # the last crosses the end of an epoch
        loss, summed, counted = 0.0, 0.0, 0
        for micro in range(accumulate):
            for rank in range(world):
                tokens, targets, positions = batches.batch(step, micro, rank, world)
                weight = batches.weight(step, micro, rank, world)
                loss += (model(tokens, targets, positions) * weight).item() / (accumulate * world)
                summed += model.token_losses(tokens, targets, positions).sum().item()
                counted += int((targets != -100).sum())
        assert loss == pytest.approx(summed / counted, rel=1e-12)


def test_the_split_of_a_global_batch_never_changes_its_windows(tmp_path):
    windows = windows_of(tmp_path, tokenise(write_rows(tmp_path / "x.jsonl", some_rows())), 48)
    seen = []
    for batch, world, accumulate, begun in ((4, 1, 1, (0, 0)), (1, 2, 2, (0, 0)), (2, 2, 1, (2, 8))):
        batches = DocumentBatches(windows, batch, 48, accumulate, seed=3, begun=begun)
        steps = range(begun[0] + 1, 8)
        parts = [(s, m, r) for s in steps for m in range(accumulate) for r in range(world)]
        seen.append([row.tolist() for s, m, r in parts for row in batches.batch(s, m, r, world)[0]])
    assert seen[0] == seen[1] and seen[0][8:] == seen[2]
    epoch = [tuple(row) for row in seen[0][: len(windows)]]
    assert len(set(epoch)) == len(windows) < len(seen[0])


def test_unpacked_batches_have_no_positions(tmp_path):
    windows = windows_of(tmp_path, made(np.array([3, 4])), 8, pack=False)
    batches = DocumentBatches(windows, 2, 8, positions=False)
    tokens, targets = batches.batch(1, 0, 0, 1)
    assert tokens.dtype == targets.dtype == torch.int64 and not batches.positions
    assert sorted((targets != -100).sum(1).tolist()) == [2, 3] and tokens.max() < VOCAB


def test_documents_that_are_held_out_are_in_no_window_of_the_others(tmp_path):
    found = tokenise(write_rows(tmp_path / "x.jsonl", some_rows()))
    trained, held = split_documents(found, 0.1, "x.jsonl")
    assert (len(trained), len(held)) == (36, 4)
    assert trained.num_tokens + held.num_tokens == len(found.ids) == found.num_tokens
    assert trained.num_counted + held.num_counted == found.num_counted
    both = [windows_of(tmp_path, part, 64) for part in (trained, held)]
    assert [int(windows.counts.sum()) for windows in both] == [trained.num_counted, held.num_counted]
    assert both[0].starts.max() < trained.ends[-1] == held.begin <= both[1].starts.min()
    with pytest.raises(UserError, match="40 documents are too few to hold out 0.001 of them"):
        split_documents(found, 0.001, "x.jsonl")


@pytest.mark.parametrize(
    ("epochs", "windows", "per_step", "begun", "steps"),
    [(1, 10, 4, (0, 0), 3), (2, 10, 5, (0, 0), 4), (0.5, 10, 5, (0, 0), 1), (0.01, 10, 5, (0, 0), 1)]
    + [(1.1, 10, 1, (0, 0), 11), (2, 10, 5, (2, 10), 4), (2, 10, 10, (2, 10), 3), (1, 10, 5, (9, 45), 9)],
)
def test_epochs_are_steps(epochs, windows, per_step, begun, steps):
    assert steps_of_epochs(epochs, windows, per_step, begun) == steps
