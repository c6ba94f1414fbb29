"""Core AI's runtime against Apple's PyTorch code: the six tiny models, and how bundles are cut."""

from pathlib import Path

import numpy as np
import pytest
from coreai_assets import copy_of, in_chunks, needs_coreai, running, write_asset
from model_makers import apple_io, apple_model, model_of, random_tokens

from convert.coreai_runner import Runner
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

pytestmark = needs_coreai
ATOL = 1e-4  # two right fp32 implementations differ by up to 3.4e-5, a wrong one by more than 1
WAYS = ([48], [16] + [1] * 32, [17, 1, 22, 8])


@pytest.mark.slow
def test_float32_logits_and_greedy_tokens_are_apples(golden_model: str, tmp_path: Path) -> None:
    (model, _), io = apple_model(golden_model), apple_io(golden_model)
    with running(copy_of(model), tmp_path, "fp32") as runner:
        for row, ids in enumerate(io["input_ids"]):
            for sizes in WAYS:
                logits = in_chunks(runner, ids, sizes)
                np.testing.assert_allclose(logits, io["logits"][row], atol=ATOL, rtol=0)
            assert greedy(runner, io["greedy_prompt"][row], 32) == io["greedy_tokens"][row].tolist()


@pytest.mark.slow
def test_float16_logits_are_near_apples(golden_model: str, tmp_path: Path) -> None:
    (model, _), io = apple_model(golden_model), apple_io(golden_model)
    with running(copy_of(model), tmp_path) as runner:
        logits = runner.feed_all(io["input_ids"][0])
    assert logits.dtype == np.float16  # Apple's Swift package takes no other
    # the Linux runtime also adds up products in float16: 0.14 at most, measured
    np.testing.assert_allclose(logits, io["logits"][0], atol=0.3, rtol=0)


@pytest.mark.slow
def test_a_small_model_gives_mlx_logits_in_any_pieces(tiny_model: Model, tmp_path: Path) -> None:
    tokens = random_tokens(1, 12, 61)
    expected = np.array(tiny_model(tokens))[0]
    with running(copy_of(tiny_model), tmp_path, "fp32") as runner:
        whole = in_chunks(runner, tokens[0].tolist(), [12])
        pieces = in_chunks(runner, tokens[0].tolist(), [5, 1, 1, 5])
    np.testing.assert_allclose(whole, expected, atol=ATOL, rtol=0)
    np.testing.assert_allclose(pieces, expected, atol=ATOL, rtol=0)


@pytest.mark.slow
def test_the_cache_grows_up_to_the_context_and_no_further(tmp_path: Path) -> None:
    args = ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=32,
        head_dim=8,
        ffn_multipliers=(0.5, 1.0),
        num_gqa_groups=2,
        ffn_dim_divisor=8,
        vocab_size=61,
        max_context_length=600,
    )
    model, tokens = model_of(args), random_tokens(1, 600, 61)
    expected = np.array(model(tokens))[0]
    with running(copy_of(model), tmp_path, "fp32") as runner:
        found = in_chunks(runner, tokens[0].tolist(), [250, 7, 300, 42, 1])
        with pytest.raises(ValueError, match="601 tokens do not fit the model's context of 600"):
            runner.feed([1])
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


def test_two_builds_are_equal_to_the_byte(tiny_model: Model, tmp_path: Path) -> None:
    programs = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        asset = write_asset(copy_of(tiny_model), folder).asset
        programs.append((asset / "main.mlirb").read_bytes())
    assert programs[0] == programs[1]
    assert str(tmp_path).encode() not in programs[0]


def greedy(runner: Runner, prompt: np.ndarray, count: int) -> list[int]:
    runner.reset()
    found = [int(runner.feed(prompt.tolist()).argmax())]
    while len(found) < count:
        found.append(int(runner.feed(found[-1:]).argmax()))
    return found
