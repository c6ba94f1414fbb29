"""Verification sees what is wrong with a package: faults planted in the graph, one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from folder_makers import small_folder, small_model

from convert import coreml_graph, coreml_guard
from convert.coreml import export
from convert.coreml_caches import PackedCache
from convert.coreml_layers import Layers
from convert.coreml_settings import Numerics
from convert.coreml_verification import Verification
from convert.coreml_verify import verify
from openelm_mlx.model import Model

Patch = pytest.MonkeyPatch


def lost_writes(patch: Patch) -> None:
    """Each layer updates the state as it was read at first, not as the last layer left it."""
    update = PackedCache.update

    def forgetful(self: Any, index: int, keys: Any, values: Any) -> Any:
        before = dict(self._now)
        out = update(self, index, keys, values)
        self._now = before
        return out

    patch.setattr(PackedCache, "update", forgetful)


def read_twice(patch: Patch) -> None:
    """A second read of the state with no write between."""
    begin = PackedCache.__init__

    def twice(self: Any, inputs: Any, *rest: Any, **settings: Any) -> None:
        begin(self, inputs, *rest, **settings)
        again = self._mb.read_state(input=inputs["keyCache"], name="keyCache_again")
        self._now["keyCache"] = again

    patch.setattr(PackedCache, "__init__", twice)


def mask_off_by_one(patch: Patch) -> None:
    """Each token sees the one after it."""
    rows = coreml_graph._FunctionBuilder._causal_rows

    def later(self: Any, start: Any) -> Any:
        return rows(self, self._mb.add(x=start, y=np.int32([1]), name="start_too_late"))

    patch.setattr(coreml_graph._FunctionBuilder, "_causal_rows", later)


def rope_sign(patch: Patch) -> None:
    """Rotated the other way."""
    tables = coreml_graph._FunctionBuilder._tables

    def turned(self: Any, which: str) -> np.ndarray:
        return tables(self, which) * np.float16(-1 if which == "sin" else 1)

    patch.setattr(coreml_graph._FunctionBuilder, "_tables", turned)


def wrong_head_split(patch: Patch) -> None:
    """Query heads are grouped in steps, not in runs: head h uses kv head h mod K."""
    attend = Layers._attend

    def strided(self: Any, queries: Any, keys: Any, *rest: Any) -> Any:
        mb, (_, K, rows, E) = self._mb, queries.shape
        groups = self._args.num_gqa_groups
        name = rest[-1]
        heads = mb.reshape(x=queries, shape=[groups, K, rows // groups, E], name=f"{name}_g")
        heads = mb.transpose(x=heads, perm=[1, 0, 2, 3], name=f"{name}_t")
        return attend(
            self, mb.reshape(x=heads, shape=[1, K, rows, E], name=f"{name}_w"), keys, *rest
        )

    patch.setattr(Layers, "_attend", strided)


def swapped_norms(patch: Patch) -> None:
    """The norm of queries on keys, and the other way round."""

    def swapped(self: Any, name: str, H: int, K: int) -> np.ndarray:
        vectors = self._parameters.vectors
        rows = [vectors[f"{name}_k_norm"]] * H + [vectors[f"{name}_q_norm"]] * K
        return np.stack(rows)[None, :, None, :]

    patch.setattr(Layers, "_qk_weight", swapped)


def wrong_weights(patch: Patch) -> None:
    """One row of one matrix is another's."""
    write = Layers.matrix

    def damaged(self: Any, name: str) -> Any:
        var = write(self, name)
        if name == "layers_1_ffn_proj_2":
            var.op.outputs[0].val[3] = var.op.outputs[0].val[4]
        return var

    patch.setattr(Layers, "matrix", damaged)


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "state written from an old read": (lost_writes, "the graph differs from MLX"),
    "state read twice": (read_twice, "read twice without a write"),
    "mask off by one": (mask_off_by_one, "the graph differs from MLX"),
    "RoPE sign": (rope_sign, "the graph differs from MLX"),
    "wrong head split": (wrong_head_split, "the graph differs from MLX"),
    "swapped q and k norm": (swapped_norms, "the graph differs from MLX"),
    "a wrong row of weights": (wrong_weights, "the graph differs from MLX"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with QK norm whose weights are far from 1, and two layers of unequal heads."""
    model = small_model(normalize_qk_projections=True, vocab_size=64)
    return small_folder(tmp_path_factory.mktemp("models") / "m", None, model)


def planted(folder: Path, output: Path, fault: Callable[[Patch], None]) -> Verification:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        export(folder, output, context=64, prefill=8, weights="fp16", check=False)
    return verify(output, folder)


@pytest.mark.slow
def test_an_honest_package_holds(folder: Path, tmp_path: Path) -> None:
    result = planted(folder, tmp_path / "m.mlpackage", lambda patch: None)
    assert result.holds
    assert result.level == "L1"
    assert result.float32 is not None
    assert result.float32.expected == result.float32.found
    assert {p.tokens for p in result.float32.prompts} == {1, 5, 9, 13}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_caught(folder: Path, tmp_path: Path, name: str) -> None:
    fault, said = FAULTS[name]
    result = planted(folder, tmp_path / "m.mlpackage", fault)
    assert not result.holds
    assert any(said in text for text in result.faults), result.faults


def loud_folder(path: Path) -> Path:
    """A residual stream of some 3e5, as OpenELM's own (swift-transformers #95)."""
    model = small_model(share_input_output_layers=False)
    ffn = model.layers[1].ffn
    ffn.proj_2.weight = ffn.proj_2.weight * (3e5 / largest_residual(model))
    return small_folder(path, None, model)


def largest_residual(model: Model) -> float:
    x = model.transformer.token_embeddings(mx.arange(64)[None])
    for layer in model.layers:
        x = layer(x, "causal")
    return float(mx.abs(x).max())


@pytest.mark.slow
def test_an_overflow_of_float16_is_caught_and_its_layer_named(tmp_path: Path) -> None:
    folder = loud_folder(tmp_path / "loud")

    def unguarded(patch: Patch) -> None:
        patch.setattr("convert.coreml_export.choose_numerics", lambda ranges, settings: Numerics())

    result = planted(folder, tmp_path / "m.mlpackage", unguarded)
    assert not result.holds
    assert any("float16" in text and "layers_1_ffn" in text for text in result.faults)
    with pytest.MonkeyPatch.context() as patch:
        unguarded(patch)
        with pytest.raises(ValueError, match=r"not kept: .*layers_1_ffn"):
            export(folder, tmp_path / "n.mlpackage", context=64, prefill=8)
    assert not (tmp_path / "n.mlpackage").exists()
    assert not (tmp_path / "n-bundle").exists()


@pytest.mark.slow
def test_a_residual_of_hundreds_of_thousands_is_folded_and_holds(tmp_path: Path) -> None:
    folder = loud_folder(tmp_path / "loud")
    made = export(folder, tmp_path / "m.mlpackage", context=64, prefill=8, weights="fp16")
    assert made.numerics.residual_exponent >= 4
    assert made.numerics.norm == "max"
    assert made.verification is not None
    assert made.verification.holds


def test_values_are_measured_as_a_plain_forward_pass_gives_them(folder: Path) -> None:
    from convert.quantize_check import make_sample
    from openelm_mlx.checkpoint import load_model

    model = load_model(folder)
    sample = make_sample(None, None, model.args.vocab_size)
    ranges = coreml_guard.measure_ranges(model, sample)
    x = model.transformer.token_embeddings(mx.array(sample.documents))
    for index, layer in enumerate(model.layers):
        x = layer(x, "causal")
        found = ranges.residual[f"layer {index}, after feed-forward"]
        assert found == pytest.approx(float(mx.abs(x).max()), rel=1e-4)
    logits = mx.abs(model(mx.array(sample.documents))).max()
    assert ranges.plain["logits"] == pytest.approx(float(logits), rel=1e-4)


def test_a_damaged_model_is_refused_with_its_layer() -> None:
    from convert.quantize_check import make_sample

    model = small_model()
    model.layers[1].ffn.proj_2.weight = mx.full(model.layers[1].ffn.proj_2.weight.shape, np.nan)
    with pytest.raises(ValueError, match="nan in layer 1, after feed-forward"):
        coreml_guard.measure_ranges(model, make_sample(None, None, 320))


@pytest.mark.slow
def test_other_weights_than_the_package_was_made_from_are_told(
    folder: Path, tmp_path: Path
) -> None:
    model = small_model(normalize_qk_projections=True, vocab_size=64)
    model.transformer.norm.weight = 2 * model.transformer.norm.weight
    other = small_folder(tmp_path / "other", None, model)
    export(folder, tmp_path / "m.mlpackage", context=64, prefill=8, check=False)
    result = verify(tmp_path / "m.mlpackage", other)
    assert any("made from other weights" in text for text in result.faults)
