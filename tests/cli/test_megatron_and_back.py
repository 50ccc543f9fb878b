"""Megatron's legacy layout to torch_dist and back: what comes out is what a legacy file of that mesh holds, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]


@pytest.mark.parametrize(
    ("case", "mesh"), [("legacy_tp2_distopt", "tp=2"), ("legacy_tp2_mcore", "tp=2"), ("legacy_tp2_pp2_mcore", "tp=2,pp=2")]
)
def test_optimizer_state_finds_back_to_its_place(case: str, mesh: str, ckpttools: Run, tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / case / "ckpt"
    for start, end, target in ((source, "there", "megatron-dist"), (tmp_path / "there", "back", "megatron-legacy")):
        answer = ckpttools("reshard", start, tmp_path / end, "--to", target, "--mesh", mesh, "--drop")
        assert answer.exit_code == 0, answer.stderr
    ckpttools("reshard", source, tmp_path / "direct", "--to", "megatron-legacy", "--mesh", mesh, "--drop")
    direct = {p.relative_to(tmp_path / "direct"): p.read_bytes() for p in (tmp_path / "direct").rglob("*.pt")}
    assert direct == {p.relative_to(tmp_path / "back"): p.read_bytes() for p in (tmp_path / "back").rglob("*.pt")}


@pytest.mark.parametrize("target", ["megatron-legacy", "megatron-dist"])
def test_the_weights_alone_keep_the_arguments_of_a_tied_embedding(target: str, ckpttools: Run, tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "tdist_pp2_tied_gelu_bias" / "ckpt" / "iter_0000010"
    answer = ckpttools("reshard", source, tmp_path / "out", "--to", target, "--mesh", "tp=2,pp=2", "--weights-only")
    assert answer.exit_code == 0, answer.stderr
    assert "ok" == ckpttools("validate", tmp_path / "out", "--json").document["verdict"]
    document = ckpttools("inspect", tmp_path / "out", "--objects", "--json").document
    assert {o["name"].rpartition(".")[2] for o in document["objects"]} <= {"args", "checkpoint_version"}
