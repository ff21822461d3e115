"""`schedopt machine`: what plans are made for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from schedopt.cli import options as o
from schedopt.cli.bars import Bars
from schedopt.cli.shell import guarded, out, print_json
from schedopt.export.units import duration, size
from schedopt.machine import Machine

app = typer.Typer(no_args_is_help=True, help="Machines that plans are made for.")


@app.command("probe")
@guarded
def probe_command(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the machine to this JSON file")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure this machine (memory copy, matmul, file and RAM tiers); from now on plans are made with these figures."""
    from schedopt.cost import cached_probe, save_machine

    with Bars(quiet=as_json) as bars:
        machine = cached_probe(lambda done, total: bars("probe", done, total), renew=True)
    if output is not None:
        save_machine(machine, output)
    _show(machine, as_json=as_json)


@app.command("list")
@guarded
def list_command(as_json: o.AsJson = False) -> None:
    """The machines known by name."""
    from schedopt.cost import load_machine, machine_names

    machines = [load_machine(name) for name in machine_names()]
    if as_json:
        print_json({"machines": [asdict(machine) for machine in machines]})
        return
    table = Table(title="machines", title_justify="left")
    for column in ("name", "memory", "memory bandwidth", "fastest matmul", "tiers"):
        table.add_column(column, justify="left" if column in ("name", "tiers") else "right")
    for machine in machines:
        device = machine.devices[0]
        dtype, speed = max(device.flops_per_s, key=lambda entry: entry[1])
        links = [f"{link.tier} {size(round(link.out_bytes_per_s))}/s" for link in machine.links if link.device == device.name]
        memory, bandwidth = size(device.memory_bytes), f"{size(round(device.memory_bytes_per_s))}/s"
        table.add_row(machine.name, memory, bandwidth, f"{speed / 1e12:.0f} TFLOP/s {dtype}", ", ".join(links))
    out.print(table)


@app.command("show")
@guarded
def show_command(
    name: Annotated[str, typer.Argument(help="a name from `schedopt machine list`, a JSON file, or `this`")],
    as_json: o.AsJson = False,
) -> None:
    """One machine in full."""
    from schedopt.cost import load_machine, this_machine

    _show(this_machine() if name == "this" else load_machine(name), as_json=as_json)


def _show(machine: Machine, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(machine))
        return
    table = Table(title=f"{machine.name} ({machine.source})", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for device in machine.devices:
        speeds = ", ".join(f"{dtype} {speed / 1e9:.0f} GFLOP/s" for dtype, speed in device.flops_per_s)
        table.add_row(f"device {device.name}", f"{size(device.memory_bytes)}, {size(round(device.memory_bytes_per_s))}/s")
        table.add_row("", speeds)
        table.add_row("", f"{duration(device.launch_ns / 1e9)} per launch")
    for tier in machine.tiers:
        table.add_row(f"tier {tier.name}", size(tier.capacity_bytes))
    for link in machine.links:
        speed = f"out {size(round(link.out_bytes_per_s))}/s, in {size(round(link.in_bytes_per_s))}/s"
        both = "both at once" if link.duplex else "one way at a time"
        tax = f", costs ops {link.tax_ns_per_byte * 2**20 / 1e3:.0f} µs per MiB" if link.tax_ns_per_byte else ""
        tax += ", ops stand still meanwhile" if link.blocking else ""
        table.add_row(f"link {link.device} - {link.tier}", f"{speed}, {duration(link.latency_ns / 1e9)}, {both}{tax}")
    out.print(table)
