"""`rock-opd rocks` on files made by hand: lists, tables and words, and what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from study_files import Response, Watch, file_info, random_responses, write_file

from rock_opd.config import PolicyConfig, ProbeConfig
from rock_opd.core.families import family
from rock_opd.core.policies import make_policy
from rock_opd.errors import ConfigError, DataError, ModelError, NumericsError
from rock_opd.models import load_tokenizer
from rock_opd.occurrences import FileInfo, build_registry
from rock_opd.rocklist import read_ids, write_ids
from rock_opd.rocks import find_rocks
from rock_opd.tables import Report
from rock_opd.types import FreezeMask

PLAIN = {"drop_most_frequent": 0, "min_count": 1, "guard_special": False}


@pytest.fixture(scope="module")
def info(tiny_models: Path) -> FileInfo:
    return file_info(tiny_models / "student")


def run(
    occurrences: Path,
    output: Path,
    *,
    watch: Watch | None = None,
    probe: ProbeConfig | None = None,
    pre: Path | None = None,
    joint: Path | None = None,
    teacher: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    **policy: Any,
) -> Report:
    watch = watch or Watch()
    return find_rocks(
        occurrences,
        output,
        policy=PolicyConfig(**{**PLAIN, **policy}),
        probe=probe or ProbeConfig(encoder="ngram", tau_pre="0.5", tau_post="0.5", window=1),
        pre=pre,
        joint=joint,
        teacher=teacher,
        tokenizer=tokenizer,
        seed=seed,
        say=watch.say,
        track=watch.track,
    )


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_hand(path: Path, info: FileInfo) -> Path:
    """Type 40: 4 x .5; 41: 2 x 2.0; 42: 6 x .1; 43: once, 3.0; 44: once, not measured. R: 41 4.0,
    43 3.0, 40 2.0, 42 0.6; 9.6 nats in 14 positions."""
    return write_file(
        path,
        info,
        [
            Response(
                ids=[40, 41, 42, 42, 40, 43, 42],
                kl=[0.4, 1.0, 0.1, 0.1, 0.6, 3.0, 0.1],
                prompt_id="a",
            ),
            Response(
                ids=[41, 42, 42, 42, 40, 40, 44],
                kl=[3.0, 0.1, 0.1, 0.1, 0.5, 0.5, np.nan],
                measure=[1, 1, 1, 1, 1, 1, 0],
                prompt_id="b",
            ),
        ],
    )


def test_the_ranking_by_hand(tmp_path: Path, info: FileInfo):
    report = run(by_hand(tmp_path / "occ.parquet", info), tmp_path / "rocks.json", top_k=2)
    assert json.loads((tmp_path / "rocks.json").read_text()) == [41, 43]
    rows = table(tmp_path / "rocks.csv")
    assert [row["token_id"] for row in rows] == ["41", "43", "40", "42", "44"]
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", ""]
    assert [row["rock"] for row in rows] == ["true", "true", "false", "false", "false"]
    assert [float(row["r"]) for row in rows[:4]] == pytest.approx([4.0, 3.0, 2.0, 0.6])
    assert [float(row["mean_kl"]) for row in rows[:4]] == pytest.approx([2.0, 3.0, 0.5, 0.1])
    assert float(rows[0]["std"]) == pytest.approx(1.0)
    assert float(rows[2]["share"]) == pytest.approx(4 / 14)
    assert rows[4]["left_out"] == "score unknown"
    assert report.facts["kl_coverage"] == pytest.approx(7 / 9.6)
    assert report.facts["occurrence_share"] == pytest.approx(3 / 14)
    assert report.facts["num_types_seen"] == 5
    assert report.facts["left_out"] == {"score unknown": 1}
    # Response a: rocks are 2 of 7 tokens and 4.0 of 5.3 nats; b: 1 of 7 and 3.0 of 4.3.
    assert report.facts["rock_share_median"] == pytest.approx(1.5 / 7)
    assert report.facts["rock_loss_share_median"] == pytest.approx((4 / 5.3 + 3 / 4.3) / 2)
    assert report.table["token_id"].tolist() == [41, 43]


def test_the_meta_file_names_the_tokenizer_so_that_others_are_refused(
    tmp_path: Path, info: FileInfo
):
    run(by_hand(tmp_path / "occ.parquet", info), tmp_path / "rocks.json", top_k=2)
    ids, notice = read_ids(
        tmp_path / "rocks.json", num_types=info.num_types, tokenizer=info.tokenizer
    )
    assert ids.tolist() == [41, 43]
    assert notice is None
    with pytest.raises(DataError, match="made with tokenizer"):
        read_ids(tmp_path / "rocks.json", num_types=info.num_types, tokenizer="other")


def test_texts_and_families_are_those_of_the_files_own_student(
    tmp_path: Path, info: FileInfo, tiny_models: Path
):
    report = run(by_hand(tmp_path / "occ.parquet", info), tmp_path / "rocks.json", top_k=3)
    tokenizer = load_tokenizer(str(tiny_models / "student"))
    for row in table(tmp_path / "rocks.csv"):
        assert row["text"] == tokenizer.decode([int(row["token_id"])])
        assert row["family"] == family(row["text"])
    assert sum(found["rocks"] for found in report.facts["families"].values()) == 3
    shares = [found["occurrence_share"] for found in report.facts["families"].values()]
    assert sum(shares) == pytest.approx(report.facts["occurrence_share"])


def test_rocks_stand_beside_controls_of_like_frequency(tmp_path: Path, info: FileInfo):
    """Rocks 41 (2 times) and 43 (once): partners 40 (4 times) and 44 (once)."""
    report = run(by_hand(tmp_path / "occ.parquet", info), tmp_path / "rocks.json", top_k=2)
    pairs = {row["rock_id"]: row for row in table(tmp_path / "rock_vs_control.csv")}
    assert list(next(iter(pairs.values()))) == [
        "rock_id", "rock_token", "rock_freq", "rock_mean_kl", "rock_freq_mean",
        "ctrl_id", "ctrl_token", "ctrl_freq", "ctrl_mean_kl", "ctrl_freq_mean",
    ]  # fmt: skip
    assert (pairs["41"]["rock_freq"], pairs["41"]["ctrl_id"]) == ("2", "40")
    assert (pairs["43"]["ctrl_id"], pairs["43"]["ctrl_freq"]) == ("44", "1")
    control = json.loads((tmp_path / "control.json").read_text())
    assert not set(control) & {41, 43}
    residual = json.loads((tmp_path / "control.meta.json").read_text())["residual"]
    assert residual == report.facts["control"]["residual"]


def test_a_run_over_the_same_stream_freezes_the_same_types_and_the_same_control(
    tmp_path: Path, info: FileInfo
):
    responses = [
        replace(r, step=i // 4)
        for i, r in enumerate(random_responses(20, seed=1, high=range(320, 340)))
    ]
    occurrences = write_file(tmp_path / "occ.parquet", info, responses)
    settings = {"top_k": 15, "drop_most_frequent": 3, "min_count": 5}
    run(occurrences, tmp_path / "rocks.json", seed=7, decay=0.9, guard_special=False, **settings)
    registry = build_registry(occurrences, decay=0.9)
    assert registry.num_updates == 10
    masks: list[FreezeMask] = []
    for name in ("rock_freeze", "random_matched"):
        online = make_policy(name, seed=7, warmup_steps=10, **settings)
        mask = online.refresh(11, registry)
        assert mask is not None
        masks.append(mask)
    rocks = json.loads((tmp_path / "rocks.json").read_text())
    assert sorted(rocks) == masks[0].frozen_ids.tolist()
    assert json.loads((tmp_path / "control.json").read_text()) == masks[1].frozen_ids.tolist()


def test_another_stem_leaves_the_first_lists_controls_alone(tmp_path: Path, info: FileInfo):
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    run(occurrences, tmp_path / "rocks.json", top_k=2)
    before = (tmp_path / "control.json").read_bytes()
    report = run(occurrences, tmp_path / "mean.json", top_k=1, score="mean")
    assert json.loads((tmp_path / "mean.json").read_text()) == [43]
    assert (tmp_path / "control.json").read_bytes() == before
    assert {path.name for path in report.files} == {
        "mean.json", "mean.meta.json", "mean.csv", "mean.png",
        "mean_control.json", "mean_control.meta.json",
        "mean_rock_vs_control.csv", "mean_rock_vs_control.meta.json",
    }  # fmt: skip
    assert all(path.is_file() for path in report.files)


def test_a_second_call_replaces_every_file_and_leaves_no_stale_control(
    tmp_path: Path, info: FileInfo
):
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    run(occurrences, tmp_path / "rocks.json", top_k=2)
    assert (tmp_path / "control.json").is_file()
    only = write_file(
        tmp_path / "only.parquet", info, [Response(ids=[50, 50], kl=[1, 1], prompt_id="a")]
    )
    report = run(only, tmp_path / "rocks.json", top_k=2)
    assert json.loads((tmp_path / "rocks.json").read_text()) == [50]
    assert not (tmp_path / "control.json").exists()
    assert not (tmp_path / "control.meta.json").exists()
    assert table(tmp_path / "rock_vs_control.csv")[0]["ctrl_id"] == ""
    assert "no other type may serve" in "\n".join(report.lines)


def alike_and_scattered(path: Path, info: FileInfo, factor: float) -> Path:
    """Type 60 four times between 70 and 71; type 61 four times between ever other neighbours, with
    more loss; both are high at both checkpoints. Type 62 is high at the late one only."""
    responses = []
    for i in range(4):
        ids = [70, 60, 71, 100 + 2 * i, 61, 101 + 2 * i, 62]
        kl = [0.0, 0.8, 0.0, 0.0, 0.9, 0.0, 0.7 if factor == 1 else 0.0]
        responses.append(
            Response(ids=ids, kl=[x * factor for x in kl], prompt_id=f"p{i}", prompt_ids=[5 + i])
        )
    return write_file(path, info, responses)


def test_context_ranks_what_recurs_above_what_only_costs_more(tmp_path: Path, info: FileInfo):
    now = alike_and_scattered(tmp_path / "occ.parquet", info, 1.0)
    pre = alike_and_scattered(tmp_path / "pre.parquet", info, 1.2)
    report = run(now, tmp_path / "rocks.json", pre=pre, top_k=1, score="rock_ctx")
    rows = {row["token_id"]: row for row in table(tmp_path / "rocks.csv")}
    assert json.loads((tmp_path / "rocks.json").read_text()) == [60]
    assert float(rows["60"]["ccr"]) == 1.0
    assert float(rows["60"]["r_ctx"]) == pytest.approx(3.2)
    assert (float(rows["61"]["ccr"]), float(rows["61"]["persistent"])) == (0.0, 4.0)
    assert float(rows["62"]["persistent"]) == 0.0
    assert report.facts["num_persistent"] == 8
    assert (report.facts["tau_pre"], report.facts["tau_post"]) == (0.5, 0.5)
    by_loss = run(now, tmp_path / "plain.json", pre=pre, top_k=1)
    assert json.loads((tmp_path / "plain.json").read_text()) == [61]
    assert "ccr" in by_loss.table  # shown also where it does not rank


def test_contexts_are_read_through_the_teachers_embedding(tmp_path: Path, info: FileInfo):
    now = alike_and_scattered(tmp_path / "occ.parquet", info, 1.0)
    probe = ProbeConfig(tau_pre="0.5", tau_post="0.5", window=1, dim=256, gamma=0.9)
    run(now, tmp_path / "rocks.json", pre=now, top_k=1, score="rock_ctx", probe=probe)
    assert json.loads((tmp_path / "rocks.json").read_text()) == [60]
    with pytest.raises(ModelError, match=r"no such folder.*probe\.encoder=ngram"):
        run(now, tmp_path / "rocks.json", pre=now, probe=probe, teacher="/no/such/model")


def test_the_probe_loss_may_be_the_sampled_log_ratio(tmp_path: Path, info: FileInfo):
    response = Response(
        ids=[60, 60, 61, 61], kl=[0.0] * 4, logratio=[1.0, 1.0, 0.0, 1.0], prompt_id="a"
    )
    occurrences = write_file(tmp_path / "occ.parquet", info, [replace(response, kl=[0.1] * 4)])
    probe = ProbeConfig(
        loss="logratio", encoder="ngram", tau_pre="0.5", tau_post="0.5", gamma=-1.0, eta=1.0
    )
    run(occurrences, tmp_path / "rocks.json", pre=occurrences, probe=probe)
    ccr = {row["token_id"]: float(row["ccr"]) for row in table(tmp_path / "rocks.csv")}
    assert ccr == {"60": 1.0, "61": 0.0}  # a lone persistent occurrence has rho 0


def test_context_without_an_earlier_checkpoint_is_refused_with_what_to_do(
    tmp_path: Path, info: FileInfo
):
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    with pytest.raises(ConfigError, match=r"rock_ctx needs --pre.*--reuse"):
        run(occurrences, tmp_path / "rocks.json", score="rock_ctx")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_id": "x"}, "p1#0 stands where the other file has x#0"),
        ({"sample_idx": 3}, "p1#0 stands where the other file has p1#3"),
        ({"ids": [300] * 60}, "p1#0 has other token ids"),
    ],
)
def test_an_earlier_file_of_other_responses_is_refused_naming_the_first(
    tmp_path: Path, info: FileInfo, change: dict[str, Any], says: str
):
    ours = random_responses(3, seed=2, samples=1)
    theirs = list(ours)
    theirs[1] = replace(ours[1], **change)
    now = write_file(tmp_path / "occ.parquet", info, ours)
    pre = write_file(tmp_path / "pre.parquet", info, theirs)
    with pytest.raises(DataError, match=says):
        run(now, tmp_path / "rocks.json", pre=pre)


def test_an_earlier_file_that_sampled_other_positions_is_refused(tmp_path: Path, info: FileInfo):
    ours = Response(ids=[40, 41], kl=[1, 1], prompt_id="a", prompt_ids=[1, 2])
    theirs = replace(ours, ids=[41], kl=[1], prompt_ids=[1, 2, 40])
    now = write_file(tmp_path / "occ.parquet", info, [ours])
    pre = write_file(tmp_path / "pre.parquet", info, [theirs])
    with pytest.raises(DataError, match="a#0 has other sampled positions"):
        run(now, tmp_path / "rocks.json", pre=pre)


def test_an_earlier_file_with_fewer_or_more_responses_is_refused(tmp_path: Path, info: FileInfo):
    responses = random_responses(3, seed=2, samples=1)
    whole = write_file(tmp_path / "whole.parquet", info, responses)
    short = write_file(tmp_path / "short.parquet", info, responses[:2])
    with pytest.raises(DataError, match="p2#0 stands in the first file only"):
        run(whole, tmp_path / "rocks.json", pre=short)
    with pytest.raises(DataError, match="p2#0 stands in the second file only"):
        run(short, tmp_path / "rocks.json", pre=whole)


def test_two_students_rank_by_the_lesser_score(tmp_path: Path, info: FileInfo):
    """R here: 41 4.0, 43 3.0, 40 2.0; the other student has 43 at 5.0, 41 at 1.0 and no 40."""
    ours = by_hand(tmp_path / "occ.parquet", info)
    other = write_file(
        tmp_path / "other.parquet", info, [Response(ids=[43, 41], kl=[5.0, 1.0], prompt_id="a")]
    )
    run(ours, tmp_path / "rocks.json", joint=other)
    assert json.loads((tmp_path / "rocks.json").read_text()) == [43, 41]
    rows = table(tmp_path / "rocks.csv")
    assert [float(row["score"]) for row in rows[:2]] == pytest.approx([3.0, 1.0])
    assert next(row for row in rows if row["token_id"] == "40")["left_out"] == "score unknown"


def test_files_of_another_vocabulary_are_refused(tmp_path: Path, info: FileInfo):
    ours = by_hand(tmp_path / "occ.parquet", info)
    other = by_hand(tmp_path / "other.parquet", replace(info, tokenizer="0123456789abcdef"))
    for kind in ("pre", "joint"):
        with pytest.raises(DataError, match=r"other\.parquet: made with another tokenizer"):
            run(ours, tmp_path / "rocks.json", **{kind: other})
    with pytest.raises(DataError, match="were made with another tokenizer"):
        run(other, tmp_path / "rocks.json")


def test_a_student_that_is_gone_leaves_ids_without_text(
    tmp_path: Path, info: FileInfo, tiny_models: Path
):
    moved = tmp_path / "student"
    shutil.copytree(tiny_models / "student", moved)
    occurrences = by_hand(tmp_path / "occ.parquet", replace(info, student=str(moved)))
    shutil.rmtree(moved)
    watch = Watch()
    report = run(occurrences, tmp_path / "rocks.json", watch=watch, guard_special=True)
    assert "ids are written without text" in watch.lines[0]
    assert report.facts["families"] == {}
    assert table(tmp_path / "rocks.csv")[0]["text"] == ""
    assert table(tmp_path / "rock_vs_control.csv")[0]["rock_token"] == "<id=41>"
    named = run(occurrences, tmp_path / "rocks.json", tokenizer=str(tiny_models / "student"))
    assert named.facts["families"]
    with pytest.raises(ModelError):
        run(occurrences, tmp_path / "rocks.json", tokenizer=str(moved))


def test_special_tokens_and_guarded_types_are_no_rocks_and_no_controls(
    tmp_path: Path, info: FileInfo, tiny_models: Path
):
    eos = load_tokenizer(str(tiny_models / "student")).eos_token_id
    occurrences = write_file(
        tmp_path / "occ.parquet",
        info,
        [Response(ids=[41, 40, 42, eos], kl=[2.0, 1.0, 0.5, 9.0], prompt_id="a")],
    )
    write_ids(tmp_path / "guard.json", np.array([41]), tokenizer=info.tokenizer)
    guard = {"guard_special": True, "guard_file": str(tmp_path / "guard.json")}
    report = run(occurrences, tmp_path / "rocks.json", top_k=1, **guard)
    assert json.loads((tmp_path / "rocks.json").read_text()) == [40]
    assert json.loads((tmp_path / "control.json").read_text()) == [42]
    assert report.facts["left_out"] == {"guarded": 2}
    unguarded = run(occurrences, tmp_path / "rocks.json", top_k=2)
    assert unguarded.table["token_id"].tolist() == [eos, 41]
    (tmp_path / "guard.meta.json").unlink()
    watch = Watch()
    run(occurrences, tmp_path / "rocks.json", watch=watch, **guard)
    assert any("policy.guard_file" in line for line in watch.lines)


def test_fewer_types_than_asked_for_are_said_with_the_reasons(tmp_path: Path, info: FileInfo):
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    report = run(
        occurrences, tmp_path / "rocks.json", top_k=1000, min_count=2, drop_most_frequent=1
    )
    assert json.loads((tmp_path / "rocks.json").read_text()) == [41, 40]
    text = "\n".join(report.lines)
    assert "fewer than the 1000 asked for: 2 of 5 types seen qualify" in text
    assert "1 the most frequent (policy.drop_most_frequent=1)" in text
    assert "2 below policy.min_count=2" in text


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"min_count": 7}, "0 of 5 types seen qualify; left out: 5 below policy.min_count=7"),
        ({"threshold": 99.0}, r"4 below policy\.threshold=99"),
        ({"drop_most_frequent": 5}, "5 the most frequent"),
    ],
)
def test_an_empty_list_is_refused_saying_what_emptied_it(
    tmp_path: Path, info: FileInfo, policy: dict[str, Any], says: str
):
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    with pytest.raises(DataError, match=says):
        run(occurrences, tmp_path / "rocks.json", **policy)
    assert not (tmp_path / "rocks.json").exists()


def test_no_persistent_occurrence_at_all_names_the_thresholds(tmp_path: Path, info: FileInfo):
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    probe = ProbeConfig(encoder="ngram", tau_pre="50", tau_post="q0.5")
    report = run(occurrences, tmp_path / "rocks.json", pre=occurrences, probe=probe)
    assert "CCR is 0 for every type: no occurrence is high both" in "\n".join(report.lines)
    with pytest.raises(DataError, match=r"CCR is 0 everywhere: .*tau_pre 50.*lower probe\.tau_pre"):
        run(occurrences, tmp_path / "rocks.json", pre=occurrences, probe=probe, score="rock_ctx")


def test_one_occurrence_per_type_has_no_lower_bound_and_says_so(tmp_path: Path, info: FileInfo):
    occurrences = write_file(
        tmp_path / "occ.parquet",
        info,
        [Response(ids=[40, 41, 42], kl=[1.0, 2.0, 3.0], prompt_id="a")],
    )
    report = run(occurrences, tmp_path / "rocks.json", top_k=2)
    assert report.table["token_id"].tolist() == [42, 41]
    assert table(tmp_path / "rocks.csv")[0]["lcb"] == "nan"
    with pytest.raises(DataError, match=r"3 of unknown lcb \(too few measured"):
        run(occurrences, tmp_path / "rocks.json", score="lcb")


@pytest.mark.parametrize("score", ["rock", "rock_lcb", "mean", "lcb", "eb_mean", "eb_lcb"])
def test_every_score_ranks_by_its_own_column(tmp_path: Path, info: FileInfo, score: str):
    responses = random_responses(8, seed=3, high=range(310, 320))
    occurrences = write_file(tmp_path / "occ.parquet", info, responses)
    report = run(occurrences, tmp_path / "rocks.json", score=score, top_k=10, min_count=3)
    column = {"rock": "r", "mean": "mean_kl"}.get(score, score)
    rows = [row for row in table(tmp_path / "rocks.csv") if row["rank"]]
    values = [float(row[column]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert [int(row["token_id"]) for row in rows[:10]] == report.table["token_id"].tolist()


def test_losses_that_are_not_finite_and_files_cut_short_are_refused(tmp_path: Path, info: FileInfo):
    with pytest.raises(NumericsError, match=r"column kl, row 0 .*expected a finite KL"):
        write_file(tmp_path / "nan.parquet", info, [Response(ids=[40], kl=[np.nan], prompt_id="a")])
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    occurrences.write_bytes(occurrences.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"occ\.parquet"):
        run(occurrences, tmp_path / "rocks.json")
    (tmp_path / "empty.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.parquet"):
        run(tmp_path / "empty.parquet", tmp_path / "rocks.json")
    with pytest.raises(DataError, match=r"gone\.parquet"):
        run(tmp_path / "gone.parquet", tmp_path / "rocks.json")


def test_a_list_that_is_not_named_json_is_refused_before_anything_is_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"-o rocks\.json"):
        run(tmp_path / "gone.parquet", tmp_path / "rocks.csv")


def test_sampled_estimates_are_called_so(tmp_path: Path, info: FileInfo):
    occurrences = by_hand(tmp_path / "occ.parquet", replace(info, estimator="sampled"))
    report = run(occurrences, tmp_path / "rocks.json")
    assert any("sampled log-ratio" in line for line in report.lines)


def test_the_report_is_json_whatever_is_unknown_and_progress_ends_whole(
    tmp_path: Path, info: FileInfo
):
    watch = Watch()
    occurrences = by_hand(tmp_path / "occ.parquet", info)
    report = run(occurrences, tmp_path / "rocks.json", watch=watch, pre=occurrences)
    found = json.loads(report.to_json())
    assert found["k_found"] == 4
    assert [row["token_id"] for row in found["rows"]] == [41, 43, 40, 42]
    assert watch.pieces[0] == (0, 4)
    assert watch.pieces[-1] == (4, 4)


def test_planted_high_types_come_first(tmp_path: Path, info: FileInfo):
    high = range(310, 330)
    responses = random_responses(40, seed=4, high=high)
    occurrences = write_file(tmp_path / "occ.parquet", info, responses)
    report = run(
        occurrences, tmp_path / "rocks.json", score="rock_lcb", top_k=20, drop_most_frequent=10
    )
    found = set(report.table["token_id"].tolist())
    assert len(found & set(high)) >= 18
    assert abs(report.facts["control"]["residual"]) < 0.02
