"""`prune` as people call it: what it says, what it deletes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttools.storage.runlock import LOCK_NAME, run_lock
from ckpttools.storage.trash import PREFIX
from tests.conftest import Answer
from tests.run_trees import aged, make, make_real, make_tiny

Run = Callable[..., Answer]
ALL_MAY_GO = ("--max-delete-fraction", 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four small snapshots, days old; step-4 the newest."""
    for step in range(1, 5):
        make_tiny(tmp_path / "run" / f"step-{step}", age_h=24 * (10 - step), step=step)
    return tmp_path / "run"


def left(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def test_without_apply_nothing_is_touched_and_every_snapshot_has_its_reasons(ckpttools: Run, run: Path) -> None:
    answer = ckpttools("prune", run, "--keep-last", 1)
    assert 0 == answer.exit_code
    assert ["step-1", "step-2", "step-3", "step-4"] == left(run)
    rows = [line.split()[:2] for line in answer.stdout.splitlines()[1:5]]
    assert [["delete", "step-1"], ["delete", "step-2"], ["delete", "step-3"], ["keep", "step-4"]] == rows
    assert "would delete 3 of 4 snapshots" in answer.stdout
    assert "newest valid, last" in answer.stdout


def test_a_dry_run_is_what_happens_without_apply(ckpttools: Run, run: Path) -> None:
    assert ckpttools("prune", run, "--keep-last", 1) == ckpttools("prune", run, "--keep-last", 1, "--dry-run")
    answer = ckpttools("prune", run, "--keep-last", 1, "--dry-run", "--apply")
    assert (2, 4) == (answer.exit_code, len(left(run)))


def test_apply_deletes_and_is_silent(ckpttools: Run, run: Path) -> None:
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert ["step-4"] == left(run)


def test_verbose_apply_says_what_it_did(ckpttools: Run, run: Path) -> None:
    answer = ckpttools("prune", run, "--keep-last", 1, "--apply", "-v")
    assert "deleted 3 snapshots" in answer.stdout


def test_the_log_has_a_line_per_deletion(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    ckpttools("prune", run, "--keep-last", 2, "--apply", "--log", log)
    ckpttools("prune", run, "--keep-last", 1, "--apply", "--log", log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert ["step-1", "step-2", "step-3"] == [line["path"] for line in lines]
    assert all(line["error"] is None and line["reasons"] == ["no rule keeps it"] and line["bytes"] > 0 for line in lines)


def test_a_log_that_cannot_be_written_keeps_everything(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    assert 4 == ckpttools("prune", run, "--keep-last", 1, "--apply", "--log", tmp_path / "none" / "log").exit_code
    assert 4 == len(left(run))


def test_json_has_one_decision_per_snapshot(ckpttools: Run, run: Path) -> None:
    document = ckpttools("prune", run, "--keep-last", 1, "--apply", "--json").document
    assert [False, False, False, True] == [d["keep"] for d in document["decisions"]]
    assert ["step-1", "step-2", "step-3"] == [r["path"] for r in document["removals"]]
    assert document["applied"]


def test_json_has_the_documented_fields(ckpttools: Run, run: Path) -> None:
    from tests.test_docs import mismatches, schema_fields

    (run / "latest").write_text("step-9")
    for options in ([], ["--apply"]):
        document = ckpttools("prune", run, "--keep-last", 1, "--json", *options).document
        assert [] == list(mismatches(document, schema_fields("ckpttools/prune/1")))


def test_a_damaged_newest_does_not_count_as_the_one_to_keep(ckpttools: Run, run: Path) -> None:
    file = run / "step-4" / "model.safetensors"
    times = (file.stat().st_atime, file.stat().st_mtime)
    file.write_bytes(file.read_bytes()[:-4])
    os.utime(file, times)
    answer = ckpttools("prune", run, "--keep-last", 1, "--apply", "-v")
    assert ["step-3", "step-4"] == left(run)
    assert "damaged, newer than the newest committed (file-too-short" in answer.stdout


def test_an_old_one_that_misses_a_file_goes(ckpttools: Run, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_real(tmp_path / f"step-{step}", age_h=24 * (9 - step))
    (tmp_path / "step-1" / "__1_0.distcp").unlink()
    os.utime(tmp_path / "step-1" / "__0_0.distcp", (1, 1))
    os.utime(tmp_path / "step-1" / ".metadata", (2, 2))
    assert Answer(0, "", "") == ckpttools("prune", tmp_path, "--keep-last", 2, "--apply")
    assert ["step-2", "step-3"] == left(tmp_path)


MARKS = ("step-1-unfinished", "step-1__0__unfinished", "step-1.tmp", "._dlrover_ckpt_stage/1.done/0", "tmp-step-1")


@pytest.mark.parametrize("mark", MARKS)
def test_the_mark_of_a_dead_save_goes_after_it_and_is_logged(ckpttools: Run, run: Path, tmp_path: Path, mark: str) -> None:
    make(run, [mark])
    aged(run / mark.rpartition("/")[0], 24 * 9)
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 3, "--apply", "--log", tmp_path / "log")
    assert ["step-2", "step-3", "step-4"] == [n for n in left(run) if n != "._dlrover_ckpt_stage"]
    assert not (run / mark).exists()
    first, second = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert ("step-1", mark.removesuffix("/0")) == (first["path"], second["path"])
    assert ["marks step-1, which is gone"] == second["reasons"]


def test_a_mark_that_was_just_made_is_a_save_that_is_going_on(ckpttools: Run, run: Path) -> None:
    (run / "step-1-unfinished").touch()
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 3, "--apply")
    assert ["step-1", "step-1-unfinished", "step-2", "step-3", "step-4"] == left(run)


def test_a_mark_stays_when_its_snapshot_stays(ckpttools: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(run, ["step-1-unfinished"])
    aged(run, 24 * 9)
    real = os.rename

    def rename(source: str, target: str) -> None:
        raise PermissionError(13, "Permission denied", source)

    monkeypatch.setattr(os, "rename", rename)
    assert 4 == ckpttools("prune", run, "--keep-last", 3, "--apply").exit_code
    assert {"step-1", "step-1-unfinished"} <= set(left(run))
    monkeypatch.setattr(os, "rename", real)
    assert 0 == ckpttools("prune", run, "--keep-last", 3, "--apply").exit_code
    assert ["step-2", "step-3", "step-4"] == left(run)


def test_a_mark_that_cannot_be_removed_is_tried_again(ckpttools: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(run, ["step-1-unfinished"])
    aged(run, 24 * 9)
    real = os.unlink

    def unlink(path: str, **more: object) -> None:
        if str(path).endswith("unfinished"):
            raise PermissionError(13, "Permission denied", path)
        real(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", unlink)
    answer = ckpttools("prune", run, "--keep-last", 3, "--apply")
    assert (4, 2) == (answer.exit_code, len(answer.stderr.splitlines()))
    monkeypatch.setattr(os, "unlink", real)
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 3, "--apply")
    assert ["step-2", "step-3", "step-4"] == left(run)


def test_the_mark_of_a_new_save_under_the_name_of_one_that_went_stays(ckpttools: Run, run: Path) -> None:
    (run / "step-1").rename(run / f"{PREFIX}01234567-step-1")
    (run / "step-1-unfinished").touch()
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 3, "--apply", "--grace", "0s")
    assert ["step-1-unfinished", "step-2", "step-3", "step-4"] == left(run)


def test_data_under_a_temporary_name_is_a_snapshot_of_its_own(ckpttools: Run, run: Path) -> None:
    make_tiny(run / "tmp-step-2", age_h=24 * 8)
    make_tiny(run / "step-4.tmp", age_h=1)
    found = {
        d["path"]: (d["state"], d["keep"]) for d in ckpttools("prune", run, "--keep-last", 3, "--json").document["decisions"]
    }
    assert ("committed", True) == found["step-2"] == found["step-4"]
    assert (("unfinished", False), ("unfinished", True)) == (found["tmp-step-2"], found["step-4.tmp"])


def test_a_line_break_in_a_name_makes_no_row(ckpttools: Run, run: Path) -> None:
    (run / "step-5\nkeep  step-1").mkdir()
    answer = ckpttools("prune", run, "--keep-last", 1)
    assert 7 == len(answer.stdout.splitlines())
    assert r"step-5\nkeep  step-1" in answer.stdout


def test_require_valid_counts_only_what_passes(ckpttools: Run, run: Path) -> None:
    file = run / "step-3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    ckpttools("prune", run, "--keep-last", 2, "--apply", "--require-valid", "structure")
    assert ["step-2", "step-4"] == left(run)


def test_what_no_layout_reads_is_left_alone(ckpttools: Run, tmp_path: Path) -> None:
    for step in range(12):
        make(tmp_path / f"step-{step}", ["x.bin", "y.bin"])
    answer = ckpttools("prune", tmp_path, "--keep-last", 1, "--apply", "-v")
    assert 12 == len(left(tmp_path))
    assert "not recognised" in answer.stdout


@pytest.mark.parametrize("pin", ["--pin=step-1", "--pin=1", ".keep", "step-1.keep"])
def test_pins_keep(ckpttools: Run, run: Path, pin: str) -> None:
    if pin == ".keep":
        (run / "step-1" / pin).touch()
    elif pin.endswith(".keep"):
        (run / pin).touch()
    ckpttools("prune", run, "--keep-last", 1, "--apply", *([pin] if pin.startswith("--") else []))
    assert {"step-1", "step-4"} <= set(left(run))
    assert "step-2" not in left(run)


def test_a_pin_that_names_nothing_is_wrong_usage(ckpttools: Run, run: Path) -> None:
    assert 2 == ckpttools("prune", run, "--keep-last", 1, "--pin", "step-9").exit_code


def test_trackers_and_links_keep(ckpttools: Run, run: Path) -> None:
    (run / "latest").write_text("step-1")
    (run / "best").symlink_to("step-2")
    ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert ["best", "latest", "step-1", "step-2", "step-4"] == left(run)


def test_what_lies_outside_through_a_link_stays(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "elsewhere" / "step-0", age_h=999)
    (run / "step-0").symlink_to(tmp_path / "elsewhere" / "step-0")
    ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert ["step-0", "step-4"] == left(run)
    assert (tmp_path / "elsewhere" / "step-0" / "model.safetensors").exists()


def test_a_run_directory_that_is_a_link_is_followed(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    assert Answer(0, "", "") == ckpttools("prune", tmp_path / "link", "--keep-last", 1, "--apply")
    assert ["step-4"] == left(run)


def test_the_best_by_what_trainer_logged_stays(ckpttools: Run, copy_of: Callable[[str], Path]) -> None:
    copied = copy_of("torch/hf_trainer_run/ckpt")
    document = ckpttools("prune", copied, "--keep-best", "loss:min:1", "--keep-last", 1, "--json").document
    assert {"checkpoint-3": ["best loss:min:1"], "checkpoint-9": ["newest valid", "last"]} == {
        d["path"]: d["reasons"] for d in document["decisions"] if d["keep"]
    }


def test_limits_delete_further(ckpttools: Run, run: Path) -> None:
    one = sum(p.stat().st_size for p in (run / "step-1").rglob("*") if p.is_file())
    ckpttools("prune", run, "--keep-last", "all", "--max-bytes", 2 * one, "--apply")
    assert ["step-3", "step-4"] == left(run)


def test_a_limit_that_cannot_be_held_is_an_alert(ckpttools: Run, run: Path) -> None:
    answer = ckpttools("prune", run, "--keep-last", "all", "--max-bytes", 1, "--max-delete-fraction", 1, "--apply")
    assert (1, ["step-4"]) == (answer.exit_code, left(run))
    assert "still over --max-bytes" in answer.stderr


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        ([], 2, "no rule that says what to keep"),
        (["--max-bytes", "1GB"], 2, "no rule that says what to keep"),
        (["--keep-step", "9"], 4, "no rule of the policy keeps any snapshot"),
        (["--keep-last", "1", "--max-delete-fraction", "0.5"], 4, "3 of 4 snapshots would be deleted"),
        (["--keep-last", "-2"], 2, "not a number of snapshots"),
        (["--keep-best", "loss:3"], 2, "not a rule for the best"),
        (["--keep-within", "3"], 2, "not a duration"),
        (["--keep-last", "1", "--pattern", "("], 2, "not a regular expression"),
    ],
)
def test_refusals_touch_nothing(ckpttools: Run, run: Path, options: list[str], exit_code: int, message: str) -> None:
    answer = ckpttools("prune", run, *options, "--apply")
    assert exit_code == answer.exit_code
    assert message in answer.stderr
    assert ["step-1", "step-2", "step-3", "step-4"] == left(run)


def test_a_clock_behind_the_newest_snapshot_is_refused(ckpttools: Run, run: Path) -> None:
    os.utime(run / "step-4" / "trainer_state.json", (4_000_000_000, 4_000_000_000))
    answer = ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert (4, 4) == (answer.exit_code, len(left(run)))
    assert "the clock is behind the newest snapshot" in answer.stderr


def test_a_file_of_options(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    config = tmp_path / "prune.toml"
    config.write_text('keep-last = 2\nkeep-step = [1]\ngrace = "1h"\nkeep-best = "loss:min:1"\n')
    assert 0 == ckpttools("prune", run, "--config", config, "--apply").exit_code
    assert ["step-1", "step-3", "step-4"] == left(run)
    ckpttools("prune", run, "--config", config, "--keep-last", 1, "--apply")
    assert ["step-1", "step-4"] == left(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep-lst = 2", "unknown option"),
        ("apply = true", "unknown option"),
        ("keep-last = ", "not a TOML file"),
        ('keep-last = "x"', "not a number"),
    ],
)
def test_a_wrong_file_of_options_is_one_clear_message(ckpttools: Run, run: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prune.toml").write_text(text)
    answer = ckpttools("prune", run, "--config", tmp_path / "prune.toml", "--keep-daily", 1, "--apply")
    assert (2, 4) == (answer.exit_code, len(left(run)))
    assert message in answer.stderr


def test_a_pattern_of_ones_own(ckpttools: Run, tmp_path: Path) -> None:
    for step in (1, 2):
        make_tiny(tmp_path / f"at.{step}.ok", age_h=99, step=step)
    ckpttools("prune", tmp_path, "--keep-last", 1, "--pattern", r"at\.(\d+)\.ok", "--apply")
    assert ["at.2.ok"] == left(tmp_path)


@pytest.mark.parametrize("name", ["none", "file", "snapshot/step-1"])
def test_what_is_no_run_directory_is_one_clear_message(ckpttools: Run, tmp_path: Path, name: str) -> None:
    make(tmp_path, ["file"])
    make_real(tmp_path / "snapshot" / "step-1")
    answer = ckpttools("prune", tmp_path / name, "--keep-last", 1, "--apply")
    assert 4 == answer.exit_code
    assert answer.stderr.startswith("ckpttools: error: ")
    assert not (tmp_path / name / LOCK_NAME).exists()


def test_an_empty_run_directory_is_well(ckpttools: Run, tmp_path: Path) -> None:
    assert Answer(0, "", "") == ckpttools("prune", tmp_path, "--keep-last", 1, "--apply")


# the lock


def test_a_living_holder_keeps_others_out(ckpttools: Run, run: Path) -> None:
    code = (
        "import sys\nfrom ckpttools.storage.runlock import run_lock\n"
        "with run_lock(sys.argv[1], now=5):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert "held\n" == holder.stdout.readline()
        for wait in ("0s", "1s"):
            answer = ckpttools("prune", run, "--keep-last", 1, "--apply", "--wait", wait)
            assert (5, 5) == (answer.exit_code, len(left(run)))
            assert f'"pid": {holder.pid}' in answer.stderr
        holder.kill()
    assert (run / LOCK_NAME).exists()
    assert 0 == ckpttools("prune", run, "--keep-last", 1, "--apply").exit_code
    assert ["step-4"] == left(run)


def test_a_holder_on_another_host_is_not_taken_over(ckpttools: Run, run: Path) -> None:
    (run / LOCK_NAME).write_text('{"host": "elsewhere", "pid": 1, "time": 5}')
    answer = ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert (5, 5) == (answer.exit_code, len(left(run)))
    assert "elsewhere" in answer.stderr
    assert "delete .ckpttools-prune.lock" in answer.stderr


def test_a_dead_holder_without_flock_is_known_by_its_pid(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttools.errors import LockedError
    from ckpttools.storage import runlock

    monkeypatch.setattr(runlock, "_flock", lambda _fd: None)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid, is_free in ((dead.pid, True), (os.getppid(), False)):
        (run / LOCK_NAME).write_text(json.dumps({"host": os.uname().nodename, "pid": pid, "time": 1}))
        if is_free:
            with run_lock(str(run), now=0):
                pass
            assert not (run / LOCK_NAME).exists()
        else:
            with pytest.raises(LockedError), run_lock(str(run), now=0):
                pass


def test_on_a_full_disk_the_lock_is_on_the_directory(ckpttools: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(28, "No space left on device", str(path))
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", full)
    assert Answer(0, "", "") == ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert ["step-4"] == left(run)


# other processes


def test_what_an_interrupted_run_left_is_finished(ckpttools: Run, run: Path) -> None:
    (run / "step-1").rename(run / f"{PREFIX}01234567-step-1")
    answer = ckpttools("prune", run, "--keep-last", "all", "--apply", "--json")
    assert [("step-1", None)] == [(r["path"], r["error"]) for r in answer.document["removals"]]
    assert ["step-2", "step-3", "step-4"] == left(run)


@pytest.mark.parametrize("change", ["tracker", "pin", "written", "gone", "newest gone"])
def test_what_changes_after_the_decision_is_seen(run: Path, change: str) -> None:
    from ckpttools.snapshots.facts import read_facts
    from ckpttools.snapshots.policy import Policy
    from ckpttools.snapshots.remove import remove
    from ckpttools.snapshots.retention import decide
    from ckpttools.snapshots.runs import read_run
    from tests.run_trees import NOW

    found = read_run(str(run))
    decisions = decide(read_facts(found), Policy(last=3), now=NOW)
    if change == "tracker":
        (run / "latest.txt").write_text("step-1")
    elif change == "pin":
        (run / "step-1" / ".keep").touch()
    elif change == "written":
        (run / "step-1" / "trainer_state.json").write_text("{}")
    else:
        (run / ("step-1" if change == "gone" else "step-4")).rename(run / "elsewhere")
    (removal,) = remove(found, decisions, jobs=1, log="", clock=lambda: 0)
    if change == "gone":
        assert ("", "another process has deleted it") == (removal.error, removal.reasons[-1])
    else:
        assert removal.error.startswith("not deleted: ")
        assert (run / "step-1").exists()


def test_one_that_cannot_be_deleted_does_not_keep_the_others(ckpttools: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(source: str, target: str) -> None:
        if source.endswith("step-1"):
            raise PermissionError(13, "Permission denied", source)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    answer = ckpttools("prune", run, "--keep-last", 1, "--apply")
    assert (4, ["step-1", "step-4"]) == (answer.exit_code, left(run))
    assert "not deleted: permission denied" in answer.stderr


def test_five_thousand_snapshots_are_decided(ckpttools: Run, tmp_path: Path) -> None:
    for step in range(5000):
        (tmp_path / f"step-{step}.ckpt").write_bytes(b"x")
        os.utime(tmp_path / f"step-{step}.ckpt", (step, step))
    make_real(tmp_path / "step-5000")
    document = ckpttools("prune", tmp_path, "--keep-last", 3, "--keep-every", 100, "--max-delete-fraction", 1, "--json").document
    assert 5001 == len(document["decisions"])
    assert 53 == sum(d["keep"] for d in document["decisions"])
