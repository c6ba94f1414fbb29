"""Names and vocabulary rows between CoreNet and Hugging Face, judged by Apple's own lists."""

import random
from collections.abc import Callable
from pathlib import Path

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np
import pytest
from folder_makers import bits

from convert.names import (
    CORENET_ROWS,
    HUB_ROWS,
    corenet_order,
    is_corenet,
    join_rows,
    split_rows,
    to_corenet,
    to_huggingface,
)

Golden = Callable[[str], Path]


def shapes(golden: Golden, kind: str) -> dict[str, list[int]]:
    """Names and shapes of the real 270M model as Apple's code lists them."""
    found: dict[str, list[int]] = golden_set.read_json(golden(f"state_dict_270M_{kind}.json"))
    return found


def test_the_names_of_270m_are_apples_both_ways(golden: Golden) -> None:
    corenet, hub = shapes(golden, "corenet"), shapes(golden, "hf")
    assert [to_huggingface(name) for name in corenet] == list(hub)
    assert [to_corenet(name) for name in hub] == list(corenet)


def test_the_two_differ_in_nothing_but_the_vocabularys_rows(golden: Golden) -> None:
    corenet, hub = shapes(golden, "corenet"), shapes(golden, "hf")
    differing = {n: (s, hub[to_huggingface(n)]) for n, s in corenet.items()}
    differing = {n: pair for n, pair in differing.items() if pair[0] != pair[1]}
    assert differing == {"token_embeddings.weight": ([CORENET_ROWS, 1280], [HUB_ROWS, 1280])}


def test_the_untied_head_has_another_name_on_either_side() -> None:
    assert to_huggingface("classifier.weight") == "lm_head.weight"
    assert to_corenet("lm_head.weight") == "classifier.weight"


@pytest.mark.parametrize("name", ["transformer.norm.weight", "lm_head.weight"])
def test_names_that_are_hugging_faces_already_stay(name: str) -> None:
    assert to_huggingface(name) == name


def test_a_name_that_is_not_openelms_has_no_corenet_name() -> None:
    with pytest.raises(ValueError, match=r"'model.norm.weight' is not a parameter of OpenELM"):
        to_corenet("model.norm.weight")


def test_corenets_names_are_told_from_others(golden: Golden) -> None:
    assert is_corenet(set(shapes(golden, "corenet")))
    assert is_corenet({"token_embeddings.base_layer.weight"})
    assert not is_corenet(set(shapes(golden, "hf")))


@pytest.mark.parametrize("names", ["270M", "untied"])
def test_sorting_gives_the_order_of_corenets_state_dict(names: str, golden: Golden) -> None:
    if names == "270M":
        expected = list(shapes(golden, "corenet"))
    else:
        models = golden_set.read_json(golden("models.json"))
        expected = list(models["mqa_untied"]["state_dict"])
    shuffled = random.Random(0).sample(expected, len(expected))
    assert sorted(shuffled, key=corenet_order) == expected


def test_rows_cut_off_and_put_back_give_the_same_bits() -> None:
    table = mx.array(np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32))
    table[5, 1] = float("nan")
    table[6, 0] = -0.0
    kept, rest = split_rows(table, 4)
    assert rest is not None
    assert (kept.shape, rest.shape) == ((4, 3), (3, 3))
    assert bits(join_rows(kept, rest)) == bits(table)


def test_nothing_is_cut_off_a_table_that_has_as_many_rows() -> None:
    kept, rest = split_rows(mx.ones((4, 2)), 4)
    assert kept.shape == (4, 2)
    assert rest is None


def test_rows_put_back_take_the_tables_type() -> None:
    joined = join_rows(mx.ones((2, 2), dtype=mx.bfloat16), mx.zeros((1, 2)))
    assert joined.dtype == mx.bfloat16


def test_more_rows_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="has 4 vocabulary rows, fewer than the 5"):
        split_rows(mx.ones((4, 2)), 5)
