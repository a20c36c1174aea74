"""verl's own config, composed by hydra as ``main_ppo`` does, for our trainer on a CPU."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig


def distillation_args(
    folder: Path,
    *,
    student: str | Path = "student",
    teacher: str | Path = "teacher",
    train_files: str | Path = "train.parquet",
) -> list[str]:
    """What a person writes for distillation on one CPU: four prompts a step, two steps an epoch."""
    return [
        "hydra.searchpath=[pkg://rock_opd.integrations.verl.config]",
        "model_engine=deepspeed",
        "trainer.v1.trainer_mode=rock_opd",
        "+rock_opd.run.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_epochs=1",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        "trainer.logger=[console,file]",
        "trainer.project_name=demo",
        "trainer.experiment_name=tiny",
        f"trainer.default_local_dir={folder}",
        f"data.train_files={train_files}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        "data.filter_overlong_prompts=true",
        f"actor_rollout_ref.model.path={student}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.deepspeed.dtype=float32",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=grpo",
        "distillation.enabled=true",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=1",
        f"distillation.teacher_models.teacher_model.model_path={teacher}",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",
        "distillation.distillation_loss.loss_mode=rock_k2",
        "distillation.distillation_loss.use_task_rewards=false",
    ]


def compose(args: list[str]) -> DictConfig:
    """verl's ``ppo_trainer`` with these overrides."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=args)
