"""What every test may ask for: the command line in this process, a copy of a fixture, and how hard hypothesis tries."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings

from tests.fixture_cases import FIXTURES

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=100, **slow_is_fine)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **slow_is_fine)
settings.register_profile("thorough", max_examples=5000, **slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "quick"))


@dataclass(frozen=True)
class Answer:
    """What a command answered."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        return self.stdout + self.stderr

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        return json.loads(self.stdout)

    @property
    def codes(self) -> set[str]:
        """The codes of the findings in the JSON document."""
        return {finding["code"] for finding in self.document["findings"]}


@pytest.fixture
def ckpttools() -> Callable[..., Answer]:
    """Runs a command line in this process; an exception that the command does not turn into a message fails the test."""

    def run(*args: object) -> Answer:
        from ckpttools.cli import main

        result = CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)
        assert "Traceback" not in result.stderr
        assert "internal error" not in result.stderr, result.stderr
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str | Path], Path]:
    """Copies a fixture to a directory that the test may change, and returns where it is."""

    def copy(path: str | Path) -> Path:
        source = FIXTURES / path
        target = tmp_path / "copy" / source.name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
        return target

    return copy
