"""Megatron's legacy layout: the whole tensors come back from any mesh, and what does not fit is told with its numbers."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ckpttools.gather import Gather
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.model import TensorEntry
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES
from tests.layouts.contract import LayoutContract
from tests.layouts.megatron_ranks import Model, Ranks, state_of
from tests.unit.containers.torch_bytes import saved

CASES = ("legacy_tp2_mcore", "legacy_tp2_pp2_mcore", "legacy_tp2_distopt", "legacy_lm_tp2", "legacy_lm_tp2_pp2_gqa")


def value_of(snapshot: Snapshot, entry: TensorEntry) -> bytes:
    return b"".join(bytes(tile) for tile in Gather(snapshot.source, memory_bytes=1 << 24).stream(entry))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def values(path: Path) -> dict[str, bytes]:
    snapshot = open_snapshot(str(path), is_located=True)
    return {t.name: value_of(snapshot, t) for t in snapshot.checkpoint.tensors if not t.name.startswith("rng_state.")}


def codes(path: Path, depth: str = "structure") -> set[str]:
    return {f.code for f in validate(str(path), depth=depth).findings if f.severity == "error"}


def findings(path: Path, code: str) -> list[tuple[str, str, str]]:
    return [(f.where, f.expected, f.found) for f in open_snapshot(str(path)).checkpoint.findings if f.code == code]


def stacked(name: str, found: Mapping[str, bytes]) -> bytes:
    """The values of a tensor that the truth has stacked over layers and experts."""
    text = (
        re.escape(name)
        .replace(r"layers\.", r"layers\.(\d+)\.")
        .replace(r"experts\.experts\.", r"experts\.local_experts\.(\d+)\.")
    )
    pattern = re.compile(rf"(?:.*\.)?{text}")
    parts = sorted((tuple(map(int, m.groups())), n) for n in found if (m := pattern.fullmatch(n)))
    return b"".join(found[n] for _, n in parts)


class TestContract(LayoutContract):
    layout = "megatron_legacy"
    family = "megatron"
    cases = CASES
    harmed = ("legacy_tp2_distopt", "mp_rank_01/model_optim_rng.pt")


class TestContractOfBuffers(LayoutContract):
    layout = "megatron_legacy"
    family = "megatron"
    cases = ("legacy_tp2_distopt",)
    harmed = ("legacy_tp2_distopt", "mp_rank_01/distrib_optim.pt")


class TestFixtures:
    @pytest.mark.parametrize("name", CASES)
    def test_whole_tensors_of_the_truth_are_there(self, name):
        truth = json.loads((FIXTURES / "megatron" / name / "truth.json").read_text())
        for step, entry in truth["snapshots"].items():
            found = values(FIXTURES / "megatron" / name / "ckpt" / step)
            for tensor, expected in entry["tensors"].items():
                value = next((v for n, v in found.items() if n.endswith(tensor)), None) or stacked(tensor, found)
                assert expected["sha256"] == hashlib.sha256(value).hexdigest(), tensor

    @pytest.mark.parametrize("name", ["legacy_tp2_mcore", "legacy_tp2_pp2_mcore"])
    def test_optimizer_state_has_the_names_of_its_parameters(self, name):
        truth = json.loads((FIXTURES / "megatron" / name / "truth.json").read_text())
        for step, entry in truth["snapshots"].items():
            found = values(FIXTURES / "megatron" / name / "ckpt" / step)
            for tensor, expected in entry["optimizer_tensors"].items():
                _, _, what, parameter = tensor.split(".", 3)
                by_parameter = f"optimizer.state.{parameter}.{'fp32' if what == 'fp32_param' else what}"
                value = found.get(by_parameter) or stacked(by_parameter, found)
                assert expected["sha256"] == hashlib.sha256(value).hexdigest(), tensor

    @pytest.mark.parametrize("name", CASES)
    def test_they_validate(self, name):
        for step in sorted((FIXTURES / "megatron" / name / "ckpt").glob("iter_*")):
            assert "ok" == validate(str(step)).verdict

    def test_a_rank_that_is_gone_is_named(self):
        path = FIXTURES / "megatron/damaged_legacy_missing_rank/ckpt/iter_0000200"
        assert [f.where for f in validate(str(path)).findings if f.code == "missing-rank"] == [
            "mp_rank_01_001/model_optim_rng.pt"
        ]
        assert "incomplete" == validate(str(path)).verdict

    def test_latest_passes_over_a_snapshot_without_a_rank(self, ckpttools):
        answer = ckpttools("latest", FIXTURES / "megatron/damaged_legacy_missing_rank/ckpt", "--depth", "full")
        assert "iter_0000100" == Path(answer.stdout.strip()).name

    def test_status_names_the_iteration_that_a_tracker_points_to_and_that_is_not_there(self, ckpttools):
        run = FIXTURES / "megatron/damaged_tracker_ahead/ckpt"
        answer = ckpttools("status", run, "--json")
        assert (1, True) == (answer.exit_code, "`300`: no such snapshot" in answer.said)
        assert "iter_0000200" == Path(ckpttools("latest", run).stdout.strip()).name

    def test_rules_are_shown(self, ckpttools):
        answer = ckpttools("inspect", FIXTURES / "megatron/legacy_tp2_mcore/ckpt/iter_0000100", "--tensors", "--rules")
        lines = [re.split(r"  +", line) for line in answer.stdout.splitlines()]
        rules = {line[-1]: line[-2] for line in lines if len(line) == 6}
        assert rules["decoder.layers.1.mlp.linear_fc1.weight"] == "column dim 0 [gate; up]"
        assert rules["decoder.layers.1.mlp.linear_fc2.weight"] == "row dim 1"
        assert rules["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] == "replicated, stored as pre_mlp_layernorm.weight"


MESHES = [
    pytest.param(Model(), Ranks(), id="one rank"),
    pytest.param(Model(), Ranks(tp=2), id="tp2"),
    pytest.param(Model(groups=4), Ranks(tp=4), id="tp4"),
    pytest.param(Model(groups=1), Ranks(tp=1, pp=4), id="pp4 of one query group"),
    pytest.param(Model(has_bias=True, is_gated=False, is_tied=True), Ranks(tp=2, pp=2), id="tied, biases, no gate"),
    pytest.param(Model(layers=8), Ranks(tp=2, pp=2, vpp=2), id="virtual stages"),
    pytest.param(Model(layers=7), Ranks(pp=2, vpp=2, layer_counts=(1, 2, 3, 1)), id="uneven virtual stages"),
    pytest.param(Model(layers=5), Ranks(pp=3, layer_counts=(0, 3, 2)), id="a stage for the embedding alone"),
    pytest.param(Model(), Ranks(tp=2, is_local=True), id="norms of their own"),
    pytest.param(Model(experts=4), Ranks(ep=2), id="experts"),
    pytest.param(Model(experts=4), Ranks(tp=2, ep=2, experts="numbered"), id="experts numbered at the end"),
    pytest.param(Model(experts=4), Ranks(tp=2, ep=4, experts="grouped"), id="experts in one matrix"),
    pytest.param(Model(experts=8), Ranks(tp=2, pp=2, ep=2, experts="grouped"), id="experts in one matrix over stages"),
    pytest.param(Model(experts=4, is_gated=False), Ranks(tp=2, pp=2, ep=2, experts="grouped"), id="experts without a gate"),
    pytest.param(Model(experts=4, layers=8, is_tied=True), Ranks(tp=2, pp=2, ep=2, vpp=2), id="everything"),
]


@pytest.mark.parametrize(("model", "ranks"), MESHES)
class TestMeshes:
    def test_whole_tensors_come_back(self, model, ranks, tmp_path):
        found = values(ranks.write(model, tmp_path))
        assert {n: raw(t) for n, t in model.tensors.items()} == found

    def test_it_validates(self, model, ranks, tmp_path):
        result = validate(str(ranks.write(model, tmp_path)))
        assert ("ok", []) == (result.verdict, [f for f in result.findings if f.severity == "error"])

    @pytest.mark.parametrize("optimizer", ["positions", "buffers"])
    def test_optimizer_state_comes_back_by_parameter(self, model, ranks, tmp_path, optimizer):
        ranks = Ranks(**(vars(ranks) | {"optimizer": optimizer}))
        found = values(ranks.write(model, tmp_path))
        for name, tensor in model.tensors.items():
            for what in ("fp32", "exp_avg", "exp_avg_sq"):
                assert raw(state_of(name, what, tensor)) == found[f"optimizer.state.{name}.{what}"], (name, what)
        steps = {n for n in found if n.endswith(".step")}
        assert len(steps) == (len(model.tensors) if optimizer == "positions" else 0)

    def test_every_absent_rank_is_named(self, model, ranks, tmp_path):
        ranks.write(model, tmp_path)
        gone = sorted(tmp_path.iterdir())[-1]
        shutil.rmtree(gone)
        if not list(tmp_path.iterdir()):
            pytest.skip("nothing is left to read")
        assert [w for w, _, _ in findings(tmp_path, "missing-rank")] == [f"{gone.name}/model_optim_rng.pt"]
        assert "incomplete" == validate(str(tmp_path)).verdict

    def test_layers_keep_their_numbers_when_a_stage_is_absent(self, model, ranks, tmp_path):
        whole = values(ranks.write(model, tmp_path))
        if ranks.pp == 1 or ranks.layer_counts:
            pytest.skip("an even split over stages is meant")
        for directory in tmp_path.iterdir():
            if directory.name.split("_")[3] == "000":
                shutil.rmtree(directory)
        left = open_snapshot(str(tmp_path)).checkpoint.tensors
        there = {t.name for t in left}
        found = values(tmp_path)
        assert there - whole.keys() - {n for n in there if n.startswith("rng_state.")} == set()
        assert {n: whole[n] for n in found} == found


class TestDisagreement:
    def test_copies_that_differ_are_found(self, tmp_path):
        Ranks(tp=2).write(Model(), tmp_path)
        file = tmp_path / "mp_rank_01/model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"]["decoder.final_layernorm.weight"][3] += 1
        torch.save(state, file)
        found = [f for f in validate(str(tmp_path)).findings if f.code == "replica-mismatch"]
        assert ["decoder.final_layernorm.weight"] == [f.where.split()[0] for f in found]

    def test_copy_of_the_embedding_on_the_last_stage_must_agree(self, tmp_path):
        Ranks(pp=2).write(Model(is_tied=True), tmp_path)
        file = tmp_path / "mp_rank_00_001/model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"]["output_layer.weight"][0] += 1
        torch.save(state, file)
        assert {"replica-mismatch"} == codes(tmp_path, "full")

    def test_files_of_another_iteration_are_named(self, tmp_path):
        ranks = Ranks(tp=2)
        ranks.write(Model(), tmp_path, iteration=100)
        ranks.write(Model(), tmp_path / "later", iteration=200)
        shutil.move(tmp_path / "later/mp_rank_01/model_optim_rng.pt", tmp_path / "mp_rank_01/model_optim_rng.pt")
        shutil.rmtree(tmp_path / "later")
        assert [
            ("mp_rank_01/model_optim_rng.pt", "iteration 100, as in mp_rank_00/model_optim_rng.pt", "iteration 200")
        ] == findings(tmp_path, "step-mismatch")

    def test_shares_of_different_lengths_are_found(self, tmp_path):
        ranks = Ranks(tp=2)
        ranks.write(Model(), tmp_path)
        other = ranks.write(Model(vocab=64), tmp_path / "other")
        shutil.move(other / "mp_rank_01/model_optim_rng.pt", tmp_path / "mp_rank_01/model_optim_rng.pt")
        shutil.rmtree(other)
        found = findings(tmp_path, "rank-mismatch")
        assert ("embedding.word_embeddings.weight in mp_rank_01/model_optim_rng.pt") in [w for w, _, _ in found]
        assert ("bfloat16 [48, 16] in all, as in mp_rank_00/model_optim_rng.pt", "bfloat16 [64, 16]") in [
            (e, f) for _, e, f in found
        ]


class TestArguments:
    @pytest.mark.parametrize(
        ("overrides", "where", "expected", "found"),
        [
            ({"num_layers": 6}, "decoder.layers over 2 stages", "6 layers, as the arguments state", "4 layers"),
            ({"num_attention_heads": 5}, "args.num_attention_heads", "a multiple of 2 tensor-parallel ranks", "5"),
            ({"ffn_hidden_size": 25}, "args.ffn_hidden_size", "a multiple of 2 tensor-parallel ranks", "25"),
            (
                {"padded_vocab_size": 50},
                "embedding.word_embeddings.weight",
                "50 rows, as args.padded_vocab_size states",
                "48 rows on 2 ranks",
            ),
            ({"vocab_size": 49}, "embedding.word_embeddings.weight", "at least 49 rows, as args.vocab_size states", "48 rows"),
        ],
    )
    def test_a_size_that_is_not_that_of_the_tensors_is_told_with_its_numbers(self, tmp_path, overrides, where, expected, found):
        Ranks(tp=2, pp=2, overrides=overrides).write(Model(), tmp_path)
        assert (where, expected, found) in findings(tmp_path, "arguments-mismatch")
        assert "damaged" == validate(str(tmp_path)).verdict

    def test_experts_that_the_expert_ranks_do_not_divide(self, tmp_path):
        Ranks(ep=2, experts="grouped", overrides={"num_experts": 5}).write(Model(experts=4), tmp_path)
        assert ("args.num_experts", "a multiple of 2 expert-parallel ranks", "5") in findings(tmp_path, "arguments-mismatch")

    def test_a_vocabulary_of_unknown_size_is_a_note(self, tmp_path):
        Ranks(tp=2, overrides={"vocab_size": None, "make_vocab_size_divisible_by": 8}).write(Model(), tmp_path)
        assert [
            ("embedding.word_embeddings.weight", "args.vocab_size", "48 rows with the padding, a multiple of 8 x 2")
        ] == findings(tmp_path, "vocabulary-unknown")
        assert "ok" == validate(str(tmp_path)).verdict

    def test_a_file_that_states_another_mesh_is_found(self, tmp_path):
        Ranks(tp=2).write(Model(), tmp_path)
        Ranks(tp=4).write(Model(groups=4), tmp_path / "other")
        shutil.move(tmp_path / "other/mp_rank_01/model_optim_rng.pt", tmp_path / "mp_rank_01/model_optim_rng.pt")
        shutil.rmtree(tmp_path / "other")
        assert (
            "args.tensor_model_parallel_size in mp_rank_01/model_optim_rng.pt",
            "2, as in mp_rank_00/model_optim_rng.pt",
            "4",
        ) in (findings(tmp_path, "rank-mismatch"))

    def test_a_rank_outside_the_mesh_is_found(self, tmp_path):
        Ranks(tp=2).write(Model(), tmp_path)
        shutil.copytree(tmp_path / "mp_rank_01", tmp_path / "mp_rank_02")
        assert [
            ("mp_rank_02/model_optim_rng.pt", "a rank of tp=2, pp=1, ep=1, as the arguments state", "mp_rank_02")
        ] == findings(tmp_path, "rank-mismatch")

    def test_two_files_of_one_rank_are_not_taken_for_copies(self, tmp_path):
        Ranks(tp=2).write(Model(), tmp_path)
        shutil.copytree(tmp_path / "mp_rank_01", tmp_path / "mp_rank_01_000")
        assert [
            ("mp_rank_01_000/model_optim_rng.pt", "one file of each rank", "`mp_rank_01/model_optim_rng.pt` of the same rank")
        ] == (findings(tmp_path, "rank-mismatch"))

    def test_hidden_size_is_that_of_the_embedding(self, tmp_path):
        Ranks(overrides={"hidden_size": 32}).write(Model(), tmp_path)
        assert [("embedding.word_embeddings.weight", "rows of 32, as args.hidden_size states", "[48, 16]")] == findings(
            tmp_path, "arguments-mismatch"
        )

    def test_optimizer_shards_of_data_parallel_ranks_are_listed_as_they_are(self, tmp_path):
        Ranks(tp=2).write(Model(), tmp_path)
        for file in list(tmp_path.rglob("*.pt")):
            file.rename(file.with_name("model_rng.pt"))
            for rank in range(2):
                shard = tmp_path / f"{file.parent.name}_{rank:03d}"
                shard.mkdir()
                torch.save({"optimizer": {"state": {0: {"exp_avg": torch.ones(5) * rank}}}}, shard / "optim.pt")
        found = values(tmp_path)
        assert raw(torch.ones(5)) == found["optimizer.mp_rank_01_001.optimizer.state.0.exp_avg"]
        assert ("ok", 4) == (validate(str(tmp_path)).verdict, sum(n.startswith("optimizer.") for n in found))

    def test_without_arguments_the_mesh_is_that_of_the_files(self, tmp_path):
        model = Model()
        Ranks(tp=2, pp=2).write(model, tmp_path)
        for file in tmp_path.rglob("*.pt"):
            state = torch.load(file, weights_only=False)
            del state["args"]
            torch.save(state, file)
        assert {n: raw(t) for n, t in model.tensors.items()} == values(tmp_path)


class TestRules:
    def test_a_name_without_a_rule_is_told_and_nothing_is_made_up(self, tmp_path):
        model = Model()
        model.tensors["decoder.layers.0.adapter.weight"] = torch.ones(4, 4)
        Ranks(tp=2).write(model, tmp_path)
        assert ["decoder.layers.0.adapter.weight in mp_rank_00/model_optim_rng.pt"] == [
            w for w, _, _ in findings(tmp_path, "no-rule")[:1]
        ]
        assert "damaged" == validate(str(tmp_path)).verdict

    def test_one_rank_needs_no_rule(self, tmp_path):
        model = Model()
        model.tensors["decoder.layers.0.adapter.weight"] = torch.ones(4, 4)
        Ranks(pp=2).write(model, tmp_path)
        assert raw(torch.ones(4, 4)) == values(tmp_path)["decoder.layers.0.adapter.weight"]

    def test_old_checkpoints_hold_query_key_and_value_apart(self, tmp_path):
        whole = torch.arange(48.0).reshape(12, 4)
        for rank in range(2):
            share = torch.cat([part.chunk(2)[rank] for part in whole.chunk(3)])
            layer = {"layers.0.attention.query_key_value.weight": share}
            state = {"model": {"language_model": {"transformer": layer}}, "checkpoint_version": 0, "iteration": 1}
            (tmp_path / f"mp_rank_{rank:02d}").mkdir()
            torch.save(state, tmp_path / f"mp_rank_{rank:02d}/model_optim_rng.pt")
        assert raw(whole) == values(tmp_path)["language_model.transformer.layers.0.attention.query_key_value.weight"]

    def test_a_gate_is_told_by_the_shapes_and_not_by_the_arguments(self, tmp_path):
        model = Model(is_gated=True)
        Ranks(tp=2, overrides={"swiglu": False}).write(model, tmp_path)
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        assert raw(model.tensors[name]) == values(tmp_path)[name]


class TestBadFiles:
    @pytest.mark.parametrize("value", [[1, 2], "text", None, {"model": 3}, {"model": {"w": {"x": 1}}}, {"args": 4, "model": {}}])
    def test_a_file_of_something_else_is_no_traceback(self, tmp_path, value):
        (tmp_path / "mp_rank_00").mkdir()
        (tmp_path / "mp_rank_00/model_optim_rng.pt").write_bytes(saved(value))
        open_snapshot(str(tmp_path))

    @pytest.mark.parametrize("size", [1 << 40, -2, True, "two", 0])
    def test_a_mesh_beyond_all_reason_takes_no_memory(self, tmp_path, size):
        Ranks(overrides={"tensor_model_parallel_size": size, "pipeline_model_parallel_size": size}).write(Model(), tmp_path)
        assert len(open_snapshot(str(tmp_path)).checkpoint.findings) < 1000
