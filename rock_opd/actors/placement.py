"""Where the actors of a run go: one placement group, all of it or nothing.

What each role reserves is laid out without Ray (``lay_out``). A cluster that could never hold it is
refused at once, with a table; a busy one is waited for, up to ``run.start_timeout_s``.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rock_opd.actors.fitting import GIB, Need, Node, can_hold, node_group, table, why_not
from rock_opd.actors.waiting import Stopped, gather
from rock_opd.config import Recipe
from rock_opd.errors import PlacementError

POLL_S = 2.0
REMOTE_TEACHER_CPUS = 0.25
"""At most, for a teacher that others serve: it reads their answers, and holds no model."""
GROUP_PREFIX = "rock_opd:"
"""How the names of our placement groups begin."""
PATIENCE_S = 10.0
"""Waiting shorter than this is not spoken of."""


def resolve_device(recipe: Recipe) -> str:
    """cpu or cuda; ``auto`` is cuda where the cluster has GPUs."""
    if recipe.run.device != "auto":
        return recipe.run.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


# --- what is asked --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """One actor's place in a layout."""

    bundle: int
    gpus: range | None
    """Which of the bundle's GPUs are its own while it is awake; None: Ray hands them out."""


@dataclass(frozen=True)
class Layout:
    """A run's reservations, and who sits where."""

    bundles: list[Need]
    seats: dict[str, list[Seat]]
    shared: frozenset[str]
    """Roles that take turns on the same GPUs."""


def roles_of(recipe: Recipe) -> tuple[str, ...]:
    """The roles with actors of their own in a training run."""
    return ("student", "rollout", "teacher") if recipe.samples else ("student", "teacher")


def lay_out(recipe: Recipe, device: str, wanted: tuple[str, ...]) -> Layout:
    """What the roles reserve: one bundle an actor, so that no actor stands on two nodes.

    Roles that share GPUs share bundles as wide as the widest of them.
    """
    place, student, rollout, teacher = (
        recipe.placement,
        recipe.student,
        recipe.rollout,
        recipe.teacher,
    )
    every = {
        "student": (student.num_ranks, 1, place.student_cpus, place.student_on),
        "rollout": (
            rollout.num_workers,
            rollout.tensor_parallel,
            place.rollout_cpus,
            place.rollout_on,
        ),
        "teacher": (
            teacher.num_replicas,
            0 if teacher.remote else teacher.tensor_parallel,
            min(place.teacher_cpus, REMOTE_TEACHER_CPUS) if teacher.remote else place.teacher_cpus,
            place.teacher_on,
        ),
    }
    roles = {role: every[role] for role in wanted}
    colocate = place.colocate if device == "cuda" else "none"
    sharing = {"all": set(roles), "teacher_rollout": {"teacher", "rollout"}, "none": set()}
    shared = [role for role in roles if role in sharing[colocate] and roles[role][1]]
    bundles: list[Need] = []
    seats: dict[str, list[Seat]] = {}
    if shared:
        wide = max(roles[role][1] for role in shared)
        fit = {role: wide // roles[role][1] for role in shared}  # actors of a role in one bundle
        for role in shared:
            width = roles[role][1]
            seats[role] = [
                Seat(i // fit[role], range(i % fit[role] * width, (i % fit[role] + 1) * width))
                for i in range(roles[role][0])
            ]
        for b in range(max(math.ceil(roles[role][0] / fit[role]) for role in shared)):
            sitting = {role: min(fit[role], roles[role][0] - b * fit[role]) for role in shared}
            sitting = {role: num for role, num in sitting.items() if num > 0}
            bundles.append(
                _need(
                    "+".join(sitting),
                    cpus=sum(num * roles[role][2] for role, num in sitting.items()),
                    gpus=max(num * roles[role][1] for role, num in sitting.items()),
                    on=roles[shared[0]][3],
                )
            )
    for role in roles:
        if role in shared:
            continue
        count, width, cpus, on = roles[role]
        seats[role] = [Seat(len(bundles) + i, None) for i in range(count)]
        bundles += [_need(role, cpus=cpus, gpus=width if device == "cuda" else 0, on=on)] * count
    return Layout(bundles, seats, frozenset(shared))


def _need(role: str, *, cpus: float, gpus: int = 0, memory_gb: float = 0, on: str | None) -> Need:
    custom, labels = node_group(on)
    asked = {"CPU": cpus, "GPU": gpus, "memory": memory_gb * GIB, **custom}
    resources = {kind: amount for kind, amount in asked.items() if amount}
    return Need(role=role, resources=resources, labels=labels)


def coordinator_need(recipe: Recipe) -> Need:
    """What the coordinator's actor reserves, apart from the group."""
    place = recipe.placement
    return _need(
        "coordinator",
        cpus=place.coordinator_cpus,
        memory_gb=place.coordinator_memory_gb,
        on=place.coordinator_on,
    )


def coordinator_options(recipe: Recipe) -> dict[str, Any]:
    """Scheduling options of the coordinator's actor."""
    need = coordinator_need(recipe)
    custom = {k: v for k, v in need.resources.items() if k not in ("CPU", "memory")}
    options: dict[str, Any] = {"num_cpus": need.resources.get("CPU", 0)}
    if "memory" in need.resources:
        options["memory"] = int(need.resources["memory"])
    if custom:
        options["resources"] = custom
    if need.labels:
        options["label_selector"] = dict(need.labels)
    return options


# --- what is there --------------------------------------------------------------------------------


def living_nodes(free: dict[str, dict[str, float]] | None = None) -> list[Node]:
    """The nodes of the cluster this process has joined, with all they have, or with this of it.

    Args:
        free: by id of the node.
    """
    return [
        Node(
            name=_node_name(node),
            resources=node["Resources"] if free is None else free.get(node["NodeID"], {}),
            labels={k: v for k, v in node["Labels"].items() if k != "ray.io/node-id"},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _node_name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} {node['NodeID'][:6]}"


def check_fits(recipe: Recipe, device: str, wanted: tuple[str, ...]) -> None:
    """Refuses a cluster that could never hold the coordinator and these roles, free or not.

    Raises:
        PlacementError: what is in the way, what is asked, what is there, and what to change.
    """
    if problem := _misfit(recipe, lay_out(recipe, device, wanted).bundles):
        raise PlacementError(problem)


def _misfit(recipe: Recipe, bundles: list[Need]) -> str | None:
    nodes, beside = living_nodes(), [coordinator_need(recipe)]
    strategy = recipe.placement.strategy
    if can_hold(bundles, nodes, strategy=strategy, beside=beside):
        return None
    reasons = "; ".join(why_not(bundles, nodes, strategy=strategy, beside=beside))
    lines = [f"the cluster is too small: {reasons}", table(bundles, nodes, beside=beside)]
    if not recipe.placement.wait_for_nodes:
        lines.append("  (placement.wait_for_nodes=true waits for more nodes to join)")
    return "\n".join(lines)


def holders() -> str:
    """Where resources are in use and which placement groups hold them, for the person waiting."""
    # The only per-node figure of what is free; ray.util has none in 2.60.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    # Ray gives both in changing order; the same state is told in the same words.
    groups = sorted(
        (g for g in placement_group_table().values() if g["state"] == "CREATED"),
        key=lambda group: group["name"],
    )
    told = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        total, left = node["Resources"], free.get(node["NodeID"], {})
        busy = {
            kind: f"{kind} {left.get(kind, 0):g} of {total[kind]:g} free"
            for kind in ("CPU", "GPU")
            if kind in total and left.get(kind, 0) < total[kind] - 1e-6
        }
        if not busy:
            continue
        by_group = []
        unnamed = {kind: total[kind] - left.get(kind, 0) for kind in busy}
        for group in groups:
            here = [
                group["bundles"][b]
                for b, node_id in group["bundles_to_node_id"].items()
                if node_id == node["NodeID"]
            ]
            held = {kind: sum(b.get(kind, 0) for b in here) for kind in busy}
            for kind, amount in held.items():
                unnamed[kind] -= amount
            if any(held.values()):
                by_group.append(f"{group['name'] or 'a placement group'} ({_listed(held)})")
        if any(amount > 1e-3 for amount in unnamed.values()):
            by_group.append(f"other actors and tasks ({_listed(unnamed)})")
        told.append(f"{_node_name(node)}: {', '.join(busy.values())}, by {', '.join(by_group)}")
    return "; ".join(sorted(told))


def _room_now(bundles: list[Need], strategy: str) -> bool:
    """Whether all of it would fit into what is free at this moment."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return can_hold(bundles, living_nodes(free), strategy=strategy, beside=[])


def _waiting_for(recipe: Recipe, bundles: list[Need]) -> tuple[str, str]:
    """What keeps a run that the cluster can hold, and why."""
    busy = holders()
    if not busy or _room_now(bundles, recipe.placement.strategy):
        return "a process to start", "there is room"
    return "room", f"in use are: {busy}"


def _listed(amounts: dict[str, float]) -> str:
    return ", ".join(f"{kind} {amount:g}" for kind, amount in amounts.items() if amount > 1e-3)


def _await(
    what: str,
    recipe: Recipe,
    bundles: list[Need],
    *,
    ready: Callable[[float], bool],
    say: Callable[[str], None],
    stop: Callable[[], bool] | None = None,
) -> None:
    """Waits until resources are given, says what is waited for, and gives up where it is vain.

    Args:
        ready: waits so many seconds; whether it is done.

    Raises:
        PlacementError: there will be no room, or was none in time.
        Stopped: ``stop`` said so.
    """
    limit, began, told = recipe.run.start_timeout_s, time.monotonic(), ""
    while not ready(min(POLL_S, limit)):
        if stop is not None and stop():
            raise Stopped(f"{what}: stopped while waiting for room")
        waited = time.monotonic() - began
        misfit = _misfit(recipe, bundles)
        if misfit and not recipe.placement.wait_for_nodes:
            raise PlacementError(misfit)
        lack, why = ("room", misfit) if misfit else _waiting_for(recipe, bundles)
        if waited > limit:
            nothing = "no room" if lack == "room" else "no process started"
            raise PlacementError(f"{what}: {nothing} in run.start_timeout_s={limit:g} s; {why}")
        state = f"{what}: waiting for {lack}, up to {limit:g} s; {why.splitlines()[0]}"
        if state != told and (misfit or waited > PATIENCE_S):
            say(state)
            told = state


def start_coordinator(
    cls: type, recipe: Recipe, *, say: Callable[[str], None], given_up: Callable[[], bool]
) -> Any | None:
    """The coordinator's actor, once it has its place; None if given up before.

    Args:
        given_up: asked while waiting for the place.

    Raises:
        PlacementError: the cluster is too small for the run, or gave no room in time.
    """
    device = resolve_device(recipe)
    bundles = lay_out(recipe, device, roles_of(recipe)).bundles
    if (problem := _misfit(recipe, bundles)) and not recipe.placement.wait_for_nodes:
        raise PlacementError(problem)
    actor = ray.remote(cls).options(max_concurrency=4, **coordinator_options(recipe)).remote()
    answer = actor.progress.remote(0)

    def ready(seconds: float) -> bool:
        return given_up() or bool(ray.wait([answer], timeout=seconds)[0])

    try:
        _await("the coordinator", recipe, bundles, ready=ready, say=say)
    except PlacementError:
        ray.kill(actor)
        raise
    if given_up():
        ray.kill(actor)
        return None
    return actor


# --- the group ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """One actor's place: scheduling options for Ray, and GPUs by index when roles share them."""

    options: dict[str, Any]
    gpus: list[int] | None


class Placement:
    """Reserves what the recipe asks for, all of it or nothing."""

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        wanted: tuple[str, ...],
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """
        Args:
            stop: asked while waiting for room; True ends it.

        Raises:
            PlacementError: the cluster is too small, at once; or gave no room in time.
            Stopped: ``stop`` said so; nothing is reserved.
        """
        self._recipe, self._device = recipe, device
        self._layout = lay_out(recipe, device, wanted)
        bundles = self._layout.bundles
        misfit = _misfit(recipe, bundles)
        if misfit and not recipe.placement.wait_for_nodes:
            raise PlacementError(misfit)
        labels = [dict(need.labels) for need in bundles]
        self._group = placement_group(
            # A bundle must ask something: one byte, where the role asks nothing.
            [dict(need.resources) or {"memory": 1} for need in bundles],
            strategy=recipe.placement.strategy.upper(),
            name=f"{GROUP_PREFIX}{recipe.run.name}-{uuid.uuid4().hex[:6]}",
            bundle_label_selector=labels if any(labels) else None,
        )
        try:
            _await("the actors", recipe, bundles, ready=self._group.wait, say=say, stop=stop)
            self._gpu_ids = self._ask_gpu_ids() if self._layout.shared else {}
        except BaseException:
            self.release()
            raise
        say(f"places: {self._where()}")

    def _where(self) -> str:
        """Roles by node, for the log."""
        names = {node["NodeID"]: _node_name(node) for node in ray.nodes()}
        stands = placement_group_table(self._group)["bundles_to_node_id"]
        by_node: dict[str, list[str]] = {}
        for role, seats in self._layout.seats.items():
            for i, seat in enumerate(seats):
                by_node.setdefault(names[stands[seat.bundle]], []).append(f"{role} {i}")
        return "; ".join(f"{', '.join(who)} on {name}" for name, who in by_node.items())

    def _ask_gpu_ids(self) -> dict[int, list[int]]:
        """Physical indices of the GPUs of each shared bundle."""

        @ray.remote(num_cpus=0)
        def mine() -> list[int]:
            return [int(i) for i in ray.get_gpu_ids()]

        shared = sorted({s.bundle for r in self._layout.shared for s in self._layout.seats[r]})
        refs = [
            mine.options(
                num_gpus=self._layout.bundles[b].resources["GPU"],
                scheduling_strategy=self._strategy(b),
            ).remote()
            for b in shared
        ]
        return dict(zip(shared, gather("placement", "naming GPUs", refs, 60.0), strict=True))

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def slots(self, role: str) -> list[Slot]:
        """Where the actors of a role go."""
        shared = self.shares(role)
        threads = str(self._recipe.placement.threads)
        env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        if self._device == "cuda":
            env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if shared else {}
        found = []
        for seat in self._layout.seats[role]:
            resources = self._layout.bundles[seat.bundle].resources
            options = {
                "num_cpus": 0 if shared else resources.get("CPU", 0),
                "num_gpus": 0 if shared else resources.get("GPU", 0),
                "scheduling_strategy": self._strategy(seat.bundle),
                "runtime_env": {"env_vars": env},
            }
            gpus = [self._gpu_ids[seat.bundle][g] for g in seat.gpus] if seat.gpus else None
            found.append(Slot(options, gpus))
        return found

    def wait_for(
        self, what: str, ready: Callable[[float], bool], say: Callable[[str], None]
    ) -> None:
        """Waits for actors to get their place; a cluster that lost a node may have none.

        Args:
            ready: waits so many seconds; whether they have it.

        Raises:
            PlacementError: what is missing.
        """
        _await(what, self._recipe, self._layout.bundles, ready=ready, say=say)

    def shares(self, role: str) -> bool:
        """Whether the role takes turns on GPUs with others."""
        return role in self._layout.shared

    def release(self) -> None:
        """Gives everything back."""
        ray.util.remove_placement_group(self._group)
