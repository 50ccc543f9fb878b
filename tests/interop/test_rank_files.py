"""Files per rank that we wrote, loaded by ranks of a gloo group with torch's own loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpttools.layouts.per_rank.write import arrange_ranks
from ckpttools.operations.reshard import reshard
from tests.placement_cases import Written, mesh_of, place, some_placed, write
from tests.rank_programs import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("rank_files.py")


def write_truth(written: Written, directory: Path) -> None:
    directory.mkdir()
    directory.joinpath("names.json").write_text(json.dumps(list(written.case.values)))
    for i, value in enumerate(written.case.values.values()):
        directory.joinpath(str(i)).write_bytes(value)


def run_program(program: str, *arguments: str) -> None:
    assert run_ranks(program, *arguments) == ""


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [("fsdp=3", "fsdp=3"), ("dp=2,fsdp=2", "ddp=2,fsdp=2"), ("fsdp=2,tp=2", "fsdp=2,tp=2")],
)
def test_every_rank_loads_its_dtensors(tmp_path, mesh, axes):
    written = write(tmp_path, place(some_placed()), mesh_of(mesh), arrange_ranks)
    write_truth(written, tmp_path / "truth")
    run_program(str(PROGRAM), str(written.directory), axes)


@pytest.mark.parametrize(("mesh", "axes"), [("fsdp=2", "fsdp=2"), ("dp=2,fsdp=2", "ddp=2,fsdp=2")])
def test_a_run_of_one_process_goes_on_under_fsdp2(tmp_path, mesh, axes):
    import torch

    from tests.interop import fsdp2_resume as job

    model = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.train(model, optimizer, 2)
    truth = tmp_path / "one.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, truth)
    reshard(str(truth), str(tmp_path / "output"), target="dtensor", mesh=mesh_of(mesh))
    run_program(job.__file__, str(tmp_path / "output"), axes, str(truth))
