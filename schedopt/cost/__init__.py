"""What ops and copies cost: measured on this CPU, or from formulas for a machine that is not here."""

from schedopt.cost.analytic import estimate
from schedopt.cost.cache import CostCache
from schedopt.cost.measure import measure
from schedopt.cost.presets import link_for, load_machine, machine_names, save_machine
from schedopt.cost.probe import cached_probe, probe, this_machine

__all__ = [
    "CostCache",
    "cached_probe",
    "estimate",
    "link_for",
    "load_machine",
    "machine_names",
    "measure",
    "probe",
    "save_machine",
    "this_machine",
]
