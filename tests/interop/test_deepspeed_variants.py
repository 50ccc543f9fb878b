"""Rarer ways to train with DeepSpeed (pipelines, experts, AutoEP, AutoTP, 8-bit state): what we read is what was in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttools.gather import Gather
from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs deepspeed")
pytest.importorskip("transformers", reason="needs transformers")

from tests.interop.deepspeed_files import run_ranks

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parent / "deepspeed_variants.py"
TAG = "global_step2"

VARIANTS: dict[str, dict[str, Any]] = {
    "pipe-zero1-bf16": {"kind": "pipe", "stage": 1, "dtype": "bf16"},
    "pipe-zero0-bf16": {"kind": "pipe", "stage": 0, "dtype": "bf16", "ties": False},
    "pipe-zero0-fp16": {"kind": "pipe", "stage": 0, "dtype": "fp16", "ties": False},
    "experts-zero1-fp32": {"kind": "experts", "stage": 1, "dtype": "fp32"},
    "experts-zero2-bf16": {"kind": "experts", "stage": 2, "dtype": "bf16"},
    "autoep-zero1-bf16": {"kind": "autoep", "stage": 1, "dtype": "bf16"},
    "autoep-zero3-bf16": {"kind": "autoep", "stage": 3, "dtype": "bf16"},
    "autotp-codegen": {"kind": "autotp", "stage": 1, "dtype": "bf16", "model": "codegen"},
    "autotp-bigcode": {"kind": "autotp", "stage": 1, "dtype": "bf16", "model": "bigcode"},
    "zero0-bf16-3groups": {"kind": "plain", "stage": 0, "dtype": "bf16", "groups": 3},
    "zero1-gradients-in-fp32": {
        "kind": "plain",
        "stage": 1,
        "dtype": "bf16",
        "groups": 3,
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "zero1-8bit": {"kind": "plain", "stage": 1, "dtype": "bf16", "groups": 2, "is_8bit": True},
    "zero3-8bit": {"kind": "plain", "stage": 3, "dtype": "bf16", "groups": 2, "is_8bit": True},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Every variant, trained on two ranks of the real engine."""
    directory = tmp_path_factory.mktemp("variants")
    runs = [{**options, "ranks": 2, "directory": str(directory / name)} for name, options in VARIANTS.items()]
    run_ranks(directory, *runs, script=SCRIPT)
    return directory


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype)[6:], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read(tag: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    snapshot = open_snapshot(str(tag), is_located=True)
    gather = Gather(snapshot.source, memory_bytes=1 << 24)
    return {t.name: (t.spec.dtype.name, t.spec.shape, b"".join(map(bytes, gather.stream(t)))) for t in snapshot.checkpoint}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_was_in_memory_is_what_is_read(trained, variant):
    tag, options = trained / variant / TAG, VARIANTS[variant]
    truth, found = torch.load(trained / variant / "truth.pt", weights_only=True), read(tag)
    if options["stage"] == 3:  # there the weight is the master
        weights = {name: truth["states"][name, "fp32"] for name in truth["weights"]}
        assert {n for n, t in weights.items() if bits(t.to(torch.bfloat16)) != bits(truth["weights"][n])} == set()
    else:
        weights = truth["weights"]
    states = {f"optimizer.state.{name}.{key}": t for (name, key), t in truth["states"].items()}
    assert len(states) >= len(weights)
    assert {name for name, t in {**weights, **states}.items() if found.get(name) != bits(t)} == set()
    result = validate(str(tag))
    assert ([], "ok") == ([f for f in result.findings if f.is_error], result.verdict)


@pytest.mark.parametrize(("variant", "tables"), [("zero1-8bit", 8), ("zero3-8bit", 8)])
def test_state_that_is_not_per_element_is_kept_by_group_and_rank(trained, variant, tables):
    names = [n for n in read(trained / variant / TAG) if n.startswith("optimizer.state.group_")]
    assert (tables, True) == (len(names), "optimizer.state.group_1.rank_1_0.qmap1" in names)
