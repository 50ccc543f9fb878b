"""Runs programs whose ranks form a gloo group on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TRIES = 3


def run_ranks(program: str, *arguments: str, rendezvous: Path | None = None) -> str:
    """What the ranks complain of: nothing, or the end of what they wrote to standard error.

    A rank that torch's own threads abort while the group is taken down says nothing of what is tested, so it is tried again.

    Args: rendezvous: the file by which the ranks find each other, where it is not the program's own to remove.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    complaint = ""
    for _ in range(_TRIES):
        command = [sys.executable, program, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
        if done.returncode == 0:
            return ""
        complaint = done.stderr[-3000:] or f"exit status {done.returncode}"
        if "terminated with signal SIGABRT" not in done.stderr:
            break
        if rendezvous is not None:
            rendezvous.unlink(missing_ok=True)
    return complaint
