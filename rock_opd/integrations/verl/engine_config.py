"""verl's config objects for the DeepSpeed engine: what hydra builds from ``config/``, and what of
verl's own settings the engine cannot do.

Keys that verl's FSDP engine has keep its names and meaning. Everything refused is refused before a
model is loaded, with the key in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import ActorConfig, EngineConfig, FSDPOptimizerConfig

from rock_opd.errors import ConfigError

CHECKPOINT_CONTENTS = {"model", "optimizer", "extra"}
"""What a checkpoint to go on from is made of; it is saved and loaded whole."""


def _refuse(key: str, value: object, expected: str) -> None:
    raise ConfigError(f"verl, DeepSpeed engine: {key}={value} is not supported: {expected}")


def _dtype(key: str, value: object, expected: tuple[torch.dtype, ...]) -> torch.dtype:
    try:
        dtype = PrecisionType.to_dtype(value)
    except RuntimeError:
        dtype = None
    if dtype not in expected:
        names = " or ".join(str(known).removeprefix("torch.") for known in expected)
        _refuse(key, value, f"expected {names}")
    return dtype


@dataclass
class DeepSpeedEngineConfig(EngineConfig):
    """One role's engine. verl's own fields: ``param_offload`` and ``optimizer_offload`` leave the
    GPU between phases; ``dtype`` is that of weights, forward and backward (bfloat16, float32)."""

    strategy: str = "deepspeed"
    zero_stage: int = 2
    """ZeRO stage, 0 to 3. A forward-only role holds its weights whole whatever the stage."""
    zero_offload: bool = False
    """ZeRO-Offload: float32 weights, moments and the update itself in host memory, always."""
    gather_bucket_bytes: int = 512 << 20
    """Weights put together at once under stage 3 when they are given to the rollout."""
    model_dtype: str = "fp32"
    """As FSDP's, of the optimizer's own weights: always float32 here."""
    # dataclasses of verl are read by OmegaConf, which wants Optional spelled out
    mixed_precision: Optional[dict[str, Any]] = None  # noqa: UP045
    """As FSDP's: ``param_dtype`` goes before ``dtype``; gradients always travel in float32."""
    ulysses_sequence_parallel_size: int = 1
    """Only 1."""
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    use_torch_compile: bool = True
    """As FSDP's, all of these."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != "deepspeed":
            _refuse("strategy", self.strategy, "expected deepspeed")
        if self.zero_stage not in (0, 1, 2, 3):
            _refuse("deepspeed.zero_stage", self.zero_stage, "expected 0, 1, 2 or 3")
        if self.ulysses_sequence_parallel_size != 1:
            _refuse(
                "deepspeed.ulysses_sequence_parallel_size",
                self.ulysses_sequence_parallel_size,
                "every rank reads whole sequences; use 1, or model_engine=dp",
            )
        if self.gather_bucket_bytes < 1:
            _refuse("deepspeed.gather_bucket_bytes", self.gather_bucket_bytes, "expected >= 1")
        if self.zero_offload and self.zero_stage == 0:
            _refuse("deepspeed.zero_offload", True, "it needs deepspeed.zero_stage 1, 2 or 3")
        for key in ("param_offload", "optimizer_offload"):
            if getattr(self, key) and not self.forward_only and self.zero_stage < 2:
                _refuse(f"deepspeed.{key}", True, "it needs deepspeed.zero_stage 2 or 3")
        if self.router_replay.mode != "disabled":
            _refuse("deepspeed.router_replay.mode", self.router_replay.mode, "expected disabled")
        _dtype("deepspeed.model_dtype", self.model_dtype, (torch.float32,))
        _ = self.training_dtype

    @property
    def training_dtype(self) -> torch.dtype:
        """Of weights, forward and backward: float32 or bfloat16."""
        key, value = "deepspeed.dtype", self.dtype
        if self.mixed_precision is not None:
            key = "deepspeed.mixed_precision.param_dtype"
            value = self.mixed_precision.get("param_dtype", "bf16")
            reduce = self.mixed_precision.get("reduce_dtype", "fp32")
            _dtype("deepspeed.mixed_precision.reduce_dtype", reduce, (torch.float32,))
        return _dtype(key, value, (torch.bfloat16, torch.float32))


@dataclass
class DeepSpeedOptimizerConfig(FSDPOptimizerConfig):
    """FSDP's keys; the optimizer is torch's AdamW, and of its other arguments only ``eps`` is one
    (``override_optimizer_config.eps``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        adam_epsilon(self)


def adam_epsilon(config: FSDPOptimizerConfig) -> float:
    """Adam's epsilon.

    Raises:
        ConfigError: another optimizer than torch's AdamW, or more arguments for it.
    """
    if (config.optimizer_impl, config.optimizer) != ("torch.optim", "AdamW"):
        _refuse("optim.optimizer", f"{config.optimizer_impl}.{config.optimizer}", "use AdamW")
    options = dict(config.override_optimizer_config or {})
    epsilon = float(options.pop("eps", 1e-8))
    if options:
        _refuse(f"optim.override_optimizer_config.{min(options)}", options[min(options)], "eps is")
    if config.clip_grad is None or config.clip_grad < 0:
        _refuse("optim.clip_grad", config.clip_grad, "expected a number, 0 turns clipping off")
    return epsilon


@dataclass
class DeepSpeedActorConfig(ActorConfig):
    """An actor, or a reference model, whose engine is at ``deepspeed``."""

    strategy: str = "deepspeed"
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False
    ulysses_sequence_parallel_size: int = 1
    pad_to_length: bool = False
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    """As FSDP's: the engine takes what stands at ``deepspeed``, which the yaml fills from these."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ulysses_sequence_parallel_size != 1:
            _refuse(
                "actor.ulysses_sequence_parallel_size",
                self.ulysses_sequence_parallel_size,
                "every rank reads whole sequences; use 1, or model_engine=dp",
            )
        self.engine = self.deepspeed


def refuse_unsupported(model: Any, checkpoint: Any) -> None:
    """What of a role's model and checkpoint settings the engine cannot do.

    Args:
        model: verl's ``HFModelConfig``.
        checkpoint: verl's ``CheckpointConfig``.

    Raises:
        ConfigError: the first such setting.
    """
    if model.model_type != "language_model":
        _refuse("model_type", model.model_type, "critics run on verl's FSDP engine")
    if hasattr(model.hf_config, "vision_config"):
        _refuse("model.path", model.path, "models that see images run on model_engine=dp")
    if model.lora_rank > 0 or model.lora_adapter_path is not None:
        _refuse("model.lora_rank", model.lora_rank, "all weights are trained; use 0")
    if model.lora.get("rank", 0):
        _refuse("model.lora.rank", model.lora["rank"], "all weights are trained; use 0")
    for key in ("use_liger", "use_fused_kernels", "enable_activation_offload"):
        if getattr(model, key):
            _refuse(f"model.{key}", True, "use false")
    for key, options in (("tiled_mlp.enabled", model.tiled_mlp), ("mtp.enable", model.mtp)):
        if isinstance(options, Mapping) and options.get(key.partition(".")[2], False):
            _refuse(f"model.{key}", True, "use false")
    saved = set(checkpoint.save_contents) - {"hf_model"}
    if saved and saved != CHECKPOINT_CONTENTS:
        _refuse(
            "checkpoint.save_contents",
            list(checkpoint.save_contents),
            "model, optimizer and extra are saved together, hf_model with them or alone",
        )
    if saved and set(checkpoint.load_contents) - {"hf_model"} != CHECKPOINT_CONTENTS:
        _refuse(
            "checkpoint.load_contents",
            list(checkpoint.load_contents),
            "model, optimizer and extra are loaded together",
        )
    if checkpoint.async_save:
        _refuse("checkpoint.async_save", True, "use false")
