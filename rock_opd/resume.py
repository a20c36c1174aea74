"""What a run that goes on must have in common with the run it was, and what refuses it."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.checkpoint import Loaded, list_checkpoints, load_checkpoint, require_same
from rock_opd.config import Recipe, resolve_dtype
from rock_opd.data import num_steps as count_steps
from rock_opd.data import prompts_digest
from rock_opd.errors import ConfigError, RockOPDError
from rock_opd.findings import CheckReport
from rock_opd.footprint import assumed_device
from rock_opd.inputs import Inputs, load_inputs
from rock_opd.runlog import to_json


def has_begun(recipe: Recipe) -> bool:
    """Whether a run stands in the recipe's folder."""
    return (recipe.run_dir / "config.yaml").exists()


def require_begun(recipe: Recipe) -> None:
    """Refuses to go on with nothing.

    Raises:
        ConfigError: no run is there, or one that saved no checkpoint.
    """
    if not has_begun(recipe):
        nor = "" if recipe.run.mirror is None else f", nor does {recipe.run.mirror} one of its name"
        raise ConfigError(
            f"resume=true, but {recipe.run_dir} holds no run{nor}; leave it out to start one"
        )
    if not list_checkpoints(recipe.run_dir):
        raise ConfigError(
            f"resume=true, but the run in {recipe.run_dir} saved no whole checkpoint; remove the "
            "folder or choose another run.name to start over"
        )


def report_resume(report: CheckReport, recipe: Recipe) -> None:
    """What ``train`` will say of ``resume=true`` before its engines start; changes nothing."""
    if recipe.run.mirror is not None and not (
        has_begun(recipe) and list_checkpoints(recipe.run_dir)
    ):
        report.add(
            "info", f"resume: nothing in {recipe.run_dir} yet; train looks at {recipe.run.mirror}"
        )
        return
    try:
        require_begun(recipe)
        inputs = load_inputs(recipe)
        dtype = resolve_dtype(recipe.student.dtype, assumed_device(recipe))
        steps = count_steps(recipe, inputs.prompts, dtype=dtype)
        found = goes_on_from(recipe, inputs, num_steps=steps)
    except RockOPDError as error:
        report.add("fail", str(error))
        return
    for path, why in found.refused:
        report.add("warn", f"checkpoint {path.name}: {why}; going on from an older one")
    report.add("ok", f"resume: goes on after step {found.step} of {steps}, {found.path}")


def goes_on_from(recipe: Recipe, inputs: Inputs, *, num_steps: int) -> Loaded:
    """The newest checkpoint of this run whose every file is as it was written.

    Raises:
        DataError: there is none, or it is of a run that began otherwise.
    """
    found = load_checkpoint(recipe.run_dir)
    now = fingerprints(recipe, inputs, num_steps=num_steps)
    require_same(found.numbers, now, where=str(found.path))
    return found


def fingerprints(recipe: Recipe, inputs: Inputs, *, num_steps: int) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    return {
        "prompts": inputs.prompts.fingerprint,
        "held-out prompts": prompts_digest(inputs.heldout),
        "evaluation problems": prompts_digest(inputs.problems, answers=True),
        "content of teacher.model": inputs.teacher,
        "vocabulary": inputs.num_real_ids,
        "number of steps": num_steps,
        "guarded ids": hashlib.blake2b(
            np.sort(inputs.guard_ids).astype(np.int32).tobytes(), digest_size=8
        ).hexdigest(),
        **identity(recipe),
    }


def identity(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe a run may not change when it goes on; the rest (placement, logging, how
    often to save) it may."""
    rollout = recipe.rollout
    kept = {
        "run.seed": recipe.run.seed,
        "data.source": recipe.data.source,
        "data.shuffle": recipe.data.shuffle,
        "teacher.model": Path(recipe.teacher.model).name,
        **{
            f"teacher.{name}": getattr(recipe.teacher, name)
            for name in ("engine", "payload", "top_k", "dtype", "wire_dtype", "served_name")
        },
        **{
            f"eval.{name}": getattr(recipe.eval, name)
            for name in ("num_heldout", "samples", "temperature", "max_new_tokens")
        },
        **{
            f"rollout.{name}": getattr(rollout, name)
            for name in (
                "prompts_per_step",
                "samples_per_prompt",
                "temperature",
                "top_p",
                "max_new_tokens",
                "dtype",
            )
        },
    }
    for section in ("optim", "loss", "policy", "probe"):
        part = getattr(recipe, section)
        kept |= {f"{section}.{f.name}": getattr(part, f.name) for f in fields(part)}
    for key in ("policy.ids_file", "policy.guard_file"):
        kept[key] = None  # where a list lies is no matter: its ids are in the mask, or compared
    del kept["optim.max_bad_steps"]  # patience, not mathematics
    return to_json(kept)
