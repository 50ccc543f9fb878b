"""Starts a script as the ranks of a job on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_ranks(script: Path, directory: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Give a list of runs, each for the same number of ranks, to as many processes; fails with what a rank said."""
    (ranks,) = {options["ranks"] for options in runs}
    file = directory / f"options-{ranks}.json"
    file.write_text(json.dumps(runs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(file)],
            env={**base, "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]
    try:
        said = [p.communicate(timeout=1800)[0] for p in started]
    finally:
        for process in started:
            process.kill()
    failed = [text[-3000:] for process, text in zip(started, said, strict=True) if process.returncode]
    assert not failed, "\n".join(sorted(failed, key=lambda text: "Connection closed" in text))  # of the others when one fails
