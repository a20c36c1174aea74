"""Token weights in verl's stock trainer: a real TransferQueue and registry actor, made-up batches.

verl's own vLLM servers do not run on a CPU; all before and behind the actor's update is real.
"""

from __future__ import annotations

from pathlib import Path

import hosts
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl_configs import compose, distillation_args

from rock_opd.config import PolicyConfig
from rock_opd.errors import ConfigError, DataError, RockOPDError
from rock_opd.integrations.verl.registry import RegistryActor
from rock_opd.integrations.verl.stock import (
    RockOPDSyncTrainer,
    TokenWeightsMixin,
    batch_signals,
    mask_recipe,
)
from rock_opd.models import load_tokenizer

FREEZE = [
    "+rock_opd.policy.name=rock_freeze",
    "+rock_opd.policy.top_k=1",
    "+rock_opd.policy.warmup_steps=1",
    "+rock_opd.policy.refresh_every=1",
    "+rock_opd.policy.min_count=1",
    "+rock_opd.policy.drop_most_frequent=0",
]
NOT_READ = ("+rock_opd.run.device=cpu",)
ROCK = 7
"""The token type on which student and teacher of the made-up batches disagree most."""
LENGTHS = (5, 4, 6)


class StockStandIn:
    """What of verl's trainer the mixin calls: keeps what the actor would have been updated with."""

    def __init__(self, config) -> None:
        self.config, self.global_steps, self.updated, self.saved = config, 0, [], []

    def _load_checkpoint(self) -> None: ...

    def _save_checkpoint(self) -> None:
        self.saved.append(self.global_steps)

    def _update_actor(self, batch, metrics):
        self.updated.append(batch)
        return batch


class Trainer(TokenWeightsMixin, StockStandIn):
    pass


@pytest.fixture(scope="module")
def queue(verl_ray):
    import transfer_queue as tq
    from omegaconf import OmegaConf

    # 8 storage units, verl's default, wait for ever on a small machine
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()


def args(folder, tiny, *more: str) -> list[str]:
    given = distillation_args(folder, student=tiny / "student", teacher=tiny / "teacher")
    return [*(a for a in given if a not in NOT_READ), "trainer.resume_mode=disable", *more]


def make_trainer(folder, tiny, *more: str) -> Trainer:
    trainer = Trainer(compose(args(folder, tiny, *FREEZE, *more)))
    trainer.tokenizer = load_tokenizer(str(tiny / "student"))
    trainer._load_checkpoint()
    return trainer


def make_fields(*, topk: int = 1) -> TensorDict:
    """Three sequences of 2 prompt tokens; the third is verl's padding. Tokens of the responses are
    5, 6, ROCK, ...; log q - log p is 0 but for ROCK, where it is 2 nats."""
    rows: dict[str, list[torch.Tensor]] = {}
    for number, length in enumerate(LENGTHS):
        response = torch.tensor([5, 6, ROCK, 9, 10, 11][:length])
        ids = torch.cat([torch.tensor([3, 4]), response])
        padding = number == len(LENGTHS) - 1
        log_q = torch.full((length,), -1.0)
        log_p = torch.where(response == ROCK, -3.0, -1.0)
        teacher_ids = torch.zeros(len(ids), topk, dtype=torch.int32)
        teacher_logprobs = torch.zeros(len(ids), topk)
        teacher_ids[1 : 1 + length, 0] = response.int()  # row t predicts token t + 1
        teacher_logprobs[1 : 1 + length, 0] = log_p
        if topk == 2:  # the second entry is another id, of e^-2; ROCK is not in its table
            teacher_ids[1 : 1 + length, 1] = 99
            teacher_logprobs[1 : 1 + length, 1] = -2.0
            teacher_ids[1 : 1 + length, 0][response == ROCK] = 98
            teacher_logprobs[1 : 1 + length, 0][response == ROCK] = -0.2
        one = {
            "prompts": ids[:2],
            "responses": response,
            "input_ids": ids,
            "response_mask": torch.zeros(length) if padding else torch.ones(length),
            "old_log_probs": log_q,
            "teacher_ids": teacher_ids,
            "teacher_logprobs": teacher_logprobs,
        }
        for key, value in one.items():
            rows.setdefault(key, []).append(value)
    nested = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in rows.items()}
    fields = TensorDict(nested, batch_size=len(LENGTHS))
    fields["uid"] = ["a", "a", "b"]
    return fields


def mask_config() -> PolicyConfig:
    return PolicyConfig(
        name="rock_freeze",
        top_k=1,
        warmup_steps=1,
        refresh_every=1,
        min_count=1,
        drop_most_frequent=0,
    )


def no_ids() -> np.ndarray:
    return np.zeros(0, np.int32)


def put(queue, name: str):
    keys = [f"{name}-{i}" for i in range(len(LENGTHS))]
    return queue.kv_batch_put(
        keys=keys,
        partition_id="train",
        fields=make_fields(),
        tags=[{"seq_len": 2 + n} for n in LENGTHS],
    )


def one_step(trainer: Trainer, queue, step: int, name: str) -> tuple[list[list[float]], dict]:
    """The weights that the actor's update would have read, and the metrics."""
    trainer.global_steps, metrics = step, {}
    batch = put(queue, f"{name}{step}")
    batch.extra_info["temperature"] = 1.0
    trainer._update_actor(batch, metrics)
    updated = trainer.updated[-1]
    assert updated.extra_info["temperature"] == 1.0 and updated.tags == batch.tags
    got = queue.kv_batch_get_by_meta(updated)
    return [row.tolist() for row in got["token_weights"].unbind()], metrics


@pytest.mark.slow
def test_a_step_is_weighed_by_the_steps_before_it_alone(verl_ray, queue, tiny_models, tmp_path):
    trainer = make_trainer(tmp_path, tiny_models)
    first, metrics = one_step(trainer, queue, 1, "alone")
    assert first == [[1.0] * 5, [1.0] * 4, [0.0] * 6]  # nothing known yet; padding weighs nothing
    assert metrics["freeze/num_types"] == metrics["freeze/mask_version"] == 0
    second, metrics = one_step(trainer, queue, 2, "alone")
    assert second == [[1.0, 1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0], [0.0] * 6]
    assert metrics["freeze/num_types"] == metrics["freeze/mask_version"] == 1
    assert metrics["freeze/token_share"] == pytest.approx(2 / 9)
    assert metrics["freeze/bounded_share"] == 0


@pytest.mark.slow
def test_a_step_is_counted_once(verl_ray, queue, tiny_models, tmp_path):
    trainer = make_trainer(tmp_path, tiny_models)
    one_step(trainer, queue, 1, "once")
    with pytest.raises(Exception, match="must come from earlier steps"):
        one_step(trainer, queue, 1, "once-more")


@pytest.mark.slow
def test_normalizer_kept_puts_the_weights_into_verls_denominator(
    verl_ray, queue, tiny_models, tmp_path
):
    for normalizer in ("all", "kept"):
        trainer = make_trainer(
            tmp_path / normalizer, tiny_models, f"+rock_opd.loss.normalizer={normalizer}"
        )
        one_step(trainer, queue, 1, normalizer)
        weights, _ = one_step(trainer, queue, 2, normalizer)
        got = queue.kv_batch_get_by_meta(trainer.updated[-1])
        assert ("loss_mask" in got) == (normalizer == "kept")
        if normalizer == "kept":
            assert [row.tolist() for row in got["loss_mask"].unbind()] == weights


@pytest.mark.slow
def test_two_holders_of_a_run_share_one_registry(verl_ray, queue, tiny_models, tmp_path):
    one, other = (make_trainer(tmp_path, tiny_models) for _ in range(2))
    one_step(one, queue, 1, "shared")
    weights, _ = one_step(other, queue, 2, "shared")
    assert weights[0][2] == 0.0  # known from the other's step


@pytest.mark.slow
def test_a_run_of_another_policy_does_not_join_the_registry_of_a_folder(
    verl_ray, queue, tiny_models, tmp_path
):
    trainer = make_trainer(tmp_path, tiny_models)
    make_trainer(tmp_path, tiny_models)  # of the same: two trainers share it
    other = Trainer(compose(args(tmp_path, tiny_models, *FREEZE, "+rock_opd.policy.lam=0.5")))
    other.tokenizer, other.global_steps = trainer.tokenizer, 0
    with pytest.raises(ConfigError, match=r"was started in this Ray cluster with policy .*lam"):
        other._load_checkpoint()
    verl_ray.kill(trainer._registry)


def resumed_trainer(before: Trainer, folder: Path, tiny_models: Path, step: int) -> Trainer:
    resumed = Trainer(compose(args(folder, tiny_models, *FREEZE)))
    resumed.config.trainer.resume_mode = "auto"
    resumed.tokenizer, resumed.global_steps = before.tokenizer, step
    resumed._load_checkpoint()
    return resumed


@pytest.mark.slow
def test_the_registry_goes_on_from_a_checkpoint(verl_ray, queue, tiny_models, tmp_path):
    trainer = make_trainer(tmp_path, tiny_models)
    one_step(trainer, queue, 1, "saved")
    trainer._save_checkpoint()
    assert trainer.saved == [1]
    verl_ray.kill(trainer._registry)
    state = Path(trainer.config.trainer.default_local_dir) / "global_step_1" / "rock_opd"
    text = (state / "state.json").read_text()
    (state / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"global_step_1/rock_opd: state.json has 2 bytes.*older"):
        resumed_trainer(trainer, tmp_path, tiny_models, 1)
    (state / "state.json").write_text(text)
    weights = {}
    for known in (True, False):
        resumed = resumed_trainer(trainer, tmp_path, tiny_models, 1 if known else 0)
        rows, _ = one_step(resumed, queue, 2, f"resumed-{known}")
        weights[known] = rows[0]
        verl_ray.kill(resumed._registry)
    assert weights[True] == [1.0, 1.0, 0.0, 1.0, 1.0]  # from the checkpoint
    assert weights[False] == [1.0] * 5  # without it nothing is known


@pytest.mark.slow
def test_another_policy_does_not_go_on_from_a_checkpoint(verl_ray, queue, tiny_models, tmp_path):
    trainer = make_trainer(tmp_path, tiny_models)
    one_step(trainer, queue, 1, "other")
    trainer._save_checkpoint()
    verl_ray.kill(trainer._registry)
    changed = Trainer(compose(args(tmp_path, tiny_models, *FREEZE, "+rock_opd.policy.lam=0.5")))
    changed.tokenizer, changed.global_steps = trainer.tokenizer, 1
    with pytest.raises(Exception, match="policy was"):
        changed._load_checkpoint()
    verl_ray.kill(changed._registry)


def test_the_mask_of_a_step_comes_from_the_steps_before_it():
    actor = RegistryActor(
        mask_config(), num_types=16, seed=0, frozen_list=None, guard_ids=no_ids(), fingerprints={}
    )
    signals, _, _ = batch_signals(make_fields())
    first, second = actor.weigh(1, signals), actor.weigh(2, signals)
    assert first.weight.tolist() == [1.0] * 9 and first.mask_version == 0
    assert second.weight.tolist() == [1, 1, 0, 1, 1, 1, 1, 0, 1] and second.mask_version == 1
    with pytest.raises(ValueError, match="must come from earlier steps"):
        actor.weigh(2, signals)


def test_a_registry_that_was_packed_gives_the_same_weights():
    signals, _, _ = batch_signals(make_fields())
    one, other = (
        RegistryActor(
            mask_config(),
            num_types=16,
            seed=0,
            frozen_list=None,
            guard_ids=no_ids(),
            fingerprints={"seed": 0},
        )
        for _ in range(2)
    )
    one.weigh(1, signals)
    other.unpack(*one.pack(1), "here")
    assert other.weigh(2, signals).weight.tolist() == one.weigh(2, signals).weight.tolist()


def test_a_token_outside_the_teachers_table_gets_the_least_log_ratio_it_can_have():
    signals, _, bounded = batch_signals(make_fields(topk=2))
    rock = signals.token_ids == ROCK
    # p(ROCK) <= 1 - e^-0.2 - e^-2 = 0.0459, less than the last entry's e^-2
    bound = np.log(1 - np.exp(-0.2) - np.exp(-2.0))
    assert signals.teacher_logprobs[rock] == pytest.approx([bound] * 2, rel=1e-5)
    assert (signals.teacher_logprobs[~rock] == -1.0).all()
    assert bounded == pytest.approx(2 / 9)


def test_the_signals_are_of_sampled_tokens_alone():
    signals, rollouts, _ = batch_signals(make_fields())
    assert signals.token_ids.tolist() == [5, 6, ROCK, 9, 10, 5, 6, ROCK, 9]
    assert signals.rollout_idx.tolist() == [0] * 5 + [1] * 4
    assert len(rollouts) == len(LENGTHS)
    logratio = signals.student_logprobs - signals.teacher_logprobs
    assert logratio.tolist() == [0, 0, 2, 0, 0, 0, 0, 2, 0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+rock_opd.student.zero_stage=3", "student.zero_stage is not read"),
        ("+rock_opd.policy.score=rock_ctx", "needs the probe set"),
        ("+rock_opd.resume=true", "resume is not read"),
        ("+rock_opd.policy=all", "policy must be a mapping"),
        ("+rock_opd.policy=null", "policy must be a mapping"),
        ("+rock_opd=all", "rock_opd must be a mapping"),
        ("distillation.distillation_loss.loss_mode=k2", "take rock_k2"),
        ("distillation.distillation_loss.loss_mode=kl", "take rock_k1"),
        ("distillation.distillation_loss.loss_mode=mse", "take rock_k2"),
        ("distillation.distillation_loss.loss_mode=abs", "take one of rock_k1, "),
        ("distillation.distillation_loss.loss_mode=rock_foo", "got rock_foo: take one of rock_k1"),
        ("actor_rollout_ref.model.path=null", r"actor_rollout_ref\.model\.path is missing"),
        ("+rock_opd.policy.score=best", r"\+rock_opd\.policy\.score must be one of"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "normalizer=kept needs"),
    ],
)
def test_what_the_stock_trainer_cannot_do_is_refused(override, said, tmp_path):
    given = [a for a in distillation_args(tmp_path) if a not in NOT_READ]
    with pytest.raises(ConfigError, match=said):
        mask_recipe(compose([*given, override]))


def test_what_is_said_of_a_list_names_the_key_of_the_block(tiny_models, tmp_path):
    tokenizer = load_tokenizer(str(tiny_models / "student"))
    guarded = tmp_path / "guarded.json"
    guarded.write_text(str([tokenizer.eos_token_id]))
    lists = ["+rock_opd.policy.name=list", f"+rock_opd.policy.ids_file={guarded}"]
    trainer = Trainer(compose(args(tmp_path, tiny_models, *lists)))
    trainer.tokenizer = tokenizer
    with pytest.raises(RockOPDError, match=r"\+rock_opd\.policy\.guard_special"):
        trainer.start_registry()


def test_verl_takes_it_for_its_synchronous_trainer():
    """verl asks the mode's name where it chooses the replay buffer and what a checkpoint holds."""
    from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls

    assert get_trainer_cls("rock_opd_sync") is RockOPDSyncTrainer
    assert issubclass(RockOPDSyncTrainer, PPOTrainerSync)
    assert hosts  # the platform is set up before verl is imported
