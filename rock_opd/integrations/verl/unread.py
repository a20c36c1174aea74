"""Keys of verl that a person set and our trainer does not read: told, so that none is passed over.

Most are harmless (clipping ratios of PPO, micro-batches of a log-probability pass that does not
exist here); which are is the person's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rock_opd.integrations.verl.keys import KEYS
from rock_opd.integrations.verl.unsupported import (
    ACTOR,
    LOSS,
    ONLY,
    ROLLOUT,
    TRAINER,
    teacher_path,
    under,
)

READ_BESIDE = (
    *(TRAINER, "hydra", "model_engine", "ray_kwargs", "transfer_queue"),
    *("trainer.v1.trainer_mode", "trainer.use_v1", "trainer.nnodes", "trainer.logger"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"),
    *("trainer.resume_from_path", "trainer.checkpoint_callback_class", "trainer.val_before_train"),
    *("distillation.n_gpus_per_node", "distillation.nnodes"),
    *(f"{LOSS}.loss_mode", f"{LOSS}.topk", f"{LOSS}.use_policy_gradient"),
    *("algorithm.adv_estimator", "data.gen_batch_size", "data.truncation"),
    *(f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    *(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.optim.lr_warmup_steps"),
    *(f"{ACTOR}.checkpoint.save_contents", f"{ACTOR}.checkpoint.load_contents"),
    *(f"{ACTOR}.optim.min_lr_ratio", f"{ACTOR}.optim.num_cycles", f"{ACTOR}.optim.warmup_style"),
    *(f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length"),
    *(f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
)
"""Read elsewhere than by the tables, or asked for by verl itself; with what is below them."""


def unread_keys(config: DictConfig, defaults: DictConfig) -> list[str]:
    """Keys whose value is not verl's default and which nothing of ours reads, in verl's order.

    Args:
        config: as the run has it; it must have a teacher.
        defaults: verl's own of the same ``model_engine``, not resolved: a key that follows another
            one was not set by the person where it has the other's value.
    """
    teacher = teacher_path(config)
    read = {*READ_BESIDE, *(under(teacher, row.verl) for row in (*KEYS, *ONLY))}
    scratch = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
    found = []
    for key, value in _leaves(config):
        parts = key.split(".")
        if read & {".".join(parts[:n]) for n in range(1, len(parts) + 1)}:
            continue
        if value != _default(key, value, defaults, scratch):
            found.append(key)
    return found


def _default(key: str, value: Any, defaults: DictConfig, scratch: DictConfig) -> Any:
    """What the key would be had nobody set it, with the other keys as they are; a thing equal to
    nothing where it would not be there.

    Args:
        scratch: a copy of the config to try it in.
    """
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(defaults, parent) if parent else defaults
    raw = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else {}
    if name not in raw:
        return object()
    if not OmegaConf.is_interpolation(node, name):
        return object() if OmegaConf.is_missing(node, name) else node[name]
    OmegaConf.update(scratch, key, raw[name], merge=False)
    try:
        return OmegaConf.select(scratch, key)
    except OmegaConfBaseException:  # it follows what is not there
        return object()
    finally:
        OmegaConf.update(scratch, key, value, merge=False)


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in node:
        if OmegaConf.is_missing(node, name):
            continue
        value = node[name]
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def verl_defaults(model_engine: str) -> DictConfig:
    """verl's own config of a ``model_engine``, as ``main_ppo`` composes it without overrides."""
    from hydra import compose, initialize_config_module

    overrides = [
        "hydra.searchpath=[pkg://rock_opd.integrations.verl.config]",
        f"model_engine={model_engine}",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)
