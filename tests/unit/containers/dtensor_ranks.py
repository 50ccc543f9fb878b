"""Run as a program by ranks of a gloo group: each saves its DTensors as torch.save does, rank 0 the whole tensors too."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ONE_AXIS = {
    "sharded": ((8, 3), [Shard(0)]),
    "sharded along dim 1": ((3, 8), [Shard(1)]),
    "uneven": ((7, 3), [Shard(0)]),
    "fewer rows than ranks": ((1, 5), [Shard(0)]),
    "no rows": ((0, 5), [Shard(0)]),
    "replicated": ((4, 3), [Replicate()]),
    "scalar": ((), [Replicate()]),
    "vector": ((5,), [Shard(0)]),
    "last dim by a negative number": ((4, 6), [Shard(-1)]),
}
TWO_AXES = {
    "sharded twice along dim 0": ((8, 3), [Shard(0), Shard(0)]),
    "uneven twice along dim 0": ((7, 3), [Shard(0), Shard(0)]),
    "sharded along both dims": ((5, 7), [Shard(0), Shard(1)]),
    "sharded along both dims the other way": ((5, 7), [Shard(1), Shard(0)]),
    "sharded and replicated": ((5, 4), [Shard(0), Replicate()]),
    "replicated and sharded": ((5, 4), [Replicate(), Shard(1)]),
    "replicated": ((5, 4), [Replicate(), Replicate()]),
    "fewer rows than ranks": ((1, 4), [Shard(0), Shard(0)]),
}


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def strided(mesh) -> dict[str, torch.Tensor]:
    """FSDP over tensor parallelism, which is what makes `_StridedShard`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return dict(model.state_dict())


def save(rank: int, directory: str, axes: tuple[int, ...]) -> None:
    ranks = 1
    for size in axes:
        ranks *= size
    dist.init_process_group("gloo", init_method=f"file://{directory}/.group", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "tp")[: len(axes)])
    cases = ONE_AXIS if len(axes) == 1 else TWO_AXES
    state = {n: distribute_tensor(whole(shape, i), mesh, p) for i, (n, (shape, p)) in enumerate(cases.items())}
    if len(axes) == 2:
        state |= strided(mesh)
    full = {name: t.full_tensor() for name, t in state.items()}
    torch.save(state, f"{directory}/model_world_size_{ranks}_rank_{rank}.pt")
    if rank == 0:
        torch.save(full, f"{directory}/whole.truth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sizes = tuple(int(n) for n in sys.argv[2].split("x"))
    mp.spawn(save, (sys.argv[1], sizes), nprocs=torch.Size(sizes).numel())
