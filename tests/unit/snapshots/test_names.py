"""The step in a name: every scheme in the wild, and names that only look like one."""

from __future__ import annotations

import pytest

from ckpttools.errors import UsageError
from ckpttools.snapshots.names import looks_like_snapshot, parse_mark, parse_metrics, parse_pattern, parse_step


@pytest.mark.parametrize(
    "name",
    [
        "step-100",
        "step_100",
        "step100",
        "step=100",
        "step_100_ckp",
        "step_100_ckp.pth",
        "step-100_ckpt",
        "global_step100",
        "global_step_100",
        "global_step100_universal",
        "iter_0000100",
        "iter-000100-ckpt.pth",
        "iteration-100",
        "iter_0000100_3_local.pt",
        "checkpoint-100",
        "checkpoint_100",
        "ckpt_100.pt",
        "epoch=1-step=100.ckpt",
        "epoch=1-step=100-v1.ckpt",
        "epoch=1-step=100-val_loss=0.25.ckpt",
        "megatron_gpt--val_loss=2.34-step=100-consumed_samples=51200.0-last",
        "megatron_gpt--val_loss=2.34-step=100-consumed_samples=51200.0.nemo",
        "model_0000100.pth",
        "epoch_100.pth",
        "best-epoch=100-val/loss=0.1.ckpt",
        "100",
        "0000100",
        "100.pt",
        "epoch_0_step_100",
        "epoch999-global_step100",
        "epoch-1-step-100.pt",
        "ep1-ba100",
        "ep0-ba100-rank0.pt",
        "checkpoint_3_100.pt",
        "step100-unsharded",
    ],
)
def test_step_of_every_scheme(name):
    assert 100 == parse_step(name)


@pytest.mark.parametrize(
    "name",
    [
        "step-100.backup",
        "step-100-notes",
        "old-step-100",
        "checkpoint-100-merged",
        "2024-01-05",
        "last.ckpt",
        "checkpoint",
        "step-1e5",
        "step--1",
        "step-" + "9" * 30,
        "ep0-ba100-rank1.pt",
        "checkpoint_last.pt",
        "step-١٠٠",
        "model-00001-of-00002.safetensors",
        "",
    ],
)
def test_names_that_only_look_like_one_have_no_step(name):
    assert parse_step(name) is None


def test_steps_are_numbers_not_text():
    assert sorted(["step_10", "step_9"], key=parse_step) == ["step_9", "step_10"]


def test_a_pattern_of_ones_own_replaces_the_schemes():
    pattern = parse_pattern(r"model_at_(\d+)")
    assert (7, None) == (parse_step("model_at_7", pattern), parse_step("step-7", pattern))
    assert 7 == parse_step("e2-s7", parse_pattern(r"e(\d+)-s(?P<step>\d+)"))


@pytest.mark.parametrize("text", ["step-", "(", r"(\d+)-(\d+)"])
def test_a_pattern_without_a_step_is_wrong_usage(text):
    with pytest.raises(UsageError):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("step=100-unfinished", "step=100"),
        ("step-100_ckpt__3__unfinished", "step-100_ckpt"),
        ("iter_0000100.tmp", "iter_0000100"),
        ("tmp-checkpoint-100", "checkpoint-100"),
        ("iter_0000100_3_local.dirty.pt", "iter_0000100_3_local.pt"),
        ("100.orbax-checkpoint-tmp-12345", "100"),
        ("job-7b-s100-n0-w3.restore", "step=100"),
        ("step-100", None),
    ],
)
def test_marks_of_unfinished_saves_name_their_snapshot(name, base):
    assert base == parse_mark(name)


def test_metrics_of_a_name():
    assert {"epoch": 1, "step": 100, "val_loss": 0.25} == parse_metrics("epoch=1-step=100-val_loss=0.25.ckpt")


def test_what_looks_like_a_snapshot_and_is_none_is_told():
    assert looks_like_snapshot("step-100.backup")
    assert not looks_like_snapshot("logs")
