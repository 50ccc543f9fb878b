"""What object stores raise."""

from __future__ import annotations

import sys


def store_error_types() -> tuple[type[Exception], ...]:
    """What stores raise besides the usual, of those whose package is loaded."""
    known = (
        ("gcsfs.retry", "HttpError"),
        ("aiohttp", "ClientError"),
        ("botocore.exceptions", "BotoCoreError"),
        ("google.auth.exceptions", "GoogleAuthError"),
    )
    loaded = tuple(getattr(sys.modules[module], name) for module, name in known if module in sys.modules)
    return (OSError, ValueError, RuntimeError, *loaded)
