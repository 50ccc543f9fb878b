"""Kill it anywhere, fill the disk, break the device: nothing half-done looks done, nothing good is lost, the next run goes on."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckpttools.errors import DestinationError, StorageError
from ckpttools.execute import Executed, run
from ckpttools.model import FileEntry
from ckpttools.plan import Plan
from ckpttools.storage.local_target import LocalTarget
from ckpttools.storage.target import open_target
from ckpttools.storage.writing import Space
from tests.plan_cases import FP32, Case, along, arrange, expected_files, files_in, leftovers, make_case, some_tensors

SEAL = {"out.seal": b"seal"}
CALLS = ("pwrite", "ftruncate", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
"""Whatever changes something on disk goes through one of these."""


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: hundreds of runs that flush everything keep a disk busy for minutes."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source", some_tensors(), along(0, 3))


def plan_of(case: Case) -> Plan:
    return case.plan(arrange(case, along(1, 2), index=True), companions=[FileEntry("config.json", 17)])


def carry_out(case: Case, plan: Plan, destination: Path, *, is_file: bool = False, **options) -> Executed:
    target, seal = open_target(str(destination), is_file=is_file), {path: [data] for path, data in SEAL.items()}
    return run(plan, case.source, target, finish=lambda _: seal, **options)


@pytest.fixture(autouse=True)
def journal_at_once(monkeypatch) -> None:
    """Each tensor is recorded by itself and at once, so that a few bytes go through what terabytes go through."""
    monkeypatch.setattr("ckpttools.execute.local._GROUP_TENSORS", 1)
    monkeypatch.setattr("ckpttools.execute.journal._MIN_BATCH_BYTES", 0)
    monkeypatch.setattr("ckpttools.execute.journal._BATCHES", 1 << 30)


def kill_at(point: int, *, is_after: bool) -> None:
    """Make this process die by SIGKILL at the n-th call that changes the disk, before or after it; a write dies half-way."""
    counter, lock = itertools.count(), threading.Lock()

    def deadly(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args, **kwargs):
            with lock:
                is_last = next(counter) == point
                if is_last and is_after:
                    original(*args, **kwargs)
                elif is_last and name == "pwrite":
                    original(args[0], args[1][: len(args[1]) // 2], args[2])
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def survives(work: Callable[[], object], point: int, *, is_after: bool) -> bool:
    """Whether `work`, in a process of its own, was done before the n-th change."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kill_at(point, is_after=is_after)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


@dataclass(frozen=True)
class Scene:
    """A destination before a run, and after it."""

    is_file: bool
    is_replacing: bool
    jobs: int

    def prepare(self, parent: Path) -> Path:
        destination = parent / "out"
        if self.is_replacing and self.is_file:
            destination.write_bytes(b"old")
        elif self.is_replacing:
            destination.mkdir()
            (destination / "old").write_bytes(b"old")
        return destination

    def plan(self, case: Case) -> Plan:
        return case.plan(arrange(case, files=1)) if self.is_file else plan_of(case)

    def new(self, case: Case) -> dict[str, bytes]:
        files = expected_files(case, self.plan(case))
        return {"out": files["out/file0.bin"], **SEAL} if self.is_file else {f"out/{p}": d for p, d in (files | SEAL).items()}

    @property
    def old(self) -> dict[str, bytes]:
        if not self.is_replacing:
            return {}
        return {"out": b"old"} if self.is_file else {"out/old": b"old"}


def visible(parent: Path) -> dict[str, bytes]:
    return {path: data for path, data in files_in(parent).items() if not path.startswith(".out.ckpttools-")}


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "scene",
    [Scene(False, False, 1), Scene(False, True, 1), Scene(True, False, 1), Scene(True, True, 1), Scene(False, True, 3)],
    ids=["directory", "replaced-directory", "file", "replaced-file", "three-jobs"],
)
def test_killed_anywhere_it_shows_the_old_or_the_new_and_the_next_run_ends_well(case, tmp_path, scene, is_after):
    plan, new = scene.plan(case), scene.new(case)
    for point in range(0, 1000, 1 if scene.jobs == 1 else 7):
        parent = tmp_path / f"at{point}"
        parent.mkdir()
        destination = scene.prepare(parent)

        def work(destination: Path = destination) -> None:
            options = {"jobs": scene.jobs, "overwrite": scene.is_replacing, "verify": True}
            carry_out(case, plan, destination, is_file=scene.is_file, **options)

        is_done = survives(work, point, is_after=is_after)
        shown = visible(parent)
        is_complete = new.items() - SEAL.items() <= shown.items()
        is_between = scene.is_replacing and not shown and (parent / ".out.ckpttools-old" / "old").exists()
        assert is_complete or shown == scene.old or is_between, f"at call {point}"
        assert is_complete or not is_done
        if is_complete and not scene.is_replacing:
            with pytest.raises(DestinationError, match="the destination exists"):
                work()
        else:
            work()
        assert files_in(parent) == new, f"at call {point}"
        assert leftovers(parent) == []
        if is_done:
            return
    pytest.fail("it never ended")


def test_killed_again_and_again_it_still_ends(case, tmp_path):
    """Every few runs get one change further than those before."""
    plan, destination = plan_of(case), tmp_path / "out"
    for point in range(3, 300):
        for _ in range(3):
            if not destination.exists():
                survives(lambda: carry_out(case, plan, destination, jobs=2), point, is_after=False)
    assert files_in(destination) == expected_files(case, plan) | SEAL
    with pytest.raises(DestinationError):
        carry_out(case, plan, destination)
    assert leftovers(tmp_path) == []


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with the options given; skips where that is not permitted."""
    place = tmp_path / "mounted"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("mounting is not permitted here")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


def test_a_disk_that_fills_up_is_a_clear_error_and_the_next_run_goes_on(tmp_path, mounted, monkeypatch):
    disk = mounted("size=600k")
    case = make_case(tmp_path / "source", {f"w{i}": (FP32, (100, 250)) for i in range(10)})
    plan = case.plan(arrange(case, along(0, 2)))
    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "space", lambda self: Space(1 << 30, None, 0, str(disk)))
        with pytest.raises(StorageError, match="no space left on device") as e:
            carry_out(case, plan, disk / "out", jobs=2)
    assert "out/file" in e.value.where
    assert " at byte " in e.value.where
    assert any("goes on where this" in hint for hint in e.value.hints)
    assert not (disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    executed = carry_out(case, plan, disk / "out", verify=True)
    assert executed.resumed_bytes > 0
    assert files_in(disk / "out") == expected_files(case, plan) | SEAL


def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path, mounted):
    disk = mounted("size=600k")
    case = make_case(tmp_path / "source", {"w": (FP32, (1000, 250))})
    with pytest.raises(StorageError, match="not enough free space"):
        carry_out(case, case.plan(arrange(case)), disk / "out")
    assert list(disk.iterdir()) == []


def test_a_disk_without_inodes_is_refused_before_the_first_byte(case, mounted):
    disk = mounted("size=1m,nr_inodes=6")
    with pytest.raises(StorageError, match="not enough free inodes"):
        carry_out(case, plan_of(case), disk / "out")
    assert list(disk.iterdir()) == []


def test_a_read_only_file_system_is_no_destination(case, mounted):
    disk = mounted("ro")
    with pytest.raises(DestinationError, match="cannot be written: read-only file system") as e:
        carry_out(case, plan_of(case), disk / "out")
    assert e.value.hints == ("the file system is mounted read-only",)


def test_a_parent_without_permission_is_no_destination(case, tmp_path, monkeypatch):
    def refuse(path: str, *_args: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(DestinationError, match="cannot be written: permission denied") as e:
        carry_out(case, plan_of(case), tmp_path / "out")
    assert e.value.where.endswith(".out.ckpttools-partial")


def fail_at(monkeypatch, name: str, point: int, number: int) -> None:
    """The n-th call of an `os` function, and every later one, fails."""
    counter, original = itertools.count(), getattr(os, name)

    def call(*args, **kwargs):
        if next(counter) >= point:
            raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("point", [3, 9, 15])
def test_a_failed_write_names_file_and_byte_and_what_to_do(case, tmp_path, monkeypatch, number, point):
    plan = plan_of(case)
    with monkeypatch.context() as patch:
        fail_at(patch, "pwrite", point, number)
        with pytest.raises(StorageError) as e:
            carry_out(case, plan, tmp_path / "out", jobs=1)
    assert e.value.message.lower() == os.strerror(number).lower()
    assert str(tmp_path / "out") in e.value.where
    assert " at byte " in e.value.where
    assert any("goes on where this" in hint for hint in e.value.hints)
    assert not (tmp_path / "out").exists()
    carry_out(case, plan, tmp_path / "out", verify=True)
    assert files_in(tmp_path / "out") == expected_files(case, plan) | SEAL


@pytest.mark.parametrize("point", range(1, 12, 2))
def test_a_failed_flush_fails_the_run(case, tmp_path, monkeypatch, point):
    plan = plan_of(case)
    with monkeypatch.context() as patch:
        fail_at(patch, "fsync", point, errno.EIO)
        with pytest.raises(StorageError, match="nput/output error"):
            carry_out(case, plan, tmp_path / "out", jobs=2)
    assert not (tmp_path / "out").exists()
    carry_out(case, plan, tmp_path / "out", verify=True)
    assert files_in(tmp_path / "out") == expected_files(case, plan) | SEAL


def test_the_journal_promises_nothing_of_a_file_that_could_not_be_flushed(case, tmp_path, monkeypatch):
    sync = LocalTarget.sync

    def fail(self: LocalTarget, path: str) -> None:
        if path == "out/file1.bin":
            raise StorageError("input/output error", where=path)
        sync(self, path)

    monkeypatch.setattr(LocalTarget, "sync", fail)
    plan = plan_of(case)
    with pytest.raises(StorageError, match="input/output error"):
        carry_out(case, plan, tmp_path / "out", jobs=2)
    lines = (tmp_path / ".out.ckpttools-partial" / "journal").read_text().splitlines()[1:]
    assert not [i for line in lines for i, *_ in json.loads(line)["segments"] if plan.files[i].path == "out/file1.bin"]


@pytest.mark.parametrize("name", ["rename", "mkdir"])
def test_a_failed_rename_finishes_nothing(case, tmp_path, monkeypatch, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_bytes(b"old")
    plan = plan_of(case)
    with monkeypatch.context() as patch:
        fail_at(patch, name, 1, errno.EIO)
        with pytest.raises((StorageError, DestinationError)):
            carry_out(case, plan, tmp_path / "out", overwrite=True)
    carry_out(case, plan, tmp_path / "out", overwrite=True)
    assert files_in(tmp_path / "out") == expected_files(case, plan) | SEAL
    assert leftovers(tmp_path) == []


def test_short_writes_are_gone_on_with(case, tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    plan = plan_of(case)
    carry_out(case, plan, tmp_path / "out")
    assert files_in(tmp_path / "out") == expected_files(case, plan) | SEAL


def test_a_source_that_shrinks_is_an_error_that_names_it(case, tmp_path):
    plan = plan_of(case)
    part = tmp_path / "source" / "part1.bin"
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(StorageError, match="became shorter while it was read") as e:
        carry_out(case, plan, tmp_path / "out")
    assert e.value.where == "part1.bin"
    assert not (tmp_path / "out").exists()


def test_a_source_that_cannot_be_read_is_an_error_that_names_it(case, tmp_path, monkeypatch):
    plan = plan_of(case)
    fail_at(monkeypatch, "preadv", 4, errno.EIO)
    with pytest.raises(StorageError) as e:
        carry_out(case, plan, tmp_path / "out", jobs=3)
    assert "part" in e.value.where
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_run_and_the_next_one_goes_on(case, tmp_path, number):
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    pending = [number]  # one signal: a second one could meet the test itself, after the run has ended

    def send(_length_bytes: int) -> None:
        if pending:
            os.kill(os.getpid(), pending.pop())

    plan = plan_of(case)
    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            carry_out(case, plan, tmp_path / "out", jobs=2, progress=send)
    finally:
        signal.signal(number, before)
    assert not (tmp_path / "out").exists()
    carry_out(case, plan, tmp_path / "out", verify=True)
    assert files_in(tmp_path / "out") == expected_files(case, plan) | SEAL


def test_a_run_that_was_killed_holds_no_lock(case, tmp_path):
    plan = plan_of(case)
    assert not survives(lambda: carry_out(case, plan, tmp_path / "out"), 20, is_after=False)
    carry_out(case, plan, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_a_killed_run_of_another_plan_is_cleared_away(case, tmp_path):
    assert not survives(lambda: carry_out(case, plan_of(case), tmp_path / "out"), 30, is_after=False)
    plan = case.plan(arrange(case, along(0, 4), files=3))
    assert replace(carry_out(case, plan, tmp_path / "out"), tensors=()).resumed_bytes == 0
    assert files_in(tmp_path / "out") == expected_files(case, plan) | SEAL
    assert leftovers(tmp_path) == []
