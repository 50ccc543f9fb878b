"""The manifest that we write, as Python's own pickle reads it with torch's classes."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from ckpttools.containers.dcp_metadata import write_metadata
from ckpttools.dtypes import parse_dtype
from ckpttools.model import Box, TensorSpec

torch = pytest.importorskip("torch", reason="needs torch, whose classes the manifest is made of")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata", reason="needs torch's distributed package")


def rows(tensors: int, chunks: int) -> list:
    found = []
    for t in range(tensors):
        spec = TensorSpec(f"layer.{t}." + "x" * (300 if t == 0 else 1), parse_dtype("bfloat16"), (chunks, 1 << 33))
        boxes = [Box((i, 0), (1, 1 << 33)) for i in range(chunks)]
        found.append((spec, [(box, (f"__{i}_0.distcp", i * 70_000, 1 << 40)) for i, box in enumerate(boxes)]))
    return found


@pytest.mark.parametrize(("tensors", "chunks"), [(0, 0), (1, 1), (3, 700), (1, 1000), (2000, 1)])
def test_torch_finds_every_chunk_at_its_place(tensors: int, chunks: int) -> None:
    given = rows(tensors, chunks)
    paths = {spec.name: ("layer", i, "x") for i, (spec, _) in enumerate(given)} | {"lr": ("optim", 0, "lr")}
    found = pickle.loads(write_metadata(given, [("lr", ("__0_0.distcp", 0, 5))], paths))
    assert isinstance(found, metadata.Metadata)
    assert found.planner_data == paths
    assert len(found.storage_data) == tensors * chunks + 1
    assert isinstance(found.state_dict_metadata["lr"], metadata.BytesStorageMetadata)
    for spec, stored in given:
        row = found.state_dict_metadata[spec.name]
        assert (row.size, row.properties.dtype, row.properties.requires_grad) == (torch.Size(spec.shape), torch.bfloat16, False)
        assert row.properties.layout is torch.strided
        assert [(tuple(c.offsets), tuple(c.sizes)) for c in row.chunks] == [(box.offsets, box.sizes) for box, _ in stored]
        for box, (file, offset, length) in stored:
            place = found.storage_data[metadata.MetadataIndex(spec.name, torch.Size(box.offsets))]
            assert (place.relative_path, place.offset, place.length) == (file, offset, length)


def test_rank_zero_and_unnested_state_dicts() -> None:
    spec = TensorSpec("step", parse_dtype("float32"), ())
    data = write_metadata([(spec, [(Box((), ()), ("__0_0.distcp", 0, 9))])], [], None)
    found = pickle.loads(data)
    assert found.planner_data is None
    assert found.storage_data[metadata.MetadataIndex("step", torch.Size([]))].length == 9
    pickletools.dis(data, out=open("/dev/null", "w"))  # noqa: SIM115  # raises where a stack or a memo is not in order
