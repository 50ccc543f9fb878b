"""The laws of boxes, each held against a brute-force oracle: an array that holds every element's number."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools import geometry
from ckpttools.geometry import BoxIndex, cover, intersect
from ckpttools.model import Box
from tests.strategies import boxes_in, boxes_near, grids, partitions, shapes, strided_layouts

many = settings(max_examples=max(400, settings().max_examples))


def numbers(shape):
    """Every element's row-major number, in the tensor's shape."""
    return np.arange(prod(shape)).reshape(shape)


def elements(shape, box):
    """The row-major numbers of a box's elements, in the box's own row-major order."""
    return numbers(shape)[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].ravel().tolist()


def in_bounds(shape, box):
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        0 <= o and 0 <= s and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
    )


@st.composite
def shape_and(draw, strategy, count):
    shape = draw(shapes())
    return shape, [draw(strategy(shape)) for _ in range(count)]


@st.composite
def shape_and_boxes(draw, strategy):
    shape = draw(shapes())
    return shape, draw(strategy(shape))


class TestIntersect:
    @many
    @given(shape_and(boxes_in, 2))
    def test_has_the_elements_that_both_have(self, case):
        shape, (a, b) = case
        shared = intersect(a, b)
        found = [] if shared is None else elements(shape, shared)
        assert sorted(set(elements(shape, a)) & set(elements(shape, b))) == found

    @given(shape_and(boxes_in, 2))
    def test_is_commutative(self, case):
        _, (a, b) = case
        assert intersect(a, b) == intersect(b, a)

    @given(shape_and(boxes_in, 1))
    def test_of_a_box_with_itself_is_the_box(self, case):
        _, (box,) = case
        assert intersect(box, box) == box

    @given(shape_and(boxes_in, 3))
    def test_is_associative_in_elements(self, case):
        shape, (a, b, c) = case

        def of(x, y):
            return None if x is None or y is None else intersect(x, y)

        left, right = of(of(a, b), c), of(a, of(b, c))
        assert (left is None) == (right is None)
        assert left is None or elements(shape, left) == elements(shape, right)

    def test_of_rank_0_is_the_one_element(self):
        assert intersect(Box((), ()), Box((), ())) == Box((), ())

    def test_of_boxes_that_touch_has_no_elements(self):
        assert intersect(Box((0,), (2,)), Box((2,), (2,))) == Box((2,), (0,))

    def test_of_boxes_apart_is_none(self):
        assert intersect(Box((0,), (2,)), Box((3,), (2,))) is None


class TestContains:
    @many
    @given(shape_and(boxes_in, 2))
    def test_means_that_the_shared_box_is_the_inner_one(self, case):
        _, (outer, inner) = case
        assert geometry.contains(outer, inner) == (intersect(outer, inner) == inner)


class TestSplit:
    @many
    @given(st.integers(0, 200), st.integers(1, 40))
    def test_follows_torch_chunk(self, length, parts):
        torch = pytest.importorskip("torch")
        sizes = [len(chunk) for chunk in torch.arange(length).chunk(parts)] if length else []
        offsets = list(itertools.accumulate(sizes, initial=0))[: len(sizes)]
        expected = list(zip(offsets, sizes, strict=True)) + [(length, 0)] * (parts - len(sizes))
        assert expected == geometry.split(length, parts)

    @given(st.integers(0, 10**12), st.integers(1, 300))
    def test_tiles_the_dimension(self, length, parts):
        shards = geometry.split(length, parts)
        assert len(shards) == parts
        assert length == sum(size for _, size in shards)
        assert [offset for offset, _ in shards] == list(itertools.accumulate((s for _, s in shards[:-1]), initial=0))

    def test_two_rows_over_four_ranks_leave_two_empty_shards_at_the_end(self):
        assert [(0, 1), (1, 1), (2, 0), (2, 0)] == geometry.split(2, 4)

    def test_five_rows_over_four_ranks_leave_the_last_rank_empty(self):
        assert [(0, 2), (2, 2), (4, 1), (5, 0)] == geometry.split(5, 4)


class TestFlatRangeToBoxes:
    @many
    @given(st.data())
    def test_boxes_one_after_the_other_are_the_range(self, data):
        shape = data.draw(shapes())
        start = data.draw(st.integers(0, prod(shape)))
        stop = data.draw(st.integers(start, prod(shape)))
        boxes = geometry.flat_range_to_boxes(shape, start, stop)
        assert list(range(start, stop)) == [i for box in boxes for i in elements(shape, box)]

    @many
    @given(st.data())
    def test_there_are_at_most_two_per_dimension_less_one(self, data):
        shape = data.draw(shapes(min_rank=1))
        start = data.draw(st.integers(0, prod(shape)))
        stop = data.draw(st.integers(start, prod(shape)))
        assert len(geometry.flat_range_to_boxes(shape, start, stop)) <= 2 * len(shape) - 1

    def test_every_range_of_a_small_tensor(self):
        for shape in [(), (1,), (7,), (3, 4), (2, 3, 2), (2, 1, 3, 2), (0, 3), (3, 0)]:
            for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
                boxes = geometry.flat_range_to_boxes(shape, start, stop)
                assert list(range(start, stop)) == [i for box in boxes for i in elements(shape, box)]

    def test_of_rank_0_is_the_scalar(self):
        assert [Box((), ())] == geometry.flat_range_to_boxes((), 0, 1)

    def test_whole_tensor_is_one_box(self):
        assert [Box((0, 0, 0), (4, 5, 6))] == geometry.flat_range_to_boxes((4, 5, 6), 0, 120)

    def test_of_a_zero_size_dimension_is_no_box(self):
        assert [] == geometry.flat_range_to_boxes((4, 0, 6), 0, 0)

    @pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13), (13, 13)])
    def test_range_outside_the_tensor_is_refused(self, start, stop):
        with pytest.raises(ValueError, match="not inside a tensor of 12 elements"):
            geometry.flat_range_to_boxes((3, 4), start, stop)


class TestTiles:
    @many
    @given(st.data())
    def test_one_after_the_other_are_the_box(self, data):
        shape = data.draw(shapes())
        box = data.draw(boxes_in(shape))
        tiles = list(geometry.tiles(box, data.draw(st.integers(1, 40))))
        assert elements(shape, box) == [i for tile in tiles for i in elements(shape, tile)]

    @given(st.data())
    def test_none_has_more_elements_than_asked(self, data):
        box = data.draw(boxes_in(data.draw(shapes())))
        most = data.draw(st.integers(1, 40))
        assert all(0 < tile.volume <= most for tile in geometry.tiles(box, most))

    @given(st.data())
    def test_each_is_a_run_of_the_box_without_gaps(self, data):
        box = data.draw(boxes_in(data.draw(shapes(max_side=6))))
        start = 0
        for tile in geometry.tiles(box, data.draw(st.integers(1, 40))):
            first = [t - o for t, o in zip(tile.offsets, box.offsets, strict=True)]
            assert start == geometry.flat_offset(first, box.sizes)
            start += tile.volume
        assert start == box.volume

    def test_of_a_box_without_elements_there_are_none(self):
        assert [] == list(geometry.tiles(Box((0, 0), (3, 0)), 8))

    def test_of_rank_0_is_the_box(self):
        assert [Box((), ())] == list(geometry.tiles(Box((), ()), 1))

    def test_are_as_large_as_they_may_be(self):
        assert [Box((0, 0), (2, 4)), Box((2, 0), (1, 4))] == list(geometry.tiles(Box((0, 0), (3, 4)), 11))


class TestIndices:
    @given(shape_and(boxes_in, 1))
    def test_are_the_elements_in_row_major_order(self, case):
        shape, (box,) = case
        assert elements(shape, box) == [geometry.flat_offset(index, shape) for index in geometry.indices(box)]


class TestStrides:
    @many
    @given(strided_layouts())
    def test_row_major_means_that_the_elements_lie_one_after_the_other(self, case):
        sizes, strides = case
        stored = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*sizes)]
        assert geometry.is_row_major(sizes, strides) == (stored == list(range(prod(sizes))))

    @many
    @given(strided_layouts())
    def test_span_reaches_from_the_first_to_the_last_element(self, case):
        sizes, strides = case
        stored = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*sizes)]
        assert (max(stored) + 1 if stored else 0) == geometry.span_elements(sizes, strides)

    @given(shapes())
    def test_row_major_strides_are_numpys(self, shape):
        if prod(shape):
            assert np.empty(shape, dtype=np.int8).strides == geometry.row_major_strides(shape)

    @given(shapes())
    def test_row_major_strides_are_row_major(self, shape):
        assert geometry.is_row_major(shape, geometry.row_major_strides(shape))

    def test_dimension_of_size_1_may_have_any_stride(self):
        assert geometry.is_row_major((2, 1, 3), (3, 99, 1))

    def test_expanded_dimension_is_not_row_major(self):
        assert not geometry.is_row_major((2, 3), (0, 1))

    def test_scalar_spans_one_element(self):
        assert geometry.span_elements((), ()) == 1


def check_cover(shape, boxes):
    """Holds `cover` to the count of boxes per element."""
    found = cover(shape, boxes)
    inside = [i for i, box in enumerate(boxes) if in_bounds(shape, box)]
    held = np.zeros(shape, dtype=int)
    for i in inside:
        held[tuple(slice(o, o + s) for o, s in zip(boxes[i].offsets, boxes[i].sizes, strict=True))] += 1
    assert tuple(i for i in range(len(boxes)) if i not in inside) == found.out_of_bounds
    assert (held > 1).any() == bool(found.overlaps)
    for i, j in found.overlaps:
        assert i < j
        assert set(elements(shape, boxes[i])) & set(elements(shape, boxes[j]))
    assert (held == 0).sum() == found.missing
    assert (found.hole is None) == (found.missing == 0)
    if found.hole is not None:
        assert found.hole.volume > 0
        assert not held.ravel()[elements(shape, found.hole)].any()
        for larger in grown_by_one(found.hole):
            assert not in_bounds(shape, larger) or held.ravel()[elements(shape, larger)].any()
    assert found.is_exact == (len(inside) == len(boxes) and bool((held == 1).all()))


def grown_by_one(box):
    """The box with one more row, at either end of each dimension."""
    for axis, side in enumerate(box.sizes):
        for offset in (box.offsets[axis] - 1, box.offsets[axis]):
            yield Box(
                (*box.offsets[:axis], offset, *box.offsets[axis + 1 :]), (*box.sizes[:axis], side + 1, *box.sizes[axis + 1 :])
            )


def random_boxes(rng, shape):
    """Boxes of every kind in a random mixture: shards, shards less one, shards and more, boxes from anywhere."""
    boxes = [Box((), ())]
    for side in shape:
        cuts = geometry.split(side, rng.randint(1, 3))
        boxes = [Box((*b.offsets, o), (*b.sizes, s)) for b in boxes for o, s in cuts]
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        boxes.pop(rng.randrange(len(boxes))) if boxes and rng.random() < 0.5 else boxes.append(random_box(rng, shape))
    rng.shuffle(boxes)
    return boxes


def random_box(rng, shape):
    leave = 1 if rng.random() < 0.2 else 0
    offsets = tuple(rng.randint(-leave, side + leave) for side in shape)
    return Box(offsets, tuple(rng.randint(0, max(0, side - o + leave)) for o, side in zip(offsets, shape, strict=True)))


class TestCover:
    @many
    @given(shape_and_boxes(partitions))
    def test_partition_is_exact(self, case):
        shape, boxes = case
        assert cover(shape, boxes).is_exact
        check_cover(shape, boxes)

    @given(shape_and_boxes(grids))
    def test_grid_of_shards_is_exact_even_with_empty_shards(self, case):
        shape, boxes = case
        assert cover(shape, boxes).is_exact

    @many
    @given(st.data())
    def test_flat_ranges_one_after_the_other_are_exact_and_a_changed_one_is_judged_as_by_the_oracle(self, data):
        shape = data.draw(shapes(min_side=1, max_side=4))
        cuts = sorted(data.draw(st.lists(st.integers(0, prod(shape)), max_size=4)))
        boxes = [
            b for low, high in itertools.pairwise([0, *cuts, prod(shape)]) for b in geometry.flat_range_to_boxes(shape, low, high)
        ]
        assert cover(shape, boxes).is_exact
        check_cover(shape, boxes)
        at = data.draw(st.integers(0, len(boxes) - 1))
        boxes[at] = data.draw(boxes_near(shape))
        check_cover(shape, boxes)

    @many
    @given(st.data())
    def test_partition_less_one_box_has_a_hole_of_its_size(self, data):
        shape = data.draw(shapes(min_side=1))
        boxes = data.draw(partitions(shape))
        lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        assert lost.volume == cover(shape, boxes).missing
        check_cover(shape, boxes)

    @many
    @given(st.data())
    def test_any_boxes_are_judged_as_the_oracle_judges_them(self, data):
        shape = data.draw(shapes(max_side=4))
        check_cover(shape, data.draw(st.lists(boxes_in(shape), max_size=8)))

    @many
    @given(st.data())
    def test_boxes_that_leave_the_shape_or_have_another_rank_are_named(self, data):
        shape = data.draw(shapes(max_side=4))
        check_cover(shape, data.draw(st.lists(boxes_near(shape), max_size=6)))

    @pytest.mark.parametrize("rank", range(5))
    def test_a_thousand_random_cases_per_rank(self, rank):
        rng = random.Random(rank)
        for _ in range(1000):
            shape = tuple(rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 5]) for _ in range(rank))
            check_cover(shape, random_boxes(rng, shape))

    def test_scalar_without_a_piece_is_missing(self):
        assert cover((), []) == geometry.Cover((), (), 1, Box((), ()))

    def test_scalar_with_two_pieces_overlaps(self):
        assert cover((), [Box((), ()), Box((), ())]).overlaps == ((0, 1),)

    def test_tensor_without_elements_needs_no_piece(self):
        assert cover((0, 3), []).is_exact

    def test_empty_shards_at_the_end_are_in_bounds(self):
        assert cover((2, 6), [Box((o, 0), (s, 6)) for o, s in geometry.split(2, 4)]).is_exact

    def test_missing_last_shard_is_pointed_at(self):
        assert cover((8, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), Box((4, 0), (2, 4))]).hole == Box((6, 0), (2, 4))

    def test_box_whose_offsets_and_sizes_disagree_in_rank_is_out_of_bounds(self):
        assert cover((4, 4), [Box((0,), (4, 4))]).out_of_bounds == (0,)

    def test_boxes_as_many_as_the_elements_missing_and_doubled_are_not_exact(self):
        found = cover((4,), [Box((0,), (2,)), Box((1,), (2,))])
        assert (found.overlaps, found.missing, found.hole) == (((0, 1),), 1, Box((3,), (1,)))


class TestCoverOfManyBoxes:
    """No check of a manifest may take time that grows with the square of the number of ranks."""

    def test_shards_of_4096_ranks_less_one_are_judged(self):
        boxes = [Box((i * 2, 0), (2, 8)) for i in range(4096) if i != 2000]
        assert cover((8192, 8), boxes).hole == Box((4000, 0), (2, 8))

    def test_two_dimensional_mesh_of_4096_ranks_less_one_is_judged(self):
        boxes = [Box((i, j), (1, 1)) for i in range(64) for j in range(64) if (i, j) != (40, 7)]
        assert cover((64, 64), boxes).hole == Box((40, 7), (1, 1))

    def test_boxes_all_over_the_place_in_four_dimensions_are_judged(self):
        rng = random.Random(7)
        boxes = [random_box(rng, (50, 50, 50, 50)) for _ in range(60)]
        assert cover((50, 50, 50, 50), boxes).overlaps


class TestBoxIndex:
    @many
    @given(st.data())
    def test_finds_what_trying_every_box_finds(self, data):
        shape = data.draw(shapes())
        boxes = data.draw(st.lists(boxes_in(shape), max_size=10))
        wanted = data.draw(boxes_in(shape))
        shared = [(i, intersect(box, wanted)) for i, box in enumerate(boxes)]
        expected = [(i, box) for i, box in shared if box is not None and box.volume]
        assert expected == sorted(BoxIndex(boxes).overlapping(wanted), key=lambda found: found[0])

    @given(st.data())
    def test_parts_of_a_partition_make_up_the_box(self, data):
        shape = data.draw(shapes())
        boxes = data.draw(partitions(shape))
        wanted = data.draw(boxes_in(shape))
        found = [i for _, part in BoxIndex(boxes).overlapping(wanted) for i in elements(shape, part)]
        assert elements(shape, wanted) == sorted(found)

    def test_of_no_boxes_finds_nothing(self):
        assert [] == list(BoxIndex([]).overlapping(Box((0,), (4,))))

    def test_finds_the_scalar(self):
        assert [(0, Box((), ()))] == list(BoxIndex([Box((), ())]).overlapping(Box((), ())))


class TestContiguousRuns:
    @given(shape_and(boxes_in, 1))
    def test_each_is_one_stretch_at_its_place_and_together_they_are_the_box(self, case):
        shape, (box,) = case
        runs = list(geometry.contiguous_runs(box, shape))
        for run, place in runs:
            found = elements(shape, run)
            assert found == list(range(place, place + len(found))) or not found
        assert elements(shape, box) == [number for run, _ in runs for number in elements(shape, run)]

    @given(shape_and(boxes_in, 1))
    def test_are_as_few_as_the_rows_that_are_not_whole(self, case):
        shape, (box,) = case
        numbers_of = elements(shape, box)
        gaps = sum(after != before + 1 for before, after in itertools.pairwise(numbers_of))
        rows = list(geometry.contiguous_runs(box, shape))
        whole = all(size == side for size, side in zip(box.sizes[1:], shape[1:], strict=True))
        assert len(rows) == 1 if whole or not numbers_of else len(rows) >= gaps + 1

    def test_columns_are_a_run_per_row_and_rows_are_one(self):
        assert [4, 14] == [place for _, place in geometry.contiguous_runs(Box((0, 4), (2, 3)), (3, 10))]
        assert [(Box((1, 0), (2, 10)), 10)] == list(geometry.contiguous_runs(Box((1, 0), (2, 10)), (3, 10)))

    def test_of_rank_0_is_the_box_and_of_no_elements_one_too(self):
        assert [(Box((), ()), 0)] == list(geometry.contiguous_runs(Box((), ()), ()))
        assert [Box((3, 2), (0, 2))] == [run for run, _ in geometry.contiguous_runs(Box((3, 2), (0, 2)), (3, 5))]


def test_a_box_of_another_rank_is_never_inside():
    assert not geometry.contains(Box((0, 0), (4, 4)), Box((0,), (4,)))
    assert not geometry.contains(Box((0,), (4,)), Box((0, 0), (4, 4)))
