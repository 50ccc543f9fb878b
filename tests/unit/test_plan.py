"""A plan tiles its files and covers its tensors exactly, counts what it takes, and is the same for the same inputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckpttools import plan as plans
from ckpttools.dtypes import BY_NAME
from ckpttools.errors import ConversionError
from ckpttools.model import ArrangedFile, Arrangement, Box, ChecksumSlot, FileEntry, Frame, Literal, Slot
from ckpttools.storage.source import ListedFile, Listing
from tests.plan_cases import BF16, FP32, Case, along, arrange, make_case, some_tensors


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source", {"a": (FP32, (4, 6)), "b": (BF16, (5,))}, along(0, 3))


def of(case: Case, *files: ArrangedFile, **options: object) -> plans.Plan:
    wanted = {s.tensor for f in files for s in f.slots}
    tensor_of = {t.name: t for t in case.checkpoint.tensors if t.name in wanted}
    return plans.make(case.checkpoint, Arrangement("raw", files), tensor_of=tensor_of, **options)


A_WHOLE = Slot("a", Box((0, 0), (4, 6)), 2, 96)


def test_segments_are_in_order_of_their_offsets(case):
    plan = of(case, ArrangedFile("f", 104, (A_WHOLE,), (Literal(0, b"ab"), Literal(98, b"cd")), (ChecksumSlot(100, 2, 96),)))
    assert [type(s).__name__ for s in plan.files[0].segments] == ["Literal", "Slot", "Literal", "ChecksumSlot"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (ArrangedFile("f", 98, (A_WHOLE,)), "nothing fills byte 0 of f"),
        (ArrangedFile("f", 98, (A_WHOLE,), (Literal(0, b"abc"),)), "two segments share byte 2 of f"),
        (ArrangedFile("f", 99, (A_WHOLE,), (Literal(0, b"ab"),)), "f is said to have 99 bytes, its segments have 98"),
        (ArrangedFile("f", 98, (A_WHOLE, A_WHOLE), (Literal(0, b"ab"),)), "two segments share byte 2"),
    ],
)
def test_segments_that_do_not_tile_a_file_are_refused(case, file, message):
    with pytest.raises(ValueError, match=message):
        of(case, file)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([Slot("a", Box((0, 0), (3, 6)), 0, 72)], "do not cover its shape"),
        ([Slot("a", Box((1, 0), (4, 6)), 0, 96)], "do not cover its shape"),
        ([Slot("a", Box((0, 0), (4, 6)), 0, 48)], "48 bytes for 24 of float32"),
    ],
)
def test_slots_that_do_not_hold_every_element_are_refused(case, slots, message):
    length = sum(s.length for s in slots)
    with pytest.raises(ValueError, match=message):
        of(case, ArrangedFile("f", length, tuple(slots)))


def test_copies_of_an_element_may_lie_in_slots_of_different_boxes(case):
    slots = (Slot("a", Box((0, 0), (4, 6)), 0, 96), Slot("a", Box((3, 0), (1, 6)), 96, 24))
    assert 2 == len(of(case, ArrangedFile("f", 120, slots)).tensors["a"].slots)


def test_a_selected_tensor_without_slots_is_refused(case):
    with pytest.raises(ValueError, match="do not cover"):
        plans.make(case.checkpoint, Arrangement("raw", ()), tensor_of={"a": case.checkpoint.tensors[0]})


def test_a_slot_of_a_tensor_that_was_not_selected_is_refused(case):
    file = ArrangedFile("f", 98, (A_WHOLE,), (Literal(0, b"ab"),))
    with pytest.raises(ValueError, match="not selected: a"):
        plans.make(case.checkpoint, Arrangement("raw", (file,)), tensor_of={})


@pytest.mark.parametrize(("covers", "length"), [(3, 95), (2, 95), (2, 100), (0, 200)])
def test_a_checksum_of_parts_of_segments_or_of_itself_is_refused(case, covers, length):
    file = ArrangedFile("f", 102, (A_WHOLE,), (Literal(0, b"ab"),), (ChecksumSlot(98, covers, length),))
    with pytest.raises(ValueError, match="a checksum of f covers parts"):
        of(case, file)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../f", "a/../b", "./f", "a//b", "a\0b", "a/"])
def test_an_output_file_outside_the_destination_is_refused(case, path):
    with pytest.raises(ConversionError, match="would leave the destination"):
        of(case, ArrangedFile(path, 2, literals=(Literal(0, b"ab"),)))


def test_two_files_of_one_name_are_refused(case):
    with pytest.raises(ConversionError, match=r"same name: config\.json"):
        of(case, ArrangedFile("config.json", 0), companions=[FileEntry("config.json", 17)])


def test_a_file_with_the_name_of_a_directory_is_refused(case):
    with pytest.raises(ConversionError, match="name of a directory: a"):
        of(case, ArrangedFile("a", 0), ArrangedFile("a/b", 0))


def test_companions_are_carried_whole(case):
    plan = of(case, companions=[FileEntry("config.json", 17)])
    assert plan.files == (plans.PlannedFile("config.json", 17, (plans.Carry("config.json", 0, 0, 17),)),)


def test_only_floating_point_is_cast(case):
    whole = Slot("a", Box((0, 0), (4, 6)), 0, 24)
    with pytest.raises(ConversionError, match="no cast from float32 to int8: a"):
        of(case, ArrangedFile("f", 24, (whole,)), casts={"a": BY_NAME["int8"]})


def test_a_cast_to_the_dtype_it_has_is_none(case):
    plan = of(case, ArrangedFile("f", 98, (A_WHOLE,), (Literal(0, b"ab"),)), casts={"a": FP32})
    assert not plan.tensors["a"].is_cast


def test_a_tensor_whose_elements_share_bytes_is_not_cut(tmp_path):
    case = make_case(tmp_path / "source", {"a": (BY_NAME["float4_e2m1fn"], (4, 2))})
    with pytest.raises(ConversionError, match="float4_e2m1fn tensor cannot be cut: a"):
        case.plan(arrange(case, along(0, 2)))


def test_equal_inputs_give_equal_plans(case):
    first, second = (case.plan(arrange(case, along(1, 2))) for _ in range(2))
    assert first == second
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_tells_whatever_changes_the_output(case):
    plan = case.plan(arrange(case))
    source = case.checkpoint.tensors[0]
    moved = replace(source, pieces=(replace(source.pieces[0], extent=replace(source.pieces[0].extent, offset=99)),))
    swapped = replace(source.pieces[0], extent=replace(source.pieces[0].extent, transforms=("byteswap",)))
    others = [
        replace(plan, source="/elsewhere"),
        replace(plan, source_files=(replace(plan.source_files[0], length_bytes=1), *plan.source_files[1:])),
        replace(plan, source_files=(replace(plan.source_files[0], modified_s=1.0), *plan.source_files[1:])),
        replace(plan, tensors={**plan.tensors, "a": replace(plan.tensors["a"], source=moved)}),
        replace(plan, tensors={**plan.tensors, "a": replace(plan.tensors["a"], source=replace(source, pieces=(swapped,)))}),
        replace(plan, files=plan.files[:1]),
        case.plan(arrange(case, along(0, 2))),
        case.plan(arrange(case, files=3)),
    ]
    assert len({p.fingerprint for p in [plan, *others]}) == len(others) + 1


def test_a_source_file_that_was_replaced_changes_the_fingerprint(case):
    tensor_of = {t.name: t for t in case.checkpoint.tensors}
    listings = [Listing([ListedFile("part0.bin", 10, modified_s)]) for modified_s in (1.0, 2.0)]
    first, second = (plans.make(case.checkpoint, arrange(case), tensor_of=tensor_of, listing=x) for x in listings)
    assert first.fingerprint != second.fingerprint


def test_counts_what_it_takes(case):
    plan = case.plan(arrange(case, files=1), companions=[FileEntry("config.json", 17)])
    assert plan.bytes_read == 96 + 10 + 17
    assert plan.bytes_written == sum(f.length_bytes for f in plan.files)
    assert plan.space_bytes >= 2 * 4096
    assert plan.inodes >= 3


def test_a_cast_counts_what_is_read_and_what_is_written(case):
    plan = of(case, ArrangedFile("f", 48, (Slot("a", Box((0, 0), (4, 6)), 0, 48),)), casts={"a": BF16})
    assert (plan.bytes_read, plan.bytes_written) == (96, 48)


def test_describes_each_file_and_where_it_draws_from(case):
    plan = case.plan(arrange(case, along(0, 2), index=True), companions=[FileEntry("config.json", 17)])
    described = json.loads(json.dumps(plan.describe()))
    assert [f["path"] for f in described["files"]] == ["out/file0.bin", "out/file1.bin", "index.json", "config.json"]
    assert [f["is_commit_record"] for f in described["files"]] == [False, False, True, False]
    assert described["files"][0]["tensors"] == 2
    drawn = sum(s["bytes"] for f in described["files"] for s in f["sources"])
    assert drawn == plan.bytes_read
    assert described["files"][3]["sources"] == [{"file": "config.json", "bytes": 17}]


def test_plans_every_rank_and_width(tmp_path):
    case = make_case(tmp_path / "source", some_tensors(), along(0, 2))
    plan = case.plan(arrange(case, along(1, 3)))
    assert set(plan.tensors) == set(some_tensors())


FRAME = Frame((Literal(-3, b"abc"),), (Literal(48, b"de"), ChecksumSlot(50, 0, 48)))


def test_the_frame_of_a_slot_goes_where_the_slot_goes(case):
    halves = (Slot("a", Box((0, 0), (2, 6)), 3, 48, FRAME), Slot("a", Box((2, 0), (2, 6)), 60, 48, FRAME))
    plan = of(case, ArrangedFile("f", 114, halves))
    assert [(0, 3), (3, 48), (51, 2), (53, 4), (57, 3), (60, 48), (108, 2), (110, 4)] == [
        (s.offset, plans.segment_length(s)) for s in plan.files[0].segments
    ]
    assert [-1, 0, -1, -1, -1, 1, -1, -1] == [number for number, _ in plan.files[0].walk()]
    assert [ChecksumSlot(53, 3, 48), Literal(57, b"abc")] == [s for _, s in plan.files[0].walk(52, 60)]
    assert bytearray([1, 1]) == plan.files[0].is_summed


def test_a_frame_that_leaves_a_gap_or_sums_a_part_of_its_slot_is_refused(case):
    whole = Box((0, 0), (4, 6))
    for frame, message in (
        (Frame((), (Literal(97, b"d"),)), "nothing fills byte 96"),
        (Frame((), (ChecksumSlot(96, 1, 90),)), "covers parts of segments"),
    ):
        with pytest.raises(ValueError, match=message):
            of(case, ArrangedFile("f", 100, (Slot("a", whole, 0, 96, frame),)))
