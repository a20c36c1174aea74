"""Which key of verl becomes which of ours: the one table, shown in ``docs/verl.md``.

A value is taken over as it is, converted, or settled once the recipe is merged: what follows from
other keys follows from what they are then, whoever set them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from rock_opd.errors import ConfigError
from rock_opd.integrations.verl.loss_modes import divergence_is_ours, loss_of
from rock_opd.integrations.verl.unsupported import (
    ACTOR,
    LOSS,
    MODEL,
    ROLLOUT,
    WHERE,
    device_of,
    get,
    listed,
    not_supported,
    under,
)

WARMUP_STEPS = f"{ACTOR}.optim.lr_warmup_steps"


class Leave(Exception):
    """The recipe's own default stays."""


# --- values ---------------------------------------------------------------------------------------


def read(key: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """``convert(value)``; the one place where a value of a wrong type becomes an error.

    Raises:
        ConfigError: which key has which value, and what was expected.
        Leave: as ``convert`` raises it.
    """
    try:
        return convert(value)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ConfigError(f"{WHERE}: {key}={value} cannot be read: {error}") from None


def whole(value: Any) -> int:
    """A whole number, which is never rounded to."""
    if isinstance(value, bool | float):
        raise ValueError("expected a whole number")
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError("expected a whole number") from None


def at_least_1(value: Any) -> int:
    if (number := whole(value)) < 1:
        raise ValueError("expected a whole number of at least 1")
    return number


def number(value: Any) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError("expected a number")


def _of(config: DictConfig, key: str, convert: Callable[[Any], Any]) -> Any:
    """Another key than the one that is being converted."""
    return read(key, get(config, key), convert)


# --- conversions: (value, whole config) -> value of the recipe ------------------------------------


def _same(value: Any, config: DictConfig) -> Any:
    return value


def _given(value: Any, config: DictConfig) -> Any:
    """As it is, unless it is null."""
    if value is None:
        raise Leave
    return value


def _positive_or_0(value: Any, config: DictConfig) -> int:
    """verl's -1 and null mean never, or all: 0 in a recipe."""
    return 0 if value is None else max(0, whole(value))


def _path(value: Any, config: DictConfig) -> Any:
    """A file or folder with ``~`` resolved; a hub id stays one."""
    if value is None:
        raise Leave
    if not isinstance(value, str | Path):
        raise ValueError("expected a path")
    return str(Path(value).expanduser()) if str(value).startswith("~") else str(value)


def _folder(value: Any, config: DictConfig) -> str:
    if value is None:
        raise ValueError("expected a folder")
    return _path(value, config)


def _single(key: str, value: Any, config: DictConfig) -> str:
    if not isinstance(value, str | ListConfig):
        raise ValueError("expected a parquet or JSONL file")
    files = [value] if isinstance(value, str) else list(value)
    if len(files) != 1:
        raise not_supported(key, files, "one parquet or JSONL file; put them into one")
    return _path(files[0], config)


def _one_file(value: Any, config: DictConfig) -> str:
    return _single("data.train_files", value, config)


def _dtype(value: Any, config: DictConfig) -> str:
    names = {"bf16": "bfloat16", "fp32": "float32", "32": "float32", "float": "float32"}
    return names.get(str(value), str(value))


def _num_ranks(value: Any, config: DictConfig) -> int:
    return at_least_1(value) * _of(config, "trainer.nnodes", at_least_1)


def _device(value: Any, config: DictConfig) -> str:
    device = device_of(config)
    if device not in ("cuda", "cpu"):
        raise not_supported("trainer.device", value, "cuda or cpu")
    return device


def _warmup_ratio(value: Any, config: DictConfig) -> float:
    """Checked here; how many updates it means is settled when their number is known."""
    warmup_steps(config)
    return 0.0 if value is None else number(value)


def warmup_steps(config: DictConfig) -> int:
    """Updates of warm-up that verl's config counts itself; below 1: it gives their ratio."""
    return _of(config, WARMUP_STEPS, lambda steps: -1 if steps is None else whole(steps))


def _only(key: str, name: str, options: Any) -> Any:
    """The option of this name, where no other may be set.

    Raises:
        ConfigError: there is another.
        Leave: there is none.
    """
    if not isinstance(options or {}, dict | DictConfig):
        raise ValueError(f"expected {{{name}: ...}}")
    options = dict(options or {})
    value = options.pop(name, None)
    if options:
        other = min(options)
        raise not_supported(f"{key}.{other}", options[other], f"only {name} is")
    if value is None:
        raise Leave
    return value


def _epsilon(value: Any, config: DictConfig) -> float:
    return number(_only(f"{ACTOR}.optim.override_optimizer_config", "eps", value))


def _attention(value: Any, config: DictConfig) -> str:
    return str(_only(f"{MODEL}.override_config", "attn_implementation", value))


def _thinking(value: Any, config: DictConfig) -> Any:
    return _only("data.apply_chat_template_kwargs", "enable_thinking", value)


def _on_bad_row(value: Any, config: DictConfig) -> str:
    return "skip" if value else "fail"


def _test_temperature(value: Any, config: DictConfig) -> float:
    return number(value) if get(config, f"{ROLLOUT}.val_kwargs.do_sample") else 0.0


def _loss(part: str, config: DictConfig) -> str:
    if divergence_is_ours(config):
        raise Leave
    return loss_of(config)[part]


def _divergence(value: Any, config: DictConfig) -> str:
    return _loss("loss.divergence", config)


def _payload(value: Any, config: DictConfig) -> str:
    return _loss("teacher.payload", config)


def _megabytes(value: Any, config: DictConfig) -> int:
    return at_least_1(value) << 20


# --- settled last: (value, whole config, merged recipe) -> value of the recipe --------------------


def _colocate(value: Any, config: DictConfig, merged: DictConfig) -> str:
    return "none" if merged.run.device == "cpu" else "all"


def _num_workers(value: Any, config: DictConfig, merged: DictConfig) -> int:
    gpus, width = merged.student.num_ranks, merged.rollout.tensor_parallel
    if width < 1 or gpus % width:
        raise not_supported(
            f"{ROLLOUT}.tensor_model_parallel_size",
            width,
            f"it must divide trainer.n_gpus_per_node x trainer.nnodes = {gpus}",
        )
    return gpus // width


def _teacher_replicas(value: Any, config: DictConfig, merged: DictConfig) -> int:
    gpus = 1
    for key in ("distillation.n_gpus_per_node", "distillation.nnodes"):
        gpus *= _of(config, key, at_least_1)
    width = merged.teacher.tensor_parallel
    if width < 1 or gpus % width:
        raise ConfigError(
            f"{WHERE}: distillation.n_gpus_per_node x distillation.nnodes = {gpus}, expected a "
            f"positive multiple of the teacher's tensor_model_parallel_size={width}"
        )
    return gpus // width


def _micro_batch(value: Any, config: DictConfig, merged: DictConfig) -> int:
    """Tokens of a micro-batch; verl's count of sequences stands for so many of full length."""
    if get(config, f"{ACTOR}.use_dynamic_bsz"):
        return at_least_1(value)
    sequences = _of(
        config,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        lambda count: 1 if count is None else at_least_1(count),
    )
    return sequences * (merged.rollout.max_prompt_tokens + merged.rollout.max_new_tokens)


def _min_lr(value: Any, config: DictConfig, merged: DictConfig) -> float:
    kind = get(config, f"{ACTOR}.optim.warmup_style") or value
    if kind == "constant":
        return merged.optim.lr
    if kind != "cosine" or get(config, f"{ACTOR}.optim.num_cycles", 0.5) != 0.5:
        raise not_supported(
            f"{ACTOR}.optim.lr_scheduler_type", kind, "constant, or cosine with num_cycles=0.5"
        )
    share = _of(
        config,
        f"{ACTOR}.optim.min_lr_ratio",
        lambda ratio: 0.0 if ratio is None else number(ratio),
    )
    return merged.optim.lr * share


def _limit(value: Any, config: DictConfig, merged: DictConfig) -> int:
    rows = _positive_or_0(value, config)
    if rows and merged.data.shuffle:
        raise not_supported(
            "data.train_max_samples",
            value,
            "with data.shuffle=true verl draws them at random; +rock_opd.data.limit takes the "
            "first rows",
        )
    return rows


def _validation_file(value: Any, config: DictConfig, merged: DictConfig) -> str:
    if merged.eval.every == 0 or value is None:
        raise Leave
    return _single("data.val_files", value, config)


def _save_hf(value: Any, config: DictConfig, merged: DictConfig) -> int:
    wanted = "hf_model" in listed(config, f"{ACTOR}.checkpoint.save_contents")
    return merged.checkpoint.every if wanted else 0


def _keep_hf(value: Any, config: DictConfig, merged: DictConfig) -> int:
    return merged.checkpoint.keep_last


def _topk(value: Any, config: DictConfig, merged: DictConfig) -> int:
    if value is None and merged.teacher.payload != "topk_tail":
        raise Leave
    return at_least_1(value)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One row of the table."""

    verl: str
    """Below ``distillation.teacher_models.<name>`` when it begins with ``<teacher>``."""
    ours: str
    convert: Callable[[Any, DictConfig], Any] = _same
    note: str = ""
    settle: Callable[[Any, DictConfig, DictConfig], Any] | None = None
    """In place of ``convert``, once the other keys and the block of overrides are merged."""

    @property
    def alike(self) -> bool:
        """Whether a value means the same under both names."""
        return (self.settle or self.convert) in _ALIKE

    def under(self, teacher: str) -> str:
        """Its name in verl's config.

        Args:
            teacher: ``unsupported.teacher_path``.
        """
        return under(teacher, self.verl)


_ALIKE = (_same, _given, _positive_or_0, _path, _folder, _one_file, _dtype)
_ALIKE += (_test_temperature, _warmup_ratio, _limit, _validation_file, _topk)

KEYS = (
    Key(
        "trainer.device",
        "run.device",
        _device,
        "`cuda`, or with `+rock_opd.run.device=cpu` cpu: verl 0.9.1 sets `trainer.device=cpu` back",
    ),
    Key(
        "trainer.device",
        "placement.colocate",
        settle=_colocate,
        note="`all` on cuda: student, rollout and teacher take turns on the same GPUs; `none` on "
        "cpu",
    ),
    Key("trainer.n_gpus_per_node", "student.num_ranks", _num_ranks, "times `trainer.nnodes`"),
    Key("trainer.default_local_dir", "run.dir", _folder, "the run is `rock_opd` in it"),
    Key("trainer.total_epochs", "run.num_epochs"),
    Key("trainer.total_training_steps", "run.num_steps", _positive_or_0, "null: by epochs"),
    Key("trainer.save_freq", "checkpoint.every", _positive_or_0, "-1: at the end only"),
    Key(
        "trainer.save_freq",
        "checkpoint.save_hf_every",
        settle=_save_hf,
        note="where `actor.checkpoint.save_contents` has `hf_model`",
    ),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", _positive_or_0, "null: all"),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_hf", note="null: all", settle=_keep_hf),
    Key("trainer.test_freq", "eval.every", _positive_or_0, "-1: no evaluation"),
    Key("data.train_files", "data.prompts", _one_file, "one file"),
    Key(
        "data.val_files",
        "eval.problems",
        note="with `trainer.test_freq` only",
        settle=_validation_file,
    ),
    Key("data.train_max_samples", "data.limit", note="with `data.shuffle=false`", settle=_limit),
    Key(
        "data.shuffle",
        "data.shuffle",
        note="false: the rows go round and round; verl leaves out what is left at an epoch's end",
    ),
    Key("data.prompt_key", "data.prompt_column", _given),
    Key("data.seed", "run.seed", _given, "null: 0"),
    Key(
        "data.filter_overlong_prompts", "data.on_bad_row", _on_bad_row, "true: `skip`, else `fail`"
    ),
    Key("data.apply_chat_template_kwargs", "data.enable_thinking", _thinking),
    Key("data.train_batch_size", "rollout.prompts_per_step"),
    Key("data.max_prompt_length", "rollout.max_prompt_tokens"),
    Key("data.max_response_length", "rollout.max_new_tokens"),
    Key("data.max_response_length", "eval.max_new_tokens"),
    Key(f"{MODEL}.path", "student.model", _path),
    Key(f"{MODEL}.trust_remote_code", "student.trust_remote_code"),
    Key(f"{MODEL}.enable_gradient_checkpointing", "student.gradient_checkpointing"),
    Key(f"{MODEL}.override_config", "student.attn_implementation", _attention),
    Key(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "student.micro_batch_tokens",
        settle=_micro_batch,
        note="with `use_dynamic_bsz`; else `ppo_micro_batch_size_per_gpu` sequences of full length",
    ),
    Key(f"{ACTOR}.fsdp_config.dtype", "student.dtype", _dtype, "with `model_engine=dp`"),
    Key(f"{ACTOR}.fsdp_config.optimizer_offload", "student.offload_optimizer"),
    Key(f"{ACTOR}.deepspeed.dtype", "student.dtype", _dtype, "with `model_engine=deepspeed`"),
    Key(f"{ACTOR}.deepspeed.zero_stage", "student.zero_stage"),
    Key(f"{ACTOR}.deepspeed.zero_offload", "student.offload_optimizer"),
    Key(f"{ACTOR}.checkpoint.async_save", "checkpoint.background"),
    Key(f"{ACTOR}.optim.lr", "optim.lr"),
    Key(
        f"{ACTOR}.optim.lr_scheduler_type",
        "optim.min_lr",
        settle=_min_lr,
        note="`constant`: the same as lr; `cosine`: lr times `min_lr_ratio`",
    ),
    Key(
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        "optim.warmup_ratio",
        _warmup_ratio,
        "as many whole updates as verl counts, the ratio times the steps; `lr_warmup_steps` goes "
        "before it; the first update moves, where verl's has lr 0",
    ),
    Key(f"{ACTOR}.optim.betas", "optim.betas"),
    Key(f"{ACTOR}.optim.override_optimizer_config", "optim.eps", _epsilon, "`eps`"),
    Key(f"{ACTOR}.optim.weight_decay", "optim.weight_decay"),
    Key(
        f"{ACTOR}.optim.clip_grad",
        "optim.max_grad_norm",
        note="0: off; verl's FSDP engine then scales every gradient to 0, and only weight decay "
        "is left",
    ),
    Key(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel"),
    Key(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "rollout.num_workers",
        settle=_num_workers,
        note="`trainer.n_gpus_per_node` x `trainer.nnodes` over it",
    ),
    Key(f"{ROLLOUT}.n", "rollout.samples_per_prompt"),
    Key(f"{ROLLOUT}.temperature", "rollout.temperature"),
    Key(f"{ROLLOUT}.top_p", "rollout.top_p"),
    Key(f"{ROLLOUT}.dtype", "rollout.dtype", _dtype),
    Key(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    Key(f"{ROLLOUT}.max_num_seqs", "rollout.max_num_seqs"),
    Key(f"{ROLLOUT}.val_kwargs.n", "eval.samples"),
    Key(f"{ROLLOUT}.val_kwargs.temperature", "eval.temperature", _test_temperature),
    Key(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "sync.bucket_bytes",
        _megabytes,
    ),
    Key(f"{LOSS}.loss_mode", "loss.divergence", _divergence, "with `use_policy_gradient`"),
    Key(f"{LOSS}.loss_mode", "teacher.payload", _payload, "with `use_policy_gradient`"),
    Key(
        f"{LOSS}.topk",
        "teacher.top_k",
        note="null only where no top-k table is asked for",
        settle=_topk,
    ),
    Key("<teacher>.model_path", "teacher.model", _path),
    Key(
        "<teacher>.inference.tensor_model_parallel_size",
        "teacher.num_replicas",
        settle=_teacher_replicas,
        note="`distillation.n_gpus_per_node` x `distillation.nnodes` over it",
    ),
    Key("<teacher>.inference.tensor_model_parallel_size", "teacher.tensor_parallel"),
    Key("<teacher>.inference.dtype", "teacher.dtype", _dtype),
    Key("<teacher>.inference.gpu_memory_utilization", "teacher.gpu_memory_utilization"),
    Key("<teacher>.inference.max_num_seqs", "teacher.max_num_seqs"),
    Key("<teacher>.inference.max_num_batched_tokens", "teacher.max_batched_tokens"),
)


def key_table() -> str:
    """``KEYS`` as the table of docs/verl.md."""
    rows = ["| verl | ours | |", "|---|---|---|"]
    for key in KEYS:
        verl = key.under("distillation.teacher_models.*")
        rows.append(f"| `{verl}` | `{key.ours}` | {key.note} |")
    return "\n".join(rows) + "\n"
