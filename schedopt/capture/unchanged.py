"""Tracing runs the user's Python code once; this sees to it that nothing of that stays, and that nothing of it gets frozen unseen."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from schedopt.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Give every module its attributes back, the generators their states; CaptureError if the step had changed one that matters."""
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    plain = {name: {k: _comparable(v) for k, v in attributes.items()} for name, attributes in before.items()}
    generator, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    failed = True
    try:
        yield
        failed = False
    finally:
        torch.set_rng_state(generator)
        changed = _restore(model, before, plain)
        drew = "random" if random.getstate() != python else "numpy.random" if not _same_numpy(numpy) else ""
        random.setstate(python)
        np.random.set_state(numpy)
        if changed and not failed:
            raise CaptureError(
                f"the step changes Python state that a schedule would freeze: {changed}. Keep counters in a registered buffer (a tensor)"
            )
        if drew and not failed:
            raise CaptureError(f"the step draws numbers from Python's {drew}, which a schedule would freeze; draw with torch instead")


def _same_numpy(state: Any) -> bool:
    now: Any = np.random.get_state()
    return bool(now[0] == state[0] and np.array_equal(now[1], state[1]) and now[2] == state[2])


def _comparable(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple | set) and all(isinstance(x, _PLAIN) for x in value):
        return type(value)(value)
    if isinstance(value, dict) and all(isinstance(x, _PLAIN) for x in value.values()):
        return dict(value)
    return None


def _restore(model: torch.nn.Module, before: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> str:
    """Put attributes back; the first one of plain Python type that had changed, as text."""
    changed = ""
    for name, module in model.named_modules():
        old = before.get(name)
        if old is None:
            continue
        for key, value in list(module.__dict__.items()):
            kept = plain[name].get(key)
            known = key in old and (kept is not None or old[key] is None)
            if known and _comparable(value) != kept and not changed:
                changed = f"{type(module).__name__}.{key} of module {name or 'the model'!r} went from {kept!r} to {value!r}"
            if key not in old:
                if isinstance(value, _PLAIN) and not changed:
                    changed = f"{type(module).__name__}.{key} of module {name or 'the model'!r} appeared as {value!r}"
                del module.__dict__[key]
        module.__dict__.update({k: v for k, v in old.items() if not isinstance(v, dict)})
        for key, kept in plain[name].items():
            if isinstance(kept, list | set | dict) and isinstance(old.get(key), list | set | dict) and old[key] != kept:
                old[key].clear()
                old[key].extend(kept) if isinstance(kept, list) else old[key].update(kept)
    return changed
