"""What a Core AI bundle of the 270M costs here; run with ``pytest -n 0 -m benchmark -s``."""

import os
import resource
import sys
import time
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np
import pytest
from coreai_assets import needs_coreai
from tiny_tokenizer import TinyTokenizer

from convert.coreai_export import Export, export
from convert.coreai_runner import Bundle, Runner
from convert.quantize import quantize
from openelm_mlx.cache import make_cache
from openelm_mlx.checkpoint import load_model, save_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

pytestmark = [needs_coreai, pytest.mark.benchmark]
IDS = np.random.default_rng(0).integers(0, 32000, 16).tolist()
PROMPT, ROUNDS = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: TinyTokenizer) -> Path:
    """Random weights in the shape of the 270M, float32."""
    mx.random.seed(0)
    folder = tmp_path_factory.mktemp("speed") / "270M"
    save_model(Model(ModelArgs.preset("270M")), folder, tokenizer=tiny_tokenizer.tokenizer)
    return folder


def test_float32_exports_in_seconds_and_decodes_as_fast_as_mlx(
    folder: Path, tmp_path: Path
) -> None:
    seconds, done = exported(folder, tmp_path / "bundle", "fp32")
    ours, theirs, error = against_mlx(done, load_model(folder), steps=8)
    assert seconds < 12
    assert error < 1e-4
    assert ours <= theirs


@pytest.mark.parametrize(("weights", "limit"), [("mlx-fp32", 1e-4), ("mlx", 0.3)])
def test_codes_of_4_bits_stay_small(
    folder: Path, tmp_path: Path, weights: str, limit: float
) -> None:
    quantize(folder, tmp_path / "q4", bits=4, group_size=64)
    _, done = exported(tmp_path / "q4", tmp_path / "bundle", weights)
    _, _, error = against_mlx(done, load_model(tmp_path / "q4"), steps=1)
    assert done.bytes < 175e6
    assert error < limit


def exported(folder: Path, output: Path, weights: str) -> tuple[float, Export]:
    """Seconds of CPU that an export takes: other programs' work does not count."""
    start, cpu = time.perf_counter(), time.process_time()
    done = export(folder, output, weights=weights, check=False)
    cpu = time.process_time() - cpu
    wall, size = time.perf_counter() - start, done.bytes / 1e6
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    say(f"{weights}: exported in {wall:.1f} s ({cpu:.1f} s of CPU), {size:.0f} MB, at most "
        f"{memory:.1f} GB in memory")  # fmt: skip
    return cpu, done


def against_mlx(done: Export, model: Model, *, steps: int) -> tuple[float, float, float]:
    """Seconds a token of the bundle and of MLX, in turns, and the largest error of a logit."""
    times: dict[str, list[float]] = {"Core AI": [], "MLX": []}
    start = time.perf_counter()
    with Runner(Bundle.open(done.folder)) as runner:
        say(f"loaded in {time.perf_counter() - start:.1f} s")
        for _ in range(ROUNDS):
            runner.reset()
            start, cpu = time.perf_counter(), cpu_seconds(runner)
            found = [runner.feed_all(IDS[:PROMPT])]
            wall, cpu = time.perf_counter() - start, cpu_seconds(runner) - cpu
            say(f"prefill of {PROMPT} tokens: {wall:.2f} s ({cpu:.2f} s of CPU)")
            cache = make_cache(len(model.layers))
            expected = [np.array(model(mx.array([IDS[:PROMPT]]), cache)[0])]
            cpu, own = cpu_seconds(runner), time.process_time()
            for token in IDS[PROMPT : PROMPT + steps]:
                start = time.perf_counter()
                found.append(runner.feed_all([token]))
                middle = time.perf_counter()
                expected.append(np.array(model(mx.array([[token]]), cache)[0]))
                times["Core AI"].append(middle - start)
                times["MLX"].append(time.perf_counter() - middle)
            cpu, own = cpu_seconds(runner) - cpu, time.process_time() - own
            say(f"CPU a token: Core AI {cpu / steps:.3f} s, MLX {own / steps:.3f} s")
    error = float(np.abs(np.concatenate(found) - np.concatenate(expected)).max())
    for name, values in times.items():
        spread = f"[{min(values):.3f}-{max(values):.3f}]"
        say(f"{name}: {median(values):.3f} s a token {spread}, {1 / median(values):.2f} tokens/s")
    say(f"largest error of a logit {error:.2e}")
    return median(times["Core AI"]), median(times["MLX"]), error


def cpu_seconds(runner: Runner) -> float:
    """What the runtime's process has used so far; 0 where /proc is not."""
    stat = Path(f"/proc/{runner._process.pid}/stat")
    fields = stat.read_text().rpartition(")")[2].split() if stat.is_file() else [0] * 13
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
