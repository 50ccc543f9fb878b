"""Meshes with tensor, pipeline and expert parallelism, and engines without ZeRO: the real engine resumes from what was written.

Each checkpoint is trained and saved by the engine, laid out for another mesh, loaded there by the engine and saved again at once,
and laid out for its first mesh: what the engine holds is the same everywhere, and at home it goes on with the same losses.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttools.layouts import open_snapshot
from ckpttools.layouts.deepspeed.write.stages import balanced_bounds, uniform_bounds
from ckpttools.model import Mesh
from ckpttools.operations.place import Placing
from ckpttools.operations.reshard import reshard
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES
from tests.interop.rank_processes import run_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs deepspeed")

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parent / "deepspeed_mesh_ranks.py"
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With these the engine takes its bf16 optimizer, which has a class of its own."""


@dataclass(frozen=True)
class Engine:
    """An engine that trains on a mesh."""

    kind: str
    mesh: str
    stage: int
    dtype: str = "bf16"
    config: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    """Of each stage, where a source does not tell."""

    @property
    def options(self) -> dict[str, Any]:
        sizes = dict(Mesh.parse(self.mesh).axes)
        ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
        axes = {axis: sizes[axis] for axis in ("tp", "pp", "ep") if axis in sizes}
        return {"kind": self.kind, "ranks": ranks, "stage": self.stage, "dtype": self.dtype, "config": self.config, **axes}

    def written(self, source: Path, out: Path, *, to: str = "deepspeed") -> Path:
        details, placing = Details(zero=self.stage), Placing(stage_layers=self.layers)
        reshard(str(source), str(out), target=to, mesh=Mesh.parse(self.mesh), details=details, placing=placing)
        return out


HOMES = {
    "tensor": Engine("tensor", "dp=1,tp=2", 1),
    "tensor3": Engine("tensor", "dp=1,tp=2", 3),
    "pipe": Engine("pipe", "pp=2,dp=1", 1, layers=(3, 4)),
    "pipe0": Engine("pipe", "pp=2,dp=1", 0, "fp32"),  # with bf16 DeepSpeed cannot load what it saved
    "pipe-bf16opt": Engine("pipe", "pp=2,dp=1", 1, config=FP32_GRADIENTS, layers=(3, 4)),
    "pipe-tensor": Engine("pipe", "pp=2,dp=1,tp=2", 1, layers=(3, 4)),
    "moe": Engine("moe", "dp=2,ep=2", 2),
    "moe0": Engine("moe", "dp=2,ep=2", 0, "fp32"),
    "zero0-bf16": Engine("tensor", "dp=2", 0),
    "zero0-fp16": Engine("tensor", "dp=2", 0, "fp16"),
    "zero0-fp32": Engine("tensor", "dp=2", 0, "fp32"),
}
AWAY = [
    ("tensor", Engine("tensor", "dp=2,tp=2", 1)),
    ("tensor", Engine("tensor", "dp=2", 2)),
    ("tensor", Engine("tensor", "dp=1,tp=4", 1)),
    ("tensor", Engine("tensor", "dp=1,tp=2", 0)),
    ("tensor3", Engine("tensor", "dp=2,tp=2", 3)),
    ("tensor3", Engine("tensor", "dp=2", 1)),
    ("pipe", Engine("pipe", "pp=2,dp=2", 1)),
    ("pipe", Engine("pipe", "pp=1,dp=2", 1)),
    ("pipe", Engine("pipe", "pp=4,dp=1", 1, layers=(2, 1, 1, 3))),
    ("pipe0", Engine("pipe", "pp=2,dp=2", 1, "fp32")),
    ("pipe-bf16opt", Engine("pipe", "pp=2,dp=2", 1, config=FP32_GRADIENTS)),
    ("pipe-tensor", Engine("pipe", "pp=2,dp=2", 1)),
    ("pipe-tensor", Engine("pipe", "pp=1,dp=2,tp=2", 1, config=FP32_GRADIENTS)),
    ("moe", Engine("moe", "dp=4,ep=2", 2)),
    ("moe", Engine("moe", "dp=4,ep=4", 1)),
    ("moe", Engine("moe", "dp=2", 2)),
    ("moe", Engine("moe", "dp=2,ep=2", 0)),
    ("moe0", Engine("moe", "dp=4,ep=2", 0, "fp32")),
    ("moe0", Engine("moe", "dp=2", 1, "fp32")),
    ("zero0-bf16", Engine("tensor", "dp=4", 1)),
    ("zero0-bf16", Engine("tensor", "dp=2", 3)),
    ("zero0-fp16", Engine("tensor", "dp=2", 2, "fp16")),
    ("zero0-fp32", Engine("tensor", "dp=2", 2, "fp32")),
]
UNIVERSAL = [
    ("tensor", Engine("tensor", "dp=2,tp=2", 1)),
    ("tensor", Engine("tensor", "dp=2", 2)),
    ("pipe", Engine("pipe", "pp=2,dp=2", 1)),
    ("pipe-tensor", Engine("pipe", "pp=2,dp=1,tp=2", 1)),
]


def named(pair: tuple[str, Engine]) -> str:
    source, engine = pair
    return f"{source}-to-{engine.mesh.replace('=', '').replace(',', '')}-zero{engine.stage}"


def run(directory: Path, runs: list[dict[str, Any]]) -> None:
    """All runs, in as many processes as each needs, those of one number together."""
    for ranks in sorted({options["ranks"] for options in runs}):
        run_ranks(SCRIPT, directory, [options for options in runs if options["ranks"] == ranks])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Every home, trained for three steps and saved; and two steps more from there."""
    directory = tmp_path_factory.mktemp("trained")
    runs = []
    for name, home in HOMES.items():
        own = {**home.options, "directory": str(directory / name)}
        runs.append({**own, "steps": 3, "save": "global_step3"})
        runs.append({**own, "load": "global_step3", "steps": 2, "losses": str(directory / f"{name}.json")})
    run(directory, runs)
    return directory


@pytest.fixture(scope="module")
def moved(trained, tmp_path_factory) -> Path:
    """Every home laid out for each other engine, loaded there, saved again; laid out for home again, and trained on there."""
    directory = tmp_path_factory.mktemp("moved")
    runs = []
    for name, engine in AWAY:
        own = directory / named((name, engine))
        engine.written(trained / name / "global_step3", own / "global_step3")
        runs.append({**engine.options, "directory": str(own), "load": "global_step3", "save": "again"})
    run(directory, runs)
    runs = []
    for name, engine in AWAY:
        own = directory / named((name, engine))
        HOMES[name].written(own / "again", own / "home")
        losses = str(own / "losses.json")
        runs.append({**HOMES[name].options, "directory": str(own), "load": "home", "steps": 2, "losses": losses})
    run(directory, runs)
    return directory


def differences(one: Path, other: Path, *, is_stage3: bool = False) -> list[str]:
    """What is not the same in two snapshots; weights of ZeRO 3 are their masters, and so of another dtype."""
    found = [f for f in validate(str(one), against=str(other), allow_missing=True).findings if f.is_error]
    if is_stage3:
        found = [f for f in found if f.code != "dtype-mismatch" or f.where.startswith("optimizer.")]
    return [f"{f.code} {f.where}: {f.found}" for f in found]


def masters(tag: Path) -> set[str]:
    return {t.name for t in open_snapshot(str(tag)).checkpoint if t.name.startswith("optimizer.state.") and t.spec.shape}


@pytest.mark.parametrize("pair", AWAY, ids=named)
def test_engine_holds_the_same_parameters_and_optimizer_state(trained, moved, pair):
    source, again = trained / pair[0] / "global_step3", moved / named(pair) / "again"
    is_stage3 = 3 in (pair[1].stage, HOMES[pair[0]].stage)
    assert [] == differences(moved / named(pair) / "global_step3", source, is_stage3=is_stage3)
    assert [] == differences(again, source, is_stage3=is_stage3)
    assert len(masters(source) & masters(again)) >= 12


@pytest.mark.parametrize("pair", AWAY, ids=named)
def test_engine_at_home_goes_on_with_the_same_losses(trained, moved, pair):
    expected = json.loads((trained / f"{pair[0]}.json").read_text())
    assert expected == json.loads((moved / named(pair) / "losses.json").read_text())


@pytest.fixture(scope="module")
def universal(trained, tmp_path_factory) -> Path:
    """Universal checkpoints of them, each loaded by another engine and saved again."""
    directory = tmp_path_factory.mktemp("universal")
    runs = []
    for name, engine in UNIVERSAL:
        own = directory / named((name, engine))
        engine.written(trained / name / "global_step3", own / "global_step3", to="deepspeed-universal")
        runs.append({**engine.options, "directory": str(own), "load": "global_step3", "universal": True, "save": "again"})
    run(directory, runs)
    return directory


@pytest.mark.parametrize("pair", UNIVERSAL, ids=named)
def test_engine_resumes_from_a_universal_checkpoint(trained, universal, pair):
    """But for the rows that pad the vocabulary, which such checkpoints leave out and the engine fills with zeros."""
    before = open_snapshot(str(trained / pair[0] / "global_step3"), is_located=True)
    after = open_snapshot(str(universal / named(pair) / "again"), is_located=True)
    expected, found = values_of(before), values_of(after)
    for name, tensor in expected.items():
        if "word_embeddings" in name and tensor.dim() == 2:
            expected[name] = tensor[:21]
            assert not found[name][21:].any() or not name.startswith("optimizer.")
            found[name] = found[name][:21]
    assert [] == [n for n in expected if n.startswith("optimizer.") and not torch.equal(expected[n], found[n])]
    assert len(expected) >= 12


def values_of(snapshot: Any) -> dict[str, torch.Tensor]:
    """Vectors of the optimizer by name."""
    from ckpttools.gather import Gather

    gather, found = Gather(snapshot.source, memory_bytes=1 << 24), {}
    for entry in snapshot.checkpoint:
        if entry.name.startswith("optimizer.state.") and entry.spec.dtype.name == "float32" and entry.spec.shape:
            data = b"".join(bytes(v) for v in gather.stream(entry))
            found[entry.name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(entry.spec.shape)
    return found


CONVERTED = [("mp2_dp2_zero1_bf16", "tp=2"), ("bloom_tp2_pp2", "pp=2,tp=2"), ("pipe2_dp2_zero1_bf16", "pp=2")]


@pytest.mark.parametrize(("case", "mesh"), CONVERTED, ids=[c for c, _ in CONVERTED])
def test_universal_checkpoint_is_what_ds_to_universal_writes(case, mesh, tmp_path):
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    source = next(p for p in sorted((FIXTURES / "deepspeed" / case / "ckpt").iterdir()) if p.is_dir())
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": False}
    ds_to_universal.main(
        SimpleNamespace(input_folder=str(source), output_folder=str(theirs), inject_missing_state=True, **options)
    )
    Engine("", mesh, 1).written(source, ours, to="deepspeed-universal")
    expected = {p.relative_to(theirs) for p in theirs.rglob("*.pt")}
    buffers = {p for p in expected if p.parent.name in ("inv_freq",)}  # their float32 copies of what is not trained
    # of a tied module it takes the copy of the last stage, whose further parameters no gradient reaches
    stale = {p for p in expected if p.parent.name.startswith("tied_modules.embed.word_embeddings.norm.")}
    assert expected - buffers <= {p.relative_to(ours) for p in ours.rglob("*.pt")}
    for path in sorted(expected - buffers - stale):
        if path.parts[0] == "zero" and path.name != "optimizer_state.pt":
            one, other = (torch.load(d / path, weights_only=False) for d in (theirs, ours))
            assert type(one) is type(other)
            if isinstance(one, dict):
                assert one.keys() == other.keys(), path
                assert torch.equal(one.pop("param"), other.pop("param")), path
            assert one == other, path


@pytest.mark.parametrize("seed", range(40))
def test_layers_are_divided_as_deepspeed_divides_them(seed):
    from random import Random

    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    random = Random(seed)
    weights = [random.choice((0, 1, 1, 7, random.randrange(100))) for _ in range(random.randrange(1, 14))]
    for stages in range(1, 6):
        assert list(map(int, partition_balanced(weights, stages))) == balanced_bounds(weights, stages)
        assert list(map(int, partition_uniform(len(weights), stages))) == uniform_bounds(len(weights), stages)
