"""`ckpttools prune`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli import options, render, retention_options
from ckpttools.errors import ExitCode, UsageError
from ckpttools.snapshots.names import parse_pattern, render_name
from ckpttools.snapshots.policy import Decision, Policy, Room
from ckpttools.units import render_bytes_short, render_duration

if TYPE_CHECKING:
    from ckpttools.snapshots.remove import Removal
    from ckpttools.snapshots.runs import Run

_EPILOG = options.examples(
    "ckpttools prune runs/7b --keep-last 3 --keep-every 5000",
    "ckpttools prune runs/7b --keep-last 3 --keep-daily 7 --keep-best eval_loss:min:2 --apply",
    "ckpttools prune runs/7b --keep-last all --min-free 2TB --apply --log prune.jsonl",
    "ckpttools prune runs/7b --keep-daily 7 --keep-weekly 4 --require-valid structure --apply --wait 10m",
)


@click.command("prune", epilog=_EPILOG)
@click.argument("run", metavar="RUN")
@retention_options.policy
@click.option(
    "--require-valid",
    type=click.Choice(["structure", "full"]),
    help="Count only snapshots that pass this check, so that keeping three means three good ones.",
)
@click.option("--pattern", metavar="REGEX", help="How snapshots are named, with a group for the step, if not as usual.")
@click.option("--apply", "is_applied", is_flag=True, help="Delete. Without it the decisions are shown and nothing is touched.")
@click.option(
    "--dry-run", "is_dry", is_flag=True, help="Show the decisions and touch nothing, which is what happens without --apply."
)
@click.option("--wait", type=retention_options.DURATION, default="0s", metavar="DURATION", help="Wait for another run's lock.")
@click.option("--log", default="", metavar="FILE", show_default=False, help="Append one JSON line per deletion to this file.")
@options.json_output
@options.jobs
@options.verbose
def command(run: str, is_applied: bool, is_json: bool, verbose: bool, **given: Any) -> ExitCode:
    """Delete the snapshots of a run directory that no rule keeps.

    The rules are a union. Whatever they say, the newest valid snapshot stays, and so does what a tracker or a link points
    to, what may still be being written, and what is not recognised. Nothing is deleted without --apply; with it, nothing is
    printed when all goes well, unless -v asks for it.
    """
    from ckpttools.storage.runlock import run_lock

    if is_applied and given.pop("is_dry"):
        raise UsageError("--dry-run and --apply: only one of them", hints=["leave out --dry-run to delete"])
    policy, now = retention_options.policy_of(given), time.time()
    lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_applied:
        lock = run_lock(run, now=now, wait_s=given["wait"])
    with lock:
        return _prune(run, policy, given, is_applied=is_applied, is_json=is_json, is_verbose=verbose)


def _prune(
    location: str, policy: Policy, given: dict[str, Any], *, is_applied: bool, is_json: bool, is_verbose: bool
) -> ExitCode:
    from ckpttools.snapshots import remove, retention
    from ckpttools.snapshots.find import require_run

    run = require_run(location, pattern=parse_pattern(given["pattern"]) if given["pattern"] else None)
    removals: list[Removal] = []
    if is_applied:
        removals += remove.finish_interrupted(run, jobs=given["jobs"], log=given["log"], clock=time.time, grace_s=policy.grace_s)
    decisions, room, why = _decide(run, policy, given)
    if not is_json and (is_verbose or not is_applied):
        for line in _table(run, decisions, why):
            render.write_data(line)
    refusal = _refusal(decisions, policy)
    if is_applied and refusal is None:
        removals += remove.remove(run, decisions, jobs=given["jobs"], log=given["log"], clock=time.time)
    missed = retention.limits_missed(decisions, policy, room)
    if is_json:
        render.write_json(_document(run, decisions, removals, missed, why, is_applied=is_applied and refusal is None))
    if refusal is not None:
        raise refusal
    return _report(
        run, decisions, removals, missed, is_told=not is_json and (is_verbose or not is_applied), is_applied=is_applied
    )


def _decide(run: Run, policy: Policy, given: dict[str, Any]) -> tuple[list[Decision], Room, dict[str, str]]:
    """The decisions, the room there is, and what speaks against snapshots that did not pass."""
    from ckpttools.snapshots import facts, retention
    from ckpttools.storage.trash import read_room

    found = facts.read_facts(run, pins=given["pin"], has_metrics=bool(policy.best), jobs=given["jobs"])
    room, now = Room(*read_room(run.location)), time.time()
    prover = facts.Prover(run, depth=given["require_valid"] or "structure", jobs=given["jobs"])

    def plan(snapshots: Sequence[Any]) -> list[Decision]:
        return retention.plan_decisions(snapshots, policy, now=now, room=room)

    plan(found)  # a policy that makes no sense is refused before anything is opened
    proved = facts.prove(found, prover, plan, is_all=given["require_valid"] is not None)
    return plan(proved), room, {**{s.path: s.why for s in run.snapshots if s.why}, **prover.why}


def _refusal(decisions: Sequence[Decision], policy: Policy) -> Exception | None:
    from ckpttools.errors import RefusedError
    from ckpttools.snapshots.retention import require_safe

    try:
        require_safe(decisions, policy)
    except RefusedError as e:  # shown after the decisions that it is about
        return e
    return None


def _table(run: Run, decisions: Sequence[Decision], why: dict[str, str]) -> Iterator[str]:
    """One row per snapshot, the oldest first."""
    now = time.time()
    rows = [("", "snapshot", "step", "age", "size", "inodes", "reasons")]
    for d in decisions:
        s = d.snapshot
        age = "" if s.time_s is None else render_duration(max(0, now - s.time_s))
        reasons = ", ".join(d.reasons) + (f" ({why[s.path]})" if s.path in why else "")
        rows.append(
            (
                "keep" if d.keep else "delete",
                render_name(s.path),
                "" if s.step is None else str(s.step),
                age,
                render_bytes_short(s.length_bytes),
                str(s.inodes),
                reasons,
            )
        )
    yield from render.table(rows, right=(2, 3, 4, 5))
    for finding in run.findings():
        yield from render.finding_lines(finding)


def _report(
    run: Run,
    decisions: Sequence[Decision],
    removals: Sequence[Removal],
    missed: Sequence[str],
    *,
    is_told: bool,
    is_applied: bool,
) -> ExitCode:
    """What was deleted or would be, and what failed; the exit status."""
    gone = [d.snapshot for d in decisions if not d.keep]
    freed = f"{render_bytes_short(sum(s.length_bytes for s in gone))} and {sum(s.inodes for s in gone)} inodes"
    failed = [r for r in removals if r.error]
    deleted = sum(not r.error and not r.is_mark for r in removals)
    if is_told and is_applied:
        left = f", {len(failed)} failed" if failed else ""
        render.write_data(f"deleted {deleted} snapshots: {freed}{left}")
    elif is_told:
        hint = "; pass --apply to delete" if gone else ""
        render.write_data(f"would delete {len(gone)} of {len(decisions)} snapshots: {freed}{hint}")
    for r in failed:
        render.write_line(f"ckpttools: error: {r.error}: {render_name(run.place_of(r.path))}")
    for limit in missed:
        render.write_line(f"ckpttools: warning: still {limit} when all that may go is gone: {run.location}")
    refused = [s for s in run.snapshots if s.is_unreadable]
    for s in refused:
        render.write_line(f"ckpttools: error: left alone, since it cannot be read: {s.why}: {render_name(run.place_of(s.path))}")
    return ExitCode.FAILED if failed or refused else ExitCode.WRONG if missed else ExitCode.OK


def _document(
    run: Run,
    decisions: Sequence[Decision],
    removals: Sequence[Removal],
    missed: Sequence[str],
    why: dict[str, str],
    *,
    is_applied: bool,
) -> dict[str, Any]:
    """`ckpttools/prune/1`."""
    from ckpttools.cli import documents

    gone = [d.snapshot for d in decisions if not d.keep]
    return {
        "schema": "ckpttools/prune/1",
        "path": run.location,
        "applied": is_applied,
        "decisions": [
            {
                "path": d.snapshot.path,
                "step": d.snapshot.step,
                "time": None if d.snapshot.time_s is None else int(d.snapshot.time_s),
                "bytes": d.snapshot.length_bytes,
                "inodes": d.snapshot.inodes,
                "state": d.snapshot.state,
                "why": why.get(d.snapshot.path, ""),
                "keep": d.keep,
                "reasons": list(d.reasons),
            }
            for d in decisions
        ],
        "bytes_freed": sum(s.length_bytes for s in gone),
        "inodes_freed": sum(s.inodes for s in gone),
        "removals": [{"path": r.path, "reasons": list(r.reasons), "error": r.error or None} for r in removals],
        "limits_missed": list(missed),
        "findings": documents.findings(run.findings()),
    }
