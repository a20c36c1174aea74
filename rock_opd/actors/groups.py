"""Roles as groups: fan-out with a time limit. What the coordinator sees of Ray; ``starting.py``
makes them.

A group's methods take and return plain records; no handle or reference leaves this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rock_opd.actors.fleet import Fleet, Limits, Replacement
from rock_opd.actors.placement import Placement
from rock_opd.actors.processes import Process
from rock_opd.actors.receivers import SyncRoute
from rock_opd.actors.waiting import Failure, Watch, gather
from rock_opd.core.batching import Deal
from rock_opd.errors import RoleError
from rock_opd.types import Rollout, SampleRequest, StepResult, TeacherScores, TrainBatch

if TYPE_CHECKING:
    from rock_opd.core.gradients import TypeGradients
    from rock_opd.durable import FileFacts
    from rock_opd.engines.gradient_rows import GradientMemory


def _chunks(items: list[Any], num: int) -> list[list[Any]]:
    """Contiguous, sizes differing by at most one; some may be empty."""
    base, extra = divmod(len(items), num)
    ends = [i * base + min(i, extra) for i in range(num + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


class Rollouts:
    """The rollout workers: they sample from the student. Who is lost is replaced and brought to the
    trainer's weights before it samples."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.version = 0
        """Of the weights they were brought to last."""
        self.catch_up: Callable[[], None] | None = None
        """Sends those weights again to workers that were started since."""

    @property
    def handles(self) -> list[Any]:
        return self.fleet.handles

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]:
        """One rollout per request, in order."""

        def ask(part: list[SampleRequest]) -> Callable[[Any], Any]:
            return lambda handle: handle.generate.remote(
                part, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens
            )

        parts = _chunks(requests, len(self.handles))
        answers = self.fleet.each(
            f"generate with weights v{self.version}",
            {i: ask(part) for i, part in enumerate(parts) if part},
            before=self._refresh,
        )
        return [r for i in sorted(answers) for r in answers[i]]

    def _refresh(self) -> None:
        if self.version == 0:  # as the model on disk is
            self.fleet.fresh.clear()
        if self.fleet.fresh and self.catch_up is not None:
            self.catch_up()

    def bring_to(
        self, version: int, push: Callable[[list[int]], dict[int, Failure]], indices: list[int]
    ) -> None:
        """Has this version pushed to workers; to new ones in the place of those lost meanwhile.

        Args:
            push: sends it to these workers; returns those lost on the way.
        """
        self.version = version
        while indices:
            lost = push(indices)
            self.fleet.fresh.difference_update(i for i in indices if i not in lost)
            self.fleet.replace(lost, f"weight sync of v{version}")
            indices = sorted(lost)


class Teachers:
    """The teacher replicas: they score now and hand over rows later. Who is lost while scoring is
    replaced; rows that others have parked stay."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @property
    def handles(self) -> list[Any]:
        return self.fleet.handles

    def score(self, deal: Deal, rollouts: list[Rollout]) -> list[TeacherScores]:
        """Scalars of every rollout, in order; each is scored by the replica the deal names."""

        def ask(lot: list[int]) -> Callable[[Any], Any]:
            return lambda handle: handle.score.remote([rollouts[i] for i in lot])

        lots = [list(deal.for_teacher(i)) for i in range(len(self.handles))]
        parts = self.fleet.each("score", {i: ask(lot) for i, lot in enumerate(lots)})
        by_idx = {i: s for t, lot in enumerate(lots) for i, s in zip(lot, parts[t], strict=True)}
        return [by_idx[i] for i in range(len(rollouts))]

    def clear(self) -> int:
        """Ends the step: drops unfetched rows; returns the tokens prefilled twice."""
        return sum(self.fleet.tell("clear", lambda handle: handle.clear.remote()).values())


class Students:
    """The DeepSpeed ranks: every method is collective."""

    def __init__(
        self,
        handles: list[Any],
        processes: dict[int, Process],
        teachers: Teachers,
        route: SyncRoute,
        limits: Limits,
    ) -> None:
        """
        Args:
            processes: of the ranks, by rank.
        """
        self._handles, self.processes, self._teachers = handles, processes, teachers
        self._route, self._limits = route, limits
        self._timeout_s = limits.phase_s
        self._pushed: tuple[int, int] | None = None

    def _gather(self, phase: str, refs: list[Any]) -> list[Any]:
        """One answer of every rank. A teacher that stands still counts too: ranks wait for its
        rows."""
        watch = Watch(
            stall_s=self._limits.stall_s,
            processes=self.processes,
            others=list(self._teachers.fleet.processes.values()),
        )
        return gather("student rank", phase, refs, self._timeout_s, watch=watch)

    def each(self, phase: str, call: Callable[[Any], Any]) -> list[Any]:
        """The same call to every rank."""
        return self._gather(phase, [call(handle) for handle in self._handles])

    def train_step(
        self, batches: list[list[TrainBatch]], *, total_weight: float, mask_version: int
    ) -> list[StepResult]:
        """One update; ``batches`` by rank, the same number of micro-batches for each."""
        refs = [
            h.train_step.remote(
                part,
                self._teachers.handles,
                total_weight=total_weight,
                mask_version=mask_version,
                timeout_s=self._timeout_s,
            )
            for h, part in zip(self._handles, batches, strict=True)
        ]
        results = self._gather("train", refs)
        applied = sorted({r.mask_version for r in results})
        if applied != [mask_version]:
            raise RoleError(
                f"student ranks trained under freeze masks {applied}, the coordinator sent "
                f"v{mask_version}"
            )
        return results

    def measure(
        self, batches: list[list[TrainBatch]], *, entropy: bool = False
    ) -> list[StepResult]:
        """Forward only: the same numbers (and the student's entropy, if asked), nothing moves."""
        refs = [
            h.measure.remote(
                part, self._teachers.handles, entropy=entropy, timeout_s=self._timeout_s
            )
            for h, part in zip(self._handles, batches, strict=True)
        ]
        return self._gather("measure", refs)

    def peak_memory(self) -> list[tuple[int, int]]:
        """Bytes each rank has held at most: of host memory, and of its GPU (0 without one)."""
        return self.each("peak memory", lambda h: h.peak_memory.remote())

    def start_rows(self, num_rows: list[int]) -> None:
        """Every rank makes room for so many rows, to be kept for ``type_gradients``."""
        refs = [h.start_rows.remote(num) for h, num in zip(self._handles, num_rows, strict=True)]
        self._gather("start rows", refs)

    def keep_rows(self, batches: list[list[TrainBatch]]) -> None:
        """Keeps the student's and the teacher's hidden states of the batches' rows."""
        refs = [
            h.keep_rows.remote(part, self._teachers.handles, timeout_s=self._timeout_s)
            for h, part in zip(self._handles, batches, strict=True)
        ]
        self._gather("keep rows", refs)

    def type_gradients(
        self, track: Callable[[int, int], None]
    ) -> tuple[TypeGradients, list[GradientMemory]]:
        """Gradients of the types of all rows kept, and what each rank held.

        Args:
            track: told how many blocks are done, of how many; the time limit is each block's.
        """

        num_steps = self.each("begin gradients", lambda h: h.begin_gradients.remote())[0]
        for i in range(num_steps):
            self.each("gradients", lambda h, i=i: h.gradient_step.remote(i))
            track(i + 1, num_steps)
        results = self.each("gradients", lambda h: h.type_gradients.remote())
        return results[0][0], [memory for _, memory in results]

    def push_weights(self, rollouts: Rollouts, *, version: int, bucket_bytes: int) -> None:
        """Brings every rollout worker to this version; returns once each has proved it. A worker
        lost on the way is replaced, and gets the whole version."""
        self._pushed = (version, bucket_bytes)
        everyone = list(range(len(rollouts.handles)))
        rollouts.bring_to(version, lambda indices: self._push(rollouts, indices), everyone)

    def push_again(self, rollouts: Rollouts) -> None:
        """Brings workers that were started since to the version pushed last."""
        if self._pushed is not None and rollouts.fleet.fresh:
            fresh = sorted(rollouts.fleet.fresh)
            rollouts.bring_to(self._pushed[0], lambda i: self._push(rollouts, i), fresh)

    def _push(self, rollouts: Rollouts, indices: list[int]) -> dict[int, Failure]:
        """Sends the trainer's weights; returns the workers that were lost on the way."""
        version, bucket_bytes = self._pushed
        if self._route.device == "cuda":  # one group of GPUs: all or none
            indices = list(range(len(rollouts.handles)))
        workers = {i: rollouts.handles[i] for i in indices}
        refs = [
            h.push_weights.remote(
                workers,
                self._route,
                version=version,
                bucket_bytes=bucket_bytes,
                timeout_s=self._timeout_s,
                watch=rollouts.fleet.watch(indices),
            )
            for h in self._handles
        ]
        held, lost = gather(
            "student rank",
            f"weight sync of v{version}",
            refs,
            self._timeout_s,
            watch=Watch(stall_s=self._limits.stall_s, processes=self.processes),
        )[0]
        wrong = {i: v for i, v in held.items() if v != version}
        if wrong or held.keys() | lost.keys() != set(indices):
            raise RoleError(
                f"weight sync: rollout workers hold versions {held}, the trainer published "
                f"v{version}"
            )
        return lost

    def save_hf(self, path: Path, *, background: bool = False) -> None:
        """Written when it returns, or in the background: ``written`` tells when."""
        self.each("save model", lambda h: h.save_hf.remote(path, background=background))

    def save_state(self, path: Path, *, background: bool = False) -> None:
        """As ``save_hf``."""
        self.each("save state", lambda h: h.save_state.remote(path, background=background))

    def written(self, path: Path) -> dict[str, FileFacts] | None:
        """What all ranks wrote of the latest save to ``path``, by file name; None: one still
        writes."""
        parts = self.each("save", lambda h: h.written.remote(path))
        if any(part is None for part in parts):
            return None
        return {name: facts for part in parts for name, facts in part.items()}

    def load_state(self, path: Path) -> None:
        self.each("load state", lambda h: h.load_state.remote(path))


@dataclass
class Roles:
    """Everything the loop talks to."""

    rollouts: Rollouts | None
    teachers: Teachers
    students: Students
    device: str
    _placement: Placement
    _sharers: dict[str, Callable[[str], object]]
    """Roles that take turns on GPUs; each function sends its role to ``sleep`` or ``wake``."""
    _awake: set[str]
    replaced: Callable[[Replacement], None]
    """Told of every actor that took a lost one's place."""

    def __post_init__(self) -> None:
        if self.rollouts is not None:
            self.rollouts.catch_up = self._catch_up

    def turn(self, *roles: str) -> None:
        """Gives the shared GPUs to these roles; without colocation there is nothing to do."""
        wanted = {role for role in roles if role in self._sharers}
        if not wanted:
            return
        for other in sorted(self._awake - wanted):
            self._sharers[other]("sleep")
        for role in sorted(wanted - self._awake):
            self._sharers[role]("wake")
        self._awake = wanted

    def _catch_up(self) -> None:
        """The trainer's weights for rollout workers that took the place of lost ones."""
        awake = self._awake
        self.turn("student", "rollout")
        self.students.push_again(self.rollouts)
        self.turn(*awake)

    def stop(self) -> None:
        """Ends every actor and gives the resources back."""
        for handle in [
            *(self.rollouts.handles if self.rollouts else []),
            *self.teachers.handles,
            *self.students._handles,
        ]:
            ray.kill(handle)
        self._placement.release()
