"""Layer-wise scaling, published sizes and config.json, against numbers from Apple's code."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_set
import numpy as np
import pytest
import reference

from openelm_mlx.config import ModelArgs
from openelm_mlx.scaling import make_divisible, per_layer

Golden = Callable[[str], Path]

TABLE = golden_set.read_json(golden_set.CUT / "config_table.json")
PRESETS = golden_set.read_json(golden_set.CUT / "presets.json")
SIZES = ("270M", "450M", "1_1B", "3B")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# Widths


@pytest.mark.parametrize("case", TABLE["configs"], ids=range(len(TABLE["configs"])))
def test_odd_configs_get_the_widths_that_corenet_gives(case: dict[str, Any]) -> None:
    args = ModelArgs(**case["config"])
    assert list(args.num_query_heads) == case["num_query_heads"]
    assert list(args.num_kv_heads) == case["num_kv_heads"]
    assert list(args.ffn_multipliers) == case["ffn_multipliers"]
    assert args.ffn_dims == case["ffn_intermediate_dims"]
    again = ModelArgs.from_dict(json.loads(json.dumps(args.to_dict())))
    assert again.to_dict() == args.to_dict()


def test_the_table_of_odd_configs_is_whole() -> None:
    assert len(TABLE["configs"]) == 44


@pytest.mark.parametrize("case", TABLE["make_divisible"], ids=lambda c: f"{c['v']}/{c['divisor']}")
def test_make_divisible_at_its_corners(case: dict[str, Any]) -> None:
    assert make_divisible(case["v"], case["divisor"]) == case["result"]


@pytest.mark.parametrize("case", TABLE["numpy_vs_python_round_disagreements"])
def test_multipliers_are_rounded_as_numpy_rounds(case: dict[str, Any]) -> None:
    found = per_layer("qkv_multipliers", [case["lo"], case["hi"]], case["n"])
    for index, numpy_value, python_value in case["index_numpy_round_python_round"]:
        assert found[index] == numpy_value != python_value


def test_every_pair_and_depth_is_rounded_as_numpy_rounds() -> None:
    for low, high in ((0.5, 1.0), (0.5, 4.0), (0.25, 0.75), (0.3, 2.7), (1.0, 3.5), (4.0, 0.5)):
        for n in range(1, 65):
            expected = np.round(np.linspace(low, high, n), 2).tolist()
            assert per_layer("ffn_multipliers", (low, high), n) == expected


def test_random_configs_agree_with_the_reference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        config = {
            "num_transformer_layers": int(rng.integers(1, 40)),
            "model_dim": int(rng.integers(1, 40)) * 16,
            "head_dim": int(rng.choice([2, 8, 16, 80, 128])),
            "num_gqa_groups": int(rng.integers(1, 9)),
            "qkv_multipliers": rng.uniform(0.1, 2, 2).tolist(),
            "ffn_multipliers": rng.uniform(0.1, 5, 2).tolist(),
            "ffn_dim_divisor": int(rng.choice([1, 8, 24, 100, 256])),
        }
        args = ModelArgs(**config)
        sizes = list(zip(args.num_query_heads, args.num_kv_heads, args.ffn_dims, strict=True))
        assert sizes == reference.layer_sizes(config)


# Published sizes


@pytest.mark.parametrize("size", SIZES)
def test_presets_have_apples_layers_and_exact_parameter_counts(size: str) -> None:
    golden = PRESETS[f"OpenELM-{size}"]
    args = ModelArgs.preset(size)
    assert list(args.num_query_heads) == golden["num_query_heads"]
    assert list(args.num_kv_heads) == golden["num_kv_heads"]
    assert list(args.ffn_multipliers) == golden["ffn_multipliers_rounded"]
    assert args.ffn_dims == golden["ffn_intermediate_dims"]
    for name, value in golden["config"].items():
        ours = getattr(args, name)
        assert (list(ours) if isinstance(ours, tuple) else ours) == value, name
    for source in ("hf_release", "corenet_pretraining_yaml"):
        wide = args.with_vocab_size(golden[source]["vocab_size"])
        assert wide.num_parameters == golden[source]["num_parameters"]
        assert wide == ModelArgs.preset(size, vocab_size=wide.vocab_size)


@pytest.mark.parametrize(
    ("size", "published"), [("270M", 16128), ("450M", 23296), ("1.1B", 43264), ("3B", 83968)]
)
def test_kv_cache_bytes_a_token(size: str, published: int) -> None:
    assert ModelArgs.preset(size).kv_bytes_per_token() == published
    assert ModelArgs.preset(size).kv_bytes_per_token(4) == 2 * published


@pytest.mark.parametrize(
    "name",
    ["1.1B", "1_1B", "1.1b", "OpenELM-1_1B", "apple/OpenELM-1_1B", "apple/OpenELM-1_1B-Instruct"],
)
def test_preset_spellings(name: str) -> None:
    assert ModelArgs.preset(name) == ModelArgs.preset("1.1B")


@pytest.mark.parametrize("name", ["7B", "", "270", "apple/OpenELM"])
def test_an_unknown_preset_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match=r"270M, 450M, 1\.1B, 3B") as error:
        ModelArgs.preset(name)
    assert repr(name) in str(error.value)


def test_from_scaling_defaults_are_those_of_the_published_sizes() -> None:
    args = ModelArgs.from_scaling(num_transformer_layers=16, model_dim=1280, head_dim=64)
    assert args == ModelArgs.preset("270M")


# config.json


def test_config_json_of_270m_is_apples_key_for_key(golden: Golden) -> None:
    config = golden_set.read_json(golden("config_270M_hf.json"))
    assert ModelArgs.from_dict(config).to_dict() == config
    who_wrote_it = {"auto_map", "torch_dtype", "transformers_version"}
    bare = {k: v for k, v in config.items() if k not in who_wrote_it}
    assert ModelArgs.preset("270M").to_dict() == bare


def test_config_json_of_tiny_models_is_apples_key_for_key(
    golden: Golden, golden_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = golden_set.read_json(golden(f"hf/{golden_model}/config.json"))
    args = ModelArgs.from_dict(config)
    assert args.to_dict() == config
    assert args.num_parameters == _models()[golden_model]["num_params"]
    assert warnings_in(caplog) == []


def _models() -> Any:
    return golden_set.read_json(golden_set.CUT / "models.json")


@pytest.mark.parametrize("name", _models())
def test_resolved_widths_of_tiny_models(name: str) -> None:
    model = _models()[name]
    args = ModelArgs(**model["config"])
    assert list(args.num_query_heads) == model["resolved"]["num_query_heads"]
    assert list(args.num_kv_heads) == model["resolved"]["num_kv_heads"]
    assert args.ffn_dims == model["resolved"]["ffn_intermediate_dims"]
    assert args.num_parameters == model["num_params"]


def test_absent_keys_take_apples_defaults() -> None:
    args = ModelArgs.from_dict({})
    assert {k: getattr(args, k) for k in reference.DEFAULTS} == {
        **reference.DEFAULTS,
        "qkv_multipliers": None,  # stands for 1.0, so that lists without it contradict nothing
        "ffn_multipliers": (4.0,) * 12,
    }
    assert args.num_query_heads == args.num_kv_heads == (16,) * 12  # 2048 / 128
    assert args.ffn_dims == [8192] * 12
    apple = {
        "max_context_length": 2048,
        "normalization_layer_name": "rms_norm",
        "rope_max_length": 4096,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-6,
    }
    assert {k: getattr(args, k) for k in apple} == apple


def test_null_means_absent() -> None:
    assert ModelArgs.from_dict({"num_query_heads": None, "ffn_multipliers": None}) == ModelArgs()


def small(**changes: Any) -> dict[str, Any]:
    """Two layers with heads [2, 4] and kv heads [1, 2]."""
    config = {
        "num_transformer_layers": 2,
        "model_dim": 32,
        "head_dim": 8,
        "num_gqa_groups": 2,
        "qkv_multipliers": [0.5, 1.0],
        "ffn_multipliers": [0.5, 1.0],
        "ffn_dim_divisor": 8,
        "vocab_size": 61,
    }
    return {k: v for k, v in {**config, **changes}.items() if v != "absent"}


@pytest.mark.parametrize(
    ("multipliers", "heads"), [("absent", (4, 4)), (1.0, (4, 4)), (2, (8, 8)), ([0.5, 1.0], (2, 4))]
)
def test_qkv_multipliers_may_be_absent_a_number_or_a_pair(
    multipliers: Any, heads: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    args = ModelArgs.from_dict(small(qkv_multipliers=multipliers))
    assert args.num_query_heads == heads
    assert ModelArgs.from_dict(args.to_dict()).to_dict() == args.to_dict()
    assert warnings_in(caplog) == []


def test_lists_without_multipliers_are_taken_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = small(qkv_multipliers="absent", num_query_heads=[6, 2], num_kv_heads=[3, 1])
    args = ModelArgs.from_dict(given)
    assert (args.num_query_heads, args.num_kv_heads) == ((6, 2), (3, 1))
    assert warnings_in(caplog) == []


def test_kv_heads_alone_fix_the_query_heads() -> None:
    args = ModelArgs.from_dict(small(qkv_multipliers="absent", num_kv_heads=[3, 1]))
    assert args.num_query_heads == (6, 2)


@pytest.mark.parametrize(
    "lists",
    [
        {"num_query_heads": [6, 2], "num_kv_heads": [3, 1]},  # against qkv_multipliers
        {"num_query_heads": [2, 4], "num_kv_heads": [2, 2]},  # against num_gqa_groups
        {"num_query_heads": [8, 8], "num_kv_heads": [2, 8]},  # against both
    ],
)
def test_lists_win_over_contradicting_multipliers_with_one_warning(
    lists: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    args = ModelArgs.from_dict(small(**lists))
    assert {k: list(getattr(args, k)) for k in lists} == lists
    (warning,) = warnings_in(caplog)
    assert "contradict" in warning
    assert "lists are used" in warning
    args.with_vocab_size(99)
    assert len(warnings_in(caplog)) == 1  # said once, not once a copy


def test_unknown_keys_are_kept_and_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"sliding_window": 7, "attention_bias": False}
    args = ModelArgs.from_dict(small(**extra))
    (warning,) = warnings_in(caplog)
    assert "attention_bias, sliding_window" in warning
    assert args.to_dict().items() >= extra.items()


def test_keys_that_say_nothing_of_the_architecture_are_kept_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extra = {"torch_dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4}}
    args = ModelArgs.from_dict(small(**extra))
    assert warnings_in(caplog) == []
    assert args.to_dict().items() >= extra.items()


def test_untied_configs_say_so_in_transformers_words() -> None:
    untied = ModelArgs.from_dict(small(share_input_output_layers=False))
    assert untied.to_dict()["tie_word_embeddings"] is False
    tied = ModelArgs.from_dict(small(share_input_output_layers=True))
    assert "tie_word_embeddings" not in tied.to_dict()
    assert untied.num_parameters - tied.num_parameters == 61 * 32


def test_other_norm_eps_is_written_for_mlx_lm() -> None:
    assert ModelArgs.from_dict(small(rms_norm_eps=1e-5)).to_dict()["rms_norm_eps"] == 1e-5
    assert "rms_norm_eps" not in ModelArgs.from_dict(small()).to_dict()


def test_several_stop_tokens_survive() -> None:
    args = ModelArgs.from_dict(small(eos_token_id=[2, 5]))
    assert args.to_dict()["eos_token_id"] == [2, 5]
