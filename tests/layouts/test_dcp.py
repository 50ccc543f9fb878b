"""DCP directories of every dialect, and what can be wrong with a `.metadata`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.fixture_cases import Case
from tests.layouts.contract import LayoutContract, codes
from tests.unit.containers.torch_bytes import as_torch, saved, streamed

DIALECTS = (
    "dcp_fsdp2_w2",
    "dcp_fsdp2_tp_2x2",
    "dcp_fsdp2_w4_uneven",
    "dcp_hsdp_2x2",
    "dcp_dtypes_w2",
    "dcp_file_per_item_w2",
    "dcp_no_collectives_w2",
    "dcp_safetensors_format_w2",
    "dcp_zstd_ext_w2",
    "dcp_threads3_w2",
)


class TestContract(LayoutContract):
    layout = "dcp"
    cases = DIALECTS
    harmed = ("dcp_fsdp2_w2", "__0_0.distcp")


class Made:
    """A DCP directory of one tensor `w` of float32 [4, 6] in two pieces, whose `.metadata` a test may change."""

    values = torch.arange(24.0).reshape(4, 6)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.chunks = [((0, 0), (2, 6)), ((2, 0), (2, 6))]
        self.shape: tuple[int, ...] = (4, 6)
        self.dtype: object = torch.float32
        items = [saved(self.values[o[0] : o[0] + s[0]].clone()) for o, s in self.chunks]
        (directory / "__0_0.distcp").write_bytes(b"".join(items))
        ends = [0, len(items[0]), len(items[0]) + len(items[1])]
        self.places = [["__0_0.distcp", ends[i], len(items[i]), None] for i in range(2)]

    def write(self) -> str:
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.chunks]
        tensor = TensorStorageMetadata(TensorProperties(dtype=self.dtype), torch.Size(self.shape), chunks)
        storage = {}
        for (offsets, _), (file, offset, length, transforms) in zip(self.chunks, self.places, strict=True):
            storage[MetadataIndex("w", torch.Size(offsets), None)] = _StorageInfo(file, offset, length, transforms)
        metadata = Metadata({"w": tensor}, None, storage)
        (self.directory / ".metadata").write_bytes(pickle.dumps(metadata))
        return str(self.directory)

    def codes(self, depth: str = "full") -> set[str]:
        return codes(validate(self.write(), depth=depth))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


class TestManifest:
    def test_directory_that_is_varied_is_sound(self, made):
        assert set() == made.codes()

    def test_values_are_put_together(self, made):
        assert {"w": as_torch(made.values)} == streamed(open_snapshot(made.write(), is_located=True))

    def test_chunk_left_out_is_uncovered(self, made):
        del made.chunks[1], made.places[1]
        assert {"uncovered"} == made.codes("commit")

    def test_chunk_there_twice_overlaps(self, made):
        made.chunks[1] = ((1, 0), (2, 6))
        assert {"pieces-overlap", "uncovered"} == made.codes("commit")

    def test_chunk_outside_of_the_tensor_is_out_of_bounds(self, made):
        made.chunks[1] = ((3, 0), (2, 6))
        assert {"piece-out-of-bounds", "uncovered"} == made.codes("commit")

    @pytest.mark.parametrize("chunk", [((2,), (12,)), ((2, 0, 0), (2, 6, 1)), ((2, 0), (2,)), ((), ())], ids=str)
    def test_chunk_of_another_rank_is_out_of_bounds(self, made, chunk):
        made.chunks[1] = chunk
        assert {"piece-out-of-bounds", "uncovered"} <= made.codes()

    def test_chunk_of_another_shape_than_its_item_is_a_mismatch(self, made):
        made.chunks = [((0, 0), (1, 6)), ((1, 0), (3, 6))]
        assert {"piece-mismatch"} <= made.codes()

    def test_another_dtype_than_the_items_is_a_mismatch(self, made):
        made.dtype = torch.float64
        assert {"piece-mismatch"} <= made.codes()

    def test_dtype_that_the_table_has_not_is_unknown(self, made):
        made.dtype = torch.bits16
        data = Path(made.write(), ".metadata").read_bytes().replace(b"bits16", b"bits99")
        Path(made.directory, ".metadata").write_bytes(data)
        assert {"unknown-dtype"} <= codes(validate(str(made.directory)))

    @pytest.mark.parametrize("file", ["../__0_0.distcp", "/etc/passwd", "a/../../x.distcp", "..", "a\\..\\x"])
    def test_file_outside_of_the_directory_is_never_read(self, made, file):
        made.places[0][0] = file
        assert made.codes() & {"reference-outside", "missing-file"}

    @pytest.mark.parametrize("file", ["absent.distcp", "x\0.distcp", "a" * 5000, "\udce9.distcp"], ids=ascii)
    def test_file_that_is_not_there_is_missing(self, made, file):
        made.places[0][0] = file
        assert made.codes() & {"missing-file", "reference-outside", "bad-pickle"}

    @pytest.mark.parametrize(("offset", "length"), [(2**70, 10), (0, 2**70), (10**9, 10)])
    def test_item_behind_the_end_of_its_file_is_too_short(self, made, offset, length):
        made.places[0][1:3] = [offset, length]
        assert "file-too-short" in made.codes()

    @pytest.mark.parametrize(("offset", "length"), [(-1, 10), (0, -10), (1.5, 10), ("0", 10)])
    def test_place_that_is_no_place_is_a_bad_manifest(self, made, offset, length):
        made.places[0][1:3] = [offset, length]
        assert "bad-container" in made.codes()

    def test_items_that_share_bytes_overlap(self, made):
        made.places[1][1] -= 5
        assert "extent-overlap" in made.codes("commit")

    @pytest.mark.parametrize("transforms", [["stream.lz4/1"], ["stream.zstd/1", "stream.zstd/1"]])
    def test_transform_that_is_not_known_is_named(self, made, transforms):
        made.places[0][3] = transforms
        assert "unsupported-container" in made.codes()

    def test_item_said_to_be_zstd_that_is_not_is_a_bad_container(self, made):
        made.places[0][3] = ["stream.zstd/1"]
        assert "bad-container" in made.codes()

    @pytest.mark.parametrize("value", [5, [1], {}, "text", None, ChunkStorageMetadata(torch.Size(()), torch.Size(()))], ids=str)
    def test_metadata_that_is_something_else_is_a_bad_manifest(self, made, value):
        made.write()
        Path(made.directory, ".metadata").write_bytes(pickle.dumps(value))
        assert "bad-container" in codes(validate(str(made.directory)))

    def test_empty_metadata_is_found(self, made):
        made.write()
        Path(made.directory, ".metadata").write_bytes(b"")
        assert "damaged" == validate(str(made.directory)).verdict

    def test_without_metadata_it_is_not_committed(self, made):
        Path(made.write(), ".metadata").unlink()
        assert {"not-committed"} == codes(validate(str(made.directory)))

    def test_with_metadata_under_its_temporary_name_it_is_not_committed(self, made):
        Path(made.write(), ".metadata").rename(made.directory / ".metadata.tmp")
        assert "not-committed" in codes(validate(str(made.directory)))

    def test_data_file_of_an_earlier_save_is_a_note(self, made):
        (made.directory / "__7_0.distcp").write_bytes(b"old")
        assert {"unreferenced-file"} == made.codes()

    def test_path_of_metadata_stands_for_its_directory(self, made):
        assert "ok" == validate(made.write() + "/.metadata").verdict


class TestDialects:
    def test_manifest_of_a_rank_that_is_absent_is_a_missing_rank(self, copy_of):
        copied = copy_of(Case("torch", "dcp_no_collectives_w2").checkpoint)
        (copied / "__1.metadata").unlink()
        result = validate(str(copied))
        assert "missing-rank" in codes(result)

    def test_stale_files_of_an_overwritten_save_are_named(self):
        result = validate(str(Case("torch", "dcp_overwritten_stale_files").checkpoint))
        assert ("ok", {"unreferenced-file"}) == (result.verdict, codes(result))
