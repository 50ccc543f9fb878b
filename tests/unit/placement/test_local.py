"""What a rank holds: against torch's rule, and the law that the ranks' boxes tile the tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.geometry import cover, split
from ckpttools.model import Box, Mesh, TensorSpec
from ckpttools.placement.local import Cut, PlacedTensor, Placement, canonical_mesh, coordinate, held_boxes, local_tensor

MESH = Mesh((("fsdp", 2), ("tp", 2)))


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, Mesh]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = Mesh(tuple((axis, draw(st.integers(1, 4))) for axis in ("dp", "fsdp", "ep", "tp")))
    cuts: list[Cut] = []
    for axis in ("ep", "tp", "fsdp"):
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            sections: tuple[int, ...] = ()
            if draw(st.booleans()) and all(c.dim != dim for c in cuts):
                first = draw(st.integers(0, shape[dim]))
                sections = (first, shape[dim] - first)
            cuts.append(Cut(axis, dim, sections))
    return shape, Placement(tuple(cuts)), mesh


@given(placed())
def test_the_boxes_of_all_ranks_tile_the_tensor(case: tuple[tuple[int, ...], Placement, Mesh]) -> None:
    shape, placement, mesh = case
    boxes = {}
    for rank in range(mesh.ranks):
        local = local_tensor(shape, placement, mesh, rank)
        assert local is not None
        assert cover(local.shape, [part.local for part in local.parts]).is_exact
        assert all(part.box.sizes == part.local.sizes for part in local.parts)
        boxes |= {part.box: None for part in local.parts}
    assert cover(shape, list(boxes)).is_exact


@given(st.integers(0, 20), st.integers(1, 5))
def test_one_cut_is_torch_chunk_with_the_place_of_empty_shares(length: int, parts: int) -> None:
    mesh = Mesh((("fsdp", parts),))
    for rank, (offset, size) in enumerate(split(length, parts)):
        local = local_tensor((length, 3), Placement((Cut("fsdp", 0),)), mesh, rank)
        assert local is not None
        assert [part.box for part in local.parts] == [Box((offset, 0), (size, 3))]


def test_tensor_parallel_first_and_rows_after_it_is_a_strided_shard() -> None:
    rows = []
    for rank in range(4):
        local = local_tensor((32, 8), Placement((Cut("tp", 0), Cut("fsdp", 0))), MESH, rank)
        assert local is not None
        rows.append(local.parts[0].box.offsets[0])
    assert rows == [0, 16, 8, 24]  # as torch writes it for mesh (dp=2, tp=2)


def test_sections_give_each_rank_its_share_of_each() -> None:
    local = local_tensor((12, 2), Placement((Cut("tp", 0, (8, 2, 2)),)), Mesh((("tp", 2),)), 1)
    assert local is not None
    assert local.shape == (6, 2)
    assert [(p.box.offsets[0], p.box.sizes[0], p.local.offsets[0]) for p in local.parts] == [(4, 4, 0), (9, 1, 4), (11, 1, 5)]


def test_a_tensor_of_another_stage_is_not_held() -> None:
    mesh = Mesh((("pp", 2), ("fsdp", 2)))
    placement = Placement((Cut("fsdp", 0),), (("pp", (1,)),))
    assert [local_tensor((4,), placement, mesh, rank) is None for rank in range(4)] == [True, True, False, False]


def test_boxes_are_listed_with_the_ranks_that_hold_them() -> None:
    tensor = PlacedTensor(TensorSpec("w", parse_dtype("float32"), (4,)), ("w",), placement=Placement((Cut("tp", 0),)))
    assert held_boxes([tensor], MESH) == {"w": {Box((0,), (2,)): [0, 2], Box((2,), (2,)): [1, 3]}}


def test_ranks_are_numbered_with_the_last_axis_fastest() -> None:
    assert coordinate(MESH, 2) == {"fsdp": 1, "tp": 0}
    assert str(canonical_mesh(Mesh.parse("tp=2,pp=3,fsdp=4"))) == "pp=3,fsdp=4,tp=2"
    with pytest.raises(ValueError, match="unknown mesh axis `cp`"):
        canonical_mesh(Mesh.parse("cp=2"))


@pytest.mark.parametrize("cut", [Cut("tp", 2), Cut("tp", 0, (3, 3))])
def test_a_cut_that_does_not_fit_is_an_error(cut: Cut) -> None:
    with pytest.raises(ValueError, match=r"no dimension|do not make"):
        local_tensor((5, 2), Placement((cut,)), MESH, 0)
