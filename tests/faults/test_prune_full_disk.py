"""`prune` where there is no space left: on a file system without a free inode, and on one that is read-only."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
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
        pytest.skip("needs root, and a kernel that lets it mount a tmpfs with few inodes")
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


def test_the_log_may_lie_on_the_full_disk(ckpttools: Callable[..., Answer], disk: Path) -> None:
    answer = ckpttools("prune", disk / "run", "--keep-last", 2, "--apply", "--log", disk / "log")
    assert Answer(0, "", "") == answer
    assert ["step-1", "step-2"] == [json.loads(line)["path"] for line in (disk / "log").read_text().splitlines()]


def test_where_no_byte_is_free_snapshots_are_deleted_too(ckpttools: Callable[..., Answer], disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,size=4m,nr_inodes={INODES + 10}", disk], check=True)
    with suppress(OSError), (disk / "all").open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(b"x" * 4096)
    assert 1 == ckpttools("status", disk / "run", "--quiet", "--need", "auto").exit_code
    answer = ckpttools("prune", disk / "run", "--keep-last", 2, "--apply", "--log", disk / "log")
    assert Answer(0, "", "") == answer
    assert ["step-3", "step-4"] == sorted(p.name for p in (disk / "run").iterdir())
    assert 2 == len((disk / "log").read_text().splitlines())


def test_a_read_only_file_system_is_one_clear_message(ckpttools: Callable[..., Answer], disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert f"{disk}/run/step-4\n" == ckpttools("latest", disk / "run").stdout
    assert 0 == ckpttools("prune", disk / "run", "--keep-last", 1).exit_code
    answer = ckpttools("prune", disk / "run", "--keep-last", 1, "--apply")
    assert 4 == answer.exit_code
    assert answer.stderr.startswith("ckpttools: error: read-only file system")
    assert 4 == len(list((disk / "run").iterdir()))
