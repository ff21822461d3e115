"""The cost cache: round trip, context, damage, several writers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedopt.cost.cache import CACHE_VARIABLE, CostCache, OpCost, cache_directory, write_atomically

HERE = {"version": 1, "device": "one", "torch": "2", "threads": 1}


def test_round_trip(tmp_path: Path) -> None:
    cache = CostCache(tmp_path, HERE)
    assert cache.get("mm") is None
    cache.put("mm", OpCost(12, 34))
    cache.save()
    assert CostCache(tmp_path, HERE).get("mm") == OpCost(12, 34)
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]


def test_another_context_sees_nothing(tmp_path: Path) -> None:
    cache = CostCache(tmp_path, HERE)
    cache.put("mm", OpCost(12, 34))
    cache.save()
    assert CostCache(tmp_path, HERE | {"threads": 2}).get("mm") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"context": 1}',
        '{"costs": {}}',
        json.dumps({"context": HERE, "costs": {"mm": [1]}}),
        json.dumps({"context": HERE, "costs": {"mm": [1.5, 2]}}),
        json.dumps({"context": HERE, "costs": {"mm": [-1, 2]}}),
        json.dumps({"context": HERE, "costs": 3}),
    ],
)
def test_damage_is_ignored_and_written_over(text: str, tmp_path: Path) -> None:
    cache = CostCache(tmp_path, HERE)
    cache.path.write_text(text)
    again = CostCache(tmp_path, HERE)
    assert len(again) == 0
    again.put("add", OpCost(1, 2))
    again.save()
    assert CostCache(tmp_path, HERE).get("add") == OpCost(1, 2)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    cache = CostCache(tmp_path, HERE)
    cache.path.write_bytes(b"\xff\xfe\x00{")
    assert len(CostCache(tmp_path, HERE)) == 0


def test_two_writers_keep_both(tmp_path: Path) -> None:
    one, other = CostCache(tmp_path, HERE), CostCache(tmp_path, HERE)
    one.put("mm", OpCost(1, 0))
    other.put("add", OpCost(2, 0))
    one.save()
    other.save()
    assert len(CostCache(tmp_path, HERE)) == 2


def test_place_that_can_not_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = CostCache(tmp_path / "file" / "below", HERE)
    cache.put("mm", OpCost(1, 0))
    cache.save()
    assert "could not be kept" in caplog.text


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_directory_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path
