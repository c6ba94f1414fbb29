"""Where a folder runs: checked against the other runtimes where they are at hand."""

from typing import Any

import golden_set
import numpy as np
import pytest
from folder_makers import IDS, logits, small_config, weights_of
from model_makers import random_model

from openelm_mlx.compatibility import where_it_runs
from openelm_mlx.config import ModelArgs

APPLE = "transformers (Apple's code)"
SIZES = ["270M", "450M", "1.1B", "3B"]


def reasons(quantization: dict[str, Any] | None = None, **changes: Any) -> dict[str, str | None]:
    return where_it_runs(ModelArgs.from_dict({**small_config(), **changes}), quantization)


@pytest.mark.parametrize("size", SIZES)
def test_the_published_sizes_run_everywhere(size: str) -> None:
    assert set(where_it_runs(ModelArgs.preset(size)).values()) == {None}


def test_apples_own_folders_run_in_apples_code(golden_model: str) -> None:
    folder = golden_set.find(f"hf/{golden_model}")
    assert folder is not None
    args = ModelArgs.from_dict(golden_set.read_json(folder / "config.json"))
    assert where_it_runs(args)[APPLE] is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"ffn_with_glu": False}, "gated"), ({"activation_fn_name": "gelu"}, "swish, silently")],
)
def test_what_mlx_lm_ignores_is_said(changes: dict[str, Any], word: str) -> None:
    found = reasons(**changes)
    assert word in str(found["mlx_lm"])
    assert word in str(found["mlx-swift-lm"])
    assert found[APPLE] is None
    assert found["openelm_mlx"] is None


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"share_input_output_layers": False}])
def test_mlx_lm_agrees_where_nothing_is_said(changes: dict[str, Any]) -> None:
    openelm = pytest.importorskip("mlx_lm.models.openelm")
    config = {k: v for k, v in small_config(**changes).items() if k != "architectures"}
    assert where_it_runs(ModelArgs.from_dict(config))["mlx_lm"] is None
    ours = random_model(config)
    stock = openelm.Model(openelm.ModelArgs.from_dict(config))
    stock.load_weights(list(weights_of(ours).items()), strict=True)
    np.testing.assert_allclose(logits(stock, IDS), logits(ours, IDS), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_mlx_lm_is_wrong_where_it_is_said() -> None:
    openelm = pytest.importorskip("mlx_lm.models.openelm")
    config = {
        k: v for k, v in small_config(activation_fn_name="gelu").items() if k != "architectures"
    }
    ours = random_model(config)
    stock = openelm.Model(openelm.ModelArgs.from_dict(config))
    stock.load_weights(list(weights_of(ours).items()), strict=True)
    assert np.abs(logits(stock, IDS) - logits(ours, IDS)).max() > 0.01


def test_widths_that_follow_no_multipliers_do_not_run_in_apples_code() -> None:
    found = reasons(num_query_heads=[4, 2], num_kv_heads=[2, 1])
    assert "recomputes the heads" in str(found[APPLE])
    assert found["mlx_lm"] is None


def test_another_epsilon_is_said() -> None:
    assert "RMSNorm uses 1e-6, the config says 1e-05" in str(reasons(rms_norm_eps=1e-5)[APPLE])


def test_swift_computes_its_own_widths_and_head() -> None:
    assert "recomputes all widths" in str(reasons(ffn_multipliers=[1.0, 1.0])["mlx-swift-lm"])
    untied = reasons(share_input_output_layers=False)["mlx-swift-lm"]
    assert "untied head" in str(untied)


def test_quantised_weights_stay_with_mlx() -> None:
    for mode in ("affine", "mxfp4"):
        found = reasons({"bits": 4, "group_size": 32, "mode": mode})
        assert "dequantise first" in str(found[APPLE])
        assert found["mlx_lm"] is None
        coreml = found["Core ML (openelm convert coreml)"]
        assert coreml is None if mode == "affine" else f"no {mode} weights" in str(coreml)
