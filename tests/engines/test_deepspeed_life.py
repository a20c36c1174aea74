"""The DeepSpeed student over time: updates, weights out, resuming, and peers that do not answer."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rock_opd.core.schedule import learning_rate
from rock_opd.errors import DataError, ModelError, NumericsError
from rock_opd.types import TeacherRows, TrainBatch

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_ranks import RankFailure, Ranks, ranks

TRAINS = {
    "lr": 1e-3,
    "min_lr": 1e-4,
    "warmup_ratio": 0.2,
    "max_grad_norm": 1.0,
    "weight_decay": 0.1,
}
LENGTHS = (12, 17, 9)


def given(seed: int, *, vocabulary: int = 1024) -> tuple[TrainBatch, TeacherRows]:
    """A packed micro-batch whose every second token trains, and scalars of a teacher."""
    rng = np.random.default_rng(seed)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS])
    predicted = np.flatnonzero(positions % 2 == 1)
    batch = TrainBatch(
        token_ids=rng.integers(3, vocabulary, sum(LENGTHS)).astype(np.int32),
        position_ids=positions,
        predicted=predicted,
        weight=np.ones(len(predicted), np.float32),
        index=np.arange(len(predicted)),
        requests=(),
    )
    logprobs = rng.normal(-4, 1, len(predicted)).astype(np.float32)
    return batch, TeacherRows(kind="sampled", logprobs=logprobs)


def build(group: Ranks, model, **settings) -> None:
    group.call("build", str(model), divergence="policy_gradient", **{**TRAINS, **settings})


def train(group: Ranks, seeds: list[int]) -> list:
    """One step per seed; rank r takes micro-batches ``seed`` + 100 r and ``seed`` + 100 r + 50."""
    results = []
    for seed in seeds:
        each = []
        for rank in range(group.world_size):
            mine = [given(seed + 100 * rank), given(seed + 100 * rank + 50)]
            each.append(([b for b, _ in mine], [r for _, r in mine]))
        results = group.call("train_step", each=each, total_weight=72.0, mask_version=0)
    return results


def weights(group: Ranks, max_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    return {k: v for bucket in group.call("weights", max_bytes)[0] for k, v in bucket.items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def torch_adamw(model_path, seeds: list[int], *, num_ranks: int):
    """The same updates by torch alone, float64: sequences one at a time, clipping and schedule."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1
    )
    norms = []
    for update, seed in enumerate(seeds):
        loss = 0.0
        for rank in range(num_ranks):
            for batch, rows in (given(seed + 100 * rank), given(seed + 100 * rank + 50)):
                starts = np.flatnonzero(batch.position_ids == 0)
                for start, length in zip(starts, LENGTHS, strict=True):
                    ids = torch.tensor(batch.token_ids[start : start + length].astype(np.int64))
                    log_q = torch.log_softmax(model(ids[None]).logits[0], -1)
                    for row, t in enumerate(batch.predicted):
                        if start < t < start + length:
                            q = log_q[t - start - 1, batch.token_ids[t]]
                            loss = loss - (float(rows.logprobs[row]) - q).detach() * q / 72.0
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                update, num_updates=10, lr=1e-3, min_lr=1e-4, warmup_ratio=0.2
            )
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


@pytest.fixture(scope="module")
def reference_run(tiny_models):
    return torch_adamw(tiny_models / "student", [1, 2, 3], num_ranks=2)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_clipped_updates_equal_torch_adamw_in_float64(
    tiny_models, reference_run, stage, offload
):
    if offload and stage == 0:
        pytest.skip("the recipe refuses it")
    expected, norms = reference_run
    group = ranks(2)
    build(group, tiny_models / "student", zero_stage=stage, offload_optimizer=offload)
    for update, seed in enumerate([1, 2, 3]):
        results = train(group, [seed])
        assert norms[update] > 1.0  # clipping bites
        for result in results:
            assert result.grad_norm == pytest.approx(norms[update], rel=1e-4)
            assert result.policy_version == update + 1
            assert result.learning_rate == learning_rate(
                update, num_updates=10, lr=1e-3, min_lr=1e-4, warmup_ratio=0.2
            )
    found = weights(group)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["student", "student_untied", "teacher"])
def test_saved_folder_loads_in_transformers_with_the_trained_weights(tiny_models, tmp_path, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, group = tiny_models / model, ranks(2)
    build(group, source, zero_stage=3)
    train(group, [1])
    given_out = weights(group)
    group.call("save_hf", str(tmp_path / "hf"))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32
    tied = model == "student"
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied
    assert ("lm_head.weight" in given_out) != tied
    # The names given out are those of the source's own files, which vLLM reads.
    from safetensors.torch import load_file

    on_disk, original = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(source / "model.safetensors"),
    )
    assert on_disk.keys() == original.keys() == given_out.keys()
    assert_same(on_disk, given_out)
    assert any(not torch.equal(on_disk[name], original[name]) for name in original)
    ours, theirs = (AutoTokenizer.from_pretrained(p) for p in (tmp_path / "hf", source))
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    config, before = (
        json.loads((p / "config.json").read_text()) for p in (tmp_path / "hf", source)
    )
    assert config["architectures"] == before["architectures"]
    assert (tmp_path / "hf/generation_config.json").is_file()
    # The folder is a model to go on from.
    build(group, tmp_path / "hf", zero_stage=2)
    assert_same(weights(group), given_out)


@pytest.mark.parametrize("model", ["student", "teacher"])
def test_vllm_samples_from_the_trained_weights_synced_or_saved(
    tiny_models, tmp_path, start_engine, model
):
    from rock_opd.config import RolloutConfig
    from rock_opd.engines.weight_sync import Checksums, to_wire
    from rock_opd.types import Prompt, SampleRequest

    group = ranks(2)
    build(group, tiny_models / model, zero_stage=3, lr=5e-3)

    def start(folder):
        return start_engine(
            "rock_opd.engines.vllm_rollout:RolloutEngine",
            RolloutConfig(max_prompt_tokens=32, max_new_tokens=32),
            model=str(folder),
            dtype="float32",
            device="cpu",
            num_real_ids=1024,
            stop_token_ids=(2,),
        )

    prompt = Prompt(prompt_id="p", token_ids=np.arange(5, 25, dtype=np.int32))
    requests = [SampleRequest(prompt=prompt, sample_idx=i, seed=i) for i in range(4)]

    def gap(engine) -> float:
        """Largest difference between the sampler's and the trainer's log-probabilities."""
        rollouts = engine.call("generate", requests, temperature=1.0, top_p=1.0, max_new_tokens=24)
        starts = np.cumsum([0] + [len(r.token_ids) for r in rollouts[:-1]])
        at = [r.positions + start for r, start in zip(rollouts, starts, strict=True)]
        num = sum(len(a) for a in at)
        batch = TrainBatch(
            token_ids=np.concatenate([r.token_ids for r in rollouts]),
            position_ids=np.concatenate([np.arange(len(r.token_ids)) for r in rollouts]),
            predicted=np.concatenate(at),
            weight=np.ones(num, np.float32),
            index=np.arange(num),
            requests=(),
        )
        rows = TeacherRows(kind="sampled", logprobs=np.zeros(num, np.float32))
        measured = group.call("measure", [batch], [rows])[0].logprobs
        return float(
            np.abs(measured - np.concatenate([r.logprobs[r.positions] for r in rollouts])).max()
        )

    engine = start(tiny_models / model)
    assert gap(engine) < 1e-4
    train(group, [1, 2])
    assert gap(engine) > 1e-2  # the old weights are seen to be old

    checksums = Checksums()
    engine.call("begin_update", 2)
    for bucket in group.call("weights", 40_000)[0]:
        wire = to_wire(list(bucket.items()))
        checksums.update(wire)
        engine.call("load_bucket", wire)
    assert engine.call("end_update", checksums.chosen()) == 2
    assert gap(engine) < 1e-4
    engine.stop()

    group.call("save_hf", str(tmp_path))
    assert gap(start(tmp_path)) < 1e-4


@pytest.mark.parametrize("stage", [1, 3])
def test_buckets_are_cut_by_full_shape_and_come_from_rank_0_only(tiny_models, stage):
    group = ranks(2)
    build(group, tiny_models / "student", zero_stage=stage)
    limit = 40_000
    mine, others = group.call("weights", limit)
    assert len(mine) == len(others) > 3 and not any(others)
    for bucket in mine:
        size = sum(t.numel() * t.element_size() for t in bucket.values())
        assert size <= limit or len(bucket) == 1
    whole = weights(group)
    assert sorted(name for bucket in mine for name in bucket) == sorted(whole)
    assert_same({k: v for bucket in mine for k, v in bucket.items()}, whole)
    assert whole["model.embed_tokens.weight"].shape == (1024, 64)


@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_can_hand_over_the_announced_full_tensors(tiny_models, stage):
    from transformers import AutoModelForCausalLM

    group = ranks(2)
    build(group, tiny_models / "teacher", zero_stage=stage)
    model = AutoModelForCausalLM.from_pretrained(tiny_models / "teacher", dtype=torch.float32)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for found, announced in group.call("gathered", 100_000):
        assert_same(found, own)
        assert [(p.name, p.shape) for p in announced] == [
            (n, tuple(t.shape)) for n, t in own.items()
        ]


def test_a_model_in_several_shards_loads_in_transformers(tiny_models, tmp_path):
    from transformers import AutoModelForCausalLM

    group = ranks(2)
    build(group, tiny_models / "student", zero_stage=3, dtype="bfloat16")
    group.call("save_hf", str(tmp_path), 100_000)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    whole = weights(group)
    assert all(torch.equal(p, whole[name]) for name, p in loaded.named_parameters())
    # Saved again in one piece, nothing of the old shards stays behind.
    group.call("save_hf", str(tmp_path))
    assert [f.name for f in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("stage", "dtype", "world_size"),
    [
        (0, "float32", 2),
        (1, "float32", 2),
        (2, "float32", 2),
        (3, "float32", 2),
        (1, "bfloat16", 2),
        (2, "bfloat16", 2),
        (3, "bfloat16", 2),
        (3, "float32", 1),
    ],
)
def test_resuming_equals_the_uninterrupted_run_bit_by_bit(
    tiny_models, tmp_path, stage, dtype, world_size
):
    group = ranks(world_size)
    settings = {"zero_stage": stage, "dtype": dtype}
    build(group, tiny_models / "student", **settings)
    train(group, [1, 2])
    group.call("save_state", str(tmp_path))
    (uninterrupted, *_), expected = train(group, [3]), weights(group)

    build(group, tiny_models / "student", **settings)
    train(group, [9])  # the state it resumes over is another one
    group.call("load_state", str(tmp_path))
    assert group.call("counters") == [(2, 2)] * world_size
    resumed, *_ = train(group, [3])
    assert_same(weights(group), expected)
    for field in dataclasses.fields(resumed):
        a, b = getattr(resumed, field.name), getattr(uninterrupted, field.name)
        assert np.array_equal(a, b), field.name


def test_a_state_of_another_shape_is_refused(tiny_models, tmp_path):
    build(ranks(2), tiny_models / "student", zero_stage=2)
    ranks(2).call("save_state", str(tmp_path))
    build(ranks(1), tiny_models / "student", zero_stage=2)
    with pytest.raises(RankFailure) as failure:
        ranks(1).call("load_state", str(tmp_path))
    error = failure.value.errors[0]
    assert isinstance(error, DataError) and "'num_ranks': 2" in str(error)
    with pytest.raises(RankFailure) as failure:
        ranks(1).call("load_state", str(tmp_path / "nowhere"))
    assert isinstance(failure.value.errors[0], DataError)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")],
)
@pytest.mark.parametrize("offload", [False, True])
def test_leaving_the_device_and_coming_back_changes_nothing(tiny_models, stage, dtype, offload):
    group = ranks(2)
    settings = {"zero_stage": stage, "dtype": dtype, "offload_optimizer": offload}
    build(group, tiny_models / "student", **settings)
    train(group, [1, 2])
    expected = weights(group)
    build(group, tiny_models / "student", **settings)
    group.call("leave_and_come_back")
    train(group, [1])
    group.call("leave_and_come_back")
    train(group, [2])
    assert_same(weights(group), expected)


def test_a_stage_that_cannot_leave_the_device_says_which_can(tiny_models):
    build(ranks(1), tiny_models / "student", zero_stage=0)
    with pytest.raises(RankFailure, match=r"needs student\.zero_stage 2 or 3"):
        ranks(1).call("leave_and_come_back")


def test_checkpointing_and_not_give_the_same_weights_after_three_updates(tiny_models):
    group, found = ranks(1), []
    for flag in (False, True):
        build(group, tiny_models / "student", zero_stage=3, gradient_checkpointing=flag)
        calls = group.call("layer_calls")[0]
        train(group, [1, 2, 3])
        # 3 steps of 2 micro-batches; checkpointing runs each layer again in the backward
        assert group.call("layer_calls")[0] - calls == (12 if flag else 6)
        found.append(weights(group))
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=0, atol=1e-6)


def test_weights_that_are_not_in_the_folder_are_refused(tiny_models, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in (tiny_models / "student").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankFailure) as failure:
        build(ranks(1), tmp_path)
    error = failure.value.errors[0]
    assert isinstance(error, ModelError) and "model.layers.1.mlp.up_proj.weight" in str(error)
    with pytest.raises(RankFailure) as failure:
        build(ranks(1), tmp_path / "nowhere")
    assert isinstance(failure.value.errors[0], ModelError)


def test_a_model_with_soft_capped_logits_is_refused(tmp_path, tiny_models):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        final_logit_softcapping=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RankFailure, match="soft caps"):
        build(ranks(1), tmp_path)


@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_a_peer_that_dies_or_stays_away_is_an_error_within_the_time_limit(tiny_models, how):
    group = Ranks(2, timeout_s=10)
    try:
        build(group, tiny_models / "student", zero_stage=2)
        train(group, [1])
        batch, rows = given(2)
        if how == "dies":
            group.send(1, "exit")
        else:  # in the middle of a step: the other waits to reduce, in a group DeepSpeed opened
            group.send(1, "train_step_waiting_for_rows", [batch], 60)
        started = time.monotonic()
        group.send(0, "train_step", [batch], [rows], total_weight=72.0, mask_version=0)
        _, error = group.answer(0)
        assert error is not None and not isinstance(error, NumericsError)
        assert time.monotonic() - started < 30
    finally:
        group.close()
