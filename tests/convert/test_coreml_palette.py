"""Palettes against the best there is: dynamic programming over all ways to cut sorted values."""

import numpy as np
import pytest
from slow_params import slow

from convert.coreml_palette import Palettes, palettise


def best_error(values: np.ndarray, size: int) -> float:
    """The least sum of squares of any palette: Bellman's recursion over sorted values."""
    values = np.sort(values.astype(np.float64))
    n = len(values)
    running, squares = np.zeros(n + 1), np.zeros(n + 1)
    running[1:], squares[1:] = np.cumsum(values), np.cumsum(values**2)
    start = np.arange(n + 1)
    least = np.where(start == 0, 0.0, np.inf)
    for _ in range(size):
        count = start[:, None] - start[None, :]  # values of the last cell, by end and start
        with np.errstate(divide="ignore", invalid="ignore"):
            total = running[:, None] - running[None, :]
            cell = squares[:, None] - squares[None, :] - total**2 / count
        cell[count <= 0] = np.inf
        least = np.minimum(least, (least[None, :] + cell).min(axis=1))
    return float(least[-1])


def values_of(palettes: Palettes) -> np.ndarray:
    """What the indices stand for, one row at a time."""
    rows = palettes.indices.shape[0]
    height = rows // len(palettes.values)
    return np.stack([palettes.values[r // height, 0][palettes.indices[r]] for r in range(rows)])


def sample(kind: str, shape: tuple[int, int] = (4, 200)) -> np.ndarray:
    rng = np.random.default_rng(11)
    draws = {
        "normal": rng.standard_normal(shape),
        "heavy": rng.standard_t(3, shape),
        "uniform": rng.random(shape),
        "two humps": rng.standard_normal(shape) * 0.2 + rng.choice([-1.0, 1.0], shape),
    }
    return (0.02 * draws[kind]).astype(np.float16)


@pytest.mark.parametrize("kind", ["heavy", "two humps", *slow("normal", "uniform")])
@pytest.mark.parametrize("bits", [4, *slow(2)])
def test_squared_error_is_near_the_best_possible(kind: str, bits: int) -> None:
    weight = sample(kind)
    found = values_of(palettise(weight, bits, 4)).astype(np.float64)
    error = float(((found - weight) ** 2).sum())
    best = best_error(weight.ravel(), 2**bits)
    assert best * 0.9999 <= error <= 1.1 * best  # Lloyd's algorithm without moves: 2.3 on "heavy"


@pytest.mark.parametrize("bits", [4, 6])
def test_normal_weights_reach_the_published_error(bits: int) -> None:
    """Max 1960, table 1: 0.009497 for 16 levels; 6.2e-4 for 64 (Panter-Dite: 2.72 / 64^2)."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((64, 640)).astype(np.float16)
    found = values_of(palettise(weight, bits, 16)).astype(np.float64)
    assert np.mean((found - weight) ** 2) <= {4: 0.00955, 6: 6.4e-4}[bits]


def test_every_index_is_the_nearest_value() -> None:
    weight = sample("heavy", (32, 64))
    palettes = palettise(weight, 4, 16)
    for row, (values, indices) in enumerate(zip(weight, palettes.indices, strict=True)):
        table = palettes.values[row // 16, 0].astype(np.float64)
        distance = np.abs(values[:, None] - table)
        chosen = np.take_along_axis(distance, indices[:, None].astype(int), 1)[:, 0]
        np.testing.assert_array_equal(chosen, distance.min(1))


def test_groups_have_palettes_of_their_own() -> None:
    weight = np.concatenate([sample("normal"), 100 * sample("normal")])
    together = palettise(weight, 4, 8)
    apart = palettise(weight, 4, 4)
    assert apart.values.shape == (2, 1, 16)
    np.testing.assert_array_equal(apart.values[0], palettise(weight[:4], 4, 4).values[0])
    small = [np.abs(values_of(p)[:4].astype(float) - weight[:4]).max() for p in (together, apart)]
    assert small[1] < 0.2 * small[0]


def test_few_distinct_values_are_kept_exactly() -> None:
    weight = np.random.default_rng(0).choice(
        np.array([-65504, -1.5, -(2.0**-24), 0, 2.0**-24, 0.1, 65504], np.float16), (16, 32)
    )
    np.testing.assert_array_equal(values_of(palettise(weight, 4, 16)), weight)
    zeros = np.zeros((16, 8), np.float16)
    np.testing.assert_array_equal(values_of(palettise(zeros, 6, 16)), zeros)


def test_both_zeros_and_all_signs_sort_as_numbers() -> None:
    weight = np.linspace(-3, 3, 16 * 64, dtype=np.float16).reshape(16, 64)
    weight[0, 0] = -0.0
    palette = palettise(weight, 4, 16).values[0, 0]
    assert (np.diff(palette.astype(np.float64)) > 0).all()
    np.testing.assert_allclose(np.diff(palette.astype(np.float64)), 6 / 16, rtol=0.1)


@pytest.mark.benchmark
def test_a_270m_model_takes_under_90_seconds() -> None:
    """On two cores: 271 M weights, scaled up from 16 M."""
    import time

    weight = sample("normal", (12_800, 1280))
    for bits in (4, 6):
        start = time.perf_counter()
        palettise(weight, bits, 16)
        assert (time.perf_counter() - start) * 271e6 / weight.size < 90
