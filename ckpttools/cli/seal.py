"""`ckpttools seal`."""

from __future__ import annotations

import click

from ckpttools.cli import options, render
from ckpttools.cli.session import snapshot_bytes, take_snapshot
from ckpttools.errors import ExitCode

_EPILOG = options.examples(
    "ckpttools seal checkpoint/step-1000",
    "ckpttools seal model.pt --output model.seal.json",
)


@click.command("seal", epilog=_EPILOG)
@options.path
@click.option("--output", "-o", metavar="FILE", help="Write the seal there instead of into the snapshot.")
@click.option("--overwrite", is_flag=True, help="Replace a seal that is already there.")
@options.algorithm
@options.jobs
@options.memory
@options.quiet
@options.verbose
def command(
    path: str, output: str | None, overwrite: bool, algorithm: str, jobs: int, memory: int, quiet: bool, verbose: bool
) -> ExitCode:
    """Record every file, tensor and digest of a snapshot, so that `validate` can prove later that nothing changed.

    The seal is the only thing that is ever written into a snapshot. A snapshot with anything wrong is not sealed. The
    seal of a single file is written beside it.
    """
    from ckpttools.operations import sealing

    location = take_snapshot(path)
    with render.progress("sealing", snapshot_bytes(location), is_quiet=quiet, is_verbose=verbose) as report:
        written, seal = sealing.seal(
            location,
            output=output,
            is_overwriting=overwrite,
            algorithm=algorithm,
            jobs=jobs,
            memory_bytes=memory,
            progress=report,
        )
    if not quiet:
        render.write_data(f"{seal.fingerprint}  {written}")
    return ExitCode.OK
