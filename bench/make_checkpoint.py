"""Writes a large checkpoint with torch's own writers, for the benchmarks: Llama shapes in bfloat16, cut over ranks.

    python bench/make_checkpoint.py OUT --gigabytes 2 --ranks 4 --cut rows|columns

OUT/dcp is the sharded checkpoint (torch.distributed.checkpoint), OUT/full.pt the same weights in one torch file, OUT/next.pt what
another step of training would have made of them: nearly every element changed a little.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

HIDDEN, FEED_FORWARD, VOCABULARY = 2048, 5632, 32000


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of a Llama-like model of about that many bytes in bfloat16."""
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCABULARY, HIDDEN), "output.weight": (VOCABULARY, HIDDEN)}
    layer = 0
    while 2 * sum(torch.Size(s).numel() for s in found.values()) < gigabytes * 1e9:
        prefix = f"layers.{layer}."
        found |= {f"{prefix}attention.w{x}.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
        found |= {f"{prefix}feed_forward.w{i}.weight": (FEED_FORWARD, HIDDEN) for i in (1, 3)}
        found[f"{prefix}feed_forward.w2.weight"] = (HIDDEN, FEED_FORWARD)
        found |= {f"{prefix}{n}_norm.weight": (HIDDEN,) for n in ("attention", "ffn")}
        layer += 1
    return found


def values(name: str, shape: tuple[int, ...], step: int = 0) -> torch.Tensor:
    """The same random values on every rank and in every cut."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
    found = torch.randn(shape, generator=generator)
    return (found + torch.randn(shape, generator=generator) * 0.02 * step).bfloat16()


def write(rank: int, ranks: int, out: Path, gigabytes: float, cut: str) -> None:
    """One rank's part of the save."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    state: dict[str, DTensor] = {}
    for name, shape in shapes(gigabytes).items():
        full = values(name, shape)
        axis = 1 if cut == "columns" and len(shape) == 2 else 0
        placement = Shard(axis) if len(shape) == 2 else Replicate()
        local = full.chunk(ranks, axis)[rank].contiguous() if len(shape) == 2 else full
        state[name] = DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride(), run_check=False)
    dcp.save({"model": state}, checkpoint_id=out / "dcp")
    if rank == 0:
        for step, file in enumerate(("full.pt", "next.pt")):
            state = {name: values(name, shape, step) for name, shape in shapes(gigabytes).items()}
            torch.save({"model": state}, out / file)
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cut", choices=["rows", "columns"], default="rows")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    mp.spawn(write, (options.ranks, options.out, options.gigabytes, options.cut), nprocs=options.ranks)


if __name__ == "__main__":
    main()
