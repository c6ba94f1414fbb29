"""`openelm convert coreai` and `verify-coreai`: the bundle for Apple's Swift package, judged."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import run_here
from coreai_assets import needs_coreai
from model_makers import random_tokens

from convert import coreai_verify
from convert.coreai_export import Export, export
from convert.coreai_runner import Bundle, Runner
from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.bundle_scoring import bundle_scorer
from openelm_mlx.checkpoint import load_model, save_model
from openelm_mlx.lora import add_adapters, get_module, save_adapters
from openelm_mlx.token_scoring import ModelScorer, Window
from openelm_mlx.tokenizer import Tokenizer

pytestmark = needs_coreai


@pytest.fixture(scope="module")
def made(complete_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A verified float32 bundle of ``complete_dir``, under a licence."""
    room = tmp_path_factory.mktemp("coreai")
    source = room / "source"
    shutil.copytree(complete_dir, source)
    (source / "LICENSE").write_text("Apple Machine Learning Research Model\n")
    return export(source, room / "Tiny-Instruct", weights="fp32")


@pytest.fixture
def bundle(made: Export, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made.folder, tmp_path / "bundle"))


@pytest.mark.slow
def test_the_metadata_say_what_the_swift_package_reads(made: Export) -> None:
    found = json.loads((made.folder / "metadata.json").read_text())
    assert found["metadata_version"] == "0.2"
    assert (found["kind"], found["name"]) == ("llm", "Tiny-Instruct")
    assert found["assets"] == {"main": "Tiny-Instruct.aimodel"}
    language = found["language"]
    assert (language["vocab_size"], language["max_context_length"]) == (320, 2048)
    assert language["embedded_tokenizer"] is True
    assert language["function_map"] == {"main": ["main"]}
    assert found["source"] == {"hf_model_id": "source"}
    assert all(isinstance(value, str) for value in found["user_data"].values())  # Swift: strings


@pytest.mark.slow
def test_the_asset_has_the_names_and_shapes_that_apps_bind(made: Export) -> None:
    import coreai.authoring  # noqa: F401  (comes before all else of the package)
    from coreai.authoring import AIModelAsset

    asset = AIModelAsset.load(Bundle.open(made.folder).asset)
    summary = asset.summary(include_statistics=False)
    assert summary is not None
    assert summary.function_names == ["main"]
    inputs, outputs, states = (
        [(name, re.findall(r"Int32|Float32|\d+|\?", kind)) for name, kind in found("main")]
        for found in (summary.function_inputs, summary.function_outputs, summary.function_states)
    )
    ids = ["Int32", "1", "?"]
    assert inputs == [("input_ids", ids), ("position_ids", ids)]  # apps bind them in this order
    assert outputs == [("logits", ["Float32", "1", "?", "320"])]
    cache = ["Float32", "1", "1", "3", "?", "8"]  # 1 + 2 heads of the two layers, no padding
    assert states == [("keyCache", cache), ("valueCache", cache)]
    assert asset.metadata.license == "apple-amlr"


@pytest.mark.slow
def test_tokenizer_template_licence_and_provenance_come_along(made: Export) -> None:
    tokenizer = Tokenizer.from_path(made.folder / "tokenizer")
    assert (made.folder / "tokenizer" / "tokenizer.json").is_file()
    assert tokenizer.chat_template is not None  # its name says Instruct
    assert (made.folder / "LICENSE").read_text().startswith("Apple Machine")
    origin = json.loads((made.folder / "openelm.json").read_text())
    assert (origin["source"], origin["licence"]) == ("source", "apple-amlr")
    assert len(origin["sha256"]) == 64
    assert origin["versions"]["coreai-core"] == "1.0.0b3"


@pytest.mark.slow
def test_the_export_is_verified_and_says_what_that_means(made: Export) -> None:
    report = json.loads((made.folder / "verification.json").read_text())
    assert report["holds"] is True
    assert set(report["max_logit_error"]) == {"full", "stepwise", "chunked"}
    assert max(report["max_logit_error"].values()) < 1e-4
    assert report["run_on_a_device"] is False
    page = (made.folder / "verification.md").read_text()
    assert page.startswith("# Tiny-Instruct: holds\n")
    assert "Apple's Core AI runtime (coreai-core 1.0.0b3)" in page
    assert "Not run on a device. Apps need macOS 27 or iOS 27." in page


@pytest.mark.slow
def test_another_model_does_not_hold(
    made: Export, complete_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(complete_dir)
    model.transformer.norm.weight *= 1.5
    save_model(model, tmp_path / "other")
    report = tmp_path / "report.json"
    line = ("convert", "verify-coreai", made.folder, "--model", tmp_path / "other")
    outcome = run_here(capsys, *line, "--tokens", 4, "--report", report)
    assert outcome.code == 1
    assert outcome.out.startswith("does not hold: 4 tokens")
    assert json.loads(report.read_text())["holds"] is False
    assert "DOES NOT HOLD" in report.with_suffix(".md").read_text()


@pytest.mark.slow
def test_what_does_not_hold_is_not_kept(
    complete_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(coreai_verify.LIMITS, "fp32", 1e-12)
    with pytest.raises(ValueError, match="the bundle was not kept, since it does not hold"):
        export(complete_dir, tmp_path / "out", weights="fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_text_scores_as_with_mlx(made: Export, complete_dir: Path) -> None:
    window = Window(ids=random_tokens(1, 20, 320)[0].tolist(), first=3)
    scorer = bundle_scorer(made.folder)
    try:
        assert (scorer.context, scorer.vocab_size) == (2048, 320)
        (found,), greedy = scorer.score([window]), scorer.greedy([1, 5], 4)
    finally:
        scorer.close()
    judge = ModelScorer(load_model(complete_dir))
    (expected,) = judge.score([window])
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    assert greedy == judge.greedy([1, 5], 4)


@pytest.mark.slow
def test_adapters_are_fused(
    complete_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, args = load_model(complete_dir), AdapterArgs(rank=2)
    add_adapters(model, args)
    layer = get_module(model, "transformer.layers.1.attn.qkv_proj")
    layer.lora_b = layer.lora_b + 0.1
    model.eval()
    save_adapters(model, tmp_path / "adapters", args)
    line = ("convert", "coreai", complete_dir, "--output", tmp_path / "out", "--weights", "fp32")
    outcome = run_here(capsys, *line, "--adapter-path", tmp_path / "adapters")
    assert outcome.code == 0, outcome.err
    assert "holds: 32 tokens" in outcome.out
    tokens = random_tokens(1, 6, 320)
    with Runner(Bundle.open(tmp_path / "out")) as runner:
        found = runner.feed_all(tokens[0].tolist())
    np.testing.assert_allclose(found, np.array(model(tokens))[0], atol=1e-4, rtol=0)
    base = np.array(load_model(complete_dir)(tokens))[0]
    assert np.abs(base - found).max() > 0.01


@pytest.mark.slow
def test_an_unverified_bundle_says_so(
    complete_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("convert", "coreai", complete_dir, "--output", tmp_path / "out", "--no-verify")
    outcome = run_here(capsys, *line)
    assert outcome.out.splitlines()[-1] == "not verified, and not run on a device"
    assert not (tmp_path / "out" / "verification.json").exists()
    assert run_here(capsys, *line).error.endswith("add --overwrite to replace it")
    assert run_here(capsys, *line, "--overwrite").code == 0


def test_a_folder_without_a_tokenizer_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer, and a bundle without tokenizer\.json"):
        export(tiny_model_dir, tmp_path / "out")


def test_the_name_of_an_asset_is_no_bundle(complete_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the \.aimodel will lie inside it"):
        export(complete_dir, tmp_path / "x.aimodel")


@pytest.mark.slow
def test_missing_parts_and_other_metadata_are_told(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no Core AI bundle: it has no metadata\.json"):
        Bundle.open(tmp_path)
    (bundle / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer/tokenizer\.json"):
        Bundle.open(bundle)
    metadata = bundle / "metadata.json"
    contents = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**contents, "metadata_version": "0.1"}))
    with pytest.raises(ValueError, match=r"has version 0\.1; expected 0\.2"):
        Bundle.open(bundle)
    metadata.write_text("{}")
    with pytest.raises(ValueError, match="does not describe a language model"):
        Bundle.open(bundle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "parameters", "tokens"),
    [("fp32", 270_000_000, 32), ("fp16", 270_000_000, 4), ("mlx", 270_000_000, 4), ("mlx", 10, 32)],
)
def test_few_tokens_go_through_a_slow_runtime(
    made: Export, weights: str, parameters: int, tokens: int
) -> None:
    assert coreai_verify._count(None, Bundle.open(made.folder), weights, parameters) == tokens


@pytest.mark.parametrize(("tokens", "message"), [(3, "is not between 4 and"), (4, None)])
def test_only_our_bundles_and_enough_tokens_can_be_verified(
    bundle: Path, complete_dir: Path, tokens: int, message: str | None
) -> None:
    if message is None:
        contents = json.loads((bundle / "metadata.json").read_text())
        (bundle / "metadata.json").write_text(json.dumps({**contents, "user_data": None}))
        message = "does not say how the weights are stored"
    with pytest.raises(ValueError, match=message):
        coreai_verify.verify(Bundle.open(bundle), load_model(complete_dir), tokens=tokens)


@pytest.mark.slow
def test_ids_that_do_not_exist_and_a_dead_runtime_are_told(made: Export) -> None:
    with Runner(Bundle.open(made.folder)) as runner:
        for ids in ([320], [-1], [], [[1, 2]]):
            with pytest.raises(ValueError, match=r"one sequence of ids below 320 \(batch 1\)"):
                runner.feed(ids)
        runner._process.kill()
        with pytest.raises(RuntimeError, match="Apple's Core AI runtime ended with signal SIGKILL"):
            runner.feed([1])


@pytest.mark.slow
def test_a_damaged_asset_is_told(bundle: Path) -> None:
    program = bundle / "Tiny-Instruct.aimodel" / "main.mlirb"
    program.write_bytes(program.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match="Core AI"):
        Runner(Bundle.open(bundle))
