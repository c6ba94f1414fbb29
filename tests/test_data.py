import json
import random
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from pretraining_data import BOS, EOS, ByteTokenizer, arrays, ids_of, write_documents

from openelm_mlx import document_stream
from openelm_mlx.batches import Batch
from openelm_mlx.data import PackedBatches, token_stats
from openelm_mlx.text_files import FileSource
from openelm_mlx.text_filters import TextFilters

FILES = [["one", "a longer text", ""], ["x" * 40, "é"], ["three", "four", "five and six"]]


def packed(sources: list[FileSource], **settings: Any) -> PackedBatches:
    """Two rows of 8 tokens, in order, once."""
    given = {"batch_size": 2, "max_seq_length": 8, "shuffle": False, "epochs": 1} | settings
    return PackedBatches(sources, ByteTokenizer(), **given)


def stream_of(batches: list[Batch], length: int) -> list[int]:
    """The tokens that rows were cut from; checks that each target is the next token."""
    tokens = [t for batch in batches for row in np.array(batch.tokens).tolist() for t in row]
    targets = [t for batch in batches for row in np.array(batch.targets).tolist() for t in row]
    assert targets[: length - 1] == tokens[1:length]
    return tokens[:length]


def test_rows_hold_every_token_in_order(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, FILES)
    whole = [t for texts in FILES for text in texts for t in ids_of(text)]
    batches = list(packed(sources))
    assert [b.tokens.shape for b in batches[:-1]] == [(2, 8)] * (len(batches) - 1)
    assert batches[-1].tokens.shape[1] == 8
    # The last token is the last target, not an input; what follows is padding.
    assert stream_of(batches, len(whole) - 1) == whole[:-1]
    counted = [m for batch in batches for row in np.array(batch.mask).tolist() for m in row]
    firsts = {i for i in range(1, len(whole)) if whole[i] == BOS}
    assert [i + 1 for i, m in enumerate(counted) if m] == [
        i for i in range(1, len(whole)) if i not in firsts
    ]


def test_without_separation_every_next_token_counts(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, FILES)
    whole = sum(len(ids_of(text)) for texts in FILES for text in texts)
    batches = list(packed(sources, separate_documents=False))
    assert all(batch.segments is None for batch in batches)
    assert sum(float(batch.mask.sum()) for batch in batches) == whole - 1


def test_documents_and_padding_are_segments_of_their_own(tmp_path: Path) -> None:
    [batch] = packed(write_documents(tmp_path, [["ab", "c", "defgh"]]), max_seq_length=7)
    found = arrays(batch)
    a, b = 97 + 3, 98 + 3
    assert found["tokens"][0] == [BOS, a, b, EOS, BOS, 99 + 3, EOS]
    assert found["targets"][0] == [a, b, EOS, BOS, 99 + 3, EOS, BOS]
    assert found["mask"][0] == [1, 1, 1, 0, 1, 1, 0]
    assert found["segments"][0] == [1, 1, 1, 1, 2, 2, 2]
    assert found["mask"][1] == [1, 1, 1, 1, 1, 1, 0]  # BOS, 5 letters; then EOS and no target
    assert len(set(found["segments"][1][:7])) == 1
    mask = batch.attention_mask()
    assert mask is not None
    assert not mask[0, 0, 4, :4].any().item()  # the second document sees nothing of the first
    assert mask[0, 0, 4, 4].item()


def test_a_document_that_goes_on_in_the_next_row_has_its_target_there(tmp_path: Path) -> None:
    batch = next(packed(write_documents(tmp_path, [["x" * 30]])))
    assert np.array(batch.mask).all()
    assert batch.targets[0, -1].item() == batch.tokens[1, 0].item()


def test_padding_is_seen_by_no_document(tmp_path: Path) -> None:
    [batch] = packed(write_documents(tmp_path, [["abc"]]))
    found = arrays(batch)
    assert found["mask"] == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert found["segments"] == [[1, 1, 1, 1, 1, 2, 2, 2]]  # EOS is the document's, unused


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_rows_of_one_order(tmp_path: Path, world_size: int) -> None:
    sources = write_documents(tmp_path, FILES)
    alone = list(packed(sources, batch_size=4, shuffle=True, seed=3))
    ranks = [
        list(packed(sources, batch_size=4, shuffle=True, seed=3, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for i, batch in enumerate(alone):
        parts = [arrays(batches[i]) for batches in ranks]
        assert len({len(part["tokens"]) for part in parts}) == 1  # all ranks make the same step
        for name, rows in arrays(batch).items():
            mixed = [row for some in zip(*(p[name] for p in parts), strict=True) for row in some]
            assert mixed[: len(rows)] == rows
            if name == "mask":
                assert not np.any(mixed[len(rows) :])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_source_resumes_at_the_exact_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    monkeypatch.setattr(document_stream, "_WINDOW", 3)
    rng = random.Random(1)
    files = [["w" * rng.randrange(30) for _ in range(rng.randrange(6))] for _ in range(5)]
    sources = write_documents(tmp_path, files)
    settings: Any = {"shuffle": shuffle, "seed": 5, "epochs": 2, "max_seq_length": 7}
    source = packed(sources, **settings)
    whole = [arrays(batch) for batch in packed(sources, **settings)]
    assert len(whole) > 10
    for i in range(len(whole) + 1):
        state = json.loads(json.dumps(source.state_dict()))
        resumed = packed(sources, **settings)
        resumed.load_state_dict(state)
        assert [arrays(batch) for batch in resumed] == whole[i:]
        next(source, None)


def test_a_run_resumes_with_other_ranks_rows_and_lengths(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, FILES)
    whole = [t for texts in FILES for text in texts for t in ids_of(text)]
    first = packed(sources, batch_size=2, max_seq_length=5)
    taken = stream_of(list(islice(first, 3)), 30)
    ranks = []
    for rank in range(2):
        resumed = packed(sources, batch_size=4, max_seq_length=9, rank=rank, world_size=2)
        resumed.load_state_dict(first.state_dict())
        ranks.append([row for batch in resumed for row in arrays(batch)["tokens"]])
    rest = [token for rows in zip_longest(*ranks, fillvalue=[]) for row in rows for token in row]
    assert (taken + rest)[: len(whole) - 1] == whole[:-1]


def test_a_position_is_small_however_long_the_document(tmp_path: Path) -> None:
    source = packed(write_documents(tmp_path, [["x" * 100_000]]))
    for _ in range(1000):
        next(source)
    assert len(json.dumps(source.state_dict())) < 400


def test_epochs_follow_one_another_without_a_gap(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, [["abc", "de"]])
    batches = list(islice(packed(sources, epochs=None), 6))
    once = ids_of("abc") + ids_of("de")
    assert stream_of(batches, 96) == (once * 20)[:96]


def test_filters_drop_cut_and_count_bos_and_eos(tmp_path: Path) -> None:
    filters = TextFilters(min_characters=3, min_tokens=6, split_words=2)
    sources = write_documents(tmp_path, [["ab", "abc", "abcd", "abcd ef ghijkl", "...abcd"]])
    batches = list(packed(sources, filters=filters, max_seq_length=4))
    kept = ids_of("abcd") + ids_of("abcd ef") + ids_of("ghijkl") + ids_of("...abcd")
    assert stream_of(batches, len(kept) - 1) == kept[:-1]
    begins = [i for i, token in enumerate(kept) if token == BOS]
    counted = [m for batch in batches for row in np.array(batch.mask).tolist() for m in row]
    assert [i for i in begins[1:] if counted[i - 1]] == []


@pytest.mark.parametrize("epochs", [1, None])
def test_data_of_which_nothing_passes_the_filters_is_an_error(
    tmp_path: Path, epochs: int | None
) -> None:
    filters = TextFilters(min_tokens=100)
    source = packed(write_documents(tmp_path, FILES), filters=filters, epochs=epochs)
    with pytest.raises(ValueError, match="no document passed the filters"):
        next(source)


def test_text_that_has_shrunk_since_the_state_was_saved_is_refused(tmp_path: Path) -> None:
    source = packed(write_documents(tmp_path, [["x" * 40]]))
    next(source)
    state = source.state_dict()
    with pytest.raises(ValueError, match="past the end of its document"):
        packed(write_documents(tmp_path, [["x"]])).load_state_dict(state)


def test_damage_is_told_by_file_and_line_or_skipped(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, FILES)
    with sources[1].path.open("a") as file:
        file.write('{"text": 3}\n')
    with pytest.raises(ValueError, match=r'01\.jsonl:3: "text" should be a string'):
        list(packed(sources))
    source = packed(sources, on_damage="skip")
    assert len(list(source)) == len(list(packed(write_documents(tmp_path, FILES))))
    assert source.skipped == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size and max_seq_length must be 1 or more"),
        ({"max_seq_length": 0}, "batch_size and max_seq_length must be 1 or more"),
        ({"batch_size": 3, "world_size": 2}, "batch_size 3 .* a multiple of their number, 2"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, got 2"),
    ],
)
def test_impossible_sizes_are_refused(
    tmp_path: Path, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        packed(write_documents(tmp_path, FILES), **settings)


def test_stats_count_useful_tokens_against_padding(tmp_path: Path) -> None:
    stats = token_stats(packed(write_documents(tmp_path, [["abc", "de"], ["x" * 30]])))
    whole = 5 + 4 + 32  # tokens with BOS and EOS; three BOS are no targets
    assert (stats.steps, stats.rows, stats.processed, stats.useful) == (3, 5, 40, whole - 3)
    assert stats.shapes == ((2, 8), (1, 8))
    assert stats.share == (whole - 3) / 40
    assert "95.0 %" in stats.describe()


def test_packing_pads_the_end_alone(tmp_path: Path) -> None:
    rng = random.Random(0)
    sources = write_documents(tmp_path, [["w" * rng.randrange(1, 300) for _ in range(400)]])
    stats = token_stats(packed(sources, max_seq_length=128, separate_documents=False))
    assert stats.share > 0.995
    assert token_stats(packed(sources, max_seq_length=128), steps=3).steps == 3


def test_arrays_have_the_types_that_batches_promise(tmp_path: Path) -> None:
    batch = next(packed(write_documents(tmp_path, FILES)))
    assert batch.segments is not None
    assert [a.dtype for a in (batch.tokens, batch.targets, batch.segments)] == [mx.int32] * 3
    assert batch.mask.dtype == mx.float32
    assert batch.samples[0] == f"{tmp_path}/00.jsonl:1"
