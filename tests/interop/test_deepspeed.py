"""Checkpoints of the real DeepSpeed engine, trained here on CPU ranks: what we read is what DeepSpeed's own tools give."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpttools.operations.convert import consolidate
from ckpttools.operations.select import Choice
from ckpttools.operations.validate import validate
from tests.fixture_cases import cases

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.interop.deepspeed_files import differing, fp32_of, run_ranks, states_of

pytestmark = pytest.mark.interop

VARIANTS: dict[str, dict[str, Any]] = {
    "zero1-bf16-3": {"ranks": 3, "stage": 1, "dtype": "bf16"},
    "zero2-bf16-roundrobin-3": {"ranks": 3, "stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}},
    "zero2-elastic-3": {"ranks": 3, "stage": 2, "dtype": "bf16", "zero": {"elastic_checkpoint": True}},
    "zero3-bf16-3": {"ranks": 3, "stage": 3, "dtype": "bf16"},
    "zero1-fp32-1group": {"ranks": 2, "stage": 1, "dtype": "fp32", "groups": 1},
    "zero2-fp16": {"ranks": 2, "stage": 2, "dtype": "fp16"},
    "zero2-bf16-aligned": {"ranks": 2, "stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}},
    "zero3-subgroups": {"ranks": 2, "stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 300}},
    "zero3-subgroups-smaller-than-a-parameter": {"ranks": 2, "stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 20}},
    "zero3-fp32-untied": {"ranks": 2, "stage": 3, "dtype": "fp32", "tied": False, "groups": 1},
    "zero1-bf16-small": {"ranks": 2, "stage": 1, "dtype": "bf16", "hidden": 5},
    "zero1-bf16-tied-in-a-group-of-its-own": {"ranks": 2, "stage": 1, "dtype": "bf16", "groups": 3},
    "zero3-bf16-tied-in-a-group-of-its-own": {"ranks": 2, "stage": 3, "dtype": "bf16", "groups": 3},
    "zero3-fp16-buffers": {"ranks": 2, "stage": 3, "dtype": "fp16", "half_buffers": True},
    "zero1-fewer-elements-than-ranks-4": {"ranks": 4, "stage": 1, "dtype": "bf16", "more": {"three": [3]}},
    "zero2-fp32-fewer-elements-than-ranks-4": {"ranks": 4, "stage": 2, "dtype": "fp32", "more": {"three": [3]}, "groups": 1},
    "zero3-fewer-elements-than-ranks-4": {"ranks": 4, "stage": 3, "dtype": "bf16", "more": {"three": [3]}},
    "zero1-empty": {"ranks": 2, "stage": 1, "dtype": "bf16", "more": {"nothing": [0, 4]}},
    "zero2-adapters": {"ranks": 2, "stage": 2, "dtype": "bf16", "adapters": True},
    "zero3-adapters": {"ranks": 2, "stage": 3, "dtype": "bf16", "adapters": True},
}
WITHOUT_FROZEN: dict[str, dict[str, Any]] = {
    f"zero{stage}-{kind}": {
        "ranks": 2,
        "stage": stage,
        "dtype": "bf16",
        "adapters": kind == "adapters",
        "is_without_frozen": True,
    }
    for stage in (2, 3)
    for kind in ("adapters", "one-layer")
}
"""Saved with `exclude_frozen_parameters`, as is usual for LoRA."""
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Every variant, trained for three steps and saved by the real engine; beside it, what the engine holds itself."""
    directory = tmp_path_factory.mktemp("deepspeed")
    acts = [["steps", 3], ["save", "global_step3"]]
    for ranks in (4, 3, 2):
        runs = [
            {**options, "directory": str(directory / name), "acts": acts}
            for name, options in VARIANTS.items()
            if options["ranks"] == ranks
        ]
        if ranks == 2:
            runs += [
                {
                    "ranks": 2,
                    "stage": s,
                    "directory": str(directory / f"stage{s}"),
                    "acts": acts,
                    "state": str(directory / f"{s}.pt"),
                }
                for s in STAGES
            ]
            runs += [{**o, "directory": str(directory / f"part-{n}"), "acts": acts} for n, o in WITHOUT_FROZEN.items()]
            gathers = {"stage3_gather_16bit_weights_on_model_save": True}
            whole = {"ranks": 2, "stage": 3, "dtype": "bf16", "zero": gathers, "directory": str(directory / "gathered")}
            runs.append({**whole, "acts": [*acts, ["save_weights", "pytorch_model.bin"]]})
        run_ranks(directory, *runs)
    return directory


def consolidated(tag: Path, out: Path, **choice: Any) -> dict[str, torch.Tensor]:
    consolidate(str(tag), str(out), choice=Choice(is_expanding_tied=True, **choice))
    return load_file(out / "model.safetensors")


REFERENCED = [
    c for c in cases("deepspeed", damaged=False) if any(r.get("made") for r in c.truth.get("reference_zero_to_fp32", {}).values())
]


@pytest.mark.parametrize("case", REFERENCED, ids=lambda c: c.name)
def test_masters_of_fixtures_are_what_zero_to_fp32_gave(case, tmp_path):
    for snapshot, reference in case.truth["reference_zero_to_fp32"].items():
        expected = torch.load(case.directory / reference["path"] / "pytorch_model.bin", weights_only=True)
        found = consolidated(case.checkpoint / snapshot, tmp_path / snapshot, weights="fp32")
        assert differing(expected, found) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_engine_saves_validates_and_its_masters_are_those_of_zero_to_fp32(trained, tmp_path, variant):
    tag = trained / variant / "global_step3"
    result = validate(str(tag))
    assert ([], "ok") == ([f for f in result.findings if f.is_error], result.verdict)
    assert differing(fp32_of(tag), consolidated(tag, tmp_path / "out", weights="fp32")) == []


@pytest.mark.parametrize("variant", WITHOUT_FROZEN)
def test_tag_without_its_frozen_parameters_gives_what_zero_to_fp32_gives(trained, tmp_path, variant):
    tag = trained / f"part-{variant}" / "global_step3"
    result = validate(str(tag))
    assert ([], "ok") == ([f for f in result.findings if f.is_error], result.verdict)
    expected = fp32_of(tag, exclude_frozen_parameters=True)
    found = consolidated(tag, tmp_path / "out", weights="fp32")
    assert differing(expected, found) == []
    assert found.keys() - expected.keys() <= {"head.weight"}  # saved, as the further name of a frozen weight


def test_weights_that_the_engine_gathers_are_what_consolidate_gives_in_that_dtype(trained, tmp_path):
    from ckpttools.dtypes import parse_dtype

    expected = torch.load(trained / "gathered" / "pytorch_model.bin", weights_only=True)
    tag = trained / "gathered" / "global_step3"
    consolidate(str(tag), str(tmp_path / "out"), choice=Choice(is_expanding_tied=True), dtype=parse_dtype("bfloat16"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    floats = {n: t for n, t in expected.items() if t.dtype == torch.bfloat16}
    assert len(floats) >= 8
    assert differing(floats, found) == []


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_that_of_the_engine(trained, stage):
    expected = torch.load(trained / f"{stage}.pt", weights_only=True)
    assert len(expected) >= 8
    assert differing(expected, states_of(trained / f"stage{stage}/global_step3")) == []
