"""Data: batches depend on the seed and the step alone; sources that cannot train are refused by name."""

import os
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import nothing_left_open

from zerocli.data import files, tokens
from zerocli.data.batches import Batches, Prefetcher, permute
from zerocli.data.tokens import Part, TokenSource, open_source
from zerocli.errors import UserError

some = settings(max_examples=50, deadline=None)


def counting(*numels):
    """Return a source whose token at place k is k, in parts of these sizes."""
    ids = np.arange(sum(numels), dtype=np.int32)
    cuts = np.cumsum(numels)[:-1]
    return TokenSource([Part(f"part{k}", part) for k, part in enumerate(np.split(ids, cuts))])


def refused(path, **options):
    """Return the message with which a source is refused, its folder left out."""
    with pytest.raises(UserError) as caught:
        open_source(str(path), **options)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{os.path.dirname(path)}/", "")


@some
@given(st.integers(1, 300), st.integers(0, 2**70), st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = {tuple(permute(i, 50, seed, epoch) for i in range(50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_permutation_leaves_no_neighbours():
    size = 10_000
    places = np.array([permute(index, size, 1, 0) for index in range(2000)])
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.1
    assert 0.4 < places.mean() / size < 0.6


def test_a_huge_epoch_needs_no_table():
    assert 0 <= permute(5, 2**61 + 1, 0, 0) < 2**61 + 1


@some
@given(st.integers(2, 400), st.integers(1, 9), st.integers(0, 99))
def test_an_epoch_sees_each_window_once_and_no_token_twice(numel, seq, seed):
    if numel < seq + 1:
        return
    batches = Batches(counting(numel), 1, seq, seed=seed)
    for epoch in range(2):
        first = epoch * batches.num_windows
        starts = sorted(batches.window_start(first + k) for k in range(batches.num_windows))
        assert set(np.diff(starts)) <= {seq}
        assert starts[0] >= 0 and starts[-1] + seq + 1 <= numel


def test_the_first_token_moves_between_epochs():
    batches = Batches(counting(10 * 8 + 7), 1, 8)
    assert len({min(batches.window_start(e * 10 + k) for k in range(10)) for e in range(8)}) > 1


def test_each_epoch_has_an_order_of_its_own():
    batches = Batches(counting(10 * 8 + 1), 1, 8)
    assert len({tuple(batches.window_start(e * 10 + k) for k in range(10)) for e in range(4)}) == 4


def joined(source, batch, world, accumulate, steps, seed):
    batches = Batches(source, batch, 4, accumulate, seed)
    return [
        torch.cat([batches.batch(step, micro, rank, world)[0] for micro in range(accumulate) for rank in range(world)])
        for step in range(1, steps + 1)
    ]


@some
@given(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)).flatmap(st.permutations), st.integers(0, 9))
def test_the_split_of_a_global_batch_never_changes_its_samples(split, seed):
    source = counting(60)
    whole = joined(source, int(np.prod(split)), 1, 1, 3, seed)
    assert all(map(torch.equal, whole, joined(source, *split, 3, seed)))


def test_a_batch_depends_on_nothing_before_it():
    source = counting(100)
    batches = Batches(source, 2, 5, 2, seed=3)
    earlier = [batches.batch(step, 1, 0, 2) for step in range(1, 6)]
    tokens_, targets = Batches(source, 2, 5, 2, seed=3).batch(5, 1, 0, 2)
    assert torch.equal(tokens_, earlier[-1][0]) and torch.equal(targets, earlier[-1][1])
    assert tokens_.dtype == torch.int64 and tokens_.shape == targets.shape == (2, 5)
    assert torch.equal(targets, tokens_ + 1)


@some
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_a_slice_is_the_same_over_any_parts(numels, data):
    source = counting(*numels)
    start = data.draw(st.integers(0, len(source)))
    length = data.draw(st.integers(0, len(source) - start))
    taken = source.slice(start, length)
    assert taken.dtype == np.int64 and taken.tolist() == list(range(start, start + length))
    part = source.part(start, start + length)
    assert part.slice(0, length).tolist() == taken.tolist()
    assert len(part.rest()) == len(source) - start - length and len(source.rest()) == 0


def test_the_default_is_the_standard_library():
    source = open_source("", vocab=256, seq=128)
    assert 3e6 < len(source) <= tokens.LIBRARY_NBYTES
    assert source.parts[0].name.endswith(".py")
    assert source.slice(0, len(source)).max() < 256


def test_text_and_folders_are_bytes_in_the_order_of_their_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MAPPED_NBYTES", 3)
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {"c.txt": b"\xc3\xa9", "b/z.md": b"long", "a": b"1", "empty": b"", ".git/x": b"no"}.items():
        (tmp_path / name).write_bytes(content)
    source = open_source(str(tmp_path), seq=2)
    assert bytes(source.slice(0, len(source)).astype(np.uint8)) == b"1long\xc3\xa9"
    assert bytes(open_source(str(tmp_path / "b/z.md")).slice(0, 4).astype(np.uint8)) == b"long"


@pytest.mark.parametrize("dtype", ["", "uint16", "uint32"])
def test_bin_files_are_token_ids(tmp_path, dtype):
    np.array([1, 2, 999], dtype or "uint16").tofile(tmp_path / "x.bin")
    source = open_source(str(tmp_path / "x.bin"), dtype=dtype)
    assert source.slice(0, 3).tolist() == [1, 2, 999]
    source = open_source(str(tmp_path), dtype=dtype)
    assert source.slice(0, len(source)).max() == 999


def test_npy_files_are_token_ids(tmp_path):
    np.save(tmp_path / "x.npy", np.array([3, 4], ">i8"))
    assert open_source(str(tmp_path / "x.npy")).slice(0, 2).tolist() == [3, 4]


def test_sources_that_cannot_train_are_refused_by_name(tmp_path):
    assert refused(tmp_path / "none") == "none: no such file or folder"
    assert "no such file" in refused("\0")
    (tmp_path / "empty.txt").touch()
    assert refused(tmp_path / "empty.txt") == "empty.txt: there is no data in it"
    (tmp_path / "short.txt").write_bytes(b"12345678")
    message = "short.txt: too short: one sequence needs 9 tokens (seq + 1), it has 8"
    assert refused(tmp_path / "short.txt", seq=8) == message
    assert len(open_source(str(tmp_path / "short.txt"), seq=7)) == 8
    (tmp_path / "odd.bin").write_bytes(b"12345")
    assert refused(tmp_path / "odd.bin") == "odd.bin: 5 bytes is not a multiple of 2, the size of uint16"
    (tmp_path / "empty.bin").touch()
    assert refused(tmp_path / "empty.bin") == "empty.bin: there is no data in it"
    assert refused(tmp_path).endswith("holds .bin and text files: text and token ids do not mix")
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "pipe: is neither a regular file nor a folder"
    (tmp_path / "folder").mkdir()
    assert refused(tmp_path / "folder") == "folder: there is no data in it"


@pytest.mark.parametrize(
    ("array", "fact"),
    [
        (np.zeros(4), "holds float64, not integer token ids"),
        (np.zeros((2, 2), int), "has shape (2, 2); token ids are one flat sequence"),
        (np.zeros(0, int), ""),
        (np.array([{}]), "is not an .npy array of integers"),
    ],
)
def test_npy_files_of_other_things_are_refused(tmp_path, array, fact):
    np.save(tmp_path / "x.npy", array)
    assert refused(tmp_path / "x.npy").startswith(f"x.npy: {fact}")


def test_damaged_npy_files_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.zeros(1, int))
    (tmp_path / "x.npz").rename(tmp_path / "zip.npy")
    assert refused(tmp_path / "zip.npy") == "zip.npy: is an archive of arrays, not one .npy array"
    for content in (b"", b"junk", b"\x93NUMPY\x01\x00"):
        (tmp_path / "y.npy").write_bytes(content)
        assert refused(tmp_path / "y.npy").startswith("y.npy: ")


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "x.txt").write_bytes(b"12")
    monkeypatch.setattr(tokens.Path, "read_bytes", deny)
    assert refused(tmp_path / "x.txt") == "x.txt: cannot be read (Permission denied)"


@pytest.mark.parametrize("bad", [100, 65535])
def test_an_id_beyond_the_vocabulary_is_found_wherever_it_is(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(tokens, "CHUNK_NUMEL", 7)
    for place in (0, 6, 7, 19):
        ids = np.zeros(20, np.uint16)
        ids[place] = bad
        ids.tofile(tmp_path / "x.bin")
        fact = f"x.bin: token id {bad} at element {place} is outside the vocabulary: the model knows 0 to 99"
        assert refused(tmp_path / "x.bin", vocab=100) == fact
        assert len(open_source(str(tmp_path / "x.bin"), vocab=bad + 1)) == 20


def test_ids_that_were_not_checked_at_first_are_checked_in_batches(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.array([0, 1, 2, -1, 2**62]))
    monkeypatch.setattr(tokens, "CHECKED_NUMEL", 3)
    source = open_source(str(tmp_path / "x.npy"), vocab=10)
    assert source.slice(1, 2).tolist() == [1, 2]
    with pytest.raises(UserError, match="token id -1 at element 3"):
        source.slice(2, 2)
    with pytest.raises(UserError, match=f"token id {2**62} at element 4"):
        source.slice(4, 1)
    with pytest.raises(UserError, match="outside the vocabulary"):
        Batches(source, 4, 1).batch(1, 0, 0, 1)


def test_bytes_name_the_vocabulary_they_need(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"abc")
    with pytest.raises(UserError) as caught:
        open_source(str(tmp_path / "x.txt"), vocab=50)
    assert caught.value.hint == "--set model.vocab=256"


class StandInTokenizer:
    """Stands in for the package's class: one id a word."""

    @classmethod
    def from_file(cls, path):
        if not os.path.getsize(path):
            raise Exception("EOF")
        return cls()

    def get_vocab(self, with_added_tokens):
        return {"a": 0, "b": 9}

    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        return [types.SimpleNamespace(ids=[len(word) for word in text.split()]) for text in texts]


def test_a_tokenizer_sees_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=StandInTokenizer))
    monkeypatch.setattr(files.text_pieces, "__defaults__", (4,))
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "x.txt").write_bytes("a bb\nccc dddd\n\xe9\xe9\xe9\xe9\xe9".encode())
    source = open_source(str(tmp_path / "x.txt"), str(tmp_path / "t.json"))
    assert source.slice(0, len(source)).tolist() == [1, 2, 3, 4, 5]

    (tmp_path / "t.json").write_text("")
    assert "t.json: is not a tokenizer.json (EOF)" in refused(tmp_path / "x.txt", tokenizer=str(tmp_path / "t.json"))


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_bytes(b"abc")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        open_source(str(tmp_path / "x.txt"), str(tmp_path / "t.json"))
    assert "pip install" in caught.value.hint


def test_the_prefetcher_hands_out_the_batches_in_order():
    batches = Batches(counting(200), 2, 3, accumulate=2, seed=5)
    with Prefetcher(batches, start_step=4, rank=1, world=2, steps=6) as prefetcher:
        got = list(prefetcher)
        assert prefetcher.waited_seconds > 0
        assert prefetcher.waited_seconds == 0
    expected = [batches.batch(step, micro, 1, 2) for step in (4, 5, 6) for micro in (0, 1)]
    assert len(got) == len(expected)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(got, expected, strict=True))


class CountedBatches(Batches):
    """Counts what was prepared, and breaks at a step."""

    prepared = 0
    breaks_at = 0

    def batch(self, step, micro, rank, world):
        if step == self.breaks_at:
            raise UserError("broken")
        self.prepared += 1
        return super().batch(step, micro, rank, world)


def test_the_prefetcher_ends_on_close_and_prepares_no_more_than_its_depth():
    batches = CountedBatches(counting(50), 1, 3)
    with nothing_left_open():
        prefetcher = Prefetcher(batches)
        for _ in range(3):
            next(prefetcher)
        prefetcher.close()
        prefetcher.close()
    assert batches.prepared <= 3 + 2 + 1
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)


def test_an_error_in_the_thread_reaches_the_caller_after_the_good_batches():
    batches = CountedBatches(counting(50), 1, 3)
    batches.breaks_at = 3
    with Prefetcher(batches) as prefetcher:
        next(prefetcher)
        next(prefetcher)
        for _ in range(2):
            with pytest.raises(UserError, match="broken"):
                next(prefetcher)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_prefetcher_copies_to_the_device():
    batches = Batches(counting(50), 2, 3)
    with Prefetcher(batches, device="cuda") as prefetcher:
        tokens_, _ = next(prefetcher)
    assert tokens_.is_cuda and torch.equal(tokens_.cpu(), batches.batch(1, 0, 0, 1)[0])
