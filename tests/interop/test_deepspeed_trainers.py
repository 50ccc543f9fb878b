"""HF Trainer and accelerate with DeepSpeed, on CPU ranks: their directories are read, and they go on from a tag that we wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpttools.layouts import open_snapshot
from ckpttools.model import Mesh
from ckpttools.operations.convert import consolidate
from ckpttools.operations.reshard import reshard
from ckpttools.operations.targets import Details
from ckpttools.operations.validate import validate

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs deepspeed")
pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("transformers", reason="needs transformers")

from tests.interop.deepspeed_files import run_ranks

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parent / "deepspeed_trainers.py"
SAVED, STEPS = 2, 5
WAYS = [(kind, stage) for kind in ("trainer", "accelerate") for stage in (2, 3)]
TAG = {"trainer": f"global_step{SAVED}", "accelerate": "pytorch_model"}


def run_of(kind: str, stage: int, directory: Path) -> dict[str, object]:
    numbers = {"ranks": 2, "stage": stage, "steps": STEPS, "save": SAVED}
    return {**numbers, "kind": kind, "directory": str(directory), "losses": f"{directory}.json"}


def checkpoint_of(kind: str, directory: Path) -> Path:
    return directory / f"checkpoint-{SAVED}" if kind == "trainer" else directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    run_ranks(directory, *[run_of(k, s, directory / f"{k}{s}") for k, s in WAYS], script=SCRIPT)
    return directory


@pytest.fixture(scope="module")
def resumed(trained, tmp_path_factory) -> Path:
    """Each directory with another tag in the place of its own: the same for three ranks, and from there for two."""
    directory = tmp_path_factory.mktemp("resumed")
    runs = []
    for kind, stage in WAYS:
        source, out = checkpoint_of(kind, trained / f"{kind}{stage}"), directory / f"{kind}{stage}-start"
        shutil.copytree(source, out)
        shutil.rmtree(out / TAG[kind])
        between, details = directory / f"{kind}{stage}-three", Details(zero=stage)
        reshard(str(source / TAG[kind]), str(between), target="deepspeed", mesh=Mesh.parse("dp=3"), details=details)
        reshard(str(between), str(out / TAG[kind]), target="deepspeed", mesh=Mesh.parse("dp=2"), details=details)
        runs.append({**run_of(kind, stage, directory / f"{kind}{stage}"), "resume": str(out)})
    run_ranks(directory, *runs, script=SCRIPT)
    return directory


@pytest.mark.parametrize(("kind", "stage"), WAYS)
def test_it_goes_on_as_if_it_had_not_been_interrupted(trained, resumed, kind, stage):
    expected = json.loads((trained / f"{kind}{stage}.json").read_text())[SAVED:]
    assert len(expected) == STEPS - SAVED
    assert expected == json.loads((resumed / f"{kind}{stage}.json").read_text())


@pytest.mark.parametrize(("kind", "stage"), WAYS)
def test_its_tag_is_read_and_whole(trained, kind, stage):
    tag = checkpoint_of(kind, trained / f"{kind}{stage}") / TAG[kind]
    result = validate(str(tag))
    assert ([], "ok") == ([f for f in result.findings if f.is_error], result.verdict)
    names = {t.name for t in open_snapshot(str(tag)).checkpoint}
    assert {"lm_head.weight", "optimizer.state.model.embed_tokens.weight.exp_avg"} <= names


@pytest.mark.parametrize(("kind", "stage"), WAYS)
def test_its_directory_is_the_tag_and_what_lies_beside_it(trained, kind, stage):
    directory = checkpoint_of(kind, trained / f"{kind}{stage}")
    checkpoint = open_snapshot(str(directory)).checkpoint
    has_weights = (kind, stage) == ("trainer", 2)  # exported ones, which then are the model
    assert ("safetensors" if has_weights else "deepspeed") == checkpoint.layout
    families = {t.family for t in checkpoint.tensors} | {o.family for o in checkpoint.objects}
    assert {"model", "optimizer", "scheduler", "rng_state"} <= families
    assert "ok" == validate(str(directory)).verdict


def test_consolidate_takes_the_config_and_the_tokenizer_along(trained, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    consolidate(str(checkpoint_of("trainer", trained / "trainer3")), str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 64 == len(AutoTokenizer.from_pretrained(tmp_path / "out"))
