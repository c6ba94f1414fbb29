import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from openelm_mlx.data_sources import HubSource, find_sources, look_for
from openelm_mlx.text_files import FileSource

MIXTURE = files("openelm_mlx") / "recipes" / "data_openelm.yaml"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "x", "content": "y"}\n')


def test_corenets_entries_number_their_files_without_the_end(tmp_path: Path) -> None:
    touch(tmp_path, "web/web-00003.jsonl", "web/web-00004.jsonl", "book.json.gz")
    sources = find_sources(
        [
            {
                "file_name": "web/web-{file_id:05d}.jsonl",
                "text_key": "content",
                "file_id_range": [3, 5],
            },
            {"file_name": "book.json.gz", "text_key": "text", "file_id_range": [0, 1]},
        ],
        root=tmp_path,
    )
    assert sources == [
        FileSource(tmp_path / "web/web-00003.jsonl", "content"),
        FileSource(tmp_path / "web/web-00004.jsonl", "content"),
        FileSource(tmp_path / "book.json.gz", "text"),
    ]


def test_paths_folders_and_patterns_are_entries_too(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "sub/b.jsonl", "sub/c.txt")
    found = find_sources([f"{tmp_path}/a.jsonl", f"{tmp_path}/sub"], text_key="content")
    assert [(s.path.name, s.text_key) for s in found if isinstance(s, FileSource)] == [
        *(("a.jsonl", "content"), ("b.jsonl", "content"), ("c.txt", "content")),
    ]
    [source] = find_sources({"path": "sub/*.txt", "text_key": "x"}, root=tmp_path)
    assert source == FileSource(tmp_path / "sub/c.txt", "x")
    assert find_sources(tmp_path / "a.jsonl") == [FileSource(tmp_path / "a.jsonl")]


@pytest.mark.parametrize("whole", [False, True])
def test_entries_are_read_from_yaml_and_from_corenets_own(tmp_path: Path, whole: bool) -> None:
    touch(tmp_path, "a-0.jsonl", "a-1.jsonl")
    entries = [{"file_name": "a-{file_id}.jsonl", "text_key": "text", "file_id_range": [0, 2]}]
    general: dict[str, Any] = {"general_lm": {"train_data_info": entries}}
    value = {"dataset": {"language_modeling": general}} if whole else {"train_data_info": entries}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(value))
    found = find_sources([f"{tmp_path}/data.yaml"], root=tmp_path)
    assert [source.name for source in found] == [f"{tmp_path}/a-{i}.jsonl" for i in range(2)]


def test_missing_files_are_counted_and_named(tmp_path: Path) -> None:
    touch(tmp_path, "a-0.jsonl", "a-3.jsonl")
    entry = {"file_name": "a-{file_id}.jsonl", "text_key": "text", "file_id_range": [0, 9]}
    [found] = look_for(entry, root=tmp_path)
    assert (len(found.files), len(found.missing), found.size) == (9, 7, 60)
    line = found.describe()
    assert line.startswith("a-{file_id}.jsonl: 2 of 9 files")
    assert f"7 missing: {tmp_path}/a-1.jsonl, " in line
    assert line.endswith(", ...")
    with pytest.raises(FileNotFoundError, match=r"7 missing.*--dry-run` lists all"):
        find_sources(entry, root=tmp_path)
    touch(tmp_path, *(f"a-{i}.jsonl" for i in range(9)))
    assert "missing" not in look_for(entry, root=tmp_path)[0].describe()


def test_apples_mixture_has_all_its_parts() -> None:
    found = look_for(str(MIXTURE), root="/nowhere")
    counts = {entry.name.split("/")[0]: 0 for entry in found}
    for entry in found:
        counts[entry.name.split("/")[0]] += len(entry.files)
        assert entry.missing == entry.files
    # CoreNet's README: 5534; 100 + 1 + 98 + 1 + 1 + 1024; 1650; 3 + 26 + 78 + 149 + 2
    assert counts == {"refinedweb": 5534, "redpajama": 1225, "pile": 1650, "dolma": 258}
    keys = {entry.text_key for entry in found if entry.name.startswith("refinedweb")}
    assert keys == {"content"}
    assert {entry.text_key for entry in found[1:]} == {"text"}
    assert str(found[0].files[-1]) == "/nowhere/refinedweb/refinedweb-05533-of-05534.parquet"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"text_key": "text"}, "a data entry needs one of file_name, path, dataset"),
        ({"file_name": "a.jsonl", "weight": 2}, "may have .* got .*weight"),
        ({"file_name": "a.jsonl", "path": "b"}, "a data entry needs one of"),
        ({"file_name": "a-{id}.jsonl", "file_id_range": [0, 2]}, "cannot number the files"),
        ({"file_name": "a-{file_id:z}.jsonl", "file_id_range": [0, 2]}, "cannot number the files"),
        ({"file_name": "a-{file_id}.jsonl", "file_id_range": 3}, "cannot number the files"),
        ({"file_name": "a-{file_id}.jsonl", "file_id_range": [2, 2]}, "names no file"),
        ({"file_name": "a.jsonl", "file_id_range": [0, 3]}, "names one file many times"),
        ({"file_name": "a.csv"}, "a.csv is in no known format; known are .jsonl"),
        ("hf:", "expected hf:OWNER/NAME"),
        ("hf:a/b:c:d:e", "expected hf:OWNER/NAME"),
    ],
)
def test_malformed_entries_are_refused(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_sources(entry)


@pytest.mark.parametrize("text", ["- [", "a: 1", "[]", "train_data_info: 3"])
def test_yaml_without_entries_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"is not YAML|holds no train_data_info"):
        find_sources(f"{tmp_path}/data.yaml")
    with pytest.raises(FileNotFoundError):
        find_sources(f"{tmp_path}/none.yaml")


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ("owner/name", HubSource(dataset="owner/name")),
        ("hf:owner/name", HubSource(dataset="owner/name")),
        ("hf:name:en", HubSource(dataset="name", subset="en")),
        ("hf:owner/name::test", HubSource(dataset="owner/name", split="test")),
        (
            {"dataset": "owner/name", "subset": "en", "split": "validation", "text_key": "body"},
            HubSource(dataset="owner/name", subset="en", split="validation", text_key="body"),
        ),
    ],
)
def test_hugging_face_data_sets_are_named_by_id(given: Any, source: HubSource) -> None:
    assert find_sources(given) == [source]
    [entry] = look_for(given)
    assert not entry.missing
    assert "a Hugging Face data set" in entry.describe()


def test_what_is_on_disk_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "owner/name/a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert find_sources("owner/name") == [FileSource(Path("owner/name/a.jsonl"))]
    with pytest.raises(FileNotFoundError):
        find_sources("owner/none.jsonl")


@pytest.mark.slow
def test_a_data_set_is_streamed_and_read_on_from_any_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [{"body": f"row {i}" if i != 2 else None} for i in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = HubSource(dataset=str(tmp_path), text_key="body")
    records = list(source.records())
    assert [r.text for r in records if not r.damage] == ["row 0", "row 1", "row 3", "row 4"]
    assert [(r.line, r.damage) for r in records if r.damage] == [
        (3, '"body" should be a string and is null')
    ]
    assert list(source.records(records[2].after)) == records[3:]


def test_without_the_extra_a_data_set_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'hf:a/b:train needs datasets: pip install "openelm-mlx'):
        list(HubSource(dataset="a/b").records())
