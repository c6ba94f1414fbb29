"""The exported program gives MLX's logits: every variant, interface and kind of weights."""

from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from folder_makers import small_model
from model_makers import apple_io, apple_model, model_of
from small_packages import small_package

from convert.coreml_client import Client
from convert.coreml_describe import describe
from convert.coreml_graph import build_program
from convert.coreml_package import weight_bytes, write_package
from convert.coreml_parameters import expected_bytes, stored_parameters
from convert.coreml_predictor import client_of
from convert.coreml_reference import reference_model
from convert.coreml_settings import ExportSettings, NormForm, Numerics
from convert.mil_eval import Package
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

INTERFACES: dict[str, dict[str, Any]] = {
    "static": {},
    "all logits": {"all_logits": True},
    "stateless": {"stateless": True},
    "flexible": {"flexible": True},
    "gpu": {"target": "gpu"},
    "ane": {"target": "ane"},
}
KINDS = ("fp16", "int8", "int4", "palette4", "palette6")
GRAPH = 5e-4  # of the largest logit: float16 constants such as E^-0.5 of an odd head size


def wide_model(seed: int = 0) -> Model:
    """Head size 32, as the Neural Engine wants it; unequal layers; queries in groups of two."""
    args = ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=64,
        head_dim=32,
        qkv_multipliers=(1.0, 2.0),
        ffn_multipliers=(0.5, 1.0),
        num_gqa_groups=2,
        ffn_dim_divisor=16,
        vocab_size=96,
        normalize_qk_projections=True,
        share_input_output_layers=True,
    )
    return model_of(args, seed)


def client(package: Path, precision: str = "float32") -> Client:
    return client_of(Package(package, precision=precision), describe(package))


def error(package: Path, reference: Model, precision: str = "float32") -> float:
    """Largest error of a padded prefill, single steps, and a second prefill, over the scale."""
    ids = np.random.default_rng(3).integers(0, reference.args.vocab_size, 26).tolist()
    want = np.array(reference(mx.array([ids]))[0])
    asked, found, rows = client(package, precision), [], []
    for count in (13, 1, 1, 9, 2):
        rows.append(asked.position + count - 1)
        found.append(asked.feed(ids[asked.position : asked.position + count]))
    return float(np.abs(np.stack(found) - want[rows]).max() / np.abs(want).max())


@pytest.mark.parametrize("interface", list(INTERFACES))
def test_every_interface_gives_the_models_logits(tmp_path: Path, interface: str) -> None:
    model = wide_model()
    package = small_package(tmp_path / "m.mlpackage", model, **INTERFACES[interface])
    reference = reference_model(model.args, stored_parameters(model, "fp16"), exponent=0)
    halved = interface == "stateless"  # its caches pass through the caller in float16
    assert error(package, reference) < (1e-3 if halved else GRAPH)
    assert error(package, reference, "native") < 0.01


@pytest.mark.parametrize("interface", list(INTERFACES))
def test_every_variant_of_apples_gives_apples_logits(
    tmp_path: Path, golden_model: str, interface: str
) -> None:
    model, _ = apple_model(golden_model)
    package = small_package(tmp_path / "m.mlpackage", model, **INTERFACES[interface])
    io = apple_io(golden_model)
    ids, want = io["input_ids"][0].tolist(), io["logits"][0]
    asked = client(package)
    got = [asked.feed(ids[:5]), *(asked.feed([token]) for token in ids[5:])]
    scale = np.abs(want).max()
    assert (
        np.abs(np.stack(got) - want[4:]).max() < 0.01 * scale
    )  # of which rounding weights to fp16 takes up to 0.007


def pairs() -> list[tuple[str, str]]:
    """Every variant and every kind of weights with some of the other; all: the benchmark below."""
    names = golden_set.models()
    return [
        (name, kind)
        for i, name in enumerate(names)
        for j, kind in enumerate(KINDS)
        if kind == "fp16" or (i - j) % 3 == 0
    ]


@pytest.mark.parametrize(("name", "kind"), pairs())
def test_every_variant_takes_every_kind_of_weights(tmp_path: Path, name: str, kind: str) -> None:
    model, _ = apple_model(name)
    package = small_package(tmp_path / "m.mlpackage", model, weights=kind)
    reference = reference_model(model.args, stored_parameters(model, kind), exponent=0)  # type: ignore[arg-type]
    assert error(package, reference) < GRAPH
    found, want = greedy(package, reference)
    assert found == want


def greedy(package: Path, reference: Model) -> tuple[list[int], list[int]]:
    """Eight tokens by the package and by the reference, each seeing its own."""
    asked, tokens = client(package), [1, 5, 9]
    logits = asked.feed(tokens)
    found = []
    for _ in range(8):
        found.append(int(logits.argmax()))
        logits = asked.feed(found[-1:])
    want: list[int] = []
    for _ in range(8):
        row = np.array(reference(mx.array([tokens + want]))[0, -1])
        want.append(int(row.argmax()))
    return found, want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interface", ["flexible", "ane"])
def test_kinds_and_interfaces_combine(tmp_path: Path, kind: str, interface: str) -> None:
    model = wide_model()
    package = small_package(tmp_path / "m.mlpackage", model, weights=kind, **INTERFACES[interface])
    reference = reference_model(model.args, stored_parameters(model, kind), exponent=0)  # type: ignore[arg-type]
    assert error(package, reference) < GRAPH


@pytest.mark.benchmark  # three minutes: all of the product that the tests above cut through
@pytest.mark.parametrize("name", golden_set.models())
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_kind_and_interface(tmp_path: Path, name: str, kind: str) -> None:
    model, _ = apple_model(name)
    reference = reference_model(model.args, stored_parameters(model, kind), exponent=0)  # type: ignore[arg-type]
    for interface, flags in INTERFACES.items():
        package = small_package(tmp_path / interface / "m.mlpackage", model, weights=kind, **flags)
        assert error(package, reference) < GRAPH, interface


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_codes_keep_the_quantised_models_logits(tmp_path: Path, bits: int) -> None:
    model = wide_model()
    nn.quantize(model, group_size=32, bits=bits)
    package = small_package(tmp_path / "m.mlpackage", model, weights="mlx")
    # fp16 scales and offsets move a weight by at most a tenth of a step (COREML.md, section 2)
    assert error(package, model) < 0.02
    reference = reference_model(model.args, stored_parameters(model, "mlx"), exponent=0)
    assert error(package, reference) < GRAPH


@pytest.mark.parametrize(("kind", "tied"), [("fp16", True), ("int8", False)])
def test_a_table_in_parts_gives_the_same_logits(tmp_path: Path, kind: Any, tied: bool) -> None:
    args = wide_model().args
    model = model_of(ModelArgs.from_dict({**args.to_dict(), "share_input_output_layers": tied}))
    stored = stored_parameters(model, kind, most_rows=40)
    assert stored.parts("token_embeddings") == [f"token_embeddings_part_{n}" for n in range(3)]
    settings = ExportSettings(context=64, prefill=8, weights=kind, target="ane")
    program = build_program(model.args, stored, settings, Numerics(norm="layer_norm"))
    package = tmp_path / "m.mlpackage"
    write_package(program, package, metadata=metadata(settings), about="test")
    assert error(package, reference_model(model.args, stored, exponent=0)) < GRAPH


def metadata(settings: ExportSettings) -> dict[str, str]:
    return {
        "openelm.interface": settings.interface,
        "openelm.context": str(settings.context),
        "openelm.prefill": str(settings.prefill),
    }


@pytest.mark.parametrize(
    ("norm", "kind"), [("fp32", "fp16"), ("max", "int8"), ("layer_norm", "fp16")]
)
def test_folding_a_residual_scale_changes_nothing(
    tmp_path: Path, norm: NormForm, kind: Any
) -> None:
    model = wide_model()
    settings = ExportSettings(context=64, prefill=8, weights=kind)
    stored = stored_parameters(model, kind, exponent=3)
    program = build_program(model.args, stored, settings, Numerics(residual_exponent=3, norm=norm))
    package = tmp_path / "m.mlpackage"
    write_package(program, package, metadata=metadata(settings), about="test")
    plain = reference_model(model.args, stored_parameters(model, kind), exponent=0)
    assert error(package, plain) < GRAPH


def test_two_functions_store_their_weights_once(tmp_path: Path) -> None:
    model = wide_model()
    for kind in KINDS:
        package = small_package(tmp_path / f"{kind}.mlpackage", model, weights=kind)
        stored = stored_parameters(model, kind)  # type: ignore[arg-type]
        expected = expected_bytes(model.args, stored, 64)
        assert expected < weight_bytes(package) < 1.1 * expected  # alignment to 64 bytes


def test_two_exports_are_equal_byte_for_byte(tmp_path: Path) -> None:
    model = wide_model()
    packages = [small_package(tmp_path / f"{n}.mlpackage", model) for n in range(2)]
    first, second = ({f.relative_to(p): f.read_bytes() for f in files(p)} for p in packages)
    assert first == second


def files(package: Path) -> list[Path]:
    return [path for path in package.rglob("*") if path.is_file()]


def test_torch_is_never_imported(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from small_packages import small_package; from test_coreml_graph import "
        "wide_model; from pathlib import Path; small_package(Path(sys.argv[1]), wide_model()); "
        "print([m for m in ('torch', 'tensorflow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.mlpackage")],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}"},
    )
    assert done.stdout.strip() == "[]"


def test_a_value_beyond_float16_in_a_weight_is_refused_by_name() -> None:
    model = small_model()
    weight = model.layers[0].ffn.proj_2.weight
    model.layers[0].ffn.proj_2.weight = weight.at[0, 0].add(1e6)
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.proj_2\.weight holds 1e\+06"):
        stored_parameters(model, "fp16")
