"""The model against what Apple's code computed: logits, greedy tokens, hidden states, caches."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import numpy as np
import pytest
import reference
from model_makers import apple_io, apple_model
from slow_params import slow

from openelm_mlx import cpu_exp
from openelm_mlx.cache import KVCache, make_cache
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Attention, Model

Golden = Callable[[str], Path]
ATOL = 1e-4  # two right fp32 implementations differ by up to 3.4e-5, a wrong one by more than 1


def model_and_io(name: str) -> tuple[Model, dict[str, np.ndarray]]:
    return apple_model(name)[0], apple_io(name)


def in_chunks(model: Model, tokens: mx.array, chunks: list[int]) -> np.ndarray:
    cache = make_cache(len(model.layers))
    bounds = np.cumsum([0, *chunks])
    assert bounds[-1] == tokens.shape[1]
    pieces = [model(tokens[:, a:b], cache) for a, b in pairwise(bounds)]
    return np.array(mx.concatenate(pieces, axis=1))


@pytest.fixture(params=[False, True], ids=["mx.fast", "x86"])
def as_on_x86(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to attend, whatever this machine would take for so few tokens."""
    monkeypatch.setattr(cpu_exp, "_X86", request.param)
    monkeypatch.setattr(cpu_exp, "_MANY", 1)


@pytest.mark.usefixtures("as_on_x86")
def test_logits_of_a_full_pass(golden_model: str) -> None:
    model, io = model_and_io(golden_model)
    logits = np.array(model(mx.array(io["input_ids"])))
    np.testing.assert_allclose(logits, io["logits"], atol=ATOL, rtol=0)


def test_the_reference_gives_apples_logits_too(golden_model: str) -> None:
    io, (_, config) = apple_io(golden_model), apple_model(golden_model)
    weights = golden_set.read_numpy(golden_set.find(f"hf/{golden_model}") / "model.safetensors")
    logits = reference.forward(config, weights, io["input_ids"])
    np.testing.assert_allclose(logits, io["logits"], atol=ATOL, rtol=0)


@pytest.mark.usefixtures("as_on_x86")
@pytest.mark.parametrize(
    "chunks",
    [[16] + [1] * 32, [7, 1, 20, 2, 18], *slow([16, 16, 16], [48])],
    ids=["prefill-then-steps", "uneven-chunks", "chunks", "one-prefill"],
)
def test_cached_passes_give_the_logits_of_a_full_one(golden_model: str, chunks: list[int]) -> None:
    model, io = model_and_io(golden_model)
    logits = in_chunks(model, mx.array(io["input_ids"]), chunks)
    np.testing.assert_allclose(logits, io["logits"], atol=ATOL, rtol=0)
    if "kv_stepwise_logits" in io:
        np.testing.assert_allclose(logits, io["kv_stepwise_logits"], atol=ATOL, rtol=0)


def test_greedy_tokens_are_identical(golden_model: str) -> None:
    model, io = model_and_io(golden_model)
    cache = make_cache(len(model.layers))
    tokens, found = mx.array(io["greedy_prompt"]), []
    for _ in range(io["greedy_tokens"].shape[1]):
        tokens = mx.argmax(model(tokens, cache)[:, -1], axis=-1, keepdims=True)
        found.append(tokens)
    assert np.array_equal(np.array(mx.concatenate(found, axis=1)), io["greedy_tokens"])


# One model comes with everything on the way


@pytest.fixture
def lw_gqa4(golden: Golden) -> tuple[Model, dict[str, np.ndarray]]:
    golden("io/lw_gqa4.safetensors")
    return model_and_io("lw_gqa4")


def test_hidden_states_of_every_layer(lw_gqa4: tuple[Model, dict[str, np.ndarray]]) -> None:
    model, io = lw_gqa4
    h = model.transformer.token_embeddings(mx.array(io["input_ids"]))
    assert np.array_equal(np.array(h), io["hidden.embeddings"])
    for i, layer in enumerate(model.layers):
        attended = layer.attn(layer.attn_norm(h), "causal", residual=mx.zeros_like(h))
        h = layer(h, "causal")
        for ours, name in ((attended, f"layer_{i}.attn_out"), (h, f"layer_{i}")):
            np.testing.assert_allclose(np.array(ours), io[f"hidden.{name}"], atol=ATOL, rtol=0)
    normed = np.array(model.transformer.norm(h))
    np.testing.assert_allclose(normed, io["hidden.final_norm"], atol=ATOL, rtol=0)
    whole = np.array(model.transformer(mx.array(io["input_ids"])))
    np.testing.assert_allclose(whole, io["hidden.final_norm"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("chunks", [[48], [16] + [1] * 32], ids=["prefill", "steps"])
def test_cached_keys_are_apples_after_rope(
    lw_gqa4: tuple[Model, dict[str, np.ndarray]], chunks: list[int]
) -> None:
    model, io = lw_gqa4
    cache = make_cache(4)
    start = 0
    for chunk in chunks:
        model(mx.array(io["input_ids"])[:, start : start + chunk], cache)
        start += chunk
    for i, layer in enumerate(cache):
        assert layer.keys is not None
        assert layer.values is not None
        rotated = reference.rope(io[f"kv_final_keys.{i}"], np.arange(48), 10000)
        np.testing.assert_allclose(np.array(layer.keys)[:, :, :48], rotated, atol=ATOL, rtol=0)
        values = np.array(layer.values)[:, :, :48]
        np.testing.assert_allclose(values, io[f"kv_final_values.{i}"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
def test_sixteen_bit_logits_err_no_more_than_apples(golden: Golden, dtype: mx.Dtype) -> None:
    halves = golden_set.read_numpy(golden("io/lw_gqa4.half.safetensors"))
    apple = halves["logits_bf16" if dtype == mx.bfloat16 else "logits_fp16"]
    exact = apple_io("lw_gqa4")["logits"]
    model = Model(apple_model("lw_gqa4")[0].args)
    model.load_weights([(k, v.astype(dtype)) for k, v in flat_of("lw_gqa4")])
    model.eval()
    logits = model(mx.array(apple_io("lw_gqa4")["input_ids"]))
    assert logits.dtype == dtype
    ours = np.array(logits.astype(mx.float32))
    assert np.abs(ours - exact).mean() < 1.1 * np.abs(apple - exact).mean()
    assert np.abs(ours - exact).max() < 1.5 * np.abs(apple - exact).max()


def flat_of(name: str) -> list[tuple[str, mx.array]]:
    return golden_set.flat(apple_model(name)[0])


# RMSNorm and RoPE as they run inside attention


class Spy(KVCache):
    """Says where the new tokens stand and keeps what attention hands over."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.seen = keys
        return keys, values


def keys_of(x: mx.array, offset: int = 0, norm: mx.array | None = None) -> mx.array:
    """(B, heads, L, E) through the key path of an attention whose projection copies its input."""
    _, heads, _, width = x.shape
    args = ModelArgs(
        num_transformer_layers=1,
        model_dim=heads * width,
        head_dim=width,
        num_query_heads=[heads],
        num_kv_heads=[heads],
        normalize_qk_projections=norm is not None,
        vocab_size=1,
    )
    layer = Attention(args, 0)
    layer.qkv_proj.weight = mx.tile(mx.eye(heads * width, dtype=x.dtype), (3, 1))
    layer.out_proj.weight = layer.out_proj.weight.astype(x.dtype)
    if norm is not None:
        layer.k_norm.weight = norm
        layer.q_norm.weight = mx.zeros_like(norm)
    spy = Spy(offset)
    flat = x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
    layer(flat, "causal", spy, residual=flat)
    return spy.seen


@pytest.fixture(scope="module")
def numerics() -> Any:
    return mx.load(str(golden_set.find("numerics.safetensors")))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mixed", [False, True], ids=["same-dtype", "fp32-weight"])
def test_qk_norm_is_apples_to_the_bit_in_16_bit(numerics: Any, kind: str, mixed: bool) -> None:
    x = numerics[f"rms.{kind}.x"].reshape(15, 1, 1, 64)  # one token each: RoPE leaves it alone
    weight = numerics["rms.fp32.w" if mixed else f"rms.{kind}.w"]
    found = keys_of(x, norm=weight).reshape(3, 5, 64)
    wanted = numerics[f"rms.{kind}_x_fp32_weight.y" if mixed else f"rms.{kind}.y"]
    assert found.dtype == wanted.dtype
    if kind == "fp32":
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=5e-7, atol=0)
    else:
        assert mx.array_equal(found, wanted).item()


@pytest.mark.parametrize(
    ("kind", "atol"), [("fp32", 1e-6), ("bf16", 1.6e-2), ("fp16", 2e-3)]
)  # 16 bit: one unit in the last place at 4
def test_rope_is_apples_from_the_start_and_onto_a_cache(
    numerics: Any, kind: str, atol: float
) -> None:
    keys, queries = numerics[f"rope.{kind}.k"], numerics[f"rope.{kind}.q"]
    end = keys.shape[2] - queries.shape[2]  # the queries are the last positions
    for x, offset, name in ((keys, 0, "k_out"), (queries, end, "q_out")):
        found = keys_of(x, offset)
        assert found.dtype == x.dtype
        wanted = np.array(numerics[f"rope.{kind}.{name}"].astype(mx.float32))
        np.testing.assert_allclose(np.array(found.astype(mx.float32)), wanted, atol=atol, rtol=0)


def test_rope_far_out(numerics: Any) -> None:
    atol = 3e-4  # an angle of 4000 rad in fp32 is off by up to 1.2e-4, times |x| of up to 2.5
    for i in range(8):
        found = keys_of(numerics["rope_long.k_head8"][:, :, i : i + 1], 512 * i)
        wanted = numerics["rope_long.k_out_head8"][:, :, i : i + 1]
        np.testing.assert_allclose(np.array(found), np.array(wanted), atol=atol, rtol=0)
    found = keys_of(numerics["rope_long.q"], 4094)
    np.testing.assert_allclose(
        np.array(found), np.array(numerics["rope_long.q_out"]), atol=atol, rtol=0
    )
