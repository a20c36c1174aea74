"""`rock-opd cutoff` on files made by hand."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from study_files import Response, Watch, file_info, random_responses, write_file

from rock_opd.config import PolicyConfig
from rock_opd.cutoff import NUM_REPEATS, find_cutoff
from rock_opd.errors import ConfigError, DataError
from rock_opd.occurrences import FileInfo
from rock_opd.tables import Report


@pytest.fixture(scope="module")
def info(tiny_models: Path) -> FileInfo:
    return file_info(tiny_models / "student")


def run(
    occurrences: Path, output: Path, *, watch: Watch | None = None, seed: int = 0, **policy: Any
) -> Report:
    watch = watch or Watch()
    settings = {"drop_most_frequent": 0, "min_count": 1, "guard_special": False, **policy}
    return find_cutoff(
        occurrences,
        output,
        policy=PolicyConfig(**settings),
        seed=seed,
        say=watch.say,
        track=watch.track,
    )


def rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def even(path: Path, info: FileInfo) -> Path:
    """Eight prompts, one text: types 40 to 49 lose 10, 9, ..., 1; the top 4 lose 34 of 55."""
    ids, kl = list(range(40, 50)), list(range(10, 0, -1))
    return write_file(path, info, [Response(ids=ids, kl=kl, prompt_id=f"p{i}") for i in range(8)])


def test_prompts_that_agree_need_no_more_than_the_coverage(tmp_path: Path, info: FileInfo):
    watch = Watch()
    report = run(even(tmp_path / "occ.parquet", info), tmp_path / "cutoff.csv", watch=watch)
    assert (report.facts["k_recommended"], report.facts["k_enough"]) == (4, 4)
    assert report.facts["kl_coverage_at_k_recommended"] == pytest.approx(34 / 55)
    assert report.facts["jaccard_at_half_at_k_recommended"] == 1
    assert report.facts["sizes"] == [1, 2, 4, 6]
    assert watch.pieces[-1] == (1 + 4 * NUM_REPEATS, 1 + 4 * NUM_REPEATS)
    found = rows(tmp_path / "cutoff.csv")
    assert all(row["jaccard"] == row["jaccard_low"] == row["jaccard_high"] == 1 for row in found)
    assert {row["num_prompts"] for row in found} == {1, 2, 4, 6}
    whole = [row for row in found if row["k"] == 10]
    assert [row["coverage"] for row in whole] == pytest.approx([1.0] * 4)
    assert [row["spearman"] for row in whole] == pytest.approx([1.0] * 4)
    assert (tmp_path / "cutoff.png").stat().st_size > 10_000
    assert [path.name for path in report.files] == ["cutoff.csv", "cutoff.png"]


def test_stability_grows_with_the_sample_and_the_seed_decides_it(tmp_path: Path, info: FileInfo):
    occurrences = write_file(
        tmp_path / "occ.parquet", info, random_responses(24, seed=1, high=range(320, 350))
    )
    run(occurrences, tmp_path / "a.csv", top_k=20)
    found = [row for row in rows(tmp_path / "a.csv") if row["k"] == 20]
    assert [row["num_prompts"] for row in found] == [3, 6, 12, 18]
    means = [row["jaccard"] for row in found]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.1
    assert all(r["jaccard_low"] <= r["jaccard"] <= r["jaccard_high"] for r in found)
    run(occurrences, tmp_path / "b.csv", top_k=20)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    run(occurrences, tmp_path / "c.csv", top_k=20, seed=1)
    assert (tmp_path / "a.csv").read_bytes() != (tmp_path / "c.csv").read_bytes()


def test_all_samples_of_a_prompt_stay_together(tmp_path: Path, info: FileInfo):
    """Of 4 prompts with 3 samples each, the smallest sub-sample is one prompt, not one sample."""
    responses = [
        Response(ids=[40 + p, 40 + p], kl=[1 + p, 1 + p], prompt_id=f"p{p}", sample_idx=s)
        for s in range(3)
        for p in range(4)
    ]
    report = run(
        write_file(tmp_path / "occ.parquet", info, responses), tmp_path / "cutoff.csv", top_k=4
    )
    assert report.facts["num_prompts"] == 4
    found = {row["num_prompts"]: row for row in rows(tmp_path / "cutoff.csv") if row["k"] == 4}
    assert {n: row["jaccard"] for n, row in found.items()} == {1: 0.25, 2: 0.5, 3: 0.75}


def test_nothing_stable_is_said_plainly(tmp_path: Path, info: FileInfo):
    """Every prompt has types of its own: half of them never hold the other half's."""
    responses = [
        Response(ids=range(40 + 6 * p, 46 + 6 * p), kl=[1.0] * 6, prompt_id=f"p{p}")
        for p in range(12)
    ]
    report = run(write_file(tmp_path / "occ.parquet", info, responses), tmp_path / "cutoff.csv")
    assert report.facts["k_recommended"] is None
    assert report.facts["k_enough"] == 44  # of 72 types, all alike: 60 %
    assert "no K is recommended: 60% of the loss takes 44 of the 72 types" in report.lines[0]


def test_half_of_the_prompts_ask_for_half_of_the_occurrences(tmp_path: Path, info: FileInfo):
    """Each prompt holds types 40 to 49 once, so half of 8 prompts hold 4 of each. Asked for 8
    there as well, no type would be ranked in any sub-sample."""
    occurrences = even(tmp_path / "occ.parquet", info)
    report = run(occurrences, tmp_path / "cutoff.csv", min_count=8, threshold=16.0)
    assert report.facts["num_types_ranked"] == 9  # 8 x 2 is enough, 8 x 1 is not
    assert report.facts["min_count_at_half"] == 4
    found = rows(tmp_path / "cutoff.csv")
    assert all(row["jaccard"] == 1 for row in found)
    assert any("8 occurrences in all prompts, 4 in half of them" in line for line in report.lines)


def test_a_threshold_on_a_mean_is_the_same_in_every_sample(tmp_path: Path, info: FileInfo):
    """The mean of type 41 is 9 in any sample: a halved threshold would let 42 to 45 in."""
    occurrences = even(tmp_path / "occ.parquet", info)
    report = run(occurrences, tmp_path / "cutoff.csv", score="mean", threshold=9.0)
    assert report.facts["num_types_ranked"] == 2
    assert all(row["jaccard"] == 1 for row in rows(tmp_path / "cutoff.csv"))
    report = run(occurrences, tmp_path / "cutoff.csv", score="mean", threshold=1.0)
    assert report.facts["num_types_ranked"] == 10


def test_the_policys_own_k_is_reported_where_there_are_so_many(tmp_path: Path, info: FileInfo):
    occurrences = even(tmp_path / "occ.parquet", info)
    facts = run(occurrences, tmp_path / "cutoff.csv", top_k=7).facts
    assert facts["k_asked"] == 7
    assert facts["kl_coverage_at_k_asked"] == pytest.approx(49 / 55)
    facts = run(occurrences, tmp_path / "cutoff.csv", top_k=11).facts
    assert "k_asked" not in facts


def test_types_dropped_before_ranking_lower_what_can_be_covered(tmp_path: Path, info: FileInfo):
    """40 to 42 carry 27 of 55; without them 28 are left, less than 60 %."""
    report = run(
        even(tmp_path / "occ.parquet", info), tmp_path / "cutoff.csv", drop_most_frequent=3
    )
    assert report.facts["num_types_ranked"] == 7
    assert (report.facts["k_recommended"], report.facts["k_enough"]) == (None, None)
    assert report.table["coverage"].max() == pytest.approx(28 / 55)
    assert "all 7 types that may be ranked carry 51% together" in report.lines[0]
    assert report.lines[1].startswith("most stable is K=3: Jaccard 1.000")


def test_too_few_prompts_or_no_type_to_rank_are_refused(tmp_path: Path, info: FileInfo):
    few = write_file(tmp_path / "few.parquet", info, random_responses(3, seed=0))
    with pytest.raises(DataError, match=r"holds 3 prompts.*at least 4"):
        run(few, tmp_path / "cutoff.csv")
    occurrences = even(tmp_path / "occ.parquet", info)
    with pytest.raises(DataError, match="none of 10 types seen qualifies"):
        run(occurrences, tmp_path / "cutoff.csv", min_count=9)


def test_one_ranked_type_is_enough(tmp_path: Path, info: FileInfo):
    responses = [Response(ids=[40], kl=[1.0], prompt_id=f"p{p}") for p in range(4)]
    report = run(write_file(tmp_path / "occ.parquet", info, responses), tmp_path / "cutoff.csv")
    assert report.facts["k_recommended"] is None  # one of one is no choice
    assert "takes 1 of the 1 types" in report.lines[0]
    assert np.isnan(report.table["spearman"]).all()
    assert json.loads(report.to_json())["rows"][0]["spearman"] is None


def test_what_needs_two_files_or_another_ending_is_refused(tmp_path: Path, info: FileInfo):
    occurrences = even(tmp_path / "occ.parquet", info)
    with pytest.raises(ConfigError, match="rock_ctx needs two"):
        run(occurrences, tmp_path / "cutoff.csv", score="rock_ctx")
    with pytest.raises(ConfigError, match="CSV or parquet"):
        run(occurrences, tmp_path / "cutoff.png")


def test_decay_is_left_out_and_that_is_said(tmp_path: Path, info: FileInfo):
    responses = [replace(r, step=i) for i, r in enumerate(random_responses(6, seed=3, samples=1))]
    occurrences = write_file(tmp_path / "occ.parquet", info, responses)
    watch = Watch()
    run(occurrences, tmp_path / "a.csv", decay=0.5, watch=watch)
    run(occurrences, tmp_path / "b.csv")
    assert any("policy.decay=0.5 is left out" in line for line in watch.lines)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
