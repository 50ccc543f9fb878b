"""Runs the `console` blocks of the documentation and holds what they show to what the commands answer.

A block has lines `$ command`, each followed by what it prints on both streams; a line `...` stands for any number of lines,
and `...` in a line for any text. All blocks of a page run in one shell, in an empty directory in which `fixtures/` has
copies of the cases that the page names. `python docs/transcripts.py` puts real output in the place of output that is out of
date; `--check` only says so. Read `run_page` first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FIXTURE = re.compile(r"fixtures/(\w+/\w+)")
_MARK = "--- end of a command ---"
_ANY = "..."


@dataclass(frozen=True)
class Step:
    """A command and what it printed, or should have."""

    command: str
    lines: tuple[str, ...]


def pages() -> list[Path]:
    """The pages that have something to run."""
    return sorted(page for page in DOCS.rglob("*.md") if steps_of(page.read_text(encoding="utf-8")))


def steps_of(text: str) -> list[Step]:
    """The commands of all `console` blocks of a page, with the output that it shows. Pure."""
    return [step for block in _BLOCK.finditer(text) for step in _parse(block.group(1))]


def _parse(block: str) -> Iterator[Step]:
    command, lines = "", list[str]()
    for line in block.splitlines():
        if line.startswith("$ "):
            if command:
                yield Step(command, tuple(lines))
            command, lines = line[2:], []
        elif command:
            lines.append(line)
        else:
            raise ValueError(f"a console block starts with output: {line}")
    if command:
        yield Step(command, tuple(lines))


def run_page(text: str, directory: Path) -> list[Step]:
    """The steps of a page as they answer in an empty directory."""
    for case in sorted(set(_FIXTURE.findall(text))):
        shutil.copytree(ROOT / "fixtures" / case, directory / "fixtures" / case)
    steps = steps_of(text)
    # `$?` of one command must reach the next, and the mark must not change it
    script = "\n".join(f"{s.command}\nstatus=$?; printf '%s\\n' '{_MARK}'; (exit $status)" for s in steps)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = {"PATH": path, "HOME": str(directory), "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT)}  # the code beside the page
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=directory,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=300,
    )
    answers = done.stdout.split(_MARK + "\n")
    if len(answers) != len(steps) + 1:
        raise ValueError(f"{len(steps)} commands gave {len(answers) - 1} answers:\n{done.stdout}")
    return [Step(s.command, tuple(a.splitlines())) for s, a in zip(steps, answers, strict=False)]


def is_as_shown(shown: Sequence[str], found: Sequence[str]) -> bool:
    """Whether output is what a page shows, given what `...` stands for. Pure."""
    pattern = "".join("(?:.*\n)*?" if line.strip() == _ANY else _line_pattern(line) for line in shown)
    return re.fullmatch(pattern, "".join(line + "\n" for line in found)) is not None


def _line_pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.split(_ANY))) + "\n"


def differences(text: str) -> list[str]:
    """Per command of a page that does not answer as shown, what it answers."""
    with tempfile.TemporaryDirectory() as directory:
        found = run_page(text, Path(directory))
    return [
        "\n".join((f"$ {real.command}", *real.lines))
        for shown, real in zip(steps_of(text), found, strict=True)
        if not is_as_shown(shown.lines, real.lines)
    ]


def renewed(text: str) -> str:
    """The page with real output where what it shows is out of date; output that still fits stays as it is shown."""
    with tempfile.TemporaryDirectory() as directory:
        found = iter(run_page(text, Path(directory)))

    def renew(block: re.Match[str]) -> str:
        lines: list[str] = []
        for shown, real in zip(_parse(block.group(1)), found, strict=False):
            lines += [f"$ {shown.command}", *(shown.lines if is_as_shown(shown.lines, real.lines) else real.lines)]
        return "```console\n" + "".join(line + "\n" for line in lines) + "```"

    return _BLOCK.sub(renew, text)


def run(arguments: Sequence[str]) -> int:
    """Renew every page, or with `--check` say what is out of date; the exit status."""
    is_checking = "--check" in arguments
    chosen = [Path(a) for a in arguments if a != "--check"] or pages()
    status = 0
    for page in chosen:
        text = page.read_text(encoding="utf-8")
        wrong = differences(text)
        if wrong:
            status = 1 if is_checking else 0
            sys.stdout.write(f"{page.name}: {len(wrong)} commands answer otherwise\n")
            if is_checking:
                sys.stdout.write("\n".join(wrong) + "\n")
            else:
                page.write_text(renewed(text), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
