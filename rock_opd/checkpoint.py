"""Checkpoints of a whole run: written aside, renamed when whole, found again by the newest whole
one.

``checkpoints/step_000012/`` holds ``student/`` (DeepSpeed's own: weights, moments, RNG),
``state.json`` (numbers and text) and ``state.npz`` (arrays). A folder without ``complete.json`` is
never read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import Recipe
from rock_opd.core.policies import TokenPolicy
from rock_opd.core.registry import Registry
from rock_opd.errors import DataError
from rock_opd.evaluate import HeldoutKL
from rock_opd.probe import ProbeSet
from rock_opd.runlog import to_json, write_atomic
from rock_opd.types import Rollout

FORMAT = 2
ROLLOUT_FIELDS = (
    "prompt_id",
    "sample_idx",
    "finish_reason",
    "policy_version",
    "prompt_len",
    "teacher_id",
)
ROLLOUT_ARRAYS = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32}


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


NUMBERS = ("step", "num_updates", "num_tokens", "best_accuracy", "seconds", "frozen_share")


def pack_state(
    state: RunState, registry: Registry, policy: TokenPolicy, fingerprints: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The coordinator's side of a checkpoint: JSON-able numbers, and arrays kept exactly.

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
    return numbers, arrays


def pack_rollouts(
    rollouts: list[Rollout],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Rollouts as one JSON-able row each, and their arrays laid flat, kept exactly."""
    prefixes = [rollout.teacher_prefix_ids for rollout in rollouts]
    arrays = {
        "lengths": np.array([len(rollout.token_ids) for rollout in rollouts], np.int64),
        "prefix_lengths": np.array([-1 if p is None else len(p) for p in prefixes], np.int64),
        "prefix_ids": _flat([p for p in prefixes if p is not None], np.int32),
        **{
            name: _flat([getattr(rollout, name) for rollout in rollouts], dtype)
            for name, dtype in ROLLOUT_ARRAYS.items()
        },
    }
    return [{name: getattr(r, name) for name in ROLLOUT_FIELDS} for r in rollouts], arrays


def unpack_rollouts(rows: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[Rollout]:
    """The inverse of ``pack_rollouts``."""
    lengths, prefix_lengths = arrays["lengths"], arrays["prefix_lengths"]
    columns = {name: _cut(arrays[name], lengths) for name in ROLLOUT_ARRAYS}
    prefixes = _cut(arrays["prefix_ids"], np.maximum(prefix_lengths, 0))
    return [
        Rollout(
            **row,
            **{name: parts[i] for name, parts in columns.items()},
            teacher_prefix_ids=prefixes[i] if prefix_lengths[i] >= 0 else None,
        )
        for i, row in enumerate(rows)
    ]


def _flat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def unpack_state(
    numbers: dict[str, Any],
    arrays: dict[str, np.ndarray],
    registry: Registry,
    policy: TokenPolicy,
    fingerprints: dict[str, Any],
    *,
    where: str,
) -> RunState:
    """The inverse of ``pack_state``; fills ``registry`` and ``policy`` in place.

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


def identity(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe a run may not change when it goes on; the rest (placement, logging, how
    often to save) it may."""
    rollout = recipe.rollout
    kept = {
        "run.seed": recipe.run.seed,
        "data.source": recipe.data.source,
        "data.shuffle": recipe.data.shuffle,
        "teacher.model": Path(recipe.teacher.model).name,
        "teacher.payload": recipe.teacher.payload,
        **{
            f"rollout.{name}": getattr(rollout, name)
            for name in (
                "prompts_per_step",
                "samples_per_prompt",
                "temperature",
                "top_p",
                "max_new_tokens",
            )
        },
    }
    for section in ("optim", "loss", "policy", "probe"):
        part = getattr(recipe, section)
        kept |= {f"{section}.{f.name}": getattr(part, f.name) for f in fields(part)}
    for key in ("policy.ids_file", "policy.guard_file"):
        kept[key] = None  # where a list lies is no matter: its ids are in the mask, or compared
    return to_json(kept)


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save_checkpoint(
    run_dir: Path,
    step: int,
    *,
    numbers: dict[str, Any],
    arrays: dict[str, np.ndarray],
    save_student: Callable[[Path], None],
    keep_last: int,
) -> Path:
    """Writes one checkpoint and prunes older ones.

    Args:
        numbers: JSON-able state of the coordinator.
        arrays: its arrays, kept exactly.
        save_student: called with the folder the student ranks write to.
        keep_last: checkpoints kept; 0 keeps all.
    """
    final = checkpoint_dir(run_dir, step)
    partial = final.with_name(final.name + ".partial")
    for leftover in final.parent.glob("*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        (partial / "student").mkdir(parents=True)
        save_student(partial / "student")
        np.savez(partial / "state.npz", **arrays)
        write_atomic(partial / "state.json", json.dumps(to_json(numbers)))
        write_atomic(partial / "complete.json", json.dumps({"format": FORMAT, "step": step}))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk above all
        raise
    replaced = final.with_name(final.name + ".old.partial")
    if final.exists():
        os.replace(final, replaced)
    os.replace(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep_last:
        for _, old in list_checkpoints(run_dir)[:-keep_last]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Whole checkpoints, oldest first."""
    found = []
    for path in (run_dir / "checkpoints").glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match and (path / "complete.json").is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def load_checkpoint(run_dir: Path) -> tuple[int, Path, dict[str, Any], dict[str, np.ndarray]]:
    """The newest whole checkpoint: step, folder, numbers, arrays.

    Raises:
        DataError: there is none, or its format is another one.
    """
    found = list_checkpoints(run_dir)
    if not found:
        raise DataError(
            f"resume: no whole checkpoint under {run_dir / 'checkpoints'}; start without "
            "resume=true, or set checkpoint.every so that there will be one"
        )
    step, path = found[-1]
    try:
        written = json.loads((path / "complete.json").read_text())["format"]
        if written != FORMAT:
            raise DataError(f"checkpoint {path}: format {written}, this version reads {FORMAT}")
        with np.load(path / "state.npz", allow_pickle=False) as npz:
            arrays = {name: npz[name] for name in npz.files}
        return step, path, json.loads((path / "state.json").read_text()), arrays
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"checkpoint {path} is damaged ({error}); remove it to go on from the one before"
        ) from None
