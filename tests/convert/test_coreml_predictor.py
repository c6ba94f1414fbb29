"""Who computes a package: the evaluator's face, Core ML's, and the client of each interface."""

import platform
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from folder_makers import small_model
from small_packages import small_package

from convert import coreml_predictor
from convert.coreml_client import Client
from convert.coreml_describe import describe
from convert.coreml_predictor import CoreMLPackage, client_of, open_package
from convert.mil_eval import Package
from openelm_mlx.model import Model

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

FORMS: dict[str, dict[str, Any]] = {
    "static": {"all_logits": True},
    "stateless": {"stateless": True, "all_logits": True},
    "flexible": {"flexible": True},
    "ane": {"target": "ane"},
}
IDS = np.random.default_rng(5).integers(0, 320, 64).tolist()
elsewhere = pytest.mark.skipif(platform.system() == "Darwin", reason="Core ML itself is here")


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(head_dim=32)


class Packages(dict[str, Path]):
    """A package of each form, written when first asked for."""

    def __init__(self, home: Path, model: Model) -> None:
        self.home, self.model = home, model

    def __missing__(self, form: str) -> Path:
        path = self.home / f"{form}.mlpackage"
        self[form] = small_package(path, self.model, **FORMS[form])
        return path


@pytest.fixture(scope="module")
def packages(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("forms"), model)


@pytest.mark.parametrize("interface", FORMS)
def test_the_client_of_a_real_package_gives_the_logits_of_mlx(
    model: Model, packages: Packages, interface: str
) -> None:
    path = packages[interface]
    client = client_of(Package(path, precision="float32"), describe(path))
    assert client.contract.interface == interface
    rows = [client.feed_all(IDS[:13]), client.feed_all(IDS[13:61])]  # overlaps near the end
    rows += [client.feed([i])[None] for i in IDS[61:]]
    expected = np.array(model(mx.array([IDS]))[0])
    # the package's weights and RoPE table are float16; logits reach 5
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=0.02)


def test_a_description_tells_functions_shapes_and_ranges(packages: Packages) -> None:
    static = describe(packages["static"])
    assert set(static.functions) == {"prefill", "decode"}
    assert static.named
    assert (static.vocab_size, static.cache().shape) == (320, (1, 2, 64, 32))
    flexible = describe(packages["flexible"])
    assert not flexible.named
    assert flexible.functions["main"].inputs["inputIds"].shape_text == "[1, 1..64]"
    assert flexible.vocab_size is None
    assert flexible.cache("valueCache").dtype == "float16"
    assert static.bytes == sum(
        f.stat().st_size for f in packages["static"].rglob("*") if f.is_file()
    )


@elsewhere
def test_elsewhere_the_evaluator_runs_a_package_and_says_that_it_is_slow(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(open_package(packages["static"]), Package)
    assert "Core ML runs on macOS only" in caplog.text
    with pytest.raises(ValueError, match="--compute-units is for Core ML"):
        open_package(packages["static"], units="gpu")
    with pytest.raises(ValueError, match="runs on macOS only"):
        CoreMLPackage(packages["static"])


class FakeCoreML:
    """coremltools as on a Mac, with a note of what was asked of it."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str, str | None]] = []
        self.states = 0
        self.fail = False

    def __call__(self, submodule: str = "") -> Any:
        units = {name: name for name in ("ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")}
        return types.SimpleNamespace(
            ComputeUnit=units,
            compile_model=lambda path: f"{path}c",
            CompiledMLModel=lambda *args, **named: FakeModel(self, *args, **named),
        )


class FakeModel:
    def __init__(
        self, core: FakeCoreML, path: str, *, compute_units: str, function_name: str | None
    ) -> None:
        if core.fail:
            raise RuntimeError("Failed to build the model execution plan")
        self.core, self.name = core, function_name
        core.loaded.append((Path(path).name, compute_units, function_name))

    def make_state(self) -> int:
        self.core.states += 1
        return self.core.states

    def predict(self, inputs: dict[str, np.ndarray], state: int | None) -> dict[str, np.ndarray]:
        if self.core.fail:
            raise RuntimeError("status=0x1d")
        inputs.clear()  # coremltools changes what it is given
        row = np.zeros((1, 1, 320), np.float32)
        row[0, 0, {"decode": 1, "prefill": 2}[str(self.name)]] = state or 0
        return {"logits": row}


@pytest.fixture
def core_ml(monkeypatch: pytest.MonkeyPatch) -> FakeCoreML:
    fake = FakeCoreML()
    monkeypatch.setattr(coreml_predictor, "coremltools", fake)
    monkeypatch.setattr(coreml_predictor, "on_macos", lambda: True)
    return fake


def test_on_macos_one_compiled_model_serves_both_functions_with_one_state(
    packages: Packages, core_ml: FakeCoreML
) -> None:
    path = packages["static"]
    client: Client = client_of(open_package(path), describe(path))
    assert sorted(core_ml.loaded, key=str) == [
        ("static.mlpackagec", "CPU_AND_GPU", "decode"),
        ("static.mlpackagec", "CPU_AND_GPU", "prefill"),
    ]
    assert client.feed([1, 2, 3])[1] == core_ml.states == 1
    client.reset()
    assert core_ml.states == 2


@pytest.mark.parametrize(
    ("form", "units", "expected"),
    [("ane", None, "CPU_AND_NE"), ("static", "all", "ALL"), ("flexible", "cpu", "CPU_ONLY")],
)
def test_units_are_those_asked_for_or_those_of_the_target(
    packages: Packages, core_ml: FakeCoreML, form: str, units: str | None, expected: str
) -> None:
    open_package(packages[form], units=units)
    assert {used for _, used, _ in core_ml.loaded} == {expected}
    if form != "static":  # a package without named functions is loaded without a name
        assert core_ml.loaded[0][2] is None


def test_what_core_ml_refuses_is_one_line_with_advice(
    packages: Packages, core_ml: FakeCoreML
) -> None:
    opened = open_package(packages["static"])
    core_ml.fail = True
    with pytest.raises(ValueError, match=r"execution plan; try other --compute-units"):
        open_package(packages["static"], units="all")
    with pytest.raises(ValueError, match="Core ML fails at a prediction: status=0x1d"):
        opened.predict({}, None, "decode")
    with pytest.raises(ValueError, match="compute units are all, cpu, gpu, ane, got 'npu'"):
        open_package(packages["static"], units="npu")
