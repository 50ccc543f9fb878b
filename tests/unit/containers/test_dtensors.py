"""DTensors of real ranks, put together from their files: byte for byte the whole tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.operations.validate import validate
from tests.rank_programs import run_ranks
from tests.unit.containers import dtensor_ranks
from tests.unit.containers.torch_bytes import as_torch, streamed

pytestmark = pytest.mark.slow
MESHES = ("3", "2x2")


@pytest.fixture(scope="module", params=MESHES)
def saved_by_ranks(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    assert run_ranks(dtensor_ranks.__file__, str(directory), request.param, rendezvous=directory / ".group") == ""
    return directory


@pytest.fixture(scope="module")
def snapshot(saved_by_ranks) -> Snapshot:
    return open_snapshot(str(saved_by_ranks))


@pytest.fixture(scope="module")
def truth(saved_by_ranks) -> dict[str, torch.Tensor]:
    return torch.load(saved_by_ranks / "whole.truth", weights_only=True)


def test_every_tensor_is_the_whole_one_byte_for_byte(snapshot, truth):
    assert {name: as_torch(t) for name, t in truth.items()} == streamed(snapshot)


def test_snapshot_is_ok_with_its_replicas_compared(saved_by_ranks):
    result = validate(str(saved_by_ranks))
    assert "ok" == result.verdict, result.findings


def test_tensor_that_each_rank_holds_is_one_piece_and_its_copies(snapshot):
    entry = snapshot.checkpoint.by_name["replicated"]
    ranks = len([f for f in snapshot.checkpoint.files if f.path.endswith(".pt")])
    assert (1, ranks - 1) == (len(entry.pieces), len(entry.replicas))


def test_lost_rank_is_told_and_what_only_it_held_is_uncovered(saved_by_ranks):
    lost = max(saved_by_ranks.glob("*_rank_*.pt"))
    aside = lost.rename(saved_by_ranks / "lost.aside")
    try:
        result = validate(str(saved_by_ranks))
    finally:
        aside.rename(lost)
    assert ("incomplete", {"missing-rank", "uncovered"}) == (result.verdict, {f.code for f in result.findings if f.is_error})
