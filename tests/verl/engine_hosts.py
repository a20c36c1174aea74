"""Ranks of verl's training worker whose engine can be changed, and batches for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from hosts import CpuTrainingWorker, fsdp_worker_config
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

LENGTHS = (5, 6, 4, 7, 18, 25, 16, 21)
"""Of the sequences: the first half goes to rank 0 of two, and has a quarter of the tokens."""
LOSS = partial(sft_loss, config=None)


class EngineWorker(CpuTrainingWorker):
    """verl's training worker, built anew in its process for every case: importing verl takes long.

    Whatever a test asks for beside verl's own calls goes through ``ask``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rebuild(self, config: TrainingWorkerConfig) -> None:
        self.engine = None
        TrainingWorker.__init__(self, config)
        self.reset()
        self.set_loss_fn(LOSS)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask(self, question: Any, *args: Any) -> Any:
        """``question(engine, *args)``, or the exception it raised."""
        try:
            return question(self.engine, *args)
        except Exception as error:
            return error


class Ranks:
    """One group, and what it answers."""

    def __init__(self, world_size: int, first: TrainingWorkerConfig) -> None:
        self.world_size = world_size
        self._pool = RayResourcePool(
            [world_size], use_gpu=False, max_colocate_count=1, name_prefix=f"engine{world_size}"
        )
        self.group = RayWorkerGroup(
            resource_pool=self._pool,
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(EngineWorker), config=first),
            name_prefix=f"engine{world_size}",
        )

    def build(self, config: TrainingWorkerConfig) -> None:
        self.group.rebuild(config)

    def close(self) -> None:
        """Gives its places back."""
        for worker in self.group.workers:
            ray.kill(worker)
        for places in self._pool.pgs:
            ray.util.remove_placement_group(places)

    def step(self, batch: TensorDict | None = None, **how: Any) -> dict[str, Any]:
        """One update; verl's metrics."""
        output = self.group.train_mini_batch(make_batch(**how) if batch is None else batch)
        metrics = tu.get(_now(output), "metrics")
        return {k: v[0] if isinstance(v, list) else v for k, v in metrics.items()}

    def log_probs(self, **how: Any) -> list[torch.Tensor]:
        """By sequence."""
        batch = make_batch(**how)
        tu.assign_non_tensor(batch, compute_loss=False)
        return list(_now(self.group.infer_batch(batch))["log_probs"].unbind())

    def ask(self, question: Any, *args: Any) -> list[Any]:
        answers = self.group.ask(question, *args)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def weights(self) -> dict[str, torch.Tensor]:
        """As every rank gives them to the rollout."""
        first, *others = self.ask(per_tensor)
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first | other)
        return first


def per_tensor(engine: Any) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().clone() for name, t in engine.get_per_tensor_param()[0]}


def _now(output: Any) -> TensorDict:
    return output if isinstance(output, TensorDict) else output.get()


def fsdp_config(model: Path | str, **engine: Any) -> TrainingWorkerConfig:
    """verl's FSDP2 in float32."""
    config = fsdp_worker_config(model)
    return replace(config, engine_config=replace(config.engine_config, **engine))


def deepspeed_config(
    model: Path | str,
    *,
    checkpoint: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    model_type: str = "language_model",
    **engine: Any,
) -> TrainingWorkerConfig:
    """The same on our engine; ``engine`` by the fields of ``DeepSpeedEngineConfig``."""
    from rock_opd.integrations.verl.engine_config import DeepSpeedEngineConfig

    settings = {
        "dtype": "float32",
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 2,
    }
    options = {
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "eager"},
    }
    return TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(path=str(model), **{**options, **(model_options or {})}),
        engine_config=DeepSpeedEngineConfig(**{**settings, **engine}),
        optimizer_config=FSDPOptimizerConfig(
            **{"lr": 1e-5, "total_training_steps": 10, "clip_grad": 1.0, **(optim or {})}
        ),
        checkpoint_config=CheckpointConfig(**(checkpoint or {})),
    )


def make_batch(*, lengths: tuple[int, ...] = LENGTHS, micro: int = 2, seed: int = 0) -> TensorDict:
    """Random tokens; every token but the first three of a sequence is trained, and then every
    fourth is not.

    Args:
        micro: sequences of one micro-batch.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 1024, (num,), generator=generator) for num in lengths]
    masks = [((torch.arange(num) >= 3) & (torch.arange(num) % 4 != 3)).long() for num in lengths]
    columns = {
        "input_ids": ids,
        "position_ids": [torch.arange(num) for num in lengths],
        "loss_mask": masks,
    }
    batch = tu.get_tensordict(
        {
            key: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            for key, rows in columns.items()
        }
    )
    tu.assign_non_tensor(
        batch,
        global_batch_size=len(lengths),
        mini_batch_size=len(lengths),
        micro_batch_size_per_gpu=micro,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        calculate_entropy=False,
    )
    return batch


# ---------------------------------------------------------------- questions to an engine


def nan_loss_on_last_rank(**inputs: Any) -> tuple[torch.Tensor, dict]:
    loss, metrics = sft_loss(None, **inputs)
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return loss * (float("nan") if last else 1.0), metrics


def loss_plus_nan_on_last_rank(**inputs: Any) -> tuple[torch.Tensor, dict]:
    """A loss of NaN whose own gradient is finite."""
    loss, metrics = sft_loss(None, **inputs)
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return loss + (float("nan") if last else 0.0), metrics


def half_a_step(engine: Any) -> None:
    """One whose loss raises in its second micro-batch."""
    calls = []

    def loss(**inputs: Any) -> tuple[torch.Tensor, dict]:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("a loss of the test's")
        return LOSS(**inputs)

    batch = make_batch()
    tu.assign_non_tensor(batch, use_dynamic_bsz=False, use_remove_padding=False)
    with engine.train_mode():
        engine.train_batch(batch, loss)


def leave_and_come_back(engine: Any) -> list[set[str]]:
    """What verl's phases do on a GPU, one part at a time; what was away after each move."""
    away = []
    for back, parts in (
        (False, {"model": True, "optimizer": False, "grad": False}),
        (False, {"model": True, "optimizer": True, "grad": True}),
        (True, {"model": True, "optimizer": False, "grad": False}),
        (True, {"model": True, "optimizer": True, "grad": True}),
    ):
        engine._move(back, **parts)
        away.append(set(engine._core.away))
    return away


def weights_while_away(engine: Any) -> tuple[dict[str, torch.Tensor], set[str]]:
    engine._move(False, model=True, optimizer=True, grad=True)
    given, away = per_tensor(engine), set(engine._core.away)
    engine._move(True, model=True, optimizer=True, grad=True)
    return given, away


def most_weights_at_once(engine: Any) -> tuple[int, int]:
    """Most elements that were whole at a time while weights were given away, and the elements of
    the largest weight; asked of DeepSpeed's own parameters (stage 3)."""
    parameters = list(engine._hf_model.parameters())
    cut = [p for p in parameters if not p.ds_persist]

    def whole() -> int:
        return sum(p.ds_numel for p in cut if p.data.numel() == p.ds_numel)

    most = max(whole() for _ in engine.get_per_tensor_param()[0])
    return most, max(p.ds_numel for p in cut)


def limits_s(engine: Any) -> set[float]:
    """Of all groups that DeepSpeed reduces over."""
    groups = engine._core.engine.optimizer.real_dp_process_group
    cpu = torch.device("cpu")
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}


def held_state(engine: Any) -> list[tuple]:
    return [
        (kind, part.name, part.start, tensor.clone())
        for part in engine._core.parts()
        for kind, tensor in part.tensors.items()
    ]


# ---------------------------------------------------------------- verl's whole actor worker


def actor_worker_numbers(
    _: Any, config: Any, batch: TensorDict, folder: str, with_ref: bool
) -> dict[str, Any]:
    """What verl's ``ActorRolloutRefWorker`` says as an actor under a command's config: of two
    updates, of log-probabilities before them and of a reference model; saved to ``folder``.

    Args:
        with_ref: verl's FSDP2 keeps a reference model in pinned memory, which CPUs have not.
    """
    from verl.workers.engine_workers import ActorRolloutRefWorker

    numbers: dict[str, Any] = {}
    if with_ref:
        ref = ActorRolloutRefWorker(config, role="ref")
        ref.init_model()
        numbers["ref_log_probs"] = ref.compute_ref_log_prob(batch.clone())["log_probs"].values()
    actor = ActorRolloutRefWorker(config, role="actor")
    actor.init_model()
    numbers["log_probs"] = actor.compute_log_prob(batch.clone())["log_probs"].values()
    for _ in range(2):
        output = actor.update_actor(batch.clone())
    numbers["metrics"] = tu.get(output, "metrics")
    numbers["engine"] = type(actor.actor.engine).__name__
    numbers["weights"] = per_tensor(actor.actor.engine)
    actor.save_checkpoint(folder, None, 2, 1)
    return numbers
