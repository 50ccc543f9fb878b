"""The real DeepSpeed engine goes on from what we write, bit by bit as if training had never been interrupted.

Each source is trained for two steps on two ranks, saved, and trained on; that run is the truth. Gradients are clipped and
accumulated over two batches, the learning rate warms up, and the scale of a float16 loss grows on the way, so a counter that
is lost shows in the losses or in the files that the engine saves in the end. Those are compared by torch alone.

Where the number of ranks is another one, every rank sees the same batch: the mean of two or four equal gradients is exact. That
of three is not (g + g + g is rounded), and parts of other lengths put other elements where the processor's vector loops end:
in float32 that is an ulp here and there, and in 16 bits now and then a weight that rounds the other way.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttools.model import Mesh
from ckpttools.operations.reshard import reshard
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.interop.deepspeed_files import differing, differing_files, fp32_of, run_ranks, states_of, to_universal

pytestmark = pytest.mark.interop

STAGES, DTYPES = (1, 2, 3), ("fp32", "bf16", "fp16")
SOURCES = [(stage, dtype) for stage in STAGES for dtype in DTYPES]
WIDE = [(stage, dtype) for stage in STAGES for dtype in ("fp32", "bf16")]
OTHER_STAGE = {1: 3, 2: 1, 3: 2}
SETTINGS: dict[str, Any] = {
    "config": {
        "gradient_accumulation_steps": 2,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10},
        },
    },
    "fp16": {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1},
    "zero": {"memory_efficient_linear": False},  # ZeRO 3 has a linear layer of its own otherwise, which rounds differently
}
BEFORE, AFTER = 2, 3
"""Steps until the source is saved, and after it."""
ROUNDING = {"fp32": 1e-6, "bf16": 2e-4}
"""Relative difference of losses where gradients are put together otherwise; measured: 0 and 4.6e-5."""


def options(stage: int, dtype: str, ranks: int, directory: Path, **more: Any) -> dict[str, Any]:
    """A run, with its losses beside its directory."""
    losses = {"losses": f"{directory}.json"}
    return {**SETTINGS, "stage": stage, "dtype": dtype, "ranks": ranks, "directory": str(directory), **losses, **more}


VARIANTS: dict[str, dict[str, Any]] = {
    "roundrobin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "roundrobin-1": {"stage": 1, "zero": {"round_robin_gradients": True}},
    "aligned": {"stage": 2, "zero": {"parameter_alignment": True}},
    "sub-groups-smaller-than-a-parameter": {"stage": 3, "zero": {"sub_group_size": 20}},
    "tied-in-a-group-of-its-own": {"stage": 3, "groups": 3},
    "adapters": {"stage": 2, "adapters": True},
    "empty": {"stage": 1, "more": {"nothing": [0, 4]}},
}
"""Other settings of the engine, resumed over three ranks."""


def name_of(stage: int, dtype: str) -> str:
    return f"zero{stage}-{dtype}"


def variant(name: str, directory: Path, acts: list[list[Any]]) -> dict[str, Any]:
    zero = {**SETTINGS["zero"], **VARIANTS[name].get("zero", {})}
    return options(VARIANTS[name]["stage"], "bf16", 2, directory, acts=acts) | VARIANTS[name] | {"zero": zero}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The runs that nothing interrupts."""
    directory = tmp_path_factory.mktemp("sources")
    acts = [["steps", BEFORE], ["save", "start"], ["steps", AFTER], ["save", "after"]]
    plain = [options(s, d, 2, directory / name_of(s, d), acts=acts) for s, d in SOURCES]
    run_ranks(directory, *plain, *[variant(name, directory / name, acts) for name in VARIANTS])
    return directory


def write(source: Path, out: Path, target: str, ranks: int, zero: int | None = None) -> Path:
    reshard(str(source), str(out), target=target, mesh=Mesh.parse(f"dp={ranks}"), details=Details(zero=zero))
    return out


def write_ways(start: Path, out: Path, stage: int) -> None:
    """One checkpoint for each way to it, in a directory of the way's name."""
    write(write(start, out / "ranks" / "between", "deepspeed", 3, stage), out / "ranks" / "start", "deepspeed", 2, stage)
    write(write(start, out / "dcp" / "between", "dcp", 3), out / "dcp" / "start", "deepspeed", 2, stage)
    write(start, out / "universal" / "start", "deepspeed-universal", 1, stage)
    write(start, out / "stage" / "start", "deepspeed", 2, OTHER_STAGE[stage])
    write(start, out / "three" / "start", "deepspeed", 3, stage)
    write(start, out / "four" / "start", "deepspeed", 4, stage)
    to_universal(start, out / "theirs" / "start")
    to_universal(start, out / "theirs-three" / "start")


@pytest.fixture(scope="module")
def resumed(sources, tmp_path_factory) -> Path:
    """What the engine makes of each: loaded and saved at once, and trained on."""
    directory = tmp_path_factory.mktemp("resumed")
    acts = [["load", "start"], ["save", "again"], ["steps", AFTER], ["save", "after"]]

    def run(ranks: int, way: str, chosen: list[tuple[int, str]], *, is_universal: bool = False) -> list[dict[str, Any]]:
        return [
            options(
                OTHER_STAGE[s] if way == "stage" else s,
                d,
                ranks,
                directory / name_of(s, d) / way,
                acts=acts,
                universal=is_universal,
            )
            for s, d in chosen
        ]

    for stage, dtype in SOURCES:
        write_ways(sources / name_of(stage, dtype) / "start", directory / name_of(stage, dtype), stage)
    for name, settings in VARIANTS.items():
        start = write(sources / name / "start", directory / name / "between", "deepspeed", 3, settings["stage"])
        write(start, directory / name / "ranks" / "start", "deepspeed", 2, settings["stage"])
    variants = [variant(name, directory / name / "ranks", acts) for name in VARIANTS]
    two = variants + run(2, "ranks", SOURCES) + run(2, "dcp", SOURCES) + run(2, "universal", SOURCES, is_universal=True)
    run_ranks(directory, *two, *run(2, "theirs", SOURCES, is_universal=True), *run(2, "stage", WIDE))
    one_group_each = [(s, d) for s, d in WIDE if s < 3]
    run_ranks(directory, *run(3, "three", WIDE), *run(3, "theirs-three", one_group_each, is_universal=True))
    run_ranks(directory, *run(4, "four", WIDE))
    return directory


def losses(directory: Path) -> list[float]:
    """Of the batches after the source was saved."""
    found = json.loads(Path(f"{directory}.json").read_text())[-2 * AFTER :]
    assert len(found) == 2 * AFTER
    return found


@pytest.mark.parametrize(("stage", "dtype"), SOURCES)
def test_what_shall_go_on_does_change(sources, stage, dtype):
    start, after = (
        torch.load(sorted((sources / name_of(stage, dtype) / tag).glob("*optim_states.pt"))[0], weights_only=False)[
            "optimizer_state_dict"
        ]
        for tag in ("start", "after")
    )
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    assert start[key]["param_groups"][0]["lr"] < after[key]["param_groups"][0]["lr"]
    assert start[key]["state"][0]["step"] < after[key]["state"][0]["step"]
    assert (dtype == "fp16") == (start["loss_scaler"].cur_scale < after["loss_scaler"].cur_scale)
    assert len(set(losses(sources / name_of(stage, dtype)))) == 2 * AFTER


@pytest.mark.parametrize("way", ["ranks", "dcp", "universal"])
@pytest.mark.parametrize(("stage", "dtype"), SOURCES)
def test_engine_goes_on_as_if_it_had_not_been_interrupted(sources, resumed, way, stage, dtype):
    expected, found = sources / name_of(stage, dtype), resumed / name_of(stage, dtype) / way
    if (way, stage) == ("universal", 3):
        # of a universal checkpoint ZeRO 3 takes the settings of the first group for all of them, and one step for all, which each
        # of them then counts: so DeepSpeed does not go on from its own as before, and ours is to be equal to that
        expected = resumed / name_of(stage, dtype) / "theirs"
    assert losses(found) == losses(expected)
    assert differing_files(expected / "after", found / "after") == []


@pytest.mark.parametrize("name", VARIANTS)
def test_engine_of_other_settings_goes_on_too(sources, resumed, name):
    assert losses(resumed / name / "ranks") == losses(sources / name)
    assert differing_files(sources / name / "after", resumed / name / "ranks" / "after") == []


@pytest.mark.parametrize(("stage", "dtype"), [(s, d) for s, d in SOURCES if s < 3])
def test_universal_checkpoint_holds_for_each_trained_parameter_what_ds_to_universal_makes(resumed, stage, dtype):
    ours, theirs = resumed / name_of(stage, dtype) / "universal" / "start", resumed / name_of(stage, dtype) / "theirs" / "start"
    not_trained = (
        "zero/count/",
        "zero/scale/",
        "zero/frozen.",
        "zero/head.weight/",
    )  # theirs has these too, and no engine reads them
    assert [p for p in differing_files(theirs, ours, "zero/*/*.pt") if not p.startswith(not_trained)] == []


@pytest.mark.parametrize(("stage", "dtype"), [(s, d) for s, d in WIDE if s < 3])
def test_engine_of_more_ranks_goes_on_as_from_a_universal_checkpoint_of_its_own(resumed, stage, dtype):
    ours, theirs = resumed / name_of(stage, dtype) / "three", resumed / name_of(stage, dtype) / "theirs-three"
    assert losses(ours) == losses(theirs)
    assert differing_files(theirs / "after", ours / "after") == []


@pytest.mark.parametrize(("stage", "dtype"), WIDE)
def test_engine_of_twice_the_ranks_has_the_very_losses(sources, resumed, stage, dtype):
    assert losses(resumed / name_of(stage, dtype) / "four") == losses(sources / name_of(stage, dtype))


@pytest.mark.parametrize("way", ["three", "stage"])
@pytest.mark.parametrize(("stage", "dtype"), WIDE)
def test_engine_of_three_ranks_or_another_stage_differs_by_rounding_alone(sources, resumed, way, stage, dtype):
    expected, found = losses(sources / name_of(stage, dtype)), losses(resumed / name_of(stage, dtype) / way)
    assert found[:2] == expected[:2]  # both batches of the first step, before anything is put together
    assert found == pytest.approx(expected, rel=ROUNDING[dtype])


@pytest.mark.parametrize("way", ["ranks", "dcp", "universal", "stage", "three", "four"])
@pytest.mark.parametrize(("stage", "dtype"), WIDE)
def test_engine_holds_the_same_parameters_and_optimizer_state(sources, resumed, way, stage, dtype):
    before = states_of(sources / name_of(stage, dtype) / "start")
    assert len(before) >= 24
    assert differing(before, states_of(resumed / name_of(stage, dtype) / way / "again")) == []


@pytest.mark.parametrize("way", ["stage", "three", "four", "dcp"])
@pytest.mark.parametrize(("stage", "dtype"), WIDE)
def test_zero_to_fp32_reads_what_was_written(sources, resumed, way, stage, dtype):
    before = fp32_of(sources / name_of(stage, dtype) / "start")
    if (way, stage) == ("stage", 2):  # of ZeRO 1 it leaves out what is frozen
        before = {n: t for n, t in before.items() if not n.startswith("frozen.")}
    assert differing(before, fp32_of(resumed / name_of(stage, dtype) / way / "start")) == []


@pytest.mark.parametrize("stage", STAGES)
def test_universal_checkpoint_that_was_written_is_the_same_checkpoint(sources, resumed, stage):
    tag = resumed / name_of(stage, "bf16") / "universal" / "start"
    result = validate(str(tag), against=str(sources / name_of(stage, "bf16") / "start"), allow_missing=True)
    assert ([], "ok") == ([f for f in result.findings if f.is_error], result.verdict)
