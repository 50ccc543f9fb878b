"""Real Megatron checkpoints under transformers' names: the tensors that the truth computed from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttools.operations.convert import consolidate
from ckpttools.operations.naming import Naming
from ckpttools.operations.sealing import hash_tensors
from tests.fixture_cases import Case, cases

NAMED = [
    (case, step)
    for case in cases("megatron", damaged=False)
    for step, entry in case.truth["snapshots"].items()
    if entry.get("hf_llama_names") and any("mlp.gate_proj" in name for name in entry["hf_llama_names"])
]


@pytest.mark.parametrize(("case", "step"), NAMED, ids=lambda v: v.name if isinstance(v, Case) else v)
def test_megatron_tensors_have_the_values_of_their_names_in_transformers(case: Case, step: str, tmp_path: Path) -> None:
    consolidate(str(case.checkpoint / step), str(tmp_path / "out"), naming=Naming(("hf",)))
    found = {t.name: (t.digest, tuple(t.shape)) for t in hash_tensors(str(tmp_path / "out"), algorithm="sha256").tensors}
    wanted = {n: (e["sha256"], tuple(e["shape"])) for n, e in case.truth["snapshots"][step]["hf_llama_names"].items()}
    assert {n: found.get(n) for n in wanted} == wanted


def test_there_are_many_such_snapshots() -> None:
    assert len(NAMED) >= 9
