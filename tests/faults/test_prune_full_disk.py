"""`prune` where there is no space left: on a file system without a free inode, and on one that is read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Answer
from tests.run_trees import make_tiny

INODES = 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 60 inodes, all of them used."""
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size=4m,nr_inodes={INODES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    try:
        for step in range(1, 5):
            make_tiny(place / "run" / f"step-{step}", age_h=24 * (10 - step), step=step)
        for i in range(INODES):
            try:
                (place / f"filler-{i}").touch()
            except OSError:
                break
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_prune_frees_inodes_where_not_even_a_lock_file_can_be_made(ckpttools: Callable[..., Answer], disk: Path) -> None:
    status = ckpttools("status", disk / "run", "--quiet", "--need", "auto")
    assert 1 == status.exit_code
    assert "the next save needs 6 inodes, and 0 are free" in status.stdout
    with pytest.raises(OSError, match="No space left"):
        (disk / "one-more").touch()
    answer = ckpttools("prune", disk / "run", "--keep-last", "all", "--min-free-inodes", 10, "--apply")
    assert Answer(0, "", "") == answer
    assert ["step-3", "step-4"] == sorted(p.name for p in (disk / "run").iterdir())


def test_a_read_only_file_system_is_one_clear_message(ckpttools: Callable[..., Answer], disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    answer = ckpttools("prune", disk / "run", "--keep-last", 1, "--apply")
    assert 4 == answer.exit_code
    assert answer.stderr.startswith("ckpttools: error: read-only file system")
    assert 4 == len(list((disk / "run").iterdir()))
