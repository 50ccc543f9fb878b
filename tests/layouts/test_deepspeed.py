"""DeepSpeed: ZeRO 0 to 3, pipelines, tensor parallelism, experts, universal checkpoints, and what is wrong with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.fixture_cases import Case
from tests.layouts.contract import LayoutContract, codes

TAG = "global_step10"


class Contract(LayoutContract):
    layout = "deepspeed"
    family = "deepspeed"


class TestZero2(Contract):
    cases = ("zero0_fp32_w2", "zero0_bf16_w2", "zero1_bf16_w2_param_aligned", "zero2_bf16_w2_elastic", "zero2_bf16_w4_roundrobin")
    harmed = ("zero2_fp16_w2", "zero_pp_rank_1_mp_rank_00_optim_states.pt")


class TestZero3(Contract):
    cases = ("zero3_bf16_w2", "zero3_fp32_w4_subgroups")
    harmed = ("zero3_bf16_w2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")


class TestPipeline(Contract):
    cases = ("bloom_tp2_pp2", "pipe2_dp2_zero1_bf16", "pipe2_fp32_nozero", "mp2_dp2_zero1_bf16")
    harmed = ("pipe2_dp2_zero1_bf16", "layer_02-model_00-model_states.pt")


class TestExperts(Contract):
    cases = ("moe_ep2_zero2_bf16", "moe_ep2_fp32_nozero")
    harmed = ("moe_ep2_zero2_bf16", "layer_1_expert_2_mp_rank_00_model_states.pt")


class TestUniversal(Contract):
    cases = ("universal_tp2_dp2_zero1", "universal_zero2_w2", "universal_zero3_w2")
    harmed = ("universal_zero3_w2", "zero/embed.weight/exp_avg.pt")


@pytest.fixture
def tag(copy_of) -> Callable[..., Path]:
    """A copy of the only tag of a case."""

    def copied(name: str) -> Path:
        return next(p for p in copy_of(Case("deepspeed", name).checkpoint).iterdir() if p.is_dir())

    return copied


def change(path: Path, edit: Callable[[dict], None]) -> None:
    """Save a torch file again with something changed in its value; DeepSpeed's classes must be importable for that."""
    pytest.importorskip("deepspeed")
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)


def finding(directory: Path, code: str):
    found = [f for f in validate(str(directory)).findings if f.code == code]
    assert found, f"no {code}"
    return found[0]


def names(directory: Path) -> set[str]:
    return {t.name for t in open_snapshot(str(directory)).checkpoint}


class TestModel:
    def test_weight_of_zero_3_is_its_master_the_same_pieces(self, tag):
        tensors = open_snapshot(str(tag("zero3_bf16_w2"))).checkpoint.by_name
        assert tensors["embed.weight"].pieces == tensors["optimizer.state.embed.weight.fp32"].pieces

    def test_frozen_parameter_of_zero_3_keeps_the_dtype_of_the_model(self, tag):
        assert "bfloat16" == open_snapshot(str(tag("zero3_bf16_w2"))).checkpoint.by_name["pos"].spec.dtype.name

    def test_tied_parameter_has_both_names(self, tag):
        aliases = open_snapshot(str(tag("zero2_fp16_w2"))).checkpoint.aliases
        assert ("embed.weight", "lm_head.weight") in aliases

    def test_experts_have_their_global_numbers_in_the_optimizer_too(self, tag):
        expert = "blocks.1.moe.deepspeed_moe.experts.deepspeed_experts.3.0.weight"
        assert {expert, f"optimizer.state.{expert}.exp_avg"} <= names(tag("moe_ep2_zero2_bf16"))

    def test_step_is_the_state_of_each_parameter_and_ties_nothing(self, tag):
        checkpoint = open_snapshot(str(tag("zero1_bf16_w2"))).checkpoint
        assert checkpoint.by_name["optimizer.state.embed.weight.step"].spec.shape == ()
        assert [g for g in checkpoint.aliases if any(n.endswith(".step") for n in g)] == []

    def test_client_state_is_extra_state(self, tag):
        checkpoint = open_snapshot(str(tag("zero1_bf16_w2"))).checkpoint
        assert {"extra_state.epoch", "extra_state.args", "optimizer.param_groups", "scheduler.last_batch_iteration"} <= {
            o.name for o in checkpoint.objects
        }
        assert "extra_state" == checkpoint.by_name["extra_state.torch_rng"].family

    def test_mesh_step_and_version_are_told(self, tag):
        checkpoint = open_snapshot(str(tag("bloom_tp2_pp2"))).checkpoint
        assert ("pp=2,dp=1,tp=2", 6, "DeepSpeed 0.19.8") == (str(checkpoint.mesh), checkpoint.step, checkpoint.written_by)

    def test_copies_of_a_tied_module_that_fell_behind_are_a_warning(self, tag):
        result = validate(str(tag("bloom_tp2_pp2")))
        assert ("ok", {"replica-mismatch"}) == (result.verdict, codes(result))

    def test_shards_without_stated_rules_are_put_together_by_the_names_of_bloom(self, tag):
        directory = tag("bloom_tp2_pp2")
        before = open_snapshot(str(directory)).checkpoint.tensors
        for path in directory.glob("mp_rank_*"):
            change(path, lambda v: v.pop("universal_checkpoint_info"))
        after = open_snapshot(str(directory)).checkpoint
        assert [t.pieces for t in before if t.family == "model"] == [t.pieces for t in after.tensors if t.family == "model"]

    def test_directory_around_one_tag_is_that_snapshot(self, tag):
        directory = tag("zero2_fp16_w2")
        (directory.parent / "notes.txt").write_text("x")
        assert names(directory) == names(directory.parent)

    def test_exported_weights_beside_a_tag_are_the_model_of_their_directory(self, tag):
        directory = tag("zero2_fp16_w2").parent
        save_file({"w": torch.ones(2)}, directory / "model.safetensors")
        checkpoint = open_snapshot(str(directory)).checkpoint
        assert ("safetensors", ["w"]) == (checkpoint.layout, [t.name for t in checkpoint if t.family == "model"])
        assert {"model", "optimizer", "extra_state"} == {t.family for t in checkpoint}

    def test_latest_says_which_of_several_tags_is_meant(self, tag):
        directory = tag("zero2_fp16_w2")
        shutil.copytree(directory, directory.parent / "best")
        (directory.parent / "latest").write_text("best")
        checkpoint = open_snapshot(str(directory.parent)).checkpoint
        assert {"best"} == {p.extent.file.partition("/")[0] for t in checkpoint for p in t.pieces}

    @pytest.mark.parametrize("old", ["zero_pp_rank_0_mp_rank_00optim_states.pt", "zero_pp_rank_1_mp_rank_00optim_states.pt"])
    def test_file_names_of_the_first_releases_are_known(self, tag, old):
        directory = tag("zero2_fp16_w2")
        (directory / old.replace("00optim", "00_optim")).rename(directory / old)
        assert "ok" == validate(str(directory)).verdict


class TestProofs:
    def test_weight_that_is_not_the_rounding_of_its_master_is_named(self, tag):
        directory = tag("zero1_bf16_w2")
        change(directory / "mp_rank_00_model_states.pt", lambda v: v["module"]["norm.weight"].add_(1))
        found = finding(directory, "rounding-mismatch")
        assert "norm.weight in " in found.where

    def test_parameters_in_the_wrong_order_are_found(self, tag):
        def swap(value):
            shapes = value["param_shapes"][1]
            value["param_shapes"][1] = type(shapes)(reversed(shapes.items()))

        directory = tag("zero1_bf16_w2")
        change(directory / "mp_rank_00_model_states.pt", swap)
        assert {"rounding-mismatch", "group-mismatch"} <= codes(validate(str(directory)))

    def test_nan_may_have_another_payload(self, tag):
        directory = tag("zero0_bf16_w2")

        def spoil(value):
            value["module"]["norm.weight"][0] = float("nan")
            value["optimizer"]["fp32_groups"][1][18].data[0] = -float("nan")

        change(directory / "mp_rank_00_model_states.pt", spoil)
        assert "ok" == validate(str(directory)).verdict


class TestDamage:
    def test_missing_rank_is_named_and_makes_it_incomplete(self, tag):
        directory = tag("zero3_bf16_w2")
        (directory / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
        result = validate(str(directory))
        assert ("incomplete", True) == (result.verdict, "missing-rank" in codes(result))
        assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" == finding(directory, "missing-rank").where

    def test_optimizer_files_that_are_all_gone_are_named(self, tag):
        directory = tag("zero2_bf16_w2_elastic")
        for path in directory.glob("*optim_states.pt"):
            path.unlink()
        absent = [f.where for f in validate(str(directory)).findings if f.code == "missing-rank"]
        assert [f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2)] == absent

    def test_rank_file_of_a_larger_world_is_foreign(self, tag):
        directory = tag("zero2_fp16_w2")
        other = directory / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
        shutil.copy(directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt", other)
        change(other, lambda v: v["optimizer_state_dict"].update(partition_count=[4, 4]))
        found = finding(directory, "foreign-rank")
        assert (other.name, "rank 2 of 4") == (found.where, found.found)
        assert "damaged" == validate(str(directory)).verdict

    def test_rank_file_of_another_prefix_is_left_over(self, tag):
        directory = tag("zero2_fp16_w2")
        other = directory / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        shutil.copy(directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt", other)
        assert other.name == finding(directory, "rank-mismatch").where

    def test_rank_of_another_step_is_named_with_both_steps(self, tag):
        directory = tag("zero3_fp32_w4_subgroups")

        def age(value):
            for state in value["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
                state["step"] -= 3

        path = directory / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
        change(path, age)
        found = finding(directory, "step-mismatch")
        assert (path.name, "step 7") == (found.where, found.found)
        assert "step 10, as 3 of 4" in found.expected

    def test_group_whose_elements_do_not_add_up_is_named_with_numbers(self, tag):
        def shorten(value):
            groups = value["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            groups[0] = groups[0][:-100].clone()

        directory = tag("zero2_fp16_w2")
        path = directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        change(path, shorten)
        found = finding(directory, "group-mismatch")
        assert "group 0" in found.where
        assert path.name in found.where
        assert "8368 elements" in found.expected
        assert "8268 elements" in found.found

    def test_flat_group_of_zero_3_that_is_too_short_is_named_with_numbers(self, tag):
        def shorten(value):
            groups = value["optimizer_state_dict"]["fp32_flat_groups"]
            groups[-1] = groups[-1][:-1].clone()

        directory = tag("zero3_bf16_w2")
        path = directory / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        change(path, shorten)
        assert path.name in finding(directory, "group-mismatch").where

    def test_rank_files_under_each_others_names_are_found_where_no_value_tells(self, tag):
        directory = tag("zero3_bf16_w2")
        one, other = (directory / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2))
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
        found = finding(directory, "rank-mismatch")
        assert (one.name, True) == (found.where, other.name in found.found)

    @pytest.mark.parametrize("name", ["zero1_bf16_w2", "pipe2_dp2_zero1_bf16", "moe_ep2_zero2_bf16"])
    def test_model_file_that_is_missing_is_named(self, tag, name):
        directory = tag(name)
        (directory / "mp_rank_00_model_states.pt").unlink()
        result = validate(str(directory))
        assert "incomplete" == result.verdict
        assert "mp_rank_00_model_states.pt" in [f.where for f in result.findings if f.code == "missing-rank"]

    def test_model_file_of_zero_3_that_is_missing_is_named_when_all_are(self, tag):
        directory = tag("zero3_bf16_w2")
        for path in directory.glob("*model_states.pt"):
            path.unlink()
        absent = [f.where for f in validate(str(directory)).findings if f.code == "missing-rank"]
        assert [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(2)] == absent

    def test_layer_of_a_tied_module_that_is_missing_is_told_by_its_parameter(self, tag):
        directory = tag("bloom_tp2_pp2")
        for path in directory.glob("layer_01-*"):
            path.unlink()
        result = validate(str(directory))
        assert "incomplete" == result.verdict
        assert any("tied_modules.embed" in f.where for f in result.findings if f.code == "missing-file")

    def test_parameter_that_the_model_file_does_not_list_is_missed_in_its_group(self, tag):
        directory = tag("zero2_fp16_w2")
        change(directory / "mp_rank_00_model_states.pt", lambda v: v["param_shapes"][0].popitem())
        assert "elements" in finding(directory, "group-mismatch").expected

    def test_state_that_lacks_only_padding_is_not_what_was_written(self, tag):
        def shorten(value):
            state = value["optimizer_state_dict"]["base_optimizer_state"]["state"]
            state[1]["exp_avg"] = state[1]["exp_avg"][:-1].clone()

        directory = tag("zero1_fp32_w2_uneven")
        path = directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        change(path, shorten)
        assert path.name in finding(directory, "group-mismatch").where

    def test_model_file_of_another_step_than_the_optimizer_is_a_warning(self, tag):
        directory = tag("zero3_bf16_w2")
        for path in directory.glob("*model_states.pt"):
            change(path, lambda v: v.update(global_steps=40))
        found = finding(directory, "step-mismatch")
        assert ("warning", "step 40", True) == (found.severity, found.found, "step 10" in found.expected)
        assert "ok" == validate(str(directory)).verdict

    @pytest.mark.parametrize("rank", [0, 1])
    def test_optimizer_of_an_expert_parallel_rank_that_is_missing_is_named(self, tag, rank):
        directory = tag("moe_ep2_fp32_nozero")
        path = directory / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.unlink()
        assert path.name == finding(directory, "missing-rank").where

    def test_expert_that_is_missing_is_named(self, tag):
        directory = tag("moe_ep2_zero2_bf16")
        path = directory / "layer_0_expert_3_mp_rank_00_model_states.pt"
        path.unlink()
        assert path.name == finding(directory, "missing-file").where

    def test_state_of_a_parameter_that_is_missing_is_named(self, tag):
        directory = tag("universal_zero2_w2")
        (directory / "zero/embed.weight/exp_avg_sq.pt").unlink()
        assert "zero/embed.weight/exp_avg_sq.pt" == finding(directory, "missing-file").where

    @pytest.mark.parametrize("key", ["param_shapes", "module", "buffer_names", "shared_params", "dp_world_size", "ds_config"])
    @pytest.mark.parametrize("value", [None, 0, "x", [], {}, [1, "a"], {"a": {"b": -1}}], ids=str)
    def test_nonsense_in_a_model_file_is_never_an_exception(self, tag, key, value):
        directory = tag("zero2_fp16_w2")
        change(directory / "mp_rank_00_model_states.pt", lambda v: v.update({key: value}))
        validate(str(directory))

    @pytest.mark.parametrize("key", ["partition_count", "group_paddings", "base_optimizer_state", "param_slice_mappings"])
    @pytest.mark.parametrize("value", [None, 0, 10**30, "x", [], {}, [1, "a"], [10**18, 2], {"state": {0: {"a": []}}}], ids=str)
    def test_nonsense_in_an_optimizer_file_is_never_an_exception(self, tag, key, value):
        directory = tag("zero2_fp16_w2")
        path = directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        change(path, lambda v: v["optimizer_state_dict"].update({key: value}))
        validate(str(directory))


class TestRuns:
    @pytest.mark.parametrize("name", ["damaged_missing_zero_rank", "damaged_mixed_steps", "damaged_truncated_optim"])
    def test_latest_passes_over_the_damaged_snapshot(self, ckpttools, name):
        case = Case("deepspeed", name)
        answer = ckpttools("latest", case.checkpoint, "--depth", "full")
        assert (0, case.truth["newest_valid"]) == (answer.exit_code, Path(answer.stdout.strip()).name)

    @pytest.mark.parametrize("name", ["damaged_missing_zero_rank", "damaged_mixed_steps", "damaged_truncated_optim"])
    def test_other_snapshots_of_the_run_are_sound(self, name):
        case = Case("deepspeed", name)
        assert {"ok"} == {validate(str(case.checkpoint / good)).verdict for good in case.good_snapshots}

    def test_latest_that_names_a_missing_tag_is_an_alert(self, ckpttools):
        answer = ckpttools("status", Case("deepspeed", "damaged_latest_names_missing_tag").checkpoint)
        assert (1, True) == (answer.exit_code, "global_step40" in answer.said)
