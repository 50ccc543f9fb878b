"""Writes the pages of docs/reference/ that are made from the code: commands, findings, exit codes, dtypes.

`python docs/generate.py` writes them; `--check` writes nothing and exits with 1 when one is out of date, as the tests do.
Read `PAGES` first.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from ckpttools.cli import COMMANDS, main
from ckpttools.dtypes import TABLE as DTYPES
from ckpttools.dtypes import DType
from ckpttools.errors import EXIT_CODE_MEANINGS, ExitCode
from ckpttools.findings import TABLE as CODES
from ckpttools.findings import Code

REFERENCE = Path(__file__).parent / "reference"
_MARK = "<!-- Made by docs/generate.py from the code. Do not edit; run it again. -->"


def commands() -> list[tuple[str, click.Command]]:
    """Every command, by name, in the order of the table."""
    context = click.Context(main)
    found = [(name, main.get_command(context, name)) for name in COMMANDS]
    return [(name, command) for name, command in found if command is not None]


def options_of(command: click.Command) -> list[click.Option]:
    """The options of a command without `--help`, in the order of use."""
    return [p for p in command.params if isinstance(p, click.Option) and "--help" not in p.opts]


def render_cli() -> str:
    """The page of all commands."""
    return _page("Commands", _cli())


def _cli() -> Iterator[str]:
    yield inspect.cleandoc(main.help or "")
    yield _table(("command", "does"), [(f"[`{name}`](#{name})", does) for name, does in COMMANDS.items()])
    yield (
        "`ckpttools --version` says which version is installed. Every command has `--help`, or `-h`. Every option can also be"
        " given as an environment variable: `CKPTTOOLS_<COMMAND>_<OPTION>`, for example `CKPTTOOLS_HASH_JOBS=4`."
        " What exit statuses mean is in [exit-codes.md](exit-codes.md); what `--json` prints is in [json.md](json.md)."
    )
    for name, command in commands():
        yield f"## {name}"
        arguments = " ".join(_metavar(p) for p in command.params if isinstance(p, click.Argument))
        yield f"```\nckpttools {name} [OPTIONS] {arguments}\n```"
        yield inspect.cleandoc(command.help or "")
        yield "```sh\n" + "\n".join(example_lines(command)) + "\n```"
        yield _table(("option", "default", "meaning"), [_option_row(o) for o in options_of(command)])


def example_lines(command: click.Command) -> list[str]:
    """The lines of a command's help that show how it is called."""
    lines = inspect.cleandoc(command.epilog or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("ckpttools ")]


def _option_row(option: click.Option) -> tuple[str, str, str]:
    names = ", ".join(f"`{o}`" for o in sorted((*option.opts, *option.secondary_opts), key=lambda o: o.startswith("--")))
    value = "" if option.is_flag else f" {_code(_metavar(option))}"
    meaning = (option.help or "").partition("  [default:")[0]
    return names + value, _default(option), meaning + (" May be given several times." if option.multiple else "")


def _metavar(parameter: click.Parameter) -> str:
    if parameter.metavar:
        return parameter.metavar
    if isinstance(parameter.type, click.Choice):
        return "|".join(map(str, parameter.type.choices))
    return "NUMBER" if isinstance(parameter.type, click.IntRange) else parameter.type.name.upper()


def _default(option: click.Option) -> str:
    stated = (option.help or "").partition("  [default: ")[2].rstrip("]")
    if stated:
        return stated
    if isinstance(option.show_default, str):
        return option.show_default
    return f"`{option.default}`" if isinstance(option.default, (str, int)) and not option.is_flag else ""


def render_findings() -> str:
    """The page of all findings."""
    return _page("Findings", _findings())


def _findings() -> Iterator[str]:
    yield (
        "A finding is one thing that is wrong with a checkpoint: a code, a severity, where it is, what was expected, what was"
        " found, and what to do. Codes are stable; texts may change."
    )
    yield (
        "An `error` makes a checkpoint unfit. `validate` exits with 3 when all errors say that something is absent"
        ' ("incomplete" below), and with 1 when any says that something is wrong. A `warning` is worth a look and a `note` is'
        " said for completeness; neither changes the exit status. The place that emits a finding may state another severity than"
        " the one below, where the same thing is less grave (an index that is missing beside shards that are all there)."
    )
    yield _table(("code", "severity", "says that", "what to do"), [_finding_row(c) for c in CODES])


def _finding_row(code: Code) -> tuple[str, ...]:
    severity = f"{code.severity}, incomplete" if code.is_incompleteness else code.severity
    return f'<a id="{code.code}"></a>`{code.code}`', severity, code.meaning, code.remedy


def render_exit_codes() -> str:
    """The page of all exit statuses."""
    return _page("Exit statuses", _exit_codes())


def _exit_codes() -> Iterator[str]:
    yield "They mean the same in every command."
    yield _table(("status", "name", "meaning"), [_exit_row(c) for c in ExitCode])
    yield (
        "A script that restarts a training run goes on with 0, takes an older snapshot with 1 and 3, and calls for a person with"
        " anything else. Warnings and notes exit with 0; `--json` has them."
    )


def _exit_row(code: ExitCode) -> tuple[str, ...]:
    return str(code.value), f"`{code.name}`", EXIT_CODE_MEANINGS[code]


def render_dtypes() -> str:
    """The page of all element types."""
    return _page("Dtypes", _dtypes())


def _dtypes() -> Iterator[str]:
    yield (
        "Names are torch's without `torch.`. A dtype without a code in safetensors cannot be written there; a torch file"
        " takes it. `--dtype` casts the dtypes of kind `float`."
    )
    yield _table(("dtype", "bits", "kind", "in safetensors", "torch storage class"), [_dtype_row(d) for d in DTYPES])
    yield (
        "`float4_e2m1fn_x2` counts packed pairs, as torch does: one element is one byte. safetensors counts single elements, so a"
        " tensor of shape [2] is written there as `F4` of shape [4], and read back as [2]. A dtype whose elements share a byte"
        " (4 or 6 bits) is read and hashed whole, and never cut."
    )


def _dtype_row(dtype: DType) -> tuple[str, ...]:
    codes = (f"`{code}`" if code else "" for code in (dtype.safetensors, dtype.storage_class))
    return f"`{dtype.name}`", str(dtype.bits), dtype.kind, *codes


def _page(title: str, paragraphs: Iterator[str]) -> str:
    return "\n\n".join([f"# {title}", _MARK, *paragraphs]) + "\n"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": render_cli,
    "findings.md": render_findings,
    "exit-codes.md": render_exit_codes,
    "dtypes.md": render_dtypes,
}
"""File in docs/reference/ -> what makes it."""


def outdated() -> list[str]:
    """The pages that are not as the code would have them."""
    paths = {name: REFERENCE / name for name in PAGES}
    return [n for n, p in paths.items() if not p.is_file() or p.read_text(encoding="utf-8") != PAGES[n]()]


def run(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` say which are out of date; the exit status."""
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write("usage: python docs/generate.py [--check]\n")
        return 2
    names = outdated()
    if arguments:
        sys.stdout.writelines(f"out of date: docs/reference/{name}\n" for name in names)
        return 1 if names else 0
    for name in names:
        (REFERENCE / name).write_text(PAGES[name](), encoding="utf-8")
        sys.stdout.write(f"wrote docs/reference/{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
