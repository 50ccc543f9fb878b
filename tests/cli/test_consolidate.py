"""`consolidate` as a user meets it: what it refuses, what it proves, what it says, what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttools.errors import DestinationError
from ckpttools.operations.conversion import require_replaceable
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
SOURCE = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"


def names_in(path: Path) -> set[str]:
    """Tensor names in the header of a safetensors file."""
    data = path.read_bytes()
    return set(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) - {"__metadata__"}


class TestProof:
    @pytest.mark.parametrize("case", ["dmg_distcp_bitflip_tensor", "dmg_zip_bitflip_tensor"])
    def test_a_flipped_bit_is_not_given_a_right_checksum(self, case: str, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("consolidate", FIXTURES / "torch" / case / "ckpt", tmp_path / "out")
        assert answer.exit_code == 1
        assert "checksum-mismatch" in answer.stderr
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("case", ["dcp_fsdp2_w2", "perrank_dtensor_verl_layout_w2"])
    def test_a_source_with_checksums_is_proved_before_a_store_shows_the_output(self, case: str, ckpttools: Run) -> None:
        pytest.importorskip("fsspec")
        url, source = f"memory://{uuid.uuid4()}/out", FIXTURES / "torch" / case / "ckpt"
        answer = ckpttools("consolidate", source, url)
        assert answer.exit_code == 0, answer.stderr
        assert ckpttools("validate", url, "--against", source, "--allow-missing").exit_code == 0

    def test_a_known_checksum_mismatch_can_be_allowed(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "dmg_distcp_bitflip_tensor" / "ckpt"
        answer = ckpttools("consolidate", source, tmp_path / "out", "--allow-findings", "checksum-mismatch")
        assert answer.exit_code == 0

    def test_a_source_that_is_not_as_sealed_is_refused(self, ckpttools: Run, tmp_path: Path) -> None:
        sealed = tmp_path / "sealed"
        assert ckpttools("consolidate", SOURCE, sealed).exit_code == 0
        data = bytearray((sealed / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (sealed / "model.safetensors").write_bytes(data)
        answer = ckpttools("consolidate", sealed, tmp_path / "out")
        assert answer.exit_code == 1
        assert "digest-mismatch" in answer.stderr
        assert not (tmp_path / "out").exists()

    def test_replicas_that_differ_are_refused(self, ckpttools: Run, copy_of: Callable[[str], Path], tmp_path: Path) -> None:
        torch = pytest.importorskip("torch", reason="needs torch, which writes the other replica")
        checkpoint = copy_of("torch/perrank_dtensor_verl_layout_w2/ckpt")
        path = checkpoint / "model_world_size_2_rank_1.pt"
        state = torch.load(path, weights_only=False)
        state["freqs_cis"] = state["freqs_cis"] + 1
        torch.save(state, path)
        answer = ckpttools("consolidate", checkpoint, tmp_path / "out")
        assert answer.exit_code == 1
        assert "replica-mismatch" in answer.stderr


class TestDestination:
    @pytest.mark.parametrize("spelling", ["file://{}", "{}", "{}/", "file://localhost{}"])
    def test_a_source_is_never_its_own_destination(self, spelling: str, ckpttools: Run, copy_of: Callable[[str], Path]) -> None:
        checkpoint = copy_of("torch/dcp_fsdp2_w2/ckpt")
        before = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
        answer = ckpttools("consolidate", spelling.format(checkpoint), checkpoint, "--overwrite")
        assert answer.exit_code == 4
        assert {p.name: p.read_bytes() for p in checkpoint.iterdir()} == before

    @pytest.mark.parametrize("destination", ["", ".", "..", "../home"])
    def test_an_empty_variable_in_a_script_does_not_cost_a_directory(
        self, destination: str, ckpttools: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "home"
        home.mkdir()
        (home / "thesis.tex").write_text("precious")
        monkeypatch.chdir(home)
        assert ckpttools("consolidate", SOURCE, destination, "--overwrite").exit_code in (2, 4)
        assert (home / "thesis.tex").read_text() == "precious"

    def test_only_a_checkpoint_is_replaced(self, ckpttools: Run, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        answer = ckpttools("consolidate", SOURCE, tmp_path / "out", "--overwrite")
        assert answer.exit_code == 4
        assert (tmp_path / "out" / "notes.txt").exists()

    @pytest.mark.parametrize("destination", ["/", ".", "..", "around", "around/ckpt", "around/ckpt/inner"])
    def test_a_place_that_holds_more_is_refused_before_it_is_looked_at(
        self, destination: str, ckpttools: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tmp_path / "around" / "ckpt"
        shutil.copytree(SOURCE, source)
        (tmp_path / "here" / "in").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here" / "in")
        place = str(tmp_path / destination) if destination.startswith("around") else destination
        assert ckpttools("consolidate", source, place, "--overwrite").exit_code == 4
        assert ckpttools("reshard", source, place, "--overwrite", "--to", "dcp", "--mesh", "fsdp=2").exit_code == 4

        monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("it was listed"))
        with pytest.raises(DestinationError):
            require_replaceable(place, (str(source),), is_file=False, is_overwriting=True)

    def test_a_directory_of_very_many_files_is_no_checkpoint(
        self, ckpttools: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpttools.operations.conversion._MAX_REPLACED_FILES", 3)
        shutil.copytree(SOURCE, tmp_path / "out")
        for i in range(4):
            (tmp_path / "out" / f"{i}.txt").write_text("mine")
        answer = ckpttools("consolidate", SOURCE, tmp_path / "out", "--overwrite")
        assert answer.exit_code == 4
        assert "more than 3 files" in answer.stderr

        assert ckpttools("seal", tmp_path / "out").exit_code == 0
        assert ckpttools("consolidate", SOURCE, tmp_path / "out", "--overwrite").exit_code == 0

    def test_what_a_damaged_source_leaves_is_named(self, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools(
            "consolidate",
            FIXTURES / "torch/dmg_distcp_bitflip_tensor/ckpt",
            tmp_path / "out",
            "--everything",
            "--format",
            "torch",
        )
        assert answer.exit_code == 1
        for left in tmp_path.iterdir():
            assert str(left) in answer.stderr

    def test_nothing_is_left_beside_the_output(self, ckpttools: Run, tmp_path: Path) -> None:
        assert ckpttools("consolidate", SOURCE, tmp_path / "out").exit_code == 0
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


class TestOptions:
    @pytest.mark.parametrize(
        "words",
        [
            ("--max-shard-size", "0"),
            ("--max-shard-size", "1GB", "--single-file"),
            ("--max-shard-size", "1GB", "--format", "torch"),
            ("--allow-findings", "no-such-code"),
            ("--dtype", "int8"),
            ("--rename", "no equals sign"),
        ],
    )
    def test_what_cannot_be_meant_is_wrong_usage(self, words: tuple[str, ...], ckpttools: Run, tmp_path: Path) -> None:
        assert ckpttools("consolidate", SOURCE, tmp_path / "out", *words).exit_code == 2
        assert not (tmp_path / "out").exists()

    def test_names_are_stripped_and_renamed(self, ckpttools: Run, tmp_path: Path) -> None:
        out = tmp_path / "out.safetensors"
        words = ("--strip-prefix", "model.", "--rename", r"^layers\.(\d+)=h.\1")
        assert ckpttools("consolidate", SOURCE, out, *words).exit_code == 0
        assert "h.0.attention.wk.weight" in names_in(out)

    def test_a_name_of_which_nothing_is_left_is_refused(self, ckpttools: Run, tmp_path: Path) -> None:
        answer = ckpttools("consolidate", SOURCE, tmp_path / "out.safetensors", "--rename", r"^.*attention.*=")
        assert answer.exit_code != 0
        assert list(tmp_path.iterdir()) == []

    def test_include_reaches_into_every_family(self, ckpttools: Run, tmp_path: Path) -> None:
        out = tmp_path / "out.safetensors"
        assert ckpttools("consolidate", SOURCE, out, "--include", "optim.*exp_avg").exit_code == 0
        assert names_in(out)
        assert all(n.startswith("optim.") and n.endswith("exp_avg") for n in names_in(out))

    def test_flattened_optimizer_state_is_not_taken_for_weights(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "dcp_steps_titan_layout_w2" / "ckpt" / "step-10"
        assert ckpttools("consolidate", source, tmp_path / "out.safetensors").exit_code == 0
        assert not [n for n in names_in(tmp_path / "out.safetensors") if "exp_avg" in n]

    def test_scales_of_block_formats_are_not_cast(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "safetensors_all_dtypes" / "ckpt"
        assert ckpttools("consolidate", source, tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
        lines: list[Any] = ckpttools("hash", tmp_path / "out", "--json").document["tensors"]
        dtypes = {line["name"]: line["dtype"] for line in lines}
        assert dtypes["float8_e8m0fnu.mat"] == "float8_e8m0fnu"
        assert dtypes["float32.mat"] == "bfloat16"
        assert dtypes["int64.mat"] == "int64"

    def test_tied_tensors_are_written_once_and_compare_equal(self, ckpttools: Run, tmp_path: Path) -> None:
        source = FIXTURES / "torch" / "save_zip_shared_views" / "ckpt" / "model.pt"
        for words, count in ((("--exclude", "nothing"), 1), (("--expand-tied",), 2)):
            out = tmp_path / f"out{count}.safetensors"
            assert ckpttools("consolidate", source, out, *words).exit_code == 0
            assert len({"embed.weight", "lm_head.weight"} & names_in(out)) == count
            assert ckpttools("validate", out, "--against", source).exit_code == 0


class TestStreams:
    def test_a_reader_that_goes_away_does_not_change_the_verdict(self) -> None:
        damaged = FIXTURES / "torch" / "dmg_shard_missing" / "ckpt"
        command = [sys.executable, "-m", "ckpttools", "validate", str(damaged), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 3

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on a full disk")
    def test_a_full_disk_under_standard_output_is_said(self) -> None:
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "ckpttools", "hash", str(SOURCE)]
            answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert answer.returncode == 4
        assert "standard output cannot be written" in answer.stderr


def test_a_file_system_that_lacks_a_call_is_told_and_not_to_be_tried_again(
    ckpttools: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FUSE over HDFS knows no ftruncate (safetensors 787)."""
    real = os.ftruncate

    def lacking(fd: int, length: int) -> None:
        if length:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        real(fd, length)

    monkeypatch.setattr(os, "ftruncate", lacking)
    answer = ckpttools("consolidate", FIXTURES / "torch/hf_llama_bf16_tied_sharded/ckpt", tmp_path / "out")
    assert answer.exit_code == 4
    assert "write to a local disk" in answer.stderr
    assert "again" not in answer.stderr
