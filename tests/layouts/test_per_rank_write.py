"""A torch file per rank as we write it: DTensors and local tensors, read back by us."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import ConversionError
from ckpttools.layouts.per_rank.write import arrange_ranks
from ckpttools.model import ObjectEntry
from ckpttools.operations.validate import validate
from ckpttools.placement.local import Cut
from tests.layouts.contract import codes
from tests.placement_cases import FP32, INT64, assert_round_trip, mesh_of, place, renamed, some_placed, write

MESHES = ("fsdp=1", "fsdp=3", "tp=2,fsdp=2", "dp=2,fsdp=2", "fsdp=2,tp=3", "dp=2", "dp=2,fsdp=2,tp=2")
FUSED = {
    "qkv": (FP32, (12, 2), (Cut("tp", 0, (8, 2, 2)), Cut("fsdp", 0))),
    "fused columns": (FP32, (3, 12), (Cut("tp", 1, (6, 6)),)),
}
plain = partial(arrange_ranks, has_dtensors=False)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("release", ["2.5", "2.9", "2.10", "2.12", "2.13"])
def test_dtensors_are_read_back_whole(tmp_path, mesh, release):
    written = write(tmp_path, place(some_placed()), mesh_of(mesh), partial(arrange_ranks, torch_release=release))
    assert_round_trip(written, "per_rank")


@pytest.mark.parametrize("mesh", MESHES)
def test_local_tensors_are_read_back_whole(tmp_path, mesh):
    written = write(tmp_path, place(some_placed() | FUSED), mesh_of(mesh), plain)
    assert_round_trip(written, "per_rank")
    assert written.snapshot.checkpoint.mesh == mesh_of(mesh)


@pytest.mark.parametrize("arrange", [arrange_ranks, plain])
def test_stages_of_a_pipeline_write_their_own_tensors(tmp_path, arrange):
    held_at = {
        "layers.0.weight": (("pp", (0,)),),
        "layers.1.weight": (("pp", (1,)),),
        "layers.0.bias": (("pp", (0,)),),
        "step": (("pp", (0, 1)),),
    }
    written = write(tmp_path, place(some_placed(), held_at=held_at), mesh_of("pp=2,fsdp=2,tp=2"), arrange)
    assert_round_trip(written, "per_rank")


@pytest.mark.parametrize("arrange", [arrange_ranks, plain])
def test_families_have_files_of_their_own_and_keep_their_names(tmp_path, arrange):
    model = place(some_placed())
    tensors = [*model, *renamed(model, "optimizer", "optimizer")]
    objects = [
        ObjectEntry("optimizer.param_groups.0.lr", ("optimizer", "param_groups", 0, "lr"), "float", 0.5, family="optimizer"),
        ObjectEntry("scheduler.last_epoch", ("scheduler", "last_epoch"), "int", 3, family="scheduler"),
    ]
    sequences = {("optimizer", "param_groups"): "list"}
    written = write(tmp_path, tensors, mesh_of("fsdp=2"), partial(arrange, objects=objects, sequences=sequences))
    assert_round_trip(written, "per_rank")
    names = {f.path.partition("_world")[0] for f in written.snapshot.listing}
    assert {"model", "optim", "scheduler"} == names - {"fsdp_config.json"}
    found = {o.name: o.record for o in written.snapshot.checkpoint.objects}
    assert {"optimizer.param_groups.0.lr": 0.5, "scheduler.last_epoch": 3} == {n: found[n] for n in found}


def test_state_of_each_rank_stays_with_its_rank(tmp_path):
    own = [
        t
        for rank in range(2)
        for t in renamed(place({f"rank_{rank}.rng": (INT64, (4,), (Cut("fsdp", 0),))}), "extra_state", "extra_state")
    ]
    tensors = [*place(some_placed()), *map(_nested, own)]
    written = write(tmp_path, tensors, mesh_of("fsdp=2"), arrange_ranks)
    assert_round_trip(written, "per_rank")
    with pytest.raises(ConversionError, match="cannot hold 2 of the entries") as caught:
        arrange_ranks(tensors, mesh_of("fsdp=3"))
    assert "each of 2 ranks has its own, and the mesh has 3" in str(caught.value.found)


def _nested(tensor):
    family, name = tensor.path
    rank, _, rest = name.partition(".")
    return replace(tensor, path=(family, rank, rest))


def test_an_alias_is_the_same_tensor(tmp_path):
    aliases = {"tied": "layers.0.weight"}
    for arrange, directory in ((arrange_ranks, "dtensors"), (plain, "plain")):
        placed = place(some_placed())
        written = write(tmp_path / directory, placed, mesh_of("fsdp=2"), partial(arrange, aliases=aliases))
        assert_round_trip(written, "per_rank", also=aliases)
        assert (("layers.0.weight", "tied"),) == written.snapshot.checkpoint.aliases


def test_what_no_dtensor_is_cut_as_is_named(tmp_path):
    with pytest.raises(ConversionError, match="cannot hold 3 of the entries") as caught:
        arrange_ranks(place(FUSED | {"float4": (BY_NAME["float4_e2m1fn"], (2,), ()), "fine": (FP32, (4,), ())}), mesh_of("tp=2"))
    assert all(name in str(caught.value.found) for name in ("`qkv`", "tp along 0 in 8+2+2", "`fused columns`", "`float4`"))


def test_sections_that_come_to_the_same_are_a_dtensor(tmp_path):
    placed = place({"w": (FP32, (8, 2), (Cut("tp", 0, (8,)),)), "v": (FP32, (4, 2), (Cut("tp", 0, (4, 0)),))})
    assert_round_trip(write(tmp_path, placed, mesh_of("tp=2"), arrange_ranks), "per_rank")


def test_a_release_whose_form_is_not_known_is_refused():
    for release in ("2.3", "2", "newest", "2.14", "9.9"):
        with pytest.raises(ConversionError, match="torch"):
            arrange_ranks(place(some_placed()), mesh_of("fsdp=2"), torch_release=release)


@pytest.mark.parametrize("arrange", [arrange_ranks, plain])
def test_a_missing_rank_and_one_in_the_place_of_another_are_seen(tmp_path, arrange):
    written = write(tmp_path, place(some_placed()), mesh_of("fsdp=3"), arrange)
    last, first = (written.directory / f"model_world_size_3_rank_{rank}.pt" for rank in (2, 0))
    last.unlink()
    result = validate(str(written.directory))
    assert ("incomplete", True) == (result.verdict, {"missing-rank", "uncovered"} <= codes(result))
    last.write_bytes(first.read_bytes())
    result = validate(str(written.directory))
    assert ("damaged", True) == (result.verdict, bool(codes(result) & {"rank-mismatch", "piece-mismatch", "uncovered"}))


def test_what_the_first_form_cannot_say_is_named(tmp_path):
    older = partial(arrange_ranks, torch_release="2.4")
    with pytest.raises(ConversionError, match="cannot hold 1 of the entries") as caught:
        older(place(some_placed()), mesh_of("fsdp=2,tp=2"))
    assert "`layers.1.weight` (torch 2.4 has no DTensor that is cut as tp along 0, fsdp along 0)" in str(caught.value.found)
    assert_round_trip(write(tmp_path, place(some_placed()), mesh_of("dp=2,fsdp=2"), older), "per_rank")


def test_equal_inputs_give_equal_files(tmp_path):
    placed, mesh = place(some_placed()), mesh_of("tp=2,fsdp=2")
    assert arrange_ranks(placed, mesh) == arrange_ranks(placed, mesh)
