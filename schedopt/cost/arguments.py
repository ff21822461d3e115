"""Real tensors for a captured call: exact geometry, harmless values, aliases kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_PATTERN = 1 << 16
_FIRST_STEP = 10.0


def real_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for calling `node.target` outside its graph.

    Every tensor has the shape, strides, offset and dtype of the captured one; arguments that share a storage share one here. Values:
    floats uniform in [0.1, 1) (no denormals, fit for log, sqrt and as a variance), a single float 10 (a step counter), integers 0 (a valid
    index everywhere), booleans true.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def real(fake: torch.Tensor) -> torch.Tensor:
        key = fake.untyped_storage()._cdata
        if key not in storages:
            storages[key] = _filled(fake.untyped_storage().nbytes(), fake.dtype)
        return torch.empty(0, dtype=fake.dtype).set_(storages[key], fake.storage_offset(), fake.shape, fake.stride())

    def argument(one: fx.Node) -> Any:
        value = one.meta["val"]
        if isinstance(value, tuple | list):
            return type(value)(real(v) if isinstance(v, torch.Tensor) else v for v in value)
        return real(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
    return tuple(args), dict(kwargs)


def _filled(size_bytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
    raw = torch.empty(size_bytes, dtype=torch.uint8)
    count = size_bytes // dtype.itemsize
    flat = raw[: count * dtype.itemsize].view(dtype)
    if count == 0:
        return raw.untyped_storage()
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
        raw.fill_(1 if dtype is torch.bool else 0)
    elif count == 1:
        flat.fill_(_FIRST_STEP)
    else:
        pattern = torch.empty(min(count, _PATTERN), dtype=torch.float32).uniform_(0.1, 1.0).to(dtype)
        whole = count // len(pattern) * len(pattern)
        flat[:whole].view(-1, len(pattern)).copy_(pattern)
        flat[whole:].copy_(pattern[: count - whole])
    return raw.untyped_storage()
