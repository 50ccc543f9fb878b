"""Times the commands against `cp` and sync of the same bytes, in turn, and prints medians, ratios and peak memory.

    python bench/make_checkpoint.py WORK/rows --cut rows && python bench/make_checkpoint.py WORK/columns --cut columns
    python bench/run.py WORK --runs 5

Wall times scatter on shared machines; only the ratios of runs taken in turn are worth quoting.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path


def timed(command: list[str], output: Path | None) -> tuple[float, float]:
    """(wall seconds, peak resident MB) of a command, its output removed before and synced as part of the time."""
    if output is not None:
        shutil.rmtree(output, ignore_errors=True)
        output.unlink(missing_ok=True) if output.is_file() else None
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    if status >> 8 not in (0, 1):  # 1 is how diff says that something differs
        sys.exit(f"{' '.join(command)} exits {status >> 8}")
    return time.perf_counter() - start, usage.ru_maxrss / 1000


def main() -> None:
    """Parse the command line, run the rounds, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jobs", default="2")
    options = parser.parse_args()
    work, jobs = options.work, ["--jobs", options.jobs, "-q"]
    ckpttools = [sys.executable, "-m", "ckpttools"]
    torch_file, out = str(work / "rows/full.pt"), work / "out"
    peer = "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f(*sys.argv[1:])"
    jobs_of: dict[str, tuple[list[str], Path | None]] = {
        "cp and sync of the output's bytes": (["cp", torch_file, str(out)], out),
        "consolidate rows": ([*ckpttools, "consolidate", str(work / "rows/dcp"), str(out), *jobs], out),
        "consolidate rows, not verified": (
            [*ckpttools, "consolidate", str(work / "rows/dcp"), str(out), "--no-verify", *jobs],
            out,
        ),
        "consolidate columns": ([*ckpttools, "consolidate", str(work / "columns/dcp"), str(out), *jobs], out),
        "reshard columns to rows": (
            [*ckpttools, "reshard", str(work / "columns/dcp"), str(out), "--to", "dcp", "--mesh", "fsdp=4", *jobs],
            out,
        ),
        "torch's dcp_to_torch_save, rows": ([sys.executable, "-c", peer, str(work / "rows/dcp"), str(out)], out),
        "hash, rows": ([*ckpttools, "hash", str(work / "rows/dcp"), *jobs], None),
        "validate, columns": ([*ckpttools, "validate", str(work / "columns/dcp"), *jobs], None),
        "cmp of two torch files": (["cmp", torch_file, str(work / "columns/full.pt")], None),
        "diff, the same in rows and columns": (
            [*ckpttools, "diff", str(work / "rows/dcp"), str(work / "columns/dcp"), *jobs],
            None,
        ),
        "diff, nearly every element changed": ([*ckpttools, "diff", torch_file, str(work / "rows/next.pt"), *jobs], None),
        "validate --depth commit": ([*ckpttools, "validate", str(work / "rows/dcp"), "--depth", "commit", "-q"], None),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs_of}
    peaks: dict[str, float] = dict.fromkeys(jobs_of, 0.0)
    for _ in range(options.runs):
        for name, (command, output) in jobs_of.items():
            seconds, peak = timed(command, output)
            times[name].append(seconds)
            peaks[name] = max(peaks[name], peak)
    limit = times["cp and sync of the output's bytes"]
    sys.stdout.write(
        "| job | wall s, median (min to max) | ratio to cp and sync, median | peak MB |\n| --- | --- | --- | --- |\n"
    )
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, limit, strict=True))
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        sys.stdout.write(f"| {name} | {spread} | {ratio:.2f} | {peaks[name]:.0f} |\n")


if __name__ == "__main__":
    main()
