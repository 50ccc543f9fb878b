"""A snapshot over several roots means what it means in one directory, and copies of its files are held against each other."""

from __future__ import annotations

import random
import shutil
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.errors import CkpttoolsError
from ckpttools.findings import Finding
from ckpttools.layouts import open_snapshot
from ckpttools.operations.sealing import hash_tensors
from ckpttools.operations.validate import Validation, validate
from ckpttools.snapshots.find import resolve
from tests.fixture_cases import FIXTURES, Case, readable
from tests.root_cases import by_rank, spread

TORCH = FIXTURES / "torch"
WHOLE = [(case.name, target.path) for case in readable(damaged=False) for target in case.targets() if target.path.is_dir()]
NO_COLLECTIVES = TORCH / "dcp_no_collectives_w2" / "ckpt"


def fingerprint(*roots: Path) -> str:
    return hash_tensors(str(roots[0]), roots=[str(r) for r in roots[1:]]).fingerprint


def checked(*roots: Path, depth: str = "full") -> Validation:
    return validate(str(roots[0]), roots=[str(r) for r in roots[1:]], depth=depth)


def errors(*roots: Path) -> list[Finding]:
    return [f for f in checked(*roots).findings if f.is_error]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestSpread:
    @settings(max_examples=40)
    @given(data=st.data())
    def test_any_way_to_spread_the_files_gives_the_same_fingerprint(self, data, tmp_path_factory):
        _, snapshot = data.draw(st.sampled_from(WHOLE), label="fixture")
        rng = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
        count = data.draw(st.integers(2, 4), label="roots")
        copies = data.draw(st.integers(1, 2), label="copies")
        tmp = tmp_path_factory.mktemp("spread")
        try:
            roots = spread(snapshot, tmp, count, lambda _: {rng.randrange(count) for _ in range(copies)})
            assert fingerprint(snapshot) == fingerprint(*roots)
            assert validate(str(snapshot)).verdict == checked(*roots).verdict
        finally:
            shutil.rmtree(tmp)

    @pytest.mark.parametrize(
        "case", ["dcp_fsdp2_w4_uneven", "dcp_no_collectives_w2", "perrank_dtensor_hsdp_2x2", "fsdp1_local_w2", "dcp_hsdp_2x2"]
    )
    def test_files_of_each_rank_on_its_own_node(self, case, tmp_path):
        snapshot = TORCH / case / "ckpt"
        roots = spread(snapshot, tmp_path, 4, by_rank)
        assert fingerprint(snapshot) == fingerprint(*reversed(roots))

    def test_complete_manifests_that_differ_mean_the_same_files(self, tmp_path):
        snapshot = TORCH / "dcp_fsdp2_w2" / "ckpt"
        roots = spread(snapshot, tmp_path, 2, lambda p: [0, 1] if p == ".metadata" else by_rank(p))
        manifest = roots[1] / ".metadata"
        manifest.write_bytes(manifest.read_bytes().replace(b"1.0.0", b"1.0.1"))
        assert fingerprint(snapshot) == fingerprint(*roots)

    def test_the_manifest_on_every_node(self, tmp_path):
        snapshot = TORCH / "dcp_fsdp2_w2" / "ckpt"
        roots = spread(snapshot, tmp_path, 2, lambda p: [0, 1] if p == ".metadata" else by_rank(p))
        checkpoint = open_snapshot(str(roots[0]), roots=[str(roots[1])]).checkpoint
        assert {"replica"} == {f.role for f in checkpoint.files if f.path.startswith("/")}
        assert fingerprint(snapshot) == fingerprint(*roots)

    def test_a_node_that_is_left_out_is_incomplete(self, tmp_path):
        roots = spread(NO_COLLECTIVES, tmp_path, 2, by_rank)
        assert "incomplete" == checked(roots[0], depth="structure").verdict

    def test_a_url_and_a_path_are_one_snapshot(self, tmp_path):
        fsspec = pytest.importorskip("fsspec")
        snapshot = TORCH / "dcp_fsdp2_w2" / "ckpt"
        roots = spread(snapshot, tmp_path, 2, by_rank)
        url = f"memory://{uuid.uuid4()}/ckpt"
        fs = fsspec.filesystem("memory")
        fs.put(str(roots[1]), url, recursive=True)
        assert (
            fingerprint(snapshot)
            == hash_tensors(str(roots[0]), roots=[url]).fingerprint
            == (hash_tensors(url, roots=[str(roots[0])]).fingerprint)
        )

    def test_single_files_are_roots_too(self, tmp_path):
        snapshot = TORCH / "perrank_dtensor_verl_layout_w2" / "ckpt"
        one, other = (tmp_path / n / f"model_world_size_2_rank_{n}.pt" for n in "01")
        for path in (one, other):
            path.parent.mkdir()
            shutil.copyfile(snapshot / path.name, path)
        names = {t.name for t in hash_tensors(str(one), roots=[str(other)]).tensors}
        assert names == {t.name for t in open_snapshot(str(snapshot)).checkpoint if t.family == "model"}


DAMAGED = [case for case in readable(damaged=True) if case.checkpoint.is_dir()]
RUNS = (
    "deepspeed/zero2_bf16_w2_3tags",
    "deepspeed/bloom_tp2_pp2",
    "megatron/tdist_tp2_pp2_two_iters",
    "megatron/legacy_tp2_pp2_mcore",
    "torch/torchtitan_real_w2",
    "torch/hf_trainer_run",
    "torch/lightning_ckpt",
)


class TestDamage:
    @pytest.mark.parametrize("copies", [1, 2])
    @pytest.mark.parametrize("case", DAMAGED, ids=lambda case: case.name)
    def test_damage_is_the_same_wherever_the_files_lie(self, case, copies, tmp_path):
        rng = random.Random(case.name)
        roots = spread(case.checkpoint, tmp_path, 2, lambda _: rng.sample([0, 1], copies))
        assert self.answer(case.checkpoint) == self.answer(*roots)

    def answer(self, *roots: Path) -> object:
        try:
            result = checked(*roots)
        except CkpttoolsError as e:
            return type(e)
        return result.verdict, {f.code for f in result.findings}


class TestNodesOfTheirOwn:
    """Each node saved by itself: its manifest knows its own pieces, and its files have the names of the other's."""

    @pytest.fixture
    def nodes(self, tmp_path: Path) -> list[Path]:
        roots = [tmp_path / n / "step-7" for n in "ab"]
        for rank, root in enumerate(roots):
            root.mkdir(parents=True)
            manifest = (NO_COLLECTIVES / f"__{rank}.metadata").read_bytes()
            (root / ".metadata").write_bytes(manifest.replace(b"__1_0.distcp", b"__0_0.distcp"))
            shutil.copyfile(NO_COLLECTIVES / f"__{rank}_0.distcp", root / "__0_0.distcp")
        return roots

    def test_manifests_of_all_nodes_are_united(self, nodes):
        assert fingerprint(NO_COLLECTIVES) == fingerprint(*nodes) == fingerprint(*reversed(nodes))
        assert "ok" == checked(*nodes).verdict

    def test_one_node_alone_is_not_the_whole(self, nodes):
        assert "incomplete" == checked(nodes[0]).verdict

    def test_a_file_that_a_node_lost_is_missing_although_another_node_has_one_of_its_name(self, nodes):
        (nodes[1] / "__0_0.distcp").unlink()
        result = checked(*nodes)
        assert "incomplete" == result.verdict
        assert str(nodes[1] / "__0_0.distcp") in {f.where for f in result.findings if f.code == "missing-file"}

    def test_each_node_twice(self, nodes, tmp_path):
        twins = [shutil.copytree(n, tmp_path / f"twin_{n.parent.name}" / n.name) for n in nodes]
        assert fingerprint(NO_COLLECTIVES) == fingerprint(*nodes, *twins) == fingerprint(*twins, *reversed(nodes))
        (nodes[1] / "__0_0.distcp").unlink()
        assert fingerprint(NO_COLLECTIVES) == fingerprint(*nodes, *twins)

    def test_damage_is_told_with_the_node(self, nodes):
        path = nodes[1] / "__0_0.distcp"
        flip(path, path.stat().st_size // 2)
        assert any(str(path) in f.where for f in errors(*nodes))

    def test_directories_of_ranks(self, tmp_path):
        for rank in (0, 1):
            root = tmp_path / f"node{rank}" / "step=5" / str(rank)
            root.mkdir(parents=True)
            shutil.copyfile(NO_COLLECTIVES / f"__{rank}.metadata", root / ".metadata")
            shutil.copyfile(NO_COLLECTIVES / f"__{rank}_0.distcp", root / f"__{rank}_0.distcp")
        roots = [tmp_path / f"node{n}" / "step=5" for n in (0, 1)]
        assert fingerprint(NO_COLLECTIVES) == fingerprint(*roots)
        assert {"missing-rank", "uncovered"} & {f.code for f in errors(roots[1])}


class TestCopies:
    @pytest.fixture
    def nodes(self, tmp_path: Path) -> list[Path]:
        return spread(TORCH / "dcp_fsdp2_w2" / "ckpt", tmp_path, 2, lambda _: [0, 1])

    def test_full_copies_are_replicas(self, nodes):
        result = checked(*nodes)
        assert "ok" == result.verdict
        assert all(len(t.replicas) == len(t.pieces) for t in result.checkpoint.tensors)

    def test_a_flipped_bit_in_either_copy_is_found(self, nodes):
        for node in nodes:
            path = node / "__1_0.distcp"
            at = open_snapshot(str(node), is_located=True).checkpoint.by_name["model.norm.weight"].pieces[-1].extent.offset
            flip(path, at)
            (finding,) = [f for f in errors(*nodes) if f.code == "replica-mismatch"]
            assert "model.norm.weight" in finding.where
            assert all(str(n / "__1_0.distcp") in finding.where for n in nodes)
            flip(path, at)

    def test_a_difference_between_tensors_is_told_with_its_byte(self, tmp_path):
        nodes = spread(TORCH / "hf_gpt2_tied_single" / "ckpt", tmp_path, 2, lambda _: [0, 1])
        path = nodes[1] / "model.safetensors"
        data = path.read_bytes()
        at = data.index(b'"format"') + 1
        path.write_bytes(data[:at] + b"F" + data[at + 1 :])
        (finding,) = errors(*nodes)
        assert ("replica-mismatch", True) == (finding.code, finding.where.endswith(f"at byte {at}"))

    def test_a_truncated_copy_is_found_and_not_read(self, nodes):
        path = nodes[0] / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-100])
        found = errors(*nodes)
        assert ["replica-mismatch"] == [f.code for f in found]
        assert str(path) in found[0].where

    def test_an_item_that_opens_in_one_copy_only_is_a_copy_that_differs(self, nodes):
        flip(nodes[0] / "__0_0.distcp", 0)  # the signature of the first zip
        assert {"replica-mismatch"} == {f.code for f in errors(*nodes)}

    def test_configuration_that_differs_is_a_warning(self, tmp_path):
        nodes = spread(TORCH / "hf_gpt2_tied_single" / "ckpt", tmp_path, 2, lambda _: [0, 1])
        (nodes[1] / "config.json").write_text("{}")
        result = checked(*nodes)
        assert ("ok", {"warning"}) == (result.verdict, {f.severity for f in result.findings if f.code == "replica-mismatch"})

    def test_roots_of_different_steps_are_refused(self, tmp_path):
        run = TORCH / "dcp_steps_titan_layout_w2" / "ckpt"
        assert "step-mismatch" in {f.code for f in errors(run / "step-20", run / "step-30")}


class TestRuns:
    @pytest.mark.parametrize("run", RUNS)
    def test_a_run_spread_over_nodes_stands_for_the_snapshot_that_the_whole_stands_for(self, run, tmp_path):
        rng = random.Random(run)
        whole = resolve(str(FIXTURES / run / "ckpt"))
        roots = spread(FIXTURES / run / "ckpt", tmp_path, 3, lambda _: {rng.randrange(3)})
        found = resolve(str(roots[0]), [str(r) for r in roots[1:]])
        assert Path(whole.location).name == Path(found.location).name
        assert fingerprint(Path(whole.location)) == fingerprint(*map(Path, (found.location, *found.roots)))

    @pytest.fixture
    def nodes(self, tmp_path: Path) -> list[Path]:
        return spread(TORCH / "dcp_steps_titan_layout_w2" / "ckpt", tmp_path, 2, lambda p: [0, 1] if "meta" in p else by_rank(p))

    def test_the_newest_step_is_taken_from_all_nodes(self, nodes):
        resolved = resolve(str(nodes[0]), [str(nodes[1])])
        assert (str(nodes[0] / "step-30"), (str(nodes[1] / "step-30"),)) == (resolved.location, resolved.roots)

    def test_a_step_that_the_nodes_do_not_cover_is_passed_over(self, nodes):
        (nodes[1] / "step-30" / "__1_0.distcp").unlink()
        resolved = resolve(str(nodes[0]), [str(nodes[1])])
        assert resolved.location.endswith("step-20")
        assert any("passed over step-30" in note and "__1_0.distcp" in note for note in resolved.notes)

    def test_a_step_that_one_node_does_not_have_may_be_covered_by_the_others(self, nodes, tmp_path):
        (tmp_path / "empty").mkdir()
        resolved = resolve(str(tmp_path / "empty"), [str(n) for n in nodes])
        assert [str(n / "step-30") for n in nodes] == [resolved.location, *resolved.roots]

    def test_snapshots_stay_what_they_are(self, nodes):
        roots = [str(n / "step-20") for n in nodes]
        assert (roots[0], (roots[1],)) == (resolve(*roots[:1], roots[1:]).location, resolve(roots[0], roots[1:]).roots)


def test_the_copies_of_a_case_are_listed_with_their_roots(tmp_path):
    nodes = spread(Case("torch", "dcp_fsdp2_w2").checkpoint, tmp_path, 2, lambda _: [0, 1])
    checkpoint = open_snapshot(str(nodes[0]), roots=[str(nodes[1])]).checkpoint
    assert {str(p) for n in nodes for p in n.iterdir()} == {f.place for f in checkpoint.files}
