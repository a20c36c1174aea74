"""The rollout workers as the receivers of new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rock_opd.actors.waiting import Failure, Watch


@dataclass(frozen=True, kw_only=True)
class SyncRoute:
    """How weights reach the rollout workers."""

    device: str
    """cpu: buckets through Ray; cuda: vLLM's own transfer, GPU to GPU."""
    dtype: str
    """The rollout engines'."""
    tensor_parallel: int
    """GPUs of one rollout engine."""
    ipc: bool
    """Student ranks and rollout engines share GPUs."""


class Receivers:
    """The rollout workers of one weight sync, as rank 0 sees them.

    Who is lost or refuses is left out of the rest, and told of in the end: the student ranks gather
    together, and must do so to the end whatever happens to a worker.
    """

    def __init__(
        self, workers: Mapping[int, Any], version: int, limit_s: float, watch: Watch
    ) -> None:
        self._workers, self._version = dict(workers), version
        self._limit_s, self._watch = limit_s, watch
        self.lost: dict[int, Failure] = {}
        self._refused: dict[int, Failure] = {}

    def ask(self, what: str, call: Callable[[Any], Any]) -> dict[int, Any]:
        """The answers of those who gave one."""
        from rock_opd.actors.waiting import Watch, collect

        processes = {i: self._watch.processes[i] for i in self._workers}
        answers, failures = collect(
            "rollout worker",
            f"weight sync of v{self._version}, {what}",
            {i: call(worker) for i, worker in self._workers.items()},
            self._limit_s,
            watch=Watch(stall_s=self._watch.stall_s, processes=processes),
            independent=True,
        )
        for i, failure in failures.items():
            (self.lost if failure.lost else self._refused)[i] = failure
        self._workers = {i: w for i, w in self._workers.items() if i in answers}
        return answers

    def check(self, *, all_here: bool = False) -> None:
        """Raises what a worker answered with in place of an answer.

        Args:
            all_here: also raise when one was lost.
        """
        from rock_opd.actors.waiting import first_cause

        failures = self._refused | (self.lost if all_here else {})
        if failures:
            raise first_cause(failures)
