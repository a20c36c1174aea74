"""verl's folder of checkpoints, made of ours by hard links: nothing is written a second time.

``<default_local_dir>/global_step_N/actor/`` holds the files of the run's sealed checkpoint of that
step (``rock_opd/checkpoints/step_N/``, see ``rock_opd.checkpoint``) and ``huggingface/``: the
model's config and tokenizer, and its weights where ``checkpoint.save_contents`` has ``hf_model``.
``latest_checkpointed_iteration.txt`` says the newest. A run goes on from either place.

Refuses to go on from a checkpoint of another trainer, and to write one run over another.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from rock_opd.checkpoint import COMPLETE, flaw, list_checkpoints
from rock_opd.config import Recipe
from rock_opd.durable import replace_folder, storing, write_text
from rock_opd.errors import ConfigError, DataError
from rock_opd.mirror_store import holds_run
from rock_opd.recipe_file import recipe_yaml
from rock_opd.runlock import claim

TRACKER = "latest_checkpointed_iteration.txt"
HUGGINGFACE = "huggingface"


class StepFolders:
    """The ``global_step_N`` of one run; used from one thread."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._run_dir = recipe, recipe.run_dir
        self._root = Path(recipe.run.dir)
        self._published: set[int] = set()

    def publish(self, *, final: bool = False) -> list[tuple[int, Path]]:
        """Makes the folders of checkpoints that became whole, removes those the run has pruned.

        Args:
            final: nothing more is being written: a checkpoint whose weights for ``huggingface/``
                are not there will not get them any more.

        Returns:
            Step and folder of those that are new, oldest first.

        Raises:
            StorageError: they could not be made.
        """
        sealed = dict(list_checkpoints(self._run_dir))
        new: list[tuple[int, Path]] = []
        for step, checkpoint in sealed.items():
            folder = self._root / f"global_step_{step}"
            if step in self._published:
                continue
            if not _is_made_of(folder, checkpoint):
                weights = self._weights(step)
                if weights is None and not final and self._weights_are_due(step):
                    continue
                try:
                    self._make(folder, checkpoint, weights)
                except _Pruned:
                    continue
                new.append((step, folder))
            self._published.add(step)
        for step in self._published - sealed.keys():
            shutil.rmtree(self._root / f"global_step_{step}", ignore_errors=True)
            self._published.discard(step)
        if new:
            write_text(self._root / TRACKER, str(max(self._published)))
        return new

    def _weights_are_due(self, step: int) -> bool:
        every = self._recipe.checkpoint.save_hf_every
        return every > 0 and step % every == 0

    def _weights(self, step: int) -> Path | None:
        """The student of this step as a model folder, where there is one and it is wanted."""
        every = self._recipe.checkpoint.save_hf_every
        if not every:
            return None
        copy = self._run_dir / "hf" / f"step_{step:06d}"
        if copy.is_dir():
            return copy
        # The last step's may be due to nobody: the finished run's own model is the same.
        model, newest = self._run_dir / "model", list_checkpoints(self._run_dir)[-1][0]
        return model if step == newest and model.is_dir() else None

    def _make(self, folder: Path, checkpoint: Path, weights: Path | None) -> None:
        partial = folder.with_name(folder.name + ".partial")
        with storing("checkpoint", folder):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                _link_files(checkpoint, partial / "actor")
                if weights is not None:
                    _link_files(weights, partial / "actor" / HUGGINGFACE)
            except FileNotFoundError:
                raise _Pruned from None
            # One that was renamed under our hands may have looked empty.
            if not all(source.is_dir() for source in (checkpoint, weights) if source):
                raise _Pruned
            if weights is None:
                _write_card(self._recipe.student.model, partial / "actor" / HUGGINGFACE)
            replace_folder(partial, folder)


class _Pruned(Exception):
    """The run removed it while it was read."""


def _is_made_of(folder: Path, checkpoint: Path) -> bool:
    """Whether it is whole and holds the same files; links to them are not read."""
    made, source = folder / "actor" / COMPLETE, checkpoint / COMPLETE
    if not made.is_file() or made.samefile(source):
        return made.is_file()
    step = int(folder.name.removeprefix("global_step_"))
    return made.read_bytes() == source.read_bytes() and flaw(made.parent, step) is None


def _link_files(source: Path, target: Path) -> None:
    """Every file of a folder under another name, copied where the file system has no links."""
    for file in sorted(source.rglob("*")):
        if file.is_dir():
            continue
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, place)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(file, place)


def _write_card(model: str, folder: Path) -> None:
    """Config and tokenizer of a model, without its weights."""
    from transformers import AutoConfig

    from rock_opd.engines.model_folder import ModelFolder

    folder.mkdir(parents=True)
    ModelFolder(folder, num_shards=1).finish(AutoConfig.from_pretrained(model), model)


# --- where to go on from --------------------------------------------------------------------------


def settle_resume(recipe: Recipe, *, mode: str, path: str | None) -> Recipe:
    """Brings the run's folder to where verl's ``resume_mode`` wants it, and says whether to resume.

    ``auto`` goes on from the run's newest checkpoint, else from the folder that
    ``latest_checkpointed_iteration.txt`` names, else starts. ``disable`` starts; ``resume_path``
    goes on from that ``global_step_N``, of this run or of another. A run that is started over is
    moved aside (``rock_opd.1``), never written over.

    Args:
        path: ``trainer.resume_from_path``.

    Raises:
        ConfigError: another process has the run; nothing to go on from where something was named;
            or a checkpoint of another trainer.
        DataError: what was named is damaged; nothing was changed.
    """
    run_dir, root = recipe.run_dir, Path(recipe.run.dir)
    lock = claim(run_dir)
    if mode == "resume_path":
        if not path:
            raise ConfigError("verl config: trainer.resume_mode=resume_path needs resume_from_path")
        _restore(recipe, Path(path).expanduser().resolve(), "trainer.resume_from_path")
        return _resumed(recipe)
    mirrored = recipe.run.mirror is not None and holds_run(recipe)
    if mode == "auto" and (list_checkpoints(run_dir) or mirrored):
        return _resumed(recipe)
    tracker = root / TRACKER
    if mode == "auto" and tracker.is_file():
        step = tracker.read_text(encoding="utf-8").strip()
        _restore(recipe, root / f"global_step_{step}", str(tracker))
        return _resumed(recipe)
    if (run_dir / "config.yaml").exists():
        lock.release()
        _move_aside(run_dir)
    return recipe


def _resumed(recipe: Recipe) -> Recipe:
    return replace(recipe, resume=True)


def _restore(recipe: Recipe, folder: Path, said_by: str) -> None:
    """Makes the checkpoint in a ``global_step_N`` the newest of the run.

    Newer ones leave the run; their ``global_step_N`` stay until the run comes to them again.
    """
    match = re.fullmatch(r"global_step_(\d+)", folder.name)
    if match is None:
        raise ConfigError(f"{said_by}: expected a folder named global_step_N, got {folder}")
    sealed = folder / "actor" / COMPLETE
    if not sealed.is_file():
        what = "no such folder" if not folder.is_dir() else f"no {sealed.relative_to(folder)} in it"
        raise ConfigError(
            f"{said_by}: {folder} is no checkpoint of rock_opd ({what}); one of another trainer "
            "cannot be gone on from: set trainer.resume_mode=disable, or actor_rollout_ref.model."
            "path to its huggingface folder"
        )
    step, run_dir = int(match[1]), recipe.run_dir
    if (why := flaw(folder / "actor", step)) is not None:
        raise DataError(
            f"{said_by}: {folder} must not be gone on from: {why}; name an older one by trainer."
            "resume_mode=resume_path and trainer.resume_from_path"
        )
    StepFolders(recipe).publish(final=True)  # none of the newer ones is lost
    target = run_dir / "checkpoints" / f"step_{step:06d}"
    with storing("checkpoint", target):
        if not (target / COMPLETE).is_file() or not _is_made_of(folder, target):
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _link_files(folder / "actor", partial)
            shutil.rmtree(partial / HUGGINGFACE)
            replace_folder(partial, target)
        for newer, old in list_checkpoints(run_dir):
            if newer > step:
                shutil.rmtree(old)
        if not (run_dir / "config.yaml").exists():
            write_text(run_dir / "config.yaml", recipe_yaml(recipe))
        write_text(Path(recipe.run.dir) / TRACKER, str(step))


def _move_aside(run_dir: Path) -> None:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    with storing("the run before", aside):
        os.replace(run_dir, aside)
