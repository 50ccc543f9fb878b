"""`ckpttools status`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli import options, render
from ckpttools.cli.retention_options import DURATION
from ckpttools.errors import ExitCode
from ckpttools.snapshots.names import parse_pattern, render_name
from ckpttools.snapshots.policy import Room
from ckpttools.units import render_bytes_short, render_duration

if TYPE_CHECKING:
    from ckpttools.snapshots.status import Status

_EPILOG = options.examples(
    "ckpttools status runs/7b",
    "ckpttools status /local/7b /shared/7b --every 30m --min-snapshots-left 10 --quiet",
    "ckpttools status runs/7b --need auto --quiet",
    "ckpttools status runs/7b --json --prometheus ckpttools.prom",
)


class Need(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on, and 8.1 is supported
    """A size, or `auto`."""

    name = "auto|size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Bytes, or `auto`."""
        return "auto" if value == "auto" else options.SIZE.convert(value, param, ctx)


@click.command("status", epilog=_EPILOG)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--every", type=DURATION, metavar="DURATION", help="How often the run saves, if not to be learned from its history."
)
@click.option(
    "--min-snapshots-left", type=click.IntRange(0), default=1, metavar="N", help="Alert when fewer further snapshots fit."
)
@click.option("--min-free", type=options.SIZE, metavar="SIZE", help="Alert when less is free.")
@click.option("--min-free-inodes", type=click.IntRange(0), metavar="N", help="Alert when fewer inodes are free.")
@click.option(
    "--need", type=Need(), metavar="auto|SIZE", help="Alert when the next save does not fit; auto: what the last took and 10%."
)
@click.option(
    "--prometheus", metavar="FILE", help="Also write metrics for node_exporter's textfile collector, whole or not at all."
)
@click.option("--pattern", metavar="REGEX", help="How snapshots are named, with a group for the step, if not as usual.")
@options.ranks
@options.json_output
@options.quiet
@options.verbose
def command(runs: tuple[str, ...], is_json: bool, quiet: bool, verbose: bool, **given: Any) -> ExitCode:
    """Say whether a run is saving: its newest committed snapshot, its cadence, what is at risk, and how much still fits.

    The exit status is 1 when there is an alert: a commit that is late, space that runs out, a tracker that names what is
    missing or unfinished, or nothing committed at all. With --quiet alerts are all that is printed, so that it can run from
    cron. Snapshots are told by names and lengths; `validate` opens them. Of several RUNs (tiers of one run, or the disks of its
    nodes) each has its own report; a snapshot is committed in each node's when they have all files of it together.
    """
    from ckpttools.snapshots.find import require_run
    from ckpttools.snapshots.nodes import unite
    from ckpttools.snapshots.status import Limits, document, read_status, render_prometheus
    from ckpttools.storage.document import write_document
    from ckpttools.storage.trash import read_room

    need = given["need"]
    limits = Limits(
        every_s=given["every"],
        min_snapshots_left=given["min_snapshots_left"],
        min_free_bytes=given["min_free"],
        min_free_inodes=given["min_free_inodes"],
        need_bytes=None if need == "auto" else need,
        is_need_learned=need == "auto",
    )
    pattern = parse_pattern(given["pattern"]) if given["pattern"] else None
    now = time.time()
    found = unite([require_run(run, pattern=pattern, ranks=given["ranks"] or 0) for run in runs])
    statuses = [read_status(run, Room(*read_room(run.location)), limits, now=now) for run in found]
    if given["prometheus"]:
        text = render_prometheus(statuses)
        write_document(given["prometheus"], [text.encode("utf-8", "backslashreplace")], is_overwriting=True)
    if is_json:
        render.write_json(document(statuses))
    else:
        for status in statuses:
            for line in _lines(status, is_quiet=quiet, is_verbose=verbose):
                render.write_data(line)
    return ExitCode.WRONG if any(s.alerts for s in statuses) else ExitCode.OK


def _lines(status: Status, *, is_quiet: bool, is_verbose: bool) -> Iterator[str]:
    if not is_quiet:
        yield from _report(status)
    for alert in status.alerts:
        yield f"alert: {status.path}: {alert.message}"
    if is_verbose:
        for finding in status.findings:
            yield from render.finding_lines(finding)


def _report(s: Status) -> Iterator[str]:
    from ckpttools.snapshots.candidate import render_progress

    yield s.path
    if s.newest is not None:
        files = f"{_size(s.length_bytes)}, {s.inodes} inodes"
        yield f"  newest:     {render_name(s.newest.path)}, step {s.newest.step}, committed {_span(s.newest_age_s)} ago, {files}"
    risk = "unknown" if s.steps_at_risk is None else f"about {s.steps_at_risk}"
    yield f"  at risk:    {_span(s.age_s)}, {risk} steps"
    learned = "learned from its history" if s.is_cadence_learned else "as told"
    due = "" if s.due_in_s is None else ", late" if s.due_in_s < 0 else f", late in {_span(s.due_in_s)}"
    yield f"  cadence:    {'unknown' if s.cadence_s is None else f'every {_span(s.cadence_s)}, {learned}{due}'}"
    share = "" if s.save_share is None else f", {s.save_share:.0%} of the time between two"
    yield f"  saving:     {'unknown' if s.save_s is None else f'takes {_span(s.save_s)}{share}'}"
    inodes = "unknown" if s.room.free_inodes is None else str(s.room.free_inodes)
    yield f"  free:       {_size(s.room.free_bytes)}, {inodes} inodes"
    days = "unknown" if s.days_until_full is None else f"{s.days_until_full:.0f}"
    yield f"  room for:   {'unknown' if s.fits is None else s.fits} more snapshots, days until full at this rate: {days}"
    for u in s.unfinished:
        yield f"  {u.state + ':':<11} {render_name(u.path)}: {render_progress(u)}"


def _span(seconds: float | None) -> str:
    return "unknown" if seconds is None else render_duration(seconds)


def _size(length_bytes: int | None) -> str:
    return "unknown" if length_bytes is None else render_bytes_short(length_bytes)
