"""Whether a cluster can hold a run: what is asked, what is there, and what to change. No Ray here.

A *need* is what one actor (or the actors that share GPUs) reserves on one node. The answer is
about what nodes have in all, not about what is free: a busy cluster is waited for, one that is too
small is refused at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

GIB = 1024**3
TRACE = 0.001
"""Asked of a custom resource, to be placed where it is."""
MAX_VISITS = 20_000
MAX_DEPTH = 300
"""Of the search for a way to place everything; beyond them Ray is left to find out."""
_UNITS = 10_000
"""Ray counts resources in ten thousandths."""
_OWN = re.compile(r"node:|bundle|object_store_memory|accelerator_type:|.*_group_|(CPU|GPU|memory)$")


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is reserved together on one node."""

    role: str
    """Whom it is for, as the person is told; the setting is found by it."""
    resources: Mapping[str, float]
    """Ray's names: CPU, GPU, memory (bytes) and custom ones; no zeros."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels the node must bear."""
    num_actors: int = 1


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    name: str
    resources: Mapping[str, float]
    """All it has, free or not."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def matches(self, need: Need) -> bool:
        """Whether it belongs to the node group the need names."""
        return all(self.labels.get(k) == v for k, v in need.labels.items()) and all(
            self.resources.get(kind, 0) >= amount - 1e-6
            for kind, amount in need.resources.items()
            if not _OWN.match(kind)
        )

    def holds(self, need: Need) -> bool:
        """Whether it could hold this need alone."""
        return self.matches(need) and all(
            self.resources.get(kind, 0) >= amount - 1e-6 for kind, amount in need.resources.items()
        )


def node_group(on: str | None) -> tuple[dict[str, float], dict[str, str]]:
    """What ``placement.<role>_on`` adds to a bundle: a trace of a custom resource, or a label
    (``key=value``)."""
    if on is None:
        return {}, {}
    key, equals, value = on.partition("=")
    return ({}, {key: value}) if equals else ({on: TRACE}, {})


def can_hold(
    group: Sequence[Need], nodes: Sequence[Node], *, strategy: str, beside: Sequence[Need] = ()
) -> bool:
    """Whether some way exists to place everything on empty nodes.

    Args:
        group: placed by the strategy (pack, spread, strict_pack, strict_spread).
        beside: reserved too, on any node.

    Returns:
        False only where no way exists; True where one was found, or the search was given up.
    """
    if strategy == "strict_pack":
        return any(_search(group, beside, nodes, homes=[i], apart=False) for i in range(len(nodes)))
    apart = strategy == "strict_spread"
    return _search(group, beside, nodes, homes=range(len(nodes)), apart=apart)


def _search(
    group: Sequence[Need],
    beside: Sequence[Need],
    nodes: Sequence[Node],
    *,
    homes: Collection[int],
    apart: bool,
) -> bool:
    """Depth first: the largest need first, on the node with least room, no state twice.

    Args:
        homes: nodes the group may use.
        apart: no two of the group on one node.
    """
    items = [(need, True) for need in group] + [(need, False) for need in beside]
    items.sort(key=lambda item: _size(item[0]), reverse=True)
    may = [
        [i for i, node in enumerate(nodes) if (i in homes or not own) and node.holds(need)]
        for need, own in items
    ]
    if not all(may):
        return False
    asked = [_counted(need.resources) for need, _ in items]
    kinds = sorted({kind for amounts in asked for kind in amounts})
    free = [[_counted(node.resources).get(kind, 0) for kind in kinds] for node in nodes]
    want = [[amounts.get(kind, 0) for kind in kinds] for amounts in asked]
    if any(sum(w[k] for w in want) > sum(f[k] for f in free) for k in range(len(kinds))):
        return False
    if len(items) > MAX_DEPTH:
        return True
    # Nodes that may take the same items and have the same room are one to the search.
    kin = [tuple(n in places for places in may) for n in range(len(nodes))]
    taken = [False] * len(nodes)
    seen: set[object] = set()

    def twin(n: int) -> tuple[object, ...]:
        return kin[n], taken[n], tuple(free[n])

    def place(i: int) -> bool:
        if i == len(items):
            return True
        state = (i, tuple(sorted(map(twin, range(len(nodes))))))
        if state in seen:
            return False
        seen.add(state)
        own, tried = items[i][1], set()
        for n in sorted(may[i], key=lambda n: free[n]):
            room = [f - w for f, w in zip(free[n], want[i], strict=True)]
            if min(room, default=0) < 0 or (apart and own and taken[n]) or twin(n) in tried:
                continue
            tried.add(twin(n))
            before = free[n], taken[n]
            free[n], taken[n] = room, taken[n] or own
            if len(seen) > MAX_VISITS or place(i + 1):
                return True
            free[n], taken[n] = before
        return False

    return place(0)


def _size(need: Need) -> tuple[float, ...]:
    picky = sum(1 for kind in need.resources if not _OWN.match(kind)) + len(need.labels)
    return (*(need.resources.get(kind, 0) for kind in ("GPU", "CPU", "memory")), picky)


def _counted(resources: Mapping[str, float]) -> dict[str, int]:
    return {kind: round(amount * _UNITS) for kind, amount in resources.items()}


def why_not(
    group: Sequence[Need], nodes: Sequence[Node], *, strategy: str, beside: Sequence[Need] = ()
) -> list[str]:
    """What is in the way, and what to change: for a cluster that cannot hold the run."""
    needs = [*beside, *group]
    found: dict[str, None] = {}
    for need in needs:
        there = [node for node in nodes if node.matches(need)]
        if not there:
            found.setdefault(_no_such_node(need, nodes))
            continue
        for kind, amount in need.resources.items():
            most = max(node.resources.get(kind, 0) for node in there)
            if amount > most + 1e-6:
                found.setdefault(
                    f"{need.role} asks {kind} {_amount(kind, amount)} on one node, the most a node"
                    f"{_of_group(need)} has is {_amount(kind, most)}: {_lower(need.role, kind)}"
                )
    for kind in ("GPU", "CPU", "memory"):
        asked = sum(need.resources.get(kind, 0) for need in needs)
        there = sum(node.resources.get(kind, 0) for node in nodes)
        if asked > there + 1e-6:
            found.setdefault(
                f"{kind} asked {_amount(kind, asked)}, there {_amount(kind, there)}: "
                f"{_lower('every role', kind)}, or add nodes"
            )
    if not found and strategy.startswith("strict_"):
        loose = can_hold(group, nodes, strategy="pack", beside=beside)
        rule = (
            "puts every actor on one node, and no node holds them all"
            if strategy == "strict_pack"
            else f"puts {len(group)} reservations on as many nodes"
        )
        found.setdefault(
            f"placement.strategy={strategy} {rule}"
            + ("; placement.strategy=pack or spread would fit" if loose else "")
        )
    if not found:
        found.setdefault(
            "the sums suffice, but what each actor asks on one node does not divide over these "
            "nodes: ask less per actor (tensor_parallel, placement.*_cpus), fewer actors, or add "
            "nodes"
        )
    return list(found)


def _no_such_node(need: Need, nodes: Sequence[Node]) -> str:
    if need.labels:
        wanted = ", ".join(f"{k}={v}" for k, v in need.labels.items())
        return (
            f"{need.role} goes to nodes with the label {wanted}, and there is none: start one with "
            f"ray start --labels='{wanted}', or change placement.{_key(need.role)}_on"
        )
    names = [kind for kind in need.resources if not _OWN.match(kind)]
    offered = sorted({kind for node in nodes for kind in node.resources if not _OWN.match(kind)})
    return (
        f"{need.role} goes to nodes with the resource {', '.join(names)}, and there is none "
        f"(nodes offer: {', '.join(offered) or 'no custom resource'}): start one with "
        f"ray start --resources='{{\"{names[0]}\": 1}}', or change placement.{_key(need.role)}_on"
    )


def _key(role: str) -> str:
    return role if "+" not in role else "*"


def _of_group(need: Need) -> str:
    on = [kind for kind in need.resources if not _OWN.match(kind)]
    on += [f"{k}={v}" for k, v in need.labels.items()]
    return f" with {', '.join(on)}" if on else ""


def _lower(role: str, kind: str) -> str:
    if kind == "GPU":
        return "lower tensor_parallel or the number of actors"
    if kind == "memory":
        return "lower placement.coordinator_memory_gb"
    keys = "placement.*_cpus" if role == "every role" else f"placement.{_key(role)}_cpus"
    return f"lower {keys}" + (" or the number of actors" if role == "every role" else "")


def _amount(kind: str, amount: float) -> str:
    return f"{amount / GIB:.1f} GB" if kind == "memory" else f"{amount:g}"


def table(group: Sequence[Need], nodes: Sequence[Node], *, beside: Sequence[Need] = ()) -> str:
    """What is asked, a line for each kind of reservation; what is there, a line for each node."""
    alike = Counter(
        (n.role, n.num_actors, tuple(n.resources.items()), tuple(n.labels.items()))
        for n in (*beside, *group)
    )
    rows = [["asked by", "times", "CPU each", "GPU each", "memory", "on nodes with"]]
    for (role, _, resources, labels), num in alike.items():
        rows.append([role, f"{num}", *_cells(dict(resources), dict(labels), asked=True)])
    rows.append([])
    rows.append(["node", "", "CPU", "GPU", "memory", "offers"])
    for node in nodes:
        rows.append([node.name, "", *_cells(node.resources, node.labels, asked=False)])
    widths = [max(len(row[c]) for row in rows if row) for c in range(6)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if c in (0, 5) else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=bool(row)))
        ]
        lines.append(("  " + " ".join(cells)).rstrip())
    return "\n".join(lines)


def _cells(
    resources: Mapping[str, float], labels: Mapping[str, str], *, asked: bool
) -> tuple[str, str, str, str]:
    custom = [
        kind if asked else f"{kind} {amount:g}"
        for kind, amount in sorted(resources.items())
        if not _OWN.match(kind)
    ]
    custom += [f"{k}={v}" for k, v in sorted(labels.items())]
    memory = resources.get("memory", 0)
    return (
        f"{resources.get('CPU', 0):g}",
        f"{resources.get('GPU', 0):g}",
        _amount("memory", memory) if memory else "-",
        ", ".join(custom) or "-",
    )
