"""What a run keeps on disk besides its log, and when: checkpoints, copies for serving, models, the
journal. ``saver.py`` writes; here stands what is due, what is told, and what a full disk means."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from rock_opd.checkpoint import list_checkpoints
from rock_opd.config import Recipe
from rock_opd.durable import replace_folder, storing
from rock_opd.errors import RockOPDError, StorageError
from rock_opd.journal import Journal
from rock_opd.mirror import Mirror, Pushed
from rock_opd.progress import Progress
from rock_opd.runlog import RunLog
from rock_opd.saver import Saved, Saver

Pack = Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]]
"""Gives a checkpoint's numbers and arrays, as ``checkpoint.pack_state`` does."""


class Keeper:
    """Keeps one run; used from the loop's thread."""

    def __init__(self, recipe: Recipe, roles: Any, progress: Progress, pack: Pack) -> None:
        self._recipe, self._roles, self._progress, self._pack = recipe, roles, progress, pack
        self._saver = Saver(
            recipe.run_dir,
            recipe.checkpoint,
            roles.students,
            timeout_s=recipe.run.phase_timeout_s,
        )
        self._mirror: Mirror | None = None
        self._telling = False
        self.saved_step = -1
        """Step of the newest checkpoint of this run, written or on its way."""
        self._whole_step = -1
        """Step of the newest one that is whole."""
        self._why: StorageError | None = None
        """What could not be stored last, where the recipe says to go on."""

    def open(self, *, resume_step: int | None, fingerprint: str) -> tuple[RunLog, Journal]:
        """The run's log and journal: new ones, or cut back to the step it goes on from.

        Args:
            fingerprint: of all that must be the same when a run goes on.

        Raises:
            StorageError: the folder cannot be used at all.
            ConfigError: there can be no mirror where the recipe wants it.
        """
        self._log = RunLog(self._recipe, resume_step=resume_step, on_error=self._cannot_store)
        for line in self._log.damaged:
            self._progress.say(line)
        self._journal = Journal(self._recipe.run_dir, fingerprint=fingerprint)
        if resume_step is None:
            self._journal.clear()
        if self._recipe.run.mirror is not None:
            self._mirror = mirror = Mirror(self._recipe, resume_step=resume_step)
            self._saver.spared = lambda: mirror.in_use
            mirror.wake(self._progress.step)
        return self._log, self._journal

    def goes_on_from(self, step: int) -> None:
        """Told of the checkpoint with which the run goes on."""
        self.saved_step = self._whole_step = step

    def save(self, step: int, *, checkpoint: bool = True, hf: bool = False) -> None:
        """Begins what is due; the round before must be on disk first."""
        if not hf and (not checkpoint or self.saved_step == step):
            return
        self.settle()
        self._progress.phase = "checkpoint"
        self._roles.turn("student")
        if checkpoint and self.saved_step != step:
            numbers, arrays = self._pack()
            with self.disk():
                self._saver.checkpoint(step, numbers=numbers, arrays=arrays)
                self.saved_step = step
        if hf:
            with self.disk():
                self._saver.hf(step)
        if not self._recipe.checkpoint.background:
            self.settle()

    def settle(self) -> None:
        """Waits until nothing is being written."""
        while self._saver.busy:
            self._progress.phase = "writing"
            with self.disk():
                self._tell(self._saver.wait())

    def save_last(self, step: int) -> None:
        """The checkpoint with which the run ends; one that was lost on its way is tried again."""
        self.save(step)
        self.settle()
        if self._whole_step != step:
            self.save(step)
            self.settle()
        self.close()

    def missing(self, step: int, *, model: bool) -> list[str]:
        """What a run that ends at this step should leave and does not, in words; its log apart.

        Args:
            model: what ``save_model`` said; True where none is due.
        """
        lost = [] if self._whole_step == step else [f"the checkpoint of step {step}"]
        return lost if model else [*lost, "model/"]

    def require_end(self, step: int, missing: list[str]) -> None:
        """``checkpoint.on_error=warn`` forgives what a later write mends; after the last one there
        is none.

        Args:
            missing: as ``missing`` gives it; files of the log that lack something come to it.

        Raises:
            StorageError: something is missing; says what, what is kept and how to go on.
        """
        if not (lost := missing + self._log.unwritten):
            return
        if self._whole_step < 0:
            kept, way = "no checkpoint is kept", "start over"
        else:
            kept, way = f"the checkpoint of step {self._whole_step} is kept", "go on from it"
        raise StorageError(
            f"the run ended after step {step}, and its folder {self._recipe.run_dir} lacks "
            f"{', '.join(lost)}: {self._why}; {kept}: make room and {way}"
            + (" with resume=true" if self._whole_step >= 0 else "")
        )

    def rescue(self) -> None:
        """Before the run breaks off for a reason that leaves the student ranks alive: what is
        being written gets its name."""
        with suppress(RockOPDError):
            while self._saver.busy:
                self._tell(self._saver.wait())

    def look(self) -> None:
        """Gives their names to what is whole by now; a write that failed is told here."""
        if self._mirror is not None and (pushed := self._mirror.poll()) is not None:
            self._tell_pushed(pushed, "it is tried again with the next checkpoint")
        if self._saver.busy:
            with self.disk():
                self._tell(self._saver.poll())

    def close(self) -> None:
        """Nothing may be saved after it."""
        if self._mirror is None:
            self._saver.close()

    def finish_mirror(self) -> None:
        """At the end, when all is on disk: waits until it is at the mirror too.

        Raises:
            StorageError: it is not, unless the recipe says to go on.
        """
        if self._mirror is None:
            return
        self._progress.phase = "mirror"
        try:
            self._mirror.finish(
                self._progress.step,
                timeout_s=self._recipe.run.phase_timeout_s,
                tell=lambda pushed: self._tell_pushed(pushed, "it is tried again"),
            )
        except StorageError as error:
            self._cannot_store(error)
        finally:
            for kind in ("checkpoint", "hf"):
                self._saver.prune(kind)  # what was spared
            self._saver.close()

    def save_model(self, name: str) -> bool:
        """The student as a model folder, in place of the one of that name when it is whole; whether
        it is."""
        final = self._recipe.run_dir / name
        partial = final.with_name(name + ".partial")
        self._roles.turn("student")
        with self.disk(), storing("model", final):
            shutil.rmtree(partial, ignore_errors=True)
            self._roles.students.save_hf(partial)
            replace_folder(partial, final)
            return True
        shutil.rmtree(partial, ignore_errors=True)  # it holds what is left of the disk
        return False

    @contextmanager
    def disk(self) -> Iterator[None]:
        """What cannot be written ends the run, or is told (``checkpoint.on_error``)."""
        try:
            yield
        except StorageError as error:
            self.saved_step = -1  # the last one may be among what failed: try again
            self._cannot_store(error)

    def _tell(self, saved: list[Saved]) -> None:
        for one in saved:
            self._log.event(
                one.kind,
                one.step,
                path=one.path.name,
                seconds=one.seconds,
                held_up_s=one.held_up_s,
            )
            if one.kind == "checkpoint":
                self._whole_step = one.step
                steps = [step for step, _ in list_checkpoints(self._recipe.run_dir)]
                # The newest may turn out damaged: the one before it needs its steps again.
                self._journal.prune(min(steps[-2:], default=0))

        if saved and self._mirror is not None:
            self._mirror.wake(self._progress.step)

    def _tell_pushed(self, pushed: Pushed, then: str) -> None:
        """A network that fails for a while ends no run: it is told, and counts at the end."""
        step = self._progress.step
        if pushed.error is not None:
            self._progress.say(f"step {step}: {pushed.error}; {then}")
            self._log.event("mirror", step, error=str(pushed.error))
        elif pushed.folders:
            self._log.event(
                "mirror",
                step,
                folders=pushed.folders,
                num_bytes=pushed.num_bytes,
                seconds=pushed.seconds,
            )

    def _cannot_store(self, error: StorageError) -> None:
        """
        Raises:
            StorageError: this one, unless the recipe says to go on.
        """
        if self._recipe.checkpoint.on_error == "stop":
            raise error
        self._why = error
        if self._telling:
            return  # this event's own line could not be written; it is kept and comes later
        self._telling = True
        step = self._progress.step
        self._progress.say(f"step {step}: {error}; going on (checkpoint.on_error=warn)")
        self._log.event("storage", step, error=str(error))
        self._telling = False
