"""DTensors that we pickle, and meshes that torch slices: held against torch's own, rank by rank, without a group that works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpttools.containers.dtensor_records import parse_release
from ckpttools.layouts import open_snapshot
from ckpttools.layouts.per_rank.write import arrange_ranks
from ckpttools.model import Box
from ckpttools.placement.local import Cut
from tests.placement_cases import FP32, mesh_of, place, some_placed, write


@contextmanager
def as_rank(rank: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> Iterator[DeviceMesh]:
    """Torch as it is in one rank of a job whose first act is to make a mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(sizes).numel())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def loaded(path: Path) -> dict[str, torch.Tensor]:
    from torch.distributed._mesh_layout import _FlatLayout  # which torch 2.13 forgot to list as safe

    with torch.serialization.safe_globals([_FlatLayout]):
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("mesh", "sizes", "names", "sliced"),
    [
        ("fsdp=3", (3,), ("fsdp",), ("fsdp",)),
        ("fsdp=1", (1,), ("fsdp",), ("fsdp",)),
        ("dp=2,fsdp=1,tp=2", (2, 1, 2), ("ddp", "fsdp", "tp"), ("ddp", "fsdp", "tp")),
        ("dp=2,fsdp=2", (2, 2), ("ddp", "fsdp"), ("ddp", "fsdp")),
        ("pp=2,fsdp=2,tp=2", (2, 2, 2), ("pp", "fsdp", "tp"), ("fsdp", "tp")),
    ],
)
def test_meshes_placements_and_groups_are_those_of_torch(tmp_path, mesh, sizes, names, sliced):
    stages = {"layers.0.weight": (("pp", (0,)),), "layers.1.weight": (("pp", (1,)),)} if "pp" in names else None
    placed = place(some_placed(), held_at=stages)
    written = write(tmp_path, placed, mesh_of(mesh), arrange_ranks)
    ranks = mesh_of(mesh).ranks
    for rank in range(ranks):
        with as_rank(rank, sizes, names) as whole:
            own = whole[sliced] if sliced != names else whole
            for name, tensor in loaded(written.directory / f"model_world_size_{ranks}_rank_{rank}.pt").items():
                if isinstance(tensor, DTensor):
                    found = tensor.device_mesh
                    assert torch.equal(own.mesh, found.mesh)
                    assert (own.mesh_dim_names, own.get_coordinate()) == (found.mesh_dim_names, found.get_coordinate())
                    assert own._dim_group_names == found._dim_group_names
                    assert tensor._spec.shard_order == type(tensor._spec)(own, tensor.placements).shard_order
                    assert written.local_bytes(name, rank) == tensor.to_local().flatten().view(torch.uint8).numpy().tobytes()


def test_meshes_are_for_the_devices_and_have_the_names_of_the_job(tmp_path):
    arrange = partial(arrange_ranks, device_type="cuda", axis_names={"fsdp": "dp_shard"})
    written = write(tmp_path, place(some_placed()), mesh_of("fsdp=2"), arrange)
    tensor = loaded(written.directory / "model_world_size_2_rank_1.pt")["layers.0.weight"]
    assert isinstance(tensor, DTensor)
    assert ("cuda", ("dp_shard",)) == (tensor.device_mesh.device_type, tensor.device_mesh.mesh_dim_names)
    assert ("cuda", "cpu") == (tensor.device.type, tensor.to_local().device.type)


def test_a_mesh_that_torch_sliced_from_a_larger_one_has_the_rank_s_own_slice(tmp_path):
    for rank in range(4):
        with as_rank(rank, (2, 2), ("fsdp", "tp")) as mesh:
            local = torch.full((2, 3), float(rank % 2))
            state = {"w": DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)}
            torch.save(state, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    checkpoint = open_snapshot(str(tmp_path)).checkpoint
    (entry,) = checkpoint.tensors
    assert [] == list(checkpoint.findings)
    assert [(0, Box((0, 0), (2, 3))), (1, Box((2, 0), (2, 3)))] == [(p.rank, p.box) for p in entry.pieces]
    assert [2, 3] == [p.rank for p in entry.replicas]


def test_the_form_is_that_of_the_release(tmp_path):
    placed = place({"w": (FP32, (4,), (Cut("fsdp", 0),))})
    names = {}
    for release in ("2.4", "2.5", "2.10", "2.13"):
        (file, *_rest) = arrange_ranks(placed, mesh_of("fsdp=2"), torch_release=release).files
        pickled = b"".join(literal.data for literal in file.literals)
        names[release] = [word for word in (b"_tensor.api", b"_mesh_layout", b"_FlatLayout") if word in pickled]
    assert {"2.4": [b"_tensor.api"], "2.5": [], "2.10": [b"_mesh_layout"], "2.13": [b"_mesh_layout", b"_FlatLayout"]} == names


def test_releases_are_read_as_people_write_them():
    assert [(2, 9), (2, 13), (2, 4)] == [parse_release(text) for text in ("2.9", "2.13.1", "2.4")]
