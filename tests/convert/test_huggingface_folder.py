"""What a converted folder holds beside its weights, and that it appears whole or not at all."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from folder_makers import (
    assert_same_weights,
    files,
    foreign_folder,
    small_config,
    small_folder,
    small_model,
    weights_of,
)
from layout_makers import sharded
from tiny_tokenizer import TinyTokenizer

from convert.huggingface import from_hub, to_hub_folder
from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE
from openelm_mlx.checkpoint import load
from openelm_mlx.cli import main
from openelm_mlx.weight_files import read_json, read_weights

# Tokenizer and chat template


def with_tokenizer(folder: Path, tokenizer: TinyTokenizer, template: str | None = None) -> Path:
    tokenizer.tokenizer.save(folder, chat_template=template)
    return folder


def template_of(folder: Path) -> object:
    return read_json(folder / "tokenizer_config.json").get("chat_template")


def test_a_folder_without_a_tokenizer_converts_and_says_what_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    ours = from_hub(source, tmp_path / "out")
    assert "has no tokenizer" in caplog.text
    assert "--tokenizer" in caplog.text
    assert "tokenizer_config.json" not in files(ours)


def test_a_given_tokenizer_makes_the_folder_self_contained(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    ours = from_hub(source, tmp_path / "out", tokenizer=tiny_tokenizer.path)
    shutil.rmtree(source)
    found = load(ours, need_tokenizer=True)[1]
    assert found is not None
    assert found.encode("The wolf") == tiny_tokenizer.tokenizer.encode("The wolf")
    assert template_of(ours) is None
    back = to_hub_folder(ours, tmp_path / "back")
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (ours / name).read_bytes()


@pytest.mark.parametrize("how", ["name", "flag", "output"])
def test_instruct_folders_get_apples_template(
    how: str, tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    name = "OpenELM-270M-Instruct" if how == "name" else "in"
    source = foreign_folder(tmp_path / name, small_config(), weights_of(small_model()))
    output = tmp_path / ("OpenELM-tiny-Instruct" if how == "output" else "out")
    ours = from_hub(source, output, tokenizer=tiny_tokenizer.path, instruct=how == "flag")
    assert template_of(ours) == APPLE_INSTRUCT_TEMPLATE


def test_a_template_of_another_model_does_not_come_along(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    (tmp_path / "chatty").mkdir()
    chatty = with_tokenizer(tmp_path / "chatty", tiny_tokenizer, "{{ 'another model' }}")
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    assert template_of(from_hub(source, tmp_path / "base", tokenizer=chatty)) is None
    tuned = from_hub(source, tmp_path / "tuned", tokenizer=chatty, instruct=True)
    assert template_of(tuned) == APPLE_INSTRUCT_TEMPLATE


def test_a_base_folder_with_a_template_loses_it_and_one_of_ours_keeps_it(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    with_tokenizer(source, tiny_tokenizer, "{{ 'x' }}")
    assert template_of(from_hub(source, tmp_path / "base")) is None
    named = from_hub(source, tmp_path / "chat", instruct=True)
    assert template_of(named) == "{{ 'x' }}"
    assert template_of(to_hub_folder(named, tmp_path / "back")) == "{{ 'x' }}"


def test_a_tokenizer_with_too_many_pieces_is_refused(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    model = small_model(vocab_size=100)
    source = foreign_folder(tmp_path / "in", small_config(vocab_size=100), weights_of(model))
    with pytest.raises(ValueError, match="320 pieces, but the model's vocabulary has only 100"):
        from_hub(source, tmp_path / "out", tokenizer=tiny_tokenizer.path)
    assert files(tmp_path) == ["in"]


def test_generation_settings_are_kept(tmp_path: Path) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    theirs = {"repetition_penalty": 1.2, "eos_token_id": 7, "transformers_version": "4.39.3"}
    (source / "generation_config.json").write_text(json.dumps(theirs))
    ours = from_hub(source, tmp_path / "out")
    assert read_json(ours / "generation_config.json") == {
        **{"bos_token_id": 1, "eos_token_id": 2},
        **{"repetition_penalty": 1.2, "transformers_version": "4.39.3"},
    }


# Provenance and licence


def test_the_source_and_its_hash_are_recorded_through_every_step(tmp_path: Path) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    ours = from_hub(source, tmp_path / "ours")
    first = read_json(ours / "openelm.json")
    assert (first["source"], first["format"], first["sha256"]) == ("in", "Hugging Face", digest)
    assert set(first["versions"]) == {"openelm-mlx", "mlx"}
    second = read_json(to_hub_folder(ours, tmp_path / "back") / "openelm.json")
    assert second["source"] == "ours"
    assert second["made_from"]["sha256"] == digest
    assert str(tmp_path) not in json.dumps([first, second])


def test_every_shard_is_hashed(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(small_config()))
    sharded(source, weights_of(small_model()))
    recorded = read_json(from_hub(source, tmp_path / "out") / "openelm.json")["sha256"]
    assert recorded == {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in source.glob("*.safetensors")
    }


CARD = "---\nlicense: {}\nlicense_name: {}\n---\n# OpenELM\n"
AMLR = "Disclaimer: IMPORTANT: This Apple Machine Learning\nResearch Model is specifically ..."
SAMPLE = "IMPORTANT:  This Apple software is supplied to you by Apple Inc. ..."


@pytest.mark.parametrize(
    ("card", "text", "licence"),
    [
        (CARD.format("other", "apple-sample-code-license"), None, "apple-sample-code-license"),
        (CARD.format("apple-amlr", "x"), SAMPLE, "apple-amlr"),
        ("# no front matter\n---\nlicense: mit\n---\n", AMLR, "apple-amlr"),
        (None, SAMPLE, "apple-sample-code-license"),
        ("---\nlicense: [broken\n---\n", None, None),
        (None, "do what you like", None),
        (None, None, None),
    ],
)
def test_the_licence_is_found_said_and_goes_along(
    card: str | None,
    text: str | None,
    licence: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    if card is not None:
        (source / "README.md").write_text(card)
    if text is not None:
        (source / "LICENSE").write_text(text)
    assert main(["convert", "huggingface", str(source), "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    said = f"licence of the weights: {licence}\n" if licence else ""
    assert out == f"{tmp_path / 'out'}\n{said}"
    assert read_json(tmp_path / "out" / "openelm.json").get("licence") == licence
    assert ("LICENSE" in files(tmp_path / "out")) == (text is not None)
    back = to_hub_folder(tmp_path / "out", tmp_path / "back")
    assert read_json(back / "openelm.json").get("licence") == licence


def test_apples_weights_without_a_stated_licence_are_still_apples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "models--apple--OpenELM-270M" / "snapshots" / ("b" * 40)
    foreign_folder(cache, small_config(), weights_of(small_model()))
    assert main(["convert", "huggingface", str(cache), "--output", str(tmp_path / "out")]) == 0
    assert "licence of the weights: Apple's, not named" in capsys.readouterr().out


# Failures


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def renamed(folder: Path) -> None:
    weights = read_weights(folder)
    weights["transformer.layers.0.ffn.proj_3.weight"] = weights.pop(
        "transformer.layers.0.ffn.proj_2.weight"
    )
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"no model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "is truncated or damaged"),
        (renamed, "nearest in the file: transformer.layers.0.ffn.proj_3.weight"),
        (no_weights, "holds no weights: looked for"),
        (no_config, "holds no config.json"),
        (broken_config, "is not valid JSON"),
        (broken_tokenizer, "tokenizer.model"),
    ],
)
def test_a_failed_conversion_is_one_line_and_leaves_nothing(
    damage: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(small_model()))
    damage(source)
    for route in ("huggingface", "to-huggingface"):
        assert main(["convert", route, str(source), "--output", str(tmp_path / "out")]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert message in errors[0]
        assert err.splitlines()[-1] == errors[0]
    assert files(tmp_path) == ["in"]


def test_an_existing_folder_is_refused_before_the_source_is_looked_at(tmp_path: Path) -> None:
    small_folder(tmp_path / "out", None)
    for convert in (from_hub, to_hub_folder):
        with pytest.raises(FileExistsError, match="is not empty; add --overwrite"):
            convert(tmp_path / "nowhere", tmp_path / "out")


def test_a_folder_can_be_converted_onto_itself(tmp_path: Path) -> None:
    weights = weights_of(small_model())
    folder = foreign_folder(tmp_path / "in", small_config(), weights)
    from_hub(folder, folder, overwrite=True, dtype="float16")
    assert_same_weights(read_weights(folder), {n: w.astype(mx.float16) for n, w in weights.items()})
    assert files(tmp_path) == ["in"]
