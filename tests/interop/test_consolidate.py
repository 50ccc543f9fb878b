"""What `consolidate` writes is loaded by the tools that users load it with, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES, Case, Expected, cases

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch", reason="needs torch, which loads what we write")
Run = Callable[..., Answer]

DCP = [c for c in cases("torch", damaged=False) if c.truth["kind"] in ("dcp", "accelerate-fsdp", "per-rank-dtensor", "dcp-hf")]
HF = [c for c in cases("torch", damaged=False) if c.truth["kind"] == "hf"]


def sha256(tensor: Any) -> str:
    """Of the row-major bytes of a tensor, whatever its dtype."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def described(tensor: Any) -> tuple[str, tuple[int, ...], str]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sha256(tensor)


def holds(loaded: dict[str, Any], wanted: dict[str, Expected]) -> list[str]:
    """Names of the truth that what was loaded lacks or has otherwise; families may stand in front of names."""
    by_tail: dict[str, list[Any]] = {}
    for name, tensor in loaded.items():
        keys = name.split(".")
        for i in range(len(keys)):
            by_tail.setdefault(".".join(keys[i:]), []).append(described(tensor))
    missing = []
    for name, expected in wanted.items():
        found = by_tail.get(name, []) + by_tail.get(name.partition(".")[2], [])
        if not any((d, s) == (expected.dtype, expected.shape) and h in expected.digests for d, s, h in found):
            missing.append(name)
    return missing


def flattened(value: object, prefix: str = "") -> dict[str, Any]:
    """The tensors of a nested value by dotted name."""
    if isinstance(value, torch.Tensor):
        return {prefix.removesuffix("."): value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {n: t for key, child in items for n, t in flattened(child, f"{prefix}{key}.").items()}


@pytest.mark.parametrize("case", DCP, ids=lambda c: c.name)
def test_safetensors_loads_every_tensor_bit_for_bit(case: Case, ckpttools: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    unstorable = [n for n, t in _wanted(case).items() if t.dtype == "complex128"]
    excluded = [word for name in unstorable for word in ("--exclude", name)]
    answer = ckpttools("consolidate", case.checkpoint, tmp_path / "out", "--include", "*", "--max-shard-size", "60KB", *excluded)
    assert answer.exit_code == 0, answer.said
    loaded: dict[str, Any] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        loaded |= load_file(file)
    assert holds(loaded, {n: t for n, t in _wanted(case).items() if n not in unstorable}) == []


@pytest.mark.parametrize("case", DCP, ids=lambda c: c.name)
def test_torch_loads_every_tensor_with_weights_only(case: Case, ckpttools: Run, tmp_path: Path) -> None:
    answer = ckpttools("consolidate", case.checkpoint, tmp_path / "out.pt")
    assert answer.exit_code == 0, answer.said
    value = _load(tmp_path / "out.pt")
    assert holds(flattened(value), _wanted(case)) == []


def test_a_memory_mapped_load_gives_the_same(ckpttools: Run, tmp_path: Path) -> None:
    case = Case("torch", "dcp_fsdp2_w4_uneven")
    assert ckpttools("consolidate", case.checkpoint, tmp_path / "out.pt", "--weights-only").exit_code == 0
    value = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert holds(flattened(value), {n: t for n, t in _wanted(case).items() if n.startswith("model.")}) == []


@pytest.mark.parametrize("case", HF, ids=lambda c: c.name)
def test_transformers_loads_what_was_consolidated(case: Case, ckpttools: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, which loads what we write")
    if not (case.checkpoint / "config.json").exists():
        pytest.skip("the case has no config.json, without which transformers loads nothing")
    answer = ckpttools("consolidate", case.checkpoint, tmp_path / "out", "--max-shard-size", "60KB")
    assert answer.exit_code == 0, answer.said
    cls = transformers.AutoModelForSeq2SeqLM if "t5" in case.name else transformers.AutoModelForCausalLM
    dtype = next(iter(_wanted(case).values())).dtype
    model, info = cls.from_pretrained(tmp_path / "out", dtype=getattr(torch, dtype), output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    original = cls.from_pretrained(
        case.checkpoint, dtype=getattr(torch, dtype), variant="fp32" if "variant" in case.name else None
    )
    theirs = {n: described(t) for n, t in original.state_dict().items()}
    assert theirs == {n: described(t) for n, t in model.state_dict().items()}


def _wanted(case: Case) -> dict[str, Expected]:
    return {n: t for target in case.targets() for n, t in target.tensors.items()}


def _load(path: Path) -> object:
    """With the few numpy names that random states need, which torch asks users to allow by themselves."""
    import numpy
    from numpy._core import multiarray

    allowed = [multiarray._reconstruct, multiarray.scalar, numpy.ndarray, numpy.dtype]
    allowed += [type(numpy.dtype(d)) for d in ("uint32", "float64", "float32", "int64")]
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, weights_only=True)


def test_the_seven_ways_to_save_the_same_weights_have_one_fingerprint(ckpttools: Run) -> None:
    folder = FIXTURES / "torch" / "save_same_weights_many_files" / "ckpt"
    files = sorted(folder.iterdir())
    assert len({hashlib.sha256(f.read_bytes()).hexdigest() for f in files}) == len(files)
    fingerprints = {f.name: ckpttools("hash", f, "--json").document["fingerprint"] for f in files}
    assert len({v for n, v in fingerprints.items() if n != "one_ulp.pt"}) == 1
    answer = ckpttools("validate", folder / "one_ulp.pt", "--against", folder / "a.pt", "--json")
    assert answer.exit_code == 1
    assert [f["where"] for f in answer.document["findings"] if f["severity"] == "error"] == ["fc1.weight"]
