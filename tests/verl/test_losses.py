"""Token-weighted losses inside verl's own training worker and FSDP2 engine, in this process."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed; make test-verl installs it")

import hosts
import torch

from rock_opd.core.objective import (
    topk_renormalised_reverse_kl,
    topk_tail_divergence,
)
from rock_opd.errors import ConfigError
from rock_opd.integrations.verl.losses import (
    check_normalizer,
    weight_fields,
    with_rock_topk,
)

NUM_TRAINABLE = 18
"""Response tokens masked in: 22 less one tool's turn in each of 4 responses."""
NUM_KEPT = 8
"""Of them, at odd places: what ``half`` trains."""
SUPERVISED = ("k2", "k3", "forward_kl_topk")


@pytest.fixture(scope="module")
def worker(tiny_models):
    with hosts.worker_here(hosts.fsdp_worker_config(tiny_models / "student")) as made:
        yield made


def numbers(metrics: dict[str, float]) -> tuple[float, float]:
    return metrics["loss"], metrics["grad_norm"]


def is_topk(mode: str) -> bool:
    return "topk" in mode


# --- the stock losses, weighted -------------------------------------------------------------------


@pytest.mark.parametrize("mode", SUPERVISED)
def test_without_weights_every_metric_is_the_stock_one_bit_for_bit(worker, mode):
    batch = hosts.make_batch(topk=is_topk(mode))
    stock = hosts.update(worker, hosts.loss_fn(mode), batch, steps=3)
    ours = hosts.update(worker, hosts.loss_fn(f"rock_{mode}"), batch, steps=3)
    assert stock["loss"] > 0 and stock["grad_norm"] > 0
    assert ours == stock


@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("mode", SUPERVISED)
def test_weights_of_1_change_no_bit_of_loss_and_gradient_norm(worker, mode, normalizer):
    stock = hosts.update(worker, hosts.loss_fn(mode), hosts.make_batch(topk=is_topk(mode)), steps=2)
    batch = hosts.weighted_batch("ones", normalizer=normalizer, topk=is_topk(mode))
    ours = hosts.update(worker, hosts.loss_fn(f"rock_{mode}"), batch, steps=2)
    assert numbers(ours) == numbers(stock)


def test_a_frozen_position_counts_in_the_denominator_of_all_and_not_of_kept(worker):
    loss = hosts.loss_fn("rock_k2")
    everything = hosts.update(worker, loss, hosts.weighted_batch("half", normalizer="all"))
    kept = hosts.update(worker, loss, hosts.weighted_batch("half", normalizer="kept"))
    scale = NUM_TRAINABLE / NUM_KEPT
    assert kept["loss"] == pytest.approx(everything["loss"] * scale, rel=1e-6)
    assert kept["grad_norm"] == pytest.approx(everything["grad_norm"] * scale, rel=1e-6)


def test_a_frozen_position_gives_what_its_absence_from_the_mask_gives(worker):
    """With the kept positions alone in both masks, stock verl has the loss of ``kept``."""
    kept = hosts.update(
        worker, hosts.loss_fn("rock_k2"), hosts.weighted_batch("half", normalizer="kept")
    )
    batch = hosts.make_batch()
    weights = weight_fields(hosts.token_weights("half"), batch["response_mask"], normalizer="all")[
        "token_weights"
    ]
    batch["response_mask"] = batch["loss_mask"] = torch.nested.as_nested_tensor(
        [row.long() for row in weights.unbind()], layout=torch.jagged
    )
    stock = hosts.update(worker, hosts.loss_fn("k2"), batch)
    assert numbers(kept) == pytest.approx(numbers(stock), rel=1e-6)


@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("mode", SUPERVISED)
def test_a_batch_frozen_whole_has_loss_0_and_gradient_0(worker, mode, normalizer):
    batch = hosts.weighted_batch("zeros", normalizer=normalizer, topk=is_topk(mode))
    assert numbers(hosts.update(worker, hosts.loss_fn(f"rock_{mode}"), batch)) == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("mode", [*SUPERVISED, "reverse_kl_topk", "reverse_kl_topk_renorm"])
def test_what_the_teacher_says_of_a_frozen_position_moves_no_bit(worker, mode, value):
    loss = with_rock_topk(hosts.loss_fn(f"rock_{mode}", strategy="deepspeed"))

    def run(first=None):
        batch = hosts.weighted_batch("half", normalizer="kept", topk=is_topk(mode))
        rows = [row.clone() for row in batch["teacher_logprobs"].unbind()]
        weights = hosts.token_weights("half")[0]
        assert weights[1] == 1 and weights[0] == 0
        if first is not None:
            rows[0][hosts.PROMPT_LENS[0] - 1, 0] = first
        batch["teacher_logprobs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return numbers(hosts.update(worker, loss, batch))

    plain = run()
    assert plain[0] != 0 and plain[1] > 0
    assert run(value) == plain


def test_the_shares_and_the_mask_version_are_among_verls_metrics(worker):
    metrics = hosts.update(worker, hosts.loss_fn("rock_k2"), hosts.weighted_batch("half"))
    assert metrics["distillation/mask_version"] == 3
    # micro-batches of 8 and 10 positions, 4 and 6 of them at even places
    assert metrics["distillation/frozen_share"] == pytest.approx((4 / 8 + 6 / 10) / 2)


def test_a_loss_above_the_clamp_is_clamped_before_it_is_weighed(worker):
    batch = hosts.make_batch()
    tenth = [0.1 * w for w in hosts.token_weights("ones")]
    batch.update(weight_fields(tenth, batch["response_mask"], normalizer="all"))
    stock = hosts.update(worker, hosts.loss_fn("k2", loss_max_clamp=0.5), hosts.make_batch())
    ours = hosts.update(worker, hosts.loss_fn("rock_k2", loss_max_clamp=0.5), batch)
    assert stock["loss"] < 0.5 + 1e-6
    assert ours["loss"] == pytest.approx(stock["loss"] / 10, rel=1e-5)


def with_policy_gradient(batch):
    """What verl's policy gradient reads beside the losses."""
    like = [torch.full((n,), -7.0) for n in hosts.RESPONSE_LENS]
    for name in ("old_log_probs", "advantages"):
        batch[name] = torch.nested.as_nested_tensor(like, layout=torch.jagged)
    return batch


def test_k1_as_a_reward_is_weighted_like_the_others(worker):
    def run(mode, batch):
        return numbers(
            hosts.update(
                worker, hosts.loss_fn(mode, use_policy_gradient=True), with_policy_gradient(batch)
            )
        )

    stock = run("k1", hosts.make_batch())
    assert stock[1] > 0
    assert run("rock_k1", hosts.make_batch()) == stock
    assert run("rock_k1", hosts.weighted_batch("ones")) == stock
    assert run("rock_k1", hosts.weighted_batch("half")) != stock
    assert run("rock_k1", hosts.weighted_batch("zeros")) == (0.0, 0.0)


def test_k1_is_not_back_propagated(worker):
    with pytest.raises(ConfigError, match="use_policy_gradient=true"):
        hosts.update(worker, hosts.loss_fn("rock_k1"), hosts.make_batch())


# --- reverse KL over the teacher's top-k ----------------------------------------------------------


@pytest.fixture(scope="module")
def rows(worker):
    """The student's logits and the teacher's table at each position that trains, by hand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        worker.model_config.local_path, dtype=torch.float32, attn_implementation="eager"
    )
    batch = hosts.make_batch(topk=True)
    logits, ids, logprobs = [], [], []
    for seq, mask, tid, tlp in zip(
        *(batch[k].unbind() for k in ("input_ids", "response_mask", "teacher_ids")),
        batch["teacher_logprobs"].unbind(),
        strict=True,
    ):
        out = model(input_ids=seq[None]).logits[0].detach()
        first = len(seq) - len(mask)
        at = [first + int(j) - 1 for j in mask.nonzero()]
        logits.append(out[at])
        ids.append(tid[at])
        logprobs.append(tlp[at])
    return torch.cat(logits).double(), torch.cat(ids), torch.cat(logprobs).double()


def expected(mode: str, rows) -> torch.Tensor:
    logits, ids, logprobs = rows
    if mode.endswith("renorm"):
        return topk_renormalised_reverse_kl(logits, ids, logprobs)
    return topk_tail_divergence(logits, ids, logprobs, (1 - logprobs.exp().sum(-1)).log())


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("mode", ["rock_reverse_kl_topk", "rock_reverse_kl_topk_renorm"])
def test_the_reverse_kl_is_that_of_our_own_objective(worker, rows, mode, strategy):
    loss = with_rock_topk(hosts.loss_fn(mode, strategy=strategy))
    metrics = hosts.update(worker, loss, hosts.make_batch(topk=True))
    per_token = expected(mode, rows)
    assert len(per_token) == NUM_TRAINABLE
    assert metrics["loss"] == pytest.approx(per_token.mean().item(), rel=1e-5)
    assert metrics["grad_norm"] > 0
    assert 0 < metrics["distillation/student_mass"] < metrics["distillation/teacher_mass"] < 1


@pytest.mark.parametrize("mode", ["rock_reverse_kl_topk", "rock_reverse_kl_topk_renorm"])
def test_the_reverse_kl_is_weighted_like_the_others(worker, mode):
    loss = with_rock_topk(hosts.loss_fn(mode))
    plain = hosts.update(worker, loss, hosts.make_batch(topk=True))
    ones = hosts.update(worker, loss, hosts.weighted_batch("ones", topk=True))
    zeros = hosts.update(worker, loss, hosts.weighted_batch("zeros", topk=True))
    assert numbers(ones) == numbers(plain) and numbers(zeros) == (0.0, 0.0)


def test_verls_own_forward_rows_are_never_taken_for_the_reverse_kl(worker):
    with pytest.raises(ConfigError, match=r"with_rock_topk\(loss_fn\)"):
        hosts.update(worker, hosts.loss_fn("rock_reverse_kl_topk"), hosts.make_batch(topk=True))


def test_the_forward_kl_does_not_depend_on_the_name_of_the_strategy(worker):
    """Stock verl knows no top-k loss for a strategy that it has not heard of."""
    batch = hosts.make_batch(topk=True)
    stock = hosts.update(worker, hosts.loss_fn("rock_forward_kl_topk"), batch)
    with pytest.raises(NotImplementedError, match="deepspeed"):
        hosts.update(worker, hosts.loss_fn("rock_forward_kl_topk", strategy="deepspeed"), batch)
    loss = with_rock_topk(hosts.loss_fn("rock_forward_kl_topk", strategy="deepspeed"))
    assert numbers(hosts.update(worker, loss, batch)) == numbers(stock)


def test_other_loss_functions_are_left_alone():
    assert with_rock_topk(math.sqrt) is math.sqrt
    assert with_rock_topk(other := partial(math.pow, 2)) is other


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"log_prob_min_clamp": -10.0}, "log_prob_min_clamp=null"),
        ({"use_chunked_topk": True}, "use_chunked_topk=false"),
        ({"strategy": "megatron"}, "no megatron"),
    ],
)
def test_what_the_reverse_kl_does_not_know_is_refused(worker, settings, said):
    loss = with_rock_topk(hosts.loss_fn("rock_reverse_kl_topk", **settings))
    with pytest.raises(ConfigError, match=said):
        hosts.update(worker, loss, hosts.make_batch(topk=True))


def test_the_reverse_kl_of_a_padded_batch_is_refused():
    batch = hosts.make_batch(topk=True)
    padded = {k: batch[k].to_padded_tensor(0) for k in ("prompts", "responses", "response_mask")}
    loss = with_rock_topk(hosts.loss_fn("rock_reverse_kl_topk"))
    with pytest.raises(ConfigError, match=r"trainer\.use_v1=true"):
        loss(student_logits=torch.zeros(1, 3, hosts.VOCAB), data=padded)


# --- bad weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, clamp, said",
    [(-1.0, None, "negative"), (math.nan, None, "NaN"), (2.0, 10.0, "above 1")],
)
def test_weights_that_cannot_be_right_are_refused(worker, value, clamp, said):
    batch = hosts.make_batch()
    weights = hosts.token_weights("ones")
    weights[1][0] = value
    batch.update(weight_fields(weights, batch["response_mask"], normalizer="all"))
    with pytest.raises(ConfigError, match=said):
        hosts.update(worker, hosts.loss_fn("rock_k2", loss_max_clamp=clamp), batch)


def test_weights_for_a_normaliser_that_is_none_are_refused():
    batch = hosts.make_batch()
    with pytest.raises(ConfigError, match="normalizer must be one of kept, all, got 'foo'"):
        weight_fields(hosts.token_weights("ones"), batch["response_mask"], normalizer="foo")


def test_weights_of_another_length_are_refused_when_they_are_written():
    batch = hosts.make_batch()
    weights = hosts.token_weights("ones")
    weights[0] = np.ones(5)
    with pytest.raises(ValueError, match="5 weights for a response of 6"):
        weight_fields(weights, batch["response_mask"], normalizer="all")


@pytest.mark.parametrize(
    "normalizer, agg, rewards, said",
    [
        ("trained", "token-mean", False, "one of kept, all"),
        ("kept", "seq-mean-token-mean", False, "token-mean"),
        ("kept", "token-mean", True, "use_task_rewards"),
    ],
)
def test_a_normaliser_that_verl_would_not_apply_is_refused(normalizer, agg, rewards, said):
    check_normalizer("all", loss_agg_mode=agg, use_task_rewards=rewards)
    with pytest.raises(ConfigError, match=said):
        check_normalizer(normalizer, loss_agg_mode=agg, use_task_rewards=rewards)
