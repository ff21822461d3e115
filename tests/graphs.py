"""Small training steps built by hand or at random, for tests of whatever works on a `Graph`."""

from __future__ import annotations

import random
from dataclasses import replace

from schedopt.graph import Graph, Op, Phase, Recompute, Storage, StorageKind

KIB = 1024
MIB = 1024 * KIB


class GraphBuilder:
    """Collects storages and ops; `graph()` gives the step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.storages: list[Storage] = []
        self.ops: list[Op] = []

    def storage(self, kind: StorageKind, size_bytes: int) -> int:
        """A new storage; its id."""
        number = len(self.storages)
        self.storages.append(Storage(number, f"{kind.value}{number}", kind, size_bytes))
        return number

    def op(
        self,
        phase: Phase,
        time_ns: int,
        *,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        creates: tuple[int, ...] = (),
        recompute: Recompute = Recompute.PURE,
        workspace_bytes: int = 0,
    ) -> int:
        """A new op; its id. What it writes or creates it does not read."""
        number = len(self.ops)
        reads = tuple(s for s in dict.fromkeys(reads) if s not in writes and s not in creates)
        reason = "update" if recompute is Recompute.BARRED else ""
        one = Op(
            number, f"op{number}", f"toy.{recompute.value}", phase, "", reads, writes, creates, recompute, reason, time_ns, workspace_bytes
        )
        self.ops.append(one)
        return number

    def graph(self, *outputs: int) -> Graph:
        """The step; `outputs` go back to the user."""
        return Graph(self.name, tuple(self.ops), tuple(self.storages), outputs)


def chain_graph(num_layers: int, size_bytes: int = MIB, time_ns: int = 1_000_000) -> Graph:
    """A chain without parameters: activations forward, gradients backward, each backward op reads its layer's activation."""
    build = GraphBuilder(f"chain of {num_layers}")
    x = build.storage(StorageKind.INPUT, size_bytes)
    saved = [x]
    for _ in range(num_layers):
        a = build.storage(StorageKind.ACTIVATION, size_bytes)
        build.op(Phase.FORWARD, time_ns, reads=(saved[-1],), creates=(a,))
        saved.append(a)
    loss = build.storage(StorageKind.OUTPUT, 4)
    grad = build.storage(StorageKind.GRADIENT, size_bytes)
    build.op(Phase.FORWARD, time_ns, reads=(saved[-1],), creates=(loss, grad))
    for a in reversed(saved[1:]):
        after = build.storage(StorageKind.GRADIENT, size_bytes)
        build.op(Phase.BACKWARD, time_ns, reads=(grad, a), creates=(after,))
        grad = after
    return build.graph(loss)


def random_graph(seed: int, num_layers: int = 6) -> Graph:
    """A training step with everything that makes scheduling hard: in-place, random and statistics ops, skips, a tied parameter, gradients
    that are added up, clipping, optimizer state, large and small storages, workspaces."""
    return _RandomStep(random.Random(seed), f"random {seed}").build(num_layers)


class _RandomStep:
    def __init__(self, draw: random.Random, name: str) -> None:
        self.draw, self.b = draw, GraphBuilder(name)
        self.parameters: list[int] = []
        self.gradients: dict[int, int] = {}

    def size(self) -> int:
        """Mostly large, sometimes too small to move."""
        return self.draw.choice((8, 64, 128, 256, 256, 512, 1024)) * KIB

    def time(self) -> int:
        """From below to far above the time of a copy."""
        return self.draw.choice((5_000, 50_000, 200_000, 1_000_000))

    def build(self, num_layers: int) -> Graph:
        """Forward, loss, backward, update."""
        b = self.b
        hidden = b.storage(StorageKind.INPUT, self.size())
        layers: list[tuple[int, int, int, tuple[int, ...]]] = []
        for _ in range(num_layers):
            weight = self.parameter()
            out, saved = self.forward(hidden, weight, [layer[1] for layer in layers])
            layers.append((hidden, out, weight, saved))
            hidden = out
        loss = b.storage(StorageKind.OUTPUT, 4)
        grad = b.storage(StorageKind.GRADIENT, self.size())
        b.op(Phase.FORWARD, self.time(), reads=(hidden,), creates=(loss, grad), workspace_bytes=self.draw.choice((0, 32)) * KIB)
        for source, out, weight, saved in reversed(layers):
            grad = self.backward(grad, source, out, weight, saved)
        self.update()
        return b.graph(loss)

    def parameter(self) -> int:
        """A new parameter, or now and then one that is used already."""
        if self.parameters and self.draw.random() < 0.2:
            return self.draw.choice(self.parameters)
        self.parameters.append(self.b.storage(StorageKind.PARAMETER, self.size()))
        return self.parameters[-1]

    def forward(self, hidden: int, weight: int, earlier: list[int]) -> tuple[int, tuple[int, ...]]:
        """One layer: its output, and what else the backward needs."""
        b, draw = self.b, self.draw
        kind = draw.choice((Recompute.PURE, Recompute.PURE, Recompute.RANDOM, Recompute.STATISTICS))
        out = b.storage(StorageKind.ACTIVATION, self.size())
        extra = (b.storage(StorageKind.ACTIVATION, self.size()),) if kind is not Recompute.PURE or draw.random() < 0.3 else ()
        writes = (b.storage(StorageKind.BUFFER, draw.choice((4, 128)) * KIB),) if kind is Recompute.STATISTICS else ()
        reads = (hidden, weight, *(draw.choice(earlier) for _ in range(draw.randrange(2)) if earlier))
        workspace = draw.choice((0, 0, 64, 300)) * KIB
        b.op(Phase.FORWARD, self.time(), reads=reads, writes=writes, creates=(out, *extra), recompute=kind, workspace_bytes=workspace)
        if draw.random() < 0.4:
            b.op(Phase.FORWARD, self.time(), writes=(out,), recompute=Recompute.IN_PLACE)
        return out, extra

    def backward(self, grad: int, source: int, out: int, weight: int, saved: tuple[int, ...]) -> int:
        """Gradients of one layer; those of a tied parameter are added up in place."""
        b = self.b
        back = b.storage(StorageKind.GRADIENT, self.size())
        made = b.storage(StorageKind.GRADIENT, b.storages[weight].size_bytes)
        b.op(Phase.BACKWARD, self.time(), reads=(grad, out, weight, *saved), creates=(back,))
        b.op(Phase.BACKWARD, self.time(), reads=(grad, source), creates=(made,), workspace_bytes=self.draw.choice((0, 100)) * KIB)
        if weight in self.gradients:
            b.op(Phase.BACKWARD, self.time(), reads=(made,), writes=(self.gradients[weight],), recompute=Recompute.IN_PLACE)
        else:
            self.gradients[weight] = made
        return back

    def update(self) -> None:
        """Clip all gradients (sometimes), then update every parameter with its state."""
        b, phase = self.b, Phase.UPDATE
        gradients = tuple(self.gradients.values())
        if self.draw.random() < 0.3:
            norm = b.storage(StorageKind.ACTIVATION, 4)
            b.op(Phase.BACKWARD, self.time(), reads=gradients, creates=(norm,))
            for gradient in gradients:
                b.op(Phase.BACKWARD, self.time(), reads=(norm,), writes=(gradient,), recompute=Recompute.IN_PLACE)
        for weight, gradient in self.gradients.items():
            state = b.storage(StorageKind.OPTIMIZER_STATE, b.storages[weight].size_bytes)
            b.op(phase, self.time(), reads=(gradient,), writes=(weight, state), recompute=Recompute.BARRED)


def with_times(graph: Graph, time_ns: int) -> Graph:
    """The same graph with every op taking `time_ns`."""
    return replace(graph, ops=tuple(replace(op, time_ns=time_ns) for op in graph.ops))
