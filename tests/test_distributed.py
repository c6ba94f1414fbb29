"""Training on several ranks: equal to one process, and ended on all when it ends on one."""

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from ranks import LAUNCH, MPIRUN, Ended, alone, end, finish, free_ports, launched, ring, start_ring

from openelm_mlx import distributed
from openelm_mlx.distributed import launched_backend
from openelm_mlx.metrics import WALL_CLOCK, read_metrics
from openelm_mlx.training_state import STATES, verify
from openelm_mlx.watchdog import STALLED, Watchdog

MPI = {"MLX_MPI_LIBNAME": "libmpi.so.40", "OMPI_MCA_plm_rsh_agent": ""}  # all on this machine
MPI_COMMAND = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or sys.platform != "linux", reason="needs mpirun and libmpi.so.40"
)
LAUNCHER = {"MLX_HOSTFILE", "MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"} | {
    *("NCCL_HOST_IP", "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
}


def assert_same_training(several: Path, one: Path, rank: int = 0) -> None:
    """Weights within 1e-5: float32 sums in another order, 24 or fewer Adam steps at 0.02."""
    a = mx.load(str(several / f"weights{rank}.safetensors"))
    b = mx.load(str(one / "weights0.safetensors"))
    assert a.keys() == b.keys()
    for name in b:
        np.testing.assert_allclose(np.array(a[name]), np.array(b[name]), atol=1e-5, err_msg=name)
    ours, theirs = (read_metrics(folder / "run0") for folder in (several, one))
    assert len(ours) == len(theirs)
    for line, expected in zip(ours, theirs, strict=True):
        assert line.keys() == expected.keys()
        for key in line.keys() - set(WALL_CLOCK):
            assert line[key] == pytest.approx(expected[key], rel=1e-3), (key, line)


def seen(folder: Path) -> list[list[str]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen*.json"))]


def assert_all_well(ended: list[Ended]) -> None:
    assert [rank.code for rank in ended] == [0] * len(ended), ended


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, the case ``plain``."""
    folder = tmp_path_factory.mktemp("straight")
    assert_all_well([alone("plain", folder)])
    return folder


@pytest.mark.slow
def test_two_ring_processes_equal_one(tmp_path: Path, straight: Path) -> None:
    port = str(free_ports(2))
    ended = launched([str(LAUNCH), "-n", "2", "-p", port, "--"], "plain", tmp_path)
    assert "exited with code" not in ended.err
    assert_same_training(tmp_path, straight, rank=0)
    assert_same_training(tmp_path, straight, rank=1)


@pytest.mark.slow
@needs_mpi
def test_two_mpi_processes_equal_one(tmp_path: Path, straight: Path) -> None:
    ended = launched(MPI_COMMAND, "plain", tmp_path, **MPI)
    assert ended.code == 0, ended.err
    assert_same_training(tmp_path, straight)


@pytest.mark.slow
def test_three_ranks_see_each_sample_once_and_rank_0_alone_writes(
    tmp_path: Path, straight: Path
) -> None:
    assert_all_well(ring("plain", tmp_path, ranks=3))
    assert_same_training(tmp_path, straight)
    ours, (theirs,) = seen(tmp_path), seen(straight)
    assert len(ours) == 3
    assert sorted(itertools.chain(*ours)) == sorted(theirs)
    assert len({*theirs}) == len(theirs)
    assert [path.name for path in sorted(tmp_path.glob("run*"))] == ["run0"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["small_last_batch", "ends_early", "prefetch"])
def test_ranks_without_rows_wait_for_those_with_some(case: str, tmp_path: Path) -> None:
    assert_all_well([alone(case, tmp_path / "one")])
    assert_all_well(ring(case, tmp_path / "two"))
    assert_same_training(tmp_path / "two", tmp_path / "one")
    ours, (theirs,) = seen(tmp_path / "two"), seen(tmp_path / "one")
    assert sorted(itertools.chain(*ours)) == sorted(theirs)


@pytest.mark.slow
def test_ranks_that_are_bounded_by_time_end_together_with_equal_weights(tmp_path: Path) -> None:
    assert_all_well(ring("bounded_by_time", tmp_path))
    weights: list[Any] = [mx.load(str(tmp_path / f"weights{i}.safetensors")) for i in (0, 1)]
    assert all(mx.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    steps = [line for line in read_metrics(tmp_path / "run0") if "loss" in line]
    assert len(steps) > 2


@pytest.mark.slow
def test_validation_counts_each_target_once_over_ranks(tmp_path: Path) -> None:
    assert_all_well([alone("evaluation", tmp_path / "one")])
    assert_all_well(ring("evaluation", tmp_path / "two"))
    ours = [json.loads((tmp_path / "two" / f"loss{i}.json").read_text()) for i in (0, 1)]
    loss, count = json.loads((tmp_path / "one" / "loss0.json").read_text())
    assert ours[0] == ours[1]
    assert ours[0] == [pytest.approx(loss, rel=1e-6), count]


@pytest.mark.slow
def test_different_weights_give_way_to_those_of_rank_0(tmp_path: Path) -> None:
    assert_all_well([alone("other_weights", tmp_path / "one")])
    ended = ring("other_weights", tmp_path / "two")
    assert_all_well(ended)
    assert "differ between the ranks" in ended[0].err
    assert_same_training(tmp_path / "two", tmp_path / "one", rank=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("other_settings", ["the ranks have different settings"] * 2),
        ("bad_data", ["error: rank 1: shard.jsonl line 7: no JSON", "error: shard.jsonl line 7"]),
        ("cannot_save", ["error: ", "error: rank 0: "]),
        ("fully_sharded", ["fully_shard: the ring backend has no reduce-scatter in MLX"] * 2),
        ("not_finite", ["step 6: loss nan", "step 6: loss nan"]),
    ],
)
def test_an_error_on_one_rank_ends_all_at_once(
    case: str, messages: list[str], tmp_path: Path
) -> None:
    started = time.monotonic()
    ended = ring(case, tmp_path)
    assert time.monotonic() - started < 15  # the watchdog would take 20 s
    assert [rank.code for rank in ended] == [1, 1], ended
    for rank, message in zip(ended, messages, strict=True):
        assert message in rank.err
        assert "Traceback" not in rank.err


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_told_alike_with_the_samples_of_its_rank(
    tmp_path: Path,
) -> None:
    first, second = (rank.err for rank in ring("not_finite", tmp_path))
    assert first == second
    assert "samples: batch 5 row 1, batch 5 row 3." in first
    newest = sorted((tmp_path / "run0" / STATES).iterdir())[-1]
    assert verify(newest)["state"]["step"] == 4


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_a_message(tmp_path: Path) -> None:
    started = time.monotonic()
    first, second = ring("dies", tmp_path)
    assert time.monotonic() - started < 30
    assert second.code == -signal.SIGKILL
    assert first.code in (1, STALLED)  # a ring notices at once; else the watchdog does
    assert "another rank has" in first.err
    assert "--resume" in first.err


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_by_the_watchdog(tmp_path: Path) -> None:
    processes = start_ring("hangs", tmp_path)
    try:
        _, errors = processes[0].communicate(timeout=30)
    finally:
        end(processes)
    assert processes[0].returncode == STALLED
    assert "error: rank 0: no progress in 2 s; another rank has died or hangs" in errors


@pytest.mark.slow
@needs_mpi
def test_mpirun_ends_all_when_a_rank_is_killed(tmp_path: Path) -> None:
    ended = launched(MPI_COMMAND, "dies", tmp_path, **MPI)
    assert ended.code == 128 + signal.SIGKILL
    assert "exited on signal 9" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_run_stopped_on_one_rank_resumes_on_another_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    processes = start_ring("slow", tmp_path / "run", before)
    last = processes[-1]
    assert last.stdout is not None
    next(line for line in last.stdout if line == "step 6\n")
    last.send_signal(signal.SIGTERM)
    ended = finish(processes)
    assert [rank.code for rank in ended] == [130] * before, ended
    assert "stopping after this step" in ended[-1].err
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "run0") if "loss" in line]
    newest = sorted((tmp_path / "run" / "run0" / STATES).iterdir())[-1]
    assert steps[-1] == verify(newest)["state"]["step"] in (6, 7)

    (tmp_path / "run" / f"weights{before - 1}.safetensors").unlink()
    assert_all_well(ring("resumed", tmp_path / "run", after))
    assert_all_well([alone("resumed", tmp_path / "straight")])
    assert_same_training(tmp_path / "run", tmp_path / "straight", rank=after - 1)


@pytest.mark.slow
def test_a_signal_in_the_last_validation_does_not_lose_the_last_state(tmp_path: Path) -> None:
    assert_all_well([alone("stopped_at_the_end", tmp_path)])
    newest = sorted((tmp_path / "run0" / STATES).iterdir())[-1]
    assert verify(newest)["state"]["step"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_fully_sharded_equals_data_parallel(checkpoint: bool, tmp_path: Path) -> None:
    """MLX's own module over a ring, its reduce-scatter made of all_sum: none here has one."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        if checkpoint:
            (tmp_path / name / "checkpoint").touch()
    assert_all_well([alone("sharded_on_ring", tmp_path / "one")])
    assert_all_well(ring("sharded_on_ring", tmp_path / "two"))
    assert_same_training(tmp_path / "two", tmp_path / "one", rank=0)
    assert_same_training(tmp_path / "two", tmp_path / "one", rank=1)
    for kept in ("states/step-00000008/weights", "states/step-00000012/optimizer", "best/weights"):
        ours, theirs = (
            mx.load(str(tmp_path / name / "run0" / f"{kept}.safetensors"))
            for name in ("two", "one")
        )
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            if name == "random":
                continue  # with several ranks each step begins at a new key
            np.testing.assert_allclose(np.array(ours[name]), np.array(array), atol=1e-5)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables, and no group that is joined already."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(distributed, "_active", {})
    return monkeypatch


def test_the_backend_is_told_by_its_launcher(launcher: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    for content, name in (('[["a:1"], ["b:1"]]', "ring"), ('[["a:1"]]', "none"), ("", "none")):
        hosts.write_text(content)
        launcher.setenv("MLX_HOSTFILE", str(hosts))
        launcher.setenv("MLX_RANK", "0")
        assert launched_backend() == name
    launcher.delenv("MLX_HOSTFILE")
    for variables, name in (
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "none"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"NCCL_HOST_IP": "10.0.0.1", "MLX_WORLD_SIZE": "8"}, "nccl"),
        ({"MLX_IBV_DEVICES": "devices.json"}, "jaccl"),
    ):
        for variable, value in variables.items():
            launcher.setenv(variable, value)
        assert launched_backend() == name


def test_one_rank_is_joined_by_none(launcher: pytest.MonkeyPatch) -> None:
    assert distributed.world().size() == 1
    assert distributed.backend_name() == "none"


def test_an_unknown_backend_is_refused(launcher: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'smoke' is not one of any, ring, mpi, nccl, jaccl"):
        distributed.world("smoke")


def test_a_backend_that_nothing_was_launched_for_is_refused(launcher: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot be joined by ring.*mlx\.launch or mpirun"):
        distributed.world("ring")


def test_a_rank_of_mpirun_does_not_train_alone_where_mlx_finds_no_mpi() -> None:
    code = "import openelm_mlx.distributed as d; print(d.world().size())"
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "MLX_MPI_LIBNAME": "libnone.so", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "cannot be joined by mpi: MLX finds no Open MPI library" in done.stderr


@pytest.mark.slow
def test_a_rank_that_nobody_joins_ends_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    port = free_ports(2)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"], [f"127.0.0.1:{port + 1}"]]))
    code = "import openelm_mlx.distributed as d; d.world(patience=1)"
    environment = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr


class _Ranks:
    """As much of a group as drawing numbers needs."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def test_ranks_draw_different_numbers_and_stand_at_the_same_key_after() -> None:
    drawn, keys = [], []
    for rank, count in ((0, 1), (1, 3), (1, 3)):
        mx.random.seed(7)
        group: Any = _Ranks(rank, 2)
        with distributed.own_random_numbers(group):
            drawn.append(mx.random.uniform(shape=(4,)).tolist())
            mx.eval([mx.random.uniform() for _ in range(count)])
        keys.append(mx.random.state[0].tolist())
    assert drawn[0] != drawn[1] == drawn[2]
    assert keys[0] == keys[1] == keys[2] != [0, 7]


def test_fully_shard_names_all_that_is_in_its_way() -> None:
    from training_makers import make_model

    from openelm_mlx.optim import OptimizerArgs
    from openelm_mlx.sharding import check_fully_shard

    model = make_model()
    adam, muon = (OptimizerArgs(optimizer=name).build() for name in ("adamw", "muon"))
    check_fully_shard(model, adam, "nccl", 2, checkpoint="layer")
    model.transformer.layers[1].freeze()
    with pytest.raises(
        ValueError, match=r"mpi backend.*muon needs whole.*use layer.*frozen.*divide by 3"
    ):
        check_fully_shard(model, muon, "mpi", 3, checkpoint="attention")
    with pytest.raises(ValueError, match="this run has one rank"):
        check_fully_shard(make_model(), adam, "none", 1, checkpoint="none")


@pytest.mark.slow
def test_the_watchdog_ends_a_step_without_progress_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes: list[Any] = []
    with Watchdog(0.4, 3, end=codes.append) as watchdog:
        for _ in range(6):
            time.sleep(0.1)
            watchdog.alive()
        assert codes == []
        time.sleep(0.8)
    assert codes == [STALLED]
    assert "error: rank 3: no progress in 0.4 s" in capsys.readouterr().err
