"""What only a Mac can show: that Swift, Xcode's compiler and Core ML take what is written here."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from command_line import run_here
from folder_makers import small_folder, small_model
from small_packages import small_package
from tiny_tokenizer import TinyTokenizer

from convert.coreml_bundle import bundle_folder, write_bundle
from convert.coreml_describe import describe
from convert.coreml_predictor import CoreMLPackage, client_of

pytestmark = [
    pytest.mark.macos,
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Darwin", reason="needs Core ML"),
]
RUNNER = Path(__file__).parents[2] / "convert" / "swift" / "OpenELMRunner.swift"
IDS = np.random.default_rng(6).integers(3, 320, 64).tolist()
FORMS: dict[str, dict[str, Any]] = {
    "static": {},
    "flexible": {"flexible": True},
    "stateless": {"stateless": True},
    "int8": {"weights": "int8"},
}

# What the runner uses of swift-transformers' module; the workflow's swift job takes the real one.
TOKENIZERS = """
import Foundation
public typealias Message = [String: any Sendable]
public protocol Tokenizer: Sendable {
    func encode(text: String) -> [Int]
    func decode(tokens: [Int]) -> String
    func applyChatTemplate(messages: [Message]) throws -> [Int]
    var hasChatTemplate: Bool { get }
    var eosToken: String? { get }
    var eosTokenId: Int? { get }
}
public enum AutoTokenizer {
    public static func from(modelFolder: URL) async throws -> any Tokenizer { fatalError() }
}
"""


def run(*command: object, where: Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=where)
    assert done.returncode == 0, done.stderr


def test_the_swift_runner_compiles(tmp_path: Path) -> None:
    (tmp_path / "Tokenizers.swift").write_text(TOKENIZERS)
    target = ("-target", f"{platform.machine()}-apple-macos15.0")
    module = ("-emit-module", "-parse-as-library", "-module-name", "Tokenizers")
    run("xcrun", "swiftc", *target, *module, "Tokenizers.swift", where=tmp_path)
    checked = ("-typecheck", "-parse-as-library", "-module-name", "App")
    run("xcrun", "swiftc", *target, *checked, "-I", ".", RUNNER, where=tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: TinyTokenizer) -> Path:
    home = tmp_path_factory.mktemp("core_ml")
    return small_folder(home / "small", tiny_tokenizer.tokenizer, small_model(head_dim=32))


@pytest.mark.parametrize("form", FORMS)
def test_core_ml_predicts_what_mlx_does_on_the_cpu(form: str, tmp_path: Path) -> None:
    model = small_model(head_dim=32)
    path = small_package(tmp_path / "Small.mlpackage", model, **FORMS[form])
    client = client_of(CoreMLPackage(path, "cpu"), describe(path))
    expected = np.array(model(mx.array([IDS]))[0])
    found = [client.feed(IDS[:13]), client.feed(IDS[13:60]), *(client.feed([i]) for i in IDS[60:])]
    # logits reach 5; fp16 arithmetic, and int8 rounds the weights besides
    tolerance = 0.3 if form == "int8" else 0.05
    np.testing.assert_allclose(np.stack(found), expected[[12, *range(59, 64)]], atol=tolerance)


def test_verify_compiles_a_package_and_predicts_on_every_unit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_package(folder.parent / "Verified.mlpackage", small_model(head_dim=32))
    report = folder.parent / "report.json"
    flags = ("--model", folder, "--report", report)
    outcome = run_here(capsys, "convert", "verify-coreml", path, *flags)
    seen = json.loads(report.read_text())
    assert outcome.code == 0, outcome.out + outcome.err
    assert seen["level"] == "L3"
    assert [unit["units"] for unit in seen["units"]] == ["all", "cpu", "gpu", "ane"]


def test_run_coreml_generates_through_core_ml(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_package(folder.parent / "Run.mlpackage", small_model(head_dim=32))
    write_bundle(bundle_folder(path), package=path, model_dir=folder)
    flags = ("--prompt", "Once", "--max-tokens", 8, "--compute-units", "cpu", "--verbose")
    outcome = run_here(capsys, "convert", "run-coreml", path, *flags)
    assert outcome.code == 0, outcome.err
    assert "evaluating" not in outcome.err
    assert "output 8 tokens" in outcome.err
