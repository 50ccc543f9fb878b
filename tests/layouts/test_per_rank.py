"""One torch file per rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ckpttools.containers import sharded_values
from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES
from tests.layouts.contract import LayoutContract, codes
from tests.unit.containers.torch_bytes import saved


class TestContract(LayoutContract):
    layout = "per_rank"
    cases = ("perrank_dtensor_verl_layout_w2", "perrank_dtensor_hsdp_2x2", "fsdp1_sharded_pickle_w2")
    harmed = ("perrank_dtensor_verl_layout_w2", "model_world_size_2_rank_0.pt")


class TestRanks:
    @pytest.mark.parametrize("name", ["model_world_size_99999999999_rank_0.pt", "model_rank99999999999.pt"])
    def test_rank_number_beyond_all_reason_is_no_rank(self, tmp_path, name):
        (tmp_path / name).write_bytes(saved({"w": torch.ones(1)}))
        assert validate(str(tmp_path / name)).verdict == "ok"

    def test_many_absent_ranks_are_named_by_the_first(self, tmp_path):
        (tmp_path / "model_world_size_900000000_rank_0.pt").write_bytes(saved({"w": torch.ones(1)}))
        result = validate(str(tmp_path))
        assert (["missing-rank"] * 64, "incomplete") == ([f.code for f in result.findings], result.verdict)

    def test_ranks_are_in_the_order_of_their_numbers(self, tmp_path):
        for rank in (0, 2, 10, 1, 3, 4, 5, 6, 7, 8, 9):
            (tmp_path / f"random_states_{rank}.pkl").write_bytes(saved({"seed": torch.tensor([rank])}))
        (tmp_path / "model.pt").write_bytes(saved({"w": torch.ones(1)}))
        names = [t.name for t in open_snapshot(str(tmp_path)).checkpoint if t.family == "rng_state"]
        assert [f"rng_state.rank_{rank}.seed" for rank in range(11)] == names

    def test_a_mesh_is_read_once_per_file_not_once_per_tensor(self, monkeypatch):
        read = []
        real = sharded_values._device_mesh
        monkeypatch.setattr(sharded_values, "_device_mesh", lambda *args: (read.append(args[1]), real(*args))[1])
        checkpoint = open_snapshot(str(FIXTURES / "torch/perrank_dtensor_verl_layout_w2/ckpt")).checkpoint
        assert 4 < len(checkpoint.tensors)
        assert {0: 2, 1: 2} == Counter(read)  # model and optimizer

    def test_two_files_of_one_rank_are_not_taken_for_replicas_in_silence(self, tmp_path):
        for name in ("model_rank_0.pt", "model_rank_00.pt"):
            (tmp_path / name).write_bytes(saved({"w": torch.ones(1)}))
        assert "rank-mismatch" in codes(validate(str(tmp_path)))


def test_a_dot_before_the_rank_is_no_part_of_the_name(tmp_path):
    """`model_final.rank_0.pth` of dinov2."""
    for rank in range(2):
        torch.save({"flat": torch.full((4,), float(rank))}, tmp_path / f"model_final.rank_{rank}.pth")

    checkpoint = open_snapshot(str(tmp_path)).checkpoint

    assert ["model_final.rank_0.flat", "model_final.rank_1.flat"] == [t.name for t in checkpoint.tensors]
    assert not [f for f in checkpoint.findings if f.is_error]
