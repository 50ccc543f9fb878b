"""Run directories: which snapshots there are, in which order and state, and what trackers claim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttools.errors import NotFoundError, RefusedError, StorageError
from ckpttools.snapshots.find import require_run, resolve
from ckpttools.snapshots.runs import read_run
from ckpttools.storage import tree as tree_module
from tests.fixture_cases import FIXTURES
from tests.run_trees import DCP, make, make_real


def states(run: Path) -> dict[str, str]:
    return {s.path: s.state for s in read_run(str(run)).snapshots}


def one(run: Path, path: str):
    return next(s for s in read_run(str(run)).snapshots if s.path == path)


@pytest.mark.parametrize(
    ("fixture", "expected"),
    [
        ("torch/hf_trainer_run", ["checkpoint-3", "checkpoint-6", "checkpoint-9"]),
        ("torch/torchtitan_real_w2", ["checkpoint/step-5", "checkpoint/step-10", "checkpoint/step-15"]),
        ("torch/dcp_steps_titan_layout_w2", ["step-10", "step-20", "step-30"]),
        ("deepspeed/zero2_bf16_w2_3tags", ["global_step10", "global_step20", "global_step30"]),
        ("megatron/tdist_tp2_pp2_two_iters", ["iter_0000010", "iter_0000020"]),
        ("megatron/legacy_tp2_pp2_mcore", ["iter_0000100", "iter_0000200"]),
    ],
)
def test_snapshots_of_real_runs_are_committed_and_in_order_of_step(fixture, expected):
    run = read_run(str(FIXTURES / fixture / "ckpt"))
    assert expected == [s.path for s in run.committed]
    assert all(c.is_met for c in run.claims)


def test_ten_comes_after_nine(tmp_path):
    for step in (10, 9):
        make(tmp_path / f"step-{step}")
    assert ["step-9", "step-10"] == list(states(tmp_path))


@pytest.mark.parametrize(
    ("files", "done", "expected"),
    [
        (DCP[:2], 2, 2),
        (["model-00001-of-00003.safetensors"], 1, 3),
        (["pytorch_model_00001-of-00072.bin"], 1, 72),
        (["model_world_size_4_rank_0.pt", "model_world_size_4_rank_3.pt"], 2, 4),
        (["actor/model_world_size_2_rank_1.pt"], 1, 2),
        (["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"], 1, 2),
        (["mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_001/model_optim_rng.pt"], 2, 4),
        (["layer_01-model_01-model_states.pt"], 1, 2),
        (["common.pt", *DCP], 2, 2),
        ([], 0, 2),
    ],
)
def test_an_unfinished_one_says_how_much_of_it_is_there(tmp_path, files, done, expected):
    make(tmp_path / "step-1")
    make(tmp_path / "step-2", files)
    found = one(tmp_path, "step-2")
    assert ("unfinished", done, expected) == (found.state, found.done, found.expected)


@pytest.mark.parametrize(
    "mark", ["step-2-unfinished", "step-2__0__unfinished", "step-2.tmp", "._dlrover_ckpt_stage/2.done/0", "tmp-step-2"]
)
def test_marks_beside_a_snapshot_make_it_unfinished(tmp_path, mark):
    make(tmp_path / "step-2")
    make(tmp_path, [mark])
    assert "unfinished" == states(tmp_path)["step-2"]


def test_a_directory_under_a_temporary_name_is_an_unfinished_snapshot(tmp_path):
    make(tmp_path / "tmp-checkpoint-2", ["model.safetensors"])
    make(tmp_path / "job-s9-n0-w1.restore", ["0/__0_0.distcp", "0/.metadata"])
    assert {"tmp-checkpoint-2": "unfinished", "job-s9-n0-w1.restore": "unfinished"} == states(tmp_path)
    assert {2, 9} == {s.step for s in read_run(str(tmp_path)).snapshots}


def test_a_record_that_the_neighbours_have_is_missed(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path / f"checkpoint-{step}", ["model.safetensors", "trainer_state.json"][: 1 if step == 3 else 2])
    assert "unfinished" == states(tmp_path)["checkpoint-3"]


def test_a_file_that_only_the_manifest_misses_is_found_by_opening_the_odd_one(tmp_path):
    for step in (1, 2):
        make_real(tmp_path / f"step-{step}")
    (tmp_path / "step-1" / "__1_0.distcp").unlink()
    assert {"step-1": "unfinished", "step-2": "committed"} == states(tmp_path)


def test_an_empty_record_is_no_record(tmp_path):
    make(tmp_path / "step-1")
    (tmp_path / "step-1" / ".metadata").write_bytes(b"")
    assert {"step-1": "unfinished"} == states(tmp_path)


def test_single_files_are_snapshots(tmp_path):
    make(tmp_path, ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt", "last.ckpt", "notes-7.txt"])
    assert ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt"] == list(states(tmp_path))


def test_other_directories_are_left_alone_and_told_when_they_look_like_snapshots(tmp_path):
    for name in ("step-1", "step-1.backup", "logs", "wandb"):
        make(tmp_path / name)
    make(tmp_path / "step-9", ["notes.txt"])
    assert {"step-1": "committed", "step-1.backup": "foreign", "step-9": "foreign"} == states(tmp_path)


def test_directories_of_ranks_that_hold_snapshots_are_no_snapshots(tmp_path):
    make(tmp_path / "0", ["step-100.ckpt"])
    assert {"0": "foreign"} == states(tmp_path)


@pytest.mark.parametrize(
    ("tracker", "text", "expected"),
    [
        ("latest", "global_step2", "global_step2"),
        ("latest.txt", "runs/x/global_step2/\n", "global_step2"),
        ("latest_checkpointed_iteration.txt", "2", "global_step2"),
        ("dlrover_latest.txt", "2\n", "global_step2"),
        ("latest_ckpt_global_step.txt", "2", "global_step2"),
        ("latest", "global_step3", ""),
        ("latest_checkpointed_iteration.txt", "3", ""),
        ("latest", "", ""),
        ("latest", "\udcff", ""),
        ("latest", "../elsewhere", ""),
    ],
)
def test_trackers_are_claims(tmp_path, tracker, text, expected):
    make(tmp_path / "global_step2", ["mp_rank_00_model_states.pt"])
    (tmp_path / tracker).write_bytes(text.encode("utf-8", "surrogateescape"))
    run = read_run(str(tmp_path))
    assert [(tracker, expected, bool(expected))] == [(c.tracker, c.path, c.is_met) for c in run.claims]
    assert ([] if expected else ["tracker-dangling"]) == [f.code for f in run.findings()]


def test_a_tracker_that_names_an_unfinished_snapshot_is_a_finding(tmp_path):
    make(tmp_path / "step-1", DCP[:2])
    make(tmp_path, ["latest"], data=b"step-1")
    (finding,) = read_run(str(tmp_path)).findings()
    assert ("tracker-dangling", "latest", "unfinished") == (finding.code, finding.where, finding.found)


def test_links_are_claims_and_no_second_snapshots(tmp_path):
    make(tmp_path / "run" / "step-1")
    make(tmp_path / "elsewhere" / "step-2")
    (tmp_path / "run" / "best").symlink_to("step-1")
    (tmp_path / "run" / "step-3").symlink_to("step-1")
    (tmp_path / "run" / "step-2").symlink_to(tmp_path / "elsewhere" / "step-2")
    (tmp_path / "run" / "latest").symlink_to("step-8")
    (tmp_path / "run" / "around").symlink_to("..")
    run = read_run(str(tmp_path / "run"))
    assert [("step-1", False), ("step-2", True)] == [(s.path, s.is_outside) for s in run.snapshots]
    assert {("best", "step-1", True), ("step-3", "step-1", True), ("latest", "", False)} == {
        (c.tracker, c.path, c.is_met) for c in run.claims
    }


def test_a_link_to_what_has_no_other_name_is_a_snapshot_that_lies_elsewhere(tmp_path):
    make(tmp_path / "archive" / "a")
    make(tmp_path / "archive" / "5.bin", ["x"])
    (tmp_path / "step-1").symlink_to("archive/a")
    (tmp_path / "step-2.ckpt").symlink_to("archive/5.bin/x")
    (tmp_path / "step-3").symlink_to("nowhere")
    (tmp_path / "step-4.ckpt").symlink_to("nowhere")
    (tmp_path / "step-5").symlink_to("step-5")
    run = read_run(str(tmp_path))
    assert [("step-1", True), ("step-2.ckpt", True)] == [(s.path, s.is_outside) for s in run.snapshots]
    assert {"step-3", "step-4.ckpt", "step-5"} == {f.where for f in run.findings()}


def test_two_names_of_one_directory_of_snapshots_are_listed_once(tmp_path):
    make(tmp_path / "run" / "checkpoint" / "step-1")
    (tmp_path / "run" / "ckpt").symlink_to("checkpoint")
    make(tmp_path / "elsewhere" / "step-2")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    run = read_run(str(tmp_path / "run"))
    assert [("checkpoint/step-1", False), ("checkpoints/step-2", True)] == [(s.path, s.is_outside) for s in run.snapshots]


def test_a_run_that_went_back_is_a_finding(tmp_path):
    make(tmp_path / "step-1", age_h=1)
    make(tmp_path / "step-2", age_h=2)
    assert ["order-disagrees"] == [f.code for f in read_run(str(tmp_path)).findings()]


def test_five_thousand_snapshots_take_one_listing_and_one_stat_each(tmp_path, monkeypatch):
    for step in range(5000):
        directory = tmp_path / f"step-{step}"
        directory.mkdir()
        (directory / "model.safetensors").touch()
        (directory / "trainer_state.json").write_bytes(b"x")
    asked: list[str] = []
    stat = os.stat
    monkeypatch.setattr(tree_module.os, "stat", lambda p, **k: (asked.append(str(p)), stat(p, **k))[1])
    assert 5000 == len(read_run(str(tmp_path)).committed)
    assert len([a for a in asked if str(tmp_path) in a]) <= 5010


def test_a_snapshot_is_no_run(tmp_path):
    make_real(tmp_path / "step-1")
    with pytest.raises(RefusedError, match="a snapshot, not a run directory"):
        require_run(str(tmp_path / "step-1"))


def test_the_output_of_hf_trainer_is_a_run_with_the_final_model_beside(tmp_path):
    source = FIXTURES / "torch/hf_trainer_run/ckpt"
    make_real(tmp_path / "out", source=source)
    (tmp_path / "out" / "model.safetensors").write_bytes((source / "checkpoint-9" / "model.safetensors").read_bytes())
    assert 3 == len(require_run(str(tmp_path / "out")).committed)
    assert str(tmp_path / "out") == resolve(str(tmp_path / "out")).location


def test_the_ranks_of_a_snapshot_are_no_snapshots(tmp_path):
    for rank in (0, 1):
        make(tmp_path / "step=5" / str(rank), [f"__{rank}_0.distcp", ".metadata"])
    assert {"step=5": "committed"} == states(tmp_path)
    assert str(tmp_path / "step=5") == resolve(str(tmp_path / "step=5")).location


def test_what_is_not_there_or_a_file_is_told(tmp_path):
    with pytest.raises(NotFoundError):
        read_run(str(tmp_path / "none"))
    make(tmp_path, ["file"])
    with pytest.raises(StorageError, match="a file, not a run directory"):
        read_run(str(tmp_path / "file"))


def test_a_run_on_an_object_store_is_read_like_a_local_one():
    import fsspec

    fs = fsspec.filesystem("memory")
    for step, files in ((1, DCP), (2, DCP[:2])):
        for name in files:
            fs.pipe_file(f"/run-of-tests/step-{step}/{name}", b"x")
    run = read_run("memory://run-of-tests")
    assert [("step-1", "committed"), ("step-2", "unfinished")] == [(s.path, s.state) for s in run.snapshots]
    assert all(s.time_s is not None for s in run.snapshots)


def test_a_file_of_one_rank_of_several_is_no_snapshot(tmp_path):
    """Composer saves a file per rank: rank 0's is the snapshot only where it is the only one."""
    for step, ranks in ((100, 1), (200, 2)):
        for rank in range(ranks):
            (tmp_path / f"ep0-ba{step}-rank{rank}.pt").write_bytes(b"x")

    assert ["ep0-ba100-rank0.pt"] == [s.path for s in read_run(str(tmp_path)).snapshots]
