"""Bytes, times and shares as text for people."""

from __future__ import annotations


def size(size_bytes: int) -> str:
    """As "1.50 GiB", "12.0 MiB", "3 B"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{value:.{_digits(value)}f} {unit}"
        value /= 1024
    return f"{value:.{_digits(value)}f} TiB"


def duration(seconds: float) -> str:
    """As "1.25 s", "12.3 ms", "450 µs"."""
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if abs(seconds) >= limit:
            return f"{seconds * factor:.{_digits(seconds * factor)}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def percent(part: float, whole: float) -> str:
    """As "31.4 %"; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _digits(value: float) -> int:
    return max(0, 2 - sum(abs(value) >= limit for limit in (10, 100)))
