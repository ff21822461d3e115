"""Keeps the C heap warm between steps."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt
_LARGEST_MMAP_THRESHOLD = 32 << 20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_heap() -> None:
    """Stop glibc from giving free memory at the heap's end back to the system.

    A scheduled step frees all it has made, so the heap would shrink after each step and be faulted in again, page by page, in the next
    (measured: a quarter of a ResNet-18 step; an eager step keeps its gradients, which happens to prevent that). Blocks over 32 MiB are
    given back as ever. For the whole process, once; left alone where the user has set malloc up himself or the C library is another.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, -1)
