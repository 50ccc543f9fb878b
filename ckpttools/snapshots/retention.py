"""Decides which snapshots of a run to keep. Pure: no clock, no file system.

The bucket rules are restic's: each rule walks from the newest to the oldest snapshot and keeps one per hour, day, week, ...;
a snapshot that several rules keep uses up a slot of each; and while a rule has slots left, it keeps the very oldest too.
Before all rules stand those that nothing overrides (`_protect`). Read `decide` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ckpttools.errors import RefusedError, UsageError
from ckpttools.snapshots.calendar import PERIODS
from ckpttools.snapshots.policy import ALL, COMMITTED, FOREIGN, Best, Decision, Policy, Room, SnapshotFacts
from ckpttools.units import render_duration

Reasons = list[list[str]]
"""Per snapshot why it is kept, in input order."""


def decide(snapshots: Sequence[SnapshotFacts], policy: Policy, *, now: float, room: Room | None = None) -> list[Decision]:
    """One decision per snapshot, in input order. Pure.

    Raises:
        UsageError: the policy has no rule that says what to keep.
        RefusedError: the clock is behind the newest snapshot, the rules keep nothing, or too large a part would go.
    """
    decisions = plan_decisions(snapshots, policy, now=now, room=room or Room())
    require_safe(decisions, policy)
    return decisions


def plan_decisions(snapshots: Sequence[SnapshotFacts], policy: Policy, *, now: float, room: Room) -> list[Decision]:
    """What `decide` returns, before it is held against `max_delete_fraction`; for showing what would be refused. Pure.

    Raises: UsageError, RefusedError: as `decide` does for a policy or a clock that makes no sense.
    """
    _require_rule(policy)
    _require_clock(snapshots, now)
    protected = _protect(snapshots, policy, now)
    kept = _apply_rules(snapshots, policy)
    if not any(kept) and any(s.state == COMMITTED for s in snapshots):
        raise RefusedError(
            "no rule of the policy keeps any snapshot",
            expected="at least one committed snapshot that a rule keeps",
            found=f"{sum(s.state == COMMITTED for s in snapshots)} committed snapshots, none kept by a rule",
            hints=["add --keep-last 1, or check the rules for a mistyped step or metric"],
        )
    dropped = _apply_limits(snapshots, policy, room, protected, kept)
    return [_decision(s, protected[i], kept[i], dropped.get(i, ())) for i, s in enumerate(snapshots)]


def require_safe(decisions: Sequence[Decision], policy: Policy) -> None:
    """Refuse decisions that delete too large a part of what is recognised. Raises RefusedError."""
    known = [d for d in decisions if d.snapshot.state != FOREIGN]
    deleted = sum(not d.keep for d in known)
    if deleted > policy.max_delete_fraction * len(known):
        raise RefusedError(
            f"{deleted} of {len(known)} snapshots would be deleted",
            expected=f"at most {policy.max_delete_fraction:.0%}",
            found=f"{deleted / len(known):.1%}",
            hints=["look at the decisions; if they are meant, pass a larger --max-delete-fraction"],
        )


def _require_rule(policy: Policy) -> None:
    if not policy.has_rule:
        raise UsageError(
            "the policy has no rule that says what to keep",
            hints=["add --keep-last N; limits such as --max-bytes alone are no rule, --keep-last all with them is"],
        )


def _require_clock(snapshots: Iterable[SnapshotFacts], now: float) -> None:
    """Ages mean nothing when the clock of this machine or that of the storage is wrong."""
    newest = max(
        (s for s in snapshots if s.time_s is not None and s.state == COMMITTED), key=lambda s: s.time_order, default=None
    )
    if newest is not None and newest.time_s is not None and newest.time_s > now:
        raise RefusedError(
            f"the clock is behind the newest snapshot by {render_duration(math.ceil(newest.time_s - now))}: {newest.path}",
            hints=["set the clock of this machine, or that of the file server"],
        )


def _decision(snapshot: SnapshotFacts, protected: list[str], kept: list[str], dropped: Sequence[str]) -> Decision:
    if protected or (kept and not dropped):
        return Decision(snapshot, True, (*protected, *kept))
    if dropped:
        return Decision(snapshot, False, tuple(dropped))
    if snapshot.state == COMMITTED:
        return Decision(snapshot, False, ("no rule keeps it",))
    return Decision(snapshot, False, (f"{snapshot.state}, and older than the newest committed snapshot",))


# what nothing overrides


def _protect(snapshots: Sequence[SnapshotFacts], policy: Policy, now: float) -> Reasons:
    """Why each snapshot may not be deleted, whatever the rules say."""
    committed = [s for s in snapshots if s.state == COMMITTED]
    by_step = max(committed, key=lambda s: s.order, default=None)
    by_time = max(committed, key=lambda s: s.time_order, default=None)
    protected: Reasons = []
    for snapshot in snapshots:
        reasons = [f"{claim} points to it" for claim in snapshot.claims]
        reasons += ["pinned"] if snapshot.is_pinned else []
        reasons += ["not recognised"] if snapshot.state == FOREIGN else []
        reasons += ["outside the run directory"] if snapshot.is_outside else []
        reasons += ["other nodes may have a share of it"] if snapshot.is_share else []
        reasons += ["its time is unknown"] if snapshot.time_s is None and snapshot.state != FOREIGN else []
        if by_step is not None and by_time is not None:
            reasons += ["newest valid"] if snapshot is by_step else ["newest valid by time"] if snapshot is by_time else []
        if snapshot.state not in (COMMITTED, FOREIGN):
            reasons += _protect_unfinished(snapshot, by_step, by_time, policy, now)
        protected.append(reasons)
    return protected


def _protect_unfinished(
    snapshot: SnapshotFacts, by_step: SnapshotFacts | None, by_time: SnapshotFacts | None, policy: Policy, now: float
) -> list[str]:
    """It may be being written; and without a good one that is newer, it may be the best there is."""
    reasons = []
    if by_step is None or by_time is None:
        reasons.append("nothing is committed")
    elif snapshot.order > by_step.order or snapshot.time_order > by_time.time_order:
        reasons.append(f"{snapshot.state}, newer than the newest committed")
    if snapshot.time_s is not None and now - snapshot.time_s < policy.grace_s:
        reasons.append(f"{snapshot.state}, younger than {render_duration(policy.grace_s)}")
    return reasons


# the rules


def _apply_rules(snapshots: Sequence[SnapshotFacts], policy: Policy) -> Reasons:
    """Which rules keep each snapshot; only committed ones count."""
    kept: Reasons = [[] for _ in snapshots]
    committed = [i for i, s in enumerate(snapshots) if s.state == COMMITTED]
    by_step = sorted(committed, key=lambda i: snapshots[i].order, reverse=True)
    dated = [i for i in committed if snapshots[i].time_s is not None]
    by_time = sorted(dated, key=lambda i: snapshots[i].time_order, reverse=True)
    _keep_last(by_time, by_step, kept, policy.last)
    for name, period in PERIODS:
        _keep_buckets(snapshots, by_time, kept, name, getattr(policy, name), period)
    if by_time and policy.within_s is not None:
        edge = (snapshots[by_time[0]].time_s or 0) - policy.within_s
        for i in by_time:
            if (snapshots[i].time_s or 0) > edge:
                kept[i].append(f"within {render_duration(policy.within_s)}")
    for i in committed:
        kept[i] += _step_rules(snapshots[i].step, policy)
    for best in policy.best:
        for i in _best_of(snapshots, by_step, best):
            kept[i].append(f"best {best}")
    return kept


def _keep_last(by_time: Sequence[int], by_step: Sequence[int], kept: Reasons, count: int) -> None:
    """The last by time and the last by step: the two differ after a run went back to an older step, and both may be wanted."""
    for i in by_time if count == ALL else by_time[:count]:
        kept[i].append("last")
    for i in by_step if count == ALL else by_step[:count]:
        if "last" not in kept[i]:
            kept[i].append("last by step")


def _keep_buckets(
    snapshots: Sequence[SnapshotFacts],
    newest_first: Sequence[int],
    kept: Reasons,
    name: str,
    count: int,
    period: Callable[[float], int],
) -> None:
    """The newest snapshot of each of the last `count` periods that have one; with slots left, the very oldest too."""
    previous: int | None = None
    for place, i in enumerate(newest_first):
        if count == 0:
            return
        bucket = period(snapshots[i].time_s or 0)
        if bucket != previous:
            kept[i].append(name)
        elif place == len(newest_first) - 1:
            kept[i].append(f"oldest {name}")
        else:
            continue
        previous = bucket
        count -= count > 0


def _step_rules(step: int | None, policy: Policy) -> list[str]:
    if step is None:
        return []
    reasons = [f"every {policy.every_steps} steps"] if policy.every_steps and step % policy.every_steps == 0 else []
    return reasons + ([f"step {step}"] if step in policy.steps else [])


def _best_of(snapshots: Sequence[SnapshotFacts], newest_first: Sequence[int], best: Best) -> list[int]:
    """The best by a metric; of equals the newest. One that has no number for it does not count."""
    rated = [(snapshots[i].metrics.get(best.metric, math.nan), i) for i in newest_first]
    rated = [(-value if best.is_max else value, i) for value, i in rated if not math.isnan(value)]
    rated.sort(key=lambda pair: pair[0])
    return [i for _, i in (rated if best.count == ALL else rated[: best.count])]


# the limits


def _apply_limits(
    snapshots: Sequence[SnapshotFacts], policy: Policy, room: Room, protected: Reasons, kept: Reasons
) -> dict[int, list[str]]:
    """What goes beyond the rules, oldest first, until every limit holds or nothing that may go is left."""
    stays = [bool(protected[i] or kept[i]) for i in range(len(snapshots))]
    used = sum(s.length_bytes for s, stay in zip(snapshots, stays, strict=True) if stay and s.state != FOREIGN)
    freed = sum(s.length_bytes for s, stay in zip(snapshots, stays, strict=True) if not stay)
    freed_inodes = sum(s.inodes for s, stay in zip(snapshots, stays, strict=True) if not stay)
    oldest_first = sorted((i for i, stay in enumerate(stays) if stay and not protected[i]), key=lambda i: snapshots[i].time_order)
    dropped: dict[int, list[str]] = {}
    for i in oldest_first:
        over = _limits_broken(policy, room, used, freed, freed_inodes)
        if not over:
            break
        dropped[i] = over
        used -= snapshots[i].length_bytes
        freed += snapshots[i].length_bytes
        freed_inodes += snapshots[i].inodes
    return dropped


def _limits_broken(policy: Policy, room: Room, used: int, freed: int, freed_inodes: int) -> list[str]:
    broken = ["over --max-bytes"] if policy.max_bytes is not None and used > policy.max_bytes else []
    if policy.min_free_bytes is not None and room.free_bytes is not None and room.free_bytes + freed < policy.min_free_bytes:
        broken.append("below --min-free")
    if policy.min_free_inodes is not None and room.free_inodes is not None:
        broken += ["below --min-free-inodes"] if room.free_inodes + freed_inodes < policy.min_free_inodes else []
    return broken


def limits_missed(decisions: Sequence[Decision], policy: Policy, room: Room) -> list[str]:
    """The limits that do not hold even when all that is to be deleted is gone. Pure."""
    kept = sum(d.snapshot.length_bytes for d in decisions if d.keep and d.snapshot.state != FOREIGN)
    gone = [d.snapshot for d in decisions if not d.keep]
    return _limits_broken(policy, room, kept, sum(s.length_bytes for s in gone), sum(s.inodes for s in gone))
