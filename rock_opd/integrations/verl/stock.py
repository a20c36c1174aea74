"""Token policies for verl's own synchronous trainer: ``trainer.v1.trainer_mode=rock_opd_sync``.

verl's loop, workers and engines stay as they are. Before each actor update the batch gets a field
``token_weights``, which the losses ``rock_*`` read; the weights come from the run's registry actor
(``registry.RegistryActor``), whose state is saved in ``global_step_N/rock_opd/``.

It reads of ``+rock_opd.*`` the sections ``policy``, ``loss.normalizer`` and ``run.seed``, and
refuses all others: they belong to ``trainer_mode=rock_opd``.

Shape letters: ``N`` sampled tokens of all sequences laid flat.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rock_opd.actors.waiting import gather
from rock_opd.checkpoint import flaw, read_state, seal, write_state
from rock_opd.config import Recipe
from rock_opd.core.batching import flatten
from rock_opd.durable import replace_folder, storing
from rock_opd.errors import ConfigError, DataError
from rock_opd.inputs import listed_types
from rock_opd.integrations.verl import plugin
from rock_opd.integrations.verl.adapters import by_response, from_tensordict, teacher_scores
from rock_opd.integrations.verl.loss_modes import ALIAS
from rock_opd.integrations.verl.losses import check_normalizer, weight_fields
from rock_opd.integrations.verl.names import VerlNames
from rock_opd.integrations.verl.registry import NAMED, RegistryActor, StepWeights, check_policy
from rock_opd.integrations.verl.unsupported import (
    LOSS,
    MODEL,
    TRAINER,
    WHERE,
    get,
    overrides,
    teacher_path,
)
from rock_opd.models import num_real_ids, tokenizer_fingerprint
from rock_opd.recipe_file import build_recipe
from rock_opd.runlog import to_json
from rock_opd.types import Rollout, StepSignals, TeacherRows
from rock_opd.vocabulary import Vocabulary

MODE = "rock_opd_sync"
ANSWER_S = 600.0
"""Longest wait for the registry actor: it adds up columns as long as the vocabulary."""
LOSS_MODES = next(part.names for part in plugin.PARTS if part.name == "losses")
READ_HERE = ("policy", "loss.normalizer", "run.seed")
FIELDS = (
    *("uid", "prompts", "responses", "input_ids", "response_mask", "old_log_probs"),
    *("teacher_ids", "teacher_logprobs"),
)


def mask_recipe(config: DictConfig) -> Recipe:
    """The part of a recipe that decides masks, from the block ``rock_opd``.

    Raises:
        ConfigError: a key that is not read here, a policy that needs more than a verl batch holds,
            or a loss that reads no weights.
    """
    block = overrides(config)
    for name in sorted(_keys(block)):
        if name.partition(".")[0] != "policy" and name not in READ_HERE:
            raise ConfigError(
                f"{WHERE}: +{TRAINER}.{name} is not read by trainer_mode={MODE}, whose engines are "
                f"verl's: it reads {', '.join(READ_HERE)}"
            )
    models = {
        "student": {"model": get(config, f"{MODEL}.path") or ""},
        "teacher": {"model": get(config, f"{teacher_path(config)}.model_path")},
    }
    needed = ("student.model", "teacher.model")
    with VerlNames(config).spoken():
        recipe = build_recipe(
            OmegaConf.merge(block, OmegaConf.create(models)), [], where=WHERE, needed=needed
        )
        check_policy(recipe.policy)
    _refuse_other_losses(config)
    check_normalizer(
        recipe.loss.normalizer,
        loss_agg_mode=config.actor_rollout_ref.actor.loss_agg_mode,
        use_task_rewards=bool(get(config, f"{LOSS}.use_task_rewards")),
    )
    return recipe


def _keys(block: DictConfig) -> Iterator[str]:
    for part in block:
        keys = block[part] if isinstance(block[part], DictConfig) else ()
        yield from (f"{part}.{key}" for key in keys) if keys else (part,)


def _refuse_other_losses(config: DictConfig) -> None:
    mode = str(get(config, f"{LOSS}.loss_mode"))
    if get(config, "distillation.enabled") and mode in LOSS_MODES:
        return
    ours = f"rock_{ALIAS.get(mode, mode)}"
    raise ConfigError(
        f"{WHERE}: trainer_mode={MODE} needs distillation.enabled=true and a loss_mode that reads "
        f"token_weights, got {mode}: take "
        + (ours if ours in LOSS_MODES else f"one of {', '.join(LOSS_MODES)}")
    )


def batch_signals(data: TensorDict) -> tuple[StepSignals, list[Rollout], float]:
    """What a token policy may know of a verl batch.

    Args:
        data: ``FIELDS``, as verl's v1 trainers store them.

    Returns:
        The signals of the N sampled tokens (a tool's turn and verl's padding have none), with the
        trainer's own log-probabilities; the rollouts they stand in; and the share of tokens that
        are not in the teacher's top-k table. Of those the table only bounds log p from above, and
        the bound stands for it: their log-ratio is the least it can be.
    """
    rollouts, teacher = from_tensordict(
        TensorDict({**data, "rollout_log_probs": data["old_log_probs"]}, data.batch_size)
    )
    known = [np.isfinite(rows.logprobs) for rows in teacher]
    scores = teacher_scores(rollouts, [_bounded(rows) for rows in teacher])
    unknown = sum(int((~found).sum()) for found in known)
    signals = flatten(rollouts, scores)
    return signals, rollouts, unknown / max(1, signals.num_tokens)


def _bounded(rows: TeacherRows) -> TeacherRows:
    if rows.kind == "sampled":
        return rows
    bound = np.minimum(rows.topk_logprobs.min(1), rows.tail_logprob)
    return replace(rows, logprobs=np.where(np.isnan(rows.logprobs), bound, rows.logprobs))


class TokenWeightsMixin:
    """Puts token weights into the batch of a verl trainer before its actor is updated.

    Expects of the class beside it what ``PPOTrainer`` has: ``config``, ``global_steps``,
    ``tokenizer`` and the three methods that are extended here.
    """

    def __init__(self, config: DictConfig) -> None:
        self._recipe = mask_recipe(config)
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl asks the mode's name, not the class
        super().__init__(config)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._registry = self.start_registry()
        if self.global_steps == 0:
            return
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        state = folder / TRAINER
        if not state.is_dir():
            print(f"{state}: no registry in this checkpoint; it begins empty", flush=True)
            return
        if (why := flaw(state, self.global_steps)) is not None:
            raise DataError(
                f"resume from {state}: {why}; go on from an older global_step_N (trainer."
                "resume_mode=resume_path), or remove this folder to begin with an empty registry"
            )
        numbers, arrays = read_state(state)
        _ask(self._registry.unpack.remote(numbers, arrays, str(state)), "load")

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        numbers, arrays = _ask(self._registry.pack.remote(self.global_steps), "save")
        partial, state = folder / f"{TRAINER}.partial", folder / TRAINER
        with storing("registry", state):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            seal(partial, self.global_steps, write_state(partial, numbers, arrays))
            replace_folder(partial, state)
        super()._save_checkpoint()  # names this step the latest at its end

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._update_actor(self.put_token_weights(batch, metrics), metrics)

    def put_token_weights(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Weighs the batch and counts it as this step.

        Returns:
            The batch with ``token_weights`` among its fields.
        """
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
        )
        signals, rollouts, bounded = batch_signals(data)
        found: StepWeights = _ask(self._registry.weigh.remote(self.global_steps, signals), "weigh")
        fields = weight_fields(
            by_response(found.weight, rollouts),
            data["response_mask"],
            normalizer=self._recipe.loss.normalizer,
            mask_version=found.mask_version,
        )
        metrics.update(found.metrics)
        metrics["freeze/bounded_share"] = bounded
        extra_info = dict(batch.extra_info)
        batch = tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(fields, batch_size=len(batch.keys)),
        )
        batch.extra_info.update(extra_info)
        return batch

    def start_registry(self) -> Any:
        """The run's registry actor: started, or the one of its name."""
        recipe, policy = self._recipe, self._recipe.policy
        width = num_real_ids(recipe.student.model, recipe.teacher.model)
        vocabulary = Vocabulary(
            model=recipe.student.model,
            num_types=width,
            fingerprint=tokenizer_fingerprint(self.tokenizer),
            tokenizer=self.tokenizer,
        )
        names = VerlNames(self.config)
        with names.spoken():
            frozen_list, guard_ids, notices = listed_types(policy, vocabulary)
        for notice in notices:
            print(names(notice), flush=True)
        settings = asdict(policy) | {"ids_file": None, "guard_file": None}
        where = Path(self.config.trainer.default_local_dir).resolve()
        fingerprints = to_json({"vocabulary": width, "seed": recipe.run.seed, "policy": settings})
        registry = (
            ray.remote(RegistryActor)
            .options(name=f"{NAMED}:{where}", get_if_exists=True, num_cpus=0)
            .remote(
                policy,
                num_types=width,
                seed=recipe.run.seed,
                frozen_list=frozen_list,
                guard_ids=guard_ids,
                fingerprints=fingerprints,
            )
        )
        _ask(registry.join.remote(fingerprints), "join")
        return registry


def _ask(answer: Any, what: str) -> Any:
    return gather("registry", what, [answer], ANSWER_S)[0]


class RockOPDSyncTrainer(TokenWeightsMixin, PPOTrainerSync):
    """verl's synchronous trainer with token weights."""


def register() -> None:
    """Puts the trainer into verl's registry."""
    register_trainer(MODE)(RockOPDSyncTrainer)


plugin.complete(__name__)
