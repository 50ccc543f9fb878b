"""Run directories on the disks of several nodes: the newest step that they cover together, and no step that they do not."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from ckpttools.snapshots.nodes import unite
from ckpttools.snapshots.runs import read_run
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES
from tests.run_trees import DCP, make, make_real, make_tiny

Run = Callable[..., Answer]
STEPS = FIXTURES / "torch" / "dcp_steps_titan_layout_w2" / "ckpt"
NO_COLLECTIVES = FIXTURES / "torch" / "dcp_no_collectives_w2" / "ckpt"


MODULE = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict"
Wrapper = type("BasicTensorAwareStateDict", (), {"__module__": MODULE})
"""Stands for the class of nvidia-resiliency-ext, which is pickled by its name."""


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class under the name that it has there, while it is saved."""
    module = types.ModuleType(MODULE)
    module.BasicTensorAwareStateDict = Wrapper  # type: ignore[attr-defined]
    parts = MODULE.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, MODULE, module)


def save_local(root: Path, folder: int, rank: int, step: int, value: float = 0, *, session: str = "s") -> Path:
    """The file of a rank in the folder of another (or its own), as nvidia-resiliency-ext writes it."""
    path = root / session / str(folder) / f"iter_{step:07d}_{rank}_local.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = Wrapper()
    saved.state_dict = {"model": {"w": torch.full((4,), float(rank + value))}, "iteration": step}
    torch.save(saved, path)
    return path


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Two nodes of two ranks, each with a copy of a rank of the other; step 200 is the newest that both have."""
    found = [tmp_path / n for n in ("a", "b")]
    for step in (100, 200):
        for rank in range(4):
            save_local(found[rank // 2], rank, rank, step)
        save_local(found[0], 0, 2, step)
        save_local(found[1], 2, 0, step)
    return found


def pattern(node: Path, step: int, session: str = "s/") -> str:
    return f"{node}/{session}*/iter_{step:07d}_*_local.pt"


def taken(answer: Answer) -> list[str]:
    return answer.stdout.splitlines() if answer.exit_code == 0 else [str(answer.exit_code)]


class TestLocalFiles:
    def test_the_newest_step_that_all_ranks_have(self, ckpttools: Run, nodes):
        save_local(nodes[0], 0, 0, 300)
        save_local(nodes[0], 1, 1, 300)
        answer = ckpttools("latest", *nodes)
        assert [pattern(n, 200) for n in nodes] == taken(answer)
        assert "no file of rank 2, 3 (2 of 4 there)" in answer.stderr
        assert "taken for 4 ranks" in answer.stderr
        assert "200\n" == ckpttools("latest", *nodes, "--step-only", "--ranks", 4).stdout

    def test_sessions_and_folders_of_ranks_are_runs_too(self, ckpttools: Run, nodes):
        sessions = [n / "s" for n in nodes]
        assert [pattern(n, 200, "") for n in sessions] == taken(ckpttools("latest", *sessions))
        for rank in range(2):
            save_local(nodes[0], 0, rank, 400, session="t")
        assert [f"{nodes[0]}/t/0/iter_0000400_*_local.pt"] == taken(ckpttools("latest", nodes[0] / "t" / "0", "--ranks", 2))

    def test_a_node_alone_is_not_the_whole(self, ckpttools: Run, nodes):
        assert ["3"] == taken(ckpttools("latest", nodes[1]))
        assert [pattern(nodes[0], 200)] == taken(ckpttools("latest", nodes[0]))  # no name on it tells of rank 3
        assert ["3"] == taken(ckpttools("latest", nodes[0], "--ranks", 4))

    def test_a_copy_stands_in_for_a_file_that_is_lost_or_damaged(self, ckpttools: Run, nodes):
        (nodes[0] / "s/0/iter_0000200_0_local.pt").unlink()
        lost = nodes[1] / "s/2/iter_0000200_2_local.pt"
        lost.write_bytes(lost.read_bytes()[:-9])
        assert [pattern(n, 200) for n in nodes] == taken(ckpttools("latest", *nodes, "--depth", "full"))
        (nodes[1] / "s/2/iter_0000200_0_local.pt").unlink()
        assert [pattern(n, 100) for n in nodes] == taken(ckpttools("latest", *nodes))

    def test_copies_that_differ_are_found_at_full_depth(self, ckpttools: Run, nodes):
        save_local(nodes[1], 2, 0, 200, value=0.5)
        assert [pattern(n, 200) for n in nodes] == taken(ckpttools("latest", *nodes))
        answer = ckpttools("latest", *nodes, "--depth", "full")
        assert [pattern(n, 100) for n in nodes] == taken(answer)
        assert "the copies of rank 0 differ: digest-mismatch" in answer.stderr

    def test_dirty_files_are_a_save_that_is_going_on(self, ckpttools: Run, nodes):
        path = save_local(nodes[1], 3, 3, 200)
        path.rename(path.with_name("iter_0000200_3_local.dirty.pt"))
        assert [pattern(n, 100) for n in nodes] == taken(ckpttools("latest", *nodes))

    def test_an_empty_file_is_damaged(self, ckpttools: Run, nodes):
        (nodes[0] / "s/1/iter_0000200_1_local.pt").write_bytes(b"")
        assert [pattern(n, 100) for n in nodes] == taken(ckpttools("latest", *nodes, "--depth", "commit"))

    def test_other_sessions_are_other_runs(self, ckpttools: Run, nodes):
        for rank in range(2):
            save_local(nodes[0], rank, rank, 900, session="t")
        assert "t/*/iter_0000900" in ckpttools("latest", *nodes).stdout
        assert [pattern(n, 200) for n in nodes] == taken(ckpttools("latest", *nodes, "--ranks", 4))

    def test_status_says_what_each_node_has(self, ckpttools: Run, nodes):
        document = ckpttools("status", *nodes, "--json").document
        assert [200, 200] == [run["step"] for run in document["runs"]]
        assert all(run["inodes"] == 3 and not run["alerts"] for run in document["runs"])
        assert ["no-commit"] == [a["kind"] for a in ckpttools("status", nodes[1], "--json").document["runs"][0]["alerts"]]

    def test_prune_leaves_them_to_who_knows_all_nodes(self, ckpttools: Run, nodes):
        document = ckpttools("prune", nodes[0], "--keep-last", 1, "--json").document
        assert all(d["keep"] and "other nodes may have a share of it" in d["reasons"] for d in document["decisions"])

    def test_numbers_beyond_all_reason_take_no_memory(self, ckpttools: Run, nodes):
        save_local(nodes[0], 0, 999_999_999, 300)
        assert ["3"] == taken(ckpttools("latest", *nodes))


def spread(source: Path, nodes: Iterable[Path], name: str, first_node: Callable[[str], bool]) -> None:
    """A snapshot's files on two nodes."""
    for i, node in enumerate(nodes):
        (node / name).mkdir(parents=True)
        for file in source.iterdir():
            if first_node(file.name) == (i == 0):
                shutil.copyfile(file, node / name / file.name)


class TestDirectories:
    @pytest.fixture
    def shares(self, tmp_path: Path) -> list[Path]:
        """`.metadata` and rank 0 on the first node, rank 1 on the second, as a save to local disks leaves them."""
        nodes = [tmp_path / n for n in ("a", "b")]
        for step in (10, 20):
            spread(STEPS / f"step-{step}", nodes, f"step-{step}", lambda name: name != "__1_0.distcp")
        return nodes

    def test_the_newest_that_both_cover(self, ckpttools: Run, shares):
        assert [f"{n}/step-20" for n in shares] == taken(ckpttools("latest", *shares))
        (shares[1] / "step-20" / "__1_0.distcp").unlink()
        make(shares[1] / "step-20", ["notes.txt"])
        answer = ckpttools("latest", *shares)
        assert [f"{n}/step-10" for n in shares] == taken(answer)
        assert "not whole together" in answer.stderr

    def test_json_and_pointer_name_every_place(self, ckpttools: Run, shares, tmp_path):
        document = ckpttools("latest", *shares, "--json", "--write", tmp_path / "pointer").document
        assert [f"{n}/step-20" for n in shares] == document["roots"] == (tmp_path / "pointer").read_text().split()

    def test_directories_of_ranks_with_a_manifest_each(self, ckpttools: Run, tmp_path):
        nodes = [tmp_path / n for n in ("a", "b")]
        for rank, node in enumerate(nodes):
            make(node / "step=5" / str(rank), [])
            shutil.copyfile(NO_COLLECTIVES / f"__{rank}.metadata", node / "step=5" / str(rank) / ".metadata")
            shutil.copyfile(NO_COLLECTIVES / f"__{rank}_0.distcp", node / "step=5" / str(rank) / f"__{rank}_0.distcp")
        assert ["3"] == taken(ckpttools("latest", nodes[0]))
        assert [f"{n}/step=5" for n in nodes] == taken(ckpttools("latest", *nodes))
        (nodes[1] / "step=5-unfinished").touch()
        assert ["3"] == taken(ckpttools("latest", *nodes))

    def test_nodes_of_their_own_whose_files_have_the_same_names(self, ckpttools: Run, tmp_path):
        nodes = [tmp_path / n for n in ("a", "b")]
        for rank, node in enumerate(nodes):
            make(node / "step-7", [])
            manifest = (NO_COLLECTIVES / f"__{rank}.metadata").read_bytes()
            (node / "step-7" / ".metadata").write_bytes(manifest.replace(b"__1_0.distcp", b"__0_0.distcp"))
            shutil.copyfile(NO_COLLECTIVES / f"__{rank}_0.distcp", node / "step-7" / "__0_0.distcp")
        assert ["3"] == taken(ckpttools("latest", nodes[0]))
        assert [f"{n}/step-7" for n in nodes] == taken(ckpttools("latest", *nodes))

    def test_a_whole_one_in_a_tier_is_taken_alone(self, ckpttools: Run, shares, tmp_path):
        make_real(tmp_path / "shared" / "step-20", source=STEPS / "step-20")
        assert [f"{tmp_path}/shared/step-20"] == taken(ckpttools("latest", *shares, tmp_path / "shared"))

    def test_damage_is_not_mended_with_another_tier(self, ckpttools: Run, shares, tmp_path):
        make_real(tmp_path / "shared" / "step-30", source=STEPS / "step-30")
        file = tmp_path / "shared" / "step-30" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
        make_real(shares[1] / "step-30", source=STEPS / "step-30")
        (shares[1] / "step-30" / ".metadata").unlink()
        assert [f"{n}/step-20" for n in shares] == taken(ckpttools("latest", *shares, tmp_path / "shared"))

    def test_status_knows_what_they_have_together(self, ckpttools: Run, shares):
        document = ckpttools("status", *shares, "--json").document
        assert [20, 20] == [run["step"] for run in document["runs"]]
        assert [[], []] == [run["unfinished"] for run in document["runs"]]

    def test_a_tier_with_a_part_of_it_is_not_committed_by_the_whole_of_another(self, tmp_path):
        make(tmp_path / "shared" / "step-1", DCP)
        make(tmp_path / "local" / "step-1", DCP[:2])
        local, shared = unite([read_run(str(tmp_path / n)) for n in ("local", "shared")])
        assert ("unfinished", "committed") == (local.snapshots[0].state, shared.snapshots[0].state)


def test_what_has_nothing_to_unite_stays_as_it_was(tmp_path):
    for name in ("a", "b"):
        make_tiny(tmp_path / name / "step-1")
    runs = [read_run(str(tmp_path / n)) for n in ("a", "b")]
    assert runs == unite(runs)
