"""Times `consolidate --weights fp32` of a ZeRO 3 checkpoint against DeepSpeed's own tool, in turn, with peak memory.

python bench/make_deepspeed.py WORK/zero3
python bench/run_deepspeed.py WORK --runs 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from run import timed

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    """Parse the command line, run the rounds, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", default="2")
    options = parser.parse_args()
    work = options.work
    source, out = str(work / "zero3"), work / "out"
    ours = [sys.executable, "-m", "ckpttools"]
    theirs = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32"]
    quiet = ["--jobs", options.jobs, "-q"]
    commands: dict[str, tuple[list[str], Path | None]] = {
        "interpreter with ckpttools": ([*ours, "--version"], None),
        "consolidate --weights fp32 (safetensors)": ([*ours, "consolidate", source, str(out), "--weights", "fp32", *quiet], out),
        "the same, not verified": (
            [*ours, "consolidate", source, str(out), "--weights", "fp32", "--no-verify", *quiet],
            out,
        ),
        "zero_to_fp32 --safe_serialization": ([*theirs, source, str(out), "--safe_serialization"], out),
        "zero_to_fp32": ([*theirs, source, str(out)], out),
        "validate": ([*ours, "validate", source, *quiet], None),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, float] = dict.fromkeys(commands, 0.0)
    for _ in range(options.runs):
        for name, (command, output) in commands.items():
            seconds, peak = timed(command, output)
            times[name].append(seconds)
            peaks[name] = max(peaks[name], peak)
    for name, seconds in times.items():
        scatter = f"{min(seconds):.1f} to {max(seconds):.1f}"
        sys.stdout.write(f"{name:44} {statistics.median(seconds):6.1f} s ({scatter})  peak {peaks[name]:7.0f} MB\n")


if __name__ == "__main__":
    main()
