"""`prune --apply` on object stores, broken at every request and killed: survivors are whole, and the next run finishes."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpttools.operations.validate import validate
from ckpttools.snapshots.runs import STAGE, read_run
from ckpttools.storage.runlock import LOCK_NAME
from ckpttools.storage.tree import TOMBSTONE
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES
from tests.run_trees import REAL, make_tiny

Run = Callable[..., Answer]
REQUESTS = ("pipe_file", "rm_file", "cat_file", "find", "info", "exists", "isfile", "ls", "rmdir")
POLICY = ("--keep-last", "2", "--apply", "--grace", "0s")


class Store:
    """A run of four snapshots on an object store, of which two are to go, one of them with its mark."""

    def __init__(self, root: str, tmp_path: Path) -> None:
        self.location = f"{root}/{uuid.uuid4()}"
        self.fs, self.root = fsspec.core.url_to_fs(self.location)
        self._tiny = make_tiny(tmp_path / uuid.uuid4().hex, step=1)

    def fill(self, oldest: str = "") -> Store:
        if oldest:
            self.put(oldest, REAL)
        for step in (1, 2):
            if oldest == f"step-{step}":
                continue
            self.put(f"step-{step}", self._tiny)
        self.fs.pipe_file(f"{self.root}/step-1-unfinished", b"x")
        self.fs.pipe_file(f"{self.root}/{STAGE}/2.done/0", b"x")
        for step in (3, 4):
            self.put(f"step-{step}", self._tiny)
        return self

    def put(self, path: str, source: Path) -> None:
        for file in source.rglob("*"):
            if file.is_file():
                self.fs.pipe_file(f"{self.root}/{path}/{file.relative_to(source)}", file.read_bytes())

    def remove(self) -> None:
        """Nothing of it stays; a store of memory asks every object of all runs."""
        with suppress(FileNotFoundError):
            self.fs.rm(self.root, recursive=True)

    @property
    def left(self) -> set[str]:
        self.fs.invalidate_cache()
        return {p[len(self.root) :].strip("/").partition("/")[0] for p in self.fs.find(self.root)}

    def assert_whole(self) -> None:
        """Every snapshot that is listed is whole, the marked ones still with their mark, and those to be kept are there."""
        listed = {s.path: s.state for s in read_run(self.location).snapshots}
        assert set(listed) >= {"step-3", "step-4"}
        for path, state in listed.items():
            assert ("committed" if path in ("step-3", "step-4") else "unfinished") == state, path
            assert "ok" == validate(f"{self.location}/{path}", depth="structure").verdict, path

    def assert_finished(self, ckpttools: Run) -> None:
        assert Answer(0, "", "") == ckpttools("prune", self.location, *POLICY)
        assert {"step-3", "step-4"} == self.left


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    made: list[Store] = []

    def make(oldest: str = "") -> Store:
        made.append(Store("memory:/", tmp_path).fill(oldest))
        return made[-1]

    yield make
    for s in made:
        s.remove()


@contextmanager
def broken(at: int, error: BaseException | None = None) -> Iterator[list[int]]:
    """The request number `at` fails, or with an error of its own that and all after it; yields the number of requests so far."""
    seen = [0]

    def wrap(name: str) -> Callable[..., object]:
        real = getattr(MemoryFileSystem, name)

        def call(*args: object, **more: object) -> object:
            seen[0] += 1
            if error is not None and 0 < at <= seen[0]:
                raise error
            if seen[0] == at:
                raise PermissionError(13, "Permission denied", name)
            return real(*args, **more)

        return call

    with mock.patch.multiple(MemoryFileSystem, **{name: wrap(name) for name in REQUESTS}):
        yield seen


def test_prune_deletes_and_is_silent(ckpttools: Run, store, tmp_path: Path) -> None:
    run = store()
    assert Answer(0, "", "") == ckpttools("prune", run.location, *POLICY, "--log", tmp_path / "log")
    assert {"step-3", "step-4"} == run.left
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert ["step-1", "step-1-unfinished", "step-2", f"{STAGE}/2.done"] == [line["path"] for line in lines]
    assert all(line["error"] is None for line in lines)


def test_without_apply_nothing_is_touched(ckpttools: Run, store) -> None:
    run = store()
    before = run.fs.find(run.root)
    assert "would delete 2 of 4 snapshots" in ckpttools("prune", run.location, "--keep-last", 2, "--grace", "0s").stdout
    assert before == run.fs.find(run.root)


def test_the_commit_record_goes_first(ckpttools: Run, store) -> None:
    run = store("step-0")
    deleted: list[str] = []
    real = MemoryFileSystem.rm_file
    with mock.patch.object(MemoryFileSystem, "rm_file", lambda fs, path: (deleted.append(path), real(fs, path))[1]):
        ckpttools("prune", run.location, *POLICY)
    assert f"{run.root}/step-0/.metadata" == next(p for p in deleted if "/step-0/" in p)
    assert f"{run.root}/step-0/{TOMBSTONE}" == [p for p in deleted if "/step-0/" in p][-1]


def test_single_objects_are_snapshots(ckpttools: Run, store) -> None:
    run = store()
    for step in (1, 2, 3):
        data = (FIXTURES / "torch/lightning_ckpt/ckpt/epoch=1-step=6.ckpt").read_bytes()
        run.fs.pipe_file(f"{run.root}/lightning/step={step}.ckpt", data)
    assert Answer(0, "", "") == ckpttools("prune", f"{run.location}/lightning", "--keep-last", 1, "--apply")
    assert ["step=3.ckpt"] == [p.rpartition("/")[2] for p in run.fs.find(f"{run.root}/lightning")]


@pytest.mark.slow
def test_a_fault_at_each_request(ckpttools: Run, store) -> None:
    with broken(0) as seen:
        ckpttools("prune", store().location, *POLICY)
    calls = seen[0]
    assert calls > 30
    for at in range(1, calls + 1):
        run = store()
        with broken(at):
            answer = ckpttools("prune", run.location, *POLICY)
        assert answer.exit_code in (0, 4), at
        run.assert_whole()
        run.assert_finished(ckpttools)
        run.remove()


class Killed(BaseException):
    """Stands for the end of the process: next to nothing catches it, and no request is made after it."""


@pytest.mark.slow
def test_an_end_before_each_request(ckpttools: Run, store) -> None:
    with broken(0) as seen:
        ckpttools("prune", store().location, *POLICY)
    calls = seen[0]
    for at in range(1, calls + 1):
        run = store()
        with broken(at, Killed()), suppress(Killed):
            ckpttools("prune", run.location, *POLICY)
        run.assert_whole()
        run.assert_finished(ckpttools)
        run.remove()


def test_a_new_save_over_what_was_half_deleted_is_not_finished_off(ckpttools: Run, store, tmp_path: Path) -> None:
    run = store("step-2")
    real = MemoryFileSystem.rm_file

    def only_the_record(fs: MemoryFileSystem, path: str) -> None:
        if not path.endswith((".metadata", LOCK_NAME)):
            raise PermissionError(13, "Permission denied", path)
        real(fs, path)

    with mock.patch.object(MemoryFileSystem, "rm_file", only_the_record):
        assert 4 == ckpttools("prune", run.location, *POLICY).exit_code
    assert "step-2" not in {s.path for s in read_run(run.location).snapshots}
    run.put("step-2", REAL)
    assert "step-2" in {s.path for s in read_run(run.location).snapshots}
    assert 0 == ckpttools("prune", run.location, "--keep-last", "all", "--apply").exit_code
    assert "ok" == validate(f"{run.location}/step-2").verdict
    assert not run.fs.exists(f"{run.root}/step-2/{TOMBSTONE}")


@pytest.mark.parametrize("change", ["written", "gone", "tracker", "newest gone"])
def test_what_changes_after_the_decision_is_seen(store, change: str) -> None:
    from ckpttools.snapshots.facts import read_facts
    from ckpttools.snapshots.policy import Policy
    from ckpttools.snapshots.remove import remove
    from ckpttools.snapshots.retention import decide

    run = store()
    found = read_run(run.location)
    decisions = decide(read_facts(found), Policy(last=2, grace_s=0), now=time.time() + 9)
    if change == "written":
        run.fs.pipe_file(f"{run.root}/step-2/trainer_state.json", b"{}")
    elif change == "tracker":
        run.fs.pipe_file(f"{run.root}/latest", b"step-2")
    else:
        run.fs.rm(f"{run.root}/{'step-2' if change == 'gone' else 'step-4'}", recursive=True)
    removals = {r.path: r for r in remove(found, decisions, jobs=1, log="", clock=lambda: 0)}
    assert removals["step-2"].error.startswith("not deleted: ") == (change != "gone")
    assert run.fs.exists(f"{run.root}/step-2") == (change != "gone")


# the lock


def test_a_holder_elsewhere_is_not_taken_over(ckpttools: Run, store) -> None:
    run = store()
    run.fs.pipe_file(f"{run.root}/{LOCK_NAME}", b'{"host": "elsewhere", "pid": 1, "time": 5}')
    answer = ckpttools("prune", run.location, *POLICY)
    assert 5 == answer.exit_code
    assert "elsewhere" in answer.stderr
    assert f"delete {LOCK_NAME}" in answer.stderr
    run.fs.rm_file(f"{run.root}/{LOCK_NAME}")
    run.assert_finished(ckpttools)


@pytest.mark.parametrize("holder", ["not JSON", "[]", '{"host": 5}'])
def test_a_lock_that_says_nothing_of_a_holder(ckpttools: Run, store, holder: str) -> None:
    run = store()
    run.fs.pipe_file(f"{run.root}/{LOCK_NAME}", holder.encode())
    assert (5 if "host" in holder else 0) == ckpttools("prune", run.location, *POLICY).exit_code


def test_a_dead_holder_on_this_host_is_taken_over(ckpttools: Run, store) -> None:
    run = store()
    holder = {"host": os.uname().nodename, "pid": os.getppid(), "uid": os.getuid(), "time": 5}
    run.fs.pipe_file(f"{run.root}/{LOCK_NAME}", json.dumps(holder).encode())
    run.assert_finished(ckpttools)


def test_a_run_that_is_not_there_gets_no_lock(ckpttools: Run, store) -> None:
    run = store()
    answer = ckpttools("prune", f"{run.location}/none", *POLICY)
    assert (4, False) == (answer.exit_code, run.fs.exists(f"{run.root}/none"))


def test_a_store_that_cannot_make_only_what_is_new(ckpttools: Run, store) -> None:
    real = MemoryFileSystem.pipe_file
    with mock.patch.object(MemoryFileSystem, "pipe_file", lambda fs, path, value, **_: real(fs, path, value)):
        store().assert_finished(ckpttools)
        run = store()
        run.fs.pipe_file(f"{run.root}/{LOCK_NAME}", b'{"host": "elsewhere"}')
        assert 5 == ckpttools("prune", run.location, *POLICY).exit_code


# S3 as moto has it


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    import shutil

    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("needs moto_server")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    setting = {
        "FSSPEC_S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-west-2",
    }
    null = subprocess.DEVNULL
    with (
        mock.patch.dict(os.environ, setting),
        subprocess.Popen([server, "-H", "127.0.0.1", "-p", str(port)], stdout=null, stderr=null) as process,
    ):
        from fsspec.config import conf, set_conf_env

        set_conf_env(conf)
        try:
            for _ in range(150):
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.2)
            fsspec.filesystem("s3").mkdir("runs", region_name="us-west-2")
            yield "s3://runs"
        finally:
            conf.pop("s3", None)
            process.kill()


def test_s3_is_pruned(ckpttools: Run, s3: str, tmp_path: Path) -> None:
    run = Store(s3, tmp_path).fill()
    time.sleep(1.1)  # times of objects are whole seconds, and a clock that is behind is refused
    run.assert_finished(ckpttools)


def test_s3_makes_one_lock_only(ckpttools: Run, s3: str, tmp_path: Path) -> None:
    from ckpttools.storage.object_lock import _create

    run = Store(s3, tmp_path).fill()
    assert [True, False] == [_create(run.fs, f"{run.root}/lock", {"token": t}) for t in "ab"]
    assert b'{"token": "a"}' == run.fs.cat_file(f"{run.root}/lock")


@pytest.mark.slow
def test_s3_killed_at_random_times(ckpttools: Run, s3: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    killed = 0
    for _ in range(4):
        run = Store(s3, tmp_path).fill()
        time.sleep(1.1)
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpttools", "prune", run.location, *POLICY], cwd=Path(__file__).parents[2]
        )
        deadline = time.monotonic() + 20
        while run.fs.exists(f"{run.root}/step-1/model.safetensors") and time.monotonic() < deadline and process.poll() is None:
            if run.fs.exists(f"{run.root}/{LOCK_NAME}") and rng.random() < 0.2:
                break
            run.fs.invalidate_cache()
        time.sleep(rng.random() * 0.1)
        process.kill()
        killed += process.wait() < 0
        run.fs.invalidate_cache()
        run.assert_whole()
        run.assert_finished(ckpttools)
    assert killed > 0
