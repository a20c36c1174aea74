"""From a recipe to a finished run: the coordinator's actor, and the process that starts it and
watches.

The coordinator runs as an actor of the cluster, not in the driver: the driver of a submitted job
sits on the head node, where running out of memory would take the cluster's control down.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rock_opd.checkpoint import list_checkpoints
from rock_opd.config import Recipe, resolve_dtype
from rock_opd.coordinator import Coordinator
from rock_opd.data import PromptSet, num_steps
from rock_opd.durable import in_bytes
from rock_opd.errors import ConfigError, PlacementError
from rock_opd.faultlog import Restart
from rock_opd.inputs import Inputs, load_inputs
from rock_opd.mirror import pull
from rock_opd.mirror_store import holds_run
from rock_opd.models import first_line, stop_token_ids, trust_code
from rock_opd.progress import Progress
from rock_opd.resume import goes_on_from, has_begun, require_begun
from rock_opd.runlock import RunTaken, claim
from rock_opd.runlog import write_atomic

if TYPE_CHECKING:
    from rock_opd.actors.processes import Process

SHARED_MEMORY, LITTLE_SHARED_MEMORY = Path("/dev/shm"), 1_000_000_000
START_ATTEMPTS = 3
"""Starting a cluster of our own: Ray itself gives a raylet 30 s, which a busy machine exceeds."""
CONNECT_S = 10.0
"""Longest time for a connection to the port of a cluster to join."""


def skipped_lines(prompts: PromptSet) -> list[str]:
    """What was left out of the prompts, for the person watching: counts, and the first
    offenders."""
    if not prompts.skipped:
        return []
    counts = ", ".join(f"{num} {reason}" for reason, num in prompts.skipped.items())
    return [f"{len(prompts.prompts)} prompts; left out: {counts}", *prompts.offenders]


def shared_memory_lines(folder: Path = SHARED_MEMORY) -> list[str]:
    """Told where shared memory is so small that Ray keeps its objects on the disk instead."""
    if not folder.is_dir():
        return []
    disk = shutil.disk_usage(folder)
    if disk.free >= LITTLE_SHARED_MEMORY:
        return []
    return [
        f"{folder} has {in_bytes(disk.free)} free of {in_bytes(disk.total)}, less than "
        f"{in_bytes(LITTLE_SHARED_MEMORY)}: Ray keeps what travels between roles in /tmp instead, "
        "slower; a container gets more by --shm-size"
    ]


class CoordinatorActor:
    """The coordinator in a process of its own, with a thread for those who ask how it goes."""

    def __init__(self) -> None:
        from rock_opd.actors.processes import this_process

        self._stop = threading.Event()
        self._progress = Progress(processes=(this_process("coordinator", 0),))

    def run(
        self, recipe: Recipe, inputs: Inputs | None, restarts: Sequence[Restart] = ()
    ) -> dict[str, Any]:
        """The whole run, or what is left of it; returns its summary.

        Args:
            inputs: what the driver has read already; None: read it here.
            restarts: what it has been through: after the first, it goes on from its newest whole
                checkpoint, or starts over where there is none.
        """
        from rock_opd.actors.placement import resolve_device
        from rock_opd.actors.starting import start_roles
        from rock_opd.actors.waiting import Stopped

        self._progress.on_phase = partial(write_phase, recipe.run_dir)
        trust_code(*recipe.trusted_models)
        inputs = inputs or load_inputs(recipe)
        if restarts:
            recipe = replace(recipe, resume=bool(list_checkpoints(recipe.run_dir)))
        else:
            for line in (
                *skipped_lines(inputs.prompts),
                *inputs.notices,
                *shared_memory_lines(),
            ):
                self._progress.say(line)
        dtype = resolve_dtype(recipe.student.dtype, resolve_device(recipe))
        steps = num_steps(recipe, inputs.prompts, dtype=dtype)
        # Damage, and another recipe, are told now, not once the engines are up.
        begun = goes_on_from(recipe, inputs, num_steps=steps) if recipe.resume else None
        self._progress.say(f"{steps} steps, student in {dtype}")
        self._progress.phase = "starting"
        try:
            roles = start_roles(
                recipe,
                num_updates=steps,
                num_real_ids=inputs.num_real_ids,
                stop_token_ids=stop_token_ids(recipe.student.model),
                say=self._progress.say,
                joined=self._joined,
                stop=self._stop.is_set,
            )
        except Stopped:
            return {"finished": False, "num_steps": None}
        try:
            return Coordinator(
                recipe,
                inputs,
                roles,
                num_steps=steps,
                grader=partial(grade_in_task, timeout_s=recipe.run.phase_timeout_s),
                progress=self._progress,
                stop=self._stop,
                begun=begun,
                restarts=restarts,
            ).run()
        finally:
            roles.stop()

    def _joined(self, process: Process) -> None:
        """A new process, in the place of the one of its name."""
        others = [
            p
            for p in self._progress.processes
            if (p.role, p.index) != (process.role, process.index)
        ]
        self._progress.processes = (*others, process)
        if self._progress.on_phase is not None:
            self._progress.on_phase(self._progress)

    def progress(self, seen: int) -> Progress:
        """Where the run stands; lines from number ``seen`` on."""
        return replace(self._progress, lines=self._progress.lines[seen:], on_phase=None)

    def request_stop(self) -> None:
        """Ends the run after the step it is in, or at once while its engines start."""
        self._stop.set()


def write_phase(run_dir: Path, progress: Progress) -> None:
    """``phase.json``: what the run is doing, since when, and by which processes."""
    what = {
        "step": progress.step,
        "phase": progress.phase,
        "since": round(progress.since, 3),
        "processes": [
            {"role": p.role, "index": p.index, "ip": p.ip, "pid": p.pid} for p in progress.processes
        ],
    }
    with suppress(OSError):  # for onlookers: a full disk is told by what needs it
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / "phase.json", json.dumps(what) + "\n")


def grade_in_task(answers: list[str], golds: list[str], *, timeout_s: float) -> list[bool]:
    """Grades in a process whose main thread is free: math-verify's time limits are alarms."""
    import ray

    from rock_opd.actors.waiting import gather
    from rock_opd.evaluate import grade

    task = ray.remote(grade).options(num_cpus=0).remote(answers, golds)
    return gather("grader", "evaluate", [task], timeout_s)[0]


def cluster_address(address: str | None) -> str | None:
    """The cluster to join: ``address``, or RAY_ADDRESS; None: start one on this machine, which is
    what Ray's name ``local`` asks for too."""
    named = os.environ.get("RAY_ADDRESS")
    address = (named if address == "auto" else address) or named or address
    return None if address == "local" else address or None


def connect(address: str | None) -> None:
    """Joins the cluster at ``cluster_address(address)``, or starts one on this machine, which
    listens on loopback alone.

    Raises:
        ConfigError: no cluster answers there, or it is no address.
    """
    import ray

    address = cluster_address(address)
    _listen_on_loopback(address is None)
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address:
        _require_listener(address)
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster answers at '{address}': {str(error).splitlines()[0]}"
            ) from None
        except (ValueError, RuntimeError, AssertionError, ImportError, OSError) as error:
            raise ConfigError(
                f"cannot join a Ray cluster at '{address}' (expected an address such as "
                f"10.0.0.1:6379, auto, or local to start one here): {first_line(error)}"
            ) from None
        return
    for attempt in range(START_ATTEMPTS):
        try:
            with deaf_to_hangup():
                ray.init(address="local", include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray raises plain ones here, for a busy machine above all
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                raise PlacementError(
                    f"Ray did not start on this machine in {START_ATTEMPTS} attempts: "
                    f"{str(error).splitlines()[0]} Is it very busy, or out of memory?"
                ) from None


def _require_listener(address: str) -> None:
    """Ray asks a closed port for 100 s before it says so.

    Raises:
        ConfigError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "/" in host:
        return  # a name of Ray's, or no address: Ray says what is wrong with it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at '{address}': {getattr(error, 'strerror', None) or error}; "
            f"does one run there (ray status --address {address})? `--address local` starts one"
        ) from None


_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: this machine alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def _listen_on_loopback(alone: bool) -> None:
    """What Ray and the process groups of its actors read before they open sockets.

    Ray 2.60 takes loopback for its address on macOS and Windows only, and its node's address cannot
    be set to it (``ray.init`` resolves it away); the switch behind that is this constant, read from
    the environment when Ray is imported. It can go when ``_node_ip_address="127.0.0.1"`` is kept.
    """
    if not sys.platform.startswith("linux"):
        return
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = not alone
    if alone:
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)


@contextmanager
def deaf_to_hangup() -> Iterator[None]:
    """Processes started meanwhile, and theirs, ignore SIGHUP: a shell that ends sends it to all of
    a command, and the one that decides what it means for the run is this one (``Wish``)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals cannot be set here
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def train(
    recipe: Recipe,
    *,
    address: str | None,
    show: Callable[[Progress], None],
) -> dict[str, Any]:
    """Runs a recipe to its end, or until it is interrupted.

    The first Ctrl-C (or SIGTERM, or SIGHUP) ends the run after the step it is in and saves; the
    second abandons it, as does a step that takes longer than ``run.grace_s`` after a signal that
    was no Ctrl-C.

    Raises:
        RockOPDError: as the run raised it.
        KeyboardInterrupt: the run was abandoned.
    """
    import ray

    from rock_opd.supervisor import Wish, supervise

    # With a cluster of our own the files are here: a wrong one is said before Ray starts.
    here = cluster_address(address) is None
    inputs = load_inputs(recipe) if here else None
    connect(address)
    try:
        with Wish(recipe.run.grace_s) as wish:
            return supervise(CoordinatorActor, recipe, inputs, wish=wish, show=show)
    finally:
        ray.shutdown()


def anchor_paths(recipe: Recipe, base: Path) -> Recipe:
    """Paths of a recipe are meant from where the command was typed; actors run elsewhere.

    Only names that exist below ``base`` become absolute: a hub id stays one. From here on this
    process runs Python code of the models that the recipe trusts, and of no other.
    """

    def anchored(path: str | None) -> str | None:
        return path if path is None or not (base / path).exists() else str((base / path).resolve())

    recipe = replace(
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
    trust_code(*recipe.trusted_models)
    return recipe


def settle_run_dir(recipe: Recipe, *, say: Callable[[str], None] = lambda line: None) -> Recipe:
    """Claims the run's folder for this process, and sees to it that one run is never written over
    another, here or at the mirror; may give this one the next free name. A run that goes on is
    brought back from its mirror where that is ahead of the folder.

    Args:
        say: hears what came from the mirror.

    Raises:
        StorageError, DataError: the mirror cannot be read, or nothing here or there is whole.
        ConfigError: another process has the folder, or it holds a run and resume is off, with
            ``run.on_existing`` fail; or resume is on and there is none.
    """
    _refuse_links(recipe)
    if recipe.resume and recipe.run.mirror is not None:
        _bring_back(recipe, say)
    if recipe.resume:
        require_begun(recipe)
        claim(recipe.run_dir)
        return recipe
    for number in itertools.count(1):
        name = recipe.run.name if number == 1 else f"{recipe.run.name}-{number}"
        named = replace(recipe, run=replace(recipe.run, name=name))
        _refuse_links(named)
        try:
            taken = has_begun(named) or (named.run.mirror is not None and holds_run(named))
            lock = None if taken else claim(named.run_dir)
        except RunTaken:
            if recipe.run.on_existing == "fail":
                raise
            continue
        if lock is not None and not has_begun(named):  # nobody began it before it was ours
            return named
        if lock is not None:
            lock.release()
        if recipe.run.on_existing == "fail" and not has_begun(recipe):
            raise ConfigError(
                f"run.mirror={recipe.run.mirror} already holds a run named {recipe.run.name}: go "
                "on with resume=true, or choose another run.name"
            )
        if recipe.run.on_existing == "fail":
            saved = list_checkpoints(recipe.run_dir)
            way = "go on with resume=true" if saved else "remove the folder"
            raise ConfigError(
                f"{recipe.run_dir} already holds a run: {way}, or choose another run.name"
            )
    raise AssertionError("numbers do not end")


def _bring_back(recipe: Recipe, say: Callable[[str], None]) -> None:
    lock = claim(recipe.run_dir)
    try:
        for line in pull(recipe):
            say(line)
    except BaseException:
        lock.release()
        raise


def _refuse_links(recipe: Recipe) -> None:
    """A run's name does not lead out of the folder of runs, by a link either."""
    where = recipe.run_dir.resolve()
    if where.parent != Path(recipe.run.dir).resolve():
        raise ConfigError(
            f"{recipe.run_dir} is a link to {where}, outside run.dir; to write there, set run.dir "
            "and run.name to that folder"
        )
