"""Files per rank that we wrote, loaded by ranks of a gloo group with torch's own loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttools.layouts.per_rank.write import arrange_ranks
from tests.placement_cases import Written, mesh_of, place, some_placed, write

pytest.importorskip("torch")
PROGRAM = Path(__file__).with_name("rank_files.py")


def write_truth(written: Written, directory: Path) -> None:
    directory.mkdir()
    directory.joinpath("names.json").write_text(json.dumps(list(written.case.values)))
    for i, value in enumerate(written.case.values.values()):
        directory.joinpath(str(i)).write_bytes(value)


def run_ranks(written: Written, axes: str) -> None:
    write_truth(written, written.directory.parent / "truth")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(written.directory), axes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert 0 == done.returncode, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [("fsdp=3", "fsdp=3"), ("dp=2,fsdp=2", "ddp=2,fsdp=2"), ("fsdp=2,tp=2", "fsdp=2,tp=2")],
)
def test_every_rank_loads_its_dtensors(tmp_path, mesh, axes):
    written = write(tmp_path, place(some_placed()), mesh_of(mesh), arrange_ranks)
    run_ranks(written, axes)
