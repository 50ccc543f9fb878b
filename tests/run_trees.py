"""Makes run directories for tests: tiny snapshots whose times are as told, since the order of times is what is tested."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.fixture_cases import FIXTURES

NOW = 1_767_225_600
"""What the tests call now."""
DCP = ("__0_0.distcp", "__1_0.distcp", ".metadata")
REAL = FIXTURES / "torch" / "dcp_steps_titan_layout_w2" / "ckpt" / "step-10"
"""A snapshot that validates, of 3 files."""


def make(path: Path, files: Iterable[str] = DCP, *, age_h: float = 0, data: bytes = b"x") -> Path:
    """A snapshot of files that are recognised by their names and hold nothing."""
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    if not files:
        path.mkdir(parents=True)
    return aged(path, age_h)


def make_real(path: Path, *, age_h: float = 0, source: Path = REAL) -> Path:
    """A snapshot that validates."""
    shutil.copytree(source, path)
    return aged(path, age_h)


def aged(path: Path, age_h: float) -> Path:
    """With the times that it would have if it had been written so many hours before now."""
    at = NOW - age_h * 3600
    for inner in (*path.rglob("*"), path):
        os.utime(inner, (at, at))
    return path


def make_tiny(path: Path, *, age_h: float = 0, step: int = 0) -> Path:
    """A snapshot of a few hundred bytes that validates, with a directory in it."""
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    make(path, ["model.safetensors"], data=len(header).to_bytes(8, "little") + header + b"\0" * 8)
    make(path, ["trainer_state.json", "logs/deep/a.txt"], data=b'{"global_step": %d}' % step)
    return aged(path, age_h)
