"""Each option that several commands share, defined once, and the types that parse their values."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import click

from ckpttools.findings import CODES
from ckpttools.units import parse_bytes

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Size(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on, and 8.1 is supported
    """A number of bytes as people write it: 5GB, 256MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)


SIZE = Size()
_LEAST_MEMORY_BYTES = 8 << 20


def _shard_bytes(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    if value <= 0:
        raise click.BadParameter("a shard holds at least one byte")
    return value


def _memory(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    if value < _LEAST_MEMORY_BYTES:
        raise click.BadParameter("at least 8MiB are needed")
    return value


def default_jobs() -> int:
    """The processors that this process may use, at most 8: storage is the limit before that."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _codes(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for code in values:
        if code not in CODES:
            near = ", ".join(get_close_matches(code, CODES)) or "see docs/reference/findings.md"
            raise click.BadParameter(f"no finding has the code `{code}` ({near})")
    return values


def _settings(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = [value.partition("=") for value in values]
    for name, equals, text in pairs:
        if not (name.isidentifier() and equals and text):
            raise click.BadParameter(f"write it like norm_epsilon=1e-5, not `{name}{equals}{text}`")
    return tuple((name, text) for name, _, text in pairs)


def _together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which help lists them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


path = click.argument("path", metavar="PATH")
ranks = click.option(
    "--ranks",
    type=click.IntRange(1),
    metavar="N",
    help="How many ranks there are, where each wrote a file of its own and nothing says how many did.",
)
roots = click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="PATH",
    help="A further place with files of the same snapshot, such as the disk of another node; may be given several times.",
)
replicas = click.option(
    "--replicas",
    type=click.Choice(["compare", "first", "mean"]),
    default="compare",
    show_default=True,
    help="Where copies of the same values differ: compare stops, first takes the first sound copy, mean computes the mean.",
)
json_output = click.option("--json", "is_json", is_flag=True, help="Print one JSON document instead of text.")
jobs = click.option("--jobs", "-j", type=click.IntRange(1, 256), default=default_jobs, show_default="processors", help="Threads.")
memory = click.option(
    "--memory", type=SIZE, default="256MiB", callback=_memory, help="Bound on the buffers of all threads together."
)
max_shard_size = click.option(
    "--max-shard-size",
    type=SIZE,
    default="5GB",
    callback=_shard_bytes,
    help="Start another safetensors file beyond this size.",
)
verbose = click.option("--verbose", "-v", is_flag=True, help="Say more; tracebacks of unexpected errors.")
quiet = click.option("--quiet", "-q", is_flag=True, help="No progress, and no text when all is well.")
algorithm = click.option("--algorithm", type=click.Choice(["blake3", "sha256"]), default="blake3", help="Digest algorithm.")
running = _together(json_output, jobs, memory, quiet, verbose)
"""What a command that reads every value is told of how to run."""
model_config = click.option(
    "--model-config", metavar="FILE", help="A config.json or params.json with the numbers of heads.  [default: SRC's]"
)


choice = _together(
    click.option("--include", multiple=True, metavar="GLOB", help="Take the tensors that match, of every family."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave the tensors that match."),
    click.option("--rename", multiple=True, metavar="REGEX=REPLACEMENT", help="Change names, in the order given."),
    click.option("--strip-prefix", multiple=True, metavar="PREFIX", help="Take a prefix off names, before --rename."),
)
names = _together(
    click.option(
        "--names",
        multiple=True,
        metavar="NAMES",
        help="Give the model's tensors the names (and cuts) of hf, megatron, meta or fms; a *.toml file adds a map.",
    ),
    click.option(
        "--setting",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_settings,
        help="With --names: a setting of the model that SRC does not state, like norm_epsilon=1e-5.",
    ),
)
allow_findings = click.option(
    "--allow-findings", multiple=True, metavar="CODE", callback=_codes, help="Go on in spite of errors with this code in SRC."
)
output = _together(
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing; DST is not looked at."),
    click.option("--overwrite", is_flag=True, help="Replace DST, once the new one is complete."),
    click.option("--no-verify", is_flag=True, help="Do not read the output back."),
)


def examples(*lines: str) -> str:
    """The part of a help text that shows how a command is called."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
