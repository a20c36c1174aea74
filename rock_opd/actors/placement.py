"""Where the actors of a run go: one placement group, all of it or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rock_opd.actors.waiting import gather
from rock_opd.config import Recipe
from rock_opd.errors import PlacementError


def resolve_device(recipe: Recipe) -> str:
    """cpu or cuda; ``auto`` is cuda where the cluster has GPUs."""
    if recipe.run.device != "auto":
        return recipe.run.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


@dataclass(frozen=True)
class Slot:
    """One actor's place: scheduling options for Ray, and GPUs by index when roles share them."""

    options: dict[str, Any]
    gpus: list[int] | None


class Placement:
    """Reserves what the recipe asks for, all of it or nothing."""

    def __init__(self, recipe: Recipe, device: str, wanted: tuple[str, ...]) -> None:
        self._recipe, self._device = recipe, device
        place = recipe.placement
        every = {
            "student": (recipe.student.num_ranks, 1, place.student_cpus),
            "rollout": (
                recipe.rollout.num_workers,
                recipe.rollout.tensor_parallel,
                place.rollout_cpus,
            ),
            "teacher": (
                recipe.teacher.num_replicas,
                recipe.teacher.tensor_parallel,
                place.teacher_cpus,
            ),
        }
        self._roles = {role: every[role] for role in wanted}
        self._pools = self._share_gpus()
        self._bundles: list[dict[str, float]] = []
        self._of: dict[str, list[list[int]]] = {}
        self._lay_bundles()
        self._check_fits()
        self._group = placement_group(self._bundles, strategy="PACK")
        limit = min(60.0, recipe.run.start_timeout_s)
        if not self._group.wait(timeout_seconds=limit):
            raise PlacementError(
                f"the cluster did not give the reserved resources in {limit:g} s\n{self._table()}"
            )
        self._gpu_ids = self._ask_gpu_ids() if "shared" in self._pools.values() else {}

    def _share_gpus(self) -> dict[str, str]:
        """Which roles draw their GPUs from the same pool; on CPU each has its own."""
        colocate = self._recipe.placement.colocate if self._device == "cuda" else "none"
        shared = {
            "all": set(self._roles),
            "teacher_rollout": {"teacher", "rollout"},
            "none": set(),
        }[colocate]
        return {role: "shared" if role in shared else role for role in self._roles}

    def _lay_bundles(self) -> None:
        for pool in dict.fromkeys(self._pools.values()):
            members = [r for r, p in self._pools.items() if p == pool]
            if pool == "shared":
                num = max(self._roles[r][0] * self._roles[r][1] for r in members)
                cpus = sum(self._roles[r][0] * self._roles[r][2] for r in members) / num
                base = len(self._bundles)
                self._bundles += [{"GPU": 1, "CPU": cpus} for _ in range(num)]
                for role in members:
                    count, width, _ = self._roles[role]
                    self._of[role] = [
                        [base + i * width + j for j in range(width)] for i in range(count)
                    ]
            else:
                for role in members:
                    count, width, cpus = self._roles[role]
                    self._of[role] = []
                    for _ in range(count):
                        self._of[role].append([len(self._bundles)])
                        self._bundles.append(
                            {"CPU": cpus, **({"GPU": width} if self._device == "cuda" else {})}
                        )
        self._bundles = [
            {k: v for k, v in bundle.items() if v} or {"CPU": 0.001} for bundle in self._bundles
        ]

    def _check_fits(self) -> None:
        have = ray.cluster_resources()
        for kind in ("GPU", "CPU"):
            if sum(b.get(kind, 0) for b in self._bundles) > have.get(kind, 0) + 1e-6:
                raise PlacementError(
                    f"the cluster is too small: {kind} asked "
                    f"{sum(b.get(kind, 0) for b in self._bundles):g}, "
                    f"there {have.get(kind, 0):g}. Lower placement.*_cpus, the number of actors, "
                    f"or add nodes.\n" + self._table()
                )

    def _table(self) -> str:
        rows = [f"  {'role':<8} {'actors':>6} {'CPU each':>9} {'GPU each':>9}"]
        for role, (count, width, cpus) in self._roles.items():
            rows.append(
                f"  {role:<8} {count:>6} {cpus:>9g} {width if self._device == 'cuda' else 0:>9}"
            )
        have = ray.cluster_resources()
        rows.append(
            f"  cluster: {have.get('CPU', 0):g} CPU, {have.get('GPU', 0):g} GPU, "
            f"{len(ray.nodes())} nodes"
        )
        return "\n".join(rows)

    def _ask_gpu_ids(self) -> dict[int, int]:
        """Physical index of the GPU of each one-GPU bundle of a shared pool."""

        @ray.remote(num_gpus=1, num_cpus=0)
        def mine() -> int:
            return int(ray.get_gpu_ids()[0])

        shared = sorted(
            {b for r, p in self._pools.items() if p == "shared" for bs in self._of[r] for b in bs}
        )
        refs = [mine.options(scheduling_strategy=self._strategy(b)).remote() for b in shared]
        return dict(zip(shared, gather("placement", "naming GPUs", refs, 60.0), strict=True))

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def slots(self, role: str) -> list[Slot]:
        """Where the actors of a role go."""
        _, width, _ = self._roles[role]
        shared = self.shares(role)
        threads = str(self._recipe.placement.threads)
        env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        if self._device == "cuda":
            env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if shared else {}
        found = []
        for bundles in self._of[role]:
            options = {
                "num_cpus": 0 if shared else self._bundles[bundles[0]].get("CPU", 0),
                "num_gpus": width if self._device == "cuda" and not shared else 0,
                "scheduling_strategy": self._strategy(bundles[0]),
                "runtime_env": {"env_vars": env},
            }
            found.append(Slot(options, [self._gpu_ids[b] for b in bundles] if shared else None))
        return found

    def shares(self, role: str) -> bool:
        """Whether the role takes turns on GPUs with others."""
        return self._pools[role] == "shared"

    def release(self) -> None:
        ray.util.remove_placement_group(self._group)
