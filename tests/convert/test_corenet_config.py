"""Which architecture and how many rows: YAML, JSON, preset, shapes, and what does not fit."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import folder_makers  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import golden_set
import mlx.core as mx
import pytest
import yaml
from corenet_files import corenet_state, general_gpt, write_config, write_state
from folder_makers import assert_same_weights

from convert.corenet import from_corenet, to_corenet
from convert.corenet_config import nest, read_config
from convert.names import ROWS_FILE, to_huggingface
from convert.pt_file import read
from openelm_mlx import config as config_module
from openelm_mlx.checkpoint import load_args
from openelm_mlx.config import ModelArgs
from openelm_mlx.weight_files import read_weights

TABLE = "transformer.token_embeddings.weight"
NAMED = {"model_name": "OpenELM-270M", "max_context_length": 2048, "padding_index": 32000}
SMALL_270M = (2, 64, 16)


def corenet_yaml(path: Path, general: dict[str, Any], *, flat: bool = False) -> Path:
    """A training YAML as CoreNet's recipes are, or as it dumps its own options."""
    values: dict[str, Any] = {
        "taskname": "+ [OpenELM-270M]",
        "common": {"run_label": "train", "accum_freq": 2},
        "model": {
            "activation_checkpointing": False,
            "language_modeling": {"name": "general_gpt", "general_gpt": general},
        },
    }
    if flat:
        prefix = "model.language_modeling.general_gpt."
        values = {prefix + key: value for key, value in general.items()}
        values |= {"model.language_modeling.name": "general_gpt", "common.accum_freq": 2}
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def small_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """``270M`` has two layers of width 64."""
    monkeypatch.setitem(config_module._PRESETS, "270m", SMALL_270M)


def preset_state(rows: int) -> OrderedDict[str, mx.array]:
    """A random model of ``small_presets``' 270M under CoreNet's names."""
    args = ModelArgs.preset("270M", vocab_size=rows)
    config = {k: v for k, v in args.to_dict().items() if k != "architectures"}
    model = folder_makers.random_model(config)
    return OrderedDict(
        (name.replace("transformer.", ""), array) for name, array in golden_set.flat(model)
    )


# What describes a checkpoint


@pytest.mark.parametrize("flat", [False, True])
def test_corenets_yaml_names_the_architecture(flat: bool, tmp_path: Path) -> None:
    file = corenet_yaml(tmp_path / "c.yaml", {**NAMED, "vocab_size": 32128}, flat=flat)
    found = read_config(file)
    assert found.args == ModelArgs.preset("270M", vocab_size=32128)
    assert (found.vocab_size, found.padding_index) == (32128, 32000)


def test_yaml_with_anchors_is_read_as_corenets_recipes_write_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "_anchor: &size 32128\nmodel:\n  language_modeling:\n    general_gpt:\n"
        '      model_name: "OpenELM-1_1B"\n      vocab_size: *size\n      max_context_length: 512\n'
    )
    args = read_config(tmp_path / "c.yaml").args
    assert args.num_query_heads == ModelArgs.preset("1.1B").num_query_heads
    assert (args.vocab_size, args.max_context_length) == (32128, 512)


@pytest.mark.parametrize("wrap", [None, "config", "general_gpt"])
def test_the_mapping_as_json_gives_apples_widths(wrap: str | None, tmp_path: Path) -> None:
    for name, entry in golden_set.read_json(golden_set.CUT / "models.json").items():
        inner = entry["config"]
        (tmp_path / "c.json").write_text(json.dumps({wrap: inner} if wrap else inner))
        args = read_config(tmp_path / "c.json").args
        resolved = entry["resolved"]
        assert list(args.num_query_heads) == resolved["num_query_heads"], name
        assert list(args.num_kv_heads) == resolved["num_kv_heads"], name
        assert args.ffn_dims == resolved["ffn_intermediate_dims"], name


def test_a_config_json_of_hugging_face_is_read() -> None:
    path = golden_set.CUT / "config_270M_hf.json"
    assert read_config(path).args == ModelArgs.from_dict(golden_set.read_json(path))


def test_corenets_other_named_models_have_their_own_widths(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"model_name": "gpt-test", "vocab_size": 50}))
    args = read_config(tmp_path / "c.json").args
    assert (args.num_transformer_layers, args.model_dim, args.vocab_size) == (1, 128, 50)
    assert args.ffn_dims == [256]  # 0.25 * 128 is less than one step of 256
    assert args.num_query_heads == (1,)


def test_dotted_keys_nest_and_join_what_is_nested() -> None:
    assert nest({"a.b": 1, "a": {"c": 2}, "d.e.f": 3, "g": 4}) == {
        "a": {"b": 1, "c": 2},
        "d": {"e": {"f": 3}},
        "g": 4,
    }


@pytest.mark.usefixtures("small_presets")
def test_shapes_alone_are_enough_for_a_published_size(tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", preset_state(50))
    args = load_args(from_corenet(file, tmp_path / "out"))
    preset = ModelArgs.preset("270M", vocab_size=50)
    assert (args.vocab_size, args.ffn_dims) == (50, preset.ffn_dims)
    assert args.num_query_heads == preset.num_query_heads


@pytest.mark.usefixtures("small_presets")
def test_a_preset_and_the_shapes_give_the_same_folder(tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", preset_state(50))
    named = from_corenet(file, tmp_path / "a", preset="270M")
    inferred = from_corenet(file, tmp_path / "b")
    assert_same_weights(read_weights(named), read_weights(inferred))
    assert load_args(named) == load_args(inferred)


# How many rows


@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_dropped_kept_and_put_back_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    state = corenet_state(rows=40, tied=tied)
    state["token_embeddings.weight"][39] = float("nan")
    file = write_state(tmp_path / "m.pt", state)
    config = write_config(tmp_path / "c.json", vocab_size=None, share_input_output_layers=tied)
    folder = from_corenet(file, tmp_path / "out", config=config, vocab_size=32)
    weights = read_weights(folder)
    for name in ("token_embeddings.weight", *(() if tied else ("classifier.weight",))):
        assert_same_weights({"": weights[to_huggingface(name)]}, {"": state[name][:32]})
    assert load_args(folder).vocab_size == 32
    back = read(to_corenet(folder, tmp_path / "back.pt"))
    assert_same_weights(back, state)


def test_dropping_rows_is_said_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_state(tmp_path / "m.pt")
    from_corenet(file, tmp_path / "out", config=write_config(tmp_path / "c.json"), vocab_size=32)
    assert "40 vocabulary rows: the first 32 go into the folder, the other 8" in caplog.text
    assert ROWS_FILE in caplog.text


def narrow_state(rows: int) -> OrderedDict[str, mx.array]:
    """As small as a model with tens of thousands of rows can be."""
    model = folder_makers.small_model(
        vocab_size=rows, model_dim=8, head_dim=4, num_gqa_groups=1, ffn_dim_divisor=8
    )
    return OrderedDict(
        (name.replace("transformer.", ""), array) for name, array in golden_set.flat(model)
    )


@pytest.mark.parametrize(
    ("rows", "said", "asked", "kept"),
    [
        (32128, None, None, 32000),  # nothing said: the Hub's rows
        (32128, 32000, None, 32000),  # the Hub's config
        (32128, 32128, None, 32128),  # equal to the config's: never resized
        (32128, None, 32128, 32128),
        (32128, 32128, 32000, 32000),
        (32000, None, None, 32000),
        (32001, None, None, 32001),  # not CoreNet's padding
        (40, 40, None, 40),
        (40, 32128, 40, 40),  # what is asked for wins over the config
    ],
)
def test_rows_in_the_folder(
    rows: int, said: int | None, asked: int | None, kept: int, tmp_path: Path
) -> None:
    file = write_state(tmp_path / "m.pt", narrow_state(rows))
    config = write_config(
        tmp_path / "c.json",
        **{"model_dim": 8, "head_dim": 4, "num_gqa_groups": 1, "ffn_dim_divisor": 8},
        vocab_size=said,
    )
    folder = from_corenet(file, tmp_path / "out", config=config, vocab_size=asked)
    assert load_args(folder).vocab_size == kept
    assert (folder / ROWS_FILE).exists() == (kept < rows)
    assert_same_weights(read(to_corenet(folder, tmp_path / "b.pt")), read(file))


@pytest.mark.usefixtures("small_presets")
@pytest.mark.parametrize(("rows", "kept"), [(32128, 32000), (32000, 32000), (50, 50)])
def test_a_preset_says_nothing_of_rows(rows: int, kept: int, tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", preset_state(rows))
    assert load_args(from_corenet(file, tmp_path / "out", preset="270M")).vocab_size == kept


def folder_of_32_rows(tmp_path: Path) -> Path:
    """From a file of 40 rows, with the other 8 kept."""
    file = write_state(tmp_path / "m.pt")
    config = write_config(tmp_path / "c.json")
    return from_corenet(file, tmp_path / "out", config=config, vocab_size=32)


@pytest.mark.parametrize("rows", [32, 48])
def test_without_kept_rows_the_vocabulary_stays_or_gets_zeros(
    rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of_32_rows(tmp_path)
    (folder / ROWS_FILE).unlink()
    caplog.clear()
    asked = None if rows == 32 else rows
    table = read(to_corenet(folder, tmp_path / "b.pt", vocab_size=asked))["token_embeddings.weight"]
    expected = read(tmp_path / "m.pt")["token_embeddings.weight"][:32]
    assert table.shape == (rows, 64)
    assert_same_weights({"": table[:32]}, {"": expected})
    assert not mx.any(table[32:]).item()
    assert ("16 vocabulary rows of zeros" in caplog.text) == (rows == 48)


def test_rows_can_be_left_out_or_added_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of_32_rows(tmp_path)
    whole = read(tmp_path / "m.pt")["token_embeddings.weight"]
    less = read(to_corenet(folder, tmp_path / "l.pt", vocab_size=32))["token_embeddings.weight"]
    assert_same_weights({"": less}, {"": whole[:32]})
    assert "are left out" in caplog.text
    more = read(to_corenet(folder, tmp_path / "g.pt", vocab_size=48))["token_embeddings.weight"]
    assert_same_weights({"": more[:40]}, {"": whole})
    assert not mx.any(more[40:]).item()


def test_a_vocabulary_that_corenets_configs_do_not_expect_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_state(tmp_path / "m.pt", narrow_state(32000))
    changes = {"model_dim": 8, "head_dim": 4, "num_gqa_groups": 1, "ffn_dim_divisor": 8}
    config = write_config(tmp_path / "c.json", **changes, vocab_size=32000)
    to_corenet(from_corenet(file, tmp_path / "out", config=config), tmp_path / "b.pt")
    assert "written as it is, 32000 rows" in caplog.text
    assert "--vocab-size 32128" in caplog.text


@pytest.mark.parametrize(("asked", "choices"), [(31, "give 32, 40"), (36, "give 32, 40")])
def test_a_size_that_would_lose_rows_is_refused(asked: int, choices: str, tmp_path: Path) -> None:
    folder = folder_of_32_rows(tmp_path)
    with pytest.raises(ValueError, match=f"would lose rows .* {choices} or more"):
        to_corenet(folder, tmp_path / "b.pt", vocab_size=asked)
    assert not (tmp_path / "b.pt").exists()


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = folder_of_32_rows(tmp_path)
    mx.save_safetensors(str(folder / ROWS_FILE), {TABLE: mx.zeros((8, 32))})
    with pytest.raises(ValueError, match=r"rows of another model: delete the file") as caught:
        to_corenet(folder, tmp_path / "b.pt")
    assert "[8, 32], expected [8, 64]" in str(caught.value)


# What does not fit


def refusal(tmp_path: Path, **settings: Any) -> str:
    """The one line that a conversion of ``m.pt`` ends with; nothing is written."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        from_corenet(tmp_path / "m.pt", tmp_path / "out", **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_a_wrong_config_is_named_with_counts_and_shapes(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    changes = {"num_transformer_layers": 3, "ffn_multipliers": 2.0}
    message = refusal(tmp_path, config=write_config(tmp_path / "c.json", **changes))
    assert "26 expected, 18 found" in message
    assert "8 missing: " in message
    assert "4 of another shape: transformer.layers.0.ffn.proj_1.weight is [64, 64]" in message
    assert "c.json" in message


def test_a_renamed_tensor_is_named_with_its_nearest(tmp_path: Path) -> None:
    state = corenet_state()
    state["layers.1.attn.qkv_projection.weight"] = state.pop("layers.1.attn.qkv_proj.weight")
    write_state(tmp_path / "m.pt", state)
    message = refusal(tmp_path, config=write_config(tmp_path / "c.json"))
    assert "1 missing: transformer.layers.1.attn.qkv_proj.weight (nearest in the file: " in message
    assert "1 unexpected: transformer.layers.1.attn.qkv_projection.weight" in message


def test_another_vocabulary_than_the_configs_names_the_flag(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    message = refusal(tmp_path, config=write_config(tmp_path / "c.json", vocab_size=32))
    assert "token_embeddings.weight is [40, 64], expected [32, 64]" in message
    assert "--vocab-size" in message


@pytest.mark.parametrize("asked", [0, 41])
def test_more_rows_than_the_file_has_are_refused(asked: int, tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    config = write_config(tmp_path / "c.json")
    assert "the 40 rows" in refusal(tmp_path, config=config, vocab_size=asked)


def test_unknown_shapes_call_for_a_config_or_preset(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    message = refusal(tmp_path)
    assert "18 tensors are those of none of the four published sizes" in message
    assert "--preset 270M, 450M, 1.1B or 3B" in message
    assert "--config" in message


def test_both_a_config_and_a_preset_are_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    assert "give one of them" in refusal(tmp_path, config=tmp_path / "c.json", preset="3B")


def test_an_unknown_preset_lists_those_there_are(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    assert "choose one of 270M, 450M, 1.1B, 3B" in refusal(tmp_path, preset="7B")


def test_another_kind_of_model_is_said(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt", {"model.layers.0.mlp.weight": mx.ones((2, 2))})
    assert "is it an OpenELM checkpoint" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "a: [1", "is not valid YAML"),
        ("c.yaml", "- 1\n- 2", "must hold a mapping, not a list"),
        ("c.json", "{", "is not valid JSON"),
        ("c.yaml", "model:\n  name: x", "no mapping at model.language_modeling"),
        ("c.yaml", "model.language_modeling.general_gpt: 3", "no mapping at model.language_mod"),
        ("c.json", "{}", "describes no model"),
        ("c.json", '{"vocab_size": 5}', "neither model_name nor model_dim"),
        ("c.json", '{"model_name": "OpenELM-7B"}', "no preset 'OpenELM-7B'"),
        ("c.json", '{"model_name": "OpenELM-3B", "head_dim": 3}', "head_dim cannot be set beside"),
        ("c.json", '{"model_type": "llama"}', "model_type is 'llama'"),
        ("c.json", '{"num_transformer_layers": 2, "model_dim": "x"}', "model_dim must be"),
    ],
)
def test_a_config_that_is_none_is_refused_by_file(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    write_state(tmp_path / "m.pt")
    (tmp_path / name).write_text(text)
    found = refusal(tmp_path, config=tmp_path / name)
    assert name in found
    assert message in found


def test_a_config_that_is_not_there_is_said(tmp_path: Path) -> None:
    write_state(tmp_path / "m.pt")
    assert "nowhere.yaml does not exist" in refusal(tmp_path, config=tmp_path / "nowhere.yaml")


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    state = corenet_state()
    state["transformer.norm.weight"] = state["norm.weight"] + 0
    write_state(tmp_path / "m.pt", state)
    assert "two tensors are transformer.norm.weight" in refusal(tmp_path, preset="270M")


def test_the_mapping_makes_the_model_that_the_config_helper_means() -> None:
    """Guards the two descriptions of the tests' small model against drifting apart."""
    args = ModelArgs.from_dict(general_gpt())
    assert args.ffn_dims == folder_makers.small_model(vocab_size=40).args.ffn_dims
