"""verl's whole actor worker, built from the command a user types: model_engine=deepspeed gives the
numbers that model_engine=dp gives, for verl's own losses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install 'rock-opd[verl]'")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

from engine_hosts import Ranks, actor_worker_numbers, deepspeed_config, fsdp_config
from hosts import loss_fn, update
from hosts import make_batch as distillation_batch
from verl.utils import tensordict_utils as tu
from verl_configs import compose

from rock_opd.integrations.verl.losses import with_rock_topk

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(verl_ray, tiny_models):
    group = Ranks(2, fsdp_config(tiny_models / "student"))
    yield group
    group.close()


OURS = ("hydra.searchpath=[pkg://rock_opd.integrations.verl.config]", "model_engine=deepspeed")


def command(model, *overrides: str):
    """The actor's part of the command; small, and in float32."""
    actor = "actor_rollout_ref.actor"
    args = [
        *overrides,
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config={attn_implementation: eager}",
        "actor_rollout_ref.model.use_remove_padding=false",
        f"{actor}.optim.lr=1e-5",
        f"{actor}.optim.total_training_steps=10",
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.use_kl_loss=true",
        f"{actor}.use_torch_compile=false",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
    ]
    return compose(args).actor_rollout_ref


def policy_batch():
    """Rollouts with advantages, on-policy up to noise."""
    batch = distillation_batch()
    generator = torch.Generator().manual_seed(1)
    noise = [0.1 * torch.randn(len(row), generator=generator) for row in batch["response_mask"]]
    for key, rows in {
        "old_log_probs": [-6.9 + row for row in noise],
        "ref_log_prob": [-6.9 - row for row in noise],
        "advantages": [torch.sign(row) for row in noise],
    }.items():
        batch[key] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return batch


def test_the_actor_worker_of_the_command_gives_the_numbers_of_model_engine_dp(
    ranks, tiny_models, tmp_path
):
    model = tiny_models / "student_untied"
    theirs_config = command(
        model,
        *(
            f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision={{param_dtype: fp32}}"
            for role in ("actor", "ref")
        ),
        *(
            f"actor_rollout_ref.{role}.fsdp_config.use_torch_compile=false"
            for role in ("actor", "ref")
        ),
        "actor_rollout_ref.actor.strategy=fsdp2",
    )
    ours_config = command(
        model,
        *OURS,
        "actor_rollout_ref.actor.deepspeed.dtype=float32",
        *(
            f"actor_rollout_ref.{role}.deepspeed.use_torch_compile=false"
            for role in ("actor", "ref")
        ),
        "actor_rollout_ref.actor.deepspeed.zero_stage=3",
    )
    batch = policy_batch()
    tu.assign_non_tensor(batch, mini_batch_size=4, global_batch_size=4)
    theirs, ours = (
        ranks.ask(actor_worker_numbers, config, batch, str(tmp_path / side), side == "ours")[0]
        for side, config in (("theirs", theirs_config), ("ours", ours_config))
    )
    assert theirs["engine"] == "FSDPEngineWithLMHead"
    assert ours["engine"] == "DeepSpeedEngineWithLMHead"
    for key in ("log_probs", "ref_log_probs"):
        assert float((ours[key] - theirs["log_probs"]).abs().max()) < TOLERANCE
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, weight in ours["weights"].items():
        assert float((weight - theirs["weights"][name]).abs().max()) < TOLERANCE
    numbers = {k for k in theirs["metrics"] if not k.startswith("perf/") and k != "mfu"}
    assert {"loss", "grad_norm", "lr", "actor/pg_loss", "kl_loss"} <= numbers
    for key in numbers:
        assert ours["metrics"][key] == pytest.approx(theirs["metrics"][key], abs=TOLERANCE), key
    assert set(ours["metrics"]) - set(theirs["metrics"]) == {"update_skipped"}
    both = [
        {path.name for path in (tmp_path / side / "huggingface").iterdir()}
        for side in ("ours", "theirs")
    ]
    assert both[1] <= both[0]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("mode", "topk"),
    [("k2", False), ("k3", False), ("forward_kl_topk", True), ("rock_reverse_kl_topk", True)],
)
def test_distillation_losses_give_the_numbers_they_give_under_fsdp(
    ranks, tiny_models, mode, topk, stage
):
    model = tiny_models / "student_untied"
    ranks.build(fsdp_config(model))
    loss = with_rock_topk(loss_fn(mode))  # verl's own rows are those of the forward KL
    theirs = update(ranks.group, loss, distillation_batch(topk=topk), steps=2)
    ranks.build(deepspeed_config(model, zero_stage=stage))
    loss = loss_fn(mode, strategy="deepspeed")
    ours = update(ranks.group, loss, distillation_batch(topk=topk), steps=2)
    assert ours.pop("update_skipped") == 0
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # k2 squares log-ratios of 8: its largest row is 33
        assert ours[key] == pytest.approx(value, abs=TOLERANCE, rel=1e-6), key
