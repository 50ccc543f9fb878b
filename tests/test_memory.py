"""Memory is fixed: tensors far larger than the budget pass through hash and consolidate in a small process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to tell the peak memory")
TENSOR_BYTES = 768 << 20
PEAK_BYTES = 160 << 20
"""What an interpreter with numpy takes, and the budget of 64 MiB; a fifth of the tensor."""


_MEASURED = """
import sys
from ckpttools.cli import main
try:
    main(sys.argv[1:])
finally:
    lines = open("/proc/self/status").read().splitlines()
    sys.stderr.write(next(line for line in lines if line.startswith("VmHWM")))
"""
"""The process tells its own peak: what a parent is told of a child counts the parent's memory at the fork."""


def peak_bytes(*arguments: str) -> int:
    """Peak resident memory of a command line, which must succeed."""
    command = [sys.executable, "-c", _MEASURED, *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(answer.stderr.split()[-2]) * 1024


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """A safetensors file with one large tensor of zeros, which takes no room on a file system with holes."""
    header = {"w": {"dtype": "BF16", "shape": [TENSOR_BYTES // 8192, 4096], "data_offsets": [0, TENSOR_BYTES]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + TENSOR_BYTES)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("command", ["hash", "validate"])
def test_a_tensor_larger_than_the_budget_is_read_in_tiles(command: str, large_file: Path) -> None:
    assert peak_bytes(command, str(large_file), "--memory", "64MiB", "--jobs", "2", "-q") < PEAK_BYTES


@pytest.mark.slow
def test_a_tensor_larger_than_the_budget_is_written_in_tiles(large_file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    assert peak_bytes("consolidate", str(large_file), out, "--memory", "64MiB", "--jobs", "2", "-q") < PEAK_BYTES


@pytest.mark.slow
def test_tensors_larger_than_the_budget_are_compared_in_tiles(large_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    shutil.copyfile(large_file, other)
    assert peak_bytes("diff", str(large_file), str(other), "--memory", "64MiB", "--jobs", "2", "-q") < PEAK_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("target", ["dcp", "dtensor"])
def test_a_tensor_larger_than_the_budget_is_cut_by_columns_in_tiles(target: str, large_file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\ntensors = ["w"]\naxis = "tp"\ndim = 1\n')
    where = ["--to", target, "--mesh", "tp=2,fsdp=2", "--placements", str(rules)]
    arguments = ["reshard", str(large_file), str(tmp_path / "out"), *where, "--memory", "64MiB", "--jobs", "2", "-q"]
    assert peak_bytes(*arguments) < PEAK_BYTES
