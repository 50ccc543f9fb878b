"""What reshard writes, torch's own DCP loads into models on that mesh and on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttools.model import Mesh
from ckpttools.operations.reshard import reshard
from tests.fixture_cases import FIXTURES
from tests.interop import dcp_ranks
from tests.rank_programs import run_ranks

pytestmark = pytest.mark.interop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "mesh", "kind", "ranks"),
    [
        ("dcp_fsdp2_w4_uneven", "fsdp=3", "fsdp2", 3),
        ("dcp_fsdp2_w4_uneven", "tp=2,fsdp=2", "tp", 4),
        ("dcp_fsdp2_w4_uneven", "tp=2", "fsdp2", 2),
        ("dcp_fsdp2_tp_2x2", "fsdp=2", "tp", 2),
        ("dcp_tp2", "dp=2,fsdp=2", "hsdp", 4),
        ("dcp_hsdp_2x2", "fsdp=4", "fsdp2", 2),
    ],
)
def test_torch_loads_the_output_into_a_model_built_from_scratch(
    source: str, mesh: str, kind: str, ranks: int, tmp_path: Path
) -> None:
    case = FIXTURES / "torch" / source
    reshard(str(case / "ckpt"), str(tmp_path / "out"), target="dcp", mesh=Mesh.parse(mesh))
    assert run_ranks(dcp_ranks.__file__, str(tmp_path / "out"), str(case / "truth.json"), kind, str(ranks)) == ""
