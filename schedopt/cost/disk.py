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
_LATENCY_RUNS = 8

Move = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Speed:
    """Reachable rates of a tier: bytes per second each way alone, whether both ways run at once at that rate, and the compute time that a
    copied byte costs."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_ns: int
    duplex: bool
    tax_ns_per_byte: float


def file_speed(size_bytes: int, repeats: int, directory: str | None = None) -> Speed:
    """Rates of an unlinked file in `directory` (default: the temporary directory) with direct I/O in chunks of 4 MiB.

    Reads and writes go over `size_bytes` at most, less on a slow disk. Where direct I/O is refused, the page cache is flushed and dropped.
    """
    half = -(-size_bytes // CHUNK) * CHUNK
    with _scratch(directory or tempfile.gettempdir(), 2 * half) as (descriptor, direct):
        buffers = [mmap.mmap(-1, CHUNK) for _ in range(2)]
        for buffer in buffers:
            buffer.write(os.urandom(PAGE) * (CHUNK // PAGE))

        def write(size: int) -> None:
            for at in range(0, size, CHUNK):
                _checked(os.pwrite(descriptor, memoryview(buffers[0])[: min(CHUNK, size - at)], at))
            if not direct:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)

        def read(size: int) -> None:
            for at in range(0, size, CHUNK):
                _checked(os.preadv(descriptor, [memoryview(buffers[1])[: min(CHUNK, size - at)]], half + at))
            if not direct:
                os.posix_fadvise(descriptor, half, size, os.POSIX_FADV_DONTNEED)

        for at in range(half, 2 * half, CHUNK):  # what is read must have been written: holes cost nothing
            _checked(os.pwrite(descriptor, buffers[0], at))
        os.fdatasync(descriptor)
        return _speed(write, read, half, repeats)


def ram_speed(size_bytes: int, repeats: int) -> Speed:
    """Rates of copies to and from a second region of memory."""
    here, there = (np.full(2 * size_bytes, 1, dtype=np.uint8) for _ in range(2))

    def write(size: int) -> None:
        np.copyto(there[:size], here[:size])

    def read(size: int) -> None:
        np.copyto(here[size_bytes : size_bytes + size], there[size_bytes : size_bytes + size])

    return _speed(write, read, size_bytes, repeats)


def _speed(write: Move, read: Move, size_bytes: int, repeats: int) -> Speed:
    first = _beside_compute([lambda: write(CHUNK)])
    size = max(CHUNK, min(size_bytes, int(CHUNK / first * _seconds_each(repeats)) // PAGE * PAGE))
    alone_out = statistics.median(_beside_compute([lambda: write(size)]) for _ in range(repeats))
    alone_in = statistics.median(_beside_compute([lambda: read(size)]) for _ in range(repeats))
    both = statistics.median(_beside_compute([lambda: write(size), lambda: read(size)]) for _ in range(repeats))
    latency = sorted(_beside_compute([lambda: read(PAGE)]) for _ in range(_LATENCY_RUNS))[_LATENCY_RUNS // 4]
    duplex = both < _SHARED_PENALTY * max(alone_out, alone_in)
    tax = statistics.median(_lost_compute_s([lambda: write(size), lambda: read(size)]) for _ in range(repeats)) / (2 * size)
    return Speed(size / alone_out, size / alone_in, round(latency * 1e9), duplex, tax * 1e9)


def _lost_compute_s(moves: list[Callable[[], None]]) -> float:
    """Compute time that is lost while all moves are done: the same work is timed alone just before and just after."""
    work = _Work()
    before = work.rate()
    counted, elapsed = work.count_beside(moves)
    rate = (before + work.rate()) / 2
    return max(0.0, elapsed - counted / rate)


class _Work:
    """What a training step does in small: a matrix product and a pass over memory."""

    def __init__(self) -> None:
        self.matrix = torch.ones(256, 256)
        self.vector = torch.ones(1 << 20)

    def once(self) -> None:
        """One piece of work."""
        torch.mm(self.matrix, self.matrix)
        torch.relu(self.vector)

    def rate(self) -> float:
        """Pieces per second with nothing beside."""
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < 0.05:
            self.once()
            count += 1
        return count / (time.perf_counter() - started)

    def count_beside(self, moves: list[Callable[[], None]]) -> tuple[int, float]:
        """Pieces done and seconds gone until all moves are over."""
        threads = [threading.Thread(target=move) for move in moves]
        started, count = time.perf_counter(), 0
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.once()
            count += 1
        return count, time.perf_counter() - started


def _seconds_each(repeats: int) -> float:
    return 0.4 / repeats


def _beside_compute(moves: list[Callable[[], None]]) -> float:
    """Seconds until all moves, each in a thread of its own, are done, while this thread multiplies matrices; OSError of a move."""
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
    matrix = torch.ones(192, 192)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        torch.mm(matrix, matrix)
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(finished)


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
