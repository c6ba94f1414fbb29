"""What ``openelm bench`` says of its numbers: shares of a device's limits, tables, saved files."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import run_here
from model_makers import model_of

from openelm_mlx.bench_report import REPORTED, markdown, read_report, render
from openelm_mlx.bench_work import (
    Limits,
    Work,
    bandwidth_of,
    decode_work,
    device_limits,
    prefill_work,
    product_speed,
    shares,
    training_work,
    weight_bytes,
)
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

LIMITS = Limits(gb_per_s=400.0, tflop_per_s=10.0)


def row(who: str, median: float, ratio: float | None = None, **more: object) -> dict[str, object]:
    numbers = {"median": median, "low": median - 1, "high": median + 1}
    against = "mlx_lm" if ratio else None
    start = {"case": "decode", "who": who, "unit": "tokens/s", "ratio": ratio, "against": against}
    return start | numbers | more


def spelt_out_flops(args: ModelArgs, context: float) -> float:
    """Twice the elements of every matrix that a token meets, and attention head by head."""
    total = 2.0 * args.vocab_size * args.model_dim
    for q, k, ffn in zip(args.num_query_heads, args.num_kv_heads, args.ffn_dims, strict=True):
        width = args.head_dim
        total += 2 * args.model_dim * (q + 2 * k) * width + 2 * q * width * args.model_dim
        total += 2 * args.model_dim * 3 * ffn
        total += q * 2 * (2 * width * context)  # scores, then weighted values
    return total


def test_the_work_of_a_token_is_that_of_its_matrices(tiny_model: Model) -> None:
    args = tiny_model.args
    norms = 2 * (2 * args.num_transformer_layers * (args.model_dim + args.head_dim))
    decoded = decode_work(tiny_model, prompt=90, new=20)
    assert decoded.flops == pytest.approx(spelt_out_flops(args, 100) + norms)
    cache = 100 * 2 * sum(args.num_kv_heads) * args.head_dim * 4  # keys and values, float32
    assert decoded.bytes == 4 * args.num_parameters + cache
    head = 2 * args.vocab_size * args.model_dim
    prompt = prefill_work(tiny_model, tokens=64)
    expected = spelt_out_flops(args, 32) + norms - head + head / 64
    assert prompt.flops == pytest.approx(expected)
    full = training_work(tiny_model, length=64, adapters=False)
    assert full.flops == pytest.approx(3 * (spelt_out_flops(args, 32) + norms))
    assert training_work(tiny_model, length=64, adapters=True).flops < full.flops


def test_a_batch_reads_its_weights_once(tiny_model: Model) -> None:
    one, four = (decode_work(tiny_model, prompt=8, new=8, batch=n) for n in (1, 4))
    assert one.bytes - four.bytes == pytest.approx(0.75 * weight_bytes(tiny_model))
    assert one.flops == four.flops


def test_rows_of_an_untied_embedding_are_not_read_all(tiny_args: ModelArgs) -> None:
    tied = ModelArgs.from_dict({**tiny_args.to_dict(), "share_input_output_layers": True})
    untied = ModelArgs.from_dict({**tiny_args.to_dict(), "share_input_output_layers": False})
    assert weight_bytes(model_of(untied)) == weight_bytes(model_of(tied))


def test_shares_are_of_the_makers_bandwidth_and_of_a_measured_product() -> None:
    found = shares(Work(bytes=1e9, flops=1e10), 200, LIMITS)
    assert found["gb_per_s"] == pytest.approx(200)
    assert found["bandwidth_share"] == pytest.approx(0.5)
    assert found["tflop_per_s"] == pytest.approx(2)
    assert found["flops_share"] == pytest.approx(0.2)
    assert "(50% of bandwidth, 20% of FLOPs)" in render(row("openelm", 200, **found))


def test_on_a_cpu_shares_are_not_measured() -> None:
    if mx.default_device().type == mx.gpu:
        pytest.skip("a GPU has limits")
    assert device_limits(mx.float32) is None
    found = shares(Work(bytes=1e9, flops=1e10), 200, None)
    assert found["bandwidth_share"] is None
    assert found["flops_share"] is None
    assert "%" not in render(row("openelm", 200, **found))


def test_on_a_mac_the_table_says_what_the_shares_are_of(
    complete_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No Mac here: its limits are put in the place of those that are looked up."""
    limits = Limits(gb_per_s=bandwidth_of({"device_name": "Apple M2 Max"}), tflop_per_s=12.0)
    monkeypatch.setattr("openelm_mlx.bench_run.device_limits", lambda _: limits)
    outcome = run_here(
        capsys, "bench", "--model", complete_dir, "--cases", "prefill-512", "--trials", 1
    )
    assert outcome.code == 0, outcome.err
    assert "memory bandwidth 400 GB/s, the maker's number; 12.0 TFLOP/s" in outcome.out
    assert "% of bandwidth" in outcome.out


def test_bandwidth_goes_by_the_name_of_the_device() -> None:
    assert bandwidth_of({"device_name": "Apple M2 Max", "memory_size": 1}) == 400
    assert bandwidth_of({"device_name": "Apple M1"}) == 68.25
    assert bandwidth_of({"device_name": "AMD EPYC"}) is None
    assert bandwidth_of({}) is None
    unknown = shares(Work(bytes=1, flops=1), 1, Limits(gb_per_s=None, tflop_per_s=1))
    assert unknown["bandwidth_share"] is None


def test_the_speed_of_a_product_counts_two_for_each_multiplication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0])
    monkeypatch.setattr("openelm_mlx.bench_work.time.perf_counter", lambda: next(clock))
    assert product_speed(mx.float32, size=8, trials=2) == pytest.approx(2 * 8**3 / 1e12)


def test_saved_numbers_become_a_table_with_command_machine_and_what_the_paper_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("openelm", 30, 1.5), row("openelm compiled", 40, 2.0), row("mlx_lm", 20)]
    rows.append({**row("mlx_lm --grad-checkpoint", 5, 0.25), "case": "memory", "unit": "GB"})
    machine = {"system": "Linux x86_64", "device": "cpu", "versions": {"mlx": "0.32.4"}}
    report = {"command": "openelm bench --size 270M", "machine": machine, "model": "270M"}
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps({**report, "trials": 3, "dtype": "float32", "rows": rows}))
    outcome = run_here(capsys, "bench", "--results", file)
    assert outcome.code == 0, outcome.err
    assert "`openelm bench --size 270M`, Linux x86_64 cpu, MLX 0.32.4, float32" in outcome.out
    assert "| decode | 30 tokens/s [29-31] | 20 tokens/s [19-21] | 1.50 |" in outcome.out
    assert "| decode, compiled | 40 tokens/s [39-41] | 20 tokens/s [19-21] | 2.00 |" in outcome.out
    assert "| memory, mlx_lm --grad-checkpoint | - | 5 GB [4-6] | - |" in outcome.out
    reported = outcome.out[outcome.out.index("As reported by the OpenELM paper") :]
    assert "not measured here" in reported
    assert "| 270M, 16 bit | 1151.41 | 212.4 | 218.45 |" in reported
    assert "450M" not in reported


@pytest.mark.parametrize("flag", [["--full"], ["--output", "x.json"], ["--cases", "host"]])
def test_flags_of_measuring_are_refused_with_saved_numbers(
    flag: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = run_here(capsys, "bench", "--results", "numbers.json", *flag)
    assert refused.error == f"{flag[0]} has no effect with --results; leave it out"


def test_a_model_that_the_paper_does_not_know_gets_no_reported_numbers() -> None:
    assert "reported" not in markdown([{"model": "mine", "rows": [row("openelm", 3)]}])
    assert set(REPORTED) == {"270M", "450M", "1.1B", "3B"}


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"rows": [{"case": 1}]}'])
def test_another_file_than_a_bench_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="no result of `openelm bench --output`"):
        read_report(file)
