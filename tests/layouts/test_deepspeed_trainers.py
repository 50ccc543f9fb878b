"""Directories that trainers put around a DeepSpeed tag, where a fixture can be laid out as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttools.dtypes import parse_dtype
from ckpttools.layouts import open_snapshot
from ckpttools.model import Mesh
from ckpttools.operations.convert import consolidate
from ckpttools.operations.reshard import reshard
from ckpttools.operations.targets import Details
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


@pytest.fixture(params=["zero2_fp16_w2", "zero3_bf16_w2"])
def trainer(tmp_path, request) -> Path:
    """What HF Trainer leaves: weights as transformers exports them, of tied ones the first, beside a tag to resume with."""
    source = next(p for p in Case("deepspeed", request.param).checkpoint.iterdir() if p.is_dir())
    directory = tmp_path / "run" / "checkpoint-10"
    shutil.copytree(source, directory / "global_step10")
    (directory / "latest").write_text("global_step10")
    (directory / "trainer_state.json").write_text('{"global_step": 10}')
    consolidate(str(source), str(tmp_path / "exported"), dtype=parse_dtype("float16" if "fp16" in request.param else "bfloat16"))
    shutil.move(tmp_path / "exported" / "model.safetensors", directory)
    return directory


def test_weights_beside_a_tag_are_the_model_and_the_tag_is_what_training_resumes_with(trainer):
    checkpoint = open_snapshot(str(trainer)).checkpoint
    assert "safetensors" == checkpoint.layout
    files = {p.extent.file for t in checkpoint for p in t.pieces if t.family == "model"}
    assert {"model.safetensors"} == files
    names = {t.name for t in checkpoint}
    assert {"embed.weight", "optimizer.state.embed.weight.fp32", "optimizer.state.embed.weight.exp_avg"} <= names
    assert {"optimizer.param_groups", "extra_state.shared_params"} <= {o.name for o in checkpoint.objects}
    assert "ok" == validate(str(trainer)).verdict


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_tag_beside_sound_weights_is_found_and_not_restarted_from(trainer, ckpttools, damage):
    shutil.copytree(trainer, trainer.parent / "checkpoint-5")
    file = next(trainer.glob("global_step10/*pp_rank_1_*optim_states.pt"))
    data = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(data[:2000])
    assert validate(str(trainer)).verdict in ("incomplete", "damaged")
    assert str(trainer.parent / "checkpoint-5") == ckpttools("latest", trainer.parent).stdout.strip()


@pytest.mark.parametrize("zero", [2, 3])
def test_directory_of_trainer_can_be_laid_out_for_other_ranks(trainer, tmp_path, zero):
    out = tmp_path / "out"
    reshard(str(trainer), str(out), target="deepspeed", mesh=Mesh.parse("dp=3"), details=Details(zero=zero))
    before, after = (open_snapshot(str(p)).checkpoint for p in (trainer / "global_step10", out))
    state, written = ({t.name for t in c if t.family == "optimizer"} for c in (before, after))
    assert state == written
    assert any({"embed.weight", "lm_head.weight"} <= set(group) for group in after.aliases)
    assert "ok" == validate(str(out)).verdict
