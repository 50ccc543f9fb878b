"""`diff` as a user and a script meet it: what it prints, the document, the exit status."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpttools.dtypes import BY_NAME
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES
from tests.safetensors_bytes import container

Run = Callable[..., Answer]
DCP = FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt"
RUN = FIXTURES / "torch" / "hf_trainer_run" / "ckpt"
GOLDEN = Path(__file__).parents[1] / "golden" / "diff.json"


def f32(*values: float) -> tuple:
    return BY_NAME["float32"], (len(values),), np.array(values, "<f4").tobytes()


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two files with one tensor of every status."""
    bf16 = (BY_NAME["bfloat16"], (2,), np.array([0x3F80, 0x4000], "<u2").tobytes())
    wide = (BY_NAME["int64"], (2,), np.array([2**63 - 1, 7], "<i8").tobytes())
    low = (BY_NAME["int64"], (2,), np.array([-(2**63), 7], "<i8").tobytes())
    a = {"same": f32(1, 2), "changed": f32(1, 2, -0.0, 1), "dtype": bf16, "shape": f32(1), "mine": f32(1), "ints": wide}
    b = {
        "same": f32(1, 2),
        "changed": f32(1, 2.5, 0.0, float("nan")),
        "dtype": f32(1, 2.25),
        "shape": f32(1, 2),
        "ints": low,
        "yours": f32(1),
    }
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / f"{name}.safetensors").write_bytes(container(tensors))
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


class TestText:
    def test_what_differs_is_a_table_and_the_last_line_sums_up(self, sides: tuple[Path, Path], ckpttools: Run) -> None:
        answer = ckpttools("diff", *sides)
        assert answer.exit_code == 1
        lines = answer.stdout.splitlines()
        assert [" ".join(line.split()) for line in lines[:-1]] == [
            "differ max |a-b| max |a-b|/|b|",
            "changed 3 of 4, 1 in bits alone, 1 not finite 0.5 at [1] 0.2 at [1] changed float32 [4]",
            "dtype 1 of 2 0.25 at [1] 0.1111 at [1] dtype bfloat16 [2] and float32 [2]",
            "shape shape float32 [1] and float32 [2]",
            "only in A mine float32 [1]",
            "changed 1 of 2 1.845e+19 at [0] 2 at [0] ints int64 [2]",
            "only in B yours float32 [1]",
        ]
        assert lines[-1].endswith("7 tensors: 1 same, 2 changed, 1 dtype, 1 shape, 1 only in A, 1 only in B; 92 B compared")

    def test_same_ones_are_listed_when_asked(self, sides: tuple[Path, Path], ckpttools: Run) -> None:
        assert "same       " not in ckpttools("diff", *sides).stdout
        assert "same       " in ckpttools("diff", *sides, "--all").stdout

    def test_equal_sides_are_one_line_and_none_when_quiet(self, ckpttools: Run) -> None:
        answer = ckpttools("diff", DCP, DCP)
        assert (answer.exit_code, len(answer.stdout.splitlines())) == (0, 1)
        answer = ckpttools("diff", DCP, DCP, "-q")
        assert (answer.exit_code, answer.said) == (0, "")

    def test_objects_are_told_with_the_place_and_both_values(self, ckpttools: Run) -> None:
        answer = ckpttools("diff", RUN / "checkpoint-6", RUN / "checkpoint-9")
        assert "changed  scheduler.last_epoch  6 and 9" in answer.stdout.splitlines()

    def test_what_one_side_lacks_is_not_listed_when_it_is_allowed(self, sides: tuple[Path, Path], ckpttools: Run) -> None:
        answer = ckpttools("diff", *sides, "--allow-missing")
        assert "mine" not in answer.stdout
        assert "1 only in A" in answer.stdout

    def test_a_run_directory_stands_for_its_newest_snapshot(self, ckpttools: Run) -> None:
        answer = ckpttools("diff", RUN, RUN / "checkpoint-9", "-q")
        assert answer.exit_code == 0
        assert "checkpoint-9" in answer.stderr


class TestDocument:
    def test_it_is_the_golden_one(self, sides: tuple[Path, Path], ckpttools: Run) -> None:
        document = ckpttools("diff", *sides, "--json", "--rtol", "0.3").document
        for side in "ab":
            document[side]["path"] = Path(document[side]["path"]).name
        if "CKPTTOOLS_RENEW_GOLDEN" in os.environ:
            GOLDEN.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        assert document == json.loads(GOLDEN.read_text(encoding="utf-8"))

    def test_same_ones_are_in_it_when_asked(self, ckpttools: Run) -> None:
        assert [] == ckpttools("diff", DCP, DCP, "--json").document["tensors"]
        assert 126 == len(ckpttools("diff", DCP, DCP, "--json", "--all").document["tensors"])


class TestExitStatus:
    def test_close_is_well(self, tmp_path: Path, ckpttools: Run) -> None:
        for name, value in (("a", 1.0), ("b", 1.0001)):
            (tmp_path / f"{name}.safetensors").write_bytes(container({"w": f32(value)}))
        paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        assert [1, 0, 0, 1] == [
            ckpttools("diff", *paths, *words).exit_code
            for words in ((), ("--rtol", "1e-3"), ("--atol", "1e-3"), ("--rtol", "1e-6", "--atol", "0"))
        ]

    def test_an_incomplete_side(self, ckpttools: Run, copy_of: Callable[[str], Path]) -> None:
        whole = copy_of("torch/dcp_fsdp2_w2/ckpt")
        (whole / "__1_0.distcp").unlink()
        for paths in ((DCP, whole), (whole, DCP)):
            answer = ckpttools("diff", *paths, "--json")
            assert (answer.exit_code, answer.document["verdict"]) == (3, "incomplete")
            assert "missing-file" in answer.codes

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
    def test_a_file_that_the_storage_refuses(self, number: int, ckpttools: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def refusing(path: str, *args: int, **kwargs: int) -> int:
            if str(path).endswith("__1_0.distcp"):
                raise OSError(number, os.strerror(number), path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refusing)
        answer = ckpttools("diff", DCP, RUN / "checkpoint-9", "--json")
        assert answer.exit_code == 4
        assert "unreadable-file" in answer.codes

    @pytest.mark.parametrize(
        ("words", "status"),
        [
            (("--rtol", "-1"), 2),
            (("--atol", "nan"), 2),
            (("--rtol", "inf"), 2),
            (("--rename", "no equals sign"), 2),
            (("--include", "absent"), 4),
        ],
    )
    def test_what_cannot_be_meant(self, words: tuple[str, ...], status: int, ckpttools: Run) -> None:
        answer = ckpttools("diff", DCP, DCP, *words)
        assert (answer.exit_code, answer.stdout) == (status, "")

    def test_nothing_there(self, ckpttools: Run, tmp_path: Path) -> None:
        assert ckpttools("diff", DCP, tmp_path / "absent").exit_code == 4

    @pytest.mark.parametrize("seal", ["seal.json", "list.txt"])
    def test_a_seal_is_pointed_to_validate(self, seal: str, ckpttools: Run, tmp_path: Path) -> None:
        ckpttools("seal", DCP, "--output", tmp_path / "seal.json")
        (tmp_path / "list.txt").write_text(ckpttools("hash", DCP).stdout)
        answer = ckpttools("diff", DCP, tmp_path / seal)
        assert answer.exit_code == 2
        assert "validate" in answer.stderr
