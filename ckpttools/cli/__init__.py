"""The command line: a table of commands that are loaded when called, and the one place that turns errors into exit codes."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import click

from ckpttools import __version__
from ckpttools.errors import EXIT_CODE_MEANINGS, CkpttoolsError, ExitCode, FindingsError

COMMANDS: dict[str, str] = {
    "inspect": "Say what a checkpoint is: layout, step, mesh, tensors, files",
    "hash": "Print a digest per tensor that ignores the container, and one fingerprint",
    "seal": "Record every file and digest beside a snapshot",
    "validate": "Check that a snapshot is whole, and that it is what it should be",
    "diff": "Say how two checkpoints differ, tensor by tensor",
    "consolidate": "Turn a sharded checkpoint into portable files",
    "reshard": "Lay a checkpoint out for another set of ranks",
    "status": "Say whether a run is saving, what is at risk, and how much still fits",
    "latest": "Print the newest snapshot that passes validation, for restart scripts",
    "prune": "Delete snapshots by retention rules; shows its decisions, deletes only with --apply",
}
"""Name -> one line for `--help`, which must not load the commands' modules."""


class LazyCommands(click.Group):
    """Loads a command's module when the command is called, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, from its module."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ckpttools.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without loading any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *pos: Any, **extra: Any) -> NoReturn:
        """Run a command and exit with its status; the only place in the package that catches everything."""
        from ckpttools.cli import render

        words = list(sys.argv[1:] if args is None else args)
        is_verbose = "-v" in words or "--verbose" in words
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt)
        try:
            extra["standalone_mode"] = False
            result = super().main(words, *pos, **extra)
            render.flush()
            sys.exit(int(result) if isinstance(result, int) else ExitCode.OK)
        except click.exceptions.NoArgsIsHelpError as e:
            render.write_line(e.format_message())
            sys.exit(ExitCode.USAGE)
        except click.UsageError as e:
            render.write_usage_error(e)
            sys.exit(ExitCode.USAGE)
        except FindingsError as e:
            render.write_findings_error(e)
            sys.exit(e.exit_status)
        except CkpttoolsError as e:
            render.write_error(e)
            sys.exit(e.exit_code)
        except (KeyboardInterrupt, click.Abort):
            render.write_line("ckpttools: interrupted")
            sys.exit(ExitCode.INTERRUPTED)
        except Exception as e:  # a fault of ours: one line, and the traceback for those who ask
            if is_verbose:
                raise
            render.write_internal_error(e)
            sys.exit(ExitCode.FAILED)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


_EPILOG = "\b\nExit status:\n" + "\n".join(f"  {code.value:3}  {meaning}" for code, meaning in EXIT_CODE_MEANINGS.items())


@click.command(
    cls=LazyCommands,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
        "auto_envvar_prefix": "CKPTTOOLS",
    },
)
@click.version_option(__version__, prog_name="ckpttools")
def main() -> None:
    """Inspect, validate, hash and convert model checkpoints, offline and without the training stack.

    Any PATH may be a directory, a file or a URL (gs://, s3://, ...). A run directory stands for its newest committed
    snapshot. No code in a pickle is ever run, sources are never written to, and no tensor changes unless asked.
    """
