"""The planted truth: what is unlearnable is so by construction, what is hard is learned, and the
product's own loop tells them apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rock_opd.errors import DataError
from rock_opd.planted import (
    ASSISTANT,
    CALC,
    NONE,
    USER,
    Language,
    Pair,
    Setting,
    divergence_floor,
    make_pair,
)
from rock_opd.planted_study import (
    Condition,
    Outcome,
    Size,
    matched_control,
    recovery_row,
    run_pair,
    run_study,
)
from rock_opd.planted_summary import mean_interval, summarize_intervention
from rock_opd.recipe_file import load_recipe

TINY = Setting(teacher_steps=3, student_steps=2)
"""A pair made in a second: for what needs no trained model."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> list[Pair]:
    """The easy setting, seeds 0 and 1."""
    folder = tmp_path_factory.mktemp("planted")
    return [make_pair(folder / str(seed), Setting(), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def outcomes(pairs) -> list[Outcome]:
    """The product's loop on them; the first long enough to learn the rare-hard types."""
    return [
        run_pair(pair, "run", f"run.num_steps={steps}")
        for pair, steps in zip(pairs, (120, 45), strict=True)
    ]


# --- the construction -----------------------------------------------------------------------------


def test_the_floor_is_what_two_secrets_give_by_hand():
    # p = (.9, .1) or (.1, .9): q = (.5, .5), KL = -log(2 sqrt(.9 x .1)) = log(1 / .6)
    assert divergence_floor(2, 0.1) == pytest.approx(math.log(1 / 0.6))
    assert divergence_floor(4, 0.75) == pytest.approx(0, abs=1e-15)  # nothing hangs on the secret


def test_no_student_that_cannot_see_the_secret_gets_below_the_floor():
    rng = np.random.default_rng(0)
    p_zV = np.full((4, 4), 0.05 / 3)
    np.fill_diagonal(p_zV, 0.95)

    def mean_kl(q_V: np.ndarray) -> float:
        return float((q_V * (np.log(q_V) - np.log(p_zV))).sum(1).mean())

    floor = divergence_floor(4, 0.05)
    assert mean_kl(np.full(4, 0.25)) == pytest.approx(floor, abs=1e-12)
    others = rng.dirichlet(np.ones(4), 1000)
    assert min(map(mean_kl, others)) > floor


def test_after_a_marker_the_secret_decides_and_its_mean_is_uniform():
    language = Language(Setting(), 0)
    ask, group = language.ask_ids[1], language.planted_ids[1]
    word = language.word_ids[0]

    def after(secret: int) -> np.ndarray:
        return language.next(
            np.array([word]), np.array([ask]), np.array([[0, secret]]), rule="true"
        )[0]

    for secret in range(4):
        assert after(secret)[group[secret]] == pytest.approx(0.95)
        assert after(secret)[group].sum() == pytest.approx(1)
    np.testing.assert_allclose(after(-1)[group], 0.25)


def test_the_rare_hard_types_follow_a_rule_of_what_a_student_sees_and_starts_with_wrong():
    language = Language(Setting(), 0)
    words = language.word_ids
    marker, unknown = np.full(len(words), CALC), np.full((len(words), 2), -1)
    true = language.next(words, marker, unknown, rule="true")
    old = language.next(words, marker, unknown, rule="old")
    np.testing.assert_allclose(true.max(1), 0.95)
    assert (true.argmax(1) != old.argmax(1)).all()
    assert np.isin(true.argmax(1), language.hard_ids).all()


def test_every_context_has_a_distribution_until_the_end():
    language = Language(Setting(), 3)
    ids, target = language.sequences(np.random.default_rng(0), 64, 40, secret=True, rule="true")
    mass = target.sum(-1)
    ended = (np.cumsum(ids[:, -40:] == 1, 1) - (ids[:, -40:] == 1)) > 0
    np.testing.assert_allclose(mass[~ended], 1, atol=1e-5)
    assert (mass[ended] == 0).all() and ended.any()


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("tiny") / "pair", TINY, seed=5)


def test_a_students_prompt_shows_no_secret_and_the_file_gives_none_away(tiny_pair):
    language, seen = tiny_pair.language, {}
    for name in ("prompts.jsonl", "heldout.jsonl"):
        for line in (tiny_pair.folder / name).read_text().splitlines():
            row = json.loads(line)
            ours, theirs = (row[k][0]["content"].split() for k in ("messages", "teacher_messages"))
            assert ours[:2] == ["none", "none"] and ours[2] == theirs[2]
            seen.setdefault((name, " ".join(ours)), []).append(tuple(theirs[:2]))
    # Each prompt as the student reads it stands once with every combination of secrets.
    assert all(len(v) == len(set(v)) == 16 for v in seen.values())
    train, heldout = ({p for f, p in seen if f == n} for n in ("prompts.jsonl", "heldout.jsonl"))
    assert len(train) == 32 and len(heldout) == 8 and not train & heldout
    assert len(language.tokens) == language.num_types == len(set(language.tokens))


def test_the_loader_gives_the_secret_to_the_teacher_alone(tiny_pair):
    from rock_opd.inputs import load_inputs

    inputs = load_inputs(load_recipe(tiny_pair.folder / "recipe.yaml"))
    language = tiny_pair.language
    for prompt in (*inputs.prompts.prompts, *inputs.heldout):
        word, *secrets = prompt.prompt_id.replace("-", ".").split(".")
        word_id = language.word_ids[int(word[1:])]
        assert prompt.token_ids.tolist() == [USER, NONE, NONE, word_id, ASSISTANT]
        assert prompt.teacher_prefix_ids.tolist() == language.prompt(
            [int(z) for z in secrets], word_id
        )
    assert inputs.num_real_ids == language.num_types


def test_check_accepts_the_pairs_recipe(tiny_pair):
    from rock_opd.preflight import check

    report = check(load_recipe(tiny_pair.folder / "recipe.yaml"), static=False)
    assert not report.failed, report.lines


def test_a_seed_gives_the_same_pair_and_the_same_run(tiny_pair, tmp_path):
    again = make_pair(tmp_path / "again", TINY, seed=5)
    for name in ("teacher/model.safetensors", "student/model.safetensors", "prompts.jsonl"):
        assert (again.folder / name).read_bytes() == (tiny_pair.folder / name).read_bytes()
    one, two = (run_pair(pair, "run", "run.num_steps=3") for pair in (tiny_pair, again))
    np.testing.assert_array_equal(one.kl_after, two.kl_after)
    np.testing.assert_array_equal(one.count, two.count)
    assert (one.kl_after != one.kl_before).any()


def test_a_folder_that_holds_another_pair_is_refused(tiny_pair):
    assert Pair.load(tiny_pair.folder, TINY, seed=5) is not None
    assert Pair.load(tiny_pair.folder / "nowhere", TINY, seed=5) is None
    with pytest.raises(DataError, match="another setting or seed"):
        Pair.load(tiny_pair.folder, TINY, seed=6)


# --- the easy setting, run ------------------------------------------------------------------------


def test_the_teacher_keeps_the_secret_so_the_trained_floor_is_the_planted_one(pairs):
    import torch
    from transformers import AutoModelForCausalLM

    language = pairs[0].language
    teacher = AutoModelForCausalLM.from_pretrained(pairs[0].folder / "teacher")
    # What a student wrote, a wrong planted type included; then the marker of group 0.
    text = [language.word_ids[0], language.ask_ids[0], language.planted_ids[0, 2]]
    text += [language.word_ids[3], language.ask_ids[0]]
    ids = [language.prompt([z, 1], int(language.word_ids[5])) + text for z in range(4)]
    with torch.no_grad():
        log_p_zV = torch.log_softmax(teacher(torch.tensor(ids)).logits[:, -1].double(), -1)
    floor = -float(log_p_zV.mean(0).logsumexp(0))
    assert floor == pytest.approx(divergence_floor(4, 0.05), rel=0.05)


def test_planted_types_stay_at_their_floor_and_rare_hard_types_are_learned(pairs, outcomes):
    row = recovery_row(pairs[0], outcomes[0])
    assert row["floor"] == pytest.approx(1.697, abs=1e-3)
    for when in ("before", "after", "own"):
        assert row["floor"] * 0.95 < row[f"planted_{when}"] < row["floor"] * 1.2
    assert row["hard_after"] < 0.5 * row["hard_before"]


def test_the_loop_finds_the_planted_types_and_no_rare_hard_one(pairs, outcomes):
    for pair, outcome in zip(pairs, outcomes, strict=True):
        row = recovery_row(pair, outcome)
        for when in ("first", "last"):
            assert row[f"precision_{when}"] >= 0.9 and row[f"recall_{when}"] >= 0.9, row
            assert row[f"hard_{when}"] == 0, row
        # Rare: each planted type occurs several times as often as the mean rare-hard one.
        assert row["hard_share"] < row["planted_share"] / 3


def test_random_controls_occur_as_often_as_the_planted_types_and_are_others(pairs, outcomes):
    for pair, outcome in zip(pairs, outcomes, strict=True):
        ids, residual = matched_control(pair, outcome.count)
        planted = pair.language.planted_ids.ravel()
        assert abs(residual) <= 0.05
        assert outcome.count[ids].sum() == pytest.approx(outcome.count[planted].sum(), rel=0.05)
        assert np.isin(ids, pair.language.ordinary_ids).all()


# --- the study ------------------------------------------------------------------------------------


def test_an_interval_over_three_seeds_by_hand():
    # mean 2, standard deviation 1, t(0.975, 2) = 4.3027: 2 +- 4.3027 / sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert math.isnan(mean_interval([1.0])[1])


def test_differences_are_paired_within_a_seed():
    def row(seed: int, arm: str, after: float) -> dict:
        groups = ("other", "planted", "rare_hard", "random")
        kl = {f"{g}_{t}": after for g in groups for t in ("before", "after", "own")}
        return {"seed": seed, "arm": arm, "normalizer": "kept", "frozen_share": 0.0, **kl}

    rows = [row(0, "nothing", 1.0), row(1, "nothing", 5.0)]
    rows += [
        row(s, arm, kl + 0.5)
        for arm in ("planted", "rare_hard", "random")
        for s, kl in ((1, 5.0), (0, 1.0))
    ]
    effects = summarize_intervention(rows)
    planted = next(e for e in effects if e["arm"] == "planted")
    # The seeds lie 4 apart, the differences not at all.
    assert (planted["difference"], planted["low"], planted["high"]) == (0.5, 0.5, 0.5)
    assert planted["kl_end"] == 3.5


def test_a_study_writes_its_tables_and_goes_on_where_it_stopped(tmp_path):
    size = Size(
        seeds=1,
        conditions={"tiny": Condition(about="untrained", setting=TINY)},
        scores=("rock",),
        recovery_steps=3,
        intervention_steps=2,
        normalizers=("kept",),
    )
    told, done = [], []

    def run():
        return run_study(
            tmp_path, size=size, say=told.append, track=lambda n, total: done.append((n, total))
        )

    report = run()
    assert done[-1] == (5, 5)
    assert {p.name for p in report.files} == {
        "recovery.csv",
        "recovery_summary.csv",
        "intervention.csv",
        "intervention_summary.csv",
        "planted.png",
    }
    arms = [row for row in report.facts["intervention"] if row["positions"] == "other"]
    assert [a["arm"] for a in arms[::2]] == ["nothing", "planted", "rare_hard", "random"]
    for path in Path(tmp_path / "pairs").rglob("model.safetensors"):
        path.unlink()  # a second run that ran anything would miss them
    assert run().to_json() == report.to_json()
