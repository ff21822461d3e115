"""What the exports say of a hand-made plan is what a hand counts."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from schedopt.export import text
from schedopt.export.dot import FATE_COLOUR, storage_fates, to_dot
from schedopt.export.figures import figures, replay, summary_json
from schedopt.export.perfetto import COMPUTE, COPY_IN, COPY_OUT, to_perfetto
from schedopt.export.readable import to_json
from schedopt.export.units import duration, percent, size
from schedopt.graph import Graph, Op, Phase, Storage, StorageKind
from schedopt.plan import Fate
from tests.sample_plan import A, B, W, sample


def test_sample_is_right() -> None:
    report = replay(sample())
    assert report.ok, report.violations
    assert report.peak_bytes == 214


def test_figures() -> None:
    done = figures(sample())
    assert (done.num_swapped, done.swapped_bytes) == (1, 50)
    assert (done.num_resting, done.resting_bytes) == (1, 100)
    assert (done.num_recomputed, done.recomputed_bytes, done.recompute_seconds) == (1, 40, 1e-6)
    assert (done.num_undo, done.undo_bytes, done.snapshot_bytes) == (0, 0, 0)
    assert (done.out_bytes, done.in_bytes) == (150, 250)


def test_summary_json_is_in_bytes_and_seconds() -> None:
    result = summary_json(sample())
    assert result["budget_bytes"] == 220
    assert result["predicted_peak_bytes"] == 214
    assert result["predicted_step_seconds"] == replay(sample()).step_ns / 1e9
    assert result["bound_seconds"] == 5e-6
    assert result["gap"] == pytest.approx(result["predicted_step_seconds"] / 5e-6 - 1)
    assert summary_json(replace(sample(), plan=replace(sample().plan, bound_ns=None)))["gap"] is None


def test_summary_text_names_budget_peak_and_fates() -> None:
    shown = text.summary(sample())
    for part in ("220 B", "214 B", "68.8 % of eager's peak", "1 storages", "1 ops", "100 B on the lower tier", "gap"):
        assert part in shown
    assert "\x1b" not in shown


def test_why_lists_the_largest_first() -> None:
    shown = text.as_text([text.why_table(sample(), limit=2)])
    assert "2 largest of 3" in shown
    assert shown.index("layer.weight") < shown.index("frees 50 bytes")
    assert "1 us again" not in shown


def test_timeline_shows_the_peak_and_all_phases() -> None:
    shown = text.as_text([text.timeline(sample(), replay(sample()), rows=10, width=22)])
    assert "214 B" in shown
    assert {phase.value for phase in Phase} <= set(re.findall(r"forward|backward|update", shown))
    assert max(shown.count("█", at, shown.find("\n", at)) for at in range(len(shown)) if shown[at - 1] == "\n") == 21


def test_perfetto_has_a_track_per_stream_and_slices_that_do_not_overlap() -> None:
    trace = to_perfetto(sample(), replay(sample()))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == {COMPUTE, COPY_OUT, COPY_IN}
    for track in (COMPUTE, COPY_OUT, COPY_IN):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == track)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(own))
    computing = [e for e in slices if e["tid"] == COMPUTE and not e["name"].startswith("stall")]
    assert [e["name"] for e in computing] == ["mm", "relu", "loss", "again: relu", "mm_1", "update"]
    assert sum(e["dur"] for e in computing) == pytest.approx(6.0)
    memory = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "memory"]
    assert max(memory) == 214
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["compute", "copy out to file", "copy in from file"]


def test_dot_colours_by_fate_and_groups_by_module() -> None:
    assert storage_fates(sample())[A] is Fate.SWAP
    assert storage_fates(sample())[B] is Fate.RECOMPUTE
    assert storage_fates(sample())[W] is Fate.REST
    drawn = to_dot(sample())
    assert drawn.count("{") == drawn.count("}")
    for cluster in ("cluster_layer", "cluster_block", "cluster_block.relu"):
        assert f'"{cluster}"' in drawn
    colours = dict(re.findall(r'\[label="(\w+)\\n.*?fillcolor="(#\w+)"', drawn))
    assert colours["mm"] == FATE_COLOUR[Fate.SWAP]
    assert colours["relu"] == FATE_COLOUR[Fate.RECOMPUTE]
    assert colours["update"] == FATE_COLOUR[Fate.REST]
    assert len(re.findall(r"n\d+ -> n\d+", drawn)) == 5  # mm-relu, relu-loss, mm-mm_1, relu-mm_1, mm_1-update


def test_dot_of_a_large_graph_has_one_node_per_module_and_phase() -> None:
    count = 1000
    storages = (Storage(0, "x", StorageKind.INPUT, 1), *(Storage(i + 1, f"s{i}", StorageKind.ACTIVATION, 1) for i in range(count)))
    ops = tuple(Op(i, f"o{i}", "t", Phase.FORWARD, f"m.{i // 100}", reads=(i,), creates=(i + 1,)) for i in range(count))
    file = sample()
    schedule = replace(file.plan.schedules[0], actions=(), away=())
    large = replace(file, graph=Graph("large", ops, storages), plan=replace(file.plan, schedules=(schedule,), decisions=()))
    drawn = to_dot(large)
    assert len(re.findall(r"^ +n\d+ \[", drawn, re.MULTILINE)) == 10
    assert len(re.findall(r"n\d+ -> n\d+", drawn)) == 9
    assert len(re.findall(r"^ +n\d+ \[", to_dot(large, collapse=False), re.MULTILINE)) == count


def test_dot_quotes_names() -> None:
    file = sample()
    ops = (replace(file.graph.ops[0], name='odd "name"\\'), *file.graph.ops[1:])
    assert r"odd \"name\"\\" in to_dot(replace(file, graph=replace(file.graph, ops=ops)))


def test_json_has_every_action_with_time_and_memory() -> None:
    result = to_json(sample(), replay(sample()))
    assert len(result["actions"]) == len(sample().plan.schedules[0].actions)
    assert result["actions"][5] == {"kind": "swap_out", "subject": "mm", "id": A} | {
        key: result["actions"][5][key] for key in ("start_seconds", "memory_bytes")
    }
    assert max(action["memory_bytes"] for action in result["actions"]) == 214
    assert [copy["way"] for copy in result["copies"]] == ["in", "out", "in", "in", "out"]
    assert result["decisions"][2] == {
        "storage": "layer.weight",
        "size_bytes": 100,
        "fate": "rest",
        "after_op": None,
        "before_op": "mm",
        "why": "rests between steps",
    }
    assert result["away"] == ["layer.weight"]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1536), "1.50 KiB"),
        (size(200 * 1024**2), "200 MiB"),
        (size(3 * 1024**4), "3.00 TiB"),
        (duration(0.0), "0 µs"),
        (duration(0.0123), "12.3 ms"),
        (duration(2.5), "2.50 s"),
        (percent(1, 3), "33.3 %"),
        (percent(1, 0), "-"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    assert shown == expected
