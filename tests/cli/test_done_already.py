"""A conversion that is started again when it is done: said so, and proved byte by byte; never taken for granted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
SOURCE = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
CONVERSIONS = {
    "directory": ("consolidate", "out"),
    "shards": ("consolidate", "out", "--max-shard-size", "30KB"),
    "file": ("consolidate", "out.safetensors"),
    "torch": ("consolidate", "out.pt"),
    "cast": ("consolidate", "out", "--dtype", "bfloat16"),
    "dcp": ("reshard", "out", "--to", "dcp", "--mesh", "fsdp=3"),
}


@pytest.fixture(params=CONVERSIONS)
def convert(request: pytest.FixtureRequest, ckpttools: Run, tmp_path: Path) -> Callable[..., Answer]:
    """Runs a conversion to one destination, and tells where that is."""
    command, name, *words = CONVERSIONS[request.param]

    def run(*more: str) -> Answer:
        return ckpttools(command, SOURCE, tmp_path / name, *words, *more)

    return run


def files_in(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        p.relative_to(directory).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.rglob("*") if p.is_file()
    }


def test_the_same_again_is_done_already_and_touches_nothing(convert: Callable[..., Answer], tmp_path: Path) -> None:
    first = convert("--json")
    before = files_in(tmp_path)
    again = convert("--json")
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert (False, True) == (first.document["was_done"], again.document["was_done"])
    assert first.document["fingerprint"] == again.document["fingerprint"]
    assert files_in(tmp_path) == before
    assert "already done" in convert().stdout


def test_every_byte_that_is_another_one_is_seen(convert: Callable[..., Answer], tmp_path: Path) -> None:
    convert()
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1}:
            changed = bytearray(whole)
            changed[at] ^= 1
            path.write_bytes(changed)
            answer = convert()
            assert answer.exit_code == 4, f"{path.name} at {at}"
            assert "the destination exists" in answer.stderr
        path.write_bytes(whole)
    assert convert().exit_code == 0


def test_a_file_that_is_absent_or_cut_is_seen(convert: Callable[..., Answer], tmp_path: Path) -> None:
    convert()
    for path in [p for p in tmp_path.rglob("*") if p.is_file()][1:]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert convert().exit_code == 4
        path.write_bytes(whole)


def test_a_file_that_would_not_be_written_is_seen(ckpttools: Run, tmp_path: Path) -> None:
    ckpttools("consolidate", SOURCE, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    answer = ckpttools("consolidate", SOURCE, tmp_path / "out")
    assert answer.exit_code == 4
    assert "notes.txt would not be written" in answer.stderr


def test_a_source_that_changed_is_seen(ckpttools: Run, copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy_of("torch/safetensors_all_dtypes/ckpt")
    assert ckpttools("consolidate", source, tmp_path / "out").exit_code == 0
    path = next(source.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert ckpttools("consolidate", source, tmp_path / "out").exit_code == 4


def test_a_directory_of_other_things_is_not_searched(ckpttools: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    answer = ckpttools("consolidate", SOURCE, tmp_path / "out")
    assert answer.exit_code == 4
    assert "no model.safetensors" in answer.stderr
