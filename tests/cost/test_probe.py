"""The probe runs, is kept, and survives damage."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from schedopt.cost import cached_probe, probe, this_machine
from schedopt.cost.cache import CACHE_VARIABLE
from schedopt.cost.disk import file_speed
from schedopt.cost.host import cpu_name, memory_limit_bytes
from schedopt.cost.presets import load_machine, machine_from_json, machine_to_json, save_machine
from schedopt.errors import TargetError
from schedopt.machine import Machine

PROBE = sys.modules["schedopt.cost.probe"]  # the package exports the function under the module's name


@pytest.fixture(scope="module")
def machine() -> Machine:
    return probe(quick=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Path:
    """An empty cache, and a probe that costs nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(PROBE, "probe", lambda progress=None: machine)
    return tmp_path


def test_probe_fills_everything(machine: Machine) -> None:
    device = machine.device("cpu")
    assert machine.source == "probe"
    assert cpu_name() in machine.name
    assert device.kind == "cpu"
    assert 0 < device.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert {name for name, rate in device.flops_per_s if rate > 0} == {"float32", "bfloat16"}
    assert device.memory_bytes_per_s > 0
    assert device.launch_ns > 0
    for tier in ("file", "ram"):
        link = machine.link("cpu", tier)
        assert link.out_bytes_per_s > 0
        assert link.in_bytes_per_s > 0
        assert link.latency_ns > 0
        assert link.tax_ns_per_byte >= 0
        assert machine.tier(tier).capacity_bytes > 0
    assert machine_from_json(machine_to_json(machine)) == machine


def test_progress_counts_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    probe(lambda done, total: seen.append((done, total)), quick=True)
    assert seen == [(i, 6) for i in range(1, 7)]


def test_probe_is_kept(cache: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_probe() == machine
    monkeypatch.setattr(PROBE, "probe", None)
    assert cached_probe() == machine
    assert this_machine("file") == machine


@pytest.mark.parametrize("text", ["", "{}", '{"name": 1}'])
def test_damaged_probe_is_made_anew(text: str, cache: Path, machine: Machine) -> None:
    cached_probe()
    (path,) = cache.glob("machine-*.json")
    path.write_text(text)
    assert cached_probe() == machine
    assert machine_from_json(path.read_text()) == machine


def test_unknown_tier(cache: Path) -> None:
    with pytest.raises(TargetError, match="file, ram"):
        this_machine("tape")


def test_probed_machine_loads_from_its_file(tmp_path: Path, machine: Machine) -> None:
    save_machine(machine, tmp_path / "here.json")
    assert load_machine(tmp_path / "here.json") == machine


def test_no_file_stays_behind(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    speed = file_speed(1 << 22, 1, str(tmp_path))
    assert speed.out_bytes_per_s > 0
    assert not list(tmp_path.iterdir())
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY | os.O_CREAT)  # refused, as direct I/O is by some file systems
    assert file_speed(1 << 22, 1, str(tmp_path)).in_bytes_per_s > 0
    assert not list(tmp_path.iterdir())


def test_memory_limit_is_that_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedopt.cost.host._group_limits", lambda: [1 << 62, 1 << 30])
    assert memory_limit_bytes() == 1 << 30
