"""`prune` beside processes that write and delete, and where permissions are missing: it goes on, says so, and loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpttools.cli import main
from ckpttools.operations.validate import validate
from ckpttools.snapshots.runs import read_run
from ckpttools.storage.trash import PREFIX
from tests.conftest import Answer
from tests.run_trees import make_tiny

Run = Callable[..., Answer]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fill(tmp_path / "run")


@pytest.fixture
def open_run() -> Iterator[Path]:
    """A run directory that other users can reach; pytest's own directories are closed to them."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        yield fill(place / "run")
    finally:
        shutil.rmtree(place)


def fill(run: Path) -> Path:
    for step in range(1, 5):
        make_tiny(run / f"step-{step}", age_h=24 * (10 - step), step=step)
    return run


def left(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def assert_nothing_half_deleted(run: Path) -> None:
    for snapshot in read_run(str(run)).snapshots:
        assert "ok" == validate(str(run / snapshot.path), depth="structure").verdict, snapshot.path


# other processes


def test_what_another_process_goes_on_writing_is_left_in_the_trash(ckpttools: Run, run: Path) -> None:
    code = "for i in range(10**9):\n    open(f'new-{i % 50}', 'w').close()\n    i or print('x', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=run / "step-1" / "logs", stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        answer = ckpttools("prune", run, "--keep-last", 2, "--apply")
        writer.kill()
    assert answer.exit_code in (0, 4)  # it may be just between two files
    assert ["step-3", "step-4"] == [n for n in left(run) if not n.startswith(PREFIX)]
    assert_nothing_half_deleted(run)
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 2, "--apply")
    assert ["step-3", "step-4"] == left(run)


@pytest.mark.parametrize("times", [1, 99])
def test_a_file_that_appears_meanwhile_is_removed_too(
    ckpttools: Run, run: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    real, appeared = os.rmdir, []

    def rmdir(path: str, **more: object) -> None:
        if Path(str(path)).name == "deep" and len(appeared) < times:
            appeared.append(1)
            raise OSError(39, "Directory not empty", path)
        real(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rmdir", rmdir)
    answer = ckpttools("prune", run, "--keep-last", 3, "--apply", "--jobs", 1)
    assert (0 if times == 1 else 4) == answer.exit_code
    assert ("something is being written into it" in answer.stderr) == (times == 99)


@pytest.mark.slow
def test_another_process_deletes_the_same(ckpttools: Run, tmp_path: Path) -> None:
    code = "import shutil, sys\nprint('x', flush=True)\nfor s in (1, 2):\n    shutil.rmtree(f'{sys.argv[1]}/step-{s}', True)"
    for i in range(20):
        run = fill(tmp_path / str(i))
        with subprocess.Popen([sys.executable, "-c", code, run], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            answer = ckpttools("prune", run, "--keep-last", 2, "--apply")
        assert answer.exit_code in (0, 4)
        assert {"step-3", "step-4"} <= set(left(run))
        assert 0 == ckpttools("prune", run, "--keep-last", 2, "--apply").exit_code
        assert ["step-3", "step-4"] == [n for n in left(run) if n not in ("step-1", "step-2")]


# permissions


def as_nobody(run: Path, *args: object) -> Answer:
    """A command as another user, in a process of its own; what it needs was imported before."""
    subprocess_out, subprocess_err = run.parent / "out", run.parent / "err"
    for command in ("prune", "latest", "status"):
        with pytest.raises(SystemExit):
            main([command, str(run), *(["--keep-last", "1"] if command == "prune" else [])])
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            for number, path in ((1, subprocess_out), (2, subprocess_err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            main([str(a) for a in args])
        except SystemExit as e:
            code = int(e.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Answer(status, subprocess_out.read_text(), subprocess_err.read_text())


def give_to_nobody(*paths: Path) -> None:
    for path in paths:
        os.chown(path, NOBODY, NOBODY)


@needs_root
def test_a_run_of_somebody_else_is_one_clear_message(open_run: Path) -> None:
    answer = as_nobody(open_run, "prune", open_run, "--keep-last", 1, "--apply")
    assert (4, "") == (answer.exit_code, answer.stdout)
    assert answer.stderr.startswith("ckpttools: error: permission denied: ")
    assert ["step-1", "step-2", "step-3", "step-4"] == left(open_run)


@needs_root
def test_a_snapshot_of_somebody_else_stays_whole_and_the_others_go(open_run: Path) -> None:
    give_to_nobody(open_run, *(open_run / "step-1").rglob("*"), open_run / "step-1")
    give_to_nobody(*(open_run / "step-2").rglob("*"), open_run / "step-2")
    os.chown(open_run / "step-2" / "logs" / "deep", 0, 0)  # one of its directories is enough
    answer = as_nobody(open_run, "prune", open_run, "--keep-last", 1, "--apply")
    assert 4 == answer.exit_code
    assert 2 == answer.stderr.count("not deleted: permission denied to delete what is in it")
    assert ["step-2", "step-3", "step-4"] == left(open_run)
    assert_nothing_half_deleted(open_run)


@needs_root
def test_in_a_sticky_directory_what_is_not_ours_stays(open_run: Path) -> None:
    open_run.chmod(0o1777)
    for step in (1, 2):
        for path in (open_run / f"step-{step}").rglob("*"):
            path.chmod(0o777)
        (open_run / f"step-{step}").chmod(0o777)
    give_to_nobody(open_run / "step-1")
    answer = as_nobody(open_run, "prune", open_run, "--keep-last", 2, "--apply")
    assert (4, ["step-2", "step-3", "step-4"]) == (answer.exit_code, left(open_run))
    assert "not deleted: operation not permitted" in answer.stderr


@needs_root
def test_what_cannot_be_looked_at_is_left_alone_and_told(open_run: Path) -> None:
    give_to_nobody(open_run)
    (open_run / "lost+found").mkdir(mode=0o700)
    assert 0 == as_nobody(open_run, "latest", open_run).exit_code
    (open_run / "step-4").chmod(0o700)
    (open_run / "step-3").chmod(0o744)  # its names can be listed, and nothing more
    answer = as_nobody(open_run, "latest", open_run)
    assert (0, f"{open_run}/step-2\n") == (answer.exit_code, answer.stdout)
    assert [f"{open_run}/step-4", f"{open_run}/step-3"] == [line.split(": ")[1][12:] for line in answer.stderr.splitlines()]
    answer = as_nobody(open_run, "status", open_run, "--quiet")
    assert 1 == answer.exit_code
    assert 2 == answer.stdout.count("cannot be read: permission denied")
    answer = as_nobody(open_run, "prune", open_run, "--keep-last", 1, "--apply")
    assert 4 == answer.exit_code
    assert 2 == answer.stderr.count("left alone, since it cannot be read: permission denied")
    assert ["lost+found", "step-1", "step-2", "step-3", "step-4"] == left(open_run)


@needs_root
def test_where_all_snapshots_cannot_be_looked_at_is_an_error(open_run: Path) -> None:
    (open_run / "checkpoint").mkdir(mode=0o700)
    answer = as_nobody(open_run, "latest", open_run)
    assert (4, "") == (answer.exit_code, answer.stdout)
    assert "permission denied" in answer.stderr


@pytest.fixture
def immutable() -> Iterator[Callable[[Path], None]]:
    """Makes a file or directory one that nobody can delete."""
    made: list[Path] = []

    def make(path: Path) -> None:
        if not shutil.which("chattr") or subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
            pytest.skip("needs root and a file system with immutable files")
        made.append(path)

    yield make
    for path in made:
        for moved in (path, *path.parent.parent.glob(f"{PREFIX}*/{path.name}"), *path.parent.glob(f"{PREFIX}*-{path.name}")):
            if moved.exists():
                subprocess.run(["chattr", "-i", moved], check=True)


def test_a_file_that_nobody_can_delete_does_not_keep_the_others(ckpttools: Run, run: Path, immutable, tmp_path: Path) -> None:
    immutable(run / "step-1" / "model.safetensors")
    for _ in range(2):  # the next run tries again
        answer = ckpttools("prune", run, "--keep-last", 2, "--apply", "--log", tmp_path / "log")
        assert 4 == answer.exit_code
        assert "operation not permitted" in answer.stderr
        assert ["step-3", "step-4"] == [n for n in left(run) if not n.startswith(PREFIX)]
        assert_nothing_half_deleted(run)
    (file,) = run.glob(f"{PREFIX}*/model.safetensors")
    subprocess.run(["chattr", "-i", file], check=True)
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 2, "--apply", "--log", tmp_path / "log")
    assert ["step-3", "step-4"] == left(run)


def test_a_directory_that_nobody_can_change_stays_whole(ckpttools: Run, run: Path, immutable) -> None:
    immutable(run / "step-1" / "logs")
    answer = ckpttools("prune", run, "--keep-last", 2, "--apply")
    assert (4, ["step-1", "step-3", "step-4"]) == (answer.exit_code, left(run))
    assert "not deleted: permission denied to delete what is in it" in answer.stderr
    assert_nothing_half_deleted(run)
