"""The teacher engine on real tiny models, against transformers; parking and reading, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rock_opd.config import RolloutConfig, TeacherConfig
from rock_opd.core.objective import reverse_kl, teacher_logits, topk_tail_divergence
from rock_opd.engines.parking import ParkBuffer, Prefill, Rows
from rock_opd.engines.prompt_logprobs import FlatTable, read_prompt_logprobs
from rock_opd.engines.teacher_head import load_head
from rock_opd.engines.vllm_teacher import unpark
from rock_opd.errors import ConfigError, DataError
from rock_opd.types import Prompt, Rollout, RowRequest, SampleRequest

NUM_REAL_IDS = 1000
"""Fewer than the tiny teacher's 1,024, as if its last 24 columns were padding."""
TOP_K = 8
MAX_MODEL_LEN = 301
LENGTHS = (20, 150, 9, 64, 65, 100)
"""Prefill batches hold 64 tokens here: shorter, longer, exactly one, one more."""
PROMPT_LEN = 5


def rollout(i: int, num_tokens: int, **change: object) -> Rollout:
    """A given sequence of ids 3..999, of which the last ``num_tokens - 5`` count as sampled."""
    token_ids = np.random.default_rng(i).integers(3, NUM_REAL_IDS, num_tokens).astype(np.int32)
    values = {
        "prompt_id": f"p{i}",
        "sample_idx": 0,
        "token_ids": token_ids,
        "loss_mask": np.arange(num_tokens) >= PROMPT_LEN,
        "logprobs": np.full(num_tokens, np.nan, np.float32),
        "finish_reason": "given",
        "policy_version": -1,
        "prompt_len": PROMPT_LEN,
    }
    return Rollout(**(values | change))


ROLLOUTS = [rollout(i, n) for i, n in enumerate(LENGTHS)]


def ask(rollouts: list[Rollout], rows: slice = slice(None)) -> tuple[RowRequest, ...]:
    return tuple(RowRequest(key=r.key, rows=np.arange(len(r.positions))[rows]) for r in rollouts)


@dataclass(frozen=True)
class Expected:
    """What transformers says about a rollout's sampled tokens, over the shared width."""

    hidden: np.ndarray
    log_p: torch.Tensor
    logprobs: np.ndarray
    entropy: np.ndarray


def load(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expect(model: torch.nn.Module, given: Rollout, num_real_ids: int = NUM_REAL_IDS) -> Expected:
    ids = torch.from_numpy(given.teacher_token_ids.astype(np.int64))
    with torch.no_grad():
        hidden = model.model(ids[None]).last_hidden_state[0][given.teacher_positions - 1]
        log_p = (hidden @ model.lm_head.weight.T)[:, :num_real_ids].log_softmax(-1)
    target = ids[given.teacher_positions]
    return Expected(
        hidden=hidden.numpy(),
        log_p=log_p,
        logprobs=log_p.gather(1, target[:, None])[:, 0].numpy(),
        entropy=-(log_p.exp() * log_p).sum(-1).numpy(),
    )


@pytest.fixture(scope="module")
def reference(tiny_models: Path) -> list[Expected]:
    model = load(tiny_models / "teacher")
    return [expect(model, r) for r in ROLLOUTS]


ENGINES: dict[str, dict[str, object]] = {
    "hidden": {},
    "topk_tail": {"payload": "topk_tail", "top_k": TOP_K},
    "prompt_logprobs": {"engine": "prompt_logprobs", "payload": "topk_tail", "top_k": TOP_K},
    "sampled": {"payload": "sampled"},
    "bf16": {},
    "bf16 wire": {"wire_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def engines(start_engine: Callable, tiny_models: Path) -> Callable:
    """Name in ``ENGINES`` -> the engine, started when first asked for."""
    started: dict[str, object] = {}

    def get(name: str) -> object:
        if name not in started:
            started[name] = start_engine(
                "rock_opd.engines.vllm_teacher:TeacherEngine",
                TeacherConfig(
                    model=str(tiny_models / ("student_padded" if name == "sampled" else "teacher")),
                    max_batched_tokens=64,
                    max_num_seqs=8,
                    logit_chunk_rows=7,
                    park_bytes=42_000 if name == "topk_tail" else 1 << 20,
                    **ENGINES[name],
                ),
                dtype="bfloat16" if name == "bf16" else "float32",
                device="cpu",
                num_real_ids=NUM_REAL_IDS if name != "sampled" else 1024,
                max_model_len=MAX_MODEL_LEN,
            )
        return started[name]

    return get


@pytest.mark.parametrize("name", ["hidden", "topk_tail", "prompt_logprobs"])
def test_scores_are_those_of_transformers_over_the_shared_width(
    name: str, engines: Callable, reference: list[Expected]
):
    scores = engines(name).call("score", ROLLOUTS)
    assert [s.key for s in scores] == [r.key for r in ROLLOUTS]
    for score, expected in zip(scores, reference, strict=True):
        np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=5e-5)
        assert score.logprobs.dtype == np.float32
        if name == "prompt_logprobs":
            assert score.entropy is None
        else:
            np.testing.assert_allclose(score.entropy, expected.entropy, atol=5e-5)
    engines(name).call("clear")


def test_hidden_rows_are_transformers_last_hidden_states(
    engines: Callable, reference: list[Expected]
):
    engines("hidden").call("score", ROLLOUTS)
    order = [3, 0, 5, 1]
    rows = engines("hidden").call("fetch", ask([ROLLOUTS[i] for i in order], slice(1, None, 2)))
    assert rows.kind == "hidden" and rows.hidden.dtype == np.float32
    expected = np.concatenate([reference[i].hidden[1::2] for i in order])
    np.testing.assert_allclose(rows.hidden, expected, atol=1e-5)
    logprobs = np.concatenate([reference[i].logprobs[1::2] for i in order])
    np.testing.assert_allclose(rows.logprobs, logprobs, atol=5e-5)
    engines("hidden").call("clear")


@pytest.mark.parametrize("name", ["topk_tail", "prompt_logprobs"])
def test_top_k_and_tail_are_those_of_transformers(
    name: str, engines: Callable, reference: list[Expected]
):
    engines(name).call("score", ROLLOUTS)
    rows = engines(name).call("fetch", ask(ROLLOUTS))
    log_p = torch.cat([e.log_p for e in reference])
    best = log_p.topk(TOP_K)
    order = np.argsort(-rows.topk_logprobs, axis=1, kind="stable")
    assert rows.kind == "topk_tail" and rows.topk_ids.dtype == np.int32
    np.testing.assert_array_equal(np.take_along_axis(rows.topk_ids, order, 1), best.indices)
    got = np.take_along_axis(rows.topk_logprobs, order, 1)
    np.testing.assert_allclose(got, best.values, atol=5e-5)
    tail = log_p.scatter(1, best.indices, -math.inf).logsumexp(-1)
    np.testing.assert_allclose(rows.tail_logprob, tail, atol=1e-4)
    expected = np.concatenate([e.logprobs for e in reference])
    np.testing.assert_allclose(rows.logprobs, expected, atol=5e-5)
    # What the student's loss demands of a table: K ids and tail are all the mass there is.
    table = [torch.from_numpy(a) for a in (rows.topk_ids, rows.topk_logprobs, rows.tail_logprob)]
    assert topk_tail_divergence(log_p, *table).abs().max() < 1e-5
    engines(name).call("clear")


def test_equal_weights_give_a_divergence_of_zero(
    engines: Callable, reference: list[Expected], tiny_models: Path
):
    engines("hidden").call("score", ROLLOUTS)
    rows = engines("hidden").call("fetch", ask(ROLLOUTS))
    engines("hidden").call("clear")
    student = torch.cat([e.log_p for e in reference])  # transformers' forward of the same weights

    def kl(head_VH: torch.Tensor) -> torch.Tensor:
        hidden = unpark(rows.hidden)
        return reverse_kl(student, teacher_logits(hidden, head_VH, num_real_ids=NUM_REAL_IDS))

    head_VH = load_head(str(tiny_models / "teacher"), dtype="float32")
    assert kl(head_VH).abs().max() < 1e-5
    assert kl(head_VH.roll(1, 0)).min() > 0.5  # and only they


def test_a_rollout_scored_by_its_own_weights_gives_back_the_samplers_logprobs(
    start_engine: Callable, engines: Callable, tiny_models: Path
):
    sampler = start_engine(
        "rock_opd.engines.vllm_rollout:RolloutEngine",
        RolloutConfig(max_prompt_tokens=32, max_new_tokens=32),
        model=str(tiny_models / "student_padded"),
        dtype="float32",
        device="cpu",
        num_real_ids=1024,
        stop_token_ids=(2,),
    )
    prompts = [Prompt(prompt_id=f"p{i}", token_ids=np.arange(5, 9 + i)) for i in range(4)]
    asked = [SampleRequest(prompt=p, sample_idx=0, seed=i) for i, p in enumerate(prompts)]
    rollouts = sampler.call("generate", asked, temperature=1.0, top_p=1.0, max_new_tokens=32)
    scores = engines("sampled").call("score", rollouts)
    rows = engines("sampled").call("fetch", ask(rollouts))
    model = load(tiny_models / "student_padded")
    for sampled, score in zip(rollouts, scores, strict=True):
        wide = expect(model, sampled, num_real_ids=1088)
        padding = wide.log_p[:, 1024:].logsumexp(-1).exp().numpy()
        assert padding.max() > 0.01  # so that the two widths differ
        raw = sampled.logprobs[sampled.positions]  # the sampler's, over its full width
        np.testing.assert_allclose(score.logprobs, raw - np.log1p(-padding), atol=1e-4)
        np.testing.assert_allclose(score.entropy, expect(model, sampled, 1024).entropy, atol=5e-5)
    assert rows.kind == "sampled" and rows.hidden is None and rows.topk_ids is None
    np.testing.assert_array_equal(rows.logprobs, np.concatenate([s.logprobs for s in scores]))


@pytest.mark.parametrize("name", ["hidden", "prompt_logprobs"])
def test_scores_do_not_depend_on_order_or_company(name: str, engines: Callable):
    engine = engines(name)
    together = {s.key: s.logprobs for s in engine.call("score", ROLLOUTS)}
    for i in (4, 1, 1, 0):  # the second time a prefix cache would answer
        (alone,) = engine.call("score", [ROLLOUTS[i]])
        np.testing.assert_allclose(alone.logprobs, together[alone.key], atol=2e-5)
    backwards = engine.call("score", ROLLOUTS[::-1])
    for score in backwards:
        np.testing.assert_allclose(score.logprobs, together[score.key], atol=2e-5)
    engine.call("clear")


def test_rows_that_did_not_fit_are_made_again_the_same(
    engines: Callable, reference: list[Expected]
):
    engine = engines("topk_tail")
    engine.call("score", ROLLOUTS)
    # A row is 64 floats and a logprob, 260 bytes: the last two rollouts' 60 + 95 rows fit into
    # 42,000 bytes, the 59 of the one before do not.
    assert engine.call("_parked.num_bytes") == 155 * 260
    rows = engine.call("fetch", ask(ROLLOUTS))
    assert engine.call("num_reprefilled_tokens") == sum(LENGTHS[:4])
    best = torch.cat([e.log_p for e in reference]).topk(TOP_K)
    np.testing.assert_allclose(np.sort(rows.topk_logprobs)[:, ::-1], best.values, atol=5e-5)
    assert engine.call("_parked.num_bytes") == 0
    assert engine.call("clear") == sum(LENGTHS[:4])
    assert engine.call("clear") == 0


def test_a_prompt_only_the_teacher_reads_stands_in_for_the_students(
    engines: Callable, tiny_models: Path
):
    prefix = np.array([11, 12, 13, 14, 15, 16, 17, 18], np.int32)
    privileged = rollout(1, 30, teacher_prefix_ids=prefix)
    expected = expect(load(tiny_models / "teacher"), privileged)
    (score,) = engines("hidden").call("score", [privileged])
    rows = engines("hidden").call("fetch", ask([privileged]))
    np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=5e-5)
    np.testing.assert_allclose(rows.hidden, expected.hidden, atol=1e-5)
    (plain,) = engines("hidden").call("score", [rollout(1, 30)])
    assert np.abs(plain.logprobs - score.logprobs).max() > 0.1
    engines("hidden").call("clear")


def test_a_tools_turn_inside_a_response_is_read_but_not_scored(
    engines: Callable, tiny_models: Path
):
    mask = np.arange(30) >= PROMPT_LEN
    mask[12:20] = False
    spoken = rollout(1, 30, loss_mask=mask)
    expected = expect(load(tiny_models / "teacher"), spoken)
    assert len(expected.logprobs) == 17
    (score,) = engines("hidden").call("score", [spoken])
    np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=5e-5)
    engines("hidden").call("clear")


@pytest.mark.parametrize("name", list(ENGINES))
def test_nothing_sampled_and_nothing_asked_give_empty_rows(name: str, engines: Callable):
    engine = engines(name)
    silent = rollout(1, 30, loss_mask=np.zeros(30, bool))
    spoken, score = engine.call("score", [rollout(2, 30), silent])
    assert len(spoken.logprobs) == 25 and len(score.logprobs) == 0
    (score,) = engine.call("score", [silent])
    assert len(score.logprobs) == 0 and score.logprobs.dtype == np.float32
    rows = engine.call("fetch", ask([silent]))
    none = engine.call("fetch", ())
    for empty in (rows, none):
        assert empty.kind == ENGINES[name].get("payload", "hidden")
        assert empty.logprobs.shape == (0,)
        if empty.kind == "hidden":
            assert empty.hidden.shape == (0, 64)
        if empty.kind == "topk_tail":
            assert empty.topk_ids.shape == (0, TOP_K) and empty.tail_logprob.shape == (0,)
    assert engine.call("score", []) == []
    engine.call("clear")


def test_what_was_served_or_cleared_is_gone(engines: Callable):
    engine = engines("hidden")
    engine.call("score", ROLLOUTS[:2])
    engine.call("fetch", ask(ROLLOUTS[:1], slice(0, 3)))
    with pytest.raises(DataError, match=r"no rows of rollout 'p0#0'.*score it again"):
        engine.call("fetch", ask(ROLLOUTS[:1]))
    engine.call("clear")
    with pytest.raises(DataError, match="no rows of rollout 'p1#0'"):
        engine.call("fetch", ask(ROLLOUTS[1:2]))
    engine.call("score", ROLLOUTS[:1])
    with pytest.raises(DataError, match=r"rows 3 to 15 asked of rollout 'p0#0', which has 15"):
        engine.call("fetch", (RowRequest(key="p0#0", rows=np.array([3, 15])),))


def test_sequences_the_teacher_cannot_score_are_refused_by_name(engines: Callable):
    engine = engines("hidden")
    with pytest.raises(DataError, match=r"rollout p7#0: 301 tokens .* reads 300"):
        engine.call("score", [rollout(7, 301)])
    assert len(engine.call("score", [rollout(7, 300)])[0].logprobs) == 295
    engines("prompt_logprobs").call("score", [rollout(7, 300)])
    beyond = rollout(8, 20)
    beyond.token_ids[10] = NUM_REAL_IDS
    with pytest.raises(DataError, match="rollout p8#0: id 1000 lies beyond the 1000 ids"):
        engine.call("score", [beyond])
    headless = rollout(9, 20, teacher_prefix_ids=np.zeros(0, np.int32))
    with pytest.raises(DataError, match=r"rollout p9#0: .* no token precedes the response"):
        engine.call("score", [headless])
    engine.call("clear")


def test_a_bf16_teacher_scores_the_very_rows_it_hands_over_in_float32(
    engines: Callable, reference: list[Expected], tiny_models: Path
):
    scores = engines("bf16").call("score", ROLLOUTS)
    rows = engines("bf16").call("fetch", ask(ROLLOUTS))
    hidden, head_VH = unpark(rows.hidden), load_head(str(tiny_models / "teacher"), dtype="bfloat16")
    assert rows.hidden.dtype == np.uint16 and hidden.dtype == torch.bfloat16
    log_p = (hidden.double() @ head_VH.double().T)[:, :NUM_REAL_IDS].log_softmax(-1)
    targets = np.concatenate([r.token_ids[r.positions] for r in ROLLOUTS])
    expected = log_p.gather(1, torch.from_numpy(targets[:, None]).long())[:, 0]
    got = np.concatenate([s.logprobs for s in scores])
    np.testing.assert_allclose(got, expected, atol=1e-4)
    # A model run in bf16 differs (a router may pick other experts), but not by much on average.
    assert reverse_kl(torch.cat([e.log_p for e in reference]), log_p.float()).mean() < 0.02


def test_bf16_on_the_wire_costs_little_and_leaves_the_scores_exact(
    engines: Callable, reference: list[Expected], tiny_models: Path
):
    scores = engines("bf16 wire").call("score", ROLLOUTS)
    rows = engines("bf16 wire").call("fetch", ask(ROLLOUTS))
    exact = np.concatenate([e.hidden for e in reference])
    assert rows.hidden.dtype == np.uint16
    np.testing.assert_allclose(unpark(rows.hidden).float(), exact, rtol=2**-8, atol=1e-5)
    for score, expected in zip(scores, reference, strict=True):
        np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=5e-5)
    head_VH = load_head(str(tiny_models / "teacher"), dtype="float32")
    logits = teacher_logits(unpark(rows.hidden), head_VH, num_real_ids=NUM_REAL_IDS)
    kl = reverse_kl(torch.cat([e.log_p for e in reference]), logits)
    assert 1e-7 < kl.mean() < 1e-4 and kl.max() < 1e-3


def test_a_top_k_without_a_tail_is_refused(start_engine: Callable, tiny_models: Path):
    cfg = TeacherConfig(model=str(tiny_models / "teacher"), payload="topk_tail", top_k=1000)
    with pytest.raises(ConfigError, match=r"teacher.top_k=1000 leaves no tail of 1000 ids"):
        start_engine(
            "rock_opd.engines.vllm_teacher:TeacherEngine",
            cfg,
            dtype="float32",
            device="cpu",
            num_real_ids=NUM_REAL_IDS,
            max_model_len=MAX_MODEL_LEN,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_rows_on_a_gpu_are_those_of_transformers_before_and_after_a_sleep(
    dtype: str, start_engine: Callable, reference: list[Expected], tiny_models: Path
):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    engine = start_engine(
        "rock_opd.engines.vllm_teacher:TeacherEngine",
        TeacherConfig(
            model=str(tiny_models / "teacher"), gpu_memory_utilization=0.3, max_batched_tokens=64
        ),
        dtype=dtype,
        device="cuda",
        num_real_ids=NUM_REAL_IDS,
        max_model_len=MAX_MODEL_LEN,
        can_sleep=True,
    )
    exact = np.concatenate([e.hidden for e in reference])
    for _ in range(2):
        scores = engine.call("score", ROLLOUTS)
        engine.call("sleep")
        rows = engine.call("fetch", ask(ROLLOUTS))  # parked in host memory
        engine.call("wake")
        gap = np.abs(unpark(rows.hidden).float().numpy() - exact)
        assert gap.max() < 1e-3 if dtype == "float32" else np.median(gap) < 0.05
        assert all(np.isfinite(s.logprobs).all() for s in scores)


# --- without an engine --------------------------------------------------------------------------


def prefill(key: str) -> Prefill:
    return Prefill(key=key, token_ids=np.arange(4, dtype=np.int32), positions=np.array([2, 3]))


def rows(num: int, value: float = 0.0) -> Rows:
    return Rows(logprobs=np.full(num, value, np.float32))  # 4 bytes a row


def test_the_buffer_drops_the_rows_parked_longest_and_remembers_what_they_were():
    buffer = ParkBuffer(100)
    for i, num in enumerate((10, 10, 5)):  # 40 + 40 + 20 bytes
        buffer.put(prefill(f"k{i}"), rows(num))
    assert buffer.num_bytes == 100
    buffer.put(prefill("k3"), rows(1))
    assert buffer.num_bytes == 64 and len(buffer) == 4
    first, gone = buffer.take("k0")
    assert first.key == "k0" and gone is None
    assert buffer.take("k1")[1] is not None
    assert buffer.num_bytes == 24 and buffer.num_bytes_offered == 104


def test_the_buffer_replaces_a_key_and_never_holds_more_than_its_bytes():
    buffer = ParkBuffer(100)
    buffer.put(prefill("a"), rows(10, 1.0))
    buffer.put(prefill("a"), rows(5, 2.0))
    assert buffer.num_bytes == 20 and len(buffer) == 1
    buffer.put(prefill("b"), rows(26))  # 104 bytes on its own
    assert buffer.num_bytes == 0
    assert buffer.take("a")[1] is None and buffer.take("b")[1] is None
    buffer.put(prefill("c"), rows(5))
    buffer.clear()
    assert buffer.num_bytes == 0 and "c" not in buffer


def table(*positions: dict[int, float]) -> FlatTable:
    """As vLLM flattens it: position by position, the token itself first, then by rank."""
    ends = np.cumsum([len(p) for p in positions]).tolist()
    return FlatTable(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[i for p in positions for i in p],
        logprobs=[v for p in positions for v in p.values()],
    )


def test_prompt_logprobs_are_read_by_id_whatever_the_order_and_the_count():
    half, quarter, eighth = np.log([0.5, 0.25, 0.125])
    flat = table(
        {},  # nothing predicts token 0
        {7: eighth, 3: half, 5: quarter},  # k + 1: its own token stands outside the best two
        {5: quarter, 3: half},  # k: its own token is one of them
    )
    flat.token_ids.extend([9, 9, 4])  # a third position that lists its token twice
    flat.logprobs.extend([half, half, quarter])
    flat.start_indices.append(5)
    flat.end_indices.append(8)
    got = read_prompt_logprobs(flat, np.array([1, 7, 5, 9]), np.array([1, 2, 3]), k=2)
    np.testing.assert_allclose(got.logprobs, [eighth, quarter, half], rtol=1e-6)
    np.testing.assert_array_equal(got.topk_ids, [[3, 5], [3, 5], [9, 4]])
    np.testing.assert_allclose(np.exp(got.tail_logprob), 0.25, rtol=1e-6)
    alone = read_prompt_logprobs(flat, np.array([1, 7, 5, 9]), np.array([2]), k=0)
    assert alone.topk_ids is None
    np.testing.assert_allclose(alone.logprobs, [quarter], rtol=1e-6)


def test_an_empty_tail_stays_finite():
    got = read_prompt_logprobs(table({}, {3: 0.0}), np.array([1, 3]), np.array([1]), k=1)
    assert got.tail_logprob[0] == pytest.approx(math.log(1e-12), rel=1e-6)


def test_a_position_without_its_own_token_or_with_too_few_entries_is_refused():
    flat = table({}, {3: -1.0, 5: -2.0})
    with pytest.raises(DataError, match=r"position 1 .* its own token 4 and the 2 most likely"):
        read_prompt_logprobs(flat, np.array([1, 4]), np.array([1]), k=2)
    with pytest.raises(
        DataError, match=r"position 1 has log-probabilities of 2 ids, .* the 3 most"
    ):
        read_prompt_logprobs(flat, np.array([1, 3]), np.array([1]), k=3)
