"""Devices, lower tiers and the links between them, as plain data with units in the names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Device:
    """A place where ops run. `flops_per_s` lists (dtype, reachable floating point operations per second)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    kind: str  # "cpu" or "cuda"
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]
    launch_ns: int


@dataclass(frozen=True, slots=True)
class Tier:
    """A lower tier: "file" (local disk), "ram" (a second memory region), "pinned" (page-locked host memory)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """The way between one device and one tier, as fast as it is while the device computes.

    `duplex`: both directions run at these speeds at the same time. `tax_ns_per_byte`: compute time that every copied byte costs, because
    copies take memory bandwidth and, on a CPU, cores from the ops that run meanwhile. `blocking`: the device makes its copies itself,
    between ops, and nothing else meanwhile; the tax is then all of the copy's time.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    device: str
    tier: str
    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_ns: int
    duplex: bool = True
    tax_ns_per_byte: float = 0.0
    blocking: bool = False

    def out_ns(self, size_bytes: int) -> int:
        """Nanoseconds to copy `size_bytes` from the device to the tier."""
        return self.tax_ns(size_bytes) if self.blocking else self.latency_ns + round(size_bytes * 1e9 / self.out_bytes_per_s)

    def in_ns(self, size_bytes: int) -> int:
        """Nanoseconds to copy `size_bytes` from the tier to the device."""
        return self.tax_ns(size_bytes) if self.blocking else self.latency_ns + round(size_bytes * 1e9 / self.in_bytes_per_s)

    def tax_ns(self, size_bytes: int) -> int:
        """Nanoseconds that ops lose to a copy of `size_bytes` in either direction."""
        return round(size_bytes * self.tax_ns_per_byte) + (self.latency_ns if self.blocking else 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is made for."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    devices: tuple[Device, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    source: str  # "probe" (measured) or "preset" (from data sheets)

    def __repr__(self) -> str:
        return f"Machine({self.name!r}, {len(self.devices)} device(s), tiers {[t.name for t in self.tiers]}, {self.source})"

    def device(self, name: str) -> Device:
        """The device called `name`; KeyError if there is none."""
        return {d.name: d for d in self.devices}[name]

    def tier(self, name: str) -> Tier:
        """The tier called `name`; KeyError if there is none."""
        return {t.name: t for t in self.tiers}[name]

    def throttled(self, bytes_per_s: float | None) -> Machine:
        """The machine with no link faster than that, each a thread's work again; None: as it is."""
        if bytes_per_s is None:
            return self
        links = (
            replace(
                x, out_bytes_per_s=min(x.out_bytes_per_s, bytes_per_s), in_bytes_per_s=min(x.in_bytes_per_s, bytes_per_s), blocking=False
            )
            for x in self.links
        )
        return replace(self, links=tuple(links))

    def link(self, device: str, tier: str) -> Link:
        """The link between a device and a tier; KeyError if there is none."""
        return {(x.device, x.tier): x for x in self.links}[device, tier]
