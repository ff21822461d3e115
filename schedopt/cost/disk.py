"""Speed of the lower tiers of this CPU, measured the way the runtime moves bytes: a thread per direction, beside running compute.

Compute runs meanwhile because swaps are there to hide behind it: on a machine with few cores the copying thread then gets less.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 4 << 20
PAGE = 4096
_SHARED_PENALTY = 1.5  # both directions at once take at most so much longer than the slower one alone, or else they share the way
_LATENCY_RUNS = 4
_SECONDS_EACH_WAY = 0.5
_UNDISTURBED_S = 0.02
_WIDTH, _LENGTH = 256, 1 << 19  # one matrix product and one pass over 2 MiB: compute-bound and memory-bound work take turns

Move = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Speed:
    """Reachable rates of a tier: bytes per second each way alone, whether both ways run at once at that rate, the compute time that every
    copied byte costs, and whether compute had better stop and make the copy itself."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_ns: int
    duplex: bool
    tax_ns_per_byte: float
    blocking: bool = False


def file_speed(size_bytes: int, repeats: int, directory: str | None = None) -> Speed:
    """Rates of an unlinked file in `directory` (default: the temporary directory) with direct I/O in chunks of 4 MiB.

    Reads and writes go over `size_bytes` at most, less on a slow disk. Where direct I/O is refused, the page cache is flushed and dropped.
    """
    half = -(-size_bytes // CHUNK) * CHUNK
    with _scratch(directory or tempfile.gettempdir(), 2 * half) as (descriptor, direct):
        source = mmap.mmap(-1, CHUNK)
        source.write(os.urandom(PAGE) * (CHUNK // PAGE))

        def write(size: int) -> None:
            for at in range(0, size, CHUNK):
                _checked(os.pwrite(descriptor, memoryview(source)[: min(CHUNK, size - at)], at))
            if not direct:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)

        def read(size: int) -> None:
            target = _fresh_pages(size)  # as a storage gets it that comes back: pages may have to be found first, which costs as much again
            for at in range(0, size, CHUNK):
                _checked(os.preadv(descriptor, [target[at : at + CHUNK]], half + at))
            if not direct:
                os.posix_fadvise(descriptor, half, size, os.POSIX_FADV_DONTNEED)

        for at in range(half, 2 * half, CHUNK):  # what is read must have been written: holes cost nothing
            _checked(os.pwrite(descriptor, source, at))
        os.fdatasync(descriptor)
        return _speed(write, read, half, repeats)


def ram_speed(size_bytes: int, repeats: int) -> Speed:
    """Rates of copies to and from a second region of memory: by a thread beside compute, or by all threads with compute standing still,
    whichever costs compute less."""
    device = torch.ones(2 * size_bytes, dtype=torch.uint8)  # both aligned as in a run: it matters
    here, there = device.numpy(), np.frombuffer(mmap.mmap(-1, 2 * size_bytes), dtype=np.uint8)
    there[:] = 1

    def write(size: int) -> None:
        np.copyto(there[:size], here[:size])

    def read(size: int) -> None:
        np.copyto(here[size_bytes : size_bytes + size], there[size_bytes : size_bytes + size])

    beside = _speed(write, read, size_bytes, repeats)
    blocking = _blocking_speed(device, torch.from_numpy(there), repeats)
    return blocking if blocking.tax_ns_per_byte < beside.tax_ns_per_byte else beside


def _blocking_speed(here: torch.Tensor, there: torch.Tensor, repeats: int) -> Speed:
    """Of torch's own copy in pieces as large as a storage may be, none of them in a cache from the piece before."""
    half = here.numel() // 2
    piece = min(CHUNK, half)
    there[:piece].copy_(here[:piece])
    seconds = []
    for _ in range(repeats):
        for at in range(0, half - piece + 1, piece):
            started = time.perf_counter()
            there[at : at + piece].copy_(here[half + at : half + at + piece])
            seconds.append(time.perf_counter() - started)
    latency = sorted(_seconds(lambda: there[:64].copy_(here[:64])) for _ in range(_LATENCY_RUNS))[_LATENCY_RUNS // 4]
    each = statistics.median(seconds)
    return Speed(
        piece / each, piece / each, round(latency * 1e9), duplex=False, tax_ns_per_byte=round(1e9 * each / piece, 4), blocking=True
    )


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _speed(write: Move, read: Move, size_bytes: int, repeats: int) -> Speed:
    first, _ = _beside_compute([lambda: write(CHUNK)])
    size = max(CHUNK, min(size_bytes, int(CHUNK / first * _SECONDS_EACH_WAY / repeats) // PAGE * PAGE))
    outs = [_beside_compute([lambda: write(size)]) for _ in range(repeats)]
    ins = [_beside_compute([lambda: read(size)]) for _ in range(repeats)]
    both = statistics.median(_beside_compute([lambda: write(size), lambda: read(size)])[0] for _ in range(repeats))
    latency = sorted(_beside_compute([lambda: read(PAGE)])[0] for _ in range(_LATENCY_RUNS))[_LATENCY_RUNS // 4]
    out_s, in_s = (statistics.median(seconds for seconds, _ in runs) for runs in (outs, ins))
    tax = statistics.median(lost for _, lost in (*outs, *ins)) / size
    return Speed(size / out_s, size / in_s, round(latency * 1e9), both < _SHARED_PENALTY * max(out_s, in_s), round(1e9 * tax, 4))


def _beside_compute(moves: list[Callable[[], None]]) -> tuple[float, float]:
    """Seconds until all moves, each in a thread of its own, are done while this thread computes, and how many of them compute lost."""
    finished: list[float] = []
    failed: list[OSError] = []

    def run(move: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            move()
        except OSError as error:
            failed.append(error)
        finished.append(time.perf_counter() - started)

    threads = [threading.Thread(target=run, args=(move,)) for move in moves]
    matrix, vector = torch.ones(_WIDTH, _WIDTH), torch.ones(_LENGTH)

    def compute(go_on: Callable[[float], bool]) -> tuple[int, float]:
        count, started = 0, time.perf_counter()
        while go_on(time.perf_counter() - started):
            torch.mm(matrix, matrix)
            vector.mul_(1.0)
            count += 1
        return count, time.perf_counter() - started

    before, before_s = compute(lambda passed: passed < _UNDISTURBED_S)
    for thread in threads:
        thread.start()
    count, passed = compute(lambda passed: any(thread.is_alive() for thread in threads))
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    after, after_s = compute(lambda passed: passed < _UNDISTURBED_S)
    return max(finished), max(0.0, passed - count * (before_s + after_s) / (before + after))


def _fresh_pages(size_bytes: int) -> memoryview:
    """New memory from torch's allocator that starts on a page."""
    raw = torch.empty(size_bytes + PAGE, dtype=torch.uint8).numpy()
    head = -raw.ctypes.data % PAGE
    return raw[head : head + size_bytes].data


@contextlib.contextmanager
def _scratch(directory: str, size_bytes: int) -> Iterator[tuple[int, bool]]:
    """An unlinked file of that size, and whether it bypasses the page cache."""
    descriptor, direct = _open_unlinked(directory)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        yield descriptor, direct
    finally:
        os.close(descriptor)


def _open_unlinked(directory: str) -> tuple[int, bool]:
    for extra in (os.O_DIRECT, 0):
        try:
            return os.open(directory, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE | extra, 0o600), bool(extra)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    descriptor, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return descriptor, False


def _checked(count: int) -> None:
    if count <= 0:
        raise OSError(errno.EIO, "short read or write")
