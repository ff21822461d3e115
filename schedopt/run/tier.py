"""Lower tiers: where storages wait while they are away. One worker thread per direction, copies in the order of their issue."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from schedopt.errors import TierError

PAGE = 4096
CHUNK = 4 << 20
STRAIGHT = 1 << 30  # one call for a whole storage: between calls the thread would wait for the interpreter
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def storage_bytes(tensor: torch.Tensor) -> Bytes:
    """All bytes of a tensor's storage as a numpy view that keeps the storage alive.

    Not `tensor.numpy()`: that would forbid the storage ever to be resized.
    """
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return np.empty(0, dtype=np.uint8)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory._storage = storage  # type: ignore[attr-defined]  # ctypes objects take attributes: this one holds the bytes
    return np.ctypeslib.as_array(memory)


@dataclass(slots=True)
class Copy:
    """A copy under way; `wait` returns when it is done or raises TierError."""

    work: Callable[[], None] | None
    size_bytes: int
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @staticmethod
    def finished() -> Copy:
        """One that needs no work."""
        copy = Copy(None, 0)
        copy.done.set()
        return copy

    def wait(self) -> None:
        """Block until the copy is done."""
        self.done.wait()
        if self.error is not None:
            raise TierError(f"the lower tier failed: {self.error}") from self.error


class _Worker:
    """A thread that carries out copies one after the other, no faster than `bytes_per_s`."""

    def __init__(self, name: str, bytes_per_s: float | None) -> None:
        self.jobs: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self.bytes_per_s = bytes_per_s
        self.thread = threading.Thread(target=self._run, name=f"schedopt-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (copy := self.jobs.get()) is not None:
            started = time.perf_counter()
            try:
                assert copy.work is not None
                copy.work()
            except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to the one who waits; the thread must live on
                copy.error = error
            copy.work = None
            if self.bytes_per_s is not None:
                time.sleep(max(0.0, copy.size_bytes / self.bytes_per_s - (time.perf_counter() - started)))
            copy.done.set()


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.jobs.put(None)
    for worker in workers:
        if worker.thread is not threading.current_thread():
            worker.thread.join()


class Tier:
    """Slots of bytes below the device. Subclasses say how bytes get there and back."""

    def __init__(self, *, duplex: bool, throttle_bytes_per_s: float | None) -> None:
        out = _Worker("out", throttle_bytes_per_s)
        self._out, self._in = out, _Worker("in", throttle_bytes_per_s) if duplex else out
        self._workers = list(dict.fromkeys((self._out, self._in)))
        self._finalizer = weakref.finalize(self, _stop, self._workers)

    def write(self, offset: int, data: Bytes) -> Copy:
        """Queue a copy of `data` to the slot at `offset`."""
        return self._queue(self._out, lambda: self._write(offset, data), data.nbytes)

    def read(self, offset: int, data: Bytes) -> Copy:
        """Queue a copy from the slot at `offset` into `data`."""
        return self._queue(self._in, lambda: self._read(offset, data), data.nbytes)

    @staticmethod
    def _queue(worker: _Worker, work: Callable[[], None], size: int) -> Copy:
        copy = Copy(work, size)
        worker.jobs.put(copy)
        return copy

    def drain(self) -> None:
        """Wait until no copy is queued or under way, whatever became of them."""
        for worker in self._workers:
            self._queue(worker, lambda: None, 0).done.wait()

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        self._finalizer()

    def _write(self, offset: int, data: Bytes) -> None:
        raise NotImplementedError

    def _read(self, offset: int, data: Bytes) -> None:
        raise NotImplementedError

    def mapped(self, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A storage that lives in the slot itself: readable and writable at any time without device memory."""
        raise NotImplementedError

    def settle(self, offset: int, size_bytes: int) -> None:
        """Drop what a look through `mapped` has left in memory."""


class RamTier(Tier):
    """A second region of memory. `blocking`: copies are made at once by the calling thread and torch's others, not by a worker."""

    def __init__(self, size_bytes: int, *, duplex: bool = True, throttle_bytes_per_s: float | None = None, blocking: bool = False) -> None:
        self._bytes: Bytes = np.frombuffer(mmap.mmap(-1, max(PAGE, size_bytes)), dtype=np.uint8)
        self._blocking = blocking
        super().__init__(duplex=duplex, throttle_bytes_per_s=throttle_bytes_per_s)

    def write(self, offset: int, data: Bytes) -> Copy:
        """See Tier."""
        if not self._blocking:
            return super().write(offset, data)
        _copy_bytes(self._bytes[offset : offset + data.nbytes], data)
        return Copy.finished()

    def read(self, offset: int, data: Bytes) -> Copy:
        """See Tier."""
        if not self._blocking:
            return super().read(offset, data)
        _copy_bytes(data, self._bytes[offset : offset + data.nbytes])
        return Copy.finished()

    def _write(self, offset: int, data: Bytes) -> None:
        np.copyto(self._bytes[offset : offset + data.nbytes], data)

    def _read(self, offset: int, data: Bytes) -> None:
        np.copyto(data, self._bytes[offset : offset + data.nbytes])

    def mapped(self, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """See Tier."""
        return _own_storage(self._bytes[offset : offset + size_bytes])


def _copy_bytes(target: Bytes, source: Bytes) -> None:
    """By all of torch's threads."""
    if source.nbytes:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


class FileTier(Tier):
    """An unlinked file: nothing stays behind however the process ends. Page cache is bypassed (O_DIRECT) or dropped at once.

    O_DIRECT wants pages; tensors do not start on one. So the bytes of a slot start as far into its first page as the tensor starts into
    a page of memory: all but its first and last page then go without a copy in between. Slots in `flat` start at their first byte, since
    they are also read and written in parts (each of whole pages).
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        directory: str | None = None,
        duplex: bool = True,
        throttle_bytes_per_s: float | None = None,
        flat: frozenset[int] = frozenset(),
    ) -> None:
        self._flat = flat
        self._size = max(PAGE, -(-size_bytes // PAGE) * PAGE)
        folder = directory or tempfile.gettempdir()
        try:
            self._fd, self._direct = _open_unlinked(folder)
            os.posix_fallocate(self._fd, 0, self._size)
        except OSError as error:
            with contextlib.suppress(AttributeError, OSError):
                os.close(self._fd)
            hint = "give another directory or use tier='ram'" if error.errno == errno.ENOSPC else "check the directory"
            raise TierError(f"no room for {self._size} bytes of swapped tensors in {folder}: {error.strerror}; {hint}") from error
        self._map: mmap.mmap | None = mmap.mmap(self._fd, self._size)
        self._heads = dict.fromkeys(flat, PAGE)  # slot -> bytes of the storage that lie in the slot's first page
        self._bounce = {way: np.frombuffer(mmap.mmap(-1, CHUNK), dtype=np.uint8) for way in ("out", "in")}
        super().__init__(duplex=duplex, throttle_bytes_per_s=throttle_bytes_per_s)
        self._close_file = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        """See Tier. Tensors that are still mapped keep their slot in the file, nothing else does."""
        super().close()
        self._close_file()
        self._map = None

    def _write(self, offset: int, data: Bytes) -> None:
        if offset in self._flat:
            self._move_flat("out", offset, data)
            return
        head = self._heads[offset] = _head(data)
        start = offset + PAGE - head
        if head:
            self._bounced("out", start - (PAGE - head), data[:head], lead=PAGE - head)
        middle = (data.nbytes - head) // PAGE * PAGE if self._straight(data) else 0
        for at in range(head, head + middle, STRAIGHT):
            _whole(lambda view, to: os.pwrite(self._fd, view, to), data[at : min(at + STRAIGHT, head + middle)], start + at)
        for at in range(head + middle, data.nbytes, CHUNK):
            self._bounced("out", start + at, data[at : at + CHUNK])
        self._forget(offset, data.nbytes)

    def _read(self, offset: int, data: Bytes) -> None:
        if offset in self._flat:
            self._move_flat("in", offset, data)
            return
        head = self._heads[offset]
        start = offset + PAGE - head
        if head:
            self._bounced("in", start - (PAGE - head), data[:head], lead=PAGE - head)
        middle = (data.nbytes - head) // PAGE * PAGE if self._straight(data) and head == _head(data) else 0
        for at in range(head, head + middle, STRAIGHT):
            _whole(lambda view, to: os.preadv(self._fd, [view], to), data[at : min(at + STRAIGHT, head + middle)], start + at)
        for at in range(head + middle, data.nbytes, CHUNK):
            self._bounced("in", start + at, data[at : at + CHUNK])
        self._forget(offset, data.nbytes)

    def _move_flat(self, way: str, offset: int, data: Bytes) -> None:
        for at in range(0, data.nbytes, CHUNK):
            self._bounced(way, offset + at, data[at : at + CHUNK])
        self._forget(offset, data.nbytes)

    @staticmethod
    def _straight(data: Bytes) -> bool:
        """Large enough to go without a copy in between."""
        return data.nbytes >= CHUNK

    def _bounced(self, way: str, block: int, part: Bytes, lead: int = 0) -> None:
        """Through an aligned buffer: `part` lies `lead` bytes after the start of the file's block."""
        if not part.nbytes:
            return
        bounce = self._bounce[way]
        padded = -(-(lead + part.nbytes) // PAGE) * PAGE
        if way == "out":
            np.copyto(bounce[lead : lead + part.nbytes], part)
            _whole(lambda view, at: os.pwrite(self._fd, view, at), bounce[:padded], block)
        else:
            _whole(lambda view, at: os.preadv(self._fd, [view], at), bounce[:padded], block)
            np.copyto(part, bounce[lead : lead + part.nbytes])

    def _forget(self, offset: int, size_bytes: int) -> None:
        if not self._direct:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, offset, PAGE + size_bytes, os.POSIX_FADV_DONTNEED)

    def mapped(self, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """See Tier."""
        start = offset + PAGE - self._heads[offset]
        assert self._map is not None
        view: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=size_bytes, offset=start)
        return _own_storage(view)

    def settle(self, offset: int, size_bytes: int) -> None:
        """See Tier."""
        padded = -(-size_bytes // PAGE) * PAGE + PAGE
        assert self._map is not None
        self._map.madvise(mmap.MADV_DONTNEED, offset, padded)
        os.posix_fadvise(self._fd, offset, padded, os.POSIX_FADV_DONTNEED)


def _head(data: Bytes) -> int:
    """Bytes before the first page boundary in memory; 0 for small data, which is copied through a buffer anyway."""
    return -data.ctypes.data % PAGE if data.nbytes >= CHUNK else 0


def _own_storage(view: Bytes) -> torch.UntypedStorage:
    return torch.from_numpy(view).untyped_storage()


def _open_unlinked(folder: str) -> tuple[int, bool]:
    """A file without a name, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for extra in (os.O_DIRECT, 0):
        try:
            return os.open(folder, flags | os.O_TMPFILE | extra, 0o600), bool(extra)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return descriptor, False


def _whole(call: Callable[[memoryview, int], int], data: Bytes, offset: int) -> None:
    """Repeat a read or write until all bytes are through."""
    view, done = data.data, 0
    while done < len(view):
        count = call(view[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "short read or write")
        done += count
