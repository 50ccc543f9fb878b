"""Is a run saving, and will the next save fit? Pure: `read_status` asks for bytes and times, all else is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from ckpttools.findings import Finding
from ckpttools.snapshots.candidate import Snapshot, render_progress
from ckpttools.snapshots.policy import DAMAGED, UNFINISHED, Room
from ckpttools.snapshots.runs import Run
from ckpttools.snapshots.trackers import describe_dangling
from ckpttools.storage.tree import Measure
from ckpttools.units import render_bytes, render_duration

_HISTORY = 20
"""Commits from which the cadence is learned: what the run did lately, not in its first hours."""
_LEAST_CADENCE_S = 1
"""Commits that are closer are those of a copy, which has the times of the copying."""
_MEASURED = 5
_DAY_S = 86400
NEED_FACTOR = 1.1
"""The next snapshot may be somewhat larger than the last."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to raise an alert."""

    every_s: int | None = None
    """How often the run saves; learned from its history when None."""
    min_snapshots_left: int = 1
    min_free_bytes: int | None = None
    min_free_inodes: int | None = None
    need_bytes: int | None = None
    """What the next save needs."""
    is_need_learned: bool = False
    """Whether the next save needs what the last took, and a tenth more."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that somebody should look at."""

    kind: str
    """`no-commit`, `late`, `space`, `inodes`, `need`, `tracker` or `unreadable`."""
    message: str


@dataclass(frozen=True)
class Status:
    """What is known of a run at one time; None where it cannot be told."""

    path: str
    newest: Snapshot | None
    age_s: float | None
    """Since the last commit, whichever step it was of: a run may have gone back."""
    length_bytes: int | None
    inodes: int | None
    steps_at_risk: int | None
    """What would be lost by now, from the age and how fast steps went by between the last commits."""
    cadence_s: float | None
    is_cadence_learned: bool
    due_in_s: float | None
    """Until the next commit is late; negative when it is."""
    save_s: float | None
    """How long a save takes, from its first file to its last."""
    room: Room
    fits: int | None
    """How many more snapshots fit."""
    days_until_full: float | None
    unfinished: tuple[Snapshot, ...]
    findings: tuple[Finding, ...]
    alerts: tuple[Alert, ...] = ()
    last_s: float | None = None
    """When the last commit was, seconds since the epoch."""

    @property
    def newest_age_s(self) -> float | None:
        """Since the newest by step was committed."""
        if self.newest is None or self.newest.time_s is None or self.last_s is None or self.age_s is None:
            return None
        return self.age_s + self.last_s - self.newest.time_s

    @property
    def save_share(self) -> float | None:
        """How much of the time between two commits is spent saving."""
        return self.save_s / self.cadence_s if self.save_s is not None and self.cadence_s else None


def read_status(run: Run, room: Room, limits: Limits, *, now: float) -> Status:
    """The status of a run. Raises StorageError."""
    recent = run.committed[-_MEASURED:]
    return summarize(run, [run.tree.measure(*s.paths) for s in recent], room, limits, now=now)


def summarize(run: Run, measures: Sequence[Measure], room: Room, limits: Limits, *, now: float) -> Status:
    """The status of a run of which the newest committed snapshots were measured, the newest last. Pure."""
    committed = run.committed
    newest = committed[-1] if committed else None
    last = max((s.time_s for s in committed if s.time_s is not None), default=None)
    cadence_s, step_gap = learn_cadence(committed)
    is_learned = limits.every_s is None
    cadence_s = cadence_s if limits.every_s is None else limits.every_s
    saves = [m.last_s - m.first_s for m in measures if m.first_s is not None and m.last_s is not None]
    save_s = median(saves) if saves else None
    age_s = None if last is None else max(0.0, now - last)
    length_bytes, inodes = (measures[-1].length_bytes, measures[-1].inodes) if measures else (None, None)
    fits = _fits(room, length_bytes, inodes)
    status = Status(
        path=run.location,
        newest=newest,
        age_s=age_s,
        length_bytes=length_bytes,
        inodes=inodes,
        steps_at_risk=int(age_s / cadence_s * step_gap) if age_s is not None and cadence_s and step_gap else None,
        cadence_s=cadence_s,
        is_cadence_learned=is_learned,
        due_in_s=None if age_s is None or cadence_s is None else cadence_s + max(cadence_s / 2, save_s or 0) - age_s,
        save_s=save_s,
        room=room,
        fits=fits,
        days_until_full=fits * cadence_s / _DAY_S if fits is not None and cadence_s else None,
        unfinished=tuple(s for s in run.snapshots if s.state in (UNFINISHED, DAMAGED)),
        findings=tuple(run.findings()),
        last_s=last,
    )
    return _with_alerts(status, limits)


def learn_cadence(committed: Sequence[Snapshot]) -> tuple[float | None, float | None]:
    """Seconds and steps between two commits: medians of the latest, so that a pause counts little. Pure."""
    dated = sorted((s.time_s, s.step or 0) for s in committed[-_HISTORY:] if s.time_s is not None)
    if len(dated) < 3:
        return None, None
    times = [b[0] - a[0] for a, b in pairwise(dated)]
    steps = [b[1] - a[1] for a, b in pairwise(dated)]
    cadence_s = median(times)
    if cadence_s < _LEAST_CADENCE_S:
        return None, None
    return cadence_s, max(median(steps), 0) or None


def _fits(room: Room, length_bytes: int | None, inodes: int | None) -> int | None:
    counts = [room.free_bytes // length_bytes] if room.free_bytes is not None and length_bytes else []
    counts += [room.free_inodes // inodes] if room.free_inodes is not None and inodes else []
    return min(counts, default=None)


def _with_alerts(status: Status, limits: Limits) -> Status:
    alerts = [_alert(f) for f in status.findings if f.is_error]
    if status.newest is None:
        alerts.append(Alert("no-commit", "no committed snapshot"))
    elif status.due_in_s is not None and status.due_in_s < 0:
        every, age = render_duration(status.cadence_s or 0), render_duration(status.age_s or 0)
        alerts.append(Alert("late", f"the next commit is late: one every {every}, and the last was {age} ago"))
    alerts += _space_alerts(status, limits)
    return replace(status, alerts=tuple(alerts))


def _alert(finding: Finding) -> Alert:
    if finding.code == "unreadable-file":
        return Alert("unreadable", f"{finding.where} cannot be read: {finding.found}")
    return Alert("tracker", describe_dangling(finding))


def _space_alerts(status: Status, limits: Limits) -> list[Alert]:
    free_bytes, free_inodes = status.room.free_bytes, status.room.free_inodes
    alerts: list[Alert] = []
    if status.fits is not None and status.fits < limits.min_snapshots_left:
        alerts.append(Alert("space", f"{status.fits} more snapshots fit, fewer than {limits.min_snapshots_left}"))
    if limits.min_free_bytes is not None and free_bytes is not None and free_bytes < limits.min_free_bytes:
        alerts.append(Alert("space", f"{render_bytes(free_bytes)} are free, less than {render_bytes(limits.min_free_bytes)}"))
    if limits.min_free_inodes is not None and free_inodes is not None and free_inodes < limits.min_free_inodes:
        alerts.append(Alert("inodes", f"{free_inodes} inodes are free, fewer than {limits.min_free_inodes}"))
    need = limits.need_bytes
    if limits.is_need_learned and status.length_bytes is not None:
        need = int(status.length_bytes * NEED_FACTOR)
    if need is not None and free_bytes is not None and free_bytes < need:
        alerts.append(Alert("need", f"the next save needs {render_bytes(need)}, and {render_bytes(free_bytes)} are free"))
    if limits.is_need_learned and status.inodes is not None and free_inodes is not None and free_inodes < status.inodes:
        alerts.append(Alert("need", f"the next save needs {status.inodes} inodes, and {free_inodes} are free"))
    return alerts


def document(statuses: Sequence[Status]) -> dict[str, object]:
    """`ckpttools/status/1`. Pure."""
    return {"schema": "ckpttools/status/1", "runs": [_document(s) for s in statuses]}


def _document(s: Status) -> dict[str, object]:
    newest = s.newest
    return {
        "path": s.path,
        "newest": newest and newest.path,
        "step": newest and newest.step,
        "age_s": _whole(s.age_s),
        "bytes": s.length_bytes,
        "inodes": s.inodes,
        "steps_at_risk": s.steps_at_risk,
        "cadence_s": _whole(s.cadence_s),
        "cadence_is_learned": s.is_cadence_learned,
        "late_in_s": _whole(s.due_in_s),
        "save_s": _whole(s.save_s),
        "free_bytes": s.room.free_bytes,
        "free_inodes": s.room.free_inodes,
        "snapshots_left": s.fits,
        "days_until_full": _whole(s.days_until_full),
        "unfinished": [
            {"path": u.path, "step": u.step, "state": u.state, "why": render_progress(u), "done": u.done, "expected": u.expected}
            for u in s.unfinished
        ],
        "alerts": [{"kind": a.kind, "message": a.message} for a in s.alerts],
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


_METRICS = (
    ("step", "Step of the newest committed snapshot.", "step"),
    ("age_seconds", "Time since the last commit.", "age_s"),
    ("snapshot_bytes", "Size of the newest committed snapshot.", "bytes"),
    ("cadence_seconds", "Time between two commits.", "cadence_s"),
    ("late_in_seconds", "Time until the next commit is late.", "late_in_s"),
    ("save_seconds", "Time that a save takes.", "save_s"),
    ("free_bytes", "Free bytes of the file system.", "free_bytes"),
    ("free_inodes", "Free inodes of the file system.", "free_inodes"),
    ("snapshots_left", "Snapshots that still fit.", "snapshots_left"),
)


def render_prometheus(statuses: Sequence[Status]) -> str:
    """A file for the textfile collector of node_exporter; what cannot be told is left out. Pure."""
    rows = [_document(s) for s in statuses]
    lines: list[str] = []
    for name, meaning, key in _METRICS:
        lines += [f"# HELP ckpttools_{name} {meaning}", f"# TYPE ckpttools_{name} gauge"]
        lines += [f"ckpttools_{name}{{run={_label(r['path'])}}} {r[key]}" for r in rows if r[key] is not None]
    for name, meaning, values in (
        ("unfinished", "Snapshots that are not whole.", [len(s.unfinished) for s in statuses]),
        ("alerts", "Alerts.", [len(s.alerts) for s in statuses]),
    ):
        lines += [f"# HELP ckpttools_{name} {meaning}", f"# TYPE ckpttools_{name} gauge"]
        lines += [f"ckpttools_{name}{{run={_label(r['path'])}}} {value}" for r, value in zip(rows, values, strict=True)]
    return "\n".join(lines) + "\n"


def _label(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
