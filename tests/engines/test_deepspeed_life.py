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
from safetensors.torch import load_file, save_file

from rock_opd.core.schedule import learning_rate
from rock_opd.errors import DataError, ModelError, NumericsError, StorageError
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


def whole_state(group: Ranks) -> dict[tuple[str, str], torch.Tensor]:
    """Float32 weights and moments by kind and parameter, put together from all ranks' ranges."""
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for rank in group.call("held"):
        for kind, name, start, values in rank:
            parts.setdefault((kind, name), {})[start] = values
    return {key: torch.cat([at[start] for start in sorted(at)]) for key, at in parts.items()}


FEW_AND_MANY = [(1, 2, 0, 2), (2, 1, 2, 3), (2, 1, 3, 0), (1, 2, 3, 1), (2, 2, 1, 3), (2, 2, 3, 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after", "stage", "other_stage"), FEW_AND_MANY)
def test_a_state_serves_any_number_of_ranks_and_any_stage_bit_by_bit(
    tiny_models, tmp_path, before, after, stage, other_stage, dtype
):
    one, other = ranks(before), ranks(after)
    build(one, tiny_models / "student", zero_stage=stage, dtype=dtype)
    train(one, [1, 2])
    one.call("save_state", str(tmp_path / "one"))
    saved, given_out = whole_state(one), weights(one)
    assert saved[("exp_avg", "model.norm.weight")].abs().max() > 0
    assert {kind for kind, _ in saved} == {"weight", "exp_avg", "exp_avg_sq"}
    assert sum(len(v) for (kind, _), v in saved.items() if kind == "weight") == sum(
        tensor.numel() for tensor in given_out.values()
    )

    build(other, tiny_models / "student", zero_stage=other_stage, dtype=dtype)
    train(other, [9])  # the state it loads over is another one
    other.call("load_state", str(tmp_path / "one"))
    assert_same(whole_state(other), saved)
    assert_same(weights(other), given_out)
    assert other.call("counters") == [(2, 2)] * after

    # and back again: nothing is lost on the way
    other.call("save_state", str(tmp_path / "other"))
    build(one, tiny_models / "student", zero_stage=stage, dtype=dtype)
    one.call("load_state", str(tmp_path / "other"))
    assert_same(whole_state(one), saved)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_steps_after_a_change_of_ranks_are_those_of_the_uninterrupted_run(
    tiny_models, tmp_path, before, after
):
    def step(group: Ranks, seed: int):
        """The same four micro-batches, however many ranks share them."""
        each, share = [], 4 // group.world_size
        for rank in range(group.world_size):
            mine = [given(seed + 50 * i) for i in range(rank * share, (rank + 1) * share)]
            each.append(([b for b, _ in mine], [r for _, r in mine]))
        return group.call("train_step", each=each, total_weight=72.0, mask_version=0)

    one, other = ranks(before), ranks(after)
    build(one, tiny_models / "student", zero_stage=2)
    step(one, 1), step(one, 2)
    one.call("save_state", str(tmp_path))
    step(one, 3)
    uninterrupted = step(one, 4)
    build(other, tiny_models / "student", zero_stage=3)
    other.call("load_state", str(tmp_path))
    step(other, 3)
    resumed = step(other, 4)
    # the bound of test_deepspeed_numbers for other splits of a step
    assert resumed[0].grad_norm == pytest.approx(uninterrupted[0].grad_norm, rel=1e-4)
    a, b = weights(one), weights(other)
    for name, weight in a.items():
        torch.testing.assert_close(b[name], weight, rtol=0, atol=1e-5)


def test_a_state_written_in_the_background_is_that_of_the_moment_it_was_asked_for(
    tiny_models, tmp_path
):
    group = ranks(2)
    build(group, tiny_models / "student", zero_stage=0)  # the weights themselves are updated
    train(group, [1])
    group.call("save_state", str(tmp_path / "now"))
    group.call("save_state", str(tmp_path / "later"), background=True)
    group.call("save_hf", str(tmp_path / "hf"), background=True)
    train(group, [2])
    deadline = time.monotonic() + 60
    while None in group.call("written", str(tmp_path / "hf")):
        assert time.monotonic() < deadline
    facts = group.call("written", str(tmp_path / "later"))
    assert facts == group.call("written", str(tmp_path / "later"))  # asking does not use it up
    for mine in facts:
        assert len(mine) == 1  # each rank wrote its half
        for name, file in mine.items():
            assert file.num_bytes == (tmp_path / "later" / name).stat().st_size
            assert_same(load_file(tmp_path / "later" / name), load_file(tmp_path / "now" / name))

    build(group, tiny_models / "student", zero_stage=0)
    group.call("load_state", str(tmp_path / "later"))
    expected = weights(group)
    build(ranks(1), tmp_path / "hf")
    assert_same(weights(ranks(1)), expected)


def test_a_state_that_cannot_serve_is_refused(tiny_models, tmp_path):
    def refusal(path: Path, match: str) -> None:
        with pytest.raises(RankFailure) as failure:
            ranks(2).call("load_state", str(path))
        assert all(isinstance(error, DataError) for error in failure.value.errors)
        assert match in str(failure.value.errors[0])

    build(ranks(2), tiny_models / "student", zero_stage=2)
    ranks(2).call("save_state", str(tmp_path / "state"))
    refusal(tmp_path / "nowhere", "no file of it is there")
    (tmp_path / "half").mkdir()
    files = sorted((tmp_path / "state").iterdir())
    (tmp_path / "half" / files[0].name).write_bytes(files[0].read_bytes())
    refusal(tmp_path / "half", "is not there whole; a rank's file is missing")
    (tmp_path / "half" / files[1].name).write_bytes(files[1].read_bytes()[:5000])
    refusal(tmp_path / "half", "cannot be read")
    train(ranks(2), [1])
    ranks(2).call("save_state", str(tmp_path / "state2"))
    (tmp_path / "half" / files[1].name).write_bytes(
        (tmp_path / "state2" / files[1].name).read_bytes()
    )
    refusal(tmp_path / "half", "is of another state than rank_00000")
    build(ranks(2), tiny_models / "student_untied", zero_stage=2)
    refusal(tmp_path / "state", "lm_head.weight has no elements in it, 65536 in student.model")
    build(ranks(2), tiny_models / "student", zero_stage=2, dtype="bfloat16")
    refusal(tmp_path / "state", "resume with the same student.dtype")


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_no_rank_waiting(
    tiny_models, tmp_path
):
    group = ranks(2)
    build(group, tiny_models / "student", zero_stage=3)
    (tmp_path / "file").write_text("not a folder")
    for method in ("save_state", "save_hf"):
        with pytest.raises(RankFailure) as failure:
            group.call(method, str(tmp_path / "file" / "inside"))
        error = failure.value.errors[0]
        assert isinstance(error, StorageError) and "Not a directory" in str(error)
        assert "needed" in str(error) and "free" in str(error) and "\n" not in str(error)
    train(group, [1])


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
