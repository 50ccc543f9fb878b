"""From any layout to any other and on to a third: the tensors are what they were, whatever the mesh.

Every sound fixture goes through random pairs of targets and meshes; its fingerprint is that of the tensors that each target
holds, so it is compared with the hash list of what was taken.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.errors import ConversionError, UsageError
from ckpttools.model import Mesh
from ckpttools.operations.convert import consolidate
from ckpttools.operations.reshard import reshard
from ckpttools.operations.sealing import hash_tensors
from ckpttools.operations.select import Choice
from ckpttools.operations.targets import TARGETS
from tests.fixture_cases import READABLE_FAMILIES, cases

OWN_NAMES = ("megatron-dist", "megatron-legacy", "deepspeed", "deepspeed-universal")
"""Targets that spell names and stack layers in their own way; they have round trips of their own."""
STEPS = [target.name for target in TARGETS if target.name not in OWN_NAMES] + ["consolidated", "one torch file"]
SOURCES = [
    str(target.path)
    for case in cases(*READABLE_FAMILIES, damaged=False)
    for target in case.targets()
    if case.directory.name != "save_zip_exotic"  # holds tensors that are not dense
]

meshes = st.builds(
    lambda sizes: Mesh(tuple((axis, size) for axis, size in sizes.items() if size > 1) or (("fsdp", 1),)),
    st.fixed_dictionaries({"dp": st.integers(1, 2), "fsdp": st.integers(1, 4), "tp": st.sampled_from([1, 1, 2, 3])}),
)


def lines(location: str) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {t.name: (t.dtype, t.shape, t.digest) for t in hash_tensors(location).tensors}


def go(step: str, source: str, destination: str, mesh: Mesh) -> bool:
    """Take one step; False where it is not defined: no rule knows the names, or a share would be of another shape."""
    try:
        if step == "consolidated":
            consolidate(source, destination, choice=Choice(is_expanding_tied=True))
        elif step == "one torch file":
            consolidate(source, destination, format="torch")
        else:
            reshard(source, destination, target=step, mesh=mesh, is_dropping=True)
    except (UsageError, ConversionError):
        return False
    return True


@pytest.mark.slow
@settings(max_examples=60)
@given(source=st.sampled_from(SOURCES), steps=st.lists(st.tuples(st.sampled_from(STEPS), meshes), min_size=2, max_size=3))
def test_tensors_survive_any_way_through_the_layouts(
    source: str, steps: list[tuple[str, Mesh]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("way")
    expected, at = lines(source), source
    for i, (step, mesh) in enumerate(steps):
        destination = str(directory / str(i))
        if go(step, at, destination, mesh):
            found = lines(destination)
            assert found.items() <= expected.items(), f"{step} on {mesh} changed {found.items() - expected.items()}"
            if step in ("dcp", "one torch file"):
                assert found == expected
            expected, at = found, destination
    shutil.rmtree(directory)


def test_the_way_of_the_uneven_fixture_keeps_one_fingerprint(tmp_path: Path) -> None:
    at = source = next(s for s in SOURCES if "dcp_fsdp2_w4_uneven" in s)
    way = [("dcp", "fsdp=3"), ("dcp", "tp=2,fsdp=2"), ("dtensor", "fsdp=2"), ("consolidated", ""), ("dcp", "fsdp=4")]
    for i, (target, mesh) in enumerate(way):
        destination = str(tmp_path / str(i))
        if target == "consolidated":
            consolidate(at, destination, choice=Choice(include=("*",)))
        else:
            reshard(at, destination, target=target, mesh=Mesh.parse(mesh))
        assert hash_tensors(destination).fingerprint == hash_tensors(source).fingerprint
        at = destination
