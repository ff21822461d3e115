"""A machine for tests: its figures are fixed, so that no test measures anything."""

from __future__ import annotations

from schedopt.machine import Device, Link, Machine, Tier

TEST_MACHINE = Machine(
    "test machine",
    (Device("cpu", "cpu", 8 << 30, 1e10, (("float32", 5e10), ("bfloat16", 5e10)), 2_000),),
    (Tier("file", 4 << 30), Tier("ram", 4 << 30)),
    (Link("cpu", "file", 2e9, 2e9, 50_000), Link("cpu", "ram", 5e9, 5e9, 5_000)),
    "test",
)
