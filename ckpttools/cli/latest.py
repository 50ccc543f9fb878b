"""`ckpttools latest`."""

from __future__ import annotations

import click

from ckpttools.cli import options, render
from ckpttools.errors import ExitCode, NotFoundError, NothingValidError
from ckpttools.snapshots.names import parse_pattern

_EPILOG = options.examples(
    "ckpttools latest runs/7b",
    "ckpttools latest /local/7b /shared/7b --depth full",
    "ckpttools latest /nodes/*/7b --step-only",
    "ckpttools latest runs/7b --step-only --write runs/7b/restart-from",
)


@click.command("latest", epilog=_EPILOG)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--depth",
    type=click.Choice(["commit", "structure", "full"]),
    default="structure",
    help="commit: its files are there. structure: every container opens and every tensor is covered. full: every byte is read.",
)
@click.option("--step-only", is_flag=True, help="Print its step instead of its path.")
@click.option("--write", metavar="FILE", help="Also write what is printed to this file, whole or not at all.")
@click.option("--pattern", metavar="REGEX", help="How snapshots are named, with a group for the step, if not as usual.")
@options.ranks
@options.json_output
@options.jobs
@options.verbose
def command(
    runs: tuple[str, ...],
    depth: str,
    step_only: bool,
    write: str | None,
    pattern: str | None,
    ranks: int | None,
    is_json: bool,
    jobs: int,
    verbose: bool,
) -> ExitCode:
    """Print the newest snapshot that passes validation, for restart scripts.

    Trackers are not believed. Newer snapshots that do not pass are named on standard error. Of several RUNs (tiers of one
    run, say a local disk and shared storage) the highest step wins, and of equals the RUN named first; one that is not there
    is passed over. Where none has all files of a step, but each has some (the disks of nodes), and together they pass, one
    line is printed for each place. Without any snapshot that passes the exit status is 3.
    """
    from ckpttools.snapshots.find import require_run
    from ckpttools.snapshots.latest import find_latest
    from ckpttools.storage.document import write_document

    compiled = parse_pattern(pattern) if pattern else None
    read, missing = [], []
    for location in runs:
        try:
            read.append(require_run(location, pattern=compiled, ranks=ranks or 0))
        except NotFoundError as e:
            missing.append(e)
            render.write_line(f"ckpttools: passed over {location}: {e.message}")
    if not read:
        raise missing[0]
    found = find_latest(read, depth=depth, jobs=jobs)
    for passed in found.passed_over:
        render.write_line(f"ckpttools: passed over {passed.location}: {passed.why}")
    if not found.location:
        raise NothingValidError(
            f"no snapshot passes --depth {depth}: {', '.join(runs)}", found=f"{len(found.passed_over)} that do not pass"
        )
    if found.counted_ranks and not ranks:
        render.write_line(f"ckpttools: taken for {found.counted_ranks} ranks, as names tell; --ranks says how many there are")
    answer = str(found.step) if step_only else "\n".join((found.location, *found.further))
    if write:
        write_document(write, [f"{answer}\n".encode("utf-8", "surrogateescape")], is_overwriting=True)
    if is_json:
        passed_over = [{"path": p.location, "step": p.step, "why": p.why} for p in found.passed_over]
        document = {"schema": "ckpttools/latest/1", "path": found.location, "run": found.run, "step": found.step, "depth": depth}
        roots = [found.location, *found.further] if found.further else []
        render.write_json({**document, "roots": roots, "passed_over": passed_over})
    else:
        if len(runs) > 1 and verbose:
            render.write_line(f"ckpttools: taken from {found.run}")
        render.write_data(answer)
    return ExitCode.OK
