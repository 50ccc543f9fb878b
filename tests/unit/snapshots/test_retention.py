"""Which snapshots stay: golden decisions, and laws that hold whatever the snapshots and the policy are."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttools.errors import RefusedError, UsageError
from ckpttools.snapshots.calendar import PERIODS
from ckpttools.snapshots.policy import ALL, COMMITTED, FOREIGN, STATES, Best, Policy, Room, SnapshotFacts
from ckpttools.snapshots.retention import decide, limits_missed, plan_decisions
from tests.golden import retention as golden

NOW = golden.NOW
DATA = golden.load()


def snapshots(*ages_h: float, **facts) -> list[SnapshotFacts]:
    """Committed snapshots of these ages, the first the oldest."""
    return [SnapshotFacts(f"step-{i}", i, NOW - age * 3600, 10, 1, **facts) for i, age in enumerate(ages_h)]


def kept(found: list[SnapshotFacts], **rules) -> list[int | None]:
    policy = Policy(**{"max_delete_fraction": 1.0, **rules})
    return [d.snapshot.step for d in decide(found, policy, now=NOW) if d.keep]


# golden


@pytest.mark.parametrize("case", DATA["policies"], ids=lambda c: c["options"])
def test_decisions_and_reasons_are_the_golden_ones(case):
    assert case["answer"] == golden.answer(golden.snapshots_of(DATA), case["rules"]), "python -m tests.golden.retention"


def test_the_examples_of_the_page_are_golden_decisions():
    text = golden.PAGE.read_text(encoding="utf-8")
    assert golden.page(text, DATA) == text, "python -m tests.golden.retention"


# laws

RULES = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.integers(-1, 5) for name in ("last", "hourly", "daily", "weekly", "monthly", "yearly")},
        "within_s": st.integers(0, 10**7),
        "every_steps": st.integers(1, 50),
        "steps": st.frozensets(st.integers(0, 100), max_size=3),
        "best": st.lists(st.builds(Best, st.sampled_from(["loss", "acc"]), st.booleans(), st.integers(-1, 3)), max_size=2).map(
            tuple
        ),
    },
)
LIMITS = st.fixed_dictionaries(
    {"grace_s": st.integers(0, 10**6)},
    optional={"max_bytes": st.integers(0, 200), "min_free_bytes": st.integers(0, 200), "min_free_inodes": st.integers(0, 50)},
)
FACTS = st.builds(
    SnapshotFacts,
    path=st.text("abc/", max_size=3),
    step=st.integers(0, 100) | st.none(),
    time_s=st.floats(NOW - 10**8, NOW) | st.none(),
    length_bytes=st.integers(0, 50),
    inodes=st.integers(0, 9),
    state=st.sampled_from([*STATES, COMMITTED, COMMITTED, COMMITTED]),
    metrics=st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2),
    is_pinned=st.sampled_from([False, False, False, True]),
    claims=st.sampled_from([(), (), (), ("`latest`",)]),
    is_outside=st.sampled_from([False, False, False, True]),
)
LISTS = st.lists(FACTS, max_size=15, unique_by=lambda s: s.path)  # as names in a directory are


def deletions(found, policy, room=None):
    try:
        return {i for i, d in enumerate(plan_decisions(found, policy, now=NOW, room=room or Room(100, 20))) if not d.keep}
    except (UsageError, RefusedError):
        assume(False)


@given(LISTS, RULES, LIMITS)
def test_nothing_protected_is_ever_deleted(found, rules, limits):
    policy = Policy(**rules, **limits)
    gone = [found[i] for i in deletions(found, policy)]
    committed = [s for s in found if s.state == COMMITTED]
    for s in gone:
        assert s.state != FOREIGN
        assert ((), False, False) == (s.claims, s.is_pinned, s.is_outside)
        assert s.time_s is not None
    if committed:
        left = [s for i, s in enumerate(found) if i not in deletions(found, policy) and s.state == COMMITTED]
        assert max(s.order[:2] for s in committed) == max(s.order[:2] for s in left)
        assert max(s.time_order[:2] for s in committed) == max(s.time_order[:2] for s in left)
    newest = max((s.order for s in committed), default=None)
    for s in (s for s in gone if s.state != COMMITTED):
        assert newest is not None
        assert s.order < newest
        assert NOW - s.time_s >= policy.grace_s


@given(LISTS, RULES, LIMITS)
def test_one_decision_per_snapshot_in_input_order_each_with_a_reason(found, rules, limits):
    deletions(found, Policy(**rules, **limits))
    decisions = plan_decisions(found, Policy(**rules, **limits), now=NOW, room=Room())
    assert found == [d.snapshot for d in decisions]
    assert all(d.reasons and all(d.reasons) for d in decisions)


@given(LISTS, RULES, LIMITS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(found, rules, limits, rng):
    found = [replace(s, path=str(i)) for i, s in enumerate(found)]
    shuffled = found.copy()
    rng.shuffle(shuffled)
    policy = Policy(**rules, **limits)
    assert {found[i].path for i in deletions(found, policy)} == {shuffled[i].path for i in deletions(shuffled, policy)}


@given(LISTS, RULES)
def test_deciding_about_what_is_left_deletes_nothing_more(found, rules):
    policy = Policy(**rules)
    gone = deletions(found, policy)
    left = [s for i, s in enumerate(found) if i not in gone]
    assert deletions(left, policy) == set()


@given(LISTS, RULES, RULES)
def test_adding_a_rule_never_deletes_more(found, rules, more):
    assert deletions(found, Policy(**(more | rules))) <= deletions(found, Policy(**rules))


@given(LISTS, RULES, LIMITS, st.floats(0, 1))
def test_no_more_than_the_fraction_is_deleted(found, rules, limits, fraction):
    policy = Policy(**rules, **limits, max_delete_fraction=fraction)
    gone = deletions(found, policy)
    if len(gone) > fraction * sum(s.state != FOREIGN for s in found):
        with pytest.raises(RefusedError, match="would be deleted"):
            decide(found, policy, now=NOW, room=Room(100, 20))
    else:
        decide(found, policy, now=NOW, room=Room(100, 20))


@given(st.integers(-(10**10), 10**11))
def test_periods_are_those_of_the_calendar(time_s):
    year = PERIODS[-1][1](time_s)
    assume(1 <= year <= 9999)
    day = datetime.fromtimestamp(time_s, timezone.utc)
    assert (day.year, day.year * 12 + day.month - 1) == (year, dict(PERIODS)["monthly"](time_s))
    week, *_ = divmod(day.date().toordinal() - datetime(1969, 12, 29, tzinfo=timezone.utc).toordinal(), 7)
    assert week == dict(PERIODS)["weekly"](time_s)


# one behaviour each


def test_a_snapshot_kept_by_a_finer_rule_uses_a_slot_of_the_coarser():
    assert [2, 3] == kept(snapshots(50, 26, 2, 1), last=2, daily=1)


def test_the_oldest_is_kept_while_a_rule_has_slots_left():
    assert [0, 2] == kept(snapshots(23, 22, 21), daily=2)


def test_within_is_strict_and_counts_from_the_newest_snapshot():
    assert [2, 3] == kept(snapshots(120, 110, 109, 100), within_s=36000)


def test_a_run_that_went_back_keeps_the_newest_of_both_orders():
    found = [
        SnapshotFacts("step-9", 9, NOW - 7200),
        SnapshotFacts("step-5", 5, NOW - 3600),
        SnapshotFacts("step-1", 1, NOW - 9999),
    ]
    assert [9, 5] == kept(found, last=1)


def test_unfinished_ones_do_not_count_as_kept():
    found = [*snapshots(40, 30, 20), SnapshotFacts("step-9", 9, NOW - 60, state="unfinished")]
    assert [1, 2, 9] == kept(found, last=2)


def test_with_nothing_committed_nothing_is_deleted():
    assert [0, 1] == kept(snapshots(400, 300, state="damaged"), last=1)


def test_of_equal_metrics_the_newest_wins():
    assert [1, 2] == kept(snapshots(3, 2, 1, metrics={"loss": 1.0}), best=(Best("loss", False, 2),))


def test_no_number_is_no_metric():
    found = [replace(s, metrics={"loss": float("nan")}) for s in snapshots(3, 2)]
    with pytest.raises(RefusedError, match="no rule of the policy keeps"):
        kept(found, best=(Best("loss", False, 1),))


@pytest.mark.parametrize("rules", [{}, {"max_bytes": 5}, {"min_free_bytes": 5}, {"min_free_inodes": 5}])
def test_a_policy_without_a_rule_is_wrong_usage(rules):
    with pytest.raises(UsageError):
        kept(snapshots(3, 2), **rules)


def test_a_clock_behind_the_newest_snapshot_is_refused():
    with pytest.raises(RefusedError, match="clock"):
        kept(snapshots(3, -1), last=1)


def test_a_limit_that_cannot_be_held_is_told():
    found = snapshots(3, 2, 1)
    policy = Policy(last=ALL, max_bytes=5, min_free_inodes=50, max_delete_fraction=1)
    decisions = decide(found, policy, now=NOW, room=Room(0, 0))
    assert [2] == [d.snapshot.step for d in decisions if d.keep]
    assert ["over --max-bytes", "below --min-free-inodes"] == limits_missed(decisions, policy, Room(0, 0))


def test_limits_that_the_file_system_does_not_tell_delete_nothing():
    assert [0, 1] == kept(snapshots(3, 2), last=2, min_free_bytes=10**15)


def test_a_hundred_thousand_snapshots_are_decided():
    rng = random.Random(1)
    found = [SnapshotFacts(f"step-{i}", i, NOW - rng.random() * 10**8, 1, metrics={"loss": rng.random()}) for i in range(100_000)]
    steps = kept(
        found, last=9, daily=99, weekly=99, monthly=9, yearly=2, every_steps=1000, best=(Best("loss", False, 3),), within_s=10**6
    )
    assert 99_999 in steps
