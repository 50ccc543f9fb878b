"""A snapshot spread over nodes, as a user gives it to the commands: --root, globs, --replicas."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES
from tests.root_cases import by_rank, spread

Run = Callable[..., Answer]
SNAPSHOT = FIXTURES / "torch" / "dcp_fsdp2_w4_uneven" / "ckpt"
NORM = "model.norm.weight"


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Four nodes, each with the files of its rank."""
    return spread(SNAPSHOT, tmp_path, 4, by_rank)


def as_options(nodes: list[Path]) -> list[object]:
    return [nodes[0], *(x for n in nodes[1:] for x in ("--root", n))]


def glob_of(nodes: list[Path]) -> str:
    return f"{nodes[0].parent.parent}/node*/{nodes[0].name}"


class TestReading:
    def test_hash_gives_the_digests_of_the_whole(self, nodes: list[Path], ckpttools: Run) -> None:
        expected = ckpttools("hash", SNAPSHOT).stdout
        assert expected == ckpttools("hash", *as_options(nodes)).stdout
        assert expected == ckpttools("hash", glob_of(nodes)).stdout

    def test_inspect_says_which_node_holds_a_file(self, nodes: list[Path], ckpttools: Run) -> None:
        document = ckpttools("inspect", glob_of(nodes), "--json", "--tensors").document
        assert document["roots"] == [str(n) for n in nodes]
        assert {f["path"]: f["root"] for f in document["files"]}["__2_0.distcp"] == str(nodes[2])
        assert str(nodes[3] / "__3_0.distcp") in ckpttools("inspect", glob_of(nodes), "--files").stdout

    def test_validate_is_ok_and_says_what_a_missing_node_took_along(self, nodes: list[Path], ckpttools: Run) -> None:
        assert ckpttools("validate", *as_options(nodes)).exit_code == 0
        answer = ckpttools("validate", *as_options(nodes[:3]))
        assert answer.exit_code == 3
        assert "__3_0.distcp" in answer.said

    def test_a_glob_is_a_side_of_a_comparison(self, nodes: list[Path], ckpttools: Run) -> None:
        assert ckpttools("diff", glob_of(nodes), SNAPSHOT).exit_code == 0
        assert ckpttools("diff", SNAPSHOT, glob_of(nodes)).exit_code == 0
        assert ckpttools("validate", SNAPSHOT, "--against", glob_of(nodes)).exit_code == 0
        assert ckpttools("diff", SNAPSHOT, nodes[0]).exit_code != 0

    def test_a_place_that_is_not_there_is_named(self, nodes: list[Path], ckpttools: Run) -> None:
        answer = ckpttools("validate", nodes[0], "--root", "/nowhere/step-1")
        assert answer.exit_code == 4
        assert "/nowhere/step-1" in answer.stderr

    def test_a_glob_without_a_match_is_named(self, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("inspect", f"{tmp_path}/none*")
        assert answer.exit_code == 4
        assert "nothing matches" in answer.stderr

    def test_run_directories_of_nodes_stand_for_the_newest_step_they_cover(self, ckpttools: Run, tmp_path: Path) -> None:
        run = FIXTURES / "torch" / "dcp_steps_titan_layout_w2" / "ckpt"
        nodes = spread(run, tmp_path, 2, by_rank)
        (nodes[1] / "step-30" / "__1_0.distcp").unlink()
        answer = ckpttools("hash", glob_of(nodes))
        assert answer.stdout == ckpttools("hash", run / "step-20").stdout
        assert "passed over step-30" in answer.stderr

    def test_a_run_directory_and_a_snapshot_do_not_go_together(self, ckpttools: Run, tmp_path: Path) -> None:
        run = FIXTURES / "torch" / "dcp_steps_titan_layout_w2" / "ckpt"
        assert ckpttools("inspect", run, "--root", run / "step-20").exit_code == 2


class TestConsolidate:
    def test_it_is_what_the_whole_gives(self, nodes: list[Path], ckpttools: Run, tmp_path: Path) -> None:
        assert ckpttools("consolidate", SNAPSHOT, tmp_path / "one").exit_code == 0
        answer = ckpttools("consolidate", glob_of(nodes), tmp_path / "many", "--json")
        assert answer.exit_code == 0
        assert answer.document["roots"] == [str(n) for n in nodes]
        assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "many/model.safetensors").read_bytes()
        assert seal_of(tmp_path / "many")["origin"]["roots"] == [str(n) for n in nodes]

    def test_a_destination_in_any_root_is_refused(self, nodes: list[Path], ckpttools: Run) -> None:
        answer = ckpttools("consolidate", *as_options(nodes), nodes[2] / "out")
        assert answer.exit_code == 4
        assert not (nodes[2] / "out").exists()

    def test_a_run_over_other_roots_is_another_run(self, nodes: list[Path], tmp_path: Path) -> None:
        from ckpttools.operations.convert import consolidate

        def plan(*roots: Path) -> str:
            further = [str(r) for r in roots[1:]]
            return consolidate(str(roots[0]), str(tmp_path / "out"), roots=further, is_dry_run=True).plan.fingerprint

        assert plan(*nodes) == plan(*nodes)
        assert plan(*nodes) != plan(nodes[0], nodes[2], nodes[1], nodes[3])


class TestReshard:
    def test_it_is_what_the_whole_gives(self, nodes: list[Path], ckpttools: Run, tmp_path: Path) -> None:
        options = ["--to", "dcp", "--mesh", "fsdp=3"]
        assert ckpttools("reshard", SNAPSHOT, tmp_path / "one", *options).exit_code == 0
        assert ckpttools("reshard", *as_options(nodes), tmp_path / "many", *options).exit_code == 0
        assert {p.name for p in (tmp_path / "one").iterdir()} == {p.name for p in (tmp_path / "many").iterdir()}
        for path in (tmp_path / "one").glob("*.distcp"):
            assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()

    def test_objects_and_tensors_come_from_the_good_copies(self, ckpttools: Run, tmp_path: Path) -> None:
        nodes = spread(SNAPSHOT, tmp_path, 2, lambda _: [0, 1])
        for node, name in ((0, "__0_0.distcp"), (1, "__1_0.distcp"), (0, "__2_0.distcp"), (1, "__3_0.distcp")):
            data = bytearray((nodes[node] / name).read_bytes())
            data[:8] = bytes(8)
            (nodes[node] / name).write_bytes(data)
        options = ["--to", "dcp", "--mesh", "fsdp=2"]
        answer = ckpttools("reshard", *as_options(nodes), tmp_path / "out", *options)
        assert answer.exit_code == 1
        assert f"{nodes[0]}/__0_0.distcp" in answer.stderr
        answer = ckpttools("reshard", *as_options(nodes), tmp_path / "out", *options, "--replicas", "first", "--json")
        assert answer.exit_code == 0, answer.stderr
        assert answer.document["roots"] == [str(n) for n in nodes]
        assert answer.document["replicas"]["rule"] == "first"
        assert ckpttools("diff", SNAPSHOT, tmp_path / "out").exit_code == 0


class TestReplicas:
    @pytest.fixture
    def copies(self, tmp_path: Path) -> list[Path]:
        """Two nodes that both hold a model of float32."""
        return spread(FIXTURES / "torch" / "hf_gpt2_tied_single" / "ckpt", tmp_path, 2, lambda _: [0, 1])

    def change(self, node: Path, value: float) -> tuple[str, int]:
        """Sets the first element of the last tensor of a node's model; says which, and what it was in bytes."""
        path = node / "model.safetensors"
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        name = next(n for n, e in header.items() if n != "__metadata__" and e["dtype"] == "F32")
        at = start + header[name]["data_offsets"][0]
        struct.pack_into("<f", data, at, value)
        path.write_bytes(data)
        return name, at

    def test_a_difference_stops_and_says_what_to_do(self, copies: list[Path], ckpttools: Run, tmp_path: Path) -> None:
        name, _ = self.change(copies[1], 5.0)
        answer = ckpttools("consolidate", glob_of(copies), tmp_path / "out")
        assert answer.exit_code == 1
        assert f"{copies[0]}/model.safetensors and {copies[1]}/model.safetensors" in answer.stderr
        assert name in answer.stderr
        assert "--replicas first" in answer.stderr
        assert not (tmp_path / "out").exists()
        assert ckpttools("hash", glob_of(copies)).exit_code == 1

    def test_first_takes_that_of_the_root_named_first(self, copies: list[Path], ckpttools: Run, tmp_path: Path) -> None:
        name, _ = self.change(copies[1], 5.0)
        answer = ckpttools("consolidate", *as_options(copies), tmp_path / "out", "--replicas", "first")
        assert answer.exit_code == 0
        assert tensor(tmp_path / "out/model.safetensors", name)[0] == tensor(copies[0] / "model.safetensors", name)[0]
        answer = ckpttools("consolidate", *as_options(copies[::-1]), tmp_path / "back", "--replicas", "first")
        assert tensor(tmp_path / "back/model.safetensors", name)[0] == 5.0

    def test_what_was_taken_is_in_the_seal_and_said(self, copies: list[Path], ckpttools: Run, tmp_path: Path) -> None:
        name, _ = self.change(copies[1], 5.0)
        answer = ckpttools("consolidate", *as_options(copies), tmp_path / "out", "--replicas", "first")
        assert f"replicas: {name}" in answer.stdout
        record = seal_of(tmp_path / "out")["origin"]["replicas"]
        files = [str(c / "model.safetensors") for c in copies]
        assert (record["rule"], [r["tensor"] for r in record["boxes"]]) == ("first", [name])
        assert (record["boxes"][0]["copies"], record["boxes"][0]["taken"]) == (files, files[:1])

    def test_mean_changes_what_differs_and_nothing_else(self, copies: list[Path], ckpttools: Run, tmp_path: Path) -> None:
        self.change(copies[0], 1.0)
        name, _ = self.change(copies[1], 4.0)
        answer = ckpttools("consolidate", *as_options(copies), tmp_path / "out", "--replicas", "mean", "-j", "2")
        assert answer.exit_code == 0
        found, before = tensor(tmp_path / "out/model.safetensors", name), tensor(copies[0] / "model.safetensors", name)
        assert found[0] == 2.5
        assert found[1:].tobytes() == before[1:].tobytes()
        record = seal_of(tmp_path / "out")["origin"]["replicas"]
        assert (record["rule"], len(record["boxes"][0]["taken"])) == ("mean", 2)
        assert ckpttools("validate", tmp_path / "out").exit_code == 0

    def test_copies_that_agree_give_the_same_bytes_by_every_rule(
        self, copies: list[Path], ckpttools: Run, tmp_path: Path
    ) -> None:
        outputs = []
        for rule in ("compare", "first", "mean"):
            assert ckpttools("consolidate", *as_options(copies), tmp_path / rule, "--replicas", rule).exit_code == 0
            outputs.append((tmp_path / rule / "model.safetensors").read_bytes())
        assert outputs[0] == outputs[1] == outputs[2]
        assert seal_of(tmp_path / "mean")["origin"]["replicas"] == {"rule": "mean", "boxes": [], "files": []}

    def test_integers_have_no_mean(self, ckpttools: Run, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch", reason="needs torch, which writes the copies")
        nodes = [tmp_path / n for n in "ab"]
        for i, node in enumerate(nodes):
            node.mkdir()
            torch.save({"step": torch.tensor([7 + i]), "w": torch.tensor([1.0])}, node / "model.pt")
        answer = ckpttools("consolidate", *as_options(nodes), tmp_path / "out", "--replicas", "mean")
        assert answer.exit_code == 4
        assert "no mean of int64 values: step" in answer.stderr
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("damaged", [0, 1])
    @pytest.mark.parametrize("rule", ["first", "mean"])
    def test_a_copy_that_its_checksum_contradicts_is_not_taken(
        self, damaged: int, rule: str, ckpttools: Run, tmp_path: Path
    ) -> None:
        from ckpttools.layouts import open_snapshot

        nodes = spread(SNAPSHOT, tmp_path, 2, lambda _: [0, 1])
        piece = open_snapshot(str(SNAPSHOT), is_located=True).checkpoint.by_name[NORM].pieces[0]
        path = nodes[damaged] / piece.extent.file
        data = bytearray(path.read_bytes())
        data[piece.extent.offset] ^= 1
        path.write_bytes(data)
        good = str(nodes[1 - damaged] / piece.extent.file)
        assert ckpttools("consolidate", *as_options(nodes), tmp_path / "out").exit_code == 1
        answer = ckpttools("consolidate", *as_options(nodes), tmp_path / "out", "--replicas", rule)
        assert answer.exit_code == 0
        assert ckpttools("validate", tmp_path / "out", "--against", SNAPSHOT, "--allow-missing").exit_code == 0
        (row,) = seal_of(tmp_path / "out")["origin"]["replicas"]["boxes"]
        assert (row["tensor"], row["taken"]) == (NORM, [good])

    def test_a_store_as_destination_takes_the_same_copy(self, ckpttools: Run, tmp_path: Path) -> None:
        pytest.importorskip("fsspec")
        from ckpttools.layouts import open_snapshot

        nodes = spread(SNAPSHOT, tmp_path, 2, lambda _: [0, 1])
        piece = open_snapshot(str(SNAPSHOT), is_located=True).checkpoint.by_name[NORM].pieces[0]
        path = nodes[0] / piece.extent.file
        data = bytearray(path.read_bytes())
        data[piece.extent.offset] ^= 1
        path.write_bytes(data)
        url = f"memory://{uuid.uuid4()}/out"
        answer = ckpttools("consolidate", *as_options(nodes), url, "--replicas", "first")
        assert answer.exit_code == 0, answer.stderr
        assert ckpttools("validate", url, "--against", SNAPSHOT, "--allow-missing").exit_code == 0

    def test_a_truncated_copy_and_an_item_that_does_not_open_are_passed_over(self, ckpttools: Run, tmp_path: Path) -> None:
        nodes = spread(SNAPSHOT, tmp_path, 2, lambda _: [0, 1])
        (nodes[0] / "__2_0.distcp").write_bytes((SNAPSHOT / "__2_0.distcp").read_bytes()[:-50])
        (nodes[1] / "__1_0.distcp").write_bytes(b"\0" * 8 + (SNAPSHOT / "__1_0.distcp").read_bytes()[8:])
        (nodes[0] / "__3_0.distcp").write_bytes(b"\0" * 8 + (SNAPSHOT / "__3_0.distcp").read_bytes()[8:])
        assert ckpttools("consolidate", *as_options(nodes), tmp_path / "out").exit_code == 1
        answer = ckpttools("consolidate", *as_options(nodes), tmp_path / "out", "--replicas", "first", "--everything")
        assert answer.exit_code == 0, answer.stderr
        assert ckpttools("validate", tmp_path / "out", "--against", SNAPSHOT, "--allow-missing").exit_code == 0

    def test_replicas_of_ranks_are_settled_by_the_same_rule(
        self, ckpttools: Run, copy_of: Callable[[str], Path], tmp_path: Path
    ) -> None:
        torch = pytest.importorskip("torch", reason="needs torch, which writes the other replica")
        checkpoint = copy_of("torch/perrank_dtensor_verl_layout_w2/ckpt")
        path = checkpoint / "model_world_size_2_rank_1.pt"
        state = torch.load(path, weights_only=False)
        before = state["freqs_cis"].clone()
        state["freqs_cis"] = before + 1
        torch.save(state, path)
        answer = ckpttools("consolidate", checkpoint, tmp_path / "first", "--replicas", "first")
        assert answer.exit_code == 0
        record = seal_of(tmp_path / "first")["origin"]["replicas"]
        assert [r["tensor"] for r in record["boxes"]] == ["freqs_cis"]
        answer = ckpttools("consolidate", checkpoint, tmp_path / "mean", "--replicas", "mean")
        if before.is_floating_point():
            assert answer.exit_code == 0
            assert np.allclose(tensor(tmp_path / "mean/model.safetensors", "freqs_cis"), (before + 0.5).numpy().ravel())
        else:
            assert "no mean" in answer.stderr

    @pytest.mark.parametrize(
        ("fixture", "file", "at"),
        [
            ("hf_llama_bf16_tied_sharded", "model-00001-of-00002.safetensors", 20),
            ("hf_llama_bf16_tied_sharded", "model.safetensors.index.json", 0),
            ("hf4_gpt2_bin_sharded", "pytorch_model-00001-of-00004.bin", -12),
            ("dcp_fsdp2_w2", ".metadata", 2),
        ],
    )
    @pytest.mark.parametrize("damaged", [0, 1])
    def test_a_copy_that_does_not_read_is_passed_over_whichever_root_has_it(
        self, fixture: str, file: str, at: int, damaged: int, ckpttools: Run, tmp_path: Path
    ) -> None:
        whole = FIXTURES / "torch" / fixture / "ckpt"
        roots = spread(whole, tmp_path, 2, lambda path: [0, 1])
        data = bytearray((roots[damaged] / file).read_bytes())
        data[at] ^= 0xFF
        (roots[damaged] / file).write_bytes(data)

        checked = ckpttools("validate", *as_options(roots), "--json")
        stopped = ckpttools("consolidate", *as_options(roots), tmp_path / "out")
        answer = ckpttools("consolidate", *as_options(roots), tmp_path / "out", "--replicas", "first")

        assert checked.exit_code == 1
        assert set(checked.codes) - {"unreferenced-file", "container-inconsistent"} == {"replica-mismatch"}
        assert any(f"{roots[damaged]}/{file}" in f["where"] for f in checked.document["findings"])
        assert stopped.exit_code == 1
        assert answer.exit_code == 0, answer.stderr
        assert ckpttools("validate", tmp_path / "out", "--against", whole, "--allow-missing").exit_code == 0

    def test_a_file_that_reads_in_no_root_is_damaged_as_in_one(self, ckpttools: Run, tmp_path: Path) -> None:
        roots = spread(FIXTURES / "torch/hf_llama_bf16_tied_sharded/ckpt", tmp_path, 2, lambda path: [0, 1])
        for root in roots:
            file = root / "model-00001-of-00002.safetensors"
            file.write_bytes(file.read_bytes()[:9] + b"\xff" + file.read_bytes()[10:])

        assert "bad-header" in ckpttools("validate", *as_options(roots), "--json").codes
        assert ckpttools("consolidate", *as_options(roots), tmp_path / "out", "--replicas", "first").exit_code == 1


def seal_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "ckpttools-seal.json").read_text())


def tensor(path: Path, name: str) -> Any:
    """The float32 values of a tensor in a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    return np.frombuffer(data[start + begin : start + end], "<f4")
