"""The run directories that real tools wrote: which snapshot is taken, what is kept and deleted, what a damaged one changes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttools.operations.validate import validate
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
RUNS = {
    "torch/hf_trainer_run": "checkpoint-9",
    "torch/dcp_steps_titan_layout_w2": "step-30",
    "torch/torchtitan_real_w2": "checkpoint/step-15",
    "deepspeed/zero2_bf16_w2_3tags": "global_step30",
    "deepspeed/universal_zero2_w2": "global_step30_universal",
    "deepspeed/pipe2_dp2_zero1_bf16": "global_step6",
    "megatron/tdist_tp2_pp2_two_iters": "iter_0000020",
    "megatron/legacy_tp2_pp2_mcore": "iter_0000200",
    "megatron/zarr_tp2_pp2": "iter_0000010",
}
"""Fixture -> its newest snapshot."""
DAMAGED = {
    "deepspeed/damaged_latest_names_missing_tag": ("global_step30", "tracker"),
    "deepspeed/damaged_mixed_steps": ("global_step20", ""),
    "megatron/damaged_tracker_ahead": ("iter_0000200", "tracker"),
}
"""Fixture -> its newest good snapshot, and the alert that `status` gives."""


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def copy(fixture: str) -> Path:
        return Path(shutil.copytree(FIXTURES / fixture / "ckpt", tmp_path / "run"))  # all times are those of the copy

    return copy


def snapshots(run: Path, newest: str) -> set[str]:
    """The directories beside the newest, of other steps."""
    return {p.name for p in (run / newest).parent.iterdir() if p.is_dir()}


@pytest.mark.parametrize("fixture", RUNS)
@pytest.mark.parametrize("depth", ["commit", "structure", "full"])
def test_the_newest_is_taken(ckpttools: Run, fixture: str, depth: str) -> None:
    run = FIXTURES / fixture / "ckpt"
    assert Answer(0, f"{run}/{RUNS[fixture]}\n", "") == ckpttools("latest", run, "--depth", depth)


@pytest.mark.parametrize("fixture", RUNS)
def test_all_but_the_newest_are_deleted_and_what_stays_is_whole(ckpttools: Run, copy, fixture: str) -> None:
    run, newest = copy(fixture), RUNS[fixture]
    beside = {p.name for p in run.iterdir() if p.is_file()}
    options = ("--keep-step", int(re.findall(r"\d+", newest)[0]), "--max-delete-fraction", 1)
    answer = ckpttools("prune", run, *options, "--apply", "--grace", "0s", "--json")
    assert 0 == answer.exit_code
    kept = {d["path"] for d in answer.document["decisions"] if d["keep"]}
    assert newest in kept
    assert {path.rpartition("/")[2] for path in kept} == snapshots(run, newest)
    assert beside == {p.name for p in run.iterdir() if p.is_file()}
    for path in kept:
        assert "ok" == validate(str(run / path)).verdict
    assert f"{run}/{newest}\n" == ckpttools("latest", run).stdout


@pytest.mark.parametrize("fixture", RUNS)
def test_status_sees_no_dangling_tracker(ckpttools: Run, fixture: str) -> None:
    document = ckpttools("status", FIXTURES / fixture / "ckpt", "--every", "9999d", "--json").document
    assert [] == [a for a in document["runs"][0]["alerts"] if a["kind"] == "tracker"]
    assert RUNS[fixture] == document["runs"][0]["newest"]


@pytest.mark.parametrize("fixture", DAMAGED)
def test_what_is_damaged_is_passed_over_and_stays(ckpttools: Run, copy, fixture: str) -> None:
    newest, alert = DAMAGED[fixture]
    run = copy(fixture)
    before = snapshots(run, newest)
    answer = ckpttools("latest", run)
    assert f"{run}/{newest}\n" == answer.stdout
    kinds = {a["kind"] for a in ckpttools("status", run, "--json").document["runs"][0]["alerts"]}
    assert (alert == "tracker") == ("tracker" in kinds)
    assert 0 == ckpttools("prune", run, "--keep-last", 1, "--apply").exit_code
    left = snapshots(run, newest)
    assert newest in left
    assert left < before
    assert f"{run}/{newest}\n" == ckpttools("latest", run).stdout
