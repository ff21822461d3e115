"""Lower tiers: bytes come back, in order, whatever their alignment; errors surface at the wait; nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedopt.errors import TierError
from schedopt.run import tier as tiers
from schedopt.run.tier import CHUNK, PAGE, FileTier, RamTier, Tier, storage_bytes


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("schedopt")] == []


def _data(size: int, shift: int = 0, seed: int = 0) -> Any:
    """Random bytes that start `shift` bytes after a page boundary."""
    room = np.empty(size + 2 * PAGE, dtype=np.uint8)
    start = -room.ctypes.data % PAGE + shift
    view = room[start : start + size]
    view[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return view


@pytest.fixture(params=["ram", "direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    """One tier of each kind with room for three large slots."""
    if request.param == "ram":
        made: Tier = RamTier(6 * CHUNK)
    else:
        if request.param == "buffered":
            original = tiers._open_unlinked
            monkeypatch.setattr(tiers, "_open_unlinked", lambda folder: (_cached(original(folder)[0]), False))
        made = FileTier(6 * CHUNK, directory=str(tmp_path))
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def _cached(descriptor: int) -> int:
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
    return descriptor


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + PAGE + 7])
@pytest.mark.parametrize(("shift", "other"), [(0, 0), (64, 64), (64, 0), (1, 4095)])
def test_bytes_come_back_whatever_their_alignment(tier: Tier, size: int, shift: int, other: int) -> None:
    data, guard = _data(size, shift), _data(100, seed=1)
    tier.write(0, guard).wait()
    tier.write(2 * PAGE, data).wait()
    end = 2 * PAGE + -(-size // PAGE) * PAGE + PAGE
    tier.write(end, guard).wait()
    back, guard_back = _data(size, other, seed=2), _data(100, seed=3)
    tier.read(2 * PAGE, back).wait()
    assert np.array_equal(back, data)
    for offset in (0, end):
        tier.read(offset, guard_back).wait()
        assert np.array_equal(guard_back, guard)


def test_mapped_storage_is_the_slot(tier: Tier) -> None:
    data = _data(CHUNK + 100, 64)
    tier.write(PAGE, data).wait()
    storage = tier.mapped(PAGE, data.nbytes)
    view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (data.nbytes,), (1,))
    assert np.array_equal(storage_bytes(view), data)
    view[5:7] = 9  # as load_state_dict does
    tier.settle(PAGE, data.nbytes)
    back = _data(data.nbytes, 64)
    tier.read(PAGE, back).wait()
    data[5:7] = 9
    assert np.array_equal(back, data)
    assert not storage.resizable()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=20))
def test_copies_of_one_direction_keep_their_order(jobs: list[tuple[bool, int]]) -> None:
    tier = RamTier(3 * PAGE, duplex=False)
    held: dict[int, Any] = {}
    for slot in range(3):
        held[slot] = _data(PAGE, seed=slot)
        tier.write(slot * PAGE, held[slot])
    reads = []
    for number, (out, slot) in enumerate(jobs):
        if out:
            held[slot] = _data(PAGE, seed=10 + number)
            tier.write(slot * PAGE, held[slot])
        else:
            back = np.zeros(PAGE, dtype=np.uint8)
            reads.append((tier.read(slot * PAGE, back), back, held[slot]))
    for copy, back, expected in reads:
        copy.wait()
        assert np.array_equal(back, expected)
    tier.close()


def test_short_reads_and_writes_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: write(fd, view[: max(PAGE, len(view) // 2 // PAGE * PAGE)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][: max(PAGE, len(views[0]) // 2 // PAGE * PAGE)]], at))
    tier = FileTier(3 * CHUNK, directory=str(tmp_path))
    data, back = _data(CHUNK + PAGE + 9, 64), _data(CHUNK + PAGE + 9, 64, seed=1)
    tier.write(0, data).wait()
    tier.read(0, back).wait()
    assert np.array_equal(back, data)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(TierError, match="short read"):
        tier.read(0, back).wait()
    tier.close()


def test_an_error_belongs_to_its_copy_and_the_thread_lives_on() -> None:
    tier = FileTier(8 * PAGE)
    data = _data(PAGE)
    with pytest.raises(TierError):
        tier.read(0, data).wait()  # never written
    tier.write(0, data).wait()
    tier.read(0, data).wait()
    tier.drain()
    tier.close()
    tier.close()


def test_throttle_stands_for_a_link() -> None:
    tier = RamTier(4 << 20, throttle_bytes_per_s=20e6)
    data = _data(1 << 20)
    started = time.perf_counter()
    copies = [tier.write(0, data), tier.write(1 << 20, data)]
    for copy in copies:
        copy.wait()
    took = time.perf_counter() - started
    tier.close()
    assert 2 * (1 << 20) / 20e6 <= took < 1.0


def test_page_cache_is_left_alone(tmp_path: Path) -> None:
    size = 8 * CHUNK
    tier = FileTier(size + PAGE, directory=str(tmp_path))
    data = _data(size, 64)
    before = _cached_bytes()
    tier.write(0, data).wait()
    tier.read(0, data).wait()
    grown = _cached_bytes() - before
    tier.close()
    assert grown < size // 2


def _cached_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Cached"].split()[0]) * 1024


_CHILD = """
import os, signal, sys
import numpy as np
from schedopt.run.tier import FileTier
tier = FileTier(1 << 20, directory=sys.argv[1])
tier.write(0, np.ones(1 << 19, dtype=np.uint8)).wait()
print("ready", flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_file_stays_however_the_process_ends(end: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path), end], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ready\n", done.stderr
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_anonymous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return original(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    tier = FileTier(8 * PAGE, directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    data, back = _data(PAGE + 5), _data(PAGE + 5, seed=1)
    tier.write(0, data).wait()
    tier.read(0, back).wait()
    assert np.array_equal(back, data)
    tier.close()
