"""Contiguous stages of least maximum load by dynamic programming; exact over the ideals that it is given.

An *ideal* is a set of items that has, with an item, everything before it: what the first so many stages hold together. A stage is the
difference of two ideals. With best[u][J] = the least maximum load of any stages that hold J on `u` devices (a count per kind):

    best[u][J] = min over kinds k with u_k > 0, ideals I in J, of max(best[u - k][I], load_k(J - I))        (also I = J: an idle device)

The load of J - I comes from sums over I and over J, corrected for the few senders with one end in I and another outside. Pairs are skipped
that can not beat a known answer `under`: a stage longer than it, or a rest longer than the devices left can do. Source of the idea:
Tarnawski et al., NeurIPS 2020; for chains PipeDream, SOSP 2019.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schedopt.solvers.partition_tables import PartitionTables

Bits = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
State = tuple[int, ...]  # devices used, per kind
Best = dict[State, Floats]  # per ideal the least maximum load
Back = dict[State, npt.NDArray[np.int64]]  # per ideal: the ideal before, the kind of the last stage


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Device of every item, kind of every device (in the order of the stages), the greatest load."""

    device_of: list[int]
    kinds: list[int]
    max_load: float


def all_ideals(tables: PartitionTables, most: int) -> list[int] | None:
    """Every ideal as a bit mask; None if there are more than `most`."""
    before = [0] * len(tables.members)
    after: list[list[int]] = [[] for _ in tables.members]
    for a, b in tables.arcs:
        before[b] |= 1 << a
        after[a].append(b)
    roots = [i for i, mask in enumerate(before) if not mask]
    found = {0}
    todo: list[tuple[int, list[int]]] = [(0, roots)]
    while todo:
        ideal, open_items = todo.pop()
        for item in open_items:
            larger = ideal | 1 << item
            if larger in found:
                continue
            found.add(larger)
            if len(found) > most:
                return None
            fresh = [b for b in after[item] if before[b] & ~larger == 0]
            todo.append((larger, [i for i in open_items if i != item] + fresh))
    return list(found)


def prefixes(orders: Iterable[list[int]]) -> list[int]:
    """The ideals that lie on the given orders of the items."""
    found = {0}
    for order in orders:
        found.update(itertools.accumulate((1 << item for item in order), lambda a, b: a | b))
    return list(found)


def best_stages(
    tables: PartitionTables,
    ideals: list[int],
    under: float = float("inf"),
    until: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> StagePlan | None:
    """The best stages over `ideals` (with the empty and the full one) with a maximum load below `under`; None if there are none, or if
    the clock (time.perf_counter) passes `until`."""
    return _Table(tables, ideals, under).solve(until, progress or (lambda _share: None))


class _Table:
    def __init__(self, tables: PartitionTables, ideals: list[int], under: float) -> None:
        self.t, self.under = tables, under
        items = len(tables.members)
        self.words = max(1, -(-items // 64))
        fastest = np.array([min(times) for times in zip(*tables.time, strict=True)])
        ideals.sort(key=int.bit_count)
        member = np.array([[ideal >> i & 1 for i in range(items)] for ideal in ideals], dtype=bool)
        order = np.argsort(member @ fastest, kind="stable")
        self.masks = [ideals[i] for i in order]
        self.member = member[order]
        self.least = self.member @ fastest  # time of an ideal where every item is on its fastest kind, rising
        self.bits = np.array([self._split(mask) for mask in self.masks], dtype=np.uint64)
        finite = [np.nan_to_num(np.array(times), posinf=1e300) for times in tables.time]
        self.time = [self.member @ times for times in finite]
        self.bytes, self.stash = self.member @ np.array(tables.bytes), self.member @ np.array(tables.stash)
        self.counts = [kind.count for kind in tables.spec.devices]
        self._from_nothing()

    def _split(self, mask: int) -> list[int]:
        return [mask >> 64 * w & (1 << 64) - 1 for w in range(self.words)]

    def _from_nothing(self) -> None:
        """What every ideal, as a stage that starts from nothing, sends and receives."""
        self.sent, self.received = np.zeros(len(self.masks)), np.zeros(len(self.masks))
        self.users: list[int] = []
        for sender in self.t.senders:
            users = list(sender.users)
            self.users.append(sum(1 << user for user in users))
            home, inside = self.member[:, sender.home], self.member[:, users]
            self.sent += sender.cost * (home & ~inside.all(axis=1))
            self.received += sender.cost * (~home & inside.any(axis=1))

    def solve(self, until: float | None, progress: Callable[[float], None]) -> StagePlan | None:
        states = list(itertools.product(*(range(count + 1) for count in self.counts)))
        full = tuple(self.counts)
        size = len(self.masks)
        best: Best = {state: np.full(size, np.inf) for state in states}
        back: Back = {state: np.full((size, 2), -1, dtype=np.int64) for state in states}  # ideal before, kind of the last stage
        zero = tuple(0 for _ in full)
        best[zero][0] = 0.0
        for i in range(size):
            if i % 256 == 0:
                progress(i / size)
                if until is not None and time.perf_counter() > until:
                    return None
            self._pass_on_idle(best, back, states, i)
            active = [state for state in states if best[state][i] < self.under and state != full and self._can_finish(i, state)]
            if active:
                self._extend(best, back, active, i)
        if best[full][size - 1] >= self.under:
            return None
        return self._read(best, back, full)

    def _can_finish(self, i: int, state: State) -> bool:
        """Whether the devices left can do what is left, below the known answer."""
        left = sum(self.counts) - sum(state)
        return bool(self.least[-1] - self.least[i] <= left * self.under)

    def _pass_on_idle(self, best: Best, back: Back, states: list[State], i: int) -> None:
        """More devices are never worse: the one more stays idle."""
        for state in states:
            for k, used in enumerate(state):
                if used == self.counts[k]:
                    continue
                more = (*state[:k], used + 1, *state[k + 1 :])
                if best[state][i] < best[more][i]:
                    best[more][i], back[more][i] = best[state][i], (i, k)

    def _extend(self, best: Best, back: Back, active: list[State], i: int) -> None:
        """Every stage that starts where ideal i ends."""
        stop = int(np.searchsorted(self.least, self.least[i] + self.under, side="right"))
        mine = self.bits[i]
        ahead = np.flatnonzero(((self.bits[i + 1 : stop] & mine) == mine).all(axis=1)) + i + 1
        if not len(ahead):
            return
        sent, received = self._transfers(i, ahead)
        for k, kind in enumerate(self.t.spec.devices):
            work = self.time[k][ahead] - self.time[k][i]
            out, came = (0.0 * sent, 0.0 * received) if kind.free_transfers else (sent, received)
            load = np.maximum(np.maximum(work, out), came) if self.t.spec.overlap else work + out + came
            for state in active:
                if state[k] == self.counts[k]:
                    continue
                value = np.maximum(load, best[state][i])
                if kind.limit_bytes is not None:
                    in_flight = sum(self.counts) - sum(state)
                    held = self.bytes[ahead] - self.bytes[i] + in_flight * (self.stash[ahead] - self.stash[i])
                    value[held > kind.limit_bytes] = np.inf
                after = (*state[:k], state[k] + 1, *state[k + 1 :])
                better = (value < best[after][ahead]) & (value < self.under)
                where = ahead[better]
                best[after][where] = value[better]
                back[after][where] = (i, k)

    def _transfers(self, i: int, ahead: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """What the stages from ideal i to the ideals `ahead` send and receive."""
        sent, received = self.sent[ahead], self.received[ahead]
        mask, later = self.masks[i], self.bits[ahead]
        for number, sender in enumerate(self.t.senders):
            users, home_inside = self.users[number], mask >> sender.home & 1
            all_items = users | 1 << sender.home
            if not all_items & mask or not all_items & ~mask:
                continue
            rest = np.array(self._split(users & ~mask), dtype=np.uint64)
            some = ((later & rest) != 0).any(axis=1)  # a user is in the stage
            if home_inside:
                received += sender.cost * some
                sent -= sender.cost * ((later & rest) != rest).any(axis=1)
            else:
                home = self.member[ahead, sender.home]
                sent += sender.cost * (home & ~((later & rest) != rest).any(axis=1))
                received -= sender.cost * (~home & ~some)
        return sent, received

    def _read(self, best: Best, back: Back, full: State) -> StagePlan:
        """Walk back from the full ideal."""
        device_of, kinds = [0] * len(self.t.members), []
        state, i = full, len(self.masks) - 1
        stages: list[tuple[int, int]] = []  # mask of items, kind
        while any(state):
            before, k = (int(x) for x in back[state][i])
            stages.append((self.masks[i] & ~self.masks[before], k))
            i, state = before, (*state[:k], state[k] - 1, *state[k + 1 :])
        for device, (mask, k) in enumerate(reversed(stages)):
            kinds.append(k)
            for item in range(len(device_of)):
                if mask >> item & 1:
                    device_of[item] = device
        return StagePlan(device_of, kinds, float(best[full][-1]))
