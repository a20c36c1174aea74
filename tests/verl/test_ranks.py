"""The same losses under verl's single controller: one and two ranks, and batches that travel
through TransferQueue."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl is not installed; make test-verl installs it")

import engine_hosts
import hosts
import numpy as np
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from rock_opd.integrations.verl.losses import weight_fields, with_rock_topk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["fsdp2", "deepspeed"])
def groups(request, verl_ray, tiny_models):
    """A worker group of one rank and one of two, on verl's own engine and on ours."""
    make = {"fsdp2": hosts.fsdp_worker_config, "deepspeed": engine_hosts.deepspeed_config}
    config = make[request.param](tiny_models / "student")
    made = {n: hosts.worker_group(config, n, name=f"{request.param}{n}") for n in (1, 2)}
    yield made
    for group in made.values():
        for worker in group.workers:
            verl_ray.kill(worker)
        for places in group.resource_pool.pgs:
            verl_ray.util.remove_placement_group(places)


@pytest.fixture(scope="module")
def queue(verl_ray):
    import transfer_queue as tq
    from omegaconf import OmegaConf

    # 8 storage units, verl's default, wait for ever on a small machine
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()


ADDED_UP = 5e-6
"""Relative: ranks add up in another order, in float32."""


def numbers(metrics: dict) -> tuple[float, float]:
    return metrics["loss"], metrics["grad_norm"]


@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("mode", ["rock_k2", "rock_k3", "rock_forward_kl_topk"])
def test_half_the_positions_frozen_gives_the_same_numbers_on_one_and_two_ranks(
    groups, mode, normalizer
):
    batch = hosts.weighted_batch("half", normalizer=normalizer, topk="topk" in mode)
    one = hosts.update(groups[1], hosts.loss_fn(mode), batch)
    two = hosts.update(groups[2], hosts.loss_fn(mode), batch)
    assert one["grad_norm"] > 0
    assert numbers(two) == pytest.approx(numbers(one), rel=ADDED_UP)
    assert two["distillation/frozen_share"] == pytest.approx(one["distillation/frozen_share"])
    assert two["distillation/mask_version"] == 3


@pytest.mark.parametrize("mode", ["k2", "forward_kl_topk"])
def test_weights_of_1_change_no_bit_on_two_ranks(groups, mode):
    topk = "topk" in mode
    stock = hosts.update(groups[2], hosts.loss_fn(mode), hosts.make_batch(topk=topk), steps=2)
    batch = hosts.weighted_batch("ones", topk=topk)
    ours = hosts.update(groups[2], hosts.loss_fn(f"rock_{mode}"), batch, steps=2)
    assert numbers(ours) == numbers(stock)


@pytest.mark.parametrize("normalizer", ["all", "kept"])
def test_a_batch_frozen_whole_ends_with_0_on_two_ranks(groups, normalizer):
    batch = hosts.weighted_batch("zeros", normalizer=normalizer)
    metrics = hosts.update(groups[2], hosts.loss_fn("rock_k2"), batch)
    assert numbers(metrics) == (0.0, 0.0)


@pytest.mark.parametrize("normalizer", ["all", "kept"])
def test_a_rank_frozen_whole_waits_for_nobody(groups, normalizer):
    """The first rank has nothing to learn, the second everything."""
    batch = hosts.make_batch()
    weights = [np.zeros(n) if i < 2 else np.ones(n) for i, n in enumerate(hosts.RESPONSE_LENS)]
    batch.update(weight_fields(weights, batch["response_mask"], normalizer=normalizer))
    one = hosts.update(groups[1], hosts.loss_fn("rock_k2"), batch)
    two = hosts.update(groups[2], hosts.loss_fn("rock_k2"), batch)
    assert one["grad_norm"] > 0
    assert numbers(two) == pytest.approx(numbers(one), rel=ADDED_UP)


def test_the_reverse_kl_is_the_same_on_one_and_two_ranks(groups):
    """Our engine makes its rows by itself; verl's makes them once it is told."""
    loss = hosts.loss_fn("rock_reverse_kl_topk")
    if groups[1].name_prefix.startswith("fsdp2"):
        loss = with_rock_topk(loss)
    batch = hosts.weighted_batch("half", topk=True)
    one, two = hosts.update(groups[1], loss, batch), hosts.update(groups[2], loss, batch)
    assert one["loss"] > 0 and one["grad_norm"] > 0
    assert numbers(two) == pytest.approx(numbers(one), rel=ADDED_UP)


@pytest.mark.parametrize("normalizer", ["all", "kept"])
def test_weights_put_into_transfer_queue_reach_the_loss(groups, queue, normalizer):
    batch = hosts.make_batch()
    tensors = TensorDict(
        {k: v for k, v in batch.items() if hasattr(v, "is_nested")}, batch_size=batch.batch_size
    )
    name = groups[2].name_prefix
    keys = [f"{name}-{normalizer}-{i}" for i in range(len(hosts.PROMPT_LENS))]
    queue.kv_batch_put(keys=keys, partition_id="train", fields=tensors)
    weights = weight_fields(
        hosts.token_weights("half"),
        batch["response_mask"],
        normalizer=normalizer,
        mask_version=3,
    )
    meta = queue.kv_batch_put(
        keys=keys, partition_id="train", fields=TensorDict(weights, batch_size=[len(keys)])
    )
    meta.extra_info.update(hosts.batch_info(topk=False))
    through = hosts.update(groups[2], hosts.loss_fn("rock_k2"), meta)
    direct = hosts.update(
        groups[2], hosts.loss_fn("rock_k2"), hosts.weighted_batch("half", normalizer=normalizer)
    )
    assert through == direct
    stored = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["token_weights"])
    assert [len(w) for w in tu.get(stored, "token_weights").unbind()] == list(hosts.RESPONSE_LENS)
