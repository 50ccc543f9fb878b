"""Tensors placed on meshes, written by a layout's `arrange_ranks` from raw bytes, and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpttools import plan as plans
from ckpttools.dtypes import BY_NAME, DType
from ckpttools.execute import run
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.model import Arrangement, Mesh, TensorSpec
from ckpttools.operations.sealing import hash_tensors
from ckpttools.operations.validate import validate
from ckpttools.placement.local import Cut, PlacedTensor, Placement
from ckpttools.storage.target import open_target
from tests.plan_cases import Case, cells, make_case

BF16, FP32, INT64 = BY_NAME["bfloat16"], BY_NAME["float32"], BY_NAME["int64"]

Tensors = Mapping[str, tuple[DType, tuple[int, ...], tuple[Cut, ...]]]
"""name -> dtype, global shape, cuts."""


def mesh_of(text: str) -> Mesh:
    return Mesh.parse(text)


def some_placed() -> Tensors:
    """Rows and columns, uneven ones, more ranks than rows, whole tensors, no elements, no dimensions; for fsdp and tp."""
    fsdp, columns, rows = Cut("fsdp", 0), Cut("tp", 1), Cut("tp", 0)
    return {
        "layers.0.weight": (BF16, (9, 10), (columns, fsdp)),
        "layers.0.bias": (FP32, (7,), (fsdp,)),
        "layers.1.weight": (FP32, (8, 4), (rows, fsdp)),
        "norm": (BF16, (5,), ()),
        "short": (FP32, (1, 3), (fsdp,)),
        "empty": (FP32, (0, 5), (fsdp,)),
        "step": (INT64, (), ()),
        "deep": (FP32, (3, 2, 5), (Cut("tp", 2), fsdp)),
    }


def place(
    tensors: Tensors, *, held_at: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] | None = None
) -> list[PlacedTensor]:
    return [
        PlacedTensor(TensorSpec(name, dtype, shape), (name,), placement=Placement(cuts, (held_at or {}).get(name, ())))
        for name, (dtype, shape, cuts) in tensors.items()
    ]


@dataclass
class Written:
    """What was written, and from what."""

    case: Case
    placed: Sequence[PlacedTensor]
    mesh: Mesh
    directory: Path

    @property
    def snapshot(self) -> Snapshot:
        return open_snapshot(str(self.directory), is_located=True)

    def local_bytes(self, name: str, rank: int) -> bytes | None:
        """A rank's own tensor by its definition: each part copied to its place."""
        tensor = next(t for t in self.placed if t.spec.name == name)
        local = tensor.local(self.mesh, rank)
        if local is None:
            return None
        whole = cells(self.case.values[name], tensor.spec.dtype, tensor.spec.shape)
        own = np.zeros(local.shape, whole.dtype)
        for part in local.parts:
            window = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))
            place = tuple(slice(o, o + n) for o, n in zip(part.local.offsets, part.local.sizes, strict=True))
            own[(*place, ...)] = whole[(*window, ...)]
        return own.tobytes()


Arrange = Callable[[Sequence[PlacedTensor], Mesh], Arrangement]


def write(tmp_path: Path, placed: Sequence[PlacedTensor], mesh: Mesh, arrange: Arrange) -> Written:
    """Random values for the tensors, arranged and written by plan and executor."""
    case = make_case(tmp_path / "source", {t.spec.name: (t.spec.dtype, t.spec.shape) for t in placed})
    arrangement = arrange(placed, mesh)
    plan = plans.make(
        case.checkpoint,
        arrangement,
        tensor_of={t.name: t for t in case.checkpoint.tensors},
        listing=case.source.listing(),
    )
    run(plan, case.source, open_target(str(tmp_path / "output"), is_file=False))
    return Written(case, placed, mesh, tmp_path / "output")


def values_of(location: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Every tensor as it is read back: dtype, shape, digest."""
    return {t.name: (t.dtype, tuple(t.shape), t.digest) for t in hash_tensors(str(location), algorithm="sha256").tensors}


def expected_values(written: Written, *, also: Mapping[str, str] | None = None) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Every tensor as it was made, and further names of some."""
    import hashlib

    found = {
        t.spec.name: (t.spec.dtype.name, t.spec.shape, hashlib.sha256(written.case.values[t.spec.name]).hexdigest())
        for t in written.placed
    }
    return found | {alias: found[kept] for alias, kept in (also or {}).items()}


def assert_round_trip(written: Written, layout: str, *, also: Mapping[str, str] | None = None) -> None:
    """The output is of the layout, whole, proved, and has the values."""
    snapshot = written.snapshot
    assert layout == snapshot.checkpoint.layout
    assert [] == [f for f in snapshot.checkpoint.findings if f.severity != "note"]
    assert expected_values(written, also=also) == values_of(written.directory)
    assert "ok" == validate(str(written.directory)).verdict


def renamed(placed: Sequence[PlacedTensor], family: str, prefix: str) -> list[PlacedTensor]:
    """The tensors under a family of state."""
    return [
        replace(t, spec=replace(t.spec, name=f"{prefix}.{t.spec.name}"), path=(prefix, *t.path), family=family) for t in placed
    ]
