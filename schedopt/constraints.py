"""What the user demands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

STRATEGIES = ("auto", "window", "recompute", "swap")
TIERS = ("file", "ram")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}": 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*$", re.IGNORECASE)
_SHARE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*$")


@dataclass(frozen=True, slots=True)
class Constraints:
    """Demands on a plan.

    memory: bytes per device as an int, "6GiB", "500MB", or "30%" (of the eager step's own peak); None: no limit.
    strategy: "auto", "window", "recompute" or "swap".   tier: where swapped bytes go, "file" or "ram".
    time_limit_s: seconds for the solver.   undo: keep what is needed to roll a failed step back.
    tier_bytes: largest use of the lower tier (None: what the machine has).   throttle_bytes_per_s: slow the link down to stand for another.
    allow_inexact: accept a graph that is known to round differently from eager.   seed: of the solvers.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    memory: int | str | None = None
    strategy: str = "auto"
    tier: str = "file"
    time_limit_s: float = 20.0
    undo: bool = True
    tier_bytes: int | None = None
    throttle_bytes_per_s: float | None = None
    allow_inexact: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
        if self.tier not in TIERS:
            raise ValueError(f"tier {self.tier!r} is not known; use one of {', '.join(TIERS)}")
        if self.time_limit_s <= 0:
            raise ValueError(f"time_limit_s must be positive, not {self.time_limit_s}")
        if self.throttle_bytes_per_s is not None and self.throttle_bytes_per_s <= 0:
            raise ValueError(f"throttle_bytes_per_s must be positive, not {self.throttle_bytes_per_s}")
        if self.memory is not None:
            budget_bytes(self.memory, eager_peak_bytes=1)


def budget_bytes(memory: int | str, *, eager_peak_bytes: int) -> int:
    """Bytes meant by 2147483648, "2GiB", "500MB" or "30%" (of `eager_peak_bytes`). ValueError says what is accepted."""
    if isinstance(memory, bool) or not isinstance(memory, int | str):
        raise ValueError(f'memory must be bytes as an int, "6GiB" or "30%", not {memory!r}')
    if isinstance(memory, int):
        if memory <= 0:
            raise ValueError(f"memory must be positive, not {memory}")
        return memory
    if share := _SHARE.match(memory):
        value = float(share[1])
        if not 0 < value <= 100_000:
            raise ValueError(f"memory {memory!r}: the share must be above 0 %")
        return max(1, int(eager_peak_bytes * value / 100))
    if (size := _SIZE.match(memory)) and size[2].lower() in _UNITS and float(size[1]) > 0:
        return int(float(size[1]) * _UNITS[size[2].lower()])
    raise ValueError(f'memory {memory!r} is not understood; use bytes, a size such as "6GiB" or "500MB", or a share such as "30%"')
