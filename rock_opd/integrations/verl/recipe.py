"""verl's config as one of our recipes: which key becomes which, and what is refused.

Pure: a config in, a ``Recipe`` out, no file read and no verl imported. ``KEYS`` is the one table;
``docs/verl.md`` shows it as ``key_table`` renders it. What stands under ``rock_opd`` in the config
(``+rock_opd.policy.name=rock_freeze``) is put over what verl's keys gave.

Refuses what it could only approximate: a setting that would train something else than it says is
worse than a run that does not start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.integrations.verl.unsupported import (
    ACTOR,
    LOSS,
    MODEL,
    ROLLOUT,
    TRAINER,
    WHERE,
    device_of,
    get,
    not_supported,
    refuse_unsupported,
    teacher_entry,
)
from rock_opd.recipe_file import build_recipe

_ABSENT = object()


class _Leave(Exception):
    """The recipe's own default stays."""


# --- conversions: (value, whole config) -> value of the recipe ------------------------------------


def _same(value: Any, config: DictConfig) -> Any:
    return value


def _given(value: Any, config: DictConfig) -> Any:
    """As it is, unless it is null."""
    if value is None:
        raise _Leave
    return value


def _positive_or_0(value: Any, config: DictConfig) -> int:
    """verl's -1 and null mean never, or all: 0 in a recipe."""
    return max(0, int(value or 0))


def _path(value: Any, config: DictConfig) -> Any:
    """A file or folder with ``~`` resolved; a hub id stays one."""
    if value is None:
        raise _Leave
    return str(Path(value).expanduser()) if str(value).startswith("~") else str(value)


def _single(key: str, value: Any, config: DictConfig) -> str:
    files = [value] if isinstance(value, str) else list(value)
    if len(files) != 1:
        raise not_supported(key, files, "one parquet or JSONL file; put them into one")
    return _path(files[0], config)


def _one_file(value: Any, config: DictConfig) -> str:
    return _single("data.train_files", value, config)


def _validation_file(value: Any, config: DictConfig) -> str:
    if _positive_or_0(get(config, "trainer.test_freq"), config) == 0 or value is None:
        raise _Leave
    return _single("data.val_files", value, config)


def _dtype(value: Any, config: DictConfig) -> str:
    names = {"bf16": "bfloat16", "fp32": "float32", "32": "float32", "float": "float32"}
    return names.get(str(value), str(value))


def _trainer_gpus(config: DictConfig) -> int:
    return int(get(config, "trainer.n_gpus_per_node")) * int(get(config, "trainer.nnodes"))


def _num_ranks(value: Any, config: DictConfig) -> int:
    return _trainer_gpus(config)


def _num_workers(value: Any, config: DictConfig) -> int:
    gpus = _trainer_gpus(config)
    if gpus % int(value):
        raise not_supported(
            f"{ROLLOUT}.tensor_model_parallel_size",
            value,
            f"it must divide trainer.n_gpus_per_node x trainer.nnodes = {gpus}",
        )
    return gpus // int(value)


def _device(value: Any, config: DictConfig) -> str:
    device = device_of(config)
    if device not in ("cuda", "cpu"):
        raise not_supported("trainer.device", value, "cuda or cpu")
    return device


def _colocate(value: Any, config: DictConfig) -> str:
    return "none" if device_of(config) == "cpu" else "all"


def _micro_batch(value: Any, config: DictConfig) -> int:
    """Tokens of a micro-batch; verl's count of sequences stands for so many of full length."""
    if get(config, f"{ACTOR}.use_dynamic_bsz"):
        return int(value)
    sequences = get(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1
    longest = get(config, "data.max_prompt_length") + get(config, "data.max_response_length")
    return int(sequences) * int(longest)


def _min_lr(value: Any, config: DictConfig) -> float:
    kind = get(config, f"{ACTOR}.optim.warmup_style") or value
    lr = float(get(config, f"{ACTOR}.optim.lr"))
    if kind == "constant":
        return lr
    if kind != "cosine" or get(config, f"{ACTOR}.optim.num_cycles", 0.5) != 0.5:
        raise not_supported(
            f"{ACTOR}.optim.lr_scheduler_type", kind, "constant, or cosine with num_cycles=0.5"
        )
    return lr * float(get(config, f"{ACTOR}.optim.min_lr_ratio") or 0.0)


def _warmup(value: Any, config: DictConfig) -> float:
    steps = int(get(config, f"{ACTOR}.optim.lr_warmup_steps", -1) or -1)
    if steps <= 0:
        return float(value or 0.0)
    total = get(config, "trainer.total_training_steps")
    if total is None:
        raise not_supported(
            f"{ACTOR}.optim.lr_warmup_steps",
            steps,
            "without trainer.total_training_steps; set that, or lr_warmup_steps_ratio",
        )
    return steps / int(total)


def _only(key: str, name: str, options: Any) -> Any:
    """The option of this name, where no other may be set.

    Raises:
        ConfigError: there is another.
        _Leave: there is none.
    """
    options = dict(options or {})
    value = options.pop(name, None)
    if options:
        other = min(options)
        raise not_supported(f"{key}.{other}", options[other], f"only {name} is")
    if value is None:
        raise _Leave
    return value


def _epsilon(value: Any, config: DictConfig) -> float:
    return float(_only(f"{ACTOR}.optim.override_optimizer_config", "eps", value))


def _attention(value: Any, config: DictConfig) -> str:
    return str(_only(f"{MODEL}.override_config", "attn_implementation", value))


def _on_bad_row(value: Any, config: DictConfig) -> str:
    return "skip" if value else "fail"


def _limit(value: Any, config: DictConfig) -> int:
    rows = _positive_or_0(value, config)
    if rows and get(config, "data.shuffle"):
        raise not_supported(
            "data.train_max_samples",
            value,
            "with data.shuffle=true verl draws them at random; +rock_opd.data.limit takes the "
            "first rows",
        )
    return rows


def _thinking(value: Any, config: DictConfig) -> bool:
    return bool(_only("data.apply_chat_template_kwargs", "enable_thinking", value))


def _test_temperature(value: Any, config: DictConfig) -> float:
    return float(value) if get(config, f"{ROLLOUT}.val_kwargs.do_sample") else 0.0


def _save_hf(value: Any, config: DictConfig) -> int:
    wanted = "hf_model" in (get(config, f"{ACTOR}.checkpoint.save_contents") or [])
    return _positive_or_0(value, config) if wanted else 0


def _megabytes(value: Any, config: DictConfig) -> int:
    return int(value) << 20


# --- teacher and loss -----------------------------------------------------------------------------


def _teacher_replicas(value: Any, config: DictConfig) -> int:
    gpus = int(get(config, "distillation.n_gpus_per_node")) * int(
        get(config, "distillation.nnodes")
    )
    if gpus < 1 or gpus % int(value):
        raise ConfigError(
            f"{WHERE}: distillation.n_gpus_per_node x distillation.nnodes = {gpus}, expected a "
            f"positive multiple of the teacher's tensor_model_parallel_size={value}"
        )
    return gpus // int(value)


SAMPLED = {"loss.divergence": "policy_gradient", "teacher.payload": "sampled"}
LOSSES: dict[tuple[str, bool], dict[str, str]] = {
    **{(name, True): SAMPLED for name in ("k1", "kl", "rock_k1")},
    **{(name, False): SAMPLED for name in ("k2", "mse", "rock_k2")},
    ("rock_reverse_kl_topk", False): {
        "loss.divergence": "reverse_kl",
        "teacher.payload": "topk_tail",
    },
}
"""(loss_mode, use_policy_gradient) -> what of ours has the same gradient, token by token.

k1 as a reward and k2 back-propagated both push a sampled token by ``(log q - log p) grad log q``.
"""
_NO_EQUAL = {
    "k1": "back-propagated it does not depend on the teacher; set use_policy_gradient=true",
    "k2": "as a reward it is no divergence; set use_policy_gradient=false",
    "k3": "its gradient is a sampled forward KL, which has no equal; +rock_opd.loss.divergence="
    "forward_kl +rock_opd.teacher.payload=hidden is what it estimates, k2 the reverse KL",
    "abs": "it has no equal; k2 is the reverse KL",
    "forward_kl_topk": "it cuts the table off raw, which has no equal; "
    "+rock_opd.loss.divergence=forward_kl +rock_opd.teacher.payload=topk_tail has a tail bucket",
    "rock_reverse_kl_topk": "as a reward it has no equal; set use_policy_gradient=false",
    "rock_reverse_kl_topk_renorm": "it has no equal; rock_reverse_kl_topk has a tail bucket",
}
_ALIAS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _loss(config: DictConfig, chosen: bool) -> dict[str, Any]:
    """Divergence and payload.

    Args:
        chosen: the ``rock_opd`` block names a divergence: verl's loss_mode is not asked.
    """
    topk = {"teacher.top_k": int(get(config, f"{LOSS}.topk") or 64)}
    if chosen:
        return topk
    mode = str(get(config, f"{LOSS}.loss_mode"))
    found = LOSSES.get((mode, bool(get(config, f"{LOSS}.use_policy_gradient"))))
    if found is None:
        plain = _ALIAS.get(mode, mode)
        why = _NO_EQUAL.get(plain) or _NO_EQUAL.get(plain.removeprefix("rock_"))
        raise not_supported(f"{LOSS}.loss_mode", mode, why or "it is not known here")
    return {**found, **topk}


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One row of the table."""

    verl: str
    """Below ``distillation.teacher_models.<name>`` when it begins with ``<teacher>``."""
    ours: str
    convert: Callable[[Any, DictConfig], Any] = _same
    note: str = ""


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
        _colocate,
        "`all` on cuda: student, rollout and teacher take turns on the same GPUs; `none` on cpu",
    ),
    Key("trainer.n_gpus_per_node", "student.num_ranks", _num_ranks, "times `trainer.nnodes`"),
    Key("trainer.total_epochs", "run.num_epochs"),
    Key("trainer.total_training_steps", "run.num_steps", _positive_or_0, "null: by epochs"),
    Key("trainer.save_freq", "checkpoint.every", _positive_or_0, "-1: at the end only"),
    Key(
        "trainer.save_freq",
        "checkpoint.save_hf_every",
        _save_hf,
        "where `actor.checkpoint.save_contents` has `hf_model`",
    ),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", _positive_or_0, "null: all"),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_hf", _positive_or_0, "null: all"),
    Key("trainer.test_freq", "eval.every", _positive_or_0, "-1: no evaluation"),
    Key("data.train_files", "data.prompts", _one_file, "one file"),
    Key("data.val_files", "eval.problems", _validation_file, "with `trainer.test_freq` only"),
    Key("data.train_max_samples", "data.limit", _limit, "with `data.shuffle=false`"),
    Key("data.shuffle", "data.shuffle"),
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
        _micro_batch,
        "with `use_dynamic_bsz`; else `ppo_micro_batch_size_per_gpu` sequences of full length",
    ),
    Key(f"{ACTOR}.fsdp_config.dtype", "student.dtype", _dtype, "with `model_engine=dp`"),
    Key(f"{ACTOR}.fsdp_config.optimizer_offload", "student.offload_optimizer"),
    Key(f"{ACTOR}.deepspeed.dtype", "student.dtype", _dtype, "with `model_engine=deepspeed`"),
    Key(f"{ACTOR}.deepspeed.zero_stage", "student.zero_stage"),
    Key(f"{ACTOR}.deepspeed.zero_offload", "student.offload_optimizer"),
    Key(f"{ACTOR}.checkpoint.async_save", "checkpoint.background"),
    Key(f"{ACTOR}.optim.lr", "optim.lr", lambda value, config: float(value)),
    Key(
        f"{ACTOR}.optim.lr_scheduler_type",
        "optim.min_lr",
        _min_lr,
        "`constant`: the same as lr; `cosine`: lr times `min_lr_ratio`",
    ),
    Key(
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        "optim.warmup_ratio",
        _warmup,
        "`lr_warmup_steps` goes before it; the first update moves, where verl's has lr 0",
    ),
    Key(f"{ACTOR}.optim.betas", "optim.betas", lambda value, config: list(value)),
    Key(f"{ACTOR}.optim.override_optimizer_config", "optim.eps", _epsilon, "`eps`"),
    Key(f"{ACTOR}.optim.weight_decay", "optim.weight_decay"),
    Key(f"{ACTOR}.optim.clip_grad", "optim.max_grad_norm"),
    Key(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel"),
    Key(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "rollout.num_workers",
        _num_workers,
        "`trainer.n_gpus_per_node` x `trainer.nnodes` over it",
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
    Key("<teacher>.model_path", "teacher.model", _path),
    Key(
        "<teacher>.inference.tensor_model_parallel_size",
        "teacher.num_replicas",
        _teacher_replicas,
        "`distillation.n_gpus_per_node` x `distillation.nnodes` over it",
    ),
    Key("<teacher>.inference.tensor_model_parallel_size", "teacher.tensor_parallel"),
    Key("<teacher>.inference.dtype", "teacher.dtype", _dtype),
    Key("<teacher>.inference.gpu_memory_utilization", "teacher.gpu_memory_utilization"),
    Key("<teacher>.inference.max_num_seqs", "teacher.max_num_seqs"),
    Key("<teacher>.inference.max_num_batched_tokens", "teacher.max_batched_tokens"),
)


OWN = ("run.name", "run.dir", "resume")
"""What only verl's own keys may set."""


def recipe_from_verl(config: DictConfig) -> Recipe:
    """The recipe that trains what this config says; where to resume is left to the caller.

    Args:
        config: verl's whole config, as ``main_ppo`` composes it.

    Raises:
        ConfigError: the first key that cannot be honoured: which, what it is, what is supported.
    """
    refuse_unsupported(config)
    block = get(config, TRAINER) or {}
    block = OmegaConf.to_container(block, resolve=True) if block else {}
    if not isinstance(block, dict):
        raise ConfigError(
            f"{WHERE}: {TRAINER} must be a mapping, such as +{TRAINER}.policy.name=all"
        )
    overrides = OmegaConf.create(block)
    for key in OWN:
        if get(overrides, key, _ABSENT) is not _ABSENT:
            raise not_supported(
                f"{TRAINER}.{key}", get(overrides, key), "set trainer.default_local_dir"
            )
    teacher = teacher_entry(config)
    tree = OmegaConf.create({})
    for key in KEYS:
        part, name = (
            (teacher, key.verl.removeprefix("<teacher>."))
            if key.verl.startswith("<teacher>.")
            else (config, key.verl)
        )
        value = OmegaConf.select(part, name, default=_ABSENT)
        if value is _ABSENT:
            continue
        try:
            OmegaConf.update(tree, key.ours, key.convert(value, config))
        except _Leave:
            continue
    chosen = get(overrides, "loss.divergence") is not None
    for ours, value in _loss(config, chosen).items():
        OmegaConf.update(tree, ours, value)
    OmegaConf.update(tree, "run.dir", str(get(config, "trainer.default_local_dir")))
    OmegaConf.update(tree, "run.name", TRAINER)
    try:
        return build_recipe(OmegaConf.merge(tree, overrides), [], where=WHERE)
    except ConfigError as error:
        raise ConfigError(_with_verl_names(str(error))) from None


def _with_verl_names(text: str) -> str:
    """The message, with verl's name for each key of ours that it names."""
    names: dict[str, list[str]] = {}
    for key in KEYS:
        names.setdefault(key.ours, []).append(key.verl)
    said = [f"{ours} is {' or '.join(verl)}" for ours, verl in names.items() if ours in text]
    return f"{text} (in verl: {'; '.join(said)})" if said else text


def key_table() -> str:
    """``KEYS`` as the table of docs/verl.md."""
    rows = ["| verl | ours | |", "|---|---|---|"]
    for key in KEYS:
        verl = key.verl.replace("<teacher>", "distillation.teacher_models.*")
        rows.append(f"| `{verl}` | `{key.ours}` | {key.note} |")
    return "\n".join(rows) + "\n"


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
            "trainer.total_epochs",
            recipe.run.num_epochs,
            f"they end after {within} steps, trainer.total_training_steps={recipe.run.num_steps}; "
            f"set total_epochs={needed}",
        )
