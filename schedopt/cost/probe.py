"""Measures this CPU: arithmetic, memory, the lower tiers "file" and "ram". A few seconds, kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import ValidationError

from schedopt.cost.cache import cache_directory, measuring_context, write_atomically
from schedopt.cost.disk import Speed, file_speed, ram_speed
from schedopt.cost.host import cpu_name, memory_limit_bytes
from schedopt.cost.presets import link_for, machine_from_json, machine_to_json
from schedopt.machine import Device, Link, Machine, Tier

logger = logging.getLogger(__name__)

_DISK_SHARE = 0.9
_RAM_SHARE = 0.5
_STEPS = 6

Progress = Callable[[int, int], None]


def probe(progress: Progress | None = None, *, quick: bool = False) -> Machine:
    """This CPU with its file tier (temporary directory) and RAM tier, measured now; `quick` takes less care.

    `progress(done, total)` is called after each part. Of repeated compute runs the fastest counts (others on the machine only add time), of
    repeated copies the median.
    """
    tell = progress or (lambda done, total: None)
    repeats, scale = (1, 1) if quick else (5, 8)
    bandwidth = _memory_bytes_per_s(scale << 23, repeats)
    tell(1, _STEPS)
    rates = []
    for done, dtype in enumerate((torch.float32, torch.bfloat16), start=2):
        rates.append((str(dtype).removeprefix("torch."), _matmul_flops_per_s(128 * scale, dtype, repeats)))
        tell(done, _STEPS)
    launch = _launch_ns(250 * scale)
    tell(4, _STEPS)
    disk = file_speed(scale << 24, min(3, repeats))
    tell(5, _STEPS)
    ram = ram_speed(scale << 23, min(3, repeats))
    tell(6, _STEPS)
    memory = memory_limit_bytes()
    tiers = (
        Tier("file", int(_DISK_SHARE * shutil.disk_usage(tempfile.gettempdir()).free)),
        Tier("ram", int(_RAM_SHARE * memory)),
    )
    device = Device("cpu", "cpu", memory, bandwidth, tuple(rates), launch)
    name = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return Machine(name, (device,), tiers, (_link("file", disk), _link("ram", ram)), "probe")


def cached_probe(progress: Progress | None = None, *, renew: bool = False) -> Machine:
    """The last probe of this CPU with this torch version, thread count and temporary directory, or a new one if there is none; `renew`
    makes a new one in any case."""
    path = _cache_path()
    try:
        if not renew:
            return machine_from_json(path.read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        logger.warning("the probe kept in %s can not be read and is made anew: %s", path, error)
    machine = probe(progress)
    try:
        write_atomically(path, machine_to_json(machine) + "\n")
    except OSError as error:
        logger.warning("the probe could not be kept in %s: %s", path, error)
    return machine


def this_machine(tier: str | None = None, progress: Progress | None = None) -> Machine:
    """This CPU as measured once; TargetError if it has no tier of that name."""
    machine = cached_probe(progress)
    if tier is not None:
        link_for(machine, tier)
    return machine


def _cache_path() -> Path:
    context = measuring_context() | {"directory": tempfile.gettempdir()}
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / f"machine-{digest}.json"


def _link(tier: str, speed: Speed) -> Link:
    return Link("cpu", tier, **asdict(speed))


def _fastest_s(call: Callable[[], object], repeats: int) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def _memory_bytes_per_s(size_bytes: int, repeats: int) -> float:
    """Bytes read plus bytes written per second by torch's own copy."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * size_bytes / _fastest_s(lambda: target.copy_(source), repeats)


def _matmul_flops_per_s(width: int, dtype: torch.dtype, repeats: int) -> float:
    a, b = (torch.ones(width, width, dtype=dtype) for _ in range(2))
    return 2 * width**3 / _fastest_s(lambda: torch.mm(a, b), repeats)


def _launch_ns(calls: int) -> int:
    """Time of one call on a single number."""
    number = torch.zeros(1)

    def many() -> None:
        for _ in range(calls):
            number.add_(1)

    with torch.no_grad():
        return round(_fastest_s(many, 5) / calls * 1e9)
