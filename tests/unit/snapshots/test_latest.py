"""`latest`: the newest snapshot that passes, whatever trackers say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES
from tests.run_trees import DCP, make, make_real, make_tiny
from tests.test_docs import mismatches, schema_fields

Run = Callable[..., Answer]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 11):
        make_tiny(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def test_the_newest_is_printed_and_nothing_else(ckpttools: Run, run: Path) -> None:
    assert Answer(0, f"{run}/step-11\n", "") == ckpttools("latest", run)


@pytest.mark.parametrize("depth", ["commit", "structure", "full"])
def test_bad_ones_are_passed_over_and_named(ckpttools: Run, run: Path, depth: str) -> None:
    (run / "step-11" / "trainer_state.json").unlink()
    file = run / "step-10" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    make(run / "step-12", DCP[:1])
    (run / "latest").write_text("step-12")
    answer = ckpttools("latest", run, "--depth", depth)
    assert (0, f"{run}/step-9\n") == (answer.exit_code, answer.stdout)
    assert ["step-12", "step-11", "step-10"] == [line.split(": ")[1].rpartition("/")[2] for line in answer.stderr.splitlines()]


def test_a_flipped_bit_is_seen_at_full_depth(ckpttools: Run, tmp_path: Path) -> None:
    make_real(tmp_path / "step-1", source=FIXTURES / "torch/dcp_fsdp2_w2/ckpt")
    make_real(tmp_path / "step-2", source=FIXTURES / "torch/dmg_distcp_bitflip_tensor/ckpt")
    assert f"{tmp_path}/step-2\n" == ckpttools("latest", tmp_path).stdout
    answer = ckpttools("latest", tmp_path, "--depth", "full")
    assert f"{tmp_path}/step-1\n" == answer.stdout
    assert "checksum-mismatch" in answer.stderr


def test_of_several_tiers_the_highest_step_wins(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "local" / "step-11", step=11)
    assert f"{tmp_path}/local/step-11\n" == ckpttools("latest", tmp_path / "local", run).stdout
    assert f"{run}/step-11\n" == ckpttools("latest", run, tmp_path / "local").stdout
    make_tiny(tmp_path / "local" / "step-12", step=12)
    answer = ckpttools("latest", run, tmp_path / "local", "-v")
    assert f"{tmp_path}/local/step-12\n" == answer.stdout
    assert "taken from" in answer.stderr


def test_a_tier_that_is_gone_is_passed_over(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    answer = ckpttools("latest", tmp_path / "none", run)
    assert (0, f"{run}/step-11\n") == (answer.exit_code, answer.stdout)
    assert "passed over" in answer.stderr
    assert 4 == ckpttools("latest", tmp_path / "none").exit_code


@pytest.mark.parametrize("files", [[], DCP[:2], DCP])
def test_nothing_valid_is_incomplete(ckpttools: Run, tmp_path: Path, files: list[str]) -> None:
    make(tmp_path / "run" / "step-1", files)
    answer = ckpttools("latest", tmp_path / "run", "--write", tmp_path / "pointer")
    assert (3, "") == (answer.exit_code, answer.stdout)
    assert not (tmp_path / "pointer").exists()


def test_the_step_and_a_pointer(ckpttools: Run, run: Path, tmp_path: Path) -> None:
    (tmp_path / "pointer").write_text("old")
    assert "11\n" == ckpttools("latest", run, "--step-only", "--write", tmp_path / "pointer").stdout
    assert "11\n" == (tmp_path / "pointer").read_text()


def test_json_has_the_documented_fields(ckpttools: Run, run: Path) -> None:
    make(run / "step-12", DCP[:1])
    document = ckpttools("latest", run, "--json").document
    assert [] == list(mismatches(document, schema_fields("ckpttools/latest/1")))
    assert [12] == [p["step"] for p in document["passed_over"]]


def test_a_thousand_files_are_no_trouble(ckpttools: Run, tmp_path: Path) -> None:
    make_tiny(tmp_path / "step-1")
    make(tmp_path / "step-1", [f"logs/{i}.txt" for i in range(1000)])
    assert f"{tmp_path}/step-1\n" == ckpttools("latest", tmp_path, "--depth", "commit").stdout
