"""Which rank writes what: against torch's own planner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.geometry import cover
from ckpttools.model import Box, Mesh, TensorSpec
from ckpttools.placement.dedup import assign, owners
from ckpttools.placement.local import Cut, PlacedTensor, Placement

FP32 = parse_dtype("float32")


def placed(name: str, shape: tuple[int, ...], *cuts: Cut) -> PlacedTensor:
    return PlacedTensor(TensorSpec(name, FP32, shape), (name,), placement=Placement(cuts))


@st.composite
def plans(draw: st.DrawFn) -> list[list[tuple[str, int]]]:
    """What up to six ranks hold of twelve items, each of the same bytes wherever it is."""
    bytes_of = {f"t{i}": draw(st.sampled_from([0, 1, 4, 4, 8, 100])) for i in range(12)}
    ranks = draw(st.integers(1, 6))
    return [[(name, n) for name, n in bytes_of.items() if draw(st.booleans())] for _ in range(ranks)]


@settings(deadline=None)
@given(plans())
def test_the_owners_are_those_that_torch_chooses(held: list[list[tuple[str, int]]]) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def item(name: str, count: int) -> WriteItem:
        size = torch.Size([count])
        data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(torch.uint8), size)
        return WriteItem(MetadataIndex(name, torch.Size([0])), WriteItemType.SHARD, tensor_data=data)

    chosen = dedup_save_plans([SavePlan([item(*i) for i in plan]) for plan in held])
    assert {i.index.fqn: rank for rank, plan in enumerate(chosen) for i in plan.items} == assign(held)


def test_replicated_tensors_go_to_the_ranks_that_have_least() -> None:
    mesh = Mesh((("fsdp", 3),))
    found = owners([placed("norm", (4,)), placed("w", (9, 2), Cut("fsdp", 0)), placed("bias", (4,)), placed("b", (4,))], mesh)
    assert {name: list(boxes.values()) for name, boxes in found.items()} == {"norm": [0], "w": [0, 1, 2], "bias": [1], "b": [2]}


def test_boxes_of_a_replicating_axis_are_shared_out() -> None:
    mesh = Mesh((("dp", 2), ("fsdp", 2)))
    found = owners([placed(name, (4, 2), Cut("fsdp", 0)) for name in "ab"], mesh)
    assert [found[n][Box((row, 0), (2, 2))] for n in "ab" for row in (0, 2)] == [0, 1, 2, 3]


def test_an_empty_box_is_there_once_and_never_in_the_place_of_a_full_one() -> None:
    assert owners([placed("w", (1,), Cut("fsdp", 0))], Mesh((("fsdp", 4),)))["w"] == {Box((0,), (1,)): 0, Box((1,), (0,)): 1}
    strided = placed("w", (5,), Cut("tp", 0), Cut("fsdp", 0))
    boxes = list(owners([strided], Mesh((("fsdp", 4), ("tp", 2))))["w"])
    assert len({box.offsets for box in boxes}) == len(boxes)
    assert cover((5,), [box for box in boxes if box.volume]).is_exact


@given(st.data())
def test_the_boxes_of_any_placement_are_shared_out_as_if_each_rank_were_asked(data: st.DataObject) -> None:
    mesh = Mesh(tuple((axis, data.draw(st.integers(1, 3))) for axis in ("dp", "fsdp", "tp")))
    cuts = st.lists(st.sampled_from([Cut("fsdp", 0), Cut("tp", 0), Cut("tp", 1)]), max_size=2, unique_by=lambda cut: cut.axis)
    held = st.lists(st.sampled_from([("dp", (0,)), ("tp", (0, 1))]), max_size=1)
    tensors = [
        PlacedTensor(TensorSpec(f"t{i}", FP32, (data.draw(st.integers(1, 5)), 3)), (f"t{i}",), placement=placement)
        for i, placement in enumerate(
            Placement(tuple(data.draw(cuts)), tuple(data.draw(held))) for _ in range(data.draw(st.integers(1, 3)))
        )
    ]
    named = [
        [
            ((t.spec.name, part.box), t.spec.length_bytes)
            for t in tensors
            if (local := t.local(mesh, rank))
            for part in local.parts
        ]
        for rank in range(mesh.ranks)
    ]
    filled = {(name, box.offsets) for plan in named for (name, box), _ in plan if box.volume}
    kept = [[x for x in plan if x[0][1].volume or (x[0][0], x[0][1].offsets) not in filled] for plan in named]
    found = {(name, box): rank for name, boxes in owners(tensors, mesh).items() for box, rank in boxes.items()}
    assert found == assign(kept)
