"""The roles in one process compute what the engines compute: checked by hand, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rock_opd.config import Recipe
from rock_opd.core.batching import build_batches, deal, flatten, total_weight
from rock_opd.errors import ConfigError, NumericsError
from rock_opd.local_roles import LocalRoles
from rock_opd.recipe_file import build_recipe
from rock_opd.types import Prompt, Rollout, SampleRequest, TokenWeights

VOCAB, STOP = 24, 1


def model(seed: int, vocab: int = VOCAB) -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocab,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                max_position_embeddings=64,
                initializer_range=0.2,
                tie_word_embeddings=True,
            )
        ).float()


def recipe(*overrides: str) -> Recipe:
    base = {
        "data": {"prompts": "p.jsonl"},
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "optim": {"lr": 1e-2, "warmup_ratio": 0.0, "max_grad_norm": 0.5},
    }
    return build_recipe(base, list(overrides))


def roles(*overrides: str, **models: Qwen3ForCausalLM) -> LocalRoles:
    return LocalRoles(
        recipe(*overrides),
        models.get("student") or model(0),
        models.get("teacher") or model(1),
        num_real_ids=VOCAB,
        stop_token_ids=[STOP],
        num_updates=10,
    )


def requests(num: int = 6, **kwargs) -> list[SampleRequest]:
    """Prompts of two lengths; the teacher reads a longer one of its own."""
    return [
        SampleRequest(
            prompt=Prompt(
                prompt_id=f"p{i}",
                token_ids=(2 + (np.arange(3 + i % 2) + i) % 20).astype(np.int32),
                teacher_prefix_ids=np.array([20, 21, 22, 3 + i % 15], np.int32) if i % 3 else None,
            ),
            sample_idx=0,
            seed=100 + i,
            **kwargs,
        )
        for i in range(num)
    ]


def sample(local: LocalRoles, wanted: list[SampleRequest], **kwargs) -> list[Rollout]:
    how = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, **kwargs}
    return local.rollouts.generate(wanted, **how)


def logprobs(net: Qwen3ForCausalLM, ids: np.ndarray) -> torch.Tensor:
    """float64 [T, V]: row t predicts token t + 1; one sequence, alone, no cache."""
    logits = net(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits.double(), -1)


def step_of(local: LocalRoles, rollouts: list[Rollout], weight: np.ndarray | None = None, **how):
    """Scores rollouts and deals them: (signals, batches, weights)."""
    lots = deal(rollouts, **{"num_ranks": 2, "micro_batch_tokens": 30, "num_teachers": 1, **how})
    signals = flatten(rollouts, local.teachers.score(lots, rollouts))
    ones = np.ones(signals.num_tokens, np.float32)
    weights = TokenWeights(weight=ones if weight is None else weight, measure=ones)
    return signals, build_batches(lots, rollouts, weights), weights


def test_what_is_measured_is_the_reverse_kl_computed_by_hand():
    local, student, teacher = roles(), model(0), model(1)
    rollouts = sample(local, requests())
    signals, batches, _ = step_of(local, rollouts)
    results = local.students.measure(batches, entropy=True)
    expected = {"kl": [], "logprobs": [], "entropy": [], "teacher": []}
    with torch.no_grad():
        for r in rollouts:
            log_q = logprobs(student, r.token_ids)[r.positions - 1]
            log_p = logprobs(teacher, r.teacher_token_ids)[r.teacher_positions - 1]
            ids = torch.from_numpy(r.token_ids[r.positions].astype(np.int64))[:, None]
            expected["kl"] += (log_q.exp() * (log_q - log_p)).sum(-1).tolist()
            expected["entropy"] += (-log_q.exp() * log_q).sum(-1).tolist()
            expected["logprobs"] += log_q.gather(1, ids)[:, 0].tolist()
            expected["teacher"] += log_p.gather(1, ids)[:, 0].tolist()
    place = np.argsort(np.concatenate([r.index for r in results]))
    for name in ("kl", "logprobs", "entropy"):
        got = np.concatenate([getattr(r, name) for r in results])[place]
        np.testing.assert_allclose(got, expected[name], atol=2e-5)
    np.testing.assert_allclose(signals.teacher_logprobs, expected["teacher"], atol=2e-5)
    np.testing.assert_allclose(signals.student_logprobs, expected["logprobs"], atol=2e-5)
    assert len(results) == 2 and min(expected["kl"]) > 0.01


def test_an_update_is_adamw_on_the_weighted_mean_however_it_is_dealt():
    wanted = requests()
    after = []
    for how in ({"num_ranks": 1, "micro_batch_tokens": 500}, {"num_ranks": 2}):
        student = model(0)
        local = roles(student=student)
        rollouts = sample(local, wanted)
        num = sum(len(r.positions) for r in rollouts)
        weight = (np.arange(num) % 3 > 0).astype(np.float32)
        _, batches, weights = step_of(local, rollouts, weight, **how)
        total = total_weight(weights, normalizer="kept")
        results = local.students.train_step(batches, total_weight=total, mask_version=7)
        assert {r.mask_version for r in results} == {7}
        assert {r.policy_version for r in results} == {1}
        after.append(torch.cat([p.detach().flatten() for p in student.parameters()]))

    by_hand, teacher = model(0), model(1)
    adam = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    kl = []
    for r in rollouts:
        log_q = logprobs(by_hand, r.token_ids)[r.positions - 1]
        log_p = logprobs(teacher, r.teacher_token_ids)[r.teacher_positions - 1].detach()
        kl.append((log_q.exp() * (log_q - log_p)).sum(-1))
    loss = (torch.cat(kl) * torch.from_numpy(weight)).sum() / weight.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
    adam.step()
    expected = torch.cat([p.detach().flatten() for p in by_hand.parameters()])
    assert sum(r.loss for r in results) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert results[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
    for got in after:
        # Adam divides by the gradient's size: where that is rounding, so is the step.
        assert (got - expected).abs().mean() < 1e-5


def test_a_response_hangs_on_its_seed_and_not_on_its_neighbours():
    local, wanted = roles(), requests()
    together = sample(local, wanted)
    alone = [sample(local, [request])[0] for request in wanted]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_tokens_are_drawn_as_often_as_the_student_says():
    local = roles()
    prompt = Prompt(prompt_id="p", token_ids=np.array([5, 6], np.int32))
    wanted = [SampleRequest(prompt=prompt, sample_idx=i, seed=i) for i in range(4000)]
    first = [r.token_ids[2] for r in sample(local, wanted, max_new_tokens=1)]
    with torch.no_grad():
        expected = logprobs(model(0), prompt.token_ids)[-1].exp().numpy()
    share = np.bincount(first, minlength=VOCAB) / 4000
    assert np.abs(share - expected).max() < 4 * np.sqrt(0.25 / 4000)


def test_a_stop_token_ends_a_response_and_belongs_to_it():
    rollouts = sample(roles(), requests(40), max_new_tokens=30)
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert 0 < len(ended) < 40
    for r in rollouts:
        response = r.token_ids[r.prompt_len :]
        assert (response == STOP).sum() == (r.finish_reason == "stop")
        assert r.finish_reason == "length" or response[-1] == STOP
        assert r.finish_reason == "stop" or len(response) == 30
        assert r.loss_mask.sum() == len(response)


def test_banned_ids_never_occur():
    plain = sample(roles(), requests(20))
    common = int(np.bincount(np.concatenate([r.token_ids[r.positions] for r in plain])).argmax())
    for temperature in (0.0, 1.0):
        banned = sample(roles(), requests(20, banned_ids=(common,)), temperature=temperature)
        assert not any((r.token_ids[r.positions] == common).any() for r in banned)


def test_the_sampler_keeps_its_weights_until_they_are_pushed():
    local = roles()
    before = sample(local, requests())
    _, batches, weights = step_of(local, before)
    local.students.train_step(
        batches, total_weight=total_weight(weights, normalizer="all"), mask_version=0
    )
    stale = sample(local, requests())
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, stale, strict=True))
    assert {r.policy_version for r in stale} == {0}
    local.students.push_weights(local.rollouts, version=1, bucket_bytes=1)
    fresh = sample(local, requests())
    assert {r.policy_version for r in fresh} == {1}
    signals, batches, _ = step_of(local, fresh)
    results = local.students.measure(batches)
    place = np.argsort(np.concatenate([r.index for r in results]))
    np.testing.assert_allclose(
        np.concatenate([r.logprobs for r in results])[place], signals.student_logprobs, atol=2e-5
    )


def test_a_saved_state_goes_on_exactly(tmp_path):
    def updates(local: LocalRoles, num: int) -> None:
        for _ in range(num):
            rollouts = sample(local, requests())
            _, batches, weights = step_of(local, rollouts)
            total = total_weight(weights, normalizer="all")
            local.students.train_step(batches, total_weight=total, mask_version=0)

    whole = model(0)
    updates(roles(student=whole), 3)
    first, then = roles(), model(2)
    updates(first, 2)
    first.students.save_state(tmp_path)
    second = roles(student=then)
    second.students.load_state(tmp_path)
    # The sampler of each still holds its first weights: both go on from the same responses.
    second.rollouts = first.rollouts
    updates(second, 1)
    for a, b in zip(whole.parameters(), then.parameters(), strict=True):
        assert torch.equal(a, b)


def test_numbers_that_broke_change_no_weight():
    student, teacher = model(0), model(1)
    local = roles(student=student, teacher=teacher)
    rollouts = sample(local, requests())
    with torch.no_grad():
        teacher.model.norm.weight.fill_(float("nan"))
    _, batches, _ = step_of(local, rollouts)
    before = [p.clone() for p in student.parameters()]
    with pytest.raises(NumericsError, match="no weight was changed"):
        local.students.train_step(batches, total_weight=1.0, mask_version=0)
    assert all(torch.equal(a, b) for a, b in zip(before, student.parameters(), strict=True))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.divergence=policy_gradient", "train reverse_kl or forward_kl"),
        ("loss.kd_ratio=0.5", "loss.kd_ratio=1"),
        ("teacher.payload=topk_tail", "teacher.payload=hidden"),
        ("rollout.top_p=0.9", "rollout.top_p=1"),
    ],
)
def test_what_only_the_engines_do_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        roles(override)


def test_models_wider_than_their_tokenizer_are_refused():
    with pytest.raises(ConfigError, match="student 24, teacher 32, tokenizer 24"):
        roles(teacher=model(1, vocab=32))
