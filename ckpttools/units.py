"""Sizes and durations as people write them: "5GB", "1.5TiB", "36h" <-> whole bytes and seconds.

Decimal units are powers of 1000 (KB, MB, GB, TB), binary ones of 1024 (KiB, MiB, GiB, TiB), as everywhere in the
field since huggingface_hub. What is ambiguous ("5Mi", "5m" as a size), negative or followed by other text is refused:
libraries that guess here have turned "5Mi" into 5,000,000 and "512" into 64. Numbers are exact, however long.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)},
    **{p: 1000**i for i, p in enumerate("KMGTP", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)},
}
_DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"


def parse_bytes(text: str) -> int:
    """Bytes that `text` names: "300", "5GB", "1.5 TiB". Units ignore case, but "Mi" needs its B and "m" is minutes. Pure.

    Raises: ValueError: when it is not a non-negative number with a known unit, or not a whole number of bytes.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]*)", text.strip())
    unit = match and next((u for u in _SIZE_UNITS if u.lower() == match.group(2).lower()), None)
    if not match or unit is None or match.group(2) == "m":
        raise ValueError(f"not a size: `{text}` (write it like 300MB, 5GB or 1.5TiB)")
    value = Fraction(match.group(1)) * _SIZE_UNITS[unit]
    if value.denominator != 1:
        raise ValueError(f"not a whole number of bytes: `{text}`")
    return int(value)


def parse_duration(text: str) -> int:
    """Seconds that `text` names: "36h", "7d", "1h30m", "1h 30m", "90s". Pure.

    Raises: ValueError: when it is not a sequence of number and unit (s, m, h, d, w), largest unit first, each once.
    """
    parts = re.findall(rf"{_NUMBER}([smhdw])", text)
    units = [unit for _, unit in parts]
    in_order = units == sorted(set(units), key=lambda u: -_DURATION_UNITS[u])
    if not in_order or not re.fullmatch(rf"({_NUMBER}[smhdw]\s*)+", text.strip()):
        raise ValueError(f"not a duration: `{text}` (write it like 90s, 30m, 36h, 7d or 1h30m)")
    value = sum((Fraction(n) * _DURATION_UNITS[u] for n, u in parts), Fraction(0))
    if value.denominator != 1:
        raise ValueError(f"not a whole number of seconds: `{text}`")
    return int(value)


def render_bytes(length_bytes: int) -> str:
    """A size for people, both ways when rounded: "24 bytes", "1.5 GiB (1610612736 bytes)". Pure."""
    if length_bytes < 1024:
        return f"{length_bytes} byte{'' if length_bytes == 1 else 's'}"
    return f"{render_bytes_short(length_bytes)} ({length_bytes} bytes)"


def render_bytes_short(length_bytes: int) -> str:
    """A size for a narrow column, to one decimal: "1.5 GiB", "1023.9 KiB", "24 B". Pure."""
    if length_bytes < 1024:
        return f"{length_bytes} B"
    value, unit = float(length_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(value, 1) < 1024:  # as it will be printed: 1023.96 KiB is 1.0 MiB, never 1024.0 KiB
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def render_duration(seconds: float) -> str:
    """A duration for people with its two largest units: "1h 30m", "3d 4h", "12s". Pure."""
    rest = int(seconds)
    parts: list[str] = []
    for unit, length_s in sorted(_DURATION_UNITS.items(), key=lambda item: -item[1]):
        if unit != "w" and (rest >= length_s or (unit == "s" and not parts)):
            parts.append(f"{rest // length_s}{unit}")
            rest %= length_s
    return " ".join(parts[:2])
