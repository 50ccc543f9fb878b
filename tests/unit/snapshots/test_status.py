"""`status`: what is at risk, what is late, what still fits; and an alert for each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttools.snapshots.policy import Room
from ckpttools.snapshots.runs import read_run
from ckpttools.snapshots.status import Limits, Status, read_status, render_prometheus
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES
from tests.run_trees import DCP, NOW, make, make_tiny
from tests.test_docs import mismatches, schema_fields

Run = Callable[..., Answer]
HOUR = 3600


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A commit every two hours, 250 steps each; the last an hour ago."""
    for i in range(6):
        make(tmp_path / "run" / f"step-{250 * (i + 1)}", age_h=11 - 2 * i, data=b"x" * 100)
    return tmp_path / "run"


def status(run: Path, *, room: Room | None = None, later_h: float = 0, **limits) -> Status:
    return read_status(read_run(str(run)), room or Room(), Limits(**limits), now=NOW + later_h * HOUR)


def kinds(found: Status) -> list[str]:
    return [a.kind for a in found.alerts]


def test_cadence_and_risk_are_learned_from_history(run):
    found = status(run)
    assert ("step-1500", HOUR, 2 * HOUR, 125, 2 * HOUR) == (
        found.newest.path,
        found.age_s,
        found.cadence_s,
        found.steps_at_risk,
        found.due_in_s,
    )
    assert (300, 4, []) == (found.length_bytes, found.inodes, kinds(found))


def test_a_pause_counts_little(run):
    make(run / "step-1", age_h=900)
    assert 2 * HOUR == status(run).cadence_s


@pytest.mark.parametrize(("later_h", "expected"), [(1.9, []), (2.1, ["late"])])
def test_a_late_commit_is_an_alert(run, later_h, expected):
    assert expected == kinds(status(run, later_h=later_h))


def test_every_goes_before_history(run):
    assert ["late"] == kinds(status(run, every_s=1800))
    assert [] == kinds(status(run, later_h=5, every_s=24 * HOUR))


def test_two_commits_or_those_of_a_copy_teach_nothing(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}")
    found = status(tmp_path, later_h=999)
    assert (None, None, []) == (found.cadence_s, found.due_in_s, kinds(found))


@pytest.mark.parametrize(
    ("room", "limits", "expected"),
    [
        (Room(3000, 4000), {}, []),
        (Room(3000, 4000), {"min_snapshots_left": 11}, ["space"]),
        (Room(299, 4000), {}, ["space"]),
        (Room(3000, 3), {}, ["space"]),
        (Room(3000, 4000), {"min_free_bytes": 3001}, ["space"]),
        (Room(3000, 4000), {"min_free_inodes": 4001}, ["inodes"]),
        (Room(3000, 4000), {"need_bytes": 3001}, ["need"]),
        (Room(329, 4000), {"is_need_learned": True}, ["need"]),
        (Room(3000, 3), {"is_need_learned": True, "min_snapshots_left": 0}, ["need"]),
        (Room(None, None), {"min_free_bytes": 1, "min_free_inodes": 1, "is_need_learned": True}, []),
    ],
)
def test_space_that_runs_out_is_an_alert(run, room, limits, expected):
    assert expected == kinds(status(run, room=room, **limits))


def test_how_many_fit_and_until_when(run):
    found = status(run, room=Room(30_000, 80))
    assert (20, 20 * 2 / 24) == (found.fits, pytest.approx(found.days_until_full))


def test_how_long_saves_take(run):
    for directory in run.iterdir():
        at = (directory / ".metadata").stat().st_mtime
        os.utime(directory / "__0_0.distcp", (at - 600, at - 600))
    found = status(run)
    assert (600, pytest.approx(1 / 12)) == (found.save_s, found.save_share)


@pytest.mark.parametrize(
    ("fixture", "says"),
    [
        ("megatron/damaged_tracker_ahead", "latest_checkpointed_iteration.txt names `300`: no such snapshot"),
        ("deepspeed/damaged_latest_names_missing_tag", "latest names `global_step40`: no such snapshot"),
        ("megatron/damaged_tdist_no_metadata", "latest_checkpointed_iteration.txt names `20`: unfinished"),
    ],
)
def test_a_tracker_that_is_wrong_is_an_alert(ckpttools: Run, fixture, says):
    answer = ckpttools("status", FIXTURES / fixture / "ckpt", "--quiet")
    assert 1 == answer.exit_code
    assert f"alert: {FIXTURES / fixture / 'ckpt'}: {says}" in answer.stdout


def test_nothing_committed_is_an_alert(ckpttools: Run, tmp_path):
    make(tmp_path / "step-1", DCP[:1])
    answer = ckpttools("status", tmp_path)
    assert (1, True) == (answer.exit_code, "no committed snapshot" in answer.stdout)
    assert "unfinished: step-1: no .metadata (1 there)" in answer.stdout
    assert 1 == ckpttools("status", tmp_path / "step-1" / "..").exit_code


def test_quiet_is_silent_when_all_is_well(ckpttools: Run, run):
    assert Answer(0, "", "") == ckpttools("status", run, "--quiet", "--every", "999999d")


def test_json_has_the_documented_fields(ckpttools: Run, run, tmp_path):
    make(run / "step-9999", DCP[:1])
    (run / "latest").write_text("step-1")
    document = ckpttools("status", run, "--json").document
    assert [] == list(mismatches(document, schema_fields("ckpttools/status/1")))
    (tmp_path / "empty").mkdir()
    document = ckpttools("status", tmp_path / "empty", "--json").document
    assert [] == [m for m in mismatches(document, schema_fields("ckpttools/status/1")) if "[]" not in m]


def test_a_file_for_prometheus_is_written_whole(ckpttools: Run, run, tmp_path):
    target = tmp_path / "x.prom"
    target.write_text("old")
    ckpttools("status", run, "--prometheus", target, "--json")
    text = target.read_text()
    assert text.endswith("\n")
    assert f"ckpttools_step{{run={json.dumps(str(run))}}} 1500" in text.splitlines()
    assert ["x.prom"] == [p.name for p in tmp_path.iterdir() if p.name.startswith("x.prom")]
    assert 4 == ckpttools("status", run, "--prometheus", tmp_path / "none" / "x.prom").exit_code


def test_labels_are_escaped(tmp_path):
    make(tmp_path / 'a"b\nc' / "step-1")
    assert 'a\\"b\\nc' in render_prometheus([status(tmp_path / 'a"b\nc')])


@pytest.mark.parametrize("name", ["none", "file"])
def test_what_is_no_run_directory_is_one_clear_message(ckpttools: Run, tmp_path, name):
    make(tmp_path, ["file"])
    answer = ckpttools("status", tmp_path / name)
    assert (4, "") == (answer.exit_code, answer.stdout)


def test_the_newest_has_its_own_age_when_the_run_went_back(ckpttools, tmp_path):
    now = time.time()
    for step, age_s in ((6, 50 * 3600), (3, 3600)):
        for path in (make_tiny(tmp_path / f"step-{step}", step=step), *(tmp_path / f"step-{step}").rglob("*")):
            os.utime(path, (now - age_s, now - age_s))
    said = ckpttools("status", tmp_path).stdout
    assert "step-6, step 6, committed 2d 2h" in said
    assert "at risk:    1h" in said
