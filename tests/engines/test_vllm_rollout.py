"""The rollout engine on real tiny models, against transformers: ids, log-probabilities, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from rock_opd.config import RolloutConfig
from rock_opd.engines.weight_sync import Bucket, Checksums, to_wire
from rock_opd.errors import ConfigError, DataError, ModelError, SyncError
from rock_opd.types import Prompt, Rollout, SampleRequest

NUM_REAL_IDS, EOS = 1024, 2
OTHER_STOP = 100
"""Ends responses of the untied model instead of its own EOS."""
MODELS = ("student_padded", "student_untied", "teacher")
"""Tied (and wider than the tokenizer), untied, mixture of experts."""
CLOSE = 1e-4
"""Nats."""
ENGINE = "rock_opd.engines.vllm_rollout:RolloutEngine"
CFG = RolloutConfig(max_prompt_tokens=168, max_new_tokens=32, max_num_seqs=8)
ARGUMENTS = {
    "dtype": "float32",
    "device": "cpu",
    "num_real_ids": NUM_REAL_IDS,
    "stop_token_ids": (EOS,),
}


def load(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engines(start_engine: Callable, tiny_models: Path) -> Callable:
    """Model name -> its engine, started when first asked for; a test that changes weights puts
    them back."""
    started: dict[str, object] = {}

    def get(name: str) -> object:
        if name not in started:
            stop = {"stop_token_ids": (OTHER_STOP,)} if name == "student_untied" else {}
            arguments = {"model": str(tiny_models / name), **ARGUMENTS, **stop}
            started[name] = start_engine(ENGINE, CFG, **arguments)
        return started[name]

    return get


def requests(num: int, *, num_tokens: int = 10) -> list[SampleRequest]:
    """Four prompts, sampled in turn; the fourth fills a whole block of the prefix cache."""
    lengths = [num_tokens, num_tokens + 3, num_tokens + 1, 160]
    prompts = [
        Prompt(
            prompt_id=f"p{i}",
            token_ids=np.random.default_rng(i).integers(3, 1000, n).astype(np.int32),
        )
        for i, n in enumerate(lengths)
    ]
    return [
        SampleRequest(prompt=prompts[i % 4], sample_idx=i // 4, seed=2**60 + i) for i in range(num)
    ]


def generate(
    engine: object,
    asked: list[SampleRequest],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = 24,
) -> list[Rollout]:
    return engine.call(
        "generate", asked, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens
    )


def logits(model: torch.nn.Module, rollout: Rollout) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(rollout.token_ids.astype(np.int64))[None]).logits[0]


def gap(model: torch.nn.Module, rollouts: list[Rollout]) -> float:
    """Largest difference to transformers' log-probabilities of the sampled tokens, in nats."""
    worst = 0.0
    for rollout in rollouts:
        log_q = logits(model, rollout).log_softmax(-1)
        at = rollout.positions
        expected = log_q[at - 1].gather(1, torch.from_numpy(rollout.token_ids[at, None]).long())
        worst = max(worst, float(np.abs(expected[:, 0].numpy() - rollout.logprobs[at]).max()))
    return worst


def same(first: list[Rollout], second: list[Rollout]) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.key == b.key
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=CLOSE)


def buckets(named: Iterable[tuple[str, torch.Tensor]], size: int = 4) -> list[Bucket]:
    named = [(name, tensor.detach()) for name, tensor in named]
    return [to_wire(named[i : i + size]) for i in range(0, len(named), size)]


def send(engine: object, parts: list[Bucket], version: int) -> dict[str, int]:
    """Everything but the end of an update; returns the trainer's checksums."""
    sums = Checksums()
    engine.call("begin_update", version)
    for bucket in parts:
        sums.update(bucket)
        engine.call("load_bucket", bucket)
    return sums.chosen()


def sync(engine: object, model: torch.nn.Module, version: int, size: int = 4) -> None:
    sums = send(engine, buckets(model.named_parameters(), size), version)
    assert engine.call("end_update", sums) == version


def moved(model: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """The model with every weight changed."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=noise)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_transformers_before_and_after_an_update_and_back(
    name: str, engines: Callable, tiny_models: Path
):
    engine, model = engines(name), load(tiny_models / name)
    sync(engine, model, 10)
    before = generate(engine, requests(8))
    assert gap(model, before) < CLOSE
    assert {r.policy_version for r in before} == {10}

    changed = moved(load(tiny_models / name))
    sync(engine, changed, 11, size=3)
    after = generate(engine, requests(8))
    assert gap(changed, after) < CLOSE
    assert gap(model, after) > 0.1  # the update is far larger than the bar
    assert {r.policy_version for r in after} == {11}

    sync(engine, model, 12, size=100)
    same(generate(engine, requests(8)), before)


def test_a_new_engine_samples_from_the_models_own_weights_as_version_0(
    start_engine: Callable, tiny_models: Path
):
    engine = start_engine(ENGINE, CFG, model=str(tiny_models / "student"), **ARGUMENTS)
    rollouts = generate(engine, requests(4))
    assert {r.policy_version for r in rollouts} == {0}
    assert gap(load(tiny_models / "student"), rollouts) < CLOSE


def test_rollouts_do_not_depend_on_how_requests_are_dealt(engines: Callable):
    engine, asked = engines("student_padded"), requests(8)
    together = {r.key: r for r in generate(engine, asked)}
    dealt = generate(engine, [asked[i] for i in (6, 1, 4)])
    dealt += generate(engine, [asked[i] for i in (7, 0, 5, 2, 3)])
    assert [r.key for r in dealt[:3]] == ["p2#1", "p1#0", "p0#1"]  # in the order asked
    same(dealt, [together[r.key] for r in dealt])
    assert len({tuple(r.token_ids) for r in dealt}) == 8  # each seed its own response


def test_a_response_ends_with_a_stop_token_only_when_one_was_sampled(engines: Callable):
    rollouts = generate(engines("student_padded"), requests(32), max_new_tokens=24)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        response = rollout.token_ids[rollout.prompt_len :]
        assert EOS not in response[:-1]
        if rollout.finish_reason == "stop":
            assert response[-1] == EOS
        else:
            assert len(response) == 24 and response[-1] != EOS


def test_only_the_stop_tokens_given_end_a_response_not_the_models_own(
    engines: Callable, tiny_models: Path
):
    engine, model = engines("student_untied"), load(tiny_models / "student_untied")
    assert model.generation_config.eos_token_id == EOS
    sync(engine, model, 20)
    rollouts = generate(engine, requests(32), max_new_tokens=32)
    responses = [r.token_ids[r.prompt_len :] for r in rollouts]
    assert any(EOS in response[:-1] for response in responses)
    assert all(OTHER_STOP not in response[:-1] for response in responses)


def test_the_record_has_masks_and_prompt_as_promised(engines: Callable):
    asked = requests(4)[2]
    prefix = np.array([7, 8, 9], np.int32)
    prompt = dataclasses.replace(asked.prompt, teacher_id="other", teacher_prefix_ids=prefix)
    asked = dataclasses.replace(asked, prompt=prompt)
    (rollout,) = generate(engines("student_padded"), [asked])
    assert rollout.prompt_len == 11
    np.testing.assert_array_equal(rollout.token_ids[:11], prompt.token_ids)
    np.testing.assert_array_equal(rollout.positions, np.arange(11, len(rollout.token_ids)))
    assert np.isnan(rollout.logprobs[:11]).all() and np.isfinite(rollout.logprobs[11:]).all()
    dtypes = (rollout.token_ids.dtype, rollout.loss_mask.dtype, rollout.logprobs.dtype)
    assert dtypes == (np.int32, bool, np.float32)
    assert rollout.teacher_id == "other"
    np.testing.assert_array_equal(rollout.teacher_prefix_ids, prefix)


def test_temperature_0_is_greedy_and_reports_logprobs_of_temperature_1(
    engines: Callable, tiny_models: Path
):
    engine, model = engines("student_untied"), load(tiny_models / "student_untied")
    sync(engine, model, 21)
    rollouts = generate(engine, requests(4), temperature=0.0)
    assert gap(model, rollouts) < CLOSE
    for rollout in rollouts:
        best = logits(model, rollout).argmax(-1).numpy()
        np.testing.assert_array_equal(
            rollout.token_ids[rollout.positions], best[rollout.positions - 1]
        )


def test_logprobs_are_of_temperature_1_and_untruncated_whatever_the_sampling(
    engines: Callable, tiny_models: Path
):
    engine, model = engines("student_untied"), load(tiny_models / "student_untied")
    sync(engine, model, 22)
    rollouts = generate(engine, requests(8), temperature=0.6, top_p=0.8)
    assert gap(model, rollouts) < CLOSE
    plain = np.concatenate([r.logprobs[r.positions] for r in generate(engine, requests(8))])
    sharp = np.concatenate([r.logprobs[r.positions] for r in rollouts])
    assert sharp.mean() > plain.mean() + 1  # the sampling did change


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabulary_is_never_sampled_though_it_is_most_likely(
    temperature: float, engines: Callable, tiny_models: Path
):
    engine, model = engines("student_padded"), load(tiny_models / "student_padded")
    with torch.no_grad():
        model.lm_head.weight[NUM_REAL_IDS:] *= 4  # the embedding's rows, too: no real id uses them
    sync(engine, model, 30)
    rollouts = generate(engine, requests(16), temperature=temperature)
    assert max(r.token_ids.max() for r in rollouts) < NUM_REAL_IDS

    probs = torch.cat([logits(model, r)[r.positions - 1].softmax(-1) for r in rollouts])
    padding = probs[:, NUM_REAL_IDS:].sum(-1)
    assert probs.shape[1] == NUM_REAL_IDS + 64
    assert padding.mean() > 0.5  # uncut, two tokens of three would have been padding
    assert gap(model, rollouts) < CLOSE  # the reported numbers are of the full width
    if temperature == 0:
        picked = np.concatenate([r.token_ids[r.positions] for r in rollouts])
        np.testing.assert_array_equal(picked, probs[:, :NUM_REAL_IDS].argmax(-1).numpy())
    sync(engine, load(tiny_models / "student_padded"), 31)


def test_a_prompt_that_leaves_no_room_is_refused_by_name_and_others_get_what_room_there_is(
    engines: Callable,
):
    long = Prompt(prompt_id="novel", token_ids=np.full(200, 5, np.int32))
    with pytest.raises(DataError, match=r"prompt novel: 200 tokens leave no room .* within 200"):
        generate(engines("student_padded"), [SampleRequest(prompt=long, sample_idx=0, seed=1)])
    fits = Prompt(prompt_id="story", token_ids=np.full(197, 5, np.int32))
    (rollout,) = generate(
        engines("student_padded"), [SampleRequest(prompt=fits, sample_idx=0, seed=1)]
    )
    assert len(rollout.token_ids) <= 200


def test_ids_beyond_the_vocabulary_in_a_prompt_are_refused(engines: Callable):
    prompt = Prompt(prompt_id="foreign", token_ids=np.array([5, 1024], np.int32))
    with pytest.raises(DataError, match="prompt foreign: ids 5 to 1024, but the student has 1024"):
        generate(engines("student_padded"), [SampleRequest(prompt=prompt, sample_idx=0, seed=1)])


def test_no_requests_give_no_rollouts(engines: Callable):
    assert generate(engines("student_padded"), []) == []


# --- half and wrong updates -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["student_padded", "teacher"])
def test_half_an_update_is_never_sampled_from_and_a_whole_one_heals_it(
    name: str, engines: Callable, tiny_models: Path
):
    engine, changed = engines(name), moved(load(tiny_models / name), seed=2)
    parts = buckets(changed.named_parameters(), size=3)
    sums = send(engine, parts[:3], 40)
    with pytest.raises(
        SyncError, match=r"policy weights v40 began to arrive but were never comple"
    ):
        generate(engine, requests(1))
    with pytest.raises(SyncError, match=r"v40: \d+ layers are incomplete, first model"):
        engine.call("end_update", sums)
    with pytest.raises(SyncError, match=r"v40: \d+ layers are incomplete.*send the whole version"):
        generate(engine, requests(1))
    with pytest.raises(SyncError, match="call begin_update first"):
        engine.call("load_bucket", parts[3])

    sync(engine, changed, 41)
    assert gap(changed, generate(engine, requests(4))) < CLOSE
    sync(engine, load(tiny_models / name), 42)


def test_an_update_begun_again_forgets_the_first_half(engines: Callable, tiny_models: Path):
    engine, changed = engines("student_padded"), moved(load(tiny_models / "student_padded"), seed=3)
    send(engine, buckets(load(tiny_models / "student_padded").named_parameters(), 1)[:3], 43)
    sync(engine, changed, 44, size=1)  # q_proj came twice: once of each version
    assert gap(changed, generate(engine, requests(4))) < CLOSE


def test_a_tensor_that_was_left_out_is_missed_though_its_fused_layer_got_others(
    engines: Callable, tiny_models: Path
):
    engine, model = engines("student_padded"), load(tiny_models / "student_padded")
    left_out = "model.layers.1.self_attn.k_proj.weight"
    named = [(n, p) for n, p in model.named_parameters() if n != left_out]
    sums = send(engine, buckets(named), 45)
    # 128 x 64 of q and 64 x 64 of v came, 64 x 64 of k did not
    with pytest.raises(SyncError, match=r"qkv_proj \(12288 of 16384 elements\)"):
        engine.call("end_update", sums)
    sync(engine, model, 46)


def test_wrong_checksums_are_refused_by_tensor_and_version(engines: Callable, tiny_models: Path):
    engine, model = engines("student_padded"), load(tiny_models / "student_padded")
    parts = buckets(model.named_parameters())

    sums = send(engine, parts, 47)
    sums["model.norm.weight"] ^= 1
    with pytest.raises(SyncError, match=r"v47: tensor model.norm.weight has checksum .* sent"):
        engine.call("end_update", sums)
    with pytest.raises(SyncError, match=r"v47: tensor model.norm.weight has checksum"):
        generate(engine, requests(1))

    sums = send(engine, parts, 48)
    sums["lm_head.weight"] = 1
    with pytest.raises(SyncError, match=r"v48: tensor lm_head.weight is missing as it arrived"):
        engine.call("end_update", sums)

    send(engine, parts, 49)
    with pytest.raises(SyncError, match="v49: without checksums nothing is proved"):
        engine.call("end_update", {})

    engine.call("begin_update", 50)
    with pytest.raises(SyncError, match="v50: the trainer ended before everything was sent"):
        engine.call("end_update", {"model.norm.weight": 1})
    sync(engine, model, 51)
    assert gap(model, generate(engine, requests(4))) < CLOSE


def test_a_tensor_the_model_has_no_place_for_is_refused(engines: Callable, tiny_models: Path):
    engine, model = engines("student_padded"), load(tiny_models / "student_padded")
    engine.call("begin_update", 52)
    with pytest.raises(SyncError, match=r"v52: vLLM refused .* model\.layers\.7\.surprise\.weight"):
        engine.call("load_bucket", to_wire([("model.layers.7.surprise.weight", torch.ones(3))]))
    engine.call("begin_update", 53)
    with pytest.raises(SyncError, match=r"v53: vLLM refused .* model\.norm\.weight"):
        engine.call("load_bucket", to_wire([("model.norm.weight", torch.ones(65))]))
    sync(engine, model, 54)


def test_what_the_running_model_holds_is_summed_up_too(engines: Callable, tiny_models: Path):
    engine, model = engines("student_padded"), load(tiny_models / "student_padded")
    sync(engine, model, 55)
    sums = Checksums()
    sums.update(to_wire(model.named_parameters()))
    (held,) = engine.call("_llm.collective_rpc", "held_checksums", args=(list(sums.chosen()),))
    assert {
        "model.embed_tokens.weight",  # the head, tied
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    } <= set(held)
    assert held == {name: sums.chosen()[name] for name in held}


def test_bf16_weights_are_cast_to_the_engines_float32_exactly(engines: Callable, tiny_models: Path):
    engine, model = engines("student_padded"), load(tiny_models / "student_padded")
    rounded = [(n, p.detach().bfloat16()) for n, p in model.named_parameters()]
    sums = send(engine, buckets(rounded), 56)
    assert engine.call("end_update", sums) == 56
    rollouts = generate(engine, requests(4))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    assert gap(model, rollouts) < CLOSE
    assert gap(load(tiny_models / "student_padded"), rollouts) > CLOSE
    sync(engine, load(tiny_models / "student_padded"), 57)


# --- recipes that cannot run ----------------------------------------------------------------------


def test_what_a_model_cannot_do_is_said_before_vllm_starts(
    start_engine: Callable, tiny_models: Path
):
    def start(name: str = "student", cfg: RolloutConfig = CFG, **changed: object) -> None:
        start_engine(ENGINE, cfg, model=str(tiny_models / name), **(ARGUMENTS | changed))

    with pytest.raises(ConfigError, match=r"reads at most 2048 tokens, the recipe needs 4512"):
        start(cfg=RolloutConfig(max_new_tokens=4000))
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel .* must be 1, got 2"):
        start(cfg=RolloutConfig(tensor_parallel=2))
    with pytest.raises(ModelError, match=r"1024 vocabulary rows for 2000 token ids"):
        start(num_real_ids=2000)
    with pytest.raises(ModelError, match=r"stop tokens \[1024\] are none of the 1024 ids"):
        start(stop_token_ids=(2, 1024))
    with pytest.raises(ModelError, match=r"nowhere: no such folder"):
        start("nowhere")
