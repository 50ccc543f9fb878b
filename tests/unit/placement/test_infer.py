"""Rules from how a source was cut: the same mesh gives the same boxes again, on real checkpoints and made-up ones."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttools.dtypes import parse_dtype
from ckpttools.errors import UsageError
from ckpttools.layouts import open_snapshot
from ckpttools.model import Extent, Mesh, Piece, TensorEntry, TensorSpec
from ckpttools.placement.assign import place
from ckpttools.placement.infer import infer
from ckpttools.placement.local import Cut, Placement, held_boxes, local_tensor
from ckpttools.placement.rule_files import choose, parse_rules, render_rules
from tests.fixture_cases import FIXTURES


def entry(name: str, shape: tuple[int, ...], cuts: tuple[Cut, ...], mesh: Mesh) -> TensorEntry:
    boxes = {}
    for rank in range(mesh.ranks):
        local = local_tensor(shape, Placement(cuts), mesh, rank)
        assert local is not None
        boxes |= {part.box: rank for part in local.parts if part.box.volume}
    pieces = tuple(Piece(box, Extent("f", 0, box.volume * 4), rank) for box, rank in boxes.items())
    return TensorEntry(TensorSpec(name, parse_dtype("float32"), shape), tuple(name.split(".")), pieces)


def inferred(entries: list[TensorEntry], mesh: str = "") -> dict[str, list[tuple[str, int]]]:
    rules = infer({e.name: e for e in entries}, Mesh.parse(mesh))
    return {e.name: [(rule.axis, rule.dim) for rule in rules.matching(e.name)] for e in entries}


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("dcp_fsdp2_tp_2x2", "fsdp=2,tp=2"),
        ("dcp_tp2", "tp=2"),
        ("dcp_fsdp2_w4_uneven", "fsdp=4"),
        ("dcp_hsdp_2x2", "dp=2,fsdp=2"),
        ("dcp_ep2", "ep=2"),
        ("perrank_dtensor_hsdp_2x2", "dp=2,fsdp=2"),
        ("dcp_fsdp1_sharded_w2", "fsdp=2"),
    ],
)
def test_the_mesh_of_a_source_gives_its_boxes_again(case: str, mesh: str) -> None:
    checkpoint = open_snapshot(str(FIXTURES / "torch" / case / "ckpt")).checkpoint
    rules = infer({t.name: t for t in checkpoint.tensors if t.family == "model"}, checkpoint.mesh)
    found = place([(t.spec, t.path, t.family) for t in checkpoint.tensors], Mesh.parse(mesh), rules)
    assert found.problems == ()
    boxes = held_boxes(found.tensors, found.mesh)
    for t in checkpoint.tensors:
        assert {box for box in boxes[t.name] if box.volume} == {piece.box for piece in t.pieces if piece.box.volume}, t.name
    assert parse_rules(render_rules(rules), "source").rules == rules.rules


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("deepspeed/bloom_tp2_pp2/ckpt/global_step6", "tp=2,pp=2"),
        ("deepspeed/mp2_dp2_zero1_bf16/ckpt/global_step8", "dp=2,tp=2"),
        ("megatron/legacy_lm_tp2/ckpt/iter_0000100", "tp=2"),
        ("megatron/legacy_lm_tp2_pp2_gqa/ckpt/iter_0000100", "tp=2,pp=2"),
        ("megatron/legacy_tp2_mcore/ckpt/iter_0000100", "tp=2"),
        ("megatron/legacy_tp2_pp2_mcore/ckpt/iter_0000200", "tp=2,pp=2"),
        ("megatron/legacy_tp2_distopt/ckpt/iter_0000100", "tp=2"),
    ],
)
@pytest.mark.parametrize("is_inferred", [True, False], ids=["inferred", "built in"])
def test_megatron_and_deepspeed_have_the_same_boxes(case: str, mesh: str, is_inferred: bool) -> None:
    checkpoint = open_snapshot(str(FIXTURES / case)).checkpoint
    model = {t.name: t for t in checkpoint.tensors if t.family == "model"}
    rules = infer(model, checkpoint.mesh) if is_inferred else choose({name: t.spec.shape for name, t in model.items()})
    found = place([(t.spec, t.path, t.family) for t in model.values()], Mesh.parse(mesh), rules)
    assert found.problems == ()
    boxes = held_boxes(found.tensors, found.mesh)
    for name, t in model.items():
        assert set(boxes[name]) == {piece.box for piece in t.pieces}, name


def test_layers_stacked_in_one_tensor_are_looked_at_one_by_one() -> None:
    checkpoint = open_snapshot(str(FIXTURES / "megatron" / "tdist_tp2_model_only" / "ckpt" / "iter_0000010")).checkpoint
    model = {t.name: t for t in checkpoint.tensors if t.family == "model"}
    found = infer(model, Mesh())
    told = {name: [(r.axis, r.dim, r.sections, r.units) for r in found.matching(name) if r.axis != "pp"] for name in model}
    assert told["embedding.word_embeddings.weight"] == [("tp", 0, (), "")]
    assert told["decoder.layers.self_attention.linear_qkv.weight"] == [("tp", 1, (), "")]
    assert told["decoder.layers.self_attention.linear_proj.weight"] == [("tp", 2, (), "heads")]
    assert told["decoder.layers.mlp.linear_fc1.weight"] == [("tp", -2, (1, 1), "")]
    assert told["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == []
    assert {name for name in model if any(r.axis == "pp" for r in found.matching(name))} == {n for n in model if ".layers." in n}


@given(
    st.lists(st.tuples(st.integers(8, 20), st.integers(8, 20)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_random_cuts_are_found_again(shapes: list[tuple[int, int]], fsdp: int, tp: int, random: object) -> None:
    assume(fsdp * tp > 1)
    mesh = Mesh((("fsdp", fsdp), ("tp", tp)))
    rows = (Cut("fsdp", 0),) if fsdp > 1 else ()
    entries = [entry("columns", (8, 12), ((Cut("tp", 1),) if tp > 1 else ()) + rows, mesh)]
    for i, shape in enumerate(shapes):
        column = random.choice([(), (Cut("tp", 0),), (Cut("tp", 1),)]) if tp > 1 else ()  # type: ignore[attr-defined]  # Random
        entries.append(entry(f"t.{i}", shape, column + rows, mesh))
    rules = infer({e.name: e for e in entries}, Mesh())
    found = place([(e.spec, e.path, "model") for e in entries], mesh, rules)
    boxes = held_boxes(found.tensors, found.mesh)
    for e in entries:
        assert {box for box in boxes[e.name] if box.volume} == {piece.box for piece in e.pieces}


class TestAmbiguity:
    def test_rows_alone_are_fsdp(self) -> None:
        assert inferred([entry("w", (8, 4), (Cut("fsdp", 0),), Mesh((("fsdp", 2),)))]) == {"w": []}

    def test_rows_alone_are_tensor_parallelism_where_the_mesh_says_so(self) -> None:
        assert inferred([entry("w", (8, 4), (Cut("tp", 0),), Mesh((("tp", 2),)))], "tp=2") == {"w": [("tp", 0)]}

    def test_rows_are_tensor_parallelism_where_columns_are_cut_and_never_both(self) -> None:
        mesh = Mesh((("tp", 2),))
        found = inferred([entry("a", (8, 4), (Cut("tp", 0),), mesh), entry("b", (8, 4), (Cut("tp", 1),), mesh)])
        assert found == {"a": [("tp", 0)], "b": [("tp", 1)]}

    def test_rows_of_stacked_experts_alone_are_experts(self) -> None:
        mesh = Mesh((("ep", 2),))
        experts = entry("layers.0.moe.experts.w1", (4, 4, 4), (Cut("ep", 0),), mesh)
        assert inferred([experts, entry("norm.weight", (4,), (), mesh)]) == {
            "layers.0.moe.experts.w1": [("ep", 0)],
            "norm.weight": [],
        }

    def test_what_fsdp_left_whole_stays_whole(self) -> None:
        mesh = Mesh((("fsdp", 2),))
        assert inferred([entry("w", (8,), (Cut("fsdp", 0),), mesh), entry("table", (8,), (), mesh)])["table"] == [("", 0)]

    def test_pieces_that_no_cut_gives_go_by_the_names(self) -> None:
        mesh = Mesh((("tp", 2),))
        fused = entry("layers.0.self_attn.qkv_proj.weight", (16, 4), (Cut("tp", 0, (8, 4, 4)),), mesh)
        row = entry("layers.0.self_attn.o_proj.weight", (8, 8), (Cut("tp", 1),), mesh)
        rules = infer({e.name: e for e in (fused, row)}, Mesh())
        (rule,) = rules.matching(fused.name)
        assert (rule.axis, rule.dim, rule.sections) == ("tp", 0, ("heads", "kv_heads", "kv_heads"))

    def test_layers_that_differ_are_named_one_by_one(self) -> None:
        mesh = Mesh((("tp", 2),))
        entries = [entry(f"layers.{i}.w", (8, 8), (Cut("tp", i % 2),), mesh) for i in range(4)]
        assert inferred(entries) == {f"layers.{i}.w": [("tp", i % 2)] for i in range(4)}

    def test_a_source_in_one_piece_tells_nothing(self) -> None:
        with pytest.raises(UsageError, match="every tensor of it is in one piece"):
            inferred([entry("w", (8, 4), (), Mesh())])
