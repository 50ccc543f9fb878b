"""Run as a program by any torch from 2.4 on: gloo ranks load the files that we wrote for them and compare every value.

Arguments: directory of the files, mesh as `name=size,...`. `<directory>/../truth` has the bytes of each whole tensor, under
its number in `truth/names.json`.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # 2.4
    from torch.distributed._tensor import DTensor, distribute_tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def loads(path: Path) -> list[dict[str, torch.Tensor]]:
    """With the restricted loader too, where this release lets DTensors through it."""
    states = [torch.load(path, weights_only=False)]
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    allowed = []  # 2.13 does not list its own _FlatLayout among the safe classes, nor do releases before 2.12 _StridedShard
    if release >= (2, 6):
        from torch.distributed.tensor.placement_types import _StridedShard

        allowed.append(_StridedShard)
    if release >= (2, 13):
        from torch.distributed._mesh_layout import _FlatLayout

        allowed.append(_FlatLayout)
    if release >= (2, 6):
        with torch.serialization.safe_globals(allowed):
            states.append(torch.load(path, weights_only=True))
    return states


def check(rank: int, directory: str, axes: str) -> None:
    pairs = [axis.split("=") for axis in axes.split(",")]
    names, sizes = tuple(name for name, _ in pairs), tuple(int(size) for _, size in pairs)
    world = prod(sizes)
    dist.init_process_group("gloo", init_method=f"file://{directory}/../group-{torch.__version__}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    truth = Path(directory, "..", "truth")
    wanted = {
        name: truth.joinpath(str(i)).read_bytes() for i, name in enumerate(json.loads(truth.joinpath("names.json").read_text()))
    }
    seen = 0
    for state in loads(Path(directory, f"model_world_size_{world}_rank_{rank}.pt")):
        for name, tensor in state.items():
            if not isinstance(tensor, DTensor):
                assert bytes_of(tensor) == wanted[name], f"{name} on rank {rank}"
                continue
            seen += 1
            assert tensor.device_mesh == mesh, f"the mesh of {name} on rank {rank} is {tensor.device_mesh}"
            like = (
                torch.frombuffer(bytearray(wanted[name]), dtype=torch.uint8)
                if wanted[name]
                else torch.empty(0, dtype=torch.uint8)
            )
            whole = like.view(tensor.dtype).reshape(tensor.shape)
            is_strided = any("Strided" in type(p).__name__ for p in tensor.placements)
            if not is_strided:
                model = distribute_tensor(whole.clone(), mesh, tensor.placements)
                assert bytes_of(model.to_local()) == bytes_of(tensor.to_local()), f"the share of {name} on rank {rank}"
                with torch.no_grad():
                    model.zero_()
                    model.copy_(tensor)
                assert bytes_of(model.to_local()) == bytes_of(tensor.to_local()), f"{name} copied on rank {rank}"
            assert bytes_of(tensor.full_tensor()) == wanted[name], f"{name} gathered on rank {rank}"
    assert seen, f"no DTensors on rank {rank}"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(check, tuple(sys.argv[1:3]), nprocs=prod(int(axis.split("=")[1]) for axis in sys.argv[2].split(",")))
