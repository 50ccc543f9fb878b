"""The pickles that we write, held against those that torch wrote of the same state: the same calls, classes and members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpttools import plan as plans
from ckpttools.containers.torch_entries import open_rank_file
from ckpttools.execute import run
from ckpttools.layouts import open_snapshot
from ckpttools.layouts.per_rank.write import arrange_ranks
from ckpttools.model import Mesh
from ckpttools.operations.nesting import sequences_of
from ckpttools.operations.sealing import hash_tensors
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.placement.local import Cut, PlacedTensor, Placement
from ckpttools.storage.source import LocalSource
from ckpttools.storage.target import open_target
from tests.fixture_cases import Case

OF_THE_PROCESS = {"_hash", "_dim_group_names"}
"""Members that differ from one run of the same program to the next, or with what it did before."""


def plain(value: object) -> Any:
    """A value as nested tuples, storages by what they hold and not by their number, and an OrderedDict as the dict that it is."""
    if isinstance(value, Object) and str(value.callable) == "collections.OrderedDict":
        return plain(dict(value.pairs))
    if isinstance(value, Object):
        state = (
            {k: v for k, v in value.state.items() if k not in OF_THE_PROCESS} if isinstance(value.state, dict) else value.state
        )
        return (
            "call",
            plain(value.callable),
            plain(value.args),
            plain(state),
            plain(list(value.pairs)),
            plain(list(value.items)),
        )
    if isinstance(value, Persistent):
        assert isinstance(value.pid, tuple)
        return ("storage", plain(value.pid[:2]), plain(value.pid[3:]))
    if isinstance(value, Global):
        return str(value)
    if isinstance(value, dict):
        return {("key", type(k), k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(plain, value))
    return (type(value), value) if isinstance(value, (int, float, str, bytes, type(None))) else repr(value)


@pytest.mark.parametrize(
    ("name", "mesh", "axis_names"),
    [
        ("perrank_dtensor_verl_layout_w2", Mesh((("fsdp", 2),)), {}),
        ("perrank_dtensor_hsdp_2x2", Mesh((("dp", 2), ("fsdp", 2))), {"dp": "ddp"}),
    ],
)
def test_each_file_has_the_value_that_torch_pickled(tmp_path, name, mesh, axis_names):
    case = Case("torch", name)
    snapshot = open_snapshot(str(case.checkpoint), is_located=True)
    checkpoint = snapshot.checkpoint
    sharded = {t.name for t in checkpoint.tensors if len(t.pieces) > 1}
    placed = [
        PlacedTensor(t.spec, t.path, t.family, Placement((Cut("fsdp", 0),) if t.name in sharded else ()))
        for t in checkpoint.tensors
    ]
    names = {"fsdp": checkpoint.mesh.axes[-1][0], **axis_names}
    arrangement = arrange_ranks(placed, mesh, objects=checkpoint.objects, sequences=sequences_of(checkpoint), axis_names=names)
    tensor_of = {t.name: t for t in checkpoint.tensors}
    plan = plans.make(checkpoint, arrangement, tensor_of=tensor_of, listing=snapshot.listing)
    run(plan, snapshot.source, open_target(str(tmp_path / "output"), is_file=False))
    written = LocalSource(str(tmp_path / "output"))
    theirs = {p.name for p in Path(case.checkpoint).iterdir()}
    assert theirs | {"fsdp_config.json"} == {f.path for f in written.listing()}
    for path in sorted(theirs):
        values = [
            plain(open_rank_file(source, path, source.listing().length_bytes(path)).torch.value)
            for source in (snapshot.source, written)
        ]
        assert values[0] == values[1], path
    assert hash_tensors(str(case.checkpoint)).fingerprint == hash_tensors(str(tmp_path / "output")).fingerprint
