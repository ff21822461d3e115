"""Plan files come back as they were, and what is not understood is refused by name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedopt.check import check
from schedopt.constraints import STRATEGIES, Constraints
from schedopt.errors import PlanFileError
from schedopt.graph import Graph, Op, Phase, Recompute, Storage, StorageKind
from schedopt.machine import Device, Link, Machine, Tier
from schedopt.plan import Action, ActionKind, Decision, Fate, Plan, Schedule
from schedopt.plan_file import SCHEMA_PATH, PlanFile, dump_plan, load_plan, parse_plan, save_plan, schema_text
from tests.sample_plan import sample

text = st.text(max_size=8)
count = st.integers(0, 2**62)
real = st.floats(1e-9, 1e18, allow_nan=False)


@st.composite
def files(draw: st.DrawFn) -> PlanFile:
    """Plan files that are coherent (their plans need not be right)."""
    size = draw(st.integers(1, 5))
    ids = st.integers(0, size - 1)
    kinds = [StorageKind.INPUT] + [draw(st.sampled_from([StorageKind.PARAMETER, StorageKind.BUFFER])) for _ in range(size - 1)]
    storages = [Storage(i, draw(text), kind, draw(count), draw(text)) for i, kind in enumerate(kinds)]
    ops = []
    for i in range(draw(st.integers(1, 4))):
        created = len(storages)
        storages.append(Storage(created, draw(text), StorageKind.ACTIVATION, draw(count)))
        reads = tuple(draw(st.sets(ids)))
        how = {"recompute": draw(st.sampled_from(Recompute)), "reason": draw(text), "signature": draw(text), "source": draw(text)}
        ops.append(
            Op(i, draw(text), draw(text), draw(st.sampled_from(Phase)), draw(text), reads, (), (created,), time_ns=draw(count), **how)
        )
    graph = Graph(draw(text), tuple(ops), tuple(storages), tuple(draw(st.sets(ids))), draw(count), draw(st.booleans()), (draw(text),))
    device = Device("d", "cpu", draw(count), draw(real), (("float32", draw(real)),), draw(count))
    machine = Machine(draw(text), (device,), (Tier("t", draw(count)),), (Link("d", "t", draw(real), draw(real), draw(count)),), draw(text))
    actions = st.lists(st.builds(Action, st.sampled_from(ActionKind), count), max_size=5).map(tuple)
    schedule = Schedule("d", "t", draw(count), draw(actions), tuple(draw(st.sets(ids))), tuple(draw(st.sets(ids))))
    decision = Decision(draw(ids), draw(st.sampled_from(Fate)), -1, draw(st.integers(-1, len(ops) - 1)), draw(text))
    bound = draw(st.none() | count)
    plan = Plan(graph.hash(), machine.name, draw(text), draw(text), (schedule,), (decision,), bound_ns=bound, solve_seconds=draw(real))
    memory = draw(st.none() | st.integers(1, 2**62) | st.sampled_from(["6GiB", "30%", "1.5 GB"]))
    constraints = Constraints(memory, draw(st.sampled_from(STRATEGIES)), time_limit_s=draw(real), undo=draw(st.booleans()))
    return PlanFile(plan=plan, graph=graph, machine=machine, constraints=constraints)


@settings(deadline=None)
@given(files())
def test_every_file_comes_back_as_it_was(file: PlanFile) -> None:
    assert parse_plan(dump_plan(file), "here") == file


def test_saving_and_loading_gives_a_plan_that_still_checks(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    save_plan(sample(), path)
    loaded = load_plan(path)
    assert loaded == sample()
    assert check(loaded.graph, loaded.plan, loaded.machine).ok
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o400


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(sample(), path)

    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PlanFileError, match="No space left"):
        save_plan(sample(500), path)
    assert load_plan(path) == sample()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_numbers_that_json_does_not_know_are_not_saved(tmp_path: Path) -> None:
    broken = replace(sample(), plan=replace(sample().plan, solve_seconds=float("nan")))
    with pytest.raises(PlanFileError):
        save_plan(broken, tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_published_schema_is_the_one_of_the_types() -> None:
    assert SCHEMA_PATH.read_text() == schema_text(), "run `make schema`"


def test_a_saved_plan_keeps_to_the_published_schema() -> None:
    schema = json.loads(SCHEMA_PATH.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    value = json.loads(dump_plan(sample()))
    jsonschema.validate(value, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value | {"surprise": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({key: field for key, field in value.items() if key != "version"}, schema)


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for part in path[:-1]:
            value = value[part]
        value[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("surprise", to=1), "surprise: .*(unexpected|Unexpected|not permitted)"),
        (_set("plan", "schedules", 0, "actions", 1, "colour", to="red"), r"plan\.schedules\.0\.actions\.1\.colour"),
        (_set("plan", "schedules", 0, "actions", 1, "kind", to="teleport"), r"plan\.schedules\.0\.actions\.1\.kind"),
        (_set("plan", "peak_bytes", to="many"), r"plan\.peak_bytes"),
        (_set("plan", "peak_bytes", to=1.5), r"plan\.peak_bytes"),
        (_set("plan", "undo", to=1), r"plan\.undo"),
        (_set("format", to="cake"), "not a plan file"),
        (_set("version", to=2), "newer schedopt .*version 2"),
        (_set("version", to=0), "version"),
        (_set("constraints", "strategy", to="luck"), "constraints: .*luck"),
        (_set("graph", "ops", 1, "reads", to=[99]), r"graph\.ops\.1"),
        (_set("graph", "ops", 1, "id", to=3), r"graph\.ops\.1"),
        (_set("graph", "ops", 1, "creates", to=[2]), r"graph\.ops\.1"),
        (_set("graph", "storages", 1, "size_bytes", to=-1), r"graph\.storages\.1"),
        (_set("graph", "outputs", to=[77]), "outputs"),
        (_set("plan", "decisions", 0, "storage", to=-2), r"plan\.decisions\.0"),
        (_set("machine", "links", 0, "out_bytes_per_s", to=0.0), r"machine\.links\.0"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: Callable[[Any], None], message: str) -> None:
    value = json.loads(dump_plan(sample()))
    change(value)
    with pytest.raises(PlanFileError, match=message) as caught:
        parse_plan(json.dumps(value).encode(), "some.json")
    assert str(caught.value).startswith("some.json: ")


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": "schedopt-plan"}'])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(PlanFileError, match=r"^some\.json: "):
        parse_plan(data, "some.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"gone\.json: can not be read"):
        load_plan(tmp_path / "gone.json")
