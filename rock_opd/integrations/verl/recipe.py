"""verl's config as one of our recipes; ``keys`` has the table, ``unsupported`` what is refused.

Pure: a config in, a ``Recipe`` out, no file read and no verl imported. What stands under
``rock_opd`` in the config (``+rock_opd.policy.name=rock_freeze``) goes before verl's keys.

Refuses what it could only approximate: a setting that would train something else than it says is
worse than a run that does not start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rock_opd.config import Recipe
from rock_opd.integrations.verl.keys import KEYS, WARMUP_STEPS, Key, Leave, read, warmup_steps
from rock_opd.integrations.verl.loss_modes import divergence_is_ours
from rock_opd.integrations.verl.names import VerlNames
from rock_opd.integrations.verl.unsupported import (
    LOSS,
    TRAINER,
    WHERE,
    get,
    not_supported,
    overrides,
    refuse_unsupported,
    teacher_path,
)
from rock_opd.recipe_file import build_recipe

_ABSENT = object()


def _refuse_temperature(config: DictConfig, merged: DictConfig) -> None:
    """verl divides the student's logits by the rollouts' temperature before a loss; ours never."""
    temperature = merged.rollout.temperature
    if merged.loss.divergence == "reverse_kl" and temperature != 1:
        raise not_supported(
            "rollout.temperature",
            temperature,
            f"with loss_mode={get(config, f'{LOSS}.loss_mode')} verl takes the loss of logits "
            "divided by it; set it to 1, or take ours, of the logits as they are: +rock_opd.loss."
            "divergence=reverse_kl +rock_opd.teacher.payload=topk_tail",
        )


OWN = ("run.name", "run.dir", "resume")
"""What only verl's own keys may set."""


def recipe_from_verl(config: DictConfig) -> Recipe:
    """The recipe that trains what this config says; where to resume is left to the caller, and the
    length of the warm-up to ``with_warmup``.

    Args:
        config: verl's whole config, as ``main_ppo`` composes it.

    Raises:
        ConfigError: the first key that cannot be honoured: which, what it is, what is supported.
    """
    block = overrides(config)
    refuse_unsupported(config)
    for key in OWN:
        if get(block, key, _ABSENT) is not _ABSENT:
            raise not_supported(
                f"{TRAINER}.{key}", get(block, key), "set trainer.default_local_dir"
            )
    tree = OmegaConf.create({"run": {"name": TRAINER}, "data": {"row_format": "verl"}})
    plain = [key for key in KEYS if key.settle is None]
    _put(tree, config, plain, lambda key, value: key.convert(value, config))
    late = [key for key in KEYS if key.settle is not None and get(block, key.ours) is None]

    def settle(merged: DictConfig) -> None:
        _put(merged, config, late, lambda key, value: key.settle(value, config, merged))
        if not divergence_is_ours(config):
            _refuse_temperature(config, merged)

    with VerlNames(config).spoken():
        return build_recipe(OmegaConf.merge(tree, block), [], where=WHERE, settle=settle)


def _put(
    recipe: DictConfig, config: DictConfig, keys: list[Key], convert: Callable[[Key, Any], Any]
) -> None:
    """Puts what ``convert`` makes of the values of verl's keys into a recipe."""
    teacher = teacher_path(config)
    for key in keys:
        name = key.under(teacher)
        value = get(config, name, _ABSENT)
        if value is _ABSENT:
            continue
        try:
            found = read(name, value, partial(convert, key))
        except Leave:
            continue
        OmegaConf.update(recipe, key.ours, found)


def with_warmup(recipe: Recipe, config: DictConfig, *, num_steps: int) -> Recipe:
    """The recipe with as many updates of warm-up as verl counts.

    Args:
        num_steps: of the whole run, as the data and the recipe give it.

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    if get(config, f"{TRAINER}.optim.warmup_ratio") is not None:
        return recipe
    warmup = warmup_steps(config)
    if warmup <= 0:
        warmup = int(recipe.optim.warmup_ratio * num_steps)  # cut off, not rounded, as in verl
    if warmup > num_steps:
        raise not_supported(WARMUP_STEPS, warmup, f"the run has {num_steps} steps; set it to fewer")
    return replace(recipe, optim=replace(recipe.optim, warmup_ratio=warmup / num_steps))


def epochs_cover(recipe: Recipe, steps_per_epoch: int) -> None:
    """Refuses what verl does with ``total_training_steps`` beyond ``total_epochs``: to stop in the
    middle of the schedule.

    Raises:
        ConfigError: the epochs end before the steps do.
    """
    within = recipe.run.num_epochs * steps_per_epoch
    if recipe.run.num_steps > within:
        needed = math.ceil(recipe.run.num_steps / max(1, steps_per_epoch))
        raise not_supported(
            "run.num_epochs",
            recipe.run.num_epochs,
            f"they end after {within} of run.num_steps={recipe.run.num_steps} steps; set "
            f"run.num_epochs={needed}",
        )
