"""The arithmetic of DeepSpeed's layouts against torch's own: shards, sub-parameters, flat ranges, positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.experts import expert_counts, global_names
from ckpttools.layouts.deepspeed.flattened import Stretch, find_stretches
from ckpttools.layouts.deepspeed.fused_experts import Fused, read_fused, split_number
from ckpttools.layouts.deepspeed.likeness import Likeness
from ckpttools.layouts.deepspeed.names import layer_sibling, numbers_of, parse_names
from ckpttools.layouts.deepspeed.parts import Placement, flat_pieces, place, whole_piece
from ckpttools.layouts.deepspeed.positions import split_layers
from ckpttools.layouts.deepspeed.states import Files, Stored
from ckpttools.layouts.deepspeed.tensor_parallel import Rules, find_placement, read_rules
from ckpttools.layouts.deepspeed.unflattened import Unflattened, name_positions
from ckpttools.model import Extent

FLOAT = parse_dtype("float32")


def assembled(placement: Placement, shards: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor, its boxes filled as the placement says from the shards' storage."""
    whole = torch.full(placement.shape, -1.0)
    for rank, shard in enumerate(shards):
        piece = whole_piece(tuple(shard.shape), Extent(str(rank), 0, shard.numel() * 4), rank)
        for part in place(piece, placement.dim, placement.cuts[rank], FLOAT):
            sizes = part.box.sizes
            strides = part.extent.strides or torch.empty(sizes).stride()
            values = shard.contiguous().view(-1).as_strided(sizes, strides, part.extent.offset // 4)
            whole[tuple(slice(o, o + n) for o, n in zip(part.box.offsets, sizes, strict=True))] = values
    return whole


def shards_of(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    start, found = 0, []
    for size in sizes:
        numel = torch.Size(size).numel()
        found.append(torch.arange(start, start + numel, dtype=torch.float32).view(size))
        start += numel
    return found


def rules(**patterns: list[str]) -> Rules:
    findings: list[Finding] = []
    found = read_rules({"universal_checkpoint_version": 0.2, **patterns}, "file", findings)
    assert findings == []
    return found


def affine_map(whole: tuple[int, int], blocks: list[list[int]], size: int) -> dict:
    """The map of ranks that hold these blocks of `size` rows, as DeepSpeed writes it."""
    width, ranks = whole[1], {}
    for rank, numbers in enumerate(blocks):
        pieces = [
            {
                "shape": [size, width],
                "source": [number * size * width, [width, 1]],
                "dest": [local * size * width, [width, 1]],
                "locations": [r for r, held in enumerate(blocks) if number in held],
            }
            for local, number in enumerate(numbers)
        ]
        ranks[rank] = {"shard_shape": [len(numbers) * size, width], "pieces": pieces}
    return {"logical_shape": list(whole), "ranks": ranks}


class TestTensorParallel:
    def test_shards_stand_side_by_side_along_dimension_0(self):
        shards = shards_of((2, 3), (4, 3), (1, 3))
        placement = find_placement("w", [tuple(s.shape) for s in shards], rules())
        assert torch.equal(torch.cat(shards), assembled(placement, shards))

    def test_row_parallel_shards_stand_side_by_side_along_dimension_1(self):
        shards = shards_of((3, 2), (3, 4))
        placement = find_placement(
            "a.dense.weight", [(3, 2), (3, 4)], rules(parameter_with_row_parallelism_patterns=[r".*dense\.w"])
        )
        assert torch.equal(torch.cat(shards, 1), assembled(placement, shards))

    def test_two_halves_are_put_together_half_by_half(self):
        shards = shards_of((4, 3), (4, 3))
        placement = find_placement("glu", [(4, 3), (4, 3)], rules(parameter_with_2_sub_params_cat_dim_0=["glu"]))
        halves = [torch.chunk(s, 2) for s in shards]
        assert torch.equal(torch.cat([h[0] for h in halves] + [h[1] for h in halves]), assembled(placement, shards))

    def test_sub_parameters_of_other_sizes_are_put_together_one_by_one(self):
        entry = {"patterns": ["qkv"], "shape": ((4, 2, 2), 5), "partition_dim": 0}
        shards = shards_of((4, 5), (4, 5))
        placement = find_placement("qkv", [(4, 5), (4, 5)], rules(parameter_with_sub_params=[entry]))
        parts = [torch.split(s, (2, 1, 1)) for s in shards]
        assert torch.equal(torch.cat([p[i] for i in range(3) for p in parts]), assembled(placement, shards))

    def test_sub_parameters_with_stated_widths_need_not_be_even(self):
        entry = {"patterns": ["qkv"], "shape": ((5, 3), 2), "partition_dim": 0}
        told = {"parameter_with_sub_params": [entry], "sub_param_shard_widths": {"qkv": [[3, 2], [1, 2]]}}
        shards = shards_of((4, 2), (4, 2))
        placement = find_placement("qkv", [(4, 2), (4, 2)], rules(**told))
        parts = [torch.split(shards[0], (3, 1)), torch.split(shards[1], (2, 2))]
        assert torch.equal(torch.cat([parts[0][0], parts[1][0], parts[0][1], parts[1][1]]), assembled(placement, shards))

    @pytest.mark.parametrize(
        ("name", "dim"),
        [
            ("3.self_attention.dense.weight", 1),
            ("3.mlp.dense_4h_to_h.weight", 1),
            ("3.self_attention.dense.bias", None),
            ("3.mlp.dense_4h_to_h.bias", None),
            ("3.input_layernorm.weight", None),
            ("tied_modules.embed.word_embeddings.norm.bias", None),
            ("7.weight", None),
            ("tied_modules.embed.word_embeddings.weight", 0),
            ("3.self_attention.query_key_value.bias", 0),
        ],
    )
    def test_names_of_bloom_are_known_without_rules(self, name, dim):
        placement = find_placement(name, [(4, 4), (4, 4)], Rules())
        assert (dim, False) == (placement.dim if placement.cuts else None, placement.is_guessed)

    def test_sub_parameters_may_be_told_of_a_view_with_more_dimensions(self):
        entry = {"patterns": ["experts"], "shape": (3, (4, 2), 5), "partition_dim": 1}
        shards = shards_of((9, 5), (9, 5))  # 3 experts, of each a rank's slice of 4 and of 2 rows
        placement = find_placement("experts", [(9, 5), (9, 5)], rules(parameter_with_sub_params=[entry]))
        views = [s.view(3, 3, 5).split((2, 1), 1) for s in shards]
        expected = torch.cat([torch.cat([v[part] for v in views], 1) for part in range(2)], 1).view(18, 5)
        assert torch.equal(expected, assembled(placement, shards))

    def test_affine_map_counts_before_patterns(self):
        told = {"affine_map": {"version": 1, "params": {"^w$": affine_map((4, 2), [[1], [0]], 2)}}}
        shards = shards_of((2, 2), (2, 2))
        placement = find_placement("w", [(2, 2), (2, 2)], rules(**told, tp_replicated_parameter_patterns=["w"]))
        assert torch.equal(torch.cat(shards[::-1]), assembled(placement, shards))

    def test_block_that_several_ranks_hold_is_a_copy_on_all_but_the_first(self):
        told = {"affine_map": {"version": 1, "params": {"^w$": affine_map((6, 1), [[0, 2], [1, 2]], 2)}}}
        placement = find_placement("w", [(4, 1), (4, 1)], rules(**told))
        assert [[(c.local_offset, c.offset) for c in rank] for rank in placement.cuts] == [[(0, 0), (2, 4)], [(0, 2)]]
        assert [[(c.local_offset, c.offset) for c in rank] for rank in placement.copies] == [[], [(2, 4)]]

    @pytest.mark.parametrize("harm", ["scale", "shape", "source", "missing", "ranks", "nonsense"])
    def test_affine_map_that_does_not_fit_is_no_placement(self, harm):
        entry = affine_map((4, 2), [[0], [1]], 2)
        piece = entry["ranks"][0]["pieces"][0]
        changes = {
            "scale": {"scale": 0.5},
            "shape": {"shape": [2, 1]},
            "source": {"source": [1, [2, 1]]},
            "nonsense": {"dest": "x"},
        }
        piece.update(changes.get(harm, {}))
        if harm == "missing":
            entry["ranks"][0]["pieces"] = []
        if harm == "ranks":
            del entry["ranks"][1]
        assert isinstance(find_placement("w", [(2, 2), (2, 2)], rules(affine_map={"version": 1, "params": {"^w$": entry}})), str)

    def test_affine_maps_of_a_later_kind_are_not_used(self):
        told = {"affine_map": {"version": 2, "params": {"^w$": {}}}}
        assert (4, 2) == find_placement("w", [(2, 2), (2, 2)], rules(**told)).shape

    def test_shards_that_deepspeed_cannot_put_together_stay_apart(self):
        told = {"autotp_unsupported_parameter_patterns": {"^w$": "a layout of its own"}}
        assert "a layout of its own" == find_placement("w", [(2, 2), (2, 2)], rules(**told)).apart

    def test_unknown_name_is_a_guess(self):
        assert find_placement("something.else", [(4, 4), (4, 4)], Rules()).is_guessed

    def test_shards_that_do_not_go_together_are_no_placement(self):
        assert isinstance(find_placement("w", [(2, 3), (2, 4)], rules()), str)

    @pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*x", "(" * 400, ".*.*.*.*.*.*.*.*x", "a" * 1000])
    def test_pattern_that_could_take_for_ever_is_refused(self, pattern):
        findings: list[Finding] = []
        read_rules({"tp_replicated_parameter_patterns": [pattern]}, "file", findings)
        assert len(findings) == 1


class TestFlatPieces:
    @given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.data())
    def test_they_hold_the_elements_of_the_range_in_order(self, shape, data):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        start = data.draw(st.integers(0, whole.numel()))
        stop = data.draw(st.integers(start, whole.numel()))
        pieces = flat_pieces(shape, start, stop, Extent("f", 100, 0), FLOAT, 0)
        values = [
            int(v)
            for p in pieces
            for v in whole[tuple(slice(o, o + n) for o, n in zip(p.box.offsets, p.box.sizes, strict=True))].reshape(-1)
        ]
        assert values == list(range(start, stop))
        assert [p.extent.offset for p in pieces] == [100 + 4 * sum(q.box.volume for q in pieces[:i]) for i in range(len(pieces))]


def unflattened(*groups: list[int]) -> Unflattened:
    return Unflattened("file", None, groups=list(groups), stated_names=[[] for _ in groups])


class TestPositions:
    MODEL = (("a", (2, 2)), ("b", (2,)), ("c", (3, 2)), ("d", (2,)))

    def test_groups_by_dimension_are_told_by_shapes(self):
        shapes = {0: [(2, 2)], 1: [(3, 2)], 2: [(2,)], 3: [(2,)]}
        assert name_positions(unflattened([0, 1], [2, 3]), shapes, self.MODEL) == {0: "a", 1: "c", 2: "b", 3: "d"}

    def test_frozen_parameter_is_in_no_group(self):
        assert name_positions(unflattened([0, 1]), {0: [(2, 2)], 1: [(3, 2)]}, self.MODEL) == {0: "a", 1: "c"}

    def test_position_that_fits_two_names_has_none(self):
        assert name_positions(unflattened([0, 1]), {0: [(2, 2)], 1: [(2,)]}, self.MODEL) == {0: "a"}

    def test_shapes_that_fit_no_order_name_nothing(self):
        assert name_positions(unflattened([0, 1]), {0: [(3, 2)], 1: [(2, 2)]}, self.MODEL) == {}

    def test_names_that_the_optimizer_states_are_taken(self):
        optimizer = unflattened([0, 1])
        optimizer.stated_names = [["d", "a"]]
        assert name_positions(optimizer, {}, self.MODEL) == {0: "d", 1: "a"}

    @given(st.lists(st.tuples(st.sampled_from([(1,), (2,), (3,)]), st.integers(-1, 2)), max_size=8))
    def test_what_is_named_is_never_wrong(self, params):
        model = [(f"p{i}", shape) for i, (shape, _) in enumerate(params)]
        groups: list[list[int]] = [[], [], []]
        shapes, truth, position = {}, {}, 0
        for g in range(3):
            for i, (shape, group) in enumerate(params):
                if group == g:
                    groups[g].append(position)
                    shapes[position], truth[position] = [shape], f"p{i}"
                    position += 1
        named = name_positions(unflattened(*groups), shapes, model)
        assert named.items() <= truth.items()

    def test_values_tell_what_shapes_leave_open(self):
        shapes = {0: [(2,)], 1: [(2, 2)]}
        assert name_positions(unflattened([0], [1]), shapes, self.MODEL) == {1: "a"}
        like = name_positions(unflattened([0], [1]), shapes, self.MODEL, lambda p, i: (p, i) in {(0, 3), (1, 0)})
        assert like == {0: "d", 1: "a"}

    def test_values_name_positions_in_another_order_than_the_model(self):
        shapes = {0: [(3, 2)], 1: [(2, 2)]}
        assert name_positions(unflattened([0, 1]), shapes, self.MODEL, lambda p, i: True) == {0: "c", 1: "a"}


class TestFlatGroups:
    PARAMS = (("a", (2, 2)), ("b", (2,)), ("c", (2,)), ("empty", (0, 3)), ("d", (1,)))

    def test_one_group_of_all_parameters_needs_no_values(self):
        found = find_stretches([9], self.PARAMS, lambda g, at, i: True)
        assert found == [Stretch("a", (2, 2), 0, 0), Stretch("b", (2,), 0, 4), Stretch("c", (2,), 0, 6), Stretch("d", (1,), 0, 8)]

    def test_values_tell_the_groups(self):
        truth = {("a", 0, 0), ("c", 0, 4), ("b", 1, 0), ("d", 1, 2)}
        found = find_stretches([6, 3], self.PARAMS, lambda g, at, i: (self.PARAMS[i][0], g, at) in truth)
        assert {(s.name, s.group, s.first) for s in found} == truth

    def test_frozen_parameters_are_in_no_group(self):
        found = find_stretches([4], self.PARAMS, lambda g, at, i: i == 0)
        assert [s.name for s in found] == ["a"]

    @pytest.mark.parametrize("totals", [[5], [4, 4], [100], [6, 3]])
    def test_what_fits_in_several_ways_or_in_none_is_not_named(self, totals):
        assert find_stretches(totals, self.PARAMS, lambda g, at, i: True) == []


class Bytes:
    """A source of one file."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


class TestLikeness:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("numel", [0, 1, 7, 1000])
    def test_weight_is_like_the_masters_that_it_was_rounded_from(self, dtype, numel):
        torch.manual_seed(numel)
        masters = torch.randn(numel + 3) * 10.0 ** torch.randint(-9, 9, (numel + 3,))
        if numel > 6:
            masters[3:7] = torch.tensor([float("nan"), float("inf"), -1e30, 65519.9])
        weight = masters[3:].to(dtype)
        data = b"".join(t.view(torch.uint8).numpy().tobytes() for t in (masters, weight) if t.numel())
        likeness = Likeness(Files(Bytes(data), None))
        master = Stored(FLOAT, (numel + 3,), Extent("f", 0, 4 * (numel + 3)))
        stored = Stored(parse_dtype(str(dtype)[6:]), (numel,), Extent("f", 4 * (numel + 3), 0))
        assert likeness.may_round_to(master, stored, 3)
        assert not likeness.may_round_to(master, stored, 4)
        assert numel == 0 or not likeness.may_round_to(master, stored, 2)


class TestFusedExperts:
    def test_ranks_have_the_experts_that_were_placed_on_them(self):
        placed = {"ranks": [{"rank": 0, "experts": [0, 3]}, {"rank": 1, "experts": [2, 1]}]}
        found = read_fused([{"expert_key_prefix": "m.experts", "num_experts": 4, "expert_placement": placed}])
        assert Fused(4, ((0, 3), (2, 1))) == found["m.experts.w2"]

    def test_experts_of_a_rank_are_rows_of_the_whole(self):
        fused = Fused(4, ((0, 3), (2, 1)))
        pieces = fused.whole_pieces([whole_piece((2, 5), Extent("f", 0, 40), 0)], 1, FLOAT)
        assert [((2, 0), 0), ((1, 0), 20)] == [(p.box.offsets, p.extent.offset) for p in pieces]

    @pytest.mark.parametrize("layers", [None, 3, [None], [{}], [{"expert_key_prefix": "p", "num_experts": -1}]], ids=str)
    def test_nonsense_is_no_layer(self, layers):
        assert {} == read_fused(layers)

    def test_number_of_an_expert_stands_at_the_end(self):
        assert (("a.w1", 12), ("a.w1.x", None)) == (split_number("a.w1.12"), split_number("a.w1.x"))


class TestLayers:
    def test_layers_are_split_by_the_parameters_of_each_stage(self):
        assert split_layers([1, 12, 12, 2], [13, 14]) == [(0, 2, False), (2, 4, False)]

    def test_stage_with_parameters_of_no_layer_has_the_tied_module(self):
        assert split_layers([1, 12, 12, 2], [13, 15]) == [(0, 2, True), (2, 4, True)]

    def test_numbers_that_fit_nothing_are_no_split(self):
        assert split_layers([1, 12, 12, 2], [5, 15]) is None


class TestNames:
    def test_ranks_are_numbers(self):
        found = parse_names(["t/zero_pp_rank_10_mp_rank_00_optim_states.pt", "t/zero_pp_rank_9_mp_rank_00_optim_states.pt"], "t")
        assert [9, 10] == sorted(dp for dp, _ in found.optimizer)

    def test_files_of_the_other_prefix_are_left_over(self):
        paths = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
        assert [paths[::-1]] == [list(pair) for pair in parse_names(paths, is_bf16=False).doubled]
        assert [paths] == [list(pair) for pair in parse_names(paths, is_bf16=True).doubled]

    def test_expert_numbers_are_made_global(self):
        names = [f"x.deepspeed_experts.{n}.w" for n in range(2)]
        found = global_names(names, 2, expert_counts(names))
        assert "x.deepspeed_experts.5.w" == found["x.deepspeed_experts.1.w"]

    def test_experts_of_a_layer_that_is_spread_over_groups_are_numbered_by_all_of_them(self):
        names = [f"x.deepspeed_experts.{n}.w" for n in range(3)]
        assert global_names(names[:1], 1, expert_counts(names)) == {names[0]: "x.deepspeed_experts.3.w"}

    def test_layers_of_a_topology_without_tensor_parallelism_have_no_rank_in_their_name(self):
        found = parse_names(["t/layer_07-model_states.pt", "t/layer_08-model_01-model_states.pt"], "t")
        assert {(7, 0), (8, 1)} == set(found.layers)
        assert "t/layer_12-model_states.pt" == layer_sibling("t/layer_07-model_states.pt", 12, 0)
        assert "t/layer_12-model_03-model_states.pt" == layer_sibling("t/layer_08-model_01-model_states.pt", 12, 3)

    def test_prefix_and_underscore_do_not_make_another_file(self):
        names = ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "d/zero_pp_rank_1_mp_rank_00optim_states.pt"]
        assert numbers_of(names[0]) == numbers_of(names[1]) != numbers_of("zero_pp_rank_0_mp_rank_00_optim_states.pt")
        assert numbers_of("archive.pt") is None
