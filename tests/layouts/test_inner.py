"""Snapshots whose checkpoint lies in a directory below: verl, SkyRL, OLMo-core, prime-rl, NeMo-RL, diffusers' pipelines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttools.errors import NotRecognisedError
from ckpttools.layouts import open_snapshot
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
VERL = FIXTURES / "torch/verl_real_fsdp2_w2/ckpt"
DCP = FIXTURES / "torch/dcp_fsdp2_w2/ckpt"


def snapshot(place: Path, **inside: Path) -> Path:
    """A snapshot with what trainers put at its top, and copies of checkpoints in directories (`a__b` is `a/b`)."""
    for directory, source in inside.items():
        shutil.copytree(source, place / directory.replace("__", "/"))
    torch.save({"loader": {"position": 7}}, place / "data.pt")
    torch.save({"global_step": 10}, place / "trainer_state.pt")
    return place


@pytest.mark.parametrize(
    ("directory", "source"), [("actor", VERL), ("policy", VERL), ("trainer", DCP), ("a__model_and_optim", DCP)]
)
def test_a_directory_is_read_as_if_it_stood_alone(directory: str, source: Path, ckpttools: Run, tmp_path: Path) -> None:
    place = snapshot(tmp_path / "global_step_10", **{directory: source})

    assert ckpttools("hash", place).stdout == ckpttools("hash", source).stdout
    assert ckpttools("validate", place).exit_code == 0
    files = {f["path"]: f["role"] for f in ckpttools("inspect", place, "--json").document["files"]}
    assert {role for path, role in files.items() if path.endswith(("rank_0.pt", ".distcp"))} <= {"data", "objects"}
    assert all((place / path).is_file() for path in files)


def test_a_missing_rank_is_not_hidden_by_the_files_at_the_top(ckpttools: Run, tmp_path: Path) -> None:
    """It said ok: data.pt was the only file that anything recognised."""
    place = snapshot(tmp_path / "global_step_10", actor=VERL)
    (place / "actor/model_world_size_2_rank_1.pt").unlink()

    answer = ckpttools("validate", place, "--json")

    assert answer.exit_code == 3
    assert "actor/model_world_size_2_rank_1.pt" in [f["where"] for f in answer.document["findings"]]


def test_a_flipped_bit_is_found_in_its_file(ckpttools: Run, tmp_path: Path) -> None:
    place = snapshot(tmp_path / "global_step_10", policy=FIXTURES / "torch/dmg_distcp_bitflip_tensor/ckpt")

    answer = ckpttools("validate", place, "--json")

    assert answer.exit_code == 1
    assert any("policy/__" in f["where"] for f in answer.document["findings"] if f["code"] == "checksum-mismatch")


def test_latest_takes_the_newest_that_is_whole(ckpttools: Run, tmp_path: Path) -> None:
    for step in (5, 10):
        snapshot(tmp_path / f"global_step_{step}", actor=VERL)
    assert ckpttools("latest", tmp_path).stdout.strip() == str(tmp_path / "global_step_10")

    file = tmp_path / "global_step_10/actor/model_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[:1000])

    assert ckpttools("latest", tmp_path).stdout.strip() == str(tmp_path / "global_step_5")


def test_several_models_are_families_of_their_directories(ckpttools: Run, tmp_path: Path) -> None:
    place = snapshot(tmp_path / "global_step_10", actor=VERL, critic=DCP)

    checkpoint = open_snapshot(str(place)).checkpoint
    answer = ckpttools("consolidate", place, tmp_path / "out")

    assert {"actor", "critic", "actor.optimizer"} <= {t.family for t in checkpoint.tensors}
    assert not [f for f in checkpoint.findings if f.is_error]
    assert (answer.exit_code, "actor" in answer.stderr) == (4, True)
    assert ckpttools("consolidate", place / "actor", tmp_path / "out").exit_code == 0


def test_a_pipeline_of_diffusers_is_its_models(ckpttools: Run, tmp_path: Path) -> None:
    for name in ("unet", "vae"):
        (tmp_path / name).mkdir()
        save_file({"conv.weight": torch.ones(2, 2)}, tmp_path / name / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))

    names = [t["name"] for t in ckpttools("hash", tmp_path, "--json").document["tensors"]]

    assert names == ["unet.conv.weight", "vae.conv.weight"]


def test_a_seal_is_of_the_whole_snapshot(ckpttools: Run, tmp_path: Path) -> None:
    place = snapshot(tmp_path / "global_step_10", actor=VERL)

    assert ckpttools("seal", place).exit_code == 0
    assert ckpttools("validate", place).exit_code == 0
    (place / "data.pt").write_bytes(b"other")
    assert ckpttools("validate", place).exit_code == 1


def test_a_model_at_the_top_is_the_model_whatever_lies_below(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    shutil.copytree(DCP, tmp_path / "old")

    assert [t.name for t in open_snapshot(str(tmp_path)).checkpoint.tensors] == ["w"]


def test_loose_files_below_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "logs/rank0.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "logs/events.pt")

    with pytest.raises(NotRecognisedError):
        open_snapshot(str(tmp_path))


def test_a_run_directory_is_not_one_of_its_snapshots(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "step-10")

    with pytest.raises(NotRecognisedError):
        open_snapshot(str(tmp_path))


def test_a_directory_of_many_checkpoints_is_none(tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / f"model{i}").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / f"model{i}/model.safetensors")

    with pytest.raises(NotRecognisedError):
        open_snapshot(str(tmp_path))
