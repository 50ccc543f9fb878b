"""Writes a snapshot of many small files, for the time that `latest` takes: `many_files.py KIND DIRECTORY FILES TENSORS`."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path

import torch

ROW = 8


def dcp(root: Path, ranks: int, tensors: int) -> None:
    """DCP as `ranks` ranks write it: each tensor cut into a row per rank."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    files = [io.BytesIO() for _ in range(ranks)]
    state, places = {}, {}
    for t in range(tensors):
        name = f"layers.{t}.weight"
        for rank, file in enumerate(files):
            start = file.tell()
            torch.save(torch.full((1, ROW), float(rank)), file)
            index = MetadataIndex(name, torch.Size([rank, 0]), rank)
            places[index] = _StorageInfo(f"__{rank}_0.distcp", start, file.tell() - start)
        chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, ROW])) for rank in range(ranks)]
        state[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([ranks, ROW]), chunks)
    for rank, file in enumerate(files):
        (root / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    (root / ".metadata").write_bytes(pickle.dumps(Metadata(state, None, places)))


def item(root: Path, files: int, _tensors: int) -> None:
    """DCP with a file per item."""
    from torch.distributed import checkpoint

    state = {f"layers.{i}.weight": torch.full((ROW,), float(i)) for i in range(files)}
    writer = checkpoint.FileSystemWriter(str(root), single_file_per_rank=False)
    checkpoint.save(state, storage_writer=writer, no_dist=True)


def per_rank(root: Path, ranks: int, tensors: int) -> None:
    """DTensors, a torch file per rank."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(ranks):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        local = torch.full((1, ROW), float(rank))
        state = {f"layers.{t}.weight": DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for t in range(tensors)}
        torch.save(state, root / f"model_world_size_{ranks}_rank_{rank}.pt")
        distributed.destroy_process_group()


def safetensors(root: Path, files: int, tensors: int) -> None:
    """Shards of safetensors and their index."""
    from safetensors.torch import save_file

    _shards(root, files, tensors, "model-{:05d}-of-{:05d}.safetensors", lambda state, path: save_file(state, path))


def bins(root: Path, files: int, tensors: int) -> None:
    """Shards of torch files and their index."""
    _shards(root, files, tensors, "pytorch_model-{:05d}-of-{:05d}.bin", torch.save)


def _shards(root: Path, files: int, tensors: int, pattern: str, save) -> None:
    places = {}
    for i in range(files):
        name = pattern.format(i + 1, files)
        state = {f"layers.{i}.{t}.weight": torch.full((ROW,), float(i)) for t in range(tensors)}
        save(state, root / name)
        places |= dict.fromkeys(state, name)
    index = pattern.partition("-")[0] + Path(pattern).suffix + ".index.json"
    (root / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


if __name__ == "__main__":
    kind, place, files, tensors = sys.argv[1:5]
    root = Path(place)
    root.mkdir(parents=True)
    {"dcp": dcp, "item": item, "per_rank": per_rank, "safetensors": safetensors, "bins": bins}[kind](
        root, int(files), int(tensors)
    )
