"""Machines by name (data/machines.json) or from a file, and back into a file.

The presets hold what a training step can reach, not the peak: 70 % of the dense flops of the data sheet, 85 % of its memory bandwidth,
80 % of the nominal PCIe rate each way, the memory that torch reports as total. The data sheet is quoted beside each one. Host memory and
disk are those of a usual host of that card (pinned memory, one NVMe disk) and belong adjusted in a file: `schedopt machine show NAME`.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from schedopt.errors import TargetError
from schedopt.machine import Link, Machine


@dataclass(frozen=True, slots=True)
class Preset:
    """A machine with the data sheet that its figures come from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    data_sheet: str
    machine: Machine


_PRESETS: TypeAdapter[dict[str, Preset]] = TypeAdapter(dict[str, Preset])
_MACHINE: TypeAdapter[Machine] = TypeAdapter(Machine)


@functools.cache
def presets() -> dict[str, Preset]:
    """All presets by name."""
    text = resources.files("schedopt").joinpath("data/machines.json").read_bytes()
    return _PRESETS.validate_json(text, strict=True)


def machine_names() -> tuple[str, ...]:
    """Names that `load_machine` knows."""
    return tuple(presets())


def load_machine(name_or_path: str | Path) -> Machine:
    """The preset of that name, or the machine in that JSON file. TargetError for an unknown name (with the nearest ones) or a bad file."""
    name = str(name_or_path)
    if (preset := presets().get(name.lower())) is not None:
        return preset.machine
    path = Path(name_or_path)
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), machine_names(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(machine_names())}."
        raise TargetError(f"no machine and no file is called {name!r}; {hint} A path to a JSON file is accepted as well.")
    try:
        return machine_from_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise TargetError(f"{path} is no machine: {where}: {first['msg']}") from error


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write a machine as JSON, for `load_machine`."""
    Path(path).write_text(machine_to_json(machine) + "\n")


def machine_to_json(machine: Machine) -> str:
    """JSON text of a machine."""
    return _MACHINE.dump_json(machine, indent=1).decode()


def machine_from_json(text: str) -> Machine:
    """Inverse of `machine_to_json`; pydantic.ValidationError for anything else, unknown fields included."""
    return _MACHINE.validate_json(text, strict=True)


def link_for(machine: Machine, tier: str, device: str | None = None) -> Link:
    """The link from a device (None: the first) to the tier that `Constraints.tier` means on this machine: "ram" is pinned memory on CUDA.

    TargetError if the machine has no such tier.
    """
    one = machine.devices[0] if device is None else machine.device(device)
    name = "pinned" if one.kind == "cuda" and tier == "ram" else tier
    for link in machine.links:
        if (link.device, link.tier) == (one.name, name):
            return link
    have = ", ".join(x.tier for x in machine.links if x.device == one.name) or "none"
    raise TargetError(f"machine {machine.name} has no tier {tier!r} below {one.name}; it has {have}")
