"""One short message for everything that does not fit between a file and a model."""

import pytest

from openelm_mlx.mismatch import check_tensors

LAYERS = {f"transformer.layers.{i}.attn.qkv_proj.weight": (12, 8) for i in range(40)}
EXPECTED = {"transformer.norm.weight": (8,), **LAYERS}


def refusal(found: dict[str, tuple[int, ...]]) -> str:
    with pytest.raises(ValueError, match="tensors do not fit the config") as caught:
        check_tensors(EXPECTED, found, source="model.safetensors")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("model.safetensors: ")
    assert f"({len(EXPECTED)} expected, {len(found)} found)" in message
    return message


def test_equal_names_and_shapes_pass_in_any_order() -> None:
    found = {name: list(shape) for name, shape in reversed(EXPECTED.items())}
    check_tensors(EXPECTED, found, source="x")


def test_a_renamed_tensor_is_named_with_its_nearest_match() -> None:
    found = dict(EXPECTED)
    found["transformer.final_norm.weight"] = found.pop("transformer.norm.weight")
    message = refusal(found)
    assert (
        "1 missing: transformer.norm.weight (nearest in the file: transformer.final_norm.weight)"
        in message
    )
    assert "1 unexpected: transformer.final_norm.weight" in message
    assert len(message) < 300


def test_many_missing_names_are_counted_not_listed() -> None:
    message = refusal({"transformer.norm.weight": (8,)})
    assert "40 missing: " in message
    assert "and 37 more" in message
    assert message.count("qkv_proj") == 3
    assert len(message) < 400


def test_unrelated_names_are_no_match() -> None:
    message = refusal({**LAYERS, "zebra": (1,)})
    assert "1 missing: transformer.norm.weight; 1 unexpected: zebra" in message


def test_both_shapes_are_shown() -> None:
    message = refusal({**EXPECTED, "transformer.norm.weight": (9, 1)})
    assert "1 of another shape: transformer.norm.weight is [9, 1], expected [8]" in message
    assert "missing" not in message


def test_all_kinds_come_together() -> None:
    found = {**EXPECTED, "extra": (1,), "transformer.norm.weight": (9,)}
    del found["transformer.layers.7.attn.qkv_proj.weight"]
    message = refusal(found)
    for part in ("1 missing: ", "1 unexpected: extra", "1 of another shape: "):
        assert part in message
