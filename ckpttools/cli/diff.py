"""`ckpttools diff`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

import click

from ckpttools.cli import documents, options, render
from ckpttools.cli.session import take_roots
from ckpttools.errors import ExitCode
from ckpttools.model import TensorSpec
from ckpttools.operations.diff import CLOSE, SAME, STATUSES, Diff, ObjectDiff, TensorDiff
from ckpttools.operations.elementwise import Difference, Extreme
from ckpttools.units import render_bytes_short

_EXIT_CODES = {
    "same": ExitCode.OK,
    "close": ExitCode.OK,
    "different": ExitCode.WRONG,
    "damaged": ExitCode.WRONG,
    "incomplete": ExitCode.INCOMPLETE,
}
_EPILOG = options.examples(
    "ckpttools diff checkpoint/step-1000 checkpoint/step-2000",
    "ckpttools diff checkpoint/step-1000 exported/ --weights-only --strip-prefix model.",
    "ckpttools diff master.safetensors bf16.safetensors --include 'layers.0.*' --json",
    "ckpttools diff ours/ theirs/ --rtol 1e-5 --atol 1e-8",
)
_WORDS = {status: status.replace("_a", " A").replace("_b", " B").replace("_", " ") for status in STATUSES}
_MAX_TEXT = 60


def _tolerance(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter("a tolerance is a finite number that is not negative")
    return value


@click.command("diff", epilog=_EPILOG)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--rtol", type=float, callback=_tolerance, metavar="NUMBER", help="Let |a-b| <= atol + rtol*|b| count as equal.")
@click.option("--atol", type=float, callback=_tolerance, metavar="NUMBER", help="The same; one that is not given is 0.")
@options.choice
@click.option("--weights-only", is_flag=True, help="The model's tensors alone, without other families and objects.")
@click.option("--allow-missing", is_flag=True, help="What only one side has is no difference.")
@click.option("--all", "is_all", is_flag=True, help="List what is the same too.")
@options.running
def command(
    a: str,
    b: str,
    rtol: float | None,
    atol: float | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    strip_prefix: tuple[str, ...],
    weights_only: bool,
    allow_missing: bool,
    is_all: bool,
    is_json: bool,
    jobs: int,
    memory: int,
    quiet: bool,
    verbose: bool,
) -> ExitCode:
    """Say how two checkpoints differ, tensor by tensor and object by object, whatever their layouts are.

    For each tensor that changed: how many elements, the largest absolute and relative difference, and where. Every bit
    counts unless --rtol or --atol is given, so -0.0 differs from 0.0, and a NaN equals one of the same bits only. --rename
    and --strip-prefix change names of A into those of B; --include and --exclude match names as they then are, of objects
    too. What is compared is read and held against the checksums that its writer stored; seals are not looked at.
    """
    from ckpttools.operations.diff import diff
    from ckpttools.operations.measure import Tolerance
    from ckpttools.operations.select import Choice, Renaming

    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    choice = Choice(include, exclude, weights_only, Renaming.parse(strip_prefix, rename))
    sides = take_roots(a, ()), take_roots(b, ())
    with render.late_progress("comparing", is_quiet=quiet, is_verbose=verbose) as (report, set_total):
        result = diff(
            sides[0][0],
            sides[1][0],
            roots=(sides[0][1], sides[1][1]),
            choice=choice,
            tolerance=tolerance,
            allow_missing=allow_missing,
            jobs=jobs,
            memory_bytes=memory,
            progress=report,
            on_plan=set_total,
        )
    if is_json:
        render.write_json(documents.diff(result, has_same=is_all))
    elif not (quiet and result.verdict in (SAME, CLOSE)):
        _write(result, is_all=is_all, is_verbose=verbose)
    if any(f.code == "unreadable-file" and f.is_error for f in result.findings):
        return ExitCode.FAILED  # the storage refused, so nothing is known of what it holds
    return _EXIT_CODES[result.verdict]


def _write(result: Diff, *, is_all: bool, is_verbose: bool) -> None:
    render.write_findings(f for f in result.findings if is_verbose or f.severity != "note")
    unlisted = {SAME, "only_in_a", "only_in_b"} if result.allow_missing and not is_verbose else {SAME}
    tensors = [t for t in result.tensors if is_all or t.status not in unlisted]
    objects = [o for o in result.objects if is_all or o.status not in unlisted]
    for line in (*_tensor_lines(tensors), *_object_lines(objects)):
        render.write_data(line)
    render.write_data(_summary(result))


def _tensor_lines(tensors: list[TensorDiff]) -> Iterator[str]:
    """A table of the tensors; the columns of differences only where some were measured."""
    rows = [(_WORDS[t.status], *_measured(t.difference), f"{t.name}  {_specs(t)}") for t in tensors]
    if any(t.difference is not None and not t.difference.is_same for t in tensors):
        rows.insert(0, ("", "differ", "max |a-b|", "max |a-b|/|b|", ""))
    else:
        rows = [(row[0], "", "", "", row[-1]) for row in rows]
    used = [i for i in range(5) if any(row[i] for row in rows)]
    yield from render.table([[row[i] for i in used] for row in rows])


def _measured(found: Difference | None) -> tuple[str, str, str]:
    if found is None or found.is_same:
        return "", "", ""
    count = found.values if found.bits is None else found.bits
    parts = [f"{count} of {found.elements}"]
    if found.bits and found.values is not None and found.values < found.bits:
        parts.append(f"{found.bits - found.values} in bits alone")
    if found.beyond is not None:
        parts.append(f"{found.beyond} beyond")
    if found.not_finite:
        parts.append(f"{found.not_finite} not finite")
    if found.zero_in_b:
        parts.append(f"{found.zero_in_b} with 0 in B")
    return ", ".join(parts), _place(found.max_abs), _place(found.max_rel)


def _place(extreme: Extreme | None) -> str:
    return "" if extreme is None else f"{extreme.difference:.4g} at {list(extreme.index)}"


def _specs(tensor: TensorDiff) -> str:
    """The dtype and shape; of both sides where they differ, and the name in A where it is another."""
    texts = list(dict.fromkeys(_spec(s) for s in (tensor.a, tensor.b) if s is not None))
    other = [s.name for s in (tensor.a, tensor.b) if s is not None and s.name != tensor.name]
    return " and ".join(texts) + (f" ({other[0]})" if other else "")


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _object_lines(objects: list[ObjectDiff]) -> Iterator[str]:
    for entry in objects:
        if not entry.places:
            kinds = dict.fromkeys(o.kind for o in (entry.a, entry.b) if o is not None)
            yield f"{_WORDS[entry.status]}  {entry.name}  {' and '.join(kinds)}"
        for place in documents.places(entry):
            texts = [_short(place[side]) if side in place else "nothing" for side in ("a", "b")]
            yield f"{_WORDS[entry.status]}  {place['name']}  {texts[0]} and {texts[1]}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."


def _summary(result: Diff) -> str:
    """One line that says what was compared, so that `same` is never taken for more than it is."""
    parts = [_counted(result.tensor_counts, "tensor")]
    parts += [_counted(result.object_counts, "object")] if result.objects else []
    errors = sum(f.is_error for f in result.findings)
    parts += [render.count(errors, "error")] if errors else []
    read = f"{render_bytes_short(result.bytes_read)} compared"
    return f"{result.verdict}: {result.a.path} and {result.b.path}: {'; '.join(parts)}; {read}"


def _counted(counts: Mapping[str, int], noun: str) -> str:
    told = [f"{n} {_WORDS[status]}" for status, n in counts.items() if n]
    return f"{render.count(sum(counts.values()), noun)}" + (f": {', '.join(told)}" if told else "")
