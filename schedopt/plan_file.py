"""A plan on disk: versioned JSON that carries graph, machine and constraints too, so that reading it needs neither model nor torch.

Loading is strict: an unknown field, a wrong type or an id that names nothing is refused, with the path of the field.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from schedopt.constraints import Constraints
from schedopt.errors import PlanFileError
from schedopt.graph import Graph, Storage
from schedopt.machine import Machine
from schedopt.plan import PLAN_VERSION, Plan

FORMAT = "schedopt-plan"
SCHEMA_PATH = Path(__file__).parent / "schemas" / f"plan-{PLAN_VERSION}.schema.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """All that a plan file holds."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    format: Literal["schedopt-plan"] = "schedopt-plan"
    version: Literal[1] = 1
    plan: Plan
    graph: Graph
    machine: Machine
    constraints: Constraints

    def __repr__(self) -> str:
        return f"PlanFile({self.plan!r}, {self.graph!r}, {self.machine!r})"


_ADAPTER = TypeAdapter(PlanFile)


def dump_plan(file: PlanFile) -> bytes:
    """The JSON text of a plan file. PlanFileError if it would not load again as it is (a NaN, an id that names nothing)."""
    data = _ADAPTER.dump_json(file)
    if parse_plan(data, "the plan to be saved") != file:
        raise PlanFileError("the plan can not be saved: a number in it (NaN or infinite) has no form in JSON")
    return data


def save_plan(file: PlanFile, path: str | os.PathLike[str]) -> None:
    """Write a plan file at once or not at all: a reader sees the old file or the whole new one. PlanFileError if it can not be written."""
    data, target = dump_plan(file), Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PlanFileError(f"{target}: can not be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise PlanFileError(f"{target}: can not be written: {error.strerror}") from error
        raise


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Read a plan file. PlanFileError names the file, the field and what is wrong with it."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanFileError(f"{path}: can not be read: {error.strerror}") from error
    return parse_plan(data, str(path))


def parse_plan(data: bytes, source: str) -> PlanFile:
    """Parse the text of a plan file; `source` names it in errors (PlanFileError)."""
    try:
        top = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{source}: not a JSON file: {error}") from error
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise PlanFileError(f'{source}: not a plan file: its field "format" is not "{FORMAT}"')
    version = top.get("version")
    if isinstance(version, int) and version > PLAN_VERSION:
        raise PlanFileError(f"{source}: written by a newer schedopt (format version {version}; this one reads up to {PLAN_VERSION})")
    try:
        file = _ADAPTER.validate_json(data, strict=True)
    except ValidationError as error:
        raise PlanFileError(f"{source}: {_explain(error)}") from error
    for problem in _incoherences(file):
        raise PlanFileError(f"{source}: {problem}")
    return file


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan file, generated from the types; published as `schedopt/schemas/plan-1.schema.json`."""
    schema = _ADAPTER.json_schema()
    schema["required"] = sorted({*schema["required"], "format", "version"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"schedopt plan file, version {PLAN_VERSION}"} | {
        key: value for key, value in schema.items() if key != "title"
    }


def schema_text() -> str:
    """`plan_schema` as the text that is published."""
    return json.dumps(plan_schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _explain(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False)
    field = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{field}: {first['msg']}" + (f" (and {len(others)} more)" if others else "")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_part(graph: Graph, part: Storage) -> bool:
    if part.parent is None or not 0 <= part.parent < len(graph.storages):
        return False
    parent = graph.storages[part.parent]
    inside = part.start_bytes >= 0 and part.start_bytes + part.size_bytes <= parent.size_bytes
    return inside and parent.parent is None and parent.kind is part.kind and parent.persistent


def _incoherences(file: PlanFile) -> Iterator[str]:
    """What the types can not say: ids that name nothing, negative bytes and times, links between unknown ends."""
    graph = file.graph
    storages, ops = range(len(graph.storages)), range(len(graph.ops))
    created: set[int] = {s.id for s in graph.storages if s.external}
    for i, storage in enumerate(graph.storages):
        if storage.id != i or storage.size_bytes < 0:
            yield f"graph.storages.{i}: its id must be {i} and its size not negative"
        if storage.parent is not None and not _is_part(graph, storage):
            yield f"graph.storages.{i}: must be a part of a storage that outlives the step and is no part itself"
    for i, op in enumerate(graph.ops):
        touched = (*op.reads, *op.writes, *op.creates)
        if op.id != i or op.time_ns < 0 or op.workspace_bytes < 0:
            yield f"graph.ops.{i}: its id must be {i}, time and workspace not negative"
        if any(s not in storages for s in touched) or len(set(touched)) != len(touched):
            yield f"graph.ops.{i}: reads, writes and creates must name storages of the graph, each once"
        if created & set(op.creates):
            yield f"graph.ops.{i}.creates: a storage is created twice, or existed before the step"
        created |= set(op.creates)
    if len(created) != len(storages) or any(s not in storages for s in graph.outputs):
        yield "graph: every storage must be external or created by an op, and outputs must name storages"
    for i, decision in enumerate(file.plan.decisions):
        known = decision.storage in storages and all(x == -1 or x in ops for x in (decision.after_op, decision.before_op))
        if not known:
            yield f"plan.decisions.{i}: names no storage or op of the graph"
    devices, tiers = {d.name for d in file.machine.devices}, {t.name for t in file.machine.tiers}
    for i, link in enumerate(file.machine.links):
        slow = min(link.out_bytes_per_s, link.in_bytes_per_s) <= 0 or min(link.latency_ns, link.tax_ns_per_byte) < 0
        if link.device not in devices or link.tier not in tiers or slow:
            yield f"machine.links.{i}: must join a device and a tier of the machine, at positive speeds, latency and tax not negative"
