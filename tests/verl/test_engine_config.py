"""model_engine=deepspeed in verl's own ppo_trainer.yaml: it composes, becomes the objects verl's
workers take, and what the engine cannot do is refused by its key."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install 'rock-opd[verl]'")

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass

from rock_opd.errors import ConfigError
from rock_opd.integrations.verl.engine_config import (
    DeepSpeedActorConfig,
    DeepSpeedEngineConfig,
    DeepSpeedOptimizerConfig,
)

ACTOR = "actor_rollout_ref.actor"
ALWAYS = (
    "hydra.searchpath=[pkg://rock_opd.integrations.verl.config]",
    "model_engine=deepspeed",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
)


def composed(*overrides: str, config_name: str = "ppo_trainer", always: tuple[str, ...] = ALWAYS):
    GlobalHydra.instance().clear()
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        return compose(config_name=config_name, overrides=[*always, *overrides])


@cache
def plain() -> DictConfig:
    """Composing takes a second."""
    return composed()


def actor(*overrides: str) -> DeepSpeedActorConfig:
    """Overrides below the actor, each ``key=yaml``."""
    config = copy.deepcopy(plain())
    for override in overrides:
        key, _, value = override.partition("=")
        value = OmegaConf.create(f"it: {value}")["it"]
        OmegaConf.update(config, f"{ACTOR}.{key}", value, force_add=True, merge=False)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def ref(*overrides: str) -> DeepSpeedActorConfig:
    """As verl's worker makes it: it renames the log_prob keys first."""
    config = composed(*overrides).actor_rollout_ref.ref
    with open_dict(config):
        for ours, theirs in {
            "ppo_micro_batch_size": "log_prob_micro_batch_size",
            "ppo_micro_batch_size_per_gpu": "log_prob_micro_batch_size_per_gpu",
            "use_dynamic_bsz": "log_prob_use_dynamic_bsz",
            "ppo_max_token_len_per_gpu": "log_prob_max_token_len_per_gpu",
        }.items():
            config[ours] = config.pop(theirs)
    return omega_conf_to_dataclass(config)


def test_the_actor_gets_our_engine_with_the_keys_of_the_command():
    config = composed(
        f"{ACTOR}.deepspeed.zero_stage=3",
        f"{ACTOR}.deepspeed.param_offload=true",
        f"{ACTOR}.deepspeed.dtype=float32",
        f"{ACTOR}.optim.lr=3e-6",
        f"{ACTOR}.optim.clip_grad=0.5",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.entropy_checkpointing=true",
    )
    config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(config.engine, DeepSpeedEngineConfig)
    assert config.engine is config.deepspeed
    assert config.strategy == config.engine.strategy == "deepspeed"
    assert (config.engine.zero_stage, config.engine.param_offload) == (3, True)
    assert config.engine.training_dtype == torch.float32
    assert config.engine.entropy_checkpointing
    assert isinstance(config.optim, DeepSpeedOptimizerConfig)
    assert (config.optim.lr, config.optim.clip_grad) == (3e-6, 0.5)
    assert config.optim.lr_scheduler_type == "cosine"


def test_defaults_are_those_of_verls_fsdp_engine():
    ours, theirs = plain(), composed(always=ALWAYS[2:])
    ours_optim, theirs_optim = (
        dict(config.actor_rollout_ref.actor.optim) for config in (ours, theirs)
    )
    assert ours_optim.pop("_target_") != theirs_optim.pop("_target_")
    assert ours_optim == theirs_optim
    engine, fsdp = (
        ours.actor_rollout_ref.actor.deepspeed,
        theirs.actor_rollout_ref.actor.fsdp_config,
    )
    shared = sorted(set(engine) & set(fsdp) - {"_target_", "strategy"})
    assert len(shared) == 14
    assert {key: engine[key] for key in shared} == {key: fsdp[key] for key in shared}


def test_the_reference_model_is_forward_only_and_in_the_actors_dtype():
    config = ref(f"{ACTOR}.deepspeed.dtype=float32", f"{ACTOR}.deepspeed.zero_stage=3")
    assert config.engine.forward_only
    assert config.engine.training_dtype == torch.float32


def test_a_critic_stays_on_verls_fsdp_engine():
    config = composed("critic.ppo_micro_batch_size_per_gpu=2")
    assert config.critic.strategy == "fsdp"
    assert instantiate(config.critic.fsdp).strategy == "fsdp"


def test_verls_sft_trainer_takes_the_same_engine_and_optim_groups():
    config = composed(
        config_name="sft_trainer_engine", always=(ALWAYS[0], "engine=deepspeed", "optim=deepspeed")
    )
    assert omega_conf_to_dataclass(config.engine).strategy == "deepspeed"
    assert isinstance(omega_conf_to_dataclass(config.optim), DeepSpeedOptimizerConfig)


@pytest.mark.parametrize(
    "dtype",
    [
        ("dtype=bfloat16", torch.bfloat16),
        ("dtype=float32", torch.float32),
        ("mixed_precision={param_dtype: fp32}", torch.float32),
        ("mixed_precision={param_dtype: bf16,reduce_dtype: fp32}", torch.bfloat16),
    ],
)
def test_fsdps_dtype_keys_mean_what_they_mean_there(dtype):
    override, expected = dtype
    assert actor(f"deepspeed.{override}").engine.training_dtype == expected


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("deepspeed.zero_stage=4", "deepspeed.zero_stage=4 is not supported: expected 0, 1, 2"),
        ("deepspeed.ulysses_sequence_parallel_size=2", "use 1, or model_engine=dp"),
        ("ulysses_sequence_parallel_size=2", "actor.ulysses_sequence_parallel_size=2"),
        ("deepspeed.dtype=float16", "deepspeed.dtype=float16"),
        ("deepspeed.dtype=half", "deepspeed.dtype=half"),
        ("deepspeed.model_dtype=bf16", "deepspeed.model_dtype=bf16"),
        (
            "deepspeed.mixed_precision={reduce_dtype: bf16}",
            "deepspeed.mixed_precision.reduce_dtype=bf16",
        ),
        ("deepspeed.strategy=fsdp", "strategy=fsdp"),
        ("deepspeed.gather_bucket_bytes=0", "deepspeed.gather_bucket_bytes=0"),
        ("optim.optimizer=Adam", "optim.optimizer=torch.optim.Adam"),
        ("optim.override_optimizer_config={amsgrad: true}", "override_optimizer_config.amsgrad"),
        ("optim.clip_grad=-1", "optim.clip_grad=-1"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_in_one_line_by_its_key(override, told):
    with pytest.raises(Exception) as caught:
        actor(override)
    message = str(caught.value.__cause__ or caught.value).splitlines()[0]
    assert told in message
    assert isinstance(_root(caught.value), ConfigError)


def _root(error: BaseException) -> BaseException:
    """Hydra wraps what a config object raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@pytest.mark.parametrize(
    ("stage", "key"), [(0, "zero_offload"), (1, "param_offload"), (0, "optimizer_offload")]
)
def test_offload_names_the_stage_it_needs(stage, key):
    with pytest.raises(ConfigError, match=rf"deepspeed\.{key}=True .*zero_stage"):
        DeepSpeedEngineConfig(zero_stage=stage, **{key: True})


@pytest.mark.parametrize(
    "override", ["deepspeed.tensor_parallel_size=2", "fsdp_config.param_offload=true"]
)
def test_keys_of_other_engines_are_unknown_to_hydra(override):
    with pytest.raises(ConfigCompositionException) as caught:
        composed(f"{ACTOR}.{override}")
    assert override.partition("=")[0].rpartition(".")[2] in str(caught.value.__cause__) or (
        override.partition(".")[0] in str(caught.value.__cause__)
    )
