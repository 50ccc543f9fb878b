"""The golden decisions of retention: one list of a hundred snapshots, and what forty policies keep of it and why.

`python -m tests.golden.retention` decides again, writes `retention.json` and the examples of `docs/reference/retention.md`;
look at the difference before you commit it. Times are hours before "now"; a snapshot that has nothing special is one row of
numbers. Read `load` and `answer` first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ckpttools.errors import CkpttoolsError
from ckpttools.snapshots.policy import Best, Policy, Room, SnapshotFacts
from ckpttools.snapshots.retention import decide

DATA = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "retention.md"
BEGIN, END = "<!-- examples: begin -->\n", "<!-- examples: end -->\n"
NOW = 1_767_225_600.0  # 2026-01-01 00:00 UTC, a Thursday
GIB = 1 << 30


def load() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


def snapshots_of(data: dict[str, Any]) -> list[SnapshotFacts]:
    found = []
    for path, step, age_h, gib, extra in data["snapshots"]:
        extra = {k: tuple(v) if k == "claims" else v for k, v in extra.items()}
        found.append(SnapshotFacts(path, step, NOW - age_h * 3600, gib * GIB, 100, **extra))
    return found


def policy_of(rules: dict[str, Any]) -> Policy:
    values = dict(rules)
    values["best"] = tuple(Best(*b) for b in values.get("best", ()))
    values["steps"] = frozenset(values.get("steps", ()))
    return Policy(**values)


def answer(snapshots: list[SnapshotFacts], rules: dict[str, Any]) -> dict[str, Any]:
    """What is kept and why, how many snapshots go, or the refusal."""
    try:
        decisions = decide(snapshots, policy_of(rules), now=NOW, room=Room(200 * GIB, 5000))
    except CkpttoolsError as e:
        return {"refused": e.message}
    kept = {d.snapshot.path: list(d.reasons) for d in decisions if d.keep}
    why: dict[str, int] = {}
    for d in decisions:
        for reason in d.reasons if not d.keep else ():
            why[reason] = why.get(reason, 0) + 1
    return {"kept": kept, "deleted": why}


def examples(data: dict[str, Any]) -> str:
    """The examples of the page, as Markdown."""
    parts: list[str] = []
    answers = [c["answer"]["kept"] for c in data["policies"] if "kept" in c["answer"]]
    always = {p: set.intersection(*(set(a[p]) for a in answers if p in a)) for a in answers for p in a}
    for case in data["policies"]:
        if "example" not in case:
            continue
        parts.append(f"### `{case['options']}`\n\n{case['example']}\n")
        found = case["answer"]
        if "refused" in found:
            parts.append(f"Refused: {found['refused']}.\n")
            continue
        rows = [
            f"| `{path}` | {', '.join(reasons)} |"
            for path, reasons in found["kept"].items()
            if not (parts[1:] and always[path] == set(reasons))
        ]
        gone = ", ".join(f"{count}: {reason}" for reason, count in found["deleted"].items())
        parts.append("| kept | reasons |\n| --- | --- |\n" + "\n".join(rows) + f"\n\nDeleted: {gone or 'none'}.\n")
    return "\n".join(parts)


def page(text: str, data: dict[str, Any]) -> str:
    """The page with its examples as the data has them."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + examples(data) + "\n" + END + rest.partition(END)[2]


def write(data: dict[str, Any]) -> None:
    rows = ",\n".join("  " + json.dumps(row) for row in data["snapshots"])
    cases = ",\n".join("  " + json.dumps(case) for case in data["policies"])
    DATA.write_text(f'{{\n "snapshots": [\n{rows}\n ],\n "policies": [\n{cases}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    data = load()
    snapshots = snapshots_of(data)
    for case in data["policies"]:
        case["answer"] = answer(snapshots, case["rules"])
    write(data)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")
    sys.stdout.write(f"wrote {DATA.name} and {PAGE.name}\n")


if __name__ == "__main__":
    main()
