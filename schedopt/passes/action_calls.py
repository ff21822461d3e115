"""What an inserted fx node calls: one typed function per action; `runtime` is the back end that carries it out."""

from __future__ import annotations

from typing import Protocol

import torch

BASE, CHANGED = 0, 1  # which copy of a storage: as at the start of the step, or changed by it


class Runtime(Protocol):
    """A back end."""

    def take(self, op: int) -> None:
        """Account for what op is about to allocate; BudgetError if it does not fit."""

    def verify(self, op: int, value: object) -> None:
        """Compare what op really created with the plan."""

    def writing(self, op: int) -> None:
        """Op is about to write storages that outlive the step."""

    def save_rng(self, op: int) -> None:
        """Keep the generator's state for op."""

    def restore_rng(self, op: int) -> None:
        """Put back the generator's state kept for op, after keeping the present one."""

    def resume_rng(self) -> None:
        """Put the generator's present state back after a recompute."""

    def swap_out(self, storage: int, copy: int, tensor: torch.Tensor) -> None:
        """Queue a copy to the lower tier."""

    def wait_out(self, storage: int, tensor: torch.Tensor) -> None:
        """Wait for it, then free the bytes."""

    def wait_save(self, storage: int) -> None:
        """Wait for it; the bytes stay."""

    def swap_in(self, storage: int, copy: int, tensor: torch.Tensor) -> None:
        """Take bytes and queue a copy from the lower tier."""

    def wait_in(self, storage: int) -> None:
        """Wait for it."""

    def evict(self, storage: int, tensor: torch.Tensor) -> None:
        """Free the bytes; the lower tier holds them."""

    def release(self, storage: int) -> None:
        """The bytes are gone: nobody refers to them any more."""


def take(runtime: Runtime, op: int) -> None:
    """See Runtime."""
    runtime.take(op)


def verify(runtime: Runtime, op: int, value: object) -> None:
    """See Runtime."""
    runtime.verify(op, value)


def writing(runtime: Runtime, op: int) -> None:
    """See Runtime."""
    runtime.writing(op)


def save_rng(runtime: Runtime, op: int) -> None:
    """See Runtime."""
    runtime.save_rng(op)


def restore_rng(runtime: Runtime, op: int) -> None:
    """See Runtime."""
    runtime.restore_rng(op)


def resume_rng(runtime: Runtime) -> None:
    """See Runtime."""
    runtime.resume_rng()


def swap_out(runtime: Runtime, storage: int, copy: int, tensor: torch.Tensor) -> None:
    """See Runtime; also stands for `save`."""
    runtime.swap_out(storage, copy, tensor)


def wait_out(runtime: Runtime, storage: int, tensor: torch.Tensor) -> None:
    """See Runtime."""
    runtime.wait_out(storage, tensor)


def wait_save(runtime: Runtime, storage: int) -> None:
    """See Runtime."""
    runtime.wait_save(storage)


def swap_in(runtime: Runtime, storage: int, copy: int, tensor: torch.Tensor) -> None:
    """See Runtime."""
    runtime.swap_in(storage, copy, tensor)


def wait_in(runtime: Runtime, storage: int) -> None:
    """See Runtime."""
    runtime.wait_in(storage)


def evict(runtime: Runtime, storage: int, tensor: torch.Tensor) -> None:
    """See Runtime."""
    runtime.evict(storage, tensor)


def release(runtime: Runtime, storage: int, *aliases: object) -> None:
    """See Runtime; `aliases` are all values that refer to the storage: the code generator drops them here."""
    runtime.release(storage)


CALLS = frozenset(
    {take, verify, writing, save_rng, restore_rng, resume_rng, swap_out, wait_out, wait_save, swap_in, wait_in, evict} | {release}
)
