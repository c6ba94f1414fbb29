"""What lies beside a package: that an app finds all it needs, and that it is true."""

import json
import re
from pathlib import Path
from typing import Any

import golden_set
import pytest
import tiny_tokenizer as tiny
from folder_makers import files, small_folder, small_model
from small_packages import small_package

from convert.coreml_bundle import (
    CHECK_TEXTS,
    bundle_folder,
    refuse_existing_bundle,
    write_bundle,
)
from openelm_mlx.config import ModelArgs
from openelm_mlx.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

LLAMA = golden_set.WHOLE.parent / "data" / "tokenizer"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of one small model in three interfaces."""
    home = tmp_path_factory.mktemp("packages")
    model = small_model()
    small_package(home / "Small.mlpackage", model)
    small_package(home / "Flexible.mlpackage", model, flexible=True)
    return home


@pytest.fixture(scope="module")
def model_dir(home: Path, tiny_tokenizer: tiny.TinyTokenizer) -> Path:
    folder = small_folder(home / "small", tiny_tokenizer.tokenizer, small_model())
    (folder / "LICENSE").write_text("Apple Machine Learning Research Model License\n")
    return folder


@pytest.fixture(scope="module")
def bundle(home: Path, model_dir: Path) -> Path:
    package = home / "Small.mlpackage"
    return write_bundle(bundle_folder(package), package=package, model_dir=model_dir)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_a_bundle_holds_all_that_an_app_needs(bundle: Path) -> None:
    assert bundle.name == "Small-bundle"
    assert files(bundle) == [
        *("LICENSE", "OpenELMRunner.swift", "README.md", "config.json", "generation.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_check.json", "tokenizer_config.json"),
    ]


def test_the_settings_are_those_of_the_package_and_the_model(bundle: Path) -> None:
    settings = read(bundle, "generation.json")
    assert settings == {
        **{"interface": "static", "context": 64, "prefill": 8, "vocab_size": 320},
        **{"bos_token_id": 1, "eos_token_ids": [2], "chat": False, "stop": []},
        **{"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    }
    assert ModelArgs.from_dict(read(bundle, "config.json")) == ModelArgs.from_dict(
        small_model().args.to_dict()
    )


def test_a_chatting_model_brings_its_template_and_stop_texts(
    home: Path, tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    folder = small_folder(tmp_path / "Small-Instruct", tiny_tokenizer.tokenizer, instruct=True)
    write_bundle(tmp_path / "b", package=home / "Small.mlpackage", model_dir=folder)
    settings = read(tmp_path / "b", "generation.json")
    assert settings["chat"] is True
    assert settings["stop"] == ["<|user|>", "<|system|>"]
    assert "<|assistant|>" in read(tmp_path / "b", "tokenizer_config.json")["chat_template"]
    assert "chat_template" not in read(bundle_folder(home / "Small.mlpackage"), "config.json")


def test_what_speaks_of_mlx_weights_stays_out_of_the_config(
    home: Path, tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    folder = small_folder(tmp_path / "q", tiny_tokenizer.tokenizer)
    config = read(folder, "config.json")
    config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    write_bundle(tmp_path / "b", package=home / "Small.mlpackage", model_dir=folder)
    assert not {"quantization", "torch_dtype"} & set(read(tmp_path / "b", "config.json"))


def test_the_check_gives_the_ids_that_an_app_reads_and_marks_where_training_read_others(
    bundle: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(str(bundle / "tokenizer.json"))
    texts = read(bundle, "tokenizer_check.json")["texts"]
    assert [entry["text"] for entry in texts] == list(CHECK_TEXTS)
    assert len(set(CHECK_TEXTS)) == 30
    marked = []
    for entry in texts:
        assert entry["ids"][0] == 1
        assert fast.encode(entry["text"]).ids == entry["ids"]
        own = tiny_tokenizer.tokenizer.encode(entry["text"])
        assert entry.get("sentencepiece_ids", entry["ids"]) == own
        if "sentencepiece_ids" in entry:
            marked.append(entry["text"])
    assert marked == ["a literal </s> in text"]
    assert {"😀", "   three leading spaces", "\n"} <= set(CHECK_TEXTS)


@pytest.mark.skipif(not LLAMA.is_dir(), reason="the LLaMA tokenizer is not here")
def test_the_ids_of_apples_tokenizer_are_the_known_ones(home: Path, tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "m", None, small_model(vocab_size=32000))
    write_bundle(
        tmp_path / "b",
        package=home / "Small.mlpackage",
        model_dir=folder,
        tokenizer=LLAMA / "tokenizer.model",
    )
    texts = {
        entry["text"]: entry for entry in read(tmp_path / "b", "tokenizer_check.json")["texts"]
    }
    known = [1, 9038, 2501, 263, 931, 727, 471]  # coremltools' guide "convert OpenELM"
    assert texts["Once upon a time there was"]["ids"] == known
    assert [t for t, e in texts.items() if "sentencepiece_ids" in e] == ["a literal </s> in text"]
    assert Tokenizer.from_path(tmp_path / "b").eos_ids == {2}


def test_a_model_without_a_tokenizer_gives_a_bundle_without_one_and_says_so(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_folder(tmp_path / "m", None)
    write_bundle(tmp_path / "b", package=home / "Small.mlpackage", model_dir=folder)
    assert "an app needs one: give --tokenizer" in caplog.text
    assert not [name for name in files(tmp_path / "b") if name.startswith("tokenizer")]
    assert read(tmp_path / "b", "generation.json")["eos_token_ids"] == [2]


def test_the_card_names_every_input_output_and_state_with_its_shape(bundle: Path) -> None:
    text = (bundle / "README.md").read_text(encoding="utf-8")
    for row in (
        "| `prefill` | input | `inputIds` | int32 | [1, 8] |",
        "| `prefill` | input | `position` | int32 | [1] |",
        "| `decode` | input | `inputIds` | int32 | [1, 1] |",
        "| `decode` | state | `keyCache` | float16 | [1, 3, 64, 16] |",
        "| `decode` | output | `logits` | float16 | [1, 1, 320] |",
    ):
        assert row in text, row
    cache = 2 * (1 + 2) * 16 * 2  # keys and values, kv heads of both layers, head_dim, fp16
    assert f"{cache} bytes a token" in text
    assert f"| 1024 | {cache * 1024 / 1e6:.1f} |" in text
    assert "for CPU and GPU: load it with compute units `.cpuAndGPU`" in text
    assert "license: apple-amlr" in text
    assert "`LICENSE`" in text
    assert "Without that file nothing was" in text
    assert "/work" not in text
    assert "/tmp" not in text


def test_the_card_of_the_flexible_form_says_how_its_mask_looks(
    home: Path, model_dir: Path, tmp_path: Path
) -> None:
    write_bundle(tmp_path / "b", package=home / "Flexible.mlpackage", model_dir=model_dir)
    text = (tmp_path / "b" / "README.md").read_text(encoding="utf-8")
    assert "| `main` | input | `fullAttentionMask` | float16 | [1, 1, 1..64, 1..64] |" in text
    assert "-65504" in text
    assert "OpenELMRunner" not in text.split("## Licence")[0]
    assert "OpenELMRunner.swift" not in files(tmp_path / "b")  # it calls prefill and decode


def test_the_runner_is_short_and_uses_the_names_of_the_package(bundle: Path) -> None:
    text = (bundle / "OpenELMRunner.swift").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert "not compiled there" in text
    for name in ("prefill", "decode", "inputIds", "position", "logits"):
        assert f'"{name}"' in text
    keys = {re.sub(r"[A-Z]", lambda m: "_" + m[0].lower(), key) for key in _decoded_keys(text)}
    assert keys <= set(read(bundle, "generation.json"))
    assert text.count("makeState()") == 1
    card = (bundle / "README.md").read_text(encoding="utf-8")
    assert "try await OpenELMRunner(model: model, bundle: files)" in card
    assert "public init(model: URL, bundle: URL, computeUnits" in text
    assert 'try await runner.generate("Once upon a time", maxTokens: 64)' in card
    assert "public func generate(_ prompt: String, maxTokens: Int" in text


def _decoded_keys(swift: str) -> list[str]:
    """Properties of the struct that `generation.json` is decoded into."""
    struct = swift.split("struct OpenELMSettings")[1].split("\n}")[0]
    found = re.findall(r"public (?:let|var) ([\w, ]+):", struct)
    return [name for group in found for name in group.split(", ")]


def test_a_bundle_is_replaced_only_when_asked_to_and_other_folders_never(
    home: Path, model_dir: Path, tmp_path: Path
) -> None:
    package, target = home / "Small.mlpackage", tmp_path / "X-bundle"
    write_bundle(target, package=package, model_dir=model_dir)
    (target / "parity.json").write_text("{}")
    with pytest.raises(FileExistsError, match="--overwrite"):
        write_bundle(target, package=package, model_dir=model_dir)
    assert "parity.json" in files(target)
    write_bundle(target, package=package, model_dir=model_dir, overwrite=True)
    assert "parity.json" not in files(target)  # it spoke of the package before
    with pytest.raises(FileExistsError, match=r"is no bundle \(it holds no generation.json\)"):
        refuse_existing_bundle(model_dir, overwrite=True)


def test_a_failure_leaves_no_half_bundle(
    home: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr("convert.coreml_bundle.card", fail)
    with pytest.raises(OSError, match="No space"):
        write_bundle(tmp_path / "b", package=home / "Small.mlpackage", model_dir=model_dir)
    assert files(tmp_path) == []


def test_a_tokenizer_with_more_pieces_than_rows_is_refused(
    home: Path, tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    folder = small_folder(tmp_path / "m", None, small_model(vocab_size=64))
    with pytest.raises(ValueError, match="320 pieces"):
        write_bundle(
            tmp_path / "b",
            package=home / "Small.mlpackage",
            model_dir=folder,
            tokenizer=tiny_tokenizer.path,
        )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/X.mlpackage", "a/X-bundle"), ("OpenELM-1.1B.mlpackage", "OpenELM-1.1B-bundle")],
)
def test_the_bundle_lies_beside_its_package(name: str, expected: str) -> None:
    assert bundle_folder(name) == Path(expected)


def test_what_is_no_package_is_said(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(FileNotFoundError, match="which is a folder"):
        write_bundle(tmp_path / "b", package=tmp_path / "no.mlpackage", model_dir=model_dir)
    with pytest.raises(FileNotFoundError, match=r"no Manifest.json"):
        write_bundle(tmp_path / "b", package=model_dir, model_dir=model_dir)
