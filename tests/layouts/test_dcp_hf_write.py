"""DCP's safetensors shards as we write them: the boxes of each rank, read back by us and by torch's own reader."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial

import pytest

from ckpttools.containers.safetensors_file import read_header
from ckpttools.dtypes import BY_NAME
from ckpttools.errors import ConversionError
from ckpttools.layouts.dcp_hf.write import arrange_ranks
from ckpttools.model import Box, ObjectEntry
from ckpttools.operations.validate import validate
from ckpttools.placement.local import Cut
from ckpttools.storage.source import LocalSource
from tests.layouts.contract import codes
from tests.placement_cases import FP32, assert_round_trip, mesh_of, place, some_placed, write

MESHES = ("fsdp=1", "fsdp=3", "tp=2,fsdp=2", "dp=2,fsdp=2", "fsdp=2,tp=3")


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_written_is_read_back_whole_and_proved(tmp_path, mesh):
    written = write(tmp_path, place(some_placed()), mesh_of(mesh), arrange_ranks)
    assert_round_trip(written, "dcp_hf")
    assert written.snapshot.checkpoint.mesh == mesh_of(mesh)


@pytest.mark.parametrize("mesh", MESHES)
def test_each_box_is_in_one_file_with_its_offsets(tmp_path, mesh):
    written = write(tmp_path, place(some_placed()), mesh_of(mesh), arrange_ranks)
    source = LocalSource(str(written.directory))
    found: Counter[tuple[str, Box]] = Counter()
    for file in source.listing():
        header = read_header(source, file.path, 0, file.length_bytes)
        info = json.loads(header.metadata["DCP_SHARDING_INFO"])
        assert set(info) == {entry.name for entry in header.entries}
        found.update((e.name, Box(tuple(info[e.name]["saved_offsets"]), e.shape)) for e in header.entries)
    assert set(found.values()) == {1}


@pytest.mark.parametrize("mesh", ["fsdp=3", "dp=2,fsdp=2"])
def test_tensors_are_shared_out_over_files_by_bytes(tmp_path, mesh):
    written = write(tmp_path, place(some_placed()), mesh_of(mesh), partial(arrange_ranks, max_file_bytes=200))
    assert len(written.snapshot.listing) == mesh_of(mesh).ranks * 3
    assert_round_trip(written, "dcp_hf")


def test_stages_write_their_own_tensors(tmp_path):
    placed = place(some_placed(), held_at={"layers.0.weight": (("pp", (0,)),), "layers.1.weight": (("pp", (1,)),)})
    assert_round_trip(write(tmp_path, placed, mesh_of("pp=2,fsdp=2"), arrange_ranks), "dcp_hf")


def test_an_alias_is_a_tensor_of_its_own(tmp_path):
    aliases = {"tied": "layers.0.weight"}
    written = write(tmp_path, place(some_placed()), mesh_of("fsdp=2"), partial(arrange_ranks, aliases=aliases))
    assert_round_trip(written, "dcp_hf", also=aliases)


def test_a_missing_last_rank_is_seen(tmp_path):
    written = write(tmp_path, place(some_placed()), mesh_of("fsdp=2"), arrange_ranks)
    (written.directory / "shard-00002-model-00001-of-00001.safetensors").unlink()
    result = validate(str(written.directory))
    assert ("incomplete", True) == (result.verdict, {"missing-rank", "uncovered"} <= codes(result))


def test_a_file_of_another_mesh_is_seen(tmp_path):
    two = write(tmp_path / "two", place(some_placed()), mesh_of("fsdp=2"), arrange_ranks)
    three = write(tmp_path / "three", place(some_placed()), mesh_of("fsdp=3"), arrange_ranks)
    name = "shard-00002-model-00001-of-00001.safetensors"
    (two.directory / name).write_bytes((three.directory / name).read_bytes())
    assert "rank-mismatch" in codes(validate(str(two.directory)))


def test_what_cannot_be_held_is_named_all_of_it():
    placed = place(
        {
            "fused": (FP32, (12, 2), (Cut("tp", 0, (8, 2, 2)),)),
            "complex": (BY_NAME["complex128"], (2,), ()),
            "fine": (FP32, (4,), ()),
        }
    )
    with pytest.raises(ConversionError) as caught:
        arrange_ranks(placed, mesh_of("tp=2"), objects=[ObjectEntry("lr", ("lr",), "float", 0.5)])
    text = str(caught.value) + str(caught.value.found)
    assert all(name in text for name in ("`fused`", "`complex`", "`lr`", "3 of the entries"))
    assert "`fine`" not in text


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,fsdp=2", "fsdp=2,tp=2"])
def test_torch_reads_the_values(tmp_path, mesh):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    tensors = {n: t for n, t in some_placed().items() if t[1]}  # torch's reader cannot take a slice of no dimensions
    written = write(tmp_path, place(tensors), mesh_of(mesh), arrange_ranks)
    state = {n: torch.zeros(shape, dtype=getattr(torch, dtype.name)) for n, (dtype, shape, _) in tensors.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(written.directory)), no_dist=True)
    for name, tensor in state.items():
        assert tensor.view(torch.uint8).numpy().tobytes() == written.case.values[name], name
