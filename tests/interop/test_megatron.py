"""What reshard writes as torch_dist, real megatron-core loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttools.errors import ConversionError
from ckpttools.model import Mesh
from ckpttools.operations.reshard import reshard
from ckpttools.operations.sealing import hash_tensors
from ckpttools.operations.select import Choice
from ckpttools.operations.validate import validate
from tests.fixture_cases import Case
from tests.interop import megatron_load
from tests.layouts.megatron_ranks import Model, Ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, which loads what we write")

pytestmark = pytest.mark.interop


def load(*arguments: str) -> dict[str, Any]:
    """What the script answers."""
    command = [sys.executable, megatron_load.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("ANSWER "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "mesh"),
    [
        ("tdist_tp2_dp2_distopt_fully_reshardable", "tp=2,pp=2"),
        ("tdist_tp2_dp2_flattened", "tp=1"),
        ("tdist_ep2_moe", "ep=4,tp=2"),
        ("zarr_tp2_pp2", "tp=2,dp=2"),
        ("tdist_pp2_tied_gelu_bias", "fsdp=3"),
    ],
)
def test_megatron_core_loads_every_tensor_and_the_shared_state(source: str, mesh: str, tmp_path: Path) -> None:
    (target,) = Case("megatron", source).targets()
    reshard(str(target.path), str(tmp_path / "out"), target="megatron-dist", mesh=Mesh.parse(mesh))
    answer = load(str(tmp_path / "out"), "plain")
    assert [] == [n for n, e in target.tensors.items() if answer["tensors"].get(n) not in e.digests]
    assert {"args", "iteration"} <= set(answer["common"])


@pytest.mark.slow
def test_a_model_of_megatron_core_loads_it(tmp_path: Path) -> None:
    (target,) = Case("megatron", "tdist_tp2_model_only").targets()
    reshard(str(target.path), str(tmp_path / "out"), target="megatron-dist", mesh=Mesh.parse("tp=2,pp=2"))
    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "vocabulary": 96,
        "length": 16,
    }
    ours = load(str(tmp_path / "out"), "model", json.dumps(settings))
    theirs = load(str(target.path), "model", json.dumps(settings))
    assert ours == theirs
    assert ours == load(str(tmp_path / "out"), "model", json.dumps(settings | {"vocabulary": 128, "tokens": 96}))
    assert target.tensors["output_layer.weight"].digests == {ours["tensors"]["output_layer.weight"]}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["legacy_tp2_pp2_mcore", "legacy_tp2_mcore"])
def test_megatron_core_loads_a_legacy_checkpoint_after_it(source: str, tmp_path: Path) -> None:
    (target, *_) = Case("megatron", source).targets()
    reshard(str(target.path), str(tmp_path / "out"), target="megatron-dist", mesh=Mesh.parse("tp=2"), is_dropping=True)
    answer = load(str(tmp_path / "out"), "plain")
    assert [] == [n for n, e in target.tensors.items() if answer["tensors"].get(n) not in e.digests]
    states = {n.split(".")[2] for n in answer["tensors"] if n.startswith("optimizer.state.")}
    assert {"fp32_param", "exp_avg", "exp_avg_sq"} <= states


@pytest.mark.parametrize("source", ["legacy_tp2_pp2_mcore", "legacy_tp2_mcore"])
def test_legacy_to_torch_dist_and_back_has_one_fingerprint(source: str, tmp_path: Path) -> None:
    (target, *_) = Case("megatron", source).targets()
    reshard(str(target.path), str(tmp_path / "dist"), target="megatron-dist", mesh=Mesh.parse("tp=2,pp=2"), is_dropping=True)
    reshard(str(tmp_path / "dist"), str(tmp_path / "back"), target="megatron-legacy", mesh=Mesh.parse("tp=2"), is_dropping=True)

    def lines(path: Path) -> set[tuple[str, str]]:
        listed = hash_tensors(str(path)).tensors
        return {(t.name, t.digest) for t in listed if not t.name.startswith(("rng_state.", "common."))}

    assert lines(target.path) == lines(tmp_path / "back")


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "tp=2,pp=2,dp=2"])
def test_every_mesh_reads_back_as_the_same(mesh: str, tmp_path: Path) -> None:
    for source in ("tdist_tp2_pp2_two_iters", "zarr_tp2_pp2"):
        path = next(Case("megatron", source).targets()).path
        out = tmp_path / source
        reshard(str(path), str(out), target="megatron-dist", mesh=Mesh.parse(mesh))
        assert hash_tensors(str(path)).fingerprint == hash_tensors(str(out)).fingerprint
        assert "ok" == validate(str(out)).verdict


def test_buckets_go_to_the_model_parallel_ranks_that_wrote_them_and_to_no_others(tmp_path: Path) -> None:
    path = str(next(Case("megatron", "tdist_tp2_dp2_distopt_dp_reshardable").targets()).path)
    with pytest.raises(ConversionError, match="buckets"):
        reshard(path, str(tmp_path / "a"), target="megatron-dist", mesh=Mesh.parse("tp=2,pp=2"))
    reshard(path, str(tmp_path / "b"), target="megatron-dist", mesh=Mesh.parse("tp=2,dp=3"))
    assert hash_tensors(path).fingerprint == hash_tensors(str(tmp_path / "b")).fingerprint


RANKS = [
    pytest.param(Model(norms_have_bias=True), Ranks(tp=4, is_local=True), id="more ranks than query groups"),
    pytest.param(Model(norms_have_bias=True, groups=1), Ranks(tp=2, is_local=True), id="one query group"),
    pytest.param(Model(norms_have_bias=True, is_tied=True), Ranks(tp=2, pp=2, is_local=True), id="tied, in stages"),
    pytest.param(Model(norms_have_bias=True, experts=4), Ranks(tp=2, ep=2, is_local=True), id="experts"),
    pytest.param(
        Model(norms_have_bias=True, experts=4), Ranks(tp=2, ep=2, is_local=True, experts="grouped"), id="experts in one matrix"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), RANKS)
def test_each_rank_of_a_model_of_megatron_core_takes_its_legacy_file(model: Model, mesh: Ranks, tmp_path: Path) -> None:
    Ranks(is_local=True, experts=mesh.experts).write(model, tmp_path / "whole")
    axes = ",".join(f"{axis}={getattr(mesh, axis)}" for axis in ("pp", "ep", "tp"))
    choice = Choice(is_weights_only=True)
    reshard(str(tmp_path / "whole"), str(tmp_path / "out"), target="megatron-legacy", mesh=Mesh.parse(axes), choice=choice)
    wanted = mesh.write(model, tmp_path / "wanted")
    count = mesh.tp * mesh.pp * mesh.ep
    for rank in (0, count - 1):
        tp, ep, pp = rank % mesh.tp, rank // mesh.tp % mesh.ep, rank // (mesh.tp * mesh.ep)
        file = f"{mesh.directory(tp, pp, ep)}/model_optim_rng.pt"
        answer = load(str(tmp_path / "out" / file), "rank", json.dumps(_settings(model, mesh) | {"ranks": [rank, *mesh.sizes]}))
        state = torch.load(wanted / file, weights_only=False)["model"]
        assert {name: megatron_load.digest(tensor) for name, tensor in state.items()} == answer["tensors"]


def _settings(model: Model, mesh: Ranks) -> dict[str, object]:
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups,
        "gated_linear_unit": model.is_gated,
        "add_bias_linear": model.has_bias,
        "num_moe_experts": model.experts or None,
        "moe_grouped_gemm": mesh.experts == "grouped",
        "is_tied": model.is_tied,
        "vocabulary": model.vocab,
        "length": 16,
    }
