"""Keeps the C heap warm between steps."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of glibc's mallopt
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@functools.cache
def keep_heap() -> bool:
    """Stop glibc from giving free memory back to the system by itself; whether that was done.

    A scheduled step frees all it has made, so the heap would shrink after each step, and blocks of over 32 MiB would each be mapped and
    unmapped by themselves: the next step then faults its memory in again, page by page (measured: a quarter of a ResNet-18 step, a third
    of a VGG-16 step, eager or not). The process keeps as much as it once needed until `give_back`. For the whole process, once; left alone
    where the user has set malloc up himself or the C library is another.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Let the system have what is free in a heap that was kept."""
    if keep_heap():
        ctypes.CDLL(None).malloc_trim(0)
