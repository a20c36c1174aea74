"""Bans in the rollout engine, on a real tiny model: who is banned, who is left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rock_opd.config import RolloutConfig
from rock_opd.engines.vllm_worker import BANNED_KEY, BannedIds
from rock_opd.errors import ConfigError, DataError
from rock_opd.types import Prompt, Rollout, SampleRequest

NUM_REAL_IDS, EOS, LIMIT = 1024, 2, 24
ENGINE = "rock_opd.engines.vllm_rollout:RolloutEngine"
CFG = RolloutConfig(max_prompt_tokens=40, max_new_tokens=LIMIT, max_num_seqs=8)
ARGUMENTS = {
    "dtype": "float32",
    "device": "cpu",
    "num_real_ids": NUM_REAL_IDS,
    "stop_token_ids": (EOS,),
}


@pytest.fixture(scope="module")
def engine(start_engine: Callable, tiny_models: Path) -> Any:
    """Wider than its tokenizer, so that both logits processors are at work."""
    model = str(tiny_models / "student_padded")
    return start_engine(ENGINE, CFG, model=model, can_ban=True, **ARGUMENTS)


def asked(num: int) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(prompt_id=f"p{i}", token_ids=rng.integers(3, 1000, 6 + i).astype(np.int32))
        for i in range(num)
    ]
    return [SampleRequest(prompt=p, sample_idx=0, seed=i) for i, p in enumerate(prompts)]


def ban(requests: list[SampleRequest], *ids: int) -> list[SampleRequest]:
    return [dataclasses.replace(r, banned_ids=ids) for r in requests]


def generate(engine: Any, requests: list[SampleRequest], temperature: float) -> list[Rollout]:
    return engine.call(
        "generate", requests, temperature=temperature, top_p=1.0, max_new_tokens=LIMIT
    )


def response(rollout: Rollout) -> np.ndarray:
    return rollout.token_ids[rollout.prompt_len :]


def commonest(rollouts: list[Rollout], *, but: tuple[int, ...] = (EOS,)) -> int:
    counts = np.bincount(np.concatenate([response(r) for r in rollouts]))
    counts[list(but)] = 0
    return int(counts.argmax())


def equal(first: list[Rollout], second: list[Rollout]) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids, err_msg=a.key)
        assert a.finish_reason == b.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_id_never_appears_and_neighbours_answer_as_if_alone(
    temperature: float, engine: Any
):
    requests = asked(12)
    base = generate(engine, requests, temperature)
    v = commonest(base)
    w = commonest(base, but=(EOS, v))
    assert sum(v in response(r) for r in base) >= 2
    ways = [requests, ban(requests, v), ban(requests, w), ban(requests, v, w)]
    alone = [base, *(generate(engine, way, temperature) for way in ways[1:])]
    for rollouts, banned in zip(alone, ((), (v,), (w,), (v, w)), strict=True):
        assert not np.isin(np.concatenate([response(r) for r in rollouts]), banned).any()

    # Four bans of a problem side by side, more requests than the engine decodes at once.
    mixed = generate(engine, [way[i] for i in range(12) for way in ways], temperature)
    for k, rollouts in enumerate(alone):
        equal(mixed[k::4], rollouts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_every_id_but_one_banned_only_that_one_is_sampled(temperature: float, engine: Any):
    only = 77
    base, others = asked(3), tuple(i for i in range(NUM_REAL_IDS) if i != only)
    rollouts = generate(engine, [*base, *ban(base, *others)], temperature)
    equal(rollouts[:3], generate(engine, base, temperature))
    for rollout in rollouts[3:]:
        assert response(rollout).tolist() == [only] * LIMIT


def test_the_end_may_be_banned_and_the_response_then_runs_to_its_limit(engine: Any):
    requests = asked(24)
    stopped = [r for r in generate(engine, requests, 1.0) if r.finish_reason == "stop"]
    assert stopped
    for rollout in generate(engine, ban(requests, EOS), 1.0):
        assert rollout.finish_reason == "length"
        assert len(response(rollout)) == LIMIT and EOS not in response(rollout)


def test_reported_logprobs_are_those_without_the_ban(engine: Any, tiny_models: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny_models / "student_padded", dtype=torch.float32
    )
    requests = asked(4)
    v = commonest(generate(engine, requests, 0.0))
    for rollout in generate(engine, ban(requests, v), 0.0):
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        with torch.no_grad():
            log_q = model(ids[None]).logits[0].log_softmax(-1)
        at = rollout.positions
        raw = log_q[at - 1, ids[at]].numpy()
        np.testing.assert_allclose(rollout.logprobs[at], raw, atol=1e-4)


def test_a_begun_response_is_continued_within_the_same_limit(engine: Any):
    requests = asked(6)
    whole = generate(engine, requests, 0.0)
    cut = [min(5, len(response(r)) - 1) for r in whole]
    begun = [
        dataclasses.replace(r, begun=tuple(response(w)[:n].tolist()))
        for r, w, n in zip(requests, whole, cut, strict=True)
    ]
    rest = generate(engine, begun, 0.0)
    equal(rest, whole)
    for rollout, n in zip(rest, cut, strict=True):
        assert rollout.positions[0] == rollout.prompt_len + n  # given tokens were not sampled
        assert np.isnan(rollout.logprobs[: rollout.positions[0]]).all()


def test_a_ban_that_cannot_be_kept_is_refused(
    engine: Any, start_engine: Callable, tiny_models: Path
):
    request = asked(1)
    with pytest.raises(DataError, match="prompt p0: banned ids 3 to 1024, but the student has 102"):
        generate(engine, ban(request, 3, 1024), 0.0)
    with pytest.raises(DataError, match="prompt p0: every id is banned"):
        generate(engine, ban(request, *range(NUM_REAL_IDS)), 0.0)
    full = dataclasses.replace(request[0], begun=(5,) * LIMIT)
    with pytest.raises(DataError, match="6 tokens and 24 of a response leave no room"):
        generate(engine, [full], 0.0)
    plain = start_engine(ENGINE, CFG, model=str(tiny_models / "student"), **ARGUMENTS)
    with pytest.raises(ConfigError, match="1 banned ids, but this rollout engine was started with"):
        generate(plain, ban(request, 3), 0.0)


# --- the whole of knockout ------------------------------------------------------------------------


class Remote:
    """The engine in its process, as what ``knockout`` samples from."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_requests = 0

    def generate(self, requests: list[SampleRequest], **how: Any) -> list[Rollout]:
        self.num_requests += len(requests)
        return self._engine.call("generate", requests, **how)


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, 1), (1.0, 2), (0.6, 2)])
def test_reuse_and_mixed_batches_give_the_naive_loops_answers_token_for_token(
    temperature: float, samples: int, engine: Any
):
    from rock_opd.bans import Task, mixed_batches, naive_loop

    task = Task(
        problems=tuple(r.prompt for r in asked(24)),
        samples=samples,
        temperature=temperature,
        max_new_tokens=LIMIT,
        seed=0,
    )
    remote = Remote(engine)
    base = task.answer(remote, task.requests())
    counts = np.bincount(np.concatenate([a.token_ids for a in base]))
    candidates = [EOS, *np.argsort(-counts)[:9].tolist(), int((counts == 0).argmax())]
    candidates = list(dict.fromkeys(candidates))

    remote.num_requests = 0
    mixed = dict(mixed_batches(remote, task, candidates, base, lot=32))
    num_mixed, remote.num_requests = remote.num_requests, 0
    naive = dict(naive_loop(remote, task, candidates))
    assert 0 < num_mixed < remote.num_requests / 2
    for v in candidates:
        for a, b in zip(mixed[v], naive[v], strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            assert a.stopped == b.stopped and v not in a.token_ids
    if temperature == 0:
        all_answers = [a for v in candidates for a in mixed[v]]
        assert any(0 < a.num_sampled < len(a.token_ids) for a in all_answers)


# --- model runner 2 (GPU): slots instead of rows --------------------------------------------------


class Params:
    def __init__(self, *ids: int) -> None:
        self.extra_args = {BANNED_KEY: list(ids)} if ids else None


SETTINGS = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))


class Context:
    def __init__(self, *slots: int) -> None:
        self.expanded_idx_mapping = torch.tensor(slots, dtype=torch.int32)


def test_slots_that_stay_are_banned_in_whatever_row_they_stand():
    bans = BannedIds(SETTINGS, None)
    assert bans.add_request(2, Params(1)) is True
    assert bans.add_request(0, Params()) is False
    assert bans.add_request(3, Params(0, 4)) is True
    logits = bans.apply(torch.zeros(4, 5), Context(3, 0, 2, 1))
    assert torch.isinf(logits).nonzero().tolist() == [[0, 0], [0, 4], [2, 1]]

    assert bans.add_request(3, Params()) is False  # the slot's next request is free
    assert bans.add_request(0, Params(3)) is True
    logits = bans.apply(torch.zeros(2, 5), Context(0, 3))
    assert torch.isinf(logits).nonzero().tolist() == [[0, 3]]
