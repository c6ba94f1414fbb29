"""The demo: every step by a command that works by hand, on from where it stopped, offline."""

import importlib.util
import json
import os
import shlex
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, run_here

from convert.cli import ROUTES
from openelm_mlx import blas, demo_report, demo_room, demo_steps
from openelm_mlx.cli import COMMANDS
from openelm_mlx.demo_room import RECORD, STAGES, DemoArgs, Room
from openelm_mlx.demo_run import demo
from openelm_mlx.demo_steps import STEPS, Step
from openelm_mlx.metrics import MetricsLog, read_metrics

SETTINGS = DemoArgs()
QUICK = ("--limit", 300, "--vocab-size", 400, "--pretrain-seconds", 2, "--finetune-seconds", 1)


def steps(*names: str, work: Callable[[Room], None] = lambda _: None) -> list[Step]:
    """Steps that leave a file each, after ``work``."""

    def leave(name: str) -> Callable[[Room], None]:
        def do(room: Room) -> None:
            work(room)
            room.path(name).write_text(f"{name} {len(room.done)}")
            room.say(f"made {name}")

        return do

    return [Step(name=name, title=f"The {name}", work=leave(name)) for name in names]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_commands_of_the_demo_are_those_of_the_command_line() -> None:
    for name, (module, suffix) in STAGES.items():
        route = ROUTES[name.split()[1]] if name.startswith("convert ") else COMMANDS[name]
        assert (module, suffix.removeprefix("_")) == route[:2]


def test_a_finished_demo_is_left_as_it_is_and_the_way_on_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    assert demo(folder, SETTINGS, overwrite=False, steps=steps("a", "b")) == 0
    assert "1/2  The a" in capsys.readouterr().out
    before = files(folder)
    assert set(before) == {"a", "b", RECORD, "report.md"}
    assert demo(folder, SETTINGS, overwrite=False, steps=steps("a", "b")) == 0
    said = capsys.readouterr().out
    assert "report.md" in said
    assert "--overwrite runs it anew" in said
    assert files(folder) == before


@pytest.mark.slow
def test_a_stopped_demo_says_how_to_go_on_and_does_only_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def stop(room: Room) -> None:
        if room.done:
            raise KeyboardInterrupt

    settings = DemoArgs(pretrain_seconds=2.5, limit=300)
    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path, settings, overwrite=False, steps=steps("a", "b", work=stop))
    assert "stopped in step 2" in caplog.text
    assert f"demo --output {tmp_path} --pretrain-seconds 2.5 --limit 300" in caplog.text
    (tmp_path / "a").unlink()
    capsys.readouterr()
    assert demo(tmp_path, settings, overwrite=False, steps=steps("a", "b")) == 0
    assert "going on with step 2" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "b").is_file()


def test_a_folder_of_something_else_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="no demo has written; give another --output"):
            demo(tmp_path, SETTINGS, overwrite=overwrite, steps=steps("a"))
    with pytest.raises(FileExistsError, match="no demo has written"):
        demo(tmp_path / "letters.txt", SETTINGS, overwrite=True, steps=steps("a"))
    assert files(tmp_path) == {"letters.txt": b"dear"}


@pytest.mark.slow
def test_other_settings_begin_anew_only_when_asked_to(tmp_path: Path) -> None:
    demo(tmp_path, SETTINGS, overwrite=False, steps=steps("a"))
    other = DemoArgs(pretrain_seconds=5)
    with pytest.raises(ValueError, match="holds a demo with other settings; give the same"):
        demo(tmp_path, other, overwrite=False, steps=steps("a"))
    (tmp_path / "old").touch()
    assert demo(tmp_path, other, overwrite=True, steps=steps("a")) == 0
    assert not (tmp_path / "old").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pretrain_seconds": 0.0}, "pretrain_seconds must be more than 0, got 0"),
        ({"limit": 10}, "limit must be more than 99, got 10"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DemoArgs(**settings)


def test_a_failed_command_is_kept_in_the_log_and_not_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(room: Room) -> None:
        room.openelm("plot", room.path("nothing"))

    with pytest.raises(FileNotFoundError):
        demo(tmp_path, SETTINGS, overwrite=False, steps=steps("a", work=fail))
    assert "plot" in (tmp_path / demo_room.LOG).read_text()
    assert json.loads((tmp_path / RECORD).read_text())["steps"] == {}


def test_without_matplotlib_there_are_no_pictures_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (demo_steps, demo_report):
        monkeypatch.setattr(module, "have_matplotlib", lambda: False)
    pictures = [step for step in STEPS if step.name == "pictures"]
    assert demo(tmp_path, SETTINGS, overwrite=False, steps=pictures) == 0
    assert 'no pictures: they need matplotlib: pip install "openelm-mlx[plot]"' in (
        capsys.readouterr().out
    )
    assert "![" not in (tmp_path / "report.md").read_text()


def test_on_the_slow_blas_model_and_updates_are_smaller_and_the_cause_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blas, "mlx_backend", lambda: "cpu")
    monkeypatch.setattr(blas, "status", "absent: libopenblas.so.0 not found")
    asked: list[tuple[str, ...]] = []

    def note(_: Room, *words: object) -> str:
        asked.append(tuple(map(str, words)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Room, "openelm", note)
    pretrain = [step for step in STEPS if step.name == "pretrain"]
    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path, SETTINGS, overwrite=False, steps=pretrain)
    assert "--model-dim 64 --num-gqa-groups 1 --batch-size 4" in " ".join(asked[0])
    assert "slow here: OpenBLAS is absent" in caplog.text


def test_a_command_is_shown_as_it_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = demo_room.program()
    assert start == ["openelm"] or Path(start[0]).is_file()
    monkeypatch.setattr(demo_room.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert demo_room.program() == ["bin/python", "-m", "openelm_mlx.cli"]


def run_demo(capsys: pytest.CaptureFixture[str], folder: Path, *more: object) -> Outcome:
    return run_here(capsys, "demo", "--output", folder, *QUICK, *more)


@pytest.mark.slow
def test_the_whole_road_is_walked_offline_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("the demo needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    folder = tmp_path / "demo"
    outcome = run_demo(capsys, folder)
    assert outcome.code == 0, outcome.err
    for number, step in enumerate(STEPS, start=1):
        assert f"{number}/{len(STEPS)}  {step.title}" in outcome.out
    report = (folder / "report.md").read_text()
    record = json.loads((folder / RECORD).read_text())["steps"]
    commands = [line for step in record.values() for line in step["commands"]]
    assert len(commands) > 12
    for line in commands:
        assert line in report
        assert f"  $ {line}\n" in outcome.out
        assert shlex.split(line)
    assert "holds (L" in report
    assert (folder / "OpenELM.mlpackage").is_dir()
    assert (folder / "OpenELM-bundle").is_dir()
    for step in ("pretrain", "finetune"):
        assert record[step]["facts"]["updates"] > 0
    scored = record["perplexity"]["facts"]["perplexity"]
    assert list(scored) == ["base", "lora", "tuned", "4bit", "OpenELM"]
    assert all(1 < value < 1000 for value in scored.values())
    assert scored["tuned"] == pytest.approx(scored["lora"], rel=1e-3)
    assert f"base {scored['base']:.1f}, lora {scored['lora']:.1f}" in report
    if importlib.util.find_spec("matplotlib"):
        assert {"loss.png", "layers.png"} <= {p.name for p in folder.iterdir()}
        assert "![" in report
    again = run_demo(capsys, folder)
    assert (again.code, "finished demo" in again.out) == (0, True)


@pytest.mark.slow
def test_ctrl_c_while_it_trains_keeps_the_steps_made_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "__kwdefaults__", {"steps": STEPS[:3]})
    write, folder = MetricsLog.write, tmp_path / "demo"

    def write_and_interrupt(self: MetricsLog, line: Any) -> None:
        write(self, line)
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", write_and_interrupt)
        outcome = run_demo(capsys, folder)
    assert outcome.code == 130
    assert "stopped in step 3" in outcome.err
    steps_made = read_metrics(folder / "base")
    assert [line["step"] for line in steps_made] == [1, 2, 3]
    outcome = run_demo(capsys, folder)
    assert outcome.code == 0, outcome.err
    assert "--resume" in outcome.out
    assert read_metrics(folder / "base")[:3] == steps_made
    assert len(read_metrics(folder / "base")) > 3
