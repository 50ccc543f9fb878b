"""The truth of the fixtures against the tools' own loaders: what we hold ourselves to is what they read.

Values come as torch tensors, and are compared by the SHA-256 of their bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from tests.fixture_cases import Case, cases

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.interop

SOUND = cases("torch", damaged=False)
HF = [c for c in SOUND if c.truth["kind"] == "hf" and c.name.startswith("hf")]


def lines(tensors: dict[str, object]) -> list[dict[str, object]]:
    """As `hash --json` has them."""
    return [{"name": n, "dtype": str(t.dtype)[6:], "shape": list(t.shape), "digest": digest(t)} for n, t in flat(tensors)]


def flat(value: object, *keys: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(keys), value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, *keys, str(key))


def digest(tensor) -> str:
    """SHA-256 of the row-major bytes; a tensor of rank 0 has no byte view of its own."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("case", HF, ids=lambda c: c.name)
def test_transformers_loads_what_the_truth_says(case: Case):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(case.checkpoint)
    cls = getattr(transformers, config.architectures[0])
    variant = "fp32" if case.name == "hf_t5_variant" else None
    model = cls.from_pretrained(case.checkpoint, dtype="auto", variant=variant)
    (target,) = case.targets()
    # newer releases rename or fuse what older ones and other families stored; those names are not the file's
    in_memory = set(model.state_dict())
    wanted = {name: expected for name, expected in target.tensors.items() if name in in_memory}
    assert wanted
    assert case.missing(wanted, lines(model.state_dict())) == []


def test_safetensors_loads_what_the_truth_says():
    from safetensors.torch import load_file

    case = Case("torch", "safetensors_all_dtypes")
    (target,) = case.targets()
    (file,) = case.checkpoint.glob("*.safetensors")
    assert case.missing(target.tensors, lines(load_file(file))) == []


@pytest.mark.parametrize("name", ["save_zip_shared_views", "save_pickle_protocol4", "save_zip_many_tensors", "save_legacy"])
def test_torch_loads_what_the_truth_says(name: str):
    case = Case("torch", name)
    weights_only = name != "save_pickle_protocol4"  # torch's own restricted reader does not know protocol 4
    for target in case.targets():
        assert case.missing(target.tensors, lines(torch.load(target.path, weights_only=weights_only))) == []
