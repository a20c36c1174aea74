"""From a recipe to a finished run: the coordinator's actor, and the process that starts it and
watches.

The coordinator runs as an actor of the cluster, not in the driver: the driver of a submitted job
sits on the head node, where running out of memory would take the cluster's control down.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rock_opd.checkpoint import list_checkpoints
from rock_opd.config import Recipe, resolve_dtype
from rock_opd.coordinator import Coordinator, Progress
from rock_opd.data import PromptSet
from rock_opd.errors import ConfigError, PlacementError, RockOPDError, RoleError
from rock_opd.inputs import Inputs, load_inputs
from rock_opd.models import stop_token_ids

POLL_S = 0.3
START_ATTEMPTS = 3
"""Starting a cluster of our own: Ray itself gives a raylet 30 s, which a busy machine exceeds."""


def num_steps(recipe: Recipe, prompts: PromptSet, *, dtype: str) -> int:
    """Steps of the run: as asked (for this dtype of the student), or whole passes over the
    prompts."""
    per_epoch = prompts.steps_per_epoch(recipe.rollout.prompts_per_step)
    if dtype == "float32" and recipe.run.num_steps_float32:
        return recipe.run.num_steps_float32
    return recipe.run.num_steps or recipe.run.num_epochs * per_epoch


def skipped_lines(prompts: PromptSet) -> list[str]:
    """What was left out of the prompts, for the person watching: counts, and the first
    offenders."""
    if not prompts.skipped:
        return []
    counts = ", ".join(f"{num} {reason}" for reason, num in prompts.skipped.items())
    return [f"{len(prompts.prompts)} prompts; left out: {counts}", *prompts.offenders]


class CoordinatorActor:
    """The coordinator in a process of its own, with a thread for those who ask how it goes."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._progress = Progress()

    def run(self, recipe: Recipe, inputs: Inputs | None) -> dict[str, Any]:
        """The whole run; returns its summary.

        Args:
            inputs: what the driver has read already; None: read it here.
        """
        from rock_opd.actors.groups import start_roles
        from rock_opd.actors.placement import resolve_device

        inputs = inputs or load_inputs(recipe)
        for line in (*skipped_lines(inputs.prompts), *inputs.notices):
            self._progress.say(line)
        dtype = resolve_dtype(recipe.student.dtype, resolve_device(recipe))
        steps = num_steps(recipe, inputs.prompts, dtype=dtype)
        self._progress.say(f"{steps} steps, student in {dtype}")
        self._progress.phase = "starting"
        roles = start_roles(
            recipe,
            num_updates=steps,
            num_real_ids=inputs.num_real_ids,
            stop_token_ids=stop_token_ids(recipe.student.model),
            say=self._progress.say,
        )
        try:
            if self._stop.is_set():
                return {"finished": False, "num_steps": None}
            return Coordinator(
                recipe,
                inputs,
                roles,
                num_steps=steps,
                grader=partial(grade_in_task, timeout_s=recipe.run.phase_timeout_s),
                progress=self._progress,
                stop=self._stop,
            ).run()
        finally:
            roles.stop()

    def progress(self, seen: int) -> Progress:
        """Where the run stands; lines from number ``seen`` on."""
        return replace(self._progress, lines=self._progress.lines[seen:])

    def request_stop(self) -> None:
        """Ends the run after the step it is in."""
        self._stop.set()


def grade_in_task(answers: list[str], golds: list[str], *, timeout_s: float) -> list[bool]:
    """Grades in a process whose main thread is free: math-verify's time limits are alarms."""
    import ray

    from rock_opd.actors.waiting import gather
    from rock_opd.evaluate import grade

    task = ray.remote(grade).options(num_cpus=0).remote(answers, golds)
    return gather("grader", "evaluate", [task], timeout_s)[0]


def cluster_address(address: str | None) -> str | None:
    """The cluster to join: ``address``, or RAY_ADDRESS; None: start one on this machine."""
    return address or os.environ.get("RAY_ADDRESS") or None


def connect(address: str | None) -> None:
    """Joins the cluster at ``cluster_address(address)``, or starts one on this machine."""
    import ray

    address = cluster_address(address)
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster answers at '{address}': {str(error).splitlines()[0]}"
            ) from None
        return
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(address="local", include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray raises plain ones here, for a busy machine above all
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                raise PlacementError(
                    f"Ray did not start on this machine in {START_ATTEMPTS} attempts: "
                    f"{str(error).splitlines()[0]} Is it very busy, or out of memory?"
                ) from None


def train(
    recipe: Recipe,
    *,
    address: str | None,
    show: Callable[[Progress], None],
) -> dict[str, Any]:
    """Runs a recipe to its end, or until it is interrupted.

    The first Ctrl-C (or SIGTERM) ends the run after the step it is in and saves; the second
    abandons it.

    Raises:
        RockOPDError: as the run raised it.
        KeyboardInterrupt: on the second interruption.
    """
    import ray

    # With a cluster of our own the files are here: a wrong one is said before Ray starts.
    here = cluster_address(address) is None
    inputs = load_inputs(recipe) if here else None
    connect(address)
    asked = threading.Event()
    twice = threading.Event()

    def interrupted(signum: int, frame: Any) -> None:
        (twice if asked.is_set() else asked).set()

    previous = {s: signal.signal(s, interrupted) for s in (signal.SIGINT, signal.SIGTERM)}
    actor = ray.remote(CoordinatorActor).options(num_cpus=0, max_concurrency=4).remote()
    done = actor.run.remote(recipe, inputs)
    told, seen = False, 0
    try:
        while True:
            ready, _ = ray.wait([done], timeout=POLL_S)
            progress = _ask(actor, seen)
            if progress is not None:
                seen += len(progress.lines)
                show(progress)
            if ready:
                return _result(done)
            if twice.is_set():
                raise KeyboardInterrupt
            if asked.is_set() and not told:
                actor.request_stop.remote()
                told = True
                show(
                    Progress(
                        phase="stopping",
                        lines=["stopping after this step (once more to abandon it)"],
                    )
                )
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        ray.kill(actor)
        ray.shutdown()


def _ask(actor: Any, seen: int) -> Progress | None:
    import ray

    try:
        return ray.get(actor.progress.remote(seen), timeout=30)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
        return None


def _result(done: Any) -> dict[str, Any]:
    import ray

    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RockOPDError):
            raise error.cause from None
        raise RoleError(f"the coordinator failed:\n{error}") from None
    except ray.exceptions.RayActorError as error:
        raise RoleError(f"the coordinator died: {error}") from None


def anchor_paths(recipe: Recipe, base: Path) -> Recipe:
    """Paths of a recipe are meant from where the command was typed; actors run elsewhere.

    Only names that exist below ``base`` become absolute: a hub id stays one.
    """

    def anchored(path: str | None) -> str | None:
        return path if path is None or not (base / path).exists() else str((base / path).resolve())

    return replace(
        recipe,
        run=replace(recipe.run, dir=str((base / recipe.run.dir).resolve())),
        data=replace(recipe.data, prompts=anchored(recipe.data.prompts)),
        student=replace(
            recipe.student,
            model=anchored(recipe.student.model),
            from_run=anchored(recipe.student.from_run),
        ),
        teacher=replace(recipe.teacher, model=anchored(recipe.teacher.model)),
        policy=replace(
            recipe.policy,
            ids_file=anchored(recipe.policy.ids_file),
            guard_file=anchored(recipe.policy.guard_file),
        ),
        eval=replace(
            recipe.eval,
            heldout_prompts=anchored(recipe.eval.heldout_prompts),
            problems=anchored(recipe.eval.problems),
        ),
    )


def settle_run_dir(recipe: Recipe) -> Recipe:
    """Sees to it that one run is never written over another; may give this one the next free name.

    Raises:
        ConfigError: the folder holds a run, resume is off and ``run.on_existing`` is fail; or
        resume
            is on and there is none.
    """
    begun = (recipe.run_dir / "config.yaml").exists()
    if recipe.resume and not begun:
        raise ConfigError(
            f"resume=true, but {recipe.run_dir} holds no run; leave it out to start one"
        )
    if recipe.resume and not list_checkpoints(recipe.run_dir):
        raise ConfigError(
            f"resume=true, but the run in {recipe.run_dir} saved no whole checkpoint; remove the "
            "folder or choose another run.name to start over"
        )
    if recipe.resume or not begun:
        return recipe
    if recipe.run.on_existing == "fail":
        way = "go on with resume=true" if list_checkpoints(recipe.run_dir) else "remove the folder"
        raise ConfigError(
            f"{recipe.run_dir} already holds a run: {way}, or choose another run.name"
        )
    number = 2
    while (recipe.run_dir.with_name(f"{recipe.run.name}-{number}") / "config.yaml").exists():
        number += 1
    return replace(recipe, run=replace(recipe.run, name=f"{recipe.run.name}-{number}"))
