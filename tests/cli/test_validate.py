"""`validate` as a script sees it: the exit status for what the storage refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_the_storage_refuses_is_no_damage(number: int, ckpttools: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, *args: int, **kwargs: int) -> int:
        if str(path).endswith("__1_0.distcp"):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    answer = ckpttools("validate", FIXTURES / "torch" / "dcp_fsdp2_w2" / "ckpt", "--json")
    assert answer.exit_code == 4
    assert "unreadable-file" in answer.codes


def test_a_tracker_that_names_no_snapshot_is_told_beside_the_sound_one_that_is_taken(ckpttools: Run) -> None:
    run = FIXTURES / "deepspeed" / "damaged_latest_names_missing_tag" / "ckpt"
    answer = ckpttools("validate", run, "--json")
    assert answer.exit_code == 3
    (finding,) = answer.document["findings"]
    assert ("tracker-dangling", f"{run}/latest", "error") == (finding["code"], finding["where"], finding["severity"])
    assert "global_step40" in finding["expected"]
    assert ckpttools("validate", run / "global_step30").exit_code == 0  # the snapshot itself is whole


def test_a_tracker_that_names_a_save_in_progress_is_a_warning(ckpttools: Run) -> None:
    run = FIXTURES / "deepspeed" / "damaged_missing_zero_rank" / "ckpt"
    answer = ckpttools("validate", run, "--json")
    assert answer.exit_code == 0
    (finding,) = answer.document["findings"]
    assert ("tracker-dangling", "warning", "unfinished") == (finding["code"], finding["severity"], finding["found"])


def test_a_conversion_of_a_run_says_that_its_tracker_names_nothing(ckpttools: Run) -> None:
    run = FIXTURES / "deepspeed" / "damaged_latest_names_missing_tag" / "ckpt"
    answer = ckpttools("hash", run)
    assert answer.exit_code == 0
    assert f"ckpttools: {run}/latest names `global_step40`: no such snapshot" in answer.stderr
