"""The DeepSpeed engine under verl's training worker equals verl's own FSDP2 engine, whatever the
ZeRO stage and however a step is cut; on CPU, with gloo, in float32.

One group of two ranks and one of one rank serve all tests, since importing verl takes long; each
test builds the engines it needs in them.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install 'rock-opd[verl]'")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

from engine_hosts import (
    LOSS,
    Ranks,
    deepspeed_config,
    fsdp_config,
    half_a_step,
    held_state,
    leave_and_come_back,
    limits_s,
    loss_plus_nan_on_last_rank,
    make_batch,
    most_weights_at_once,
    nan_loss_on_last_rank,
    weights_while_away,
)
from hosts import LIMIT_S

TOLERANCE = 1e-5
STEPS = 3


@pytest.fixture(scope="module")
def ranks(verl_ray, tiny_models):
    """World size -> its group."""
    groups: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in groups:
            groups[world_size] = Ranks(world_size, fsdp_config(tiny_models / "student"))
        return groups[world_size]

    yield get
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def student(tiny_models):
    return tiny_models / "student_untied"


def run(group: Ranks, **how):
    """Three steps; their metrics, then the weights and the next log-probabilities."""
    steps = [group.step(seed=seed, **how) for seed in range(STEPS)]
    return steps, group.weights(), group.log_probs(seed=STEPS)


def apart(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours)


def assert_same(ours, theirs) -> None:
    for mine, other in zip(ours[0], theirs[0], strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], abs=TOLERANCE), key
        assert mine["lr"] == other["lr"]
        assert mine["update_skipped"] == 0
    assert apart(ours[1], theirs[1]) < TOLERANCE
    assert apart(dict(enumerate(ours[2])), dict(enumerate(theirs[2]))) < TOLERANCE


@pytest.fixture(scope="module")
def fsdp(ranks, student):
    """verl's FSDP2 on two ranks, two micro-batches each."""
    ranks(2).build(fsdp_config(student))
    return run(ranks(2))


QUICK_STAGES = (2, 3)


@pytest.mark.parametrize(
    "stage", [s if s in QUICK_STAGES else pytest.param(s, marks=pytest.mark.slow) for s in range(4)]
)
def test_three_steps_equal_fsdp_on_two_ranks(ranks, student, fsdp, stage):
    ranks(2).build(deepspeed_config(student, zero_stage=stage))
    assert_same(run(ranks(2)), fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("stage", range(4))
def test_the_step_is_the_same_however_it_is_cut(ranks, student, fsdp, stage, micro, world_size):
    ranks(world_size).build(deepspeed_config(student, zero_stage=stage))
    assert_same(run(ranks(world_size), micro=micro), fsdp)


def reference(model_path):
    """Plain torch in float64: one sequence at a time, the mean over all trained tokens, AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    steps = []
    for seed in range(STEPS):
        batch = make_batch(seed=seed)
        num = batch["loss_mask"].values().sum()
        loss = 0.0
        for ids, mask in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True):
            log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
            loss = loss - (log_p.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum() / num
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps, {name: p.detach().float() for name, p in model.named_parameters()}


def test_three_steps_equal_plain_torch_in_float64(ranks, student):
    ranks(2).build(deepspeed_config(student, zero_stage=2))
    steps, weights, _ = run(ranks(2))
    expected_steps, expected_weights = reference(student)
    for mine, (loss, norm) in zip(steps, expected_steps, strict=True):
        assert mine["loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert mine["grad_norm"] == pytest.approx(norm, abs=TOLERANCE)
    assert apart(weights, expected_weights) < 1e-6
    assert apart(weights, _first_weights(student)) > 1e-5  # three steps of 1e-5 each


def _first_weights(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.mark.slow
def test_a_tied_weight_is_given_away_once(ranks, tiny_models):
    ranks(2).build(deepspeed_config(tiny_models / "student", zero_stage=3))
    assert ranks(2).weights().keys() == _first_weights(tiny_models / "student").keys()


def test_zero3_gives_weights_away_bucket_by_bucket(ranks, student):
    ranks(2).build(deepspeed_config(student, zero_stage=3, gather_bucket_bytes=1))
    for most, largest in ranks(2).ask(most_weights_at_once):
        assert most == largest
    assert apart(ranks(2).weights(), _first_weights(student)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [
        {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1},
        {"lr_warmup_steps_ratio": 0.3},
        {"clip_grad": 0.5, "weight_decay": 0.5, "betas": (0.8, 0.9)},
    ],
    ids=["cosine", "warm-up", "clip"],
)
def test_optimizer_settings_do_what_they_do_under_fsdp(ranks, student, optim):
    config = deepspeed_config(student, optim=optim)
    ranks(2).build(replace(fsdp_config(student), optimizer_config=config.optimizer_config))
    theirs = run(ranks(2))
    ranks(2).build(config)
    assert_same(run(ranks(2)), theirs)
    assert len({step["lr"] for step in theirs[0]}) == (1 if "clip_grad" in optim else STEPS)


@pytest.mark.slow
def test_packed_sequences_do_not_see_each_other(ranks, student, fsdp):
    """use_remove_padding: all sequences of a micro-batch in one row, told apart by positions."""
    options = {"use_remove_padding": True, "override_config": {"attn_implementation": "sdpa"}}
    ranks(2).build(deepspeed_config(student, model_options=options))
    assert_same(run(ranks(2)), fsdp)


@pytest.mark.slow
def test_gradient_checkpointing_moves_no_number(ranks, student, fsdp):
    options = {"enable_gradient_checkpointing": True}
    ranks(2).build(deepspeed_config(student, zero_stage=3, model_options=options))
    assert_same(run(ranks(2)), fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_offload_moves_no_number(ranks, student, fsdp, stage):
    ranks(2).build(deepspeed_config(student, zero_stage=stage, zero_offload=True))
    assert_same(run(ranks(2)), fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_equals_fsdps_mixed_precision_to_its_rounding(ranks, student, stage):
    ranks(2).build(
        fsdp_config(student, mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32"})
    )
    theirs = run(ranks(2))
    ranks(2).build(deepspeed_config(student, zero_stage=stage, dtype="bfloat16"))
    ours = run(ranks(2))
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
    assert {t.dtype for t in ours[1].values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_model_equals_the_actor_before_its_first_step(ranks, student, dtype):
    ranks(2).build(deepspeed_config(student, zero_stage=2, dtype=dtype))
    actor = ranks(2).log_probs()
    ranks(2).build(deepspeed_config(student, zero_stage=2, dtype=dtype, forward_only=True))
    reference_model = ranks(2).log_probs()
    assert all(torch.equal(a, b) for a, b in zip(actor, reference_model, strict=True))


# ---------------------------------------------------------------- steps that go wrong


def test_a_rank_that_is_gone_is_waited_for_as_long_as_verl_waits(ranks, student):
    ranks(2).build(deepspeed_config(student, zero_stage=2))
    assert ranks(2).ask(limits_s) == [{float(LIMIT_S)}] * 2


def assert_unmoved(before, after):
    """Weights and moments of all ranks, as ``held_state`` gives them, are the same bits."""
    for mine, held in zip(before, after, strict=True):
        for (*key, old), (*same_key, new) in zip(mine, held, strict=True):
            assert key == same_key and torch.equal(old, new), key


def masked_whole():
    batch = make_batch()
    batch["loss_mask"] = torch.nested.as_nested_tensor(
        [torch.zeros_like(row) for row in batch["loss_mask"].unbind()], layout=torch.jagged
    )
    return batch


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "loss, make",
    [
        (nan_loss_on_last_rank, make_batch),
        (loss_plus_nan_on_last_rank, make_batch),
        (LOSS, masked_whole),
    ],
    ids=["loss and gradient, on one rank", "loss alone, on one rank", "0 / 0"],
)
def test_a_loss_that_is_not_finite_changes_nothing_on_any_rank(ranks, student, stage, loss, make):
    group = ranks(2)
    group.build(deepspeed_config(student, zero_stage=stage))
    group.step()
    before = group.ask(held_state)
    group.group.set_loss_fn(loss)
    metrics = group.step(make())
    assert metrics["update_skipped"] == 1
    assert metrics["grad_norm"] != metrics["grad_norm"]
    assert_unmoved(before, group.ask(held_state))
    group.group.set_loss_fn(LOSS)
    assert group.step()["update_skipped"] == 0


@pytest.mark.slow
def test_a_step_that_broke_off_half_way_is_in_no_later_one(ranks, student):
    group = ranks(1)
    for stage in range(4):
        group.build(deepspeed_config(student, zero_stage=stage))
        with pytest.raises(ValueError, match="a loss of the test's"):
            group.ask(half_a_step)
        if stage == 0:
            assert group.step()["update_skipped"] == 0
        else:
            with pytest.raises(Exception, match="the step before broke off"):
                group.step()


# ---------------------------------------------------------------- checkpoints


def test_the_step_after_a_resume_is_the_very_same(ranks, student, tmp_path):
    group, folder = ranks(2), tmp_path / "global_step_2" / "actor"
    config = deepspeed_config(
        student,
        zero_stage=2,
        optim={"lr_scheduler_type": "cosine", "lr_warmup_steps": 1},
    )
    group.build(config)
    for seed in range(2):
        group.step(seed=seed)
    group.group.save_checkpoint(str(folder), None, 2, None)
    expected = group.step(seed=2), group.weights()
    assert sorted(path.name for path in folder.iterdir()) == [
        "complete.json",
        "deepspeed",
        "extra",
        "huggingface",
    ]
    assert json.loads((folder / "huggingface" / "config.json").read_text())["vocab_size"] == 1024
    assert (folder / "huggingface" / "tokenizer.json").exists()

    group.build(config)
    group.group.load_checkpoint(str(folder))
    resumed = group.step(seed=2), group.weights()
    for key in ("loss", "grad_norm", "lr"):
        assert resumed[0][key] == expected[0][key]
    assert apart(resumed[1], expected[1]) == 0


@pytest.mark.parametrize(
    "name, damage, said",
    [
        ("deepspeed/rank_00001_00000.safetensors", None, "is missing"),
        ("deepspeed/rank_00000_00000.safetensors", 1, "was changed after it was written"),
        ("extra/rank_00001.pt", 1, "was changed after it was written"),
        ("complete.json", 1, "it cannot be read"),
        ("complete.json", None, "it was not written to its end"),
    ],
)
def test_a_checkpoint_that_is_not_as_it_was_written_is_not_loaded(
    ranks, student, tmp_path, name, damage, said
):
    group, folder = ranks(2), tmp_path / "actor"
    group.build(deepspeed_config(student))
    group.group.save_checkpoint(str(folder), None, 1, None)
    before = group.ask(held_state)
    file = folder / name
    if damage is None:
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-damage] ^= 1
        file.write_bytes(content)
    with pytest.raises(Exception, match=said):
        group.group.load_checkpoint(str(folder))
    assert_unmoved(before, group.ask(held_state))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("other", [(1, 2), (2, 0), (1, 3)])
def test_another_number_of_ranks_and_another_stage_go_on_from_it(
    ranks, student, tmp_path, stage, other
):
    folder = tmp_path / "actor"
    ranks(2).build(deepspeed_config(student, zero_stage=stage))
    ranks(2).step(seed=0)
    ranks(2).group.save_checkpoint(str(folder), None, 1, None)
    saved, expected = ranks(2).weights(), run(ranks(2))
    world_size, other_stage = other
    ranks(world_size).build(deepspeed_config(student, zero_stage=other_stage))
    ranks(world_size).group.load_checkpoint(str(folder))
    assert apart(ranks(world_size).weights(), saved) == 0
    assert_same(run(ranks(world_size)), expected)


@pytest.mark.slow
def test_hf_model_is_a_folder_that_transformers_loads(ranks, student, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    group, folder = ranks(2), tmp_path / "actor"
    contents = ["model", "optimizer", "extra", "hf_model"]
    group.build(deepspeed_config(student, zero_stage=3, checkpoint={"save_contents": contents}))
    group.step()
    group.group.save_checkpoint(str(folder), None, 1, None)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "huggingface", dtype="auto")
    assert apart(dict(loaded.named_parameters()), group.weights()) == 0
    assert AutoTokenizer.from_pretrained(folder / "huggingface").vocab_size > 0


@pytest.mark.slow
def test_older_checkpoints_go_and_a_remote_folder_is_refused(ranks, student, tmp_path):
    group = ranks(2)
    group.build(deepspeed_config(student))
    for step in (1, 2, 3):
        group.group.save_checkpoint(str(tmp_path / f"global_step_{step}"), None, step, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "global_step_3"]
    with pytest.raises(Exception, match=r"trainer\.default_hdfs_dir"):
        group.group.save_checkpoint(str(tmp_path / "global_step_4"), "hdfs://there", 4, None)


# ---------------------------------------------------------------- leaving the GPU


@pytest.mark.slow
@pytest.mark.parametrize("zero_offload", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_parts_that_leave_and_come_back_move_no_number(ranks, student, stage, dtype, zero_offload):
    group = ranks(2)
    config = deepspeed_config(student, zero_stage=stage, dtype=dtype, zero_offload=zero_offload)
    group.build(config)
    expected = run(group)
    group.build(config)
    first = group.step(seed=0)
    all_parts = {"weights", "gradients", "optimizer"}
    for away in group.ask(leave_and_come_back):
        assert away == [{"weights"}, all_parts, {"gradients", "optimizer"}, set()]
    here = group.weights()
    for given, away in group.ask(weights_while_away):
        assert apart(given, here) == 0
        assert away == all_parts
    steps = [first, *(group.step(seed=seed) for seed in range(1, STEPS))]
    assert [s["grad_norm"] for s in steps] == [s["grad_norm"] for s in expected[0]]
    assert apart(group.weights(), expected[1]) == 0


# ---------------------------------------------------------------- refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model_options": {"lora_rank": 8}}, "model.lora_rank=8"),
        ({"model_options": {"use_fused_kernels": True}}, "model.use_fused_kernels=True"),
        ({"model_type": "value_model"}, "model_type=value_model"),
        ({"checkpoint": {"save_contents": ["model"]}}, "checkpoint.save_contents"),
        ({"checkpoint": {"load_contents": ["model"]}}, "checkpoint.load_contents"),
        ({"checkpoint": {"async_save": True}}, "checkpoint.async_save=True"),
        ({"optim": {"optimizer": "SGD"}}, "optim.optimizer=torch.optim.SGD"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_its_key(ranks, student, settings, key):
    with pytest.raises(Exception) as caught:
        ranks(1).build(deepspeed_config(student, **settings))
    lines = [line for line in str(caught.value).splitlines() if "DeepSpeed engine" in line]
    assert key in lines[-1]
