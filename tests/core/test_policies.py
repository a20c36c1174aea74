"""When masks change, what they weigh, and that a resumed run draws the same."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from rock_opd.core.policies import POLICIES, TypePolicy, audit_rng, make_policy
from rock_opd.core.registry import Registry
from rock_opd.core.selection import select_types
from rock_opd.core.token_stats import TokenStats
from rock_opd.core.windows import rock_windows, spans
from rock_opd.dead_keys import READ_BY
from rock_opd.errors import ConfigError, DataError
from rock_opd.types import FreezeMask, StepSignals, TokenWeights

V = 400
RULE = {"seed": 3, "top_k": 12, "drop_most_frequent": 2, "min_count": 5, "warmup_steps": 2,
        "refresh_every": 3}  # fmt: skip


def signals_of(token_ids) -> StepSignals:
    num = len(token_ids)
    return StepSignals(
        token_ids=np.array(token_ids, np.int32),
        rollout_idx=np.zeros(num, np.int32),
        position=np.arange(num, dtype=np.int32),
        student_logprobs=np.zeros(num, np.float32),
        teacher_logprobs=np.zeros(num, np.float32),
        teacher_entropy=None,
    )


def mask_of(ids, *, lam: float = 0.0) -> FreezeMask:
    return FreezeMask(version=1, step=1, frozen_ids=np.array(ids, np.int32), lam=lam)


def step_rows(step: int, num: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Zipf ids; a type's loss drifts with the steps, so that rocks come and go."""
    rng = np.random.default_rng((11, step))
    p = 1 / np.arange(1, V + 1)
    ids = rng.choice(V, size=num, p=p / p.sum()).astype(np.int32)
    loss = (1 + np.sin(ids * 1.7 + step / 2)) * rng.gamma(2.0, 0.5, size=num)
    return ids, loss.astype(np.float32)


def run(policy, registry: Registry, steps, seed: int = 3):
    """The loop's order: refresh, weigh, measure, update. Yields (step, new mask, weights)."""
    for step in steps:
        new = policy.refresh(step, registry)
        ids, loss = step_rows(step)
        weights = policy.weights(signals_of(ids), policy.mask, rng=audit_rng(seed, step))
        registry.update(
            TokenStats.from_rows(
                ids, loss, weights.measure, np.zeros(len(ids)), num_types=registry.num_types
            )
        )
        yield step, new, weights


def rocks_of(registry: Registry) -> np.ndarray:
    """What RULE selects."""
    return select_types(
        registry.score(), registry.stats.count, top_k=12, drop_most_frequent=2, min_count=5
    )


OTHER = {
    "lam": 0.5, "score": "mean", "top_k": 3, "threshold": 100.0, "hysteresis": 0.5,
    "drop_most_frequent": 4, "control_may_use_dropped": True, "min_count": 30, "warmup_steps": 4,
    "refresh_every": 2, "audit_share": 0.5, "window_radius": 2, "window_threshold": "-1.0",
}  # fmt: skip
"""Another value of every key that a policy by type may read, beside what ``RULE`` says."""


@pytest.mark.parametrize("name", POLICIES)
def test_check_calls_dead_the_keys_that_change_nothing_and_no_others(name):
    # Windows are on, so that their threshold counts, and many types dropped, so that controls miss
    # them; the loss stands for the log-ratio.
    base = {"ids": np.array([1, 5, 7, 9], np.int32), "window_radius": 1, "drop_most_frequent": 40}

    def course(**changed) -> list[tuple[bytes, bytes]]:
        policy = make_policy(name, **{**RULE, **base, **changed})
        registry, found = Registry(V), []
        for step in range(1, 12):
            policy.refresh(step, registry)
            ids, loss = step_rows(step)
            signals = replace(signals_of(ids), student_logprobs=loss)
            weights = policy.weights(signals, policy.mask, rng=audit_rng(3, step))
            registry.update(TokenStats.from_rows(ids, loss, weights.measure, loss, num_types=V))
            found.append((weights.weight.tobytes(), weights.measure.tobytes()))
        return found

    unchanged = course()
    read = {key for key, value in OTHER.items() if course(**{key: value}) != unchanged}
    assert read == READ_BY[name] & set(OTHER)


# Weights


def test_frozen_types_weigh_lambda_and_all_others_one():
    signals = signals_of([5, 1, 5, 2])
    got = make_policy("all").weights(signals, mask_of([5, 9], lam=0.25), rng=audit_rng(0, 1))
    np.testing.assert_array_equal(got.weight, [0.25, 1, 0.25, 1])
    np.testing.assert_array_equal(got.measure, [1, 1, 1, 1])  # trained, hence measured
    assert got.weight.dtype == got.measure.dtype == np.float32


def test_without_frozen_types_every_position_trains_and_is_measured():
    got = make_policy("all").weights(signals_of([5, 1]), mask_of([]), rng=audit_rng(0, 1))
    np.testing.assert_array_equal(got.weight, [1, 1])
    np.testing.assert_array_equal(got.measure, [1, 1])


def test_audited_positions_stand_for_all_frozen_ones():
    """40,000 frozen positions at 2 %: about 800 audited, each standing for 50."""
    got = make_policy("all", audit_share=0.02).weights(
        signals_of([5] * 40_000 + [1] * 10), mask_of([5]), rng=audit_rng(0, 1)
    )
    assert (got.weight[:40_000] == 0).all()
    assert set(np.unique(got.measure[:40_000])) == {0.0, 50.0}
    assert got.measure[:40_000].sum() == pytest.approx(40_000, rel=0.15)
    np.testing.assert_array_equal(got.measure[40_000:], 1)


def test_an_audit_of_everything_measures_every_position_once():
    got = make_policy("all", audit_share=1.0).weights(
        signals_of([5, 5]), mask_of([5]), rng=audit_rng(0, 1)
    )
    np.testing.assert_array_equal(got.weight, [0, 0])
    np.testing.assert_array_equal(got.measure, [1, 1])


def test_a_step_frozen_whole_has_no_weight_and_only_audited_rows():
    got = make_policy("all", audit_share=0.5).weights(
        signals_of([5] * 100), mask_of([5]), rng=audit_rng(0, 1)
    )
    assert got.weight.sum() == 0
    assert 20 < got.projected.sum() < 80
    np.testing.assert_array_equal(got.projected, got.measure == 2.0)


def test_a_step_without_positions_has_no_weights():
    got = make_policy("all").weights(signals_of([]), mask_of([5]), rng=audit_rng(0, 1))
    assert got.weight.shape == got.measure.shape == (0,)


def test_audit_is_a_function_of_seed_and_step():
    policy = make_policy("all", audit_share=0.5)

    def audit(seed: int, step: int) -> list[float]:
        weights = policy.weights(signals_of([5] * 64), mask_of([5]), rng=audit_rng(seed, step))
        return weights.measure.tolist()

    assert audit(1, 2) == audit(1, 2)
    assert audit(1, 2) != audit(1, 3)
    assert audit(1, 2) != audit(2, 2)


def test_audited_means_of_frozen_types_are_unbiased_through_the_policy():
    """300 seeded steps over the same 3,000 positions, a third of them frozen."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3, size=3000).astype(np.int32)
    loss = rng.gamma(2.0, 0.5, size=3000).astype(np.float32)
    truth = loss[ids == 1].mean(dtype=np.float64)
    policy, estimates = make_policy("all", audit_share=0.05), []
    for step in range(300):
        weights = policy.weights(signals_of(ids), mask_of([1]), rng=audit_rng(9, step))
        registry = Registry(3)
        stats = TokenStats.from_rows(ids, loss, weights.measure, np.zeros(3000), num_types=3)
        registry.update(stats)
        np.testing.assert_array_equal(stats.count, np.bincount(ids))
        estimates.append(registry.mean_loss()[1])
    assert abs(np.mean(estimates) - truth) < 4 * np.std(estimates) / np.sqrt(300)
    assert np.std(estimates) < 0.2 * truth


# Windows


def windowed_signals(num: int = 4000, *, seed: int = 0) -> StepSignals:
    """Ten rollouts; ids below 20; log-ratios from a normal distribution."""
    rng = np.random.default_rng(seed)
    return StepSignals(
        token_ids=rng.integers(0, 20, num).astype(np.int32),
        rollout_idx=np.repeat(np.arange(10, dtype=np.int32), num // 10),
        position=np.tile(np.arange(num // 10, dtype=np.int32), 10),
        student_logprobs=rng.normal(size=num).astype(np.float32),
        teacher_logprobs=np.zeros(num, np.float32),
        teacher_entropy=None,
    )


def windows_of(signals: StepSignals, rocks: list[int], radius: int) -> np.ndarray:
    logratio = signals.student_logprobs - signals.teacher_logprobs
    return rock_windows(
        signals,
        np.isin(signals.token_ids, rocks),
        logratio,
        radius=radius,
        threshold=np.quantile(logratio.astype(np.float64), 0.8),
    )


def test_whole_rock_windows_weigh_lambda_but_guarded_types_in_them_keep_weight_1():
    signals, guarded = windowed_signals(), [3, 4]
    policy = make_policy("rock_freeze", window_radius=2, never=np.array(guarded))
    got = policy.weights(signals, mask_of([5, 9], lam=0.25), rng=audit_rng(0, 1))
    windows = windows_of(signals, [5, 9], 2)
    frozen = windows & ~np.isin(signals.token_ids, guarded)
    assert (windows & ~frozen).sum() > 5
    np.testing.assert_array_equal(got.weight, np.where(frozen, np.float32(0.25), np.float32(1)))
    assert got.metrics == {
        "freeze/window_share": frozen.mean(),
        "freeze/window_reference_share": frozen.mean(),
        "freeze/window_residual": 0.0,
    }


def test_the_controls_windows_are_as_many_and_as_long_and_touch_no_rock_window():
    signals, guarded = windowed_signals(), [3]
    policy = make_policy("random_matched", window_radius=2, never=np.array(guarded))
    mask = replace(mask_of([1, 2, 7]), reference_ids=np.array([5, 9], np.int32))
    got = policy.weights(signals, mask, rng=audit_rng(0, 1))
    windows = windows_of(signals, [5, 9], 2)
    reference = windows & ~np.isin(signals.token_ids, guarded)
    frozen = got.weight == 0
    assert not (frozen & (windows | np.isin(signals.token_ids, guarded))).any()
    assert frozen.sum() == reference.sum()
    # Spans may lie side by side, so that they are counted by the anchors they need.
    start, length = spans(frozen, signals)
    assert all(np.isin(signals.token_ids[i : i + n], mask.frozen_ids).any()
               for i, n in zip(start, length, strict=True))  # fmt: skip
    assert got.metrics["freeze/window_share"] == got.metrics["freeze/window_reference_share"]
    assert got.metrics["freeze/window_residual"] == 0


def test_what_the_control_cannot_match_is_a_metric():
    signals = windowed_signals()
    mask = replace(mask_of([1]), reference_ids=np.array([5, 9, 11], np.int32))
    policy = make_policy("random_matched", window_radius=2)
    metrics = policy.weights(signals, mask, rng=audit_rng(0, 1)).metrics
    matched = metrics["freeze/window_share"] / metrics["freeze/window_reference_share"]
    assert metrics["freeze/window_residual"] == pytest.approx(1 - matched)
    assert 0.3 < metrics["freeze/window_residual"] < 0.9


def test_windows_do_not_change_who_is_audited():
    """The audit is drawn first: positions frozen in both arms are measured in both or in none."""
    signals, mask = windowed_signals(), mask_of([5, 9])
    alone, whole = (
        make_policy("rock_freeze", window_radius=radius, audit_share=0.5).weights(
            signals, mask, rng=audit_rng(0, 1)
        )
        for radius in (0, 3)
    )
    frozen = alone.weight == 0
    assert (whole.weight[frozen] == 0).all()
    np.testing.assert_array_equal(alone.measure[frozen], whole.measure[frozen])


def test_frozen_windows_are_a_function_of_the_seed_and_the_step():
    signals = windowed_signals()
    mask = replace(mask_of([1, 2, 7]), reference_ids=np.array([5, 9], np.int32))
    policy = make_policy("random_matched", window_radius=2)
    draws = [
        policy.weights(signals, mask, rng=audit_rng(*key)).weight.tolist()
        for key in ((0, 1), (0, 1), (0, 2))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_without_log_ratios_a_window_is_the_rock_alone():
    """Given responses: every log-ratio is NaN, and NaN is below every threshold."""
    unknown = np.full(4000, np.nan, np.float32)
    signals = replace(windowed_signals(), student_logprobs=unknown)
    for threshold in ("q0.8", "-5"):
        policy = make_policy("rock_freeze", window_radius=3, window_threshold=threshold)
        got = policy.weights(signals, mask_of([5, 9]), rng=audit_rng(0, 1))
        np.testing.assert_array_equal(got.weight == 0, np.isin(signals.token_ids, [5, 9]))


def test_before_anything_is_frozen_windows_are_empty_and_without_a_radius_unspoken_of():
    for name in ("all", "rock_freeze", "random_matched"):
        policy = make_policy(name, window_radius=2)
        got = policy.weights(windowed_signals(), mask_of([]), rng=audit_rng(0, 1))
        assert (got.weight == 1).all()
        assert set(got.metrics.values()) == {0.0}
    off = make_policy("rock_freeze").weights(windowed_signals(), mask_of([5]), rng=audit_rng(0, 1))
    assert off.metrics == {}


# When masks change


def test_all_never_freezes():
    policy, registry = make_policy("all", **RULE), Registry(V)
    for _, new, weights in run(policy, registry, range(1, 10)):
        assert new is None
        assert (weights.weight == 1).all()
    assert policy.mask.version == 0
    assert len(policy.mask.frozen_ids) == 0


def test_a_list_is_frozen_from_step_1_on_under_version_1():
    policy, registry = make_policy("list", ids=[9, 2, 9], **RULE), Registry(V)
    masks = [new for _, new, _ in run(policy, registry, range(1, 8))]
    assert masks[1:] == [None] * 6
    assert (masks[0].version, masks[0].step) == (1, 1)
    np.testing.assert_array_equal(masks[0].frozen_ids, [2, 9])
    assert masks[0].frozen_ids.dtype == np.int32
    assert policy.mask is masks[0]


def test_a_list_that_names_unknown_types_is_refused():
    with pytest.raises(DataError, match="2 to 400 reach beyond the 400 types"):
        make_policy("list", ids=[2, V]).refresh(1, Registry(V))
    with pytest.raises(ConfigError, match="token ids to freeze"):
        make_policy("list")


def test_rocks_are_frozen_after_the_warm_up_and_chosen_anew_at_every_refresh():
    """Warm-up 2, refresh 3: due at steps 3, 6, 9, ...; each time what the registry then says."""
    policy, registry = make_policy("rock_freeze", **RULE), Registry(V)
    version, seen = 0, []
    for step in range(1, 25):
        expected = rocks_of(registry)
        [(_, new, _)] = run(policy, registry, [step])
        if new is not None:
            assert step >= 3
            assert (step - 3) % 3 == 0
            version += 1
            assert (new.version, new.step) == (version, step)
            np.testing.assert_array_equal(new.frozen_ids, np.sort(expected))
            seen.append(set(new.frozen_ids.tolist()))
    assert version >= 3
    assert any(before - after for before, after in pairwise(seen))  # some thawed


def test_no_new_version_while_the_same_types_are_rocks():
    policy, registry = make_policy("rock_freeze", **(RULE | {"refresh_every": 1})), Registry(V)
    ids, loss = step_rows(0)
    same = TokenStats.from_rows(ids, loss, np.ones(len(ids)), np.zeros(len(ids)), num_types=V)
    masks = []
    for step in range(1, 10):
        masks.append(policy.refresh(step, registry))
        registry.update(same)
    assert [m is not None for m in masks] == [False, False, True] + [False] * 6
    assert policy.mask.version == 1


def test_a_mask_cannot_be_built_from_its_own_step():
    policy, registry = make_policy("rock_freeze", **RULE), Registry(V)
    list(run(policy, registry, [1, 2, 3]))
    with pytest.raises(ValueError, match="must come from earlier steps"):
        policy.refresh(3, registry)


def test_types_on_the_guard_list_are_neither_rocks_nor_controls():
    for name in ("rock_freeze", "random_matched"):
        policy, registry = make_policy(name, **RULE), Registry(V)
        list(run(policy, registry, range(1, 4)))
        guarded = policy.mask.frozen_ids[:4]
        policy, registry = make_policy(name, never=guarded, **RULE), Registry(V)
        list(run(policy, registry, range(1, 4)))
        assert policy.mask.version == 1
        assert not set(policy.mask.frozen_ids) & set(guarded)


def test_a_list_never_freezes_guarded_types():
    policy = make_policy("list", ids=[9, 2, 4], never=np.array([2, 7]), **RULE)
    np.testing.assert_array_equal(policy.refresh(1, Registry(V)).frozen_ids, [4, 9])
    with pytest.raises(DataError, match="every one of its 2 ids is guarded"):
        make_policy("list", ids=[2, 7], never=np.array([2, 7])).refresh(1, Registry(V))


@pytest.mark.parametrize("name", ["all", "list", "rock_freeze", "random_matched"])
def test_a_policy_says_when_it_will_choose_anew(name: str):
    """Warm-up 2, refresh 3: steps 3, 6, 9. A list is chosen once, nothing is never chosen."""
    policy, registry = make_policy(name, ids=[1], **RULE), Registry(V)
    due = []
    for step in range(1, 11):
        if policy.is_due(step):
            due.append(step)
        list(run(policy, registry, [step]))
    assert due == {"all": [], "list": [1]}.get(name, [3, 6, 9])


def registry_of(counts: list[int], mean_losses: list[float]) -> Registry:
    """One type per entry, seen that often at that loss, in one update."""
    registry = Registry(len(counts))
    ids = np.repeat(np.arange(len(counts)), counts)
    loss = np.repeat(mean_losses, counts)
    ones, zeros = np.ones(len(ids)), np.zeros(len(ids))
    registry.update(TokenStats.from_rows(ids, loss, ones, zeros, num_types=len(counts)))
    return registry


FREE = {"drop_most_frequent": 0, "min_count": 1, "warmup_steps": 1, "refresh_every": 1}


def test_types_are_ranked_by_the_score_asked_for_and_its_threshold():
    """Type 0: 10 x 1 nat, type 1: 2 x 3 nats, type 2: 1 x 2 nats."""
    registry = registry_of([10, 2, 1], [1, 3, 2])
    registry.set_context(np.array([0.1, 0.5, 1.0]))

    def frozen(score: str, **rule) -> list[int]:
        policy = make_policy("rock_freeze", score=score, **FREE, **rule)
        return policy.refresh(2, registry).frozen_ids.tolist()

    assert frozen("rock", top_k=1) == [0]
    assert frozen("mean", top_k=1) == [1]
    assert frozen("rock_ctx", top_k=2) == [1, 2]  # 1, 3, 2
    assert frozen("mean", threshold=2.0) == [1, 2]


def test_context_scores_without_a_probe_set_stop_the_run():
    policy = make_policy("rock_freeze", score="rock_ctx", **FREE)
    with pytest.raises(ValueError, match="CCR"):
        policy.refresh(2, registry_of([10, 2], [1, 3]))


@pytest.mark.parametrize("name", ["rock_freeze", "random_matched"])
def test_with_hysteresis_a_rock_stays_until_another_beats_it_by_that_share(name: str):
    """Type 0 is the rock at 10; type 1 then comes to 11 and to 13. 10 / (1 - 0.2) = 12.5."""
    after = {}
    for hysteresis in (0.0, 0.2):
        policy = make_policy(name, top_k=1, hysteresis=hysteresis, **FREE)
        rocks = []
        for step, other in ((2, 9), (3, 11), (4, 13)):
            registry = registry_of([10, other, 5], [1, 1, 0.1])
            policy.refresh(step, registry)
            mask = policy.mask
            rocks += (mask.reference_ids if name == "random_matched" else mask.frozen_ids).tolist()
        after[hysteresis] = rocks
    assert after == {0.0: [0, 1, 1], 0.2: [0, 0, 1]}


def test_lambda_travels_with_the_mask():
    policy, registry = make_policy("rock_freeze", lam=0.5, **RULE), Registry(V)
    weights = [w for _, _, w in run(policy, registry, range(1, 4))]
    assert policy.mask.lam == 0.5
    assert set(np.unique(weights[-1].weight)) == {0.5, 1.0}


# The control arm


def test_the_control_freezes_as_many_occurrences_as_the_rocks_it_lets_train():
    policy, registry = make_policy("random_matched", **RULE), Registry(V)
    masks = [new for _, new, _ in run(policy, registry, range(1, 3))]
    assert masks == [None, None]
    rocks = rocks_of(registry)
    mask = policy.refresh(3, registry)
    count = registry.stats.count
    np.testing.assert_array_equal(mask.reference_ids, np.sort(rocks))
    assert not set(mask.frozen_ids) & set(rocks)
    assert not set(mask.frozen_ids) & set(registry.most_frequent(2))
    budget = count[rocks].sum()
    assert mask.residual == pytest.approx(1 - count[mask.frozen_ids].sum() / budget)
    assert abs(mask.residual) < 0.01


def test_the_most_frequent_types_serve_as_controls_only_when_told_so():
    chosen = []
    for may in (False, True):
        registry = Registry(V)
        list(run(make_policy("all", **RULE), registry, [1, 2]))
        top = set(registry.most_frequent(2).tolist())
        for seed in range(20):
            rule = RULE | {"seed": seed, "control_may_use_dropped": may}
            mask = make_policy("random_matched", **rule).refresh(3, registry)
            chosen.append(bool(top & set(mask.frozen_ids.tolist())))
    assert not any(chosen[:20])
    assert any(chosen[20:])


def test_the_control_changes_only_when_the_rocks_do():
    policy, registry = make_policy("random_matched", **(RULE | {"refresh_every": 1})), Registry(V)
    references = []
    for _, new, _ in run(policy, registry, range(1, 20)):
        if new is not None:
            references.append(new.reference_ids.tolist())
    assert len(references) >= 2
    assert all(a != b for a, b in pairwise(references))


def test_another_seed_gives_another_control_of_the_same_rocks():
    masks = []
    for seed in (1, 2):
        registry = Registry(V)
        list(run(make_policy("all", **RULE), registry, [1, 2]))
        policy = make_policy("random_matched", **(RULE | {"seed": seed}))
        masks.append(policy.refresh(3, registry))
    np.testing.assert_array_equal(masks[0].reference_ids, masks[1].reference_ids)
    assert set(masks[0].frozen_ids) != set(masks[1].frozen_ids)


# Resume


@pytest.mark.parametrize("name", ["all", "list", "rock_freeze", "random_matched"])
def test_a_resumed_run_equals_the_uninterrupted_one(name: str):
    rule = RULE | ({"ids": [1, 5]} if name == "list" else {})

    def record(new: FreezeMask | None, weights: TokenWeights):
        mask = None if new is None else (new.version, new.step, new.frozen_ids.tolist())
        return mask, weights.weight.tolist(), weights.measure.tolist()

    whole_policy, whole_registry = make_policy(name, **rule), Registry(V)
    whole = [record(n, w) for _, n, w in run(whole_policy, whole_registry, range(1, 13))]

    policy, registry = make_policy(name, **rule), Registry(V)
    first = [record(n, w) for _, n, w in run(policy, registry, range(1, 8))]
    policy_state, registry_state = policy.state_dict(), registry.state_dict()
    policy, registry = make_policy(name, **rule), Registry(V)
    policy.load_state_dict(policy_state)
    registry.load_state_dict(registry_state)
    second = [record(n, w) for _, n, w in run(policy, registry, range(8, 13))]
    assert first + second == whole
    for field in fields(FreezeMask):
        np.testing.assert_array_equal(
            getattr(policy.mask, field.name), getattr(whole_policy.mask, field.name)
        )


def test_a_state_that_is_no_mask_is_refused():
    with pytest.raises(DataError, match="policy state"):
        make_policy("all").load_state_dict({"version": 1})


# The table


def test_every_policy_takes_the_same_arguments():
    """An arm of an experiment differs from another by its name alone."""
    everything = RULE | {"ids": [1], "never": [0], "lam": 0.5, "audit_share": 0.1,
                         "control_may_use_dropped": True, "score": "lcb", "threshold": 0.5,
                         "hysteresis": 0.1, "window_radius": 3,
                         "window_threshold": "0.5"}  # fmt: skip
    assert set(everything) == {field.name for field in fields(TypePolicy)}
    for name in POLICIES:
        assert make_policy(name, **everything).mask.lam == 0.5


def test_unknown_names_and_arguments_are_refused():
    with pytest.raises(ConfigError, match="'rocks' is not one of all, list"):
        make_policy("rocks")
    with pytest.raises(TypeError, match="topk"):
        make_policy("all", topk=5)
