"""vLLM's sharded state: written by us, read back, and loaded by the rule that vLLM has."""

from __future__ import annotations

import glob
from functools import partial

import pytest
from safetensors import safe_open

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import ConversionError
from ckpttools.layouts import open_snapshot
from ckpttools.layouts.vllm import arrange_ranks, refusals
from ckpttools.model import ObjectEntry
from ckpttools.operations.validate import validate
from ckpttools.placement.local import Cut
from tests.layouts.contract import codes
from tests.placement_cases import BF16, FP32, Tensors, assert_round_trip, mesh_of, place, values_of, write

torch = pytest.importorskip("torch")
COLUMNS, ROWS = Cut("tp", 1), Cut("tp", 0)


def a_model() -> Tensors:
    return {
        "model.embed_tokens.weight": (BF16, (24, 6), (ROWS,)),
        "model.layers.0.self_attn.qkv_proj.weight": (BF16, (36, 6), (Cut("tp", 0, (12, 12, 12)),)),
        "model.layers.0.self_attn.o_proj.weight": (BF16, (6, 12), (COLUMNS,)),
        "model.layers.0.mlp.fused_columns": (FP32, (3, 24), (Cut("tp", 1, (12, 12)),)),
        "model.norm.weight": (FP32, (6,), ()),
        "scale": (FP32, (), ()),
    }


def loaded_as_vllm_does(directory, rank: int) -> dict[str, bytes]:
    """Every file that the pattern finds for a rank, every key of it."""
    found = {}
    for path in sorted(glob.glob(str(directory / f"model-rank-{rank}-part-*.safetensors"))):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                assert key not in found
                tensor = file.get_tensor(key)
                found[key] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3", "dp=1,tp=2"])
@pytest.mark.parametrize("limit", [None, 100, 1])
def test_every_rank_has_its_own_tensors_and_they_are_one_checkpoint(tmp_path, mesh, limit):
    written = write(tmp_path, place(a_model()), mesh_of(mesh), partial(arrange_ranks, max_part_bytes=limit))
    assert_round_trip(written, "vllm")
    for rank in range(mesh_of(mesh).ranks):
        assert {name: written.local_bytes(name, rank) for name in a_model()} == loaded_as_vllm_does(written.directory, rank)


def test_parts_are_not_larger_than_asked_but_for_a_tensor_that_is(tmp_path):
    written = write(tmp_path, place(a_model()), mesh_of("tp=2"), partial(arrange_ranks, max_part_bytes=150))
    sizes: dict[str, int] = {}
    for entry in written.snapshot.checkpoint.tensors:
        for piece in (*entry.pieces, *entry.replicas):
            sizes[piece.extent.file] = sizes.get(piece.extent.file, 0) + entry.spec.dtype.length_bytes(piece.box.volume)
    assert len(sizes) > 4
    assert max(sizes.values()) <= 216  # the fused rows of one rank


def test_one_of_tied_tensors_is_written_and_the_header_names_the_other(tmp_path):
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    written = write(tmp_path, place(a_model()), mesh_of("tp=2"), partial(arrange_ranks, aliases=aliases))
    assert_round_trip(written, "vllm")
    with safe_open(written.directory / "model-rank-1-part-0.safetensors", framework="pt") as file:
        assert "model.embed_tokens.weight" == file.metadata()["lm_head.weight"]


def test_dcp_reads_the_files_too_where_nothing_is_fused(tmp_path):
    import torch.distributed.checkpoint as dcp

    tensors = {n: t for n, t in a_model().items() if not any(c.sections for c in t[2])}
    written = write(tmp_path, place(tensors), mesh_of("tp=2"), arrange_ranks)
    state = {n: torch.zeros(shape, dtype=getattr(torch, dtype.name)) for n, (dtype, shape, _) in tensors.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(written.directory)), no_dist=True)
    assert all(t.reshape(-1).view(torch.uint8).numpy().tobytes() == written.case.values[n] for n, t in state.items())


@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2,pp=2", "dp=2,tp=2"])
def test_a_mesh_of_other_axes_is_refused(mesh):
    with pytest.raises(ConversionError, match="tensor-parallel rank alone") as caught:
        arrange_ranks(place(a_model()), mesh_of(mesh))
    assert mesh == str(caught.value.found)


def test_uneven_shares_objects_and_dtypes_are_named_with_their_numbers():
    placed = place({"odd": (FP32, (7, 2), (ROWS,)), "z": (BY_NAME["complex128"], (2,), ()), "even": (FP32, (4,), (ROWS,))})
    with pytest.raises(ConversionError, match="cannot hold 3 of the entries") as caught:
        arrange_ranks(placed, mesh_of("tp=2"), objects=[ObjectEntry("lr", ("lr",), "float", 0.5)])
    found = str(caught.value.found)
    assert "`odd` ([7, 2] over tp=2 gives ranks [4, 2] and [3, 2], and vLLM needs equal shares)" in found
    assert "`lr`" in found
    assert "`z`" in found


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        ("model-rank-1-part-0.safetensors", "missing-file"),
        ("model-rank-0-part-1.safetensors", "missing-file"),
        ("model-rank-1-part-*.safetensors", "missing-rank"),
    ],
)
def test_a_lost_file_is_seen(tmp_path, lost, code):
    written = write(tmp_path, place(a_model()), mesh_of("tp=2"), partial(arrange_ranks, max_part_bytes=100))
    for path in written.directory.glob(lost):
        path.unlink()
    result = validate(str(written.directory))
    assert ("incomplete", True) == (result.verdict, code in codes(result))


def test_a_lost_last_part_with_whole_tensors_is_seen(tmp_path):
    placed = place({"cut": (FP32, (4, 2), (ROWS,)), "whole": (FP32, (40,), ())})
    written = write(tmp_path, placed, mesh_of("tp=2"), partial(arrange_ranks, max_part_bytes=100))
    (written.directory / "model-rank-1-part-1.safetensors").unlink()
    assert "missing-file" in codes(validate(str(written.directory)))


def test_files_of_another_rank_and_of_another_mesh_are_seen(tmp_path):
    two = write(tmp_path / "two", place(a_model()), mesh_of("tp=2"), arrange_ranks)
    three = write(tmp_path / "three", place(a_model()), mesh_of("tp=3"), arrange_ranks)
    last = two.directory / "model-rank-1-part-0.safetensors"
    for other in (two.directory / "model-rank-0-part-0.safetensors", three.directory / "model-rank-1-part-0.safetensors"):
        last.write_bytes(other.read_bytes())
        assert "rank-mismatch" in codes(validate(str(two.directory)))


def test_replicas_that_differ_are_seen(tmp_path):
    written = write(tmp_path, place(a_model()), mesh_of("tp=2"), arrange_ranks)
    entry = written.snapshot.checkpoint.by_name["model.norm.weight"]
    path = written.directory / entry.replicas[0].extent.file
    data = bytearray(path.read_bytes())
    data[entry.replicas[0].extent.offset] ^= 1
    path.write_bytes(data)
    assert {"replica-mismatch"} == codes(validate(str(written.directory)))


class TestWrittenByVllm:
    """Files without a note, as vLLM itself leaves them."""

    def test_each_rank_s_tensors_are_its_own(self, tmp_path):
        from safetensors.torch import save_file

        for rank in range(2):
            save_file({"w": torch.full((2, 3), float(rank))}, tmp_path / f"model-rank-{rank}-part-0.safetensors")
            save_file({"n": torch.ones(3)}, tmp_path / f"model-rank-{rank}-part-1.safetensors")
        checkpoint = open_snapshot(str(tmp_path)).checkpoint
        assert ("vllm", {"completeness-unproved"}) == (checkpoint.layout, {f.code for f in checkpoint.findings})
        assert ["rank_0.n", "rank_0.w", "rank_1.n", "rank_1.w"] == sorted(values_of(tmp_path))
        assert "ok" == validate(str(tmp_path)).verdict

    def test_one_rank_has_the_tensors_under_their_names(self, tmp_path):
        from safetensors.torch import save_file

        save_file({"w": torch.ones(2, 3)}, tmp_path / "model-rank-0-part-0.safetensors")
        assert ["w"] == [t.name for t in open_snapshot(str(tmp_path)).checkpoint]

    def test_bad_files_are_findings(self, tmp_path):
        (tmp_path / "model-rank-0-part-0.safetensors").write_bytes(b"")
        (tmp_path / "model-rank-1-part-0.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        (tmp_path / "model-rank-900000000-part-900000000.safetensors").write_bytes(b"x" * 7)
        assert "damaged" == validate(str(tmp_path)).verdict


def test_values_that_vllm_has_in_another_order_are_refused():
    placed = place(
        {
            "h.0.self_attention.query_key_value.weight": (FP32, (12, 4), (ROWS,)),
            "layers.0.attention.query_key_value.bias": (FP32, (12,), (ROWS,)),
            "h.0.attn.c_attn.weight": (FP32, (4, 12), (Cut("tp", 1, (4, 4, 4)),)),
            "in_vllms_order.attention.query_key_value.weight": (FP32, (12, 4), (Cut("tp", 0, (4, 4, 4)),)),
            "linear.attn.c_attn.weight": (FP32, (12, 4), (Cut("tp", 0, (4, 4, 4)),)),
        }
    )
    found = refusals(placed, mesh_of("tp=2"))
    assert [(name, why.partition(",")[0]) for name, why in found.items()] == [
        ("h.0.self_attention.query_key_value.weight", "rows of query"),
        ("layers.0.attention.query_key_value.bias", "rows of query"),
        ("h.0.attn.c_attn.weight", "columns are outputs"),
    ]
