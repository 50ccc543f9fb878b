"""The only module that writes to a stream: data on standard output; errors, notes and progress on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from ckpttools.errors import CkpttoolsError, FindingsError
from ckpttools.findings import Finding
from ckpttools.units import render_bytes_short

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttools.seals import Seal

_REPORT_SECONDS = 30
_MAX_FINDINGS = 200


def write_data(text: str) -> None:
    """A line of the answer. Names may hold lone surrogates, which no stream takes; they are escaped."""
    _emit(text.encode("utf-8", "backslashreplace").decode() + "\n")


def write_json(document: dict[str, Any]) -> None:
    """The answer as one JSON document."""
    _emit(json.dumps(document, indent=1) + "\n")


def fingerprint_line(whole: str, seal: Seal) -> str:
    """The fingerprint of an output as `hash` has it; of what was written where that one is not known, and the line says so."""
    written = f"{seal.fingerprint}  fingerprint of {count(len(seal.tensors), 'tensor')} written"
    return f"{whole}  fingerprint" if whole else written


def _emit(text: str) -> None:
    """Write to standard output; a reader that went away (`| head`) changes nothing about the answer or its exit status."""
    if sys.stdout is None:  # closed by the caller
        return
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        _discard_stdout()
    except OSError as e:
        raise _unwritable(e) from e


def flush() -> None:
    """Send what is buffered. Raises CkpttoolsError when standard output does not take it."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as e:
        raise _unwritable(e) from e


def _unwritable(e: OSError) -> CkpttoolsError:
    _discard_stdout()
    return CkpttoolsError(f"standard output cannot be written: {e.strerror}", hints=["the answer is not complete; run it again"])


def write_line(text: str) -> None:
    """A line for people, on standard error."""
    sys.stderr.write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Rows with aligned columns; the columns in `right` are aligned to the right."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def finding_lines(finding: Finding) -> Iterator[str]:
    """A finding for people, by the message template."""
    yield f"{finding.severity}: {finding.code}: {finding.where}"
    if finding.expected:
        yield f"  expected: {finding.expected}"
    if finding.found:
        yield f"  found:    {finding.found}"
    if finding.remedy and finding.severity != "note":
        yield f"  hint: {finding.remedy}"


def write_findings(findings: Iterable[Finding], write: Callable[[str], None] = write_data) -> None:
    """Findings for people; very many are cut, with a word on how to see all."""
    found = list(findings)
    for finding in found[:_MAX_FINDINGS]:
        for line in finding_lines(finding):
            write(line)
    if len(found) > _MAX_FINDINGS:
        write(f"... and {len(found) - _MAX_FINDINGS} more; --json has all")


def write_error(e: CkpttoolsError) -> None:
    """An error by the message template."""
    write_line(f"ckpttools: error: {e.message}" + (f": {e.where}" if e.where else ""))
    if e.expected:
        write_line(f"  expected: {e.expected}")
    if e.found:
        write_line(f"  found:    {e.found}")
    for hint in e.hints:
        write_line(f"  hint: {hint}")


def write_findings_error(e: FindingsError) -> None:
    """An operation that findings stopped: the reason, then the findings."""
    write_error(e)
    write_findings(e.findings, write_line)


def write_usage_error(e: click.UsageError) -> None:
    """Wrong usage: what is wrong, and where help is."""
    command = e.ctx.command_path if e.ctx else "ckpttools"
    write_line(f"{command}: error: {e.format_message()}")
    write_line(f"  hint: {command} --help")


def write_internal_error(e: Exception) -> None:
    """A fault of ours, in one line."""
    write_line(f"ckpttools: error: internal error: {type(e).__name__}: {e}")
    write_line("  hint: run again with -v for the traceback, and report it")


def _discard_stdout() -> None:
    """Nobody reads the answer any more; keep the interpreter from complaining at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress(what: str, total_bytes: int, *, is_quiet: bool, is_verbose: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal; with -v, and no terminal, a line now and then; else nothing, so that cron stays quiet."""
    if is_quiet or not (sys.stderr.isatty() or is_verbose):
        yield None
        return
    if not sys.stderr.isatty():
        yield _line_reporter(what, total_bytes)
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:
        yield lambda count: (bar.update(count), None)[1]


@contextmanager
def late_progress(
    what: str, *, is_quiet: bool, is_verbose: bool
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Like `progress` for work whose size is known only once it was planned: (report, set the total)."""
    with ExitStack() as stack:
        reporter: list[Callable[[int], None]] = []

        def set_total(total_bytes: int) -> None:
            report = stack.enter_context(progress(what, total_bytes, is_quiet=is_quiet, is_verbose=is_verbose))
            reporter.extend([report] if report else [])

        yield (lambda count: reporter[0](count) if reporter else None), set_total


def _line_reporter(what: str, total_bytes: int) -> Callable[[int], None]:
    state = {"done": 0, "said": time.monotonic()}
    start = time.monotonic()

    def report(count: int) -> None:
        state["done"] += count
        now = time.monotonic()
        if now - state["said"] >= _REPORT_SECONDS:
            state["said"] = now
            rate = render_bytes_short(int(state["done"] / (now - start)))
            write_line(f"{what}: {render_bytes_short(int(state['done']))} of {render_bytes_short(total_bytes)}, {rate}/s")

    return report
