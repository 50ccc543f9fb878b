"""Directories that users of DeepSpeed reported, and what they get here: the right result, or the cause and what to do.

The numbers are those of issues and pull requests of deepspeedai/DeepSpeed where nothing else is said.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttools.errors import CkpttoolsError
from ckpttools.layouts import open_snapshot
from ckpttools.model import Box, TensorEntry, TensorSpec
from ckpttools.operations.convert import consolidate
from ckpttools.operations.select import Choice
from ckpttools.operations.validate import validate
from tests.fixture_cases import Case
from tests.layouts.test_deepspeed import change
from tests.layouts.test_deepspeed_write import differences, resharded


@pytest.fixture
def tag(copy_of) -> Callable[..., Path]:
    """A copy of the only tag of a case."""

    def copied(name: str) -> Path:
        return next(p for p in copy_of(Case("deepspeed", name).checkpoint).iterdir() if p.is_dir())

    return copied


def models(directory: Path) -> list[Path]:
    return sorted(directory.glob("*model_states.pt"))


def optimizers(directory: Path) -> list[Path]:
    return sorted(directory.glob("*optim_states.pt"))


def boxes(entry: TensorEntry) -> tuple[TensorSpec, list[tuple[Box, int | None]]]:
    """What a tensor is, and which rank holds which part of it."""
    return entry.spec, [(p.box, p.rank) for p in entry.pieces]


def said(directory: Path | str, *roots: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for f in validate(str(directory), roots=[str(r) for r in roots]).findings:
        found.setdefault(f.code, []).append(f"{f.severity} {f.where} {f.found} {f.remedy}")
    return found


def spread(directory: Path, nodes: Path) -> list[Path]:
    """The files of a tag on two nodes: what has rank 1 in its name on the second."""
    for path in directory.iterdir():
        node = nodes / ("b" if "rank_1_" in path.name else "a") / directory.name
        node.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, node)
    return [nodes / "a" / directory.name, nodes / "b" / directory.name]


def consolidated(directory: Path, out: Path, **options) -> str:
    """The fingerprint of what consolidate writes."""
    seal = consolidate(str(directory), str(out), **options).seal
    assert seal is not None
    return seal.fingerprint


class TestNodes:
    """2319, gpt-neox 750, Lightning 11947: each node saved what its own ranks have, and DeepSpeed's tools see one node."""

    @pytest.mark.parametrize("name", ["zero2_fp16_w2", "zero3_bf16_w2", "zero1_bf16_w2_param_aligned"])
    def test_disks_of_all_nodes_are_one_snapshot(self, tag, tmp_path, name):
        whole = tag(name)
        one, other = spread(whole, tmp_path / "nodes")
        assert "ok" == validate(str(one), roots=[str(other)]).verdict
        assert consolidated(whole, tmp_path / "1", choice=Choice(weights="fp32")) == consolidated(
            one, tmp_path / "2", choice=Choice(weights="fp32"), roots=[str(other)]
        )

    def test_one_node_alone_is_incomplete_and_told_of_the_others(self, tag, tmp_path):
        one, _ = spread(tag("zero3_bf16_w2"), tmp_path / "nodes")
        assert "incomplete" == validate(str(one)).verdict
        assert "--root" in said(one)["missing-rank"][0]

    def test_folders_of_nodes_in_a_tag_lack_ranks_each_and_are_whole_together(self, tag, tmp_path):
        source = tag("zero3_bf16_w2")
        for path in list(source.iterdir()):
            node = source / ("node1" if "rank_1_" in path.name else "node0")
            node.mkdir(exist_ok=True)
            shutil.move(path, node)
        assert any("node0/" in text and "--root" in text for text in said(source)["missing-rank"])
        assert "ok" == validate(str(source / "node0"), roots=[str(source / "node1")]).verdict


class TestTrainer:
    """LlamaFactory 8098, 5405, 5430: the directories of HF Trainer and accelerate, with exported weights beside the tag."""

    @pytest.fixture
    def checkpoint(self, tag) -> Path:
        directory = tag("zero3_bf16_w2").parent
        save_file({"w": torch.ones(2)}, directory / "model.safetensors")
        (directory / "trainer_state.json").write_text('{"global_step": 10}')
        return directory

    def test_tag_is_validated_with_the_exported_weights(self, checkpoint):
        assert "ok" == validate(str(checkpoint)).verdict
        optimizers(checkpoint / "global_step10")[1].unlink()
        assert "missing-rank" in said(checkpoint)

    def test_exported_weights_are_the_model(self, checkpoint, tmp_path):
        consolidate(str(checkpoint), str(tmp_path / "out.safetensors"))
        assert ["w"] == list(load_file(tmp_path / "out.safetensors"))

    def test_half_of_the_ranks_in_a_temporary_directory_of_the_trainer(self, checkpoint, tmp_path):
        other = tmp_path / "tmp-checkpoint-10" / "global_step10"
        other.mkdir(parents=True)
        for path in (checkpoint / "global_step10").glob("*rank_1_*"):
            shutil.move(path, other)
        assert "incomplete" == validate(str(checkpoint)).verdict
        assert "ok" == validate(str(checkpoint), roots=[str(other.parent)]).verdict


class TestTies:
    """3033, 3295: before 0.9.2 the table of shared parameters of ZeRO 3 named the first parameter for all of them."""

    def all_tied_to_the_first(self, value: dict) -> None:
        first = next(iter(value["module"]))
        value["shared_params"] = {name: first for name in value["module"] if name != first}

    def test_wrong_table_is_not_believed(self, tag):
        directory = tag("zero3_bf16_w2")
        before = {t.name: boxes(t) for t in open_snapshot(str(directory)).checkpoint if t.name != "lm_head.weight"}
        for path in models(directory):
            change(path, self.all_tied_to_the_first)
        after = open_snapshot(str(directory)).checkpoint
        assert before == {t.name: boxes(t) for t in after}
        assert ["container-inconsistent", "no-data"] == sorted({f.code for f in after.findings})

    def test_name_that_nothing_is_known_of_is_a_remark(self, tag):
        directory = tag("zero3_bf16_w2")
        for path in models(directory):
            change(path, lambda v: v.pop("shared_params"))
        assert ["warning"] == [text.split()[0] for text in said(directory)["no-data"]]

    def test_module_that_its_parent_has_under_two_names_is_a_remark_since_ties_do_not_list_it(self, tag):
        directory = tag("zero3_bf16_w2")
        for path in models(directory):
            change(path, lambda v: v["module"].update({"layers.0.again.weight": v["module"]["layers.0.up.weight"]}))
        assert ["warning", "`layers.0.again.weight`"] == said(directory)["no-data"][0].split()[:2]


class TestLostWeights:
    """3090, 7546, 6699: what was never written, and what is there in spite of it."""

    def test_frozen_weights_that_zero_3_did_not_save_are_an_error(self, tag):
        directory = tag("zero3_bf16_w2")
        for path in models(directory):
            change(path, lambda v: [v.pop(k) for k in ("frozen_param_shapes", "frozen_param_fragments")])
        lost = [text.split()[:2] for text in said(directory)["no-data"]]
        assert {"error"} == {severity for severity, _ in lost}
        assert "`pos`" in {name for _, name in lost}

    def test_weights_are_whole_where_only_the_first_rank_wrote_its_model_file(self, tag, tmp_path):
        directory = tag("zero3_fp32_w4_subgroups")
        choice = Choice(exclude=("pos", "frozen_adapter.*"))
        expected = consolidated(directory, tmp_path / "1", choice=choice)
        for path in models(directory)[1:]:
            path.unlink()
        assert {"missing-rank", "uncovered"} >= set(said(directory))
        allowed = ("missing-rank", "uncovered")
        assert expected == consolidated(directory, tmp_path / "2", choice=choice, allowed_findings=allowed)

    def test_zero_0_needs_no_optimizer_to_be_exported(self, tag, tmp_path):
        assert consolidated(tag("zero0_bf16_w2"), tmp_path / "out", choice=Choice(weights="fp32"))

    def test_values_on_nvme_are_named(self, tag):
        directory = tag("zero3_bf16_w2")
        for path in optimizers(directory):
            change(path, lambda v: v["optimizer_state_dict"].__setitem__("fp32_flat_groups", [torch.zeros(0)]))
        assert "offloaded_tensors" not in said(directory)["group-mismatch"][0]
        (directory / "offloaded_tensors" / "rank0").mkdir(parents=True)
        (directory / "offloaded_tensors" / "rank0" / "1.swp").write_bytes(b"x")
        assert "offloaded_tensors" in said(directory)["group-mismatch"][0]

    def test_universal_checkpoint_needs_its_settings(self, tag):
        directory = tag("universal_zero2_w2")
        (directory / "zero" / "optimizer_state.pt").unlink()
        assert "zero/optimizer_state.pt" in said(directory)["missing-file"][0]

    def test_fragments_that_ds_to_universal_left_are_no_tensors(self, tag):
        directory = tag("universal_zero2_w2")
        before = {t.name for t in open_snapshot(str(directory)).checkpoint}
        (directory / "tmp" / "embed.weight" / "0").mkdir(parents=True)
        torch.save(torch.zeros(5), directory / "tmp" / "embed.weight" / "0" / "fp32.00")
        assert before == {t.name for t in open_snapshot(str(directory)).checkpoint}


STATES: dict[str, Callable[[dict], dict]] = {
    "sgd": lambda adam: {},
    "lion": lambda adam: {"exp_avg": adam["exp_avg"]},
    "muon": lambda adam: {"momentum_buffer": adam["exp_avg"]},
    "adafactor": lambda adam: {"step": 3, "exp_avg_sq": adam["exp_avg_sq"], "RMS": 0.25},
}


class TestOptimizers:
    """8608, transformers 34331: optimizers that do not keep what Adam keeps."""

    @staticmethod
    def state(value: dict) -> dict:
        return value["optimizer_state_dict"]["base_optimizer_state"]["state"]

    @pytest.mark.parametrize("name", STATES)
    @pytest.mark.parametrize("stage", [2, 3])
    def test_state_of_one_group_goes_to_other_ranks(self, tag, tmp_path, name, stage):
        directory = tag("zero2_fp16_w2")

        def edit(value: dict) -> None:
            state = self.state(value)
            state[min(state)] = STATES[name](state[min(state)])

        for path in optimizers(directory):
            change(path, edit)
        assert "ok" == validate(str(directory)).verdict
        out = tmp_path / "out"
        resharded(directory, out, stage=stage)
        assert [] == [d for d in differences(directory, out) if "exp_avg" in d or "momentum" in d or "RMS" in d]

    def test_blocks_of_8_bit_optimizers_cannot_be_cut_for_other_ranks(self, tag, tmp_path):
        directory = tag("zero2_fp16_w2")

        def edit(value: dict) -> None:
            state = self.state(value)
            for group, adam in state.items():
                n = adam["exp_avg"].numel()
                state[group] = {"state1": torch.zeros(n, dtype=torch.uint8), "absmax1": torch.ones(-(-n // 256))}

        for path in optimizers(directory):
            change(path, edit)
        assert "ok" == validate(str(directory)).verdict
        with pytest.raises(CkpttoolsError, match="absmax1"):
            resharded(directory, tmp_path / "o", stage=2)


class TestOldFiles:
    """1009, 4258, 3089: what older releases and converters leave out."""

    def test_one_mapping_of_shapes_and_nothing_of_what_came_later(self, tag, tmp_path):
        directory = tag("zero2_fp16_w2")
        expected = consolidated(directory, tmp_path / "1", choice=Choice(weights="fp32"))

        def edit(value: dict) -> None:
            if len(value["param_shapes"]) == 1:
                value["param_shapes"] = OrderedDict(value["param_shapes"][0])
            for key in ("ds_version", "frozen_param_shapes", "frozen_param_fragments", "dp_world_size"):
                value.pop(key, None)

        for path in models(directory):
            change(path, edit)
        assert expected == consolidated(directory, tmp_path / "2", choice=Choice(weights="fp32"))

    def test_number_of_ranks_that_is_zero_is_not_believed(self, tag):
        directory = tag("zero2_fp16_w2")
        change(models(directory)[0], lambda v: v.__setitem__("dp_world_size", 0))
        assert "dp=2" == str(open_snapshot(str(directory)).checkpoint.mesh)
        assert "ok" == validate(str(directory)).verdict
