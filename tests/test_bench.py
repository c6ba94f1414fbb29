"""``openelm bench``: what it counts is right, and what it prints and writes agrees."""

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import run_here
from mlx.utils import tree_flatten
from slow_params import slow

from openelm_mlx import bench, cli
from openelm_mlx.bench_cases import CASES
from openelm_mlx.bench_run import measure
from openelm_mlx.bench_shared import OURS, STOCK, Bench, Case
from openelm_mlx.cache import make_cache
from openelm_mlx.checkpoint import load, save_model
from openelm_mlx.decoding import EagerStep
from openelm_mlx.graph_count import count_kernels
from openelm_mlx.model import Model, ModelArgs

COMPILES = os.environ.get("MLX_DISABLE_COMPILE") is None


def make_bench(layers: int = 2, *, against: bool = False, vocab: int = 99, **config: Any) -> Bench:
    args = ModelArgs.from_scaling(
        num_transformer_layers=layers,
        model_dim=64,
        head_dim=16,
        vocab_size=vocab,
        ffn_dim_divisor=32,
        **config,
    )
    mx.random.seed(0)
    model = Model(args)
    mx.eval(model.parameters())
    model.eval()
    return Bench(model=model, name="tiny", against=against, prompt_tokens=9, new_tokens=4, trials=2)


def make_quantised(*, against: bool = False, vocab: int = 96) -> Bench:
    settings = {"group_size": 32, "bits": 4, "mode": "affine"}
    bench = make_bench(against=against, vocab=vocab, extra={"quantization": settings})
    nn.quantize(bench.model, **settings)
    mx.eval(bench.model.parameters())
    return bench


@pytest.mark.parametrize("layers", [1, 3])
def test_kernels_of_a_token_are_thirteen_a_layer_and_four(layers: int) -> None:
    """Norms, projections, QK-norm and weight, RoPE, cache writes, attention, gated FFN."""
    bench = make_bench(layers)
    caches = make_cache(layers)
    mx.eval(bench.model(mx.array([[1, 2, 3]]), caches))
    counts = count_kernels(EagerStep(bench.model, caches), caches)
    spelt_out = 0 if COMPILES else 2  # sigmoid, product, product in place of one fused kernel
    assert sum(counts.values()) == (13 + spelt_out) * layers + 4
    assert counts["SliceUpdate"] == 2 * layers
    assert counts["AddMM"] == 2 * layers


def test_fast_kernels_are_as_before_after_counting() -> None:
    before = mx.fast.rms_norm, mx.fast.rope, mx.fast.scaled_dot_product_attention
    measure(CASES["kernels"], make_bench())
    assert (mx.fast.rms_norm, mx.fast.rope, mx.fast.scaled_dot_product_attention) == before


def test_ratios_say_how_many_times_as_good_ours_is() -> None:
    values = {OURS: iter([9.0, 2.0, 4.0]), STOCK: iter([9.0, 6.0, 6.0])}

    def case(higher: bool) -> Case:
        return Case(
            title="x {prompt}",
            unit="s",
            higher_is_better=higher,
            prepare=lambda _: {k: lambda k=k: next(values[k]) for k in values},
        )

    ours, stock = measure(case(False), make_bench())
    assert (ours["median"], ours["low"], ours["high"]) == (3.0, 2.0, 4.0)  # the first is warm-up
    assert ours["ratio"] == 2.0
    assert stock["ratio"] is None
    assert ours["case"] == "x 9"


@pytest.mark.parametrize(
    "name",
    [
        *("host", "decode", "memory"),
        *slow("prefill-512", "load", "lookup-new", "lookup-copies"),
    ],
)
def test_every_case_of_generation_gives_positive_numbers(name: str) -> None:
    for row in measure(CASES[name], make_bench()):
        assert row["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CASES) - {"cold"}))
def test_every_case_runs_beside_mlx_lm(name: str) -> None:
    few: dict[str, Any] = {"trials": 1} if name.startswith(("lora", "full")) else {}
    rows = measure(CASES[name], replace(make_bench(against=True), **few))
    assert all(row["median"] > 0 for row in rows)
    if CASES[name].reference == STOCK:
        assert STOCK in [row["who"] for row in rows]


_CCE = """
import mlx.core as mx
import mlx.nn as nn

def make_chunked_cross_entropy_loss(weight_is_frozen):
    def loss(hidden, weight, targets):
        return nn.losses.cross_entropy({factor} * hidden @ weight.T, targets)
    return loss, False
"""


@pytest.mark.parametrize("right", [True, False])
def test_another_chunked_loss_stands_beside_ours_if_it_is_one(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "unsloth_zoo" / "mlx" / "cce"
    folder.mkdir(parents=True)
    (tmp_path / "unsloth_zoo" / "__init__.py").write_text("raise ImportError('wants PyTorch')")
    (folder / "__init__.py").write_text(_CCE.format(factor=1 if right else 2))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "openelm_bench_mlx_cce", raising=False)
    try:
        if right:
            rows = measure(CASES["loss-full-memory"], make_bench(against=True))
            assert [row["who"] for row in rows] == [OURS, STOCK, "mlx-cce"]
        else:
            with pytest.raises(ValueError, match="gradients of mlx-cce differ from ours by"):
                measure(CASES["loss-memory"], make_bench(against=True))
    finally:
        sys.modules.pop("openelm_bench_mlx_cce", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "load", "lora-memory"])
def test_a_quantised_model_runs_beside_mlx_lm_with_the_same_weights(name: str) -> None:
    bench = replace(make_quantised(against=True), trials=1)
    rows = measure(CASES[name], bench)
    assert STOCK in [row["who"] for row in rows]
    ids = mx.array([[5, 6, 7]])
    assert mx.allclose(bench.stock(ids), bench.model(ids), atol=1e-5)


def test_full_training_of_a_quantised_model_is_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert measure(CASES["full-memory"], make_quantised()) == []
    assert "quantised weights cannot train" in caplog.text


@pytest.mark.parametrize("bits", [None, 4])
def test_a_saved_model_speaks_only_tokens_of_the_small_tokenizer(bits: int | None) -> None:
    bench = make_quantised(vocab=512) if bits else make_bench(vocab=512)
    before = bench.model(mx.array([[5, 6]]))
    CASES["load"].prepare(bench)
    assert bench.folder is not None
    saved, tokenizer = load(bench.folder / "model")
    assert tokenizer is not None
    logits = saved(mx.array([[5, 6]]))
    assert mx.abs(logits[..., tokenizer.vocab_size :]).max().item() == 0
    assert mx.array_equal(bench.model(mx.array([[5, 6]])), before)


def test_a_model_that_mlx_lm_computes_otherwise_is_not_set_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_bench(ffn_with_glu=False).model
    save_model(model, tmp_path / "plain")
    words = ["bench", "--model", tmp_path / "plain", "--cases", "kernels"]
    refused = run_here(capsys, *words, "--against", "mlx_lm")
    assert "mlx_lm runs another model: it builds a gated FFN" in refused.error
    assert run_here(capsys, *words).code == 0


def test_the_file_holds_what_the_table_shows(
    complete_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    arguments = ["bench", "--model", str(complete_dir), "--cases", "kernels", "--output", str(out)]
    assert cli.main(arguments) == 0
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    printed = capsys.readouterr().out
    assert f"{row['median']:.4g}" in printed
    assert row["values"] == [row["median"]]
    assert report["machine"]["versions"]["mlx"]
    assert (report["dtype"], report["model"]) == ("float32", str(complete_dir))
    assert report["command"] == f"openelm bench --model {complete_dir} --cases kernels"
    if mx.default_device().type != mx.gpu:
        assert "not measured on a CPU" in printed
    assert cli.main(arguments) == 1
    assert "--overwrite" in capsys.readouterr().err


def test_the_flags_name_every_case() -> None:
    assert list(bench.CASES) == list(CASES)


def test_cases_of_the_start_share_one_saved_model_that_goes_with_the_bench() -> None:
    setting = make_bench()
    assert CASES["load"].prepare(setting)[OURS]() > 0
    folder = setting.folder
    assert folder is not None
    CASES["cold"].prepare(setting)
    assert setting.folder == folder
    assert (folder / "model" / "config.json").is_file()
    del setting
    gc.collect()
    assert not folder.exists()


def test_peak_memory_holds_at_least_the_weights() -> None:
    (row,) = measure(CASES["memory"], make_bench())[:1]
    weights = sum(array.nbytes for _, array in tree_flatten(make_bench().model.parameters()))
    assert row["median"] >= weights / 1e9


@pytest.mark.slow
def test_a_chart_of_the_numbers_is_drawn_beside_the_file(
    complete_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    chart = tmp_path / "bench.png"
    arguments = ["bench", "--model", str(complete_dir), "--cases", "kernels", "--plot", str(chart)]
    assert cli.main(arguments) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == str(chart)
    assert cli.main(arguments) == 1
    assert "--overwrite" in capsys.readouterr().err
