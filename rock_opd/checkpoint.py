"""Checkpoints of a whole run: what is in one, and which one to go on from.

``checkpoints/step_000012/`` holds ``student/`` (float32 weights and moments, see
``engines.student_state``), ``state.json`` (numbers and text), ``state.npz`` (arrays), and
``complete.json``: every file's size and digest, written last. A folder without it is never read; of
one whose files are others by now nothing is used, and the one before it serves. ``saver`` writes
them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.core.policies import TokenPolicy
from rock_opd.core.registry import Registry
from rock_opd.durable import (
    UNREADABLE,
    FileFacts,
    digest,
    file_facts,
    first_difference,
    json_object,
    storing,
    sync,
    total_bytes,
    write_text,
)
from rock_opd.errors import DataError
from rock_opd.evaluate import HeldoutKL
from rock_opd.journal import pack_rollouts, unpack_rollouts
from rock_opd.probe import ProbeSet
from rock_opd.runlog import to_json
from rock_opd.types import Rollout

FORMAT = 5
COMPLETE = "complete.json"


@dataclass
class RunState:
    """What the coordinator must not forget, beside the registry and the policy."""

    step: int = 0
    num_updates: int = 0
    heldout: list[Rollout] = field(default_factory=list)
    heldout_before: HeldoutKL | None = None
    probe: ProbeSet = field(default_factory=ProbeSet)
    best_accuracy: float = -1.0
    num_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    frozen_share: list[float] = field(default_factory=list)
    num_bad_steps: int = 0
    """Steps skipped because their loss or gradient was no finite number ..."""
    bad_in_a_row: int = 0
    """... and how many of them stand at the end."""
    alarms: dict[str, Any] = field(default_factory=dict)
    """``core.alarms.Alarms.state_dict``."""
    nothing_frozen: str | None = None
    """Why the latest selection froze nothing; None where it froze something."""


NUMBERS = (
    *("step", "num_updates", "num_tokens", "best_accuracy", "seconds", "frozen_share"),
    *("num_bad_steps", "bad_in_a_row", "alarms", "nothing_frozen"),
)


def pack_state(
    state: RunState, registry: Registry, policy: TokenPolicy, fingerprints: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The coordinator's side of a checkpoint: JSON-able numbers, and arrays kept exactly; copies,
    so that the run may go on while they are written.

    Args:
        fingerprints: what must be the same when the run goes on.
    """
    arrays = {}
    scalars: dict[str, Any] = {}
    for owner, values in (("registry", registry.state_dict()), ("policy", policy.state_dict())):
        for name, value in values.items():
            (arrays if isinstance(value, np.ndarray) else scalars)[f"{owner}.{name}"] = value
    if state.heldout_before is not None:
        arrays["before.kl"] = state.heldout_before.kl
        arrays["before.counts"] = state.heldout_before.counts
    arrays["probe.loss_pre"] = state.probe.loss_pre
    numbers = {
        **{name: getattr(state, name) for name in NUMBERS},
        "fingerprints": fingerprints,
        "scalars": scalars,
    }
    for name, rollouts in (("heldout", state.heldout), ("probe", state.probe.rollouts)):
        numbers[name], packed = pack_rollouts(rollouts)
        arrays |= {f"{name}.rollouts.{column}": values for column, values in packed.items()}
    return copy.deepcopy(numbers), {name: values.copy() for name, values in arrays.items()}


def require_same(numbers: dict[str, Any], fingerprints: dict[str, Any], *, where: str) -> None:
    """Refuses the state of another run.

    Raises:
        DataError: a fingerprint is another one.
    """
    for name, now in fingerprints.items():
        then = numbers["fingerprints"].get(name)
        if then != now:
            raise DataError(
                f"resume from {where}: {name} was {then}, is {now}; a run goes on as it began, "
                "anything else is a run of its own"
            )


def unpack_state(
    numbers: dict[str, Any],
    arrays: dict[str, np.ndarray],
    registry: Registry,
    policy: TokenPolicy,
) -> RunState:
    """The inverse of ``pack_state``; fills ``registry`` and ``policy`` in place."""
    values = {**arrays, **numbers["scalars"]}

    def part(prefix: str) -> dict[str, Any]:
        return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}

    registry.load_state_dict(part("registry."))
    policy.load_state_dict(part("policy."))
    before = part("before.")

    def rollouts(name: str) -> list[Rollout]:
        return unpack_rollouts(numbers[name], part(f"{name}.rollouts."))

    return RunState(
        **{name: numbers[name] for name in NUMBERS},
        heldout=rollouts("heldout"),
        heldout_before=HeldoutKL(**before) if before else None,
        probe=ProbeSet(rollouts=rollouts("probe"), loss_pre=arrays["probe.loss_pre"]),
    )


def write_state(
    folder: Path, numbers: dict[str, Any], arrays: dict[str, np.ndarray]
) -> dict[str, FileFacts]:
    """Writes what ``pack_state`` gave; what the files are, by name.

    Raises:
        StorageError: they could not be written.
    """
    text = json.dumps(to_json(numbers))
    with storing("checkpoint", folder, needed=len(text) + total_bytes(arrays.values())):
        with (folder / "state.npz").open("wb") as file:
            np.savez(file, **arrays)
        sync(folder / "state.npz")
        write_text(folder / "state.json", text)
        return {name: file_facts(folder / name) for name in ("state.npz", "state.json")}


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What ``write_state`` wrote.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with np.load(folder / "state.npz", allow_pickle=False) as npz:
            arrays = {name: npz[name] for name in npz.files}
        return json_object((folder / "state.json").read_bytes()), arrays
    except UNREADABLE as error:
        raise DataError(_unreadable(error)) from None


def seal(folder: Path, step: int, files: dict[str, FileFacts]) -> None:
    """Says of a folder that it is whole: nothing is written to it after this.

    Args:
        files: everything in it, by path relative to it.
    """
    write_text(folder / COMPLETE, seal_text(step, files))


def seal_text(step: int, files: dict[str, FileFacts]) -> str:
    """What ``complete.json`` says of a folder with these files."""
    content = {
        "format": FORMAT,
        "step": step,
        "files": {name: [f.num_bytes, f.digest] for name, f in sorted(files.items())},
    }
    return json.dumps({**content, "digest": _seal_digest(content)})


def _seal_digest(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Checkpoints that were written to their end, oldest first; files are not looked at."""
    found = []
    for path in (run_dir / "checkpoints").glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match and (path / COMPLETE).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The checkpoint to go on from."""

    step: int
    path: Path
    numbers: dict[str, Any]
    arrays: dict[str, np.ndarray]
    refused: list[tuple[Path, str]]
    """Newer ones that are not whole, and why, newest first."""


def load_checkpoint(run_dir: Path) -> Loaded:
    """The newest checkpoint whose every file is as it was written.

    Raises:
        DataError: there is none; the message says what is wrong with each.
    """
    refused: list[tuple[Path, str]] = []
    for step, path in _whole(run_dir, refused):
        try:
            numbers, arrays = read_state(path)
            return Loaded(step=step, path=path, numbers=numbers, arrays=arrays, refused=refused)
        except DataError as error:
            refused.append((path, str(error)))
    if refused:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in refused)
        raise DataError(
            f"resume: no checkpoint under {run_dir / 'checkpoints'} is whole ({reasons}); start "
            "over under another run.name"
        )
    raise DataError(
        f"resume: no whole checkpoint under {run_dir / 'checkpoints'}; start without "
        "resume=true, or set checkpoint.every so that there will be one"
    )


def _whole(run_dir: Path, refused: list[tuple[Path, str]]) -> Iterator[tuple[int, Path]]:
    """Checkpoints whose every file is as it was written, newest first; the others, and why they
    are not, go to ``refused``."""
    for step, path in reversed(list_checkpoints(run_dir)):
        if (why := flaw(path, step)) is None:
            yield step, path
        else:
            refused.append((path, why))


def newest_whole(run_dir: Path) -> int | None:
    """The step of the newest checkpoint whose every file is as it was written; None where there is
    none."""
    return next((step for step, _ in _whole(run_dir, [])), None)


def flaw(path: Path, step: int | None = None) -> str | None:
    """Why a sealed folder must not be used; None when it may.

    Args:
        step: the one it must be of; None: any.
    """
    try:
        content = json_object((path / COMPLETE).read_bytes())
        if content.get("format") != FORMAT:
            return f"format {content.get('format')}, this version reads {FORMAT}"
        unchanged = content.pop("digest", None) == _seal_digest(content)
        if not unchanged or step not in (None, content["step"]):
            return f"{COMPLETE} was changed after it was written"
        files = {
            name: FileFacts(num_bytes=num, digest=found)
            for name, (num, found) in content["files"].items()
        }
        return first_difference(path, files)
    except UNREADABLE as error:
        return _unreadable(error)


def _unreadable(error: BaseException) -> str:
    return f"it cannot be read ({' '.join(str(error).split()) or type(error).__name__})"


def set_aside(path: Path) -> None:
    """Renames a checkpoint that must not be used, for a person to look at: ``.damaged``."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):  # a read-only folder: it is refused again next time
        os.replace(path, aside)
