"""Checkpoints of the real DeepSpeed engine, trained here on CPU ranks: what we read is what DeepSpeed's own tools give."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpttools.gather import Gather
from ckpttools.layouts import open_snapshot
from ckpttools.model import Mesh
from ckpttools.operations.convert import consolidate
from ckpttools.operations.reshard import reshard
from ckpttools.operations.select import Choice
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate
from tests.fixture_cases import cases

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs deepspeed")

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parent / "deepspeed_ranks.py"

VARIANTS: dict[str, dict[str, Any]] = {
    "zero1-bf16-3": {"ranks": 3, "stage": 1, "dtype": "bf16"},
    "zero2-bf16-roundrobin-3": {"ranks": 3, "stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}},
    "zero2-elastic-3": {"ranks": 3, "stage": 2, "dtype": "bf16", "zero": {"elastic_checkpoint": True}},
    "zero3-bf16-3": {"ranks": 3, "stage": 3, "dtype": "bf16"},
    "zero1-fp32-1group": {"ranks": 2, "stage": 1, "dtype": "fp32", "groups": 1},
    "zero2-fp16": {"ranks": 2, "stage": 2, "dtype": "fp16"},
    "zero2-bf16-aligned": {"ranks": 2, "stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}},
    "zero3-subgroups": {"ranks": 2, "stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 300}},
    "zero3-fp32-untied": {"ranks": 2, "stage": 3, "dtype": "fp32", "tied": False, "groups": 1},
    "zero1-bf16-small": {"ranks": 2, "stage": 1, "dtype": "bf16", "hidden": 5},
}
STAGES = (1, 2, 3)


def run_ranks(directory: Path, *runs: dict[str, Any]) -> None:
    """Train on ranks of the engine, one run after the other; fails with what a rank said."""
    file = directory / "options.json"
    file.write_text(json.dumps([{"directory": str(directory / "run"), **options} for options in runs]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (ranks,) = {options["ranks"] for options in runs}
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(file)],
            env={**base, "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]
    said = [p.communicate(timeout=1800)[0] for p in started]
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Every variant, trained for three steps and saved by the real engine; beside it, what the engine holds itself."""
    directory = tmp_path_factory.mktemp("deepspeed")
    for ranks in (3, 2):
        runs = [
            {**options, "directory": str(directory / name), "save": "global_step3", "steps": 3}
            for name, options in VARIANTS.items()
            if options["ranks"] == ranks
        ]
        for stage in STAGES if ranks == 2 else ():
            run = {"ranks": 2, "stage": stage, "directory": str(directory / f"stage{stage}")}
            runs.append({**run, "save": "global_step3", "steps": 3, "state": str(directory / f"stage{stage}.pt")})
        run_ranks(directory, *runs)
    return directory


def fp32_of(tag: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own script makes of a tag."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(tag.parent), tag=tag.name)
    return {n: t.float() if t.is_floating_point() else t for n, t in found.items()}  # as its command line does


def consolidated(tag: Path, out: Path, **choice: Any) -> dict[str, torch.Tensor]:
    consolidate(str(tag), str(out), choice=Choice(is_expanding_tied=True, **choice))
    return load_file(out / "model.safetensors")


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, t in expected.items() if n not in found or bits(found[n]) != bits(t)]


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


def states_of(tag: Path) -> dict[str, torch.Tensor]:
    """The optimizer's vectors, by name without the family."""
    snapshot = open_snapshot(str(tag), is_located=True)
    gather, found = Gather(snapshot.source, memory_bytes=1 << 24), {}
    for entry in snapshot.checkpoint:
        if entry.name.startswith("optimizer.state.") and entry.spec.dtype.name == "float32" and entry.spec.shape:
            data = b"".join(bytes(v) for v in gather.stream(entry))
            name = entry.name.removeprefix("optimizer.state.")
            found[name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(entry.spec.shape)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_that_of_the_engine(trained, stage):
    expected = torch.load(trained / f"stage{stage}.pt", weights_only=True)
    assert len(expected) >= 8
    assert differing(expected, states_of(trained / f"stage{stage}/global_step3")) == []


RESHARDED = [(1, 1), (2, 2), (3, 3), (1, 3), (3, 2)]
"""(ZeRO stage that was saved, stage that is written)."""


@pytest.fixture(scope="module")
def resumed(trained, tmp_path_factory) -> Path:
    """Each resharding from 2 to 3 ranks, loaded by the real engine: saved again at once, and trained for two steps more."""
    directory = tmp_path_factory.mktemp("resumed")
    runs = []
    for source, stage in RESHARDED:
        name = f"{source}to{stage}"
        tag = trained / f"stage{source}" / "global_step3"
        reshard(
            str(tag),
            str(directory / name / "global_step3"),
            target="deepspeed",
            mesh=Mesh.parse("dp=3"),
            details=Details(zero=stage),
        )
        run = {"ranks": 3, "stage": stage, "directory": str(directory / name), "load": "global_step3"}
        runs.append({**run, "steps": 0, "save": "again"})
        runs.append({**run, "steps": 2, "losses": str(directory / f"{name}.json")})
    for stage in STAGES:
        tag = trained / f"stage{stage}" / "global_step3"
        name = f"universal{stage}"
        out = str(directory / name / "global_step3")
        reshard(str(tag), out, target="deepspeed-universal", mesh=Mesh.parse("dp=1"), details=Details(zero=stage))
        run = {"ranks": 3, "stage": stage, "directory": str(directory / name), "load": "global_step3", "universal": True}
        runs.append({**run, "steps": 0, "save": "again"})
        runs.append({**run, "steps": 2, "losses": str(directory / f"{name}.json")})
    run_ranks(directory, *runs)
    baseline = [
        {
            "ranks": 2,
            "stage": stage,
            "directory": str(trained / f"stage{stage}"),
            "load": "global_step3",
            "steps": 2,
            "losses": str(directory / f"{stage}.json"),
        }
        for stage in STAGES
    ]
    run_ranks(directory, *baseline)
    return directory


@pytest.mark.parametrize(("source", "stage"), RESHARDED)
def test_engine_resumes_from_what_was_resharded_with_the_same_parameters_and_optimizer_state(trained, resumed, source, stage):
    before = states_of(trained / f"stage{source}" / "global_step3")
    assert len(before) >= 24
    assert differing(before, states_of(resumed / f"{source}to{stage}" / "again")) == []


@pytest.mark.parametrize(("source", "stage"), RESHARDED)
def test_engine_goes_on_with_the_loss_that_it_would_have_had(resumed, source, stage):
    expected = json.loads((resumed / f"{source}.json").read_text())
    found = json.loads((resumed / f"{source}to{stage}.json").read_text())
    if (source == 3) == (stage == 3):  # ZeRO 3 has a linear layer of its own, which rounds after the product
        assert found[0] == expected[0]
    assert found == pytest.approx(expected, rel=1e-2)  # the mean over three ranks is rounded otherwise than that over two


@pytest.mark.parametrize(("source", "stage"), RESHARDED)
def test_zero_to_fp32_reads_what_was_resharded(trained, resumed, source, stage):
    before = fp32_of(trained / f"stage{source}" / "global_step3")
    assert differing(before, fp32_of(resumed / f"{source}to{stage}" / "global_step3")) == []


@pytest.mark.parametrize("stage", STAGES)
def test_engine_resumes_from_a_universal_checkpoint_that_was_written(trained, resumed, stage):
    before = states_of(trained / f"stage{stage}" / "global_step3")
    assert differing(before, states_of(resumed / f"universal{stage}" / "again")) == []
    expected = json.loads((resumed / f"{stage}.json").read_text())
    assert json.loads((resumed / f"universal{stage}.json").read_text()) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_universal_checkpoint_that_was_written_is_the_same_checkpoint(trained, resumed, stage):
    tag = resumed / f"universal{stage}" / "global_step3"
    result = validate(str(tag), against=str(trained / f"stage{stage}" / "global_step3"), allow_missing=True)
    assert ([], "ok") == ([f for f in result.findings if f.is_error], result.verdict)
