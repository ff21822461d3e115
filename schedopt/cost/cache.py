"""Measured costs on disk, one file per device, torch version and thread count."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch

from schedopt.cost.host import cpu_name

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SCHEDOPT_CACHE"
CACHE_VERSION = 2


@dataclass(frozen=True, slots=True)
class OpCost:
    """Time of one op, and the bytes it takes beyond what it creates while it runs."""

    time_ns: int
    workspace_bytes: int


def cache_directory() -> Path:
    """Where measurements are kept: $SCHEDOPT_CACHE, or the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("schedopt"))


def measuring_context() -> dict[str, Any]:
    """All that a measured cost depends on besides the op itself."""
    return {"version": CACHE_VERSION, "device": cpu_name(), "torch": torch.__version__, "threads": torch.get_num_threads()}


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or leave the old one; readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class CostCache:
    """Costs by op signature for one measuring context. What is on disk but can not be read counts as empty and is written anew."""

    def __init__(self, directory: Path | None = None, context: dict[str, Any] | None = None) -> None:
        self.context = measuring_context() if context is None else context
        digest = hashlib.sha256(json.dumps(self.context, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (cache_directory() if directory is None else directory) / f"costs-{digest}.json"
        self._costs = self._load()

    def __repr__(self) -> str:
        return f"CostCache({self.path.name}, {len(self._costs)} ops)"

    def __len__(self) -> int:
        return len(self._costs)

    def get(self, key: str) -> OpCost | None:
        """The cost kept under `key`, if any."""
        return self._costs.get(key)

    def put(self, key: str, cost: OpCost) -> None:
        """Keep a cost (on disk after `save`)."""
        self._costs[key] = cost

    def save(self) -> None:
        """Write to disk together with what others have written meanwhile. A disk that refuses is logged, not raised."""
        self._costs = self._load() | self._costs
        costs = {key: [cost.time_ns, cost.workspace_bytes] for key, cost in sorted(self._costs.items())}
        try:
            write_atomically(self.path, json.dumps({"context": self.context, "costs": costs}))
        except OSError as error:
            logger.warning("measured costs could not be kept in %s: %s", self.path, error)

    def _load(self) -> dict[str, OpCost]:
        try:
            data = json.loads(self.path.read_bytes())
            if data["context"] != self.context:
                return {}
            return {str(key): _cost(*value) for key, value in data["costs"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("the cost cache %s can not be read and is started anew: %r", self.path, error)
            return {}


def _cost(time_ns: Any, workspace_bytes: Any) -> OpCost:
    if not (isinstance(time_ns, int) and isinstance(workspace_bytes, int) and time_ns >= 0 and workspace_bytes >= 0):
        raise ValueError(f"not a cost: {time_ns!r}, {workspace_bytes!r}")
    return OpCost(time_ns, workspace_bytes)
