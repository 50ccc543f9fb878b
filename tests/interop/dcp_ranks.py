"""Run as a program by ranks of a gloo group: torch's own DCP loads a checkpoint into a model built from scratch.

    python dcp_ranks.py CHECKPOINT TRUTH.json fsdp2|hsdp|tp RANKS

The model has the parameters and buffers that the truth names under `model.`, its optimizer the state under `optim.`; after
loading, every value is gathered and held against the truth. Exits with an error that names the first difference.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output")
ROWS = ("wo", "w2")


def build(tensors: dict[str, dict]) -> torch.nn.Module:
    """Nested modules with a parameter or buffer per name under `model.`; what has two dimensions is a Linear."""
    root = torch.nn.Module()
    trained = {n.split(".state.")[1].rpartition(".")[0] for n in tensors if n.startswith("optim.state.")}
    biased = {n.rpartition(".")[0] for n in tensors if n.endswith(".bias")}
    for name, truth in tensors.items():
        if not name.startswith("model."):
            continue
        *parents, leaf = name.removeprefix("model.").split(".")
        path, module = "model", root
        for part in parents:
            path += f".{part}"
            if part not in dict(module.named_children()):
                weight = tensors.get(f"{path}.weight")
                is_linear = weight is not None and len(weight["shape"]) == 2 and part in (*COLUMNS, *ROWS)
                rows, columns = weight["shape"] if is_linear else (0, 0)
                child = torch.nn.Linear(columns, rows, bias=path in biased) if is_linear else torch.nn.Module()
                module.add_module(part, child)
            module = dict(module.named_children())[part]
        if isinstance(module, torch.nn.Linear):
            continue
        value = torch.zeros(truth["shape"], dtype=getattr(torch, truth["dtype"].removeprefix("torch.")))
        if name.removeprefix("model.") in trained:
            module.register_parameter(leaf, torch.nn.Parameter(value))
        else:
            module.register_buffer(leaf, value)
    return root


def shard(model: torch.nn.Module, kind: str, ranks: int) -> None:
    """Cut the model as a trainer of that kind does."""
    layers = list(dict(model.named_children())["layers"].children())
    if kind == "tp":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "tp"))
        plan: dict = {f"*.*.{name}": ColwiseParallel() for name in COLUMNS} | {f"*.*.{name}": RowwiseParallel() for name in ROWS}
        parallelize_module(dict(model.named_children())["layers"], mesh["tp"], plan)
        if ranks == 2:
            return
        mesh = mesh["fsdp"]
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def digest(value: torch.Tensor) -> str:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    data = whole.detach().contiguous().reshape(-1)
    return (
        hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest() if data.numel() else hashlib.sha256(b"").hexdigest()
    )


def flatten(value, name: str) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {n: t for key, below in items for n, t in flatten(below, f"{name}.{key}").items()}


def run(rank: int, checkpoint: str, truth: str, kind: str, ranks: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}/group", rank=rank, world_size=ranks)
    with open(truth) as file:
        tensors = json.load(file)["tensors"]
    model = build(tensors)
    shard(model, kind, ranks)
    optimizer = torch.optim.AdamW(model.parameters())
    of_model, of_optimizer = get_state_dict(model, optimizer)  # makes the optimizer's state, too
    state = {"model": of_model, "optim": of_optimizer}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    loaded = flatten(of_model, "model") | flatten(of_optimizer, "optim")
    sharded = sum(isinstance(t, DTensor) for t in loaded.values())
    assert sharded > len(loaded) // 3, f"only {sharded} of {len(loaded)} tensors are sharded"
    for name, expected in tensors.items():
        if name.startswith(("model.", "optim.")):
            assert name in loaded, f"{name} was not loaded"
            assert digest(loaded[name]) == expected["sha256"], f"{name} differs"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), directory), nprocs=int(sys.argv[4]))
