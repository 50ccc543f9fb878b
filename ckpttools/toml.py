"""TOML text to plain values, with one error for what is none."""

from __future__ import annotations

import sys

from ckpttools.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str | bytes, where: str) -> dict[str, object]:
    """The table that a TOML document is. Pure.

    Args:
        text: or its bytes, UTF-8.
        where: what the text is, for the error: the name of a file.
    Raises: UsageError: where it is not TOML; it says in which line.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        table: dict[str, object] = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"not a TOML file: {where}", found=str(error)) from error
    except RecursionError as error:
        raise UsageError(f"not a TOML file: {where}", found="tables or lists too deep in one another") from error
    return table
