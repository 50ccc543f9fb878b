"""Directories that trainers put around a DeepSpeed tag, where a fixture can be laid out as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.fixture_cases import Case


@pytest.fixture
def lightning(tmp_path) -> Path:
    """What Lightning's DeepSpeedStrategy leaves: a directory of the checkpoint's name, whose tag is `checkpoint`."""
    source = next(p for p in Case("deepspeed", "zero2_fp16_w2").checkpoint.iterdir() if p.is_dir())
    directory = tmp_path / "epoch=0-step=10.ckpt"
    shutil.copytree(source, directory / "checkpoint")
    (directory / "latest").write_text("checkpoint")
    (directory / "zero_to_fp32.py").write_text("# DeepSpeed's script\n")
    return directory


def test_directory_of_lightning_is_its_tag(lightning):
    checkpoint = open_snapshot(str(lightning)).checkpoint
    assert ("deepspeed", 10) == (checkpoint.layout, checkpoint.step)
    assert [t.name for t in open_snapshot(str(lightning / "checkpoint")).checkpoint] == [t.name for t in checkpoint]
    assert "ok" == validate(str(lightning)).verdict


def test_rank_that_is_missing_in_a_directory_of_lightning_is_found(lightning):
    next(lightning.glob("checkpoint/*pp_rank_1_*optim_states.pt")).unlink()
    assert "incomplete" == validate(str(lightning)).verdict
