"""`reshard` as a user meets it: what it refuses before a byte is written, what it carries, what it says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpttools.cli import reshard as cli
from ckpttools.layouts import Snapshot, open_snapshot
from ckpttools.operations import conversion, targets
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
SOURCE = FIXTURES / "torch" / "dcp_fsdp2_w4_uneven" / "ckpt"


def test_the_command_line_knows_every_target() -> None:
    assert tuple(targets.BY_NAME) == cli._TARGETS


class TestRefusals:
    """Nothing is there afterwards, and the message has the numbers."""

    @pytest.mark.parametrize(
        ("mesh", "said"),
        [
            ("foo=2", "unknown mesh axis `foo`"),
            ("pp=3", "--mesh pp=2"),
            ("ep=2", "experts"),
            ("fsdp=0", "not a mesh axis"),
            ("fsdp=2,fsdp=2", "named twice"),
            ("fsdp", "write it like tp=2"),
            ("", "no axis is named"),
        ],
    )
    def test_a_mesh_that_does_not_fit(self, mesh: str, said: str, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "dcp", "--mesh", mesh)
        assert answer.exit_code == 2
        assert said in answer.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("release", ["9.9", "2.14", "2.3", "newest"])
    def test_a_torch_whose_form_is_not_known(self, release: str, ckpttools: Run, tmp_path: Path) -> None:
        options = ("--to", "dtensor", "--mesh", "fsdp=2", "--torch-release", release)
        answer = ckpttools("reshard", SOURCE, tmp_path / "out", *options)
        assert answer.exit_code == 2
        assert "2.13" in answer.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("case", ["dmg_shard_missing", "dmg_metadata_chunk_hole", "dmg_distcp_truncated"])
    def test_a_source_that_is_not_whole(self, case: str, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("reshard", FIXTURES / "torch" / case / "ckpt", tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2")
        assert answer.exit_code in (1, 3)
        assert list(tmp_path.iterdir()) == []

    def test_a_flipped_bit_is_not_given_a_right_checksum(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "dmg_distcp_bitflip_tensor" / "ckpt"
        answer = ckpttools("reshard", source, tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2")
        assert answer.exit_code == 1
        assert "checksum-mismatch" in answer.stderr
        assert not (tmp_path / "out").exists()

    def test_a_flipped_bit_in_an_object(self, ckpttools: Run, tmp_path: Path) -> None:
        shutil.copytree(SOURCE, tmp_path / "in")
        entry = next(o for o in open_snapshot(str(SOURCE)).checkpoint.objects if o.name.endswith(".lr"))
        assert entry.extent is not None
        data = bytearray((SOURCE / entry.extent.file).read_bytes())
        item = bytes(data[entry.extent.offset : entry.extent.offset + entry.extent.length])
        data[entry.extent.offset + item.index(b"G?") + 3] ^= 1  # in the mantissa of the pickled float
        (tmp_path / "in" / entry.extent.file).write_bytes(data)
        answer = ckpttools("reshard", tmp_path / "in", tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2")
        assert answer.exit_code == 1
        assert "checksum-mismatch" in answer.stderr
        assert not (tmp_path / "out").exists()

    def test_a_destination_that_is_there(self, ckpttools: Run, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("x")
        answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2")
        assert answer.exit_code == 4
        assert (tmp_path / "out" / "precious").read_text() == "x"

    def test_what_a_target_cannot_hold_is_named_and_needs_drop(self, ckpttools: Run, tmp_path: Path) -> None:
        arguments = ["reshard", SOURCE, tmp_path / "out", "--to", "safetensors", "--mesh", "fsdp=2"]
        answer = ckpttools(*arguments)
        assert answer.exit_code == 4
        assert "optim.state" in answer.stderr
        assert "--drop" in answer.stderr
        assert list(tmp_path.iterdir()) == []
        assert ckpttools(*arguments, "--drop").exit_code == 0

    @pytest.mark.parametrize("layers", ["8,x", "0,2"])
    def test_layers_of_stages_that_are_none(self, layers: str, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "dcp", "--mesh", "pp=2", "--pp-layers", layers)
        assert answer.exit_code == 2

    @pytest.mark.parametrize(
        ("rules", "said"), [("nothing-there.toml", "no file and no built-in set"), (str(SOURCE), "text file")]
    )
    def test_rules_that_are_none(self, rules: str, said: str, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "dcp", "--mesh", "tp=2", "--placements", rules)
        assert answer.exit_code == 2
        assert said in answer.stderr


class TestWhatIsWritten:
    def test_a_dry_run_says_where_everything_goes_and_writes_nothing(self, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "dcp", "--mesh", "tp=2,fsdp=2", "--dry-run")
        assert answer.exit_code == 0
        assert "tp: dim 0; fsdp: dim 0" in answer.stdout
        assert "fsdp=1,tp=1" in answer.stdout
        assert "__2_0.distcp" in answer.stdout
        assert list(tmp_path.iterdir()) == []

    def test_rules_of_a_file_decide(self, ckpttools: Run, tmp_path: Path) -> None:
        rules = tmp_path / "rules.toml"
        rules.write_text('[[rules]]\ntensors = ["*.wq.weight"]\naxis = "tp"\ndim = 1\n')
        arguments = ["--to", "dcp", "--mesh", "tp=2", "--placements", rules, "--dry-run", "--json"]
        document = ckpttools("reshard", SOURCE, tmp_path / "out", *arguments).document
        placed = {p["tensor"]: p["placement"] for p in document["placements"]}
        assert placed["model.layers.0.attention.wq.weight"] == "tp: dim 1"
        assert placed["optim.state.layers.0.attention.wq.weight.exp_avg"] == "tp: dim 1"
        assert placed["model.layers.0.attention.wk.weight"] == "replicated"

    def test_ranks_share_their_bytes_by_source_file(self, ckpttools: Run, tmp_path: Path) -> None:
        arguments = ["--to", "dcp", "--mesh", "fsdp=2", "--dry-run", "--json"]
        document = ckpttools("reshard", SOURCE, tmp_path / "out", *arguments).document
        assert [rank["at"] for rank in document["ranks"]] == ["fsdp=0", "fsdp=1"]
        assert all(sum(s["bytes"] for s in rank["sources"]) == rank["bytes"] for rank in document["ranks"])

    def test_ranks_have_files_of_their_own(self, ckpttools: Run, tmp_path: Path) -> None:
        arguments = ["--to", "dcp", "--mesh", "fsdp=3", "--files-per-rank", "2"]
        assert ckpttools("reshard", SOURCE, tmp_path / "out", *arguments).exit_code == 0
        files = {path.name for path in (tmp_path / "out").iterdir()}
        assert files == {".metadata", "ckpttools-seal.json", *(f"__{r}_{n}.distcp" for r in range(3) for n in range(2))}

    def test_objects_go_over_byte_for_byte(self, ckpttools: Run, tmp_path: Path) -> None:
        ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=3")
        found = [_object_bytes(root) for root in (SOURCE, tmp_path / "out")]
        assert found[0] == found[1]
        assert len(found[0]) > 10

    def test_an_object_that_holds_tensors_stays_one_object(self, ckpttools: Run, tmp_path: Path) -> None:
        dcp.save({"w": torch.arange(6.0), "pair": (torch.ones(3), "text")}, checkpoint_id=str(tmp_path / "in"), no_dist=True)
        answer = ckpttools("reshard", tmp_path / "in", tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2")
        assert answer.exit_code == 0, answer.stderr
        assert ckpttools("validate", tmp_path / "out").exit_code == 0
        assert ckpttools("hash", tmp_path / "out").stdout == ckpttools("hash", tmp_path / "in").stdout
        state = {"w": torch.zeros(6), "pair": (torch.zeros(3), "")}
        dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
        assert torch.equal(state["w"], torch.arange(6.0))
        assert torch.equal(state["pair"][0], torch.ones(3))
        assert state["pair"][1] == "text"

    def test_the_output_is_the_same_whatever_the_number_of_threads(self, ckpttools: Run, tmp_path: Path) -> None:
        for jobs in ("1", "4"):
            ckpttools("reshard", SOURCE, tmp_path / jobs, "--to", "dcp", "--mesh", "tp=2,fsdp=2", "--jobs", jobs)
        one, four = ({p.name: p.read_bytes() for p in (tmp_path / jobs).iterdir()} for jobs in ("1", "4"))
        assert one == four

    def test_tied_tensors_are_written_under_each_name(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "hf4_gpt2_bin_sharded" / "ckpt"
        assert ckpttools("reshard", source, tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=2").exit_code == 0
        assert ckpttools("hash", tmp_path / "out").stdout == ckpttools("hash", source).stdout


def _object_bytes(root: Path) -> dict[str, bytes]:
    """The torch archive of each object."""
    found = {}
    for entry in open_snapshot(str(root)).checkpoint.objects:
        assert entry.extent is not None
        data = (root / entry.extent.file).read_bytes()
        found[entry.name] = data[entry.extent.offset : entry.extent.offset + entry.extent.length]
    return found


class TestSeveralRoots:
    """A snapshot whose files lie on the disks of two nodes."""

    def test_the_files_of_two_nodes_are_one_snapshot(self, ckpttools: Run, tmp_path: Path) -> None:
        for node, files in (("a", ("__0_0.distcp", "__1_0.distcp", ".metadata")), ("b", ("__2_0.distcp", "__3_0.distcp"))):
            (tmp_path / node).mkdir()
            for file in files:
                shutil.copy(SOURCE / file, tmp_path / node / file)
        answer = ckpttools("reshard", tmp_path / "[ab]", tmp_path / "out", "--to", "dcp", "--mesh", "fsdp=3")
        assert answer.exit_code == 0, answer.stderr
        assert ckpttools("hash", tmp_path / "out").stdout == ckpttools("hash", SOURCE).stdout

    def test_copies_that_differ_stop_it_unless_told_how(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "dcp_hsdp_2x2" / "ckpt"
        for node in "ab":
            shutil.copytree(source, tmp_path / node)
        entry = open_snapshot(str(source), is_located=True).checkpoint.tensors[0]
        path = tmp_path / "b" / entry.pieces[0].extent.file
        data = bytearray(path.read_bytes())
        data[entry.pieces[0].extent.offset] ^= 1
        path.write_bytes(data)
        arguments = ["reshard", tmp_path / "a", tmp_path / "out", "--root", tmp_path / "b", "--to", "dcp", "--mesh", "fsdp=2"]
        answer = ckpttools(*arguments)
        assert answer.exit_code == 1
        assert not (tmp_path / "out").exists()
        assert ckpttools(*arguments, "--replicas", "first").exit_code == 0
        assert ckpttools("hash", tmp_path / "out").stdout == ckpttools("hash", source).stdout


def test_names_of_mesh_axes_are_those_of_the_job(ckpttools: Run, tmp_path: Path) -> None:
    arguments = ["--to", "dtensor", "--mesh", "fsdp=2", "--axis-name", "fsdp=dp_shard", "--device-type", "cuda"]
    assert ckpttools("reshard", SOURCE, tmp_path / "out", *arguments).exit_code == 0
    assert ckpttools("inspect", tmp_path / "out", "--json").document["mesh"] == {"dp_shard": 2}
    answer = ckpttools("reshard", SOURCE, tmp_path / "other", *arguments[:4], "--axis-name", "fsdp")
    assert (answer.exit_code, "write it like fsdp=dp_shard" in answer.stderr) == (2, True)


class TestNothingThatCannotBeReadBackIsVisible:
    """The reader is asked while the output has no name yet; a hidden partial directory is all that is left."""

    @pytest.mark.parametrize("command", [("consolidate",), ("reshard", "--to", "dcp", "--mesh", "fsdp=2")])
    def test_on_a_local_disk(
        self, command: tuple[str, ...], ckpttools: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def read_all_but_one(location: str, **manner: bool) -> Snapshot:
            snapshot = open_snapshot(location, **manner)
            return replace(snapshot, checkpoint=replace(snapshot.checkpoint, tensors=snapshot.checkpoint.tensors[1:]))

        monkeypatch.setattr(conversion, "open_snapshot", read_all_but_one)
        answer = ckpttools(command[0], SOURCE, tmp_path / "out", *command[1:])
        assert answer.exit_code == 1
        assert "does not read back" in answer.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("consolidate",), ("reshard", "--to", "dcp", "--mesh", "fsdp=2")])
def test_it_is_said_that_nothing_proves_a_source_complete(command: tuple[str, ...], ckpttools: Run, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "torch" / "hfwriter_sharded_w2" / "ckpt", tmp_path / "in")
    (tmp_path / "in" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    answer = ckpttools(command[0], tmp_path / "in", tmp_path / "out", *command[1:])
    assert answer.exit_code == 0
    assert "not proved complete" in answer.stdout
    told = ckpttools(command[0], tmp_path / "in", tmp_path / "out", *command[1:], "--json").document["notes"]
    assert ["not proved complete" in note for note in told] == [True]
