"""Presets load, machines round-trip, wrong ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from schedopt.cost.presets import link_for, load_machine, machine_from_json, machine_names, machine_to_json, presets, save_machine
from schedopt.errors import TargetError


def test_all_presets_of_the_readme_are_there() -> None:
    assert set(machine_names()) == {"h200", "h100", "a100-80gb", "a100-40gb", "v100-16gb", "rtx4090", "t4"}
    for name, preset in presets().items():
        machine = preset.machine
        assert machine.name == name
        assert machine.source == "preset"
        assert "data sheet" in preset.data_sheet or "white paper" in preset.data_sheet
        flops = dict(machine.devices[0].flops_per_s)
        assert flops["float16"] > flops["float32"] > machine.devices[0].memory_bytes_per_s
        for link in machine.links:
            assert link.device == "cuda:0"
            assert 0 < link.out_bytes_per_s <= link.in_bytes_per_s < machine.devices[0].memory_bytes_per_s
            machine.tier(link.tier)


def test_newer_cards_are_faster() -> None:
    order = [load_machine(name).devices[0] for name in ("t4", "v100-16gb", "a100-40gb", "a100-80gb", "h100", "h200")]
    assert sorted(order, key=lambda d: d.memory_bytes_per_s) == order
    assert sorted(order, key=lambda d: dict(d.flops_per_s)["float16"]) == order


@pytest.mark.parametrize("name", machine_names())
def test_round_trip(name: str, tmp_path: Path) -> None:
    machine = load_machine(name)
    save_machine(machine, tmp_path / "m.json")
    assert load_machine(tmp_path / "m.json") == machine


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(TargetError, match="a100-80gb"):
        load_machine("a100-80")
    with pytest.raises(TargetError, match="h200"):
        load_machine("zzz")


@pytest.mark.parametrize("change", [{"extra": 1}, {"devices": "cuda"}, {"name": None}])
def test_bad_file_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    data = json.loads(machine_to_json(load_machine("t4"))) | change
    (tmp_path / "m.json").write_text(json.dumps(data))
    with pytest.raises(TargetError, match=next(iter(change))):
        load_machine(tmp_path / "m.json")
    data = json.loads(machine_to_json(load_machine("t4")))
    data["devices"][0]["colour"] = "green"
    with pytest.raises(ValidationError):
        machine_from_json(json.dumps(data))


def test_ram_means_pinned_memory_on_cuda() -> None:
    assert link_for(load_machine("h200"), "ram").tier == "pinned"
    assert link_for(load_machine("h200"), "file").tier == "file"
    with pytest.raises(TargetError, match="pinned"):
        link_for(load_machine("h200"), "tape")
