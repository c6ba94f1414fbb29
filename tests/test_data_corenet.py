import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_set import find, read_json
from pretraining_data import ByteTokenizer, arrays, ids_of, rows_of, write_documents

from openelm_mlx.data_corenet import CoreNetBatches, FileOrder
from openelm_mlx.text_files import FileSource
from openelm_mlx.text_filters import CORENET_FILTERS, TextFilters
from openelm_mlx.tokenizer import Tokenizer

Golden = Callable[[str], Path]
RUNS = ["recipe_like", "small_split_no_filters", "no_bos_eos_no_nfc"]


def corenet(sources: list[FileSource], **settings: Any) -> CoreNetBatches:
    """One row of 8 tokens, no filters, files in order."""
    given = {"batch_size": 1, "max_seq_length": 8, "shuffle": False, "filters": TextFilters()}
    return CoreNetBatches(sources, ByteTokenizer(), **{**given, **settings})


def of_golden_run(golden: Golden, run: str, source: FileSource, **settings: Any) -> CoreNetBatches:
    said = read_json(golden("data/expected.json"))[run]["settings"]
    filters = TextFilters(
        min_characters=said["min_characters_per_text"],
        min_tokens=said["min_tokens_per_text"],
        split_words=said["document_split_size"],
        fix_text=said["nfc"],
    )
    return CoreNetBatches(
        [source],
        Tokenizer.from_path(golden("data/tokenizer.model")),
        max_seq_length=said["sequence_length"],
        filters=filters,
        bos=said["append_sot"],
        eos=said["append_eot"],
        shuffle=False,
        **{"batch_size": 1, **settings},
    )


def parquet_of(folder: Path, file: Path) -> FileSource:
    """Apple's own file where it is at hand, else one of the same texts."""
    if (own := find("data/docs.parquet")) is not None:
        pytest.importorskip("pyarrow")
        return FileSource(own, "content")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    pq.write_table(pa.table({"content": [row["text"] for row in rows]}), folder / "docs.parquet")
    return FileSource(folder / "docs.parquet", "content")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("run", RUNS)
def test_sequences_are_corenets_token_for_token(
    golden: Golden, tmp_path: Path, run: str, form: str
) -> None:
    pytest.importorskip("ftfy")
    docs = golden("data/docs.jsonl")
    source = FileSource(docs) if form == "jsonl" else parquet_of(tmp_path, docs)
    with np.load(golden(f"data/expected_{run}.npz")) as file:
        wanted = file["content"]
    pieces = [
        piece
        for piece in read_json(golden("data/expected.json"))[run]["pieces"]
        if piece["status"] == "kept"
    ]
    batches = list(islice(of_golden_run(golden, run, source), len(wanted)))
    samples = np.concatenate([np.array(batch.tokens) for batch in batches])
    targets = np.concatenate([np.array(batch.targets) for batch in batches])
    mask = np.concatenate([np.array(batch.mask) for batch in batches])
    np.testing.assert_array_equal(samples, wanted[:, :-1])
    np.testing.assert_array_equal(targets, wanted[:, 1:])
    length = wanted.shape[1]
    counted = [min(piece["n_tokens"], length) - 1 for piece in pieces]
    np.testing.assert_array_equal(mask.sum(axis=1), counted)
    assert all((row[:n] == 1).all() for row, n in zip(mask, counted, strict=True))
    assert batches[0].segments is None


def test_after_the_last_piece_the_first_comes_again(golden: Golden) -> None:
    pytest.importorskip("ftfy")
    batches = of_golden_run(golden, "recipe_like", FileSource(golden("data/docs.jsonl")))
    rows = rows_of(islice(batches, 18))
    assert rows[17] == rows[0] != rows[1]


def test_files_are_shared_out_and_shuffled_as_in_corenet(golden: Golden) -> None:
    orders = read_json(golden("data/file_order.json"))["orders"]
    for name, epochs in orders.items():
        said = dict(word.split("=") for word in name.split())
        count = int(said["files"].split("+")[0])
        files = [f"a-{i:02d}.jsonl:text" for i in range(count)] + ["b.jsonl:content"]
        order = FileOrder(
            len(files),
            worker=int(said["rank"]),
            workers=int(said["world"]),
            shuffle=said["shuffle"] == "True",
        )
        for epoch in (2, 0, 1, 2):  # in any order
            assert [files[i] for i in order.epoch(epoch)] == epochs[epoch], name


def test_apples_filters_are_the_default() -> None:
    assert (CORENET_FILTERS.min_characters, CORENET_FILTERS.min_tokens) == (200, 256)
    assert (CORENET_FILTERS.split_words, CORENET_FILTERS.fix_text) == (2048, True)


def test_long_pieces_are_cut_and_short_ones_padded_with_what_is_asked(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, [["x" * 20, "abc"]])
    long, short = islice(corenet(sources, pad_id=7), 2)
    assert arrays(long)["tokens"][0] + arrays(long)["targets"][0][-1:] == ids_of("x" * 20)[:9]
    assert arrays(short)["tokens"] == [[*ids_of("abc"), 7, 7, 7]]
    assert arrays(short)["mask"] == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert arrays(next(corenet(sources[:1], batch_size=2)))["tokens"][1][-1] == ByteTokenizer.pad_id


def texts_of(files: int, each: int) -> list[list[str]]:
    return [[f"{chr(97 + f)}{i}" for i in range(each)] for f in range(files)]


def names(batch: Any) -> str:
    """File letters and numbers of a batch's rows, e.g. "a0 b0"."""
    rows = np.array(batch.tokens).tolist()
    return " ".join("".join(chr(t - 3) for t in row[1:] if t > 2 and t < 259) for row in rows)


def test_each_worker_fills_a_batch_of_its_rank_in_turn(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, texts_of(4, 6))
    # CoreNet with 2 ranks of 2 workers: rank 0 has files a and b, rank 1 has c and d.
    batches = corenet(sources, batch_size=4, ranks=2, workers=2)
    assert [names(batch) for batch in islice(batches, 4)] == [
        *("a0 c0 a1 c1", "b0 d0 b1 d1", "a2 c2 a3 c3", "b2 d2 b3 d3"),
    ]


def test_a_rank_gets_the_rows_of_corenets_rank(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, texts_of(4, 6))
    ranks = [corenet(sources, batch_size=4, rank=r, world_size=2, workers=2) for r in range(2)]
    assert [[names(b) for b in islice(batches, 2)] for batches in ranks] == [
        ["a0 a1", "b0 b1"],
        ["c0 c1", "d0 d1"],
    ]


def test_a_run_of_two_ranks_resumes_on_one_machine(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, texts_of(5, 7))
    settings: Any = {"batch_size": 4, "workers": 2, "shuffle": True, "seed": 1}
    ranks = [corenet(sources, **settings, rank=r, world_size=2) for r in range(2)]
    for _ in range(5):
        assert len({str(next(batches).samples) for batches in ranks}) == 2
    assert ranks[0].state_dict() == ranks[1].state_dict()
    alone = corenet(sources, **settings)
    alone.load_state_dict(json.loads(json.dumps(ranks[0].state_dict())))
    for _ in range(20):
        both = [np.array(next(batches).tokens).tolist() for batches in ranks]
        mixed = [row for pair in zip(*both, strict=True) for row in pair]
        assert np.array(next(alone).tokens).tolist() == mixed


def test_a_source_resumes_at_every_piece(tmp_path: Path) -> None:
    texts = [["a b c", "d"], [], ["e f", "g h i j", "k"], ["l"]]
    sources = write_documents(tmp_path, texts)
    settings: Any = {
        **{"batch_size": 2, "workers": 2, "shuffle": True, "seed": 3},
        "filters": TextFilters(split_words=1, min_characters=1),
    }
    source, whole = corenet(sources, **settings), corenet(sources, **settings)
    rows = [arrays(batch) for batch in islice(whole, 40)]
    for i in range(30):
        resumed = corenet(sources, **settings)
        resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert [arrays(batch) for batch in islice(resumed, 10)] == rows[i : i + 10]
        next(source)


def test_positions_of_other_data_or_settings_are_refused(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, texts_of(4, 2))
    state = corenet(sources, workers=2).state_dict()
    for other in (
        corenet(sources[::-1], workers=2),
        corenet(sources, workers=1),
        corenet(sources, workers=2, seed=1),
    ):
        with pytest.raises(ValueError, match="the saved position belongs to other data"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"batch_size 3 .* multiple of their number, 2"):
        corenet(sources, batch_size=3, ranks=2)
    with pytest.raises(ValueError, match="workers must be 1 or more"):
        corenet(sources, workers=0)
    with pytest.raises(ValueError, match="there are no files to read"):
        corenet([])


def test_data_of_which_nothing_is_left_ends_with_an_error(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, texts_of(2, 3))
    with pytest.raises(ValueError, match="no document passed the filters"):
        next(corenet(sources, filters=CORENET_FILTERS))


def test_damage_is_told_by_file_and_line_or_skipped(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, [["a0", "a1"]])
    with sources[0].path.open("a") as file:
        file.write("{}\n")
    batches = corenet(sources)
    next(batches), next(batches)
    with pytest.raises(ValueError, match=r'00\.jsonl:3: has no key "text"'):
        next(batches)
    batches = corenet(sources, on_damage="skip")
    assert [names(batch) for batch in islice(batches, 3)] == ["a0", "a1", "a0"]
    assert batches.skipped == 1
