"""What this host is: CPU model, memory that this process may use."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

_UNLIMITED = 1 << 60


@functools.cache
def cpu_name() -> str:
    """Model name of the CPU, such as "AMD EPYC 9B45"."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_limit_bytes() -> int:
    """The memory of this host, or less if a control group (version 1 or 2, at any level above this process) allows less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit in _group_limits() if 0 < limit < _UNLIMITED)])


def _group_limits() -> list[int]:
    root = Path("/sys/fs/cgroup")
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        if controllers and "memory" not in controllers.split(","):
            continue
        place = base / path.lstrip("/")
        files += [folder / name for folder in (place, *place.parents) if folder.is_relative_to(base)]
    limits = [line for file in files for line in _lines(file)]
    return [int(limit) for limit in limits if limit.isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]
    except OSError:
        return []
