"""Run as a program: gloo ranks build a model and an optimizer under FSDP2, load the files of a rank, compare, and train a step.

Arguments: directory of the files, mesh as `name=size,...`, file with the state of one process.
"""

from __future__ import annotations

import sys
from math import prod

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 5, bias=False))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 6), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()


def whole(value: object) -> object:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(rank: int, directory: str, axes: str, truth: str) -> None:
    pairs = [axis.split("=") for axis in axes.split(",")]
    names, sizes = tuple(name for name, _ in pairs), tuple(int(size) for _, size in pairs)
    world = prod(sizes)
    dist.init_process_group("gloo", init_method=f"file://{directory}/../group", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = build()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    paths = [f"{directory}/{stem}_world_size_{world}_rank_{rank}.pt" for stem in ("model", "optim")]
    own, optim = (torch.load(path, weights_only=False) for path in paths)
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(optim)
    expected = torch.load(truth, weights_only=True)
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected["model"].items()), found
    assert optimizer.state_dict()["param_groups"] == expected["optimizer"]["param_groups"]
    for index, members in expected["optimizer"]["state"].items():
        for name, value in members.items():
            assert torch.equal(whole(optimizer.state_dict()["state"][index][name]), value), (index, name)
    train(model, optimizer, 1)
    single = build()
    single.load_state_dict(expected["model"])
    other = torch.optim.AdamW(single.parameters(), lr=0.5)
    other.load_state_dict(expected["optimizer"])
    train(single, other, 1)
    for name, tensor in single.state_dict().items():
        torch.testing.assert_close(whole(model.state_dict()[name]), tensor)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(check, tuple(sys.argv[1:4]), nprocs=prod(int(axis.split("=")[1]) for axis in sys.argv[2].split(",")))
