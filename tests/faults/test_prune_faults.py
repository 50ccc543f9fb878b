"""`prune --apply` broken at every file-system call, and killed: survivors are whole, and the next run finishes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

from ckpttools.cli import main
from ckpttools.operations.validate import validate
from ckpttools.snapshots.runs import STAGE, read_run
from ckpttools.storage.trash import PREFIX
from tests.run_trees import NOW, make_tiny

CALLS = (
    "rename",
    "unlink",
    "rmdir",
    "open",
    "scandir",
    "fsync",
    "write",
    "lstat",
    "stat",
    "listdir",
    "ftruncate",
    "pwrite",
    "mkdir",
)
KEPT = {"step-3", "step-4"}


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[[], Path]:
    """Makes a run of four snapshots, of which two are to go, and something left by an interrupted run."""
    count = iter(range(10**6))

    def make() -> Path:
        run = tmp_path / str(next(count)) / "run"
        for step in range(1, 5):
            make_tiny(run / f"step-{step}", age_h=24 * (10 - step), step=step)
        (run / STAGE / "2.done").mkdir(parents=True)
        for mark in ("step-1-unfinished", "._dlrover_ckpt_stage/2.done/0"):
            (run / mark).touch()
        for mark in ("step-1-unfinished", "._dlrover_ckpt_stage/2.done/0", "._dlrover_ckpt_stage/2.done"):
            os.utime(run / mark, (NOW - 9 * 86400,) * 2)
        make_tiny(run / f"{PREFIX}01234567-step-0")
        return run

    return make


def prune(run: Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["prune", str(run), "--keep-last", "2", "--apply", "--jobs", "2", "--log", str(run.parent / "log")])
    return int(stop.value.code or 0)


@contextmanager
def counted(at: int, then: Callable[[str], None]) -> Iterator[list[int]]:
    """Calls `then` before the call number `at` of those that touch the file system; yields the number of calls so far."""
    seen = [0]

    def wrap(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*args: object, **more: object) -> object:
            seen[0] += 1
            if seen[0] == at:
                then(name)
            return real(*args, **more)

        return call

    supports = {"supports_dir_fd": set(os.supports_dir_fd), "supports_fd": set(os.supports_fd)}
    with mock.patch.multiple(os, **{name: wrap(name) for name in CALLS}):
        for name, real in supports.items():  # shutil.rmtree chose its safe way when it was imported
            setattr(os, name, real)
        yield seen


def broken(_name: str) -> None:
    raise OSError(5, "Input/output error", "somewhere")


def assert_whole(run: Path) -> None:
    """Every snapshot that is listed is whole, and those to be kept are among them."""
    listed = {s.path: s.state for s in read_run(str(run)).snapshots}
    assert set(listed) >= KEPT
    for path, state in listed.items():
        assert ("committed" if path in KEPT else "unfinished") == state, path  # never without its mark
        assert "ok" == validate(str(run / path), depth="structure").verdict, path


def assert_finished(run: Path) -> None:
    assert 0 == prune(run)
    assert KEPT == {p.name for p in run.iterdir() if p.name != STAGE}
    assert [] == list((run / STAGE).iterdir())


@pytest.mark.slow
def test_a_fault_at_each_file_system_call(new_run, capsys):
    run = new_run()
    with counted(0, broken) as seen:
        assert 0 == prune(run)
    calls = seen[0]
    assert calls > 50
    for at in range(1, calls + 1):
        run = new_run()
        with counted(at, broken):
            status = prune(run)
        said = capsys.readouterr()
        assert status in (0, 1, 4), (at, said)
        assert "internal error" not in said.err, (at, said)
        assert_whole(run)
        assert_finished(run)


def died(run: Path, child: Callable[[], None]) -> int:
    """The wait status of a process that does something to the run."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            child()
        finally:
            os._exit(0)
    return pid


@pytest.mark.slow
def test_killed_before_each_file_system_call(new_run):
    run = new_run()
    with counted(0, broken) as seen:
        prune(run)

    for at in range(1, seen[0] + 1):
        run = new_run()

        def child(run: Path = run, at: int = at) -> None:
            with counted(at, lambda _name: os.kill(os.getpid(), signal.SIGKILL)):
                prune(run)

        os.waitpid(died(run, child), 0)
        assert_whole(run)
        assert_finished(run)


@pytest.mark.slow
def test_killed_at_random_times(new_run):
    rng = random.Random(4)
    killed = 0
    for _ in range(200):
        run = new_run()
        pid = died(run, lambda run=run: prune(run))
        time.sleep(rng.random() * 0.04)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        assert_whole(run)
        assert_finished(run)
    assert killed > 20


def test_two_at_once_delete_the_same(new_run):
    for _ in range(10):
        run = new_run()
        pids = [died(run, lambda run=run: prune(run)) for _ in range(3)]
        for pid in pids:
            os.waitpid(pid, 0)
        assert_whole(run)
        assert_finished(run)
