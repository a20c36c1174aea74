"""Which settings of verl our trainer cannot honour, and what it says of them.

Pure: a config in, an error or nothing out. A setting that would train something else than it says
is worse than a run that does not start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rock_opd.errors import ConfigError

TRAINER = "rock_opd"
"""``trainer.v1.trainer_mode``, the block of overrides, and the run's folder below
``trainer.default_local_dir``."""
WHERE = "verl config"

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, LOSS = "actor_rollout_ref.model", "distillation.distillation_loss"


def not_supported(key: str, value: Any, supported: str) -> ConfigError:
    return ConfigError(f"{WHERE}: {key}={value} is not supported by {TRAINER}: {supported}")


def get(config: DictConfig, key: str, default: Any = None) -> Any:
    return OmegaConf.select(config, key, default=default)


def overrides(config: DictConfig) -> DictConfig:
    """The block ``rock_opd``: keys of our recipes; empty where there is none.

    Raises:
        ConfigError: something else than keys with values.
    """
    block = get(config, TRAINER)
    block = OmegaConf.to_container(block, resolve=True) if isinstance(block, DictConfig) else block
    if not isinstance(block or {}, dict):
        raise ConfigError(
            f"{WHERE}: {TRAINER} must be a mapping, such as +{TRAINER}.policy.name=all"
        )
    return OmegaConf.create(block or {})


def section(config: DictConfig, key: str) -> DictConfig:
    """What stands below a key; empty where it is null or absent.

    Raises:
        ConfigError: a value where keys belong.
    """
    value = get(config, key)
    if value is None:
        return OmegaConf.create({})
    if not isinstance(value, DictConfig):
        raise ConfigError(f"{WHERE}: {key}={value}: expected keys with values below it")
    return value


def listed(config: DictConfig, key: str) -> list[Any]:
    """What a list holds; nothing where it is null or absent.

    Raises:
        ConfigError: it is no list.
    """
    value = get(config, key)
    if value is not None and not isinstance(value, ListConfig):
        raise ConfigError(f"{WHERE}: {key}={value}: expected a list, as [{value}]")
    return list(value or [])


def device_of(config: DictConfig) -> str:
    """cuda, cpu, or what else ``trainer.device`` says. The block of overrides goes before it:
    verl 0.9.1 sets ``trainer.device=cpu`` back to cuda unless a CPU platform is plugged in."""
    return str(get(config, f"{TRAINER}.run.device") or get(config, "trainer.device"))


@dataclass(frozen=True)
class Only:
    """A key of verl that is honoured with these values alone; null and an absent key are fine."""

    verl: str
    """As ``keys.Key.verl``."""
    values: tuple[Any, ...]
    supported: str


_NOT_HERE = "the model's own files are used"
_NO_REWARD = "nothing here reads a reward"
ONLY = (
    Only("distillation.enabled", (True,), "set it to true, and a teacher; nothing else is trained"),
    Only(f"{LOSS}.use_task_rewards", (False,), f"set it to false; {_NO_REWARD}"),
    Only(f"{LOSS}.loss_max_clamp", (), "set it to null: losses are not clamped"),
    Only(f"{LOSS}.log_prob_min_clamp", (), "set it to null: nothing is clamped"),
    Only("critic.enable", (False,), "there is no critic; set it to false"),
    Only("algorithm.use_kl_in_reward", (False,), _NO_REWARD),
    Only("algorithm.filter_groups.enable", (False,), _NO_REWARD),
    Only("reward.reward_model.enable", (False,), _NO_REWARD),
    Only("reward.custom_reward_function.path", (), _NO_REWARD),
    Only(f"{ACTOR}.strategy", ("fsdp", "fsdp2", "deepspeed"), "model_engine=dp or deepspeed"),
    Only(f"{ACTOR}.ppo_epochs", (1,), "every rollout is trained on once"),
    Only(f"{ACTOR}.loss_agg_mode", ("token-mean",), "the loss is a mean over tokens"),
    Only(f"{ACTOR}.use_kl_loss", (False,), "there is no reference model"),
    Only(f"{ACTOR}.entropy_coeff", (0,), "there is no entropy term"),
    Only(f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "ranks read whole sequences"),
    Only(f"{ACTOR}.fsdp_config.param_offload", (False,), "optimizer_offload is"),
    Only(f"{ACTOR}.deepspeed.mixed_precision", (), "set actor.deepspeed.dtype"),
    Only(f"{ACTOR}.qat.enable", (False,), "weights are trained as they are"),
    Only(f"{ACTOR}.optim.optimizer", ("AdamW",), "AdamW"),
    Only(f"{ACTOR}.optim.optimizer_impl", ("torch.optim",), "torch's AdamW"),
    Only(f"{ACTOR}.optim.grad_clip", (), "set optim.clip_grad"),
    Only(f"{MODEL}.lora_rank", (0,), "all weights are trained; use 0"),
    Only(f"{MODEL}.lora.rank", (0,), "all weights are trained; use 0"),
    Only(f"{MODEL}.lora_adapter_path", (), "all weights are trained"),
    Only(f"{MODEL}.use_liger", (False,), "use false"),
    Only(f"{MODEL}.use_fused_kernels", (False,), "use false"),
    Only(f"{MODEL}.enable_activation_offload", (False,), "use false"),
    Only(f"{MODEL}.tiled_mlp.enabled", (False,), "use false"),
    Only(f"{MODEL}.mtp.enable", (False,), "use false"),
    Only(f"{MODEL}.custom_chat_template", (), _NOT_HERE),
    Only(f"{MODEL}.hf_config_path", (), _NOT_HERE),
    Only(f"{MODEL}.tokenizer_path", (), _NOT_HERE),
    Only(f"{MODEL}.external_lib", (), "no code of others is imported"),
    Only("data.tokenizer", (), _NOT_HERE),
    Only("data.custom_cls.path", (), "rows are read as RLHFDataset's, by rock_opd.prompt_rows"),
    Only(
        "data.image_key", ("images",), "text alone is trained on: files with pictures are refused"
    ),
    Only("data.video_key", ("videos",), "only text is trained on"),
    Only("data.audio_key", ("audios",), "only text is trained on"),
    Only("data.tool_config_path", (), "one turn, no tools"),
    Only("data.function_tool_path", (), "one turn, no tools"),
    Only(f"{ROLLOUT}.multi_turn.enable", (False,), "one turn, no tools"),
    Only(f"{ROLLOUT}.agent.default_agent_loop", ("single_turn_agent",), "one turn, no tools"),
    Only(f"{ROLLOUT}.agent.agent_loop_config_path", (), "one turn, no tools"),
    Only(f"{ROLLOUT}.agent.agent_loop_manager_class", (), "rollouts come from our own workers"),
    Only(f"{ROLLOUT}.agent.custom_async_server.path", (), "rollouts come from our own workers"),
    Only(f"{ROLLOUT}.name", ("vllm",), "vllm"),
    Only(f"{ROLLOUT}.nnodes", (0,), "rollout shares the trainer's GPUs"),
    Only(f"{ROLLOUT}.do_sample", (True,), "set rollout.temperature=0 for greedy answers"),
    Only(f"{ROLLOUT}.top_k", (-1, 0), "use -1"),
    Only(f"{ROLLOUT}.ignore_eos", (False,), "a response ends with its EOS"),
    Only(f"{ROLLOUT}.data_parallel_size", (1,), "a worker per tensor-parallel group"),
    Only(f"{ROLLOUT}.pipeline_model_parallel_size", (1,), "tensor parallelism is"),
    Only(f"{ROLLOUT}.quantization", (), "the engine holds the trainer's weights"),
    Only(f"{ROLLOUT}.disaggregation.enabled", (False,), "use false"),
    Only(f"{ROLLOUT}.val_kwargs.top_k", (-1, 0), "use -1"),
    Only(f"{ROLLOUT}.val_kwargs.top_p", (1,), "use 1"),
    Only("trainer.critic_warmup", (0,), "there is no critic"),
    Only("trainer.val_only", (False,), "rock-opd score measures without training"),
    Only("trainer.default_hdfs_dir", (), "+rock_opd.run.mirror takes any fsspec URI"),
    Only("trainer.del_local_ckpt_after_load", (False,), "use false"),
    Only("trainer.rollout_data_dir", (), "+rock_opd.log.occurrences=true writes every token"),
    Only("trainer.validation_data_dir", (), "use null"),
    Only("trainer.log_val_generations", (0,), "use 0"),
    Only("trainer.resume_mode", ("auto", "disable", "resume_path"), "auto, disable, resume_path"),
    Only("global_profiler.tool", (), "profilers of verl do not reach our actors"),
    Only("skip.rollout.enable", (False,), "use false"),
    Only("skip.rollout_tq.enable", (False,), "use false"),
    Only("<teacher>.inference.name", ("vllm",), "vllm"),
    Only(
        "<teacher>.inference.data_parallel_size", (1,), "distillation.n_gpus_per_node is for more"
    ),
    Only("<teacher>.inference.load_format", ("auto",), "the teacher has its checkpoint's weights"),
    Only("<teacher>.inference.quantization", (), "the teacher has its checkpoint's weights"),
)

TRAINED = ("model", "optimizer", "extra")
"""Of verl's contents of a checkpoint, what a run goes on with: saved and loaded together."""


def under(teacher: str, key: str) -> str:
    """The name in verl's config of a key that may begin with ``<teacher>``.

    Args:
        teacher: ``teacher_path``.
    """
    return key.replace("<teacher>", teacher)


def teacher_path(config: DictConfig) -> str:
    """The key of the one teacher; the empty default one goes when there are others, as in verl.

    Raises:
        ConfigError: several, or none.
    """
    models = section(config, "distillation.teacher_models")
    names = [name for name in models if name != "teacher_model"] or ["teacher_model"]
    if len(names) != 1:
        raise not_supported("distillation.teacher_models", names, "one teacher for all rows")
    path = f"distillation.teacher_models.{names[0]}"
    if not get(config, f"{path}.model_path"):
        raise ConfigError(f"{WHERE}: {path}.model_path is missing: the teacher")
    return path


def refuse_unsupported(config: DictConfig) -> None:
    for only in ONLY:
        key = only.verl
        if "<teacher>" in key:
            key = under(teacher_path(config), key)
        value = get(config, key)
        if value is not None and value not in only.values:
            raise not_supported(key, value, only.supported)
    algorithm = get(config, "algorithm.adv_estimator")
    if algorithm == "gae" and get(config, "critic.enable") is None:
        raise not_supported(
            "algorithm.adv_estimator",
            algorithm,
            "it wants a critic; set algorithm.adv_estimator=grpo (no advantage is computed here)",
        )
    batch = get(config, "data.train_batch_size")
    for key in (f"{ACTOR}.ppo_mini_batch_size", "data.gen_batch_size"):
        value = get(config, key)
        if value is not None and value != batch:
            raise not_supported(
                key, value, f"one update a step: set it to train_batch_size={batch}"
            )
    if not get(config, "data.filter_overlong_prompts") and (
        get(config, "data.truncation", "error") != "error"
    ):
        raise not_supported(
            "data.truncation",
            get(config, "data.truncation"),
            "prompts are not cut; set data.filter_overlong_prompts=true",
        )
    for name in ("save_contents", "load_contents"):
        key = f"{ACTOR}.checkpoint.{name}"
        contents = listed(config, key)
        if get(config, key) is not None and {*contents} - {"hf_model"} != {*TRAINED}:
            raise not_supported(
                key, contents, f"[{', '.join(TRAINED)}], and hf_model for a folder to serve from"
            )
    for key in ("prompt_length", "response_length"):
        value, ours = get(config, f"{ROLLOUT}.{key}"), get(config, f"data.max_{key}")
        if value is not None and value != ours:
            raise not_supported(f"{ROLLOUT}.{key}", value, f"set it to data.max_{key}={ours}")
    for part in (ROLLOUT, f"{teacher_path(config)}.inference"):
        section(config, f"{part}.engine_kwargs")
        for key, value in section(config, f"{part}.engine_kwargs.vllm").items():
            raise not_supported(f"{part}.engine_kwargs.vllm.{key}", value, f"see {part}.*")
    _refuse_widths(config)


def _refuse_widths(config: DictConfig) -> None:
    for part in (ROLLOUT, f"{teacher_path(config)}.inference"):
        key = f"{part}.tensor_model_parallel_size"
        width = get(config, key)
        if width is None:
            raise ConfigError(f"{WHERE}: {key} is missing: the GPUs of one engine")
        if width != 1 and device_of(config) == "cpu":
            raise not_supported(key, width, "set it to 1 on CPU")


def refusal_table() -> str:
    """``ONLY`` as the table of docs/verl.md."""
    rows = ["| verl key | values | otherwise it says |", "|---|---|---|"]
    for only in ONLY:
        key = under("distillation.teacher_models.*", only.verl)
        values = ", ".join(f"`{json.dumps(value)}`" for value in only.values) or "`null`"
        rows.append(f"| `{key}` | {values} | {only.supported} |")
    return "\n".join(rows) + "\n"
