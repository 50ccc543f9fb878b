"""The options of a retention policy, their types, and the file that may hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ckpttools.cli.options import SIZE, Decorator
from ckpttools.errors import NotFoundError, UsageError
from ckpttools.snapshots.policy import ALL, Best, Policy
from ckpttools.units import parse_duration

PERIODS = ("hourly", "daily", "weekly", "monthly", "yearly")
_NOT_IN_A_FILE = {"is_applied", "is_dry", "config", "is_json", "verbose"}
"""What is said on the command line, or not at all."""


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on, and 8.1 is supported
    """A duration as people write it: 36h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Seconds."""
        if isinstance(value, int):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)


class Count(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on, and 8.1 is supported
    """A number of snapshots, or `all`."""

    name = "n|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """A count; `ALL` for all."""
        text = str(value)
        if text in ("all", str(ALL)):
            return ALL
        if not (text.isascii() and text.isdigit()):
            self.fail(f"not a number of snapshots: `{text}` (write it like 3, or all)", param, ctx)
        return int(text)


class BestRule(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on, and 8.1 is supported
    """METRIC:min|max:N."""

    name = "metric:min|max:n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Best:
        """The rule."""
        if isinstance(value, Best):
            return value
        metric, _, rest = str(value).rpartition(":")[0].rpartition(":")
        count = str(value).rpartition(":")[2]
        if not metric or rest not in ("min", "max") or not (count.isascii() and count.isdigit()):
            self.fail(f"not a rule for the best: `{value}` (write it like eval_loss:min:2)", param, ctx)
        return Best(metric, rest == "max", int(count))


DURATION, COUNT, BEST = Duration(), Count(), BestRule()


def _read_config(ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Take the options of a file as defaults; the command line goes before them."""
    if value is None:
        return None
    from ckpttools.storage.source import open_source, read
    from ckpttools.toml import parse_toml

    source, name = open_source(value)
    if not name:
        raise NotFoundError(f"a directory, not a file of options: {value}")
    found = parse_toml(read(source, name, 0, source.listing().length_bytes(name)), value)
    options = {
        o.lstrip("-"): p for p in ctx.command.params for o in p.opts if o.startswith("--") and p.name not in _NOT_IN_A_FILE
    }
    unknown = sorted(set(found) - options.keys())
    if unknown:
        raise UsageError(
            f"unknown option in {value}: `{unknown[0]}`",
            expected=", ".join(sorted(options)),
            hints=["write keys as the options are"],
        )
    ctx.default_map = {**(ctx.default_map or {}), **{str(options[k].name): _listed(options[k], v) for k, v in found.items()}}
    return value


def _listed(option: click.Parameter, value: Any) -> Any:
    """A single value for an option that takes several is a list of one."""
    return [value] if getattr(option, "multiple", False) and not isinstance(value, list) else value


def policy(function: Callable[..., Any]) -> Callable[..., Any]:
    """All options of a policy."""
    decorators: list[Decorator] = [
        click.option("--keep-last", type=COUNT, default=0, metavar="N", show_default=False, help="Keep the newest N (or all)."),
        *(
            click.option(
                f"--keep-{period}",
                type=COUNT,
                default=0,
                metavar="N",
                show_default=False,
                help=f"Keep one for each of the last N {unit} that have one, in UTC.",
            )
            for period, unit in zip(PERIODS, ("hours", "days", "weeks", "months", "years"), strict=True)
        ),
        click.option(
            "--keep-within", type=DURATION, metavar="DURATION", help="Keep what is less than this older than the newest."
        ),
        click.option("--keep-every", type=click.IntRange(1), metavar="STEPS", help="Keep steps that this number divides."),
        click.option("--keep-step", type=click.IntRange(0), multiple=True, metavar="STEP", help="Keep this step."),
        click.option(
            "--keep-best",
            type=BEST,
            multiple=True,
            metavar="METRIC:min|max:N",
            help="Keep the best N by a metric of trainer_state.json, a metrics JSON or the name.",
        ),
        click.option(
            "--pin", multiple=True, metavar="SNAPSHOT", help="Keep this one, by name or step; so does a file .keep in it."
        ),
        click.option("--max-bytes", type=SIZE, metavar="SIZE", help="Delete further, oldest first, until they take no more."),
        click.option("--min-free", type=SIZE, metavar="SIZE", help="Delete further, oldest first, until this much is free."),
        click.option("--min-free-inodes", type=click.IntRange(0), metavar="N", help="The same for inodes."),
        click.option(
            "--grace", type=DURATION, default="6h", metavar="DURATION", help="Never delete younger ones that are not committed."
        ),
        click.option(
            "--max-delete-fraction",
            type=click.FloatRange(0, 1),
            default=0.9,
            metavar="FRACTION",
            help="Refuse to delete a larger part of the snapshots.",
        ),
        click.option(
            "--config",
            callback=_read_config,
            is_eager=True,
            metavar="FILE",
            help="TOML file of these options, without the dashes.",
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def policy_of(options: dict[str, Any]) -> Policy:
    """The policy that the options describe."""
    return Policy(
        last=options["keep_last"],
        **{period: options[f"keep_{period}"] for period in PERIODS},
        within_s=options["keep_within"],
        every_steps=options["keep_every"],
        steps=frozenset(options["keep_step"]),
        best=tuple(options["keep_best"]),
        max_bytes=options["max_bytes"],
        min_free_bytes=options["min_free"],
        min_free_inodes=options["min_free_inodes"],
        grace_s=options["grace"],
        max_delete_fraction=options["max_delete_fraction"],
    )
