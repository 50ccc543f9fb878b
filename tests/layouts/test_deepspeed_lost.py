"""With ZeRO off no file lists the layers and parameters: the optimizers' counts tell that one is lost, and no name is guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttools.findings import ERROR, Finding
from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.fixture_cases import Case
from tests.layouts.test_deepspeed import change
from tests.layouts.test_deepspeed_write import resharded

KINDS = ("fp32", "masters", "flat")
"""Of optimizers with ZeRO off: torch's own, with masters by position, with one flat vector per group."""


@pytest.fixture
def tag(copy_of) -> Callable[[str], Path]:
    """A copy of the only tag of a case."""

    def copied(name: str) -> Path:
        return next(p for p in copy_of(Case("deepspeed", name).checkpoint).iterdir() if p.is_dir())

    return copied


def flatten(value: dict) -> None:
    """What the fused optimizer would have saved."""
    outer = value["optimizer"]
    inner, masters = outer["optimizer_state_dict"], outer.pop("fp32_groups")
    state = {}
    for g, group in enumerate(inner["param_groups"]):
        own = [inner["state"][p] for p in group["params"]]
        state[g] = {k: torch.cat([s[k].flatten() for s in own]) for k in ("exp_avg", "exp_avg_sq")}
        group["params"] = [g]
    outer["fp32_groups_flat"] = [torch.cat([m.flatten() for m in group]) for group in masters]
    inner["state"] = state


@pytest.fixture
def pipeline(tag, tmp_path) -> Callable[[str], Path]:
    """The tag of a pipeline whose optimizer is of a kind."""

    def made(kind: str) -> Path:
        if kind == "fp32":
            return tag("pipe2_fp32_nozero")
        out = tmp_path / "pipeline"
        resharded(tag("pipe2_dp2_zero1_bf16"), out, stage=0, mesh="pp=2")
        for path in out.glob("mp_rank_*") if kind == "flat" else ():
            change(path, flatten)
        for seal in out.glob("*.json"):
            seal.unlink()
        return out

    return made


def parts(directory: Path) -> dict[str, list]:
    """Where the elements of each tensor are."""
    return {t.name: [(p.box, p.extent) for p in t.pieces] for t in open_snapshot(str(directory)).checkpoint}


def errors(directory: Path) -> list[Finding]:
    return [f for f in open_snapshot(str(directory)).checkpoint.findings if f.severity == ERROR]


def renumber(directory: Path, old: int, new: int) -> None:
    path = directory / f"layer_{old:02d}-model_00-model_states.pt"
    torch.save(torch.load(path), directory / f"layer_{new:02d}-model_00-model_states.pt")
    path.unlink()


class TestLayers:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_layer_that_is_lost_is_an_error_and_shifts_no_name(self, pipeline, tmp_path, kind):
        directory = pipeline(kind)
        assert [] == errors(directory)
        truth = parts(directory)
        assert "optimizer.state.1.mlp.dense_4h_to_h.bias.exp_avg" in truth
        for path in sorted(directory.glob("layer_*")):
            hidden = path.rename(tmp_path / path.name)
            assert ["missing-file"] == [f.code for f in errors(directory)], path.name
            assert {} == {n: p for n, p in parts(directory).items() if n in truth and p != truth[n]}
            hidden.rename(path)

    @pytest.mark.parametrize("kind", KINDS)
    def test_layer_like_its_neighbours_is_named(self, pipeline, kind):
        directory = pipeline(kind)
        (directory / "layer_02-model_00-model_states.pt").unlink()
        assert ["layer_02-model_00-model_states.pt"] == [f.where for f in errors(directory)]
        assert "incomplete" == validate(str(directory)).verdict

    @pytest.mark.parametrize("kind", ["masters", "flat"])
    def test_layers_in_a_row_are_named_beside_functions(self, pipeline, kind):
        directory = pipeline(kind)
        for n in (5, 4, 3, 2, 1, 0):
            renumber(directory, n, n + 2 if n else 1)
        assert [] == errors(directory)
        lost = [f"layer_0{n}-model_00-model_states.pt" for n in (4, 5)]
        for name in lost:
            (directory / name).unlink()
        assert lost == [f.where for f in errors(directory)]
        assert "no file of layer 0, 2, 4, 5" in errors(directory)[0].found

    def test_both_numbers_are_told(self, pipeline):
        directory = pipeline("fp32")
        (directory / "layer_03-model_00-model_states.pt").unlink()
        found = errors(directory)[0]
        assert "28 parameters" in found.expected
        assert "25 in the files of 3 layers; 2 of shape [32] are not there" in found.found
        assert not [n for n in parts(directory) if n.startswith("optimizer.state.") and ".weight" in n]

    def test_number_without_a_file_is_a_function_where_nothing_is_lost(self, pipeline):
        directory = pipeline("fp32")
        truth = parts(directory)
        for n in (3, 2, 1):
            renumber(directory, n, 2 * n)
        assert [] == errors(directory)
        assert len(truth) == len(parts(directory))
        (directory / "layer_04-model_00-model_states.pt").unlink()
        assert "no file of layer 1, 3, 4, 5" in errors(directory)[0].found

    def test_frozen_layer_is_not_lost(self, pipeline):
        directory = pipeline("masters")
        path = directory / "layer_01-model_00-model_states.pt"
        torch.save(torch.load(path), directory / "layer_07-model_00-model_states.pt")
        assert [] == errors(directory)

    def test_parameter_that_a_layer_lost_shifts_nothing(self, pipeline):
        directory = pipeline("fp32")
        change(directory / "layer_01-model_00-model_states.pt", lambda v: v.pop("input_layernorm.bias"))
        assert ["1 of shape [32] is not there"] == [f.found.split("; ")[1] for f in errors(directory)]
        assert not [n for n in parts(directory) if n.startswith("optimizer.state.1.input_layernorm")]

    def test_huge_number_of_a_layer_costs_nothing(self, pipeline):
        directory = pipeline("fp32")
        renumber(directory, 2, 999_999_999)
        (directory / "layer_01-model_00-model_states.pt").unlink()
        assert ["missing-file"] == [f.code for f in errors(directory)]


class TestModules:
    @pytest.mark.parametrize(
        ("case", "name", "lost"),
        [
            ("zero0_fp32_w2", "layers.0.norm1.weight", "1 of shape [32] is not there"),
            ("zero0_fp32_w2", "layers.1.up.weight", "1 of shape [50, 32] is not there"),
            ("zero0_bf16_w2", "layers.0.norm1.weight", "1 of shape [32] is not there"),
            ("moe_ep2_fp32_nozero", "blocks.0.norm.bias", "6; 1 of shape [32] is not there"),
        ],
    )
    def test_parameter_that_is_lost_is_an_error_and_names_nothing_else(self, tag, case, name, lost):
        directory = tag(case)
        change(directory / "mp_rank_00_model_states.pt", lambda v: v["module"].pop(name))
        found = errors(directory)
        assert {"uncovered"} == {f.code for f in found}
        assert all(lost in f.found for f in found)
        assert not [n for n in parts(directory) if n.startswith(f"optimizer.state.{name}")]
        assert "incomplete" == validate(str(directory)).verdict

    @pytest.mark.parametrize("name", ["pos", "frozen_adapter.weight"])
    def test_frozen_parameter_is_counted_by_none(self, tag, name):
        directory = tag("zero0_fp32_w2")
        change(directory / "mp_rank_00_model_states.pt", lambda v: v["module"].pop(name))
        assert [] == errors(directory)

    def test_expert_that_lost_a_parameter_gets_no_names(self, tag):
        directory = tag("moe_ep2_fp32_nozero")
        path = directory / "layer_0_expert_1_mp_rank_00_model_states.pt"
        change(path, lambda v: v.pop(next(iter(v))))
        assert ["uncovered"] == [f.code for f in errors(directory)]
        assert not [n for n in parts(directory) if n.startswith("optimizer.state.blocks.0.moe") and ".experts.1." in n]
