"""The examples for cron, systemd, Kubernetes and Slurm in the how-to guides: each parses, and each command line in them runs."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer
from tests.run_trees import make_real, make_tiny

HOW_TO = Path(__file__).parent.parent / "docs" / "how-to"
PAGES = ("prune-from-cron.md", "watch-a-run.md", "check-before-restart.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[\s/=])ckpttools (?=[a-z])([^;|&\n#]*)")
CRON = re.compile(r"(?:(?:[\d*,/-]+)\s+){5}(.+)")
HOUR_S = 3600


def blocks(page: str, language: str | None = None) -> list[str]:
    """The fenced blocks of a guide, but transcripts, which are run elsewhere."""
    found = BLOCK.findall((HOW_TO / page).read_text(encoding="utf-8"))
    return [text for name, text in found if name != "console" and language in (None, name)]


def units(tmp_path: Path) -> list[Path]:
    """The unit files of the guide, with a program that is there."""
    (text,) = blocks("prune-from-cron.md", "ini")
    found = []
    for name, body in re.findall(r"^# \S*/(\S+)\n(.*?)(?=^# |\Z)", text, re.MULTILINE | re.DOTALL):
        path = tmp_path / name
        path.write_text(body.replace("/usr/local/bin/ckpttools", sys.executable))
        found.append(path)
    return found


def kubernetes() -> dict:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    (text,) = blocks("prune-from-cron.md", "yaml")
    return yaml.safe_load(text)


def command_lines() -> list[str]:
    """Every command line of ours in the guides, after `ckpttools`."""
    texts = [text for page in PAGES for name in ("", "sh", "ini") for text in blocks(page, name)]
    lines = [m.strip() for text in texts for m in COMMAND.findall(text)]
    (listed,) = re.findall(r"command: \[ckpttools, (.*)\]", (HOW_TO / "prune-from-cron.md").read_text(encoding="utf-8"))
    return [*lines, listed.replace(",", "")]


@pytest.fixture
def fill(tmp_path: Path) -> Callable[[str], str]:
    """Puts the places of the guides below a directory of the test, with a run of ten snapshots in it."""
    now = time.time()
    for step in range(1, 10):
        make_tiny(tmp_path / "runs" / "7b" / f"step-{step}000", step=step)
    make_real(tmp_path / "runs" / "7b" / "step-10000")
    for step in range(1, 11):
        snapshot = tmp_path / "runs" / "7b" / f"step-{step}000"
        for path in (*snapshot.rglob("*"), snapshot):
            os.utime(path, (now - (10.2 - step) * HOUR_S / 2,) * 2)
    (rules,) = blocks("prune-from-cron.md", "toml")
    (tmp_path / "runs" / "prune.toml").write_text(rules.replace("/var/log", str(tmp_path)).replace("2TB", "1MB"))
    places = {
        "gs://bucket/7b": f"{tmp_path}/runs/7b",
        "/var/lib/node_exporter": str(tmp_path),
        "/runs/*": f"{tmp_path}/runs/7b",
        "/runs": f"{tmp_path}/runs",
        "$SCRATCH": f"{tmp_path}/runs",
        "$SNAPSHOT": f"{tmp_path}/runs/7b/step-10000",
        "SNAPSHOT": f"{tmp_path}/runs/7b/step-10000",
    }

    def fill(line: str) -> str:
        return re.sub("|".join(map(re.escape, places)), lambda m: places[m[0]], line)

    return fill


def test_the_guides_have_command_lines() -> None:
    assert 8 < len(command_lines())
    assert {"prune", "status", "validate"} <= {line.split()[0] for line in command_lines()}


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_runs(ckpttools: Callable[..., Answer], fill: Callable[[str], str], tmp_path: Path, line: str) -> None:
    args = shlex.split(fill(line))
    answer = ckpttools(*args)
    assert 0 == answer.exit_code, answer
    assert "--quiet" not in args or answer.said == ""
    if "--apply" in args:
        assert ("", True) == (answer.said, len(list((tmp_path / "runs" / "7b").iterdir())) < 10)
        assert (tmp_path / "runs" / "7b" / "step-10000").exists()


@pytest.mark.parametrize("page", PAGES)
def test_crontab_lines_have_five_fields_and_a_command(page: str) -> None:
    for text in blocks(page, ""):
        for line in text.splitlines():
            match = CRON.fullmatch(line)
            assert match is not None, line
            assert "%" not in match[1], "cron makes a line break of it"


def test_unit_files_parse(tmp_path: Path) -> None:
    service, timer = units(tmp_path)
    assert ("prune.service", "prune.timer") == (service.name, timer.name)
    for path in (service, timer):
        configparser.ConfigParser(strict=True).read_string(path.read_text())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("parsed, but not verified: no systemd-analyze")
    verified = subprocess.run(["systemd-analyze", "verify", service, timer], capture_output=True, text=True, check=False)
    assert (0, "") == (verified.returncode, verified.stderr)


def test_the_cron_job_is_one() -> None:
    job = kubernetes()
    assert ("batch/v1", "CronJob", "Forbid") == (job["apiVersion"], job["kind"], job["spec"]["concurrencyPolicy"])
    assert 5 == len(job["spec"]["schedule"].split())
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert all(isinstance(word, str) for word in container["command"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    mounts = [m["mountPath"] for m in container["volumeMounts"]]
    assert any(word.startswith(f"{mount}/") for word in container["command"] for mount in mounts)


@pytest.mark.parametrize("text", [text for page in PAGES for text in blocks(page, "sh")])
def test_shell_scripts_parse(text: str) -> None:
    assert 0 == subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode


def test_the_slurm_script_has_its_directives_before_its_commands() -> None:
    (text,) = [text for text in blocks("prune-from-cron.md", "sh") if "#SBATCH" in text]
    lines = text.splitlines()
    assert lines[0].startswith("#!")  # sbatch refuses a script without
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))


def test_the_slurm_script_runs(fill: Callable[[str], str], tmp_path: Path) -> None:
    """With an `sbatch` that only says how it was called."""
    (text,) = [text for text in blocks("prune-from-cron.md", "sh") if "#SBATCH" in text]
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ckpttools").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpttools "$@"\n')
    (tools / "sbatch").write_text('#!/bin/sh\necho "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    script = tmp_path / "prune.sh"
    script.write_text(text)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SCRATCH": str(tmp_path / "runs")}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True, env=environment)
    assert (f"--begin=now+1hour {script}\n", "") == (done.stdout, done.stderr)
    assert ["step-10000", "step-5000", "step-8000", "step-9000"] == sorted(os.listdir(tmp_path / "runs" / "7b"))
