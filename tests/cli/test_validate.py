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
