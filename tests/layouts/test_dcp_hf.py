from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ckpttools.layouts import safetensors as plain
from ckpttools.layouts.base import Contents, Part
from ckpttools.layouts.checks import check_cover
from ckpttools.layouts.dcp_hf import LAYOUT
from ckpttools.model import Piece, TensorEntry
from ckpttools.storage.source import Source, open_source, read
from tests.fixture_cases import Case

SHARDED, CONSOLIDATED = Case("torch", "hfwriter_sharded_w2"), Case("torch", "hfwriter_consolidated_w2")
Boxes = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]


def sniff(location: Path) -> tuple[Source, list[Part]]:
    source, _ = open_source(str(location))
    return source, LAYOUT.sniff(source.listing(), lambda _: b"")


def read_model(location: Path) -> tuple[Source, Contents]:
    source, (part,) = sniff(location)
    return source, LAYOUT.read(source, source.listing(), part)


def codes(contents: Contents) -> list[str]:
    return [f.code for f in contents.findings]


def cover_codes(contents: Contents) -> list[str]:
    return [f.code for t in contents.tensors for f in check_cover(t)]


def values(source: Source, tensor: TensorEntry, pieces: tuple[Piece, ...]) -> bytes:
    """The tensor put together from boxes, by numpy, as bytes."""
    width = tensor.spec.dtype.item_bytes
    whole = np.zeros((*tensor.spec.shape, width), np.uint8)
    for piece in pieces:
        data = read(source, piece.extent.file, piece.extent.offset, piece.extent.length)
        where = tuple(slice(o, stop) for o, stop in zip(piece.box.offsets, piece.box.stops, strict=True))
        whole[where] = np.frombuffer(data, np.uint8).reshape(*piece.box.sizes, width)
    return whole.tobytes()


def shard(directory: Path, rank: int, boxes: Boxes, *, model: int = 1, count: int = 1, info: str | None = None) -> Path:
    """A shard as the writer writes it."""
    directory.mkdir(exist_ok=True)
    told = json.dumps({name: {"saved_offsets": list(offsets)} for name, (_, offsets) in boxes.items()}) if info is None else info
    path = directory / f"shard-{rank + 1:05d}-model-{model:05d}-of-{count:05d}.safetensors"
    metadata = {"DCP_SHARDING_INFO": told, "DCP_VERSION": "1.0", "format": "pt"}
    safetensors.torch.save_file({name: t for name, (t, _) in boxes.items()}, path, metadata=metadata)
    return path


def rows(start: int, n: int = 2) -> tuple[torch.Tensor, tuple[int, ...]]:
    return torch.arange(start * 3.0, (start + n) * 3).reshape(n, 3), (start, 0)


def consolidate(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """What a consolidation leaves at the top."""
    file = "model-00001-of-00001.safetensors"
    safetensors.torch.save_file(dict(tensors), directory / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": dict.fromkeys(tensors, file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


@pytest.mark.parametrize("path", [SHARDED.checkpoint, CONSOLIDATED.checkpoint / "sharded"])
def test_shards_make_up_the_tensors_that_were_saved(path: Path) -> None:
    truth = (SHARDED if path == SHARDED.checkpoint else CONSOLIDATED).truth["tensors"]
    source, contents = read_model(path)
    assert {t.name for t in contents.tensors} == set(truth)
    for tensor in contents.tensors:
        expected = truth[tensor.name]
        assert (str(tensor.spec.dtype), list(tensor.spec.shape)) == (expected["dtype"], expected["shape"])
        assert hashlib.sha256(values(source, tensor, tensor.pieces)).hexdigest() == expected["sha256"]
        assert not tensor.shape_is_declared
        ranks = {s["rank"]: (s["offsets"], s["sizes"]) for s in expected.get("shards", ())}
        if len(tensor.pieces) > 1:
            assert {p.rank: (list(p.box.offsets), list(p.box.sizes)) for p in tensor.pieces} == ranks
    assert cover_codes(contents) == []
    assert [(f.code, f.severity) for f in contents.findings] == [("completeness-unproved", "note")]
    assert contents.written_by == "DCP HuggingFaceStorageWriter 1.0"


def test_consolidated_tensors_have_the_shards_as_replicas_with_the_same_values() -> None:
    source, contents = read_model(CONSOLIDATED.checkpoint)
    truth = CONSOLIDATED.truth["tensors"]
    assert {t.name for t in contents.tensors} == set(truth)
    assert codes(contents) == []
    for tensor in contents.tensors:
        assert tensor.shape_is_declared
        assert len(tensor.pieces) == 1
        for pieces in (tensor.pieces, tensor.replicas):
            assert hashlib.sha256(values(source, tensor, pieces)).hexdigest() == truth[tensor.name]["sha256"]
    assert sum(len(t.replicas) for t in contents.tensors) == 61
    assert {f.role for f in contents.files} == {"data", "manifest"}
    assert len(contents.files) == 10


def test_the_two_layouts_claim_no_file_twice() -> None:
    for path in (SHARDED.checkpoint, CONSOLIDATED.checkpoint, CONSOLIDATED.checkpoint / "sharded"):
        source, (part,) = sniff(path)
        others = plain.LAYOUT.sniff(source.listing(), lambda _: b"")
        assert others == []
        assert len(part.files) == len(source.listing())


def test_rank_0_mode_is_not_ours() -> None:
    assert sniff(Case("torch", "hfwriter_rank0_3files").checkpoint)[1] == []


def test_a_scalar_that_the_consolidation_zeroed_stands_beside_its_shard(tmp_path: Path) -> None:
    shard(tmp_path / "sharded", 0, {"scale": (torch.tensor(7.5), ())})
    consolidate(tmp_path, {"scale": torch.tensor(0.0)})
    source, contents = read_model(tmp_path)
    (tensor,) = contents.tensors
    assert [values(source, tensor, p) for p in (tensor.pieces, tensor.replicas)] == [b"\0\0\0\0", b"\0\0\xf0\x40"]


def test_a_missing_rank_in_the_middle_is_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        shard(tmp_path, rank, {"w": rows(2 * rank)})
    _, contents = read_model(tmp_path)
    missing = "shard-00002-model-00001-of-00001.safetensors"
    assert next((f.code, f.where) for f in contents.findings) == ("missing-rank", missing)
    assert (contents.commit.is_committed, contents.commit.record) == (False, missing)
    assert cover_codes(contents) == ["uncovered"]


def test_the_first_rank_may_be_the_one_that_is_missing(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hfwriter_sharded_w2/ckpt")
    (path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    _, contents = read_model(path)
    assert "missing-rank" in codes(contents)
    assert "uncovered" in cover_codes(contents)


def test_a_missing_last_rank_cannot_be_seen_and_that_is_said(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hfwriter_sharded_w2/ckpt")
    (path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    _, contents = read_model(path)
    assert codes(contents) == ["completeness-unproved"]


def test_an_output_file_that_no_rank_has_a_part_of(tmp_path: Path) -> None:
    for rank in (0, 1):
        for model in (1, 3):
            shard(tmp_path, rank, {f"w{model}": rows(2 * rank)}, model=model, count=3)
    _, contents = read_model(tmp_path)
    assert ("missing-file", "shard-00001-model-00002-of-00003.safetensors") in [(f.code, f.where) for f in contents.findings]


@pytest.mark.parametrize("name", ["shard-00002-model-00002-of-00003", "shard-00001-model-00003-of-00003"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_file_that_one_rank_lacks_is_named(copy_of: Callable[[str], Path], name: str, is_alone: bool) -> None:
    path = copy_of("torch/hfwriter_consolidated_w2/ckpt")
    (path / "sharded" / f"{name}.safetensors").unlink()
    _, contents = read_model(path / "sharded" if is_alone else path)
    where = f"{name}.safetensors" if is_alone else f"sharded/{name}.safetensors"
    assert ("missing-file", where) in [(f.code, f.where) for f in contents.findings]


def test_pipeline_stages_have_no_parts_of_each_others_files(tmp_path: Path) -> None:
    for rank, model in ((0, 1), (1, 1), (2, 2), (3, 2)):
        shard(tmp_path, rank, {f"w{model}": rows(2 * (rank % 2))}, model=model, count=2)
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["completeness-unproved"]
    assert cover_codes(contents) == []


def test_a_scalar_is_in_the_file_of_one_rank_only(tmp_path: Path) -> None:
    for rank in (0, 1):
        shard(tmp_path, rank, {"w": rows(2 * rank)}, model=1, count=2)
    shard(tmp_path, 0, {"step": (torch.tensor(3), ())}, model=2, count=2)
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["completeness-unproved"]


def test_a_shard_that_is_gone_after_consolidation_leaves_elements_without_a_replica(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hfwriter_consolidated_w2/ckpt")
    for file in (path / "sharded").glob("shard-00002-*"):
        file.unlink()
    _, contents = read_model(path)
    assert [(f.code, f.where) for f in contents.findings] == [("uncovered", "sharded/")]
    assert cover_codes(contents) == []


def test_a_consolidation_without_its_index_is_unfinished_and_the_shards_are_read(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hfwriter_consolidated_w2/ckpt")
    (path / "model.safetensors.index.json").unlink()
    _, contents = read_model(path)
    assert next((f.code, f.where) for f in contents.findings) == ("not-committed", "model.safetensors.index.json")
    assert (contents.commit.is_committed, len(contents.tensors)) == (False, 31)
    assert {f.path: f.role for f in contents.files}["model-00001-of-00003.safetensors"] == "unreferenced"


def test_shards_whose_consolidation_never_began_are_a_checkpoint(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hfwriter_consolidated_w2/ckpt")
    for file in path.glob("model*"):
        file.unlink()
    _, contents = read_model(path)
    assert (codes(contents), contents.commit.is_committed) == (["completeness-unproved"], True)


def test_a_lone_file_beside_the_shards_needs_no_index(tmp_path: Path) -> None:
    shard(tmp_path / "sharded", 0, {"w": rows(0)})
    safetensors.torch.save_file({"w": rows(0)[0]}, tmp_path / "model.safetensors")
    _, contents = read_model(tmp_path)
    assert (codes(contents), len(contents.tensors[0].replicas)) == ([], 1)


def test_shards_at_the_top_and_in_sharded(tmp_path: Path) -> None:
    shard(tmp_path / "sharded", 0, {"w": rows(0)})
    shard(tmp_path, 0, {"w": rows(0)})
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["duplicate-weights", "completeness-unproved"]
    assert len(contents.tensors[0].pieces) == 1


def test_a_box_that_two_ranks_wrote_is_a_piece_and_a_replica(tmp_path: Path) -> None:
    for rank in (0, 1):
        shard(tmp_path, rank, {"w": rows(0)})
    _, contents = read_model(tmp_path)
    (tensor,) = contents.tensors
    assert ([p.rank for p in tensor.pieces], [p.rank for p in tensor.replicas]) == ([0], [1])
    assert cover_codes(contents) == []


def test_boxes_that_overlap_are_left_to_the_common_check(tmp_path: Path) -> None:
    shard(tmp_path, 0, {"w": rows(0)})
    shard(tmp_path, 1, {"w": rows(1)})
    assert cover_codes(read_model(tmp_path)[1]) == ["pieces-overlap"]


def test_empty_boxes_of_ranks_past_the_end(tmp_path: Path) -> None:
    shard(tmp_path, 0, {"w": rows(0)})
    shard(tmp_path, 1, {"w": rows(2, 0)})
    _, contents = read_model(tmp_path)
    assert contents.tensors[0].spec.shape == (2, 3)
    assert (codes(contents), cover_codes(contents)) == (["completeness-unproved"], [])


@pytest.mark.parametrize("other", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)])
def test_ranks_that_disagree_about_a_tensor(tmp_path: Path, other: torch.Tensor) -> None:
    shard(tmp_path, 0, {"w": rows(0)})
    path = shard(tmp_path, 1, {"w": (other, (2, 0)[: other.ndim])})
    _, contents = read_model(tmp_path)
    assert ("rank-mismatch", f"w in {path.name}") in [(f.code, f.where) for f in contents.findings]


def test_files_of_two_saves_with_different_numbers_of_files(tmp_path: Path) -> None:
    shard(tmp_path, 0, {"w": rows(0)})
    shard(tmp_path, 0, {"v": rows(0)}, model=2, count=2)
    assert "rank-mismatch" in codes(read_model(tmp_path)[1])


def test_a_tensor_that_was_not_consolidated_is_read_from_the_shards(tmp_path: Path) -> None:
    shard(tmp_path / "sharded", 0, {"w": rows(0), "v": rows(0)})
    consolidate(tmp_path, {"w": rows(0)[0]})
    _, contents = read_model(tmp_path)
    assert [(f.code, f.where) for f in contents.findings] == [("not-in-index", "v in sharded/")]
    assert [(t.name, t.shape_is_declared) for t in contents.tensors] == [("w", True), ("v", False)]


@pytest.mark.parametrize(
    ("whole", "code"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "piece-mismatch"),
        (torch.zeros(6), "piece-mismatch"),
        (torch.zeros(1, 3), "piece-out-of-bounds"),
    ],
)
def test_a_shard_that_is_no_part_of_the_consolidated_tensor(tmp_path: Path, whole: torch.Tensor, code: str) -> None:
    shard(tmp_path / "sharded", 0, {"w": rows(0)})
    consolidate(tmp_path, {"w": whole})
    _, contents = read_model(tmp_path)
    assert code in codes(contents)
    assert contents.tensors[0].replicas == ()


@pytest.mark.parametrize(
    "info",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"w": 1}',
        '{"w": {}}',
        '{"w": {"saved_offsets": null}}',
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [0, 0, 0]}}',
        '{"w": {"saved_offsets": [0, -1]}}',
        '{"w": {"saved_offsets": [0, 1.0]}}',
        '{"w": {"saved_offsets": [0, true]}}',
        '{"w": {"saved_offsets": [0, 9223372036854775807]}}',
        '{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [0, 0]}}',
        '{"w": {"saved_offsets": [0, 0]}, "gone": {"saved_offsets": [0, 0]}}',
    ],
)
def test_sharding_info_that_cannot_be_used(tmp_path: Path, info: str) -> None:
    path = shard(tmp_path, 0, {"w": rows(0)}, info=info)
    _, contents = read_model(tmp_path)
    (finding, _) = contents.findings
    assert finding.code == "bad-header"
    assert f"DCP_SHARDING_INFO in {path.name}" in finding.where


def test_shards_without_sharding_info_tell_no_offsets(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": rows(0)[0]}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["bad-header", "completeness-unproved"]


def test_a_number_of_ranks_that_is_a_lie_costs_nothing(tmp_path: Path) -> None:
    shard(tmp_path, 999_999_997, {"w": rows(0)}, model=1, count=999_999_999)
    _, contents = read_model(tmp_path)
    assert len(contents.findings) < 60


def test_a_truncated_shard_has_no_piece(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hfwriter_sharded_w2/ckpt")
    file = path / "shard-00002-model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    _, contents = read_model(path)
    assert "file-too-short" in codes(contents)
    assert cover_codes(contents) == ["uncovered"]
