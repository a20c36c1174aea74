"""`rock-opd evolve` on files made by hand."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from study_files import Response, Watch, file_info, random_responses, write_file

from rock_opd.errors import ConfigError, DataError
from rock_opd.evolve import compare
from rock_opd.occurrences import FileInfo
from rock_opd.rocklist import write_ids
from rock_opd.tables import Report, write_table


@pytest.fixture(scope="module")
def info(tiny_models: Path) -> FileInfo:
    return file_info(tiny_models / "student")


def run(
    early: Path,
    late: Path,
    output: Path,
    rocks: list[int],
    *,
    gradients: Path | None = None,
    watch: Watch | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
) -> Report:
    from rock_opd.occurrences import read_info

    watch = watch or Watch()
    listed = output.with_name("list.json")
    write_ids(listed, np.array(rocks), tokenizer=tokenizer or read_info(early).tokenizer)
    return compare(
        early,
        late,
        output,
        rocks=listed,
        gradients=gradients,
        seed=seed,
        say=watch.say,
        track=watch.track,
    )


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def two_checkpoints(tmp_path: Path, info: FileInfo) -> tuple[Path, Path]:
    """Each type in each of four prompts. Rocks 40 .. 47 move by 1 %; 50 .. 157 lose half."""
    ids = [*range(40, 48), *range(50, 158)]
    kl = np.array([*[0.2] * 8, *np.linspace(1.0, 3.0, 108)])
    factor = np.array([*[1.01] * 4, *[0.99] * 4, *[0.5] * 108])
    files = []
    for name, losses in (("early", kl), ("late", kl * factor)):
        responses = [Response(ids=ids, kl=losses.tolist(), prompt_id=f"p{i}") for i in range(4)]
        files.append(write_file(tmp_path / f"{name}.parquet", info, responses))
    return files[0], files[1]


def test_groups_and_their_changes_by_hand(tmp_path: Path, info: FileInfo):
    early, late = two_checkpoints(tmp_path, info)
    watch = Watch()
    report = run(early, late, tmp_path / "evolve.csv", [*range(40, 48), 900], watch=watch)
    groups = report.facts["groups"]
    assert {name: group["num_types"] for name, group in groups.items()} == {
        "rocks": 8,
        "rare_high": 100,
        "random": 8,
        "rare_high_early": 100,
        "rare_high_split": 100,
    }
    assert groups["rocks"]["median_early"] == pytest.approx(0.2)
    assert groups["rocks"]["median_change"] == pytest.approx(0.0, abs=1e-6)
    assert groups["rocks"]["share_fell"] == 0.5
    assert groups["rocks"]["wilcoxon_p"] > 0.5
    high = np.linspace(1.0, 3.0, 108)[8:]
    assert groups["rare_high"]["median_early"] == pytest.approx(np.median(high))
    assert groups["rare_high"]["median_late"] == pytest.approx(np.median(high) / 2)
    assert groups["rare_high"]["mean_change"] == pytest.approx(-high.mean() / 2)
    assert groups["rare_high"]["wilcoxon_p"] < 1e-15
    text = "\n".join(report.lines)
    assert "rare high-KL, chosen late: median KL 2.07 -> 1.04 (-50%) over 100 types" in text
    assert "1 of 9 listed rocks were not seen twice" in text
    assert watch.pieces[-1] == (4, 4)
    assert (tmp_path / "evolve.png").stat().st_size > 10_000


def test_the_table_has_a_row_for_each_type_of_a_group(tmp_path: Path, info: FileInfo):
    early, late = two_checkpoints(tmp_path, info)
    run(early, late, tmp_path / "evolve.csv", list(range(40, 48)))
    rows = table(tmp_path / "evolve.csv")
    assert len(rows) == 8 + 100 + 8 + 100 + 100
    first = rows[0]
    assert (first["group"], first["token_id"]) == ("rocks", "40")
    assert (first["count_early"], first["count_late"]) == ("4", "4")
    assert float(first["change"]) == pytest.approx(0.002, rel=1e-3)
    assert first["cosine"] == "nan"
    split = [row for row in rows if row["group"] == "rare_high_split"]
    assert {row["count_early"] for row in split} == {"2"}
    random = [int(row["token_id"]) for row in rows if row["group"] == "random"]
    assert random == list(range(50, 58))  # what is in no other group


def test_change_is_held_against_gradient_direction(tmp_path: Path, info: FileInfo):
    """Cosine falls as the early loss, and so the fall, grows; rocks 40 .. 43 have no gradient."""
    early, late = two_checkpoints(tmp_path, info)
    ids = np.array([*range(44, 48), *range(50, 158)])
    for name in ("g.csv", "g.parquet"):
        gradients = write_table(
            tmp_path / name,
            {"token_id": ids, "text": ["a\nb"] * len(ids), "cos_balanced": np.linspace(1, -1, 112)},
        )
        report = run(early, late, tmp_path / "evolve.csv", list(range(40, 48)), gradients=gradients)
        found = report.facts["spearman_change_cosine"]
        assert found["rare_high"] == {"spearman": pytest.approx(1.0), "num_types": 100}
        assert found["rocks"]["num_types"] == 4
        assert found["pooled"]["num_types"] == 112
        assert found["pooled"]["spearman"] > 0.9
        assert any("Spearman 1.00 over 100 types" in line for line in report.lines)


def test_a_table_without_cosines_is_refused(tmp_path: Path, info: FileInfo):
    early, late = two_checkpoints(tmp_path, info)
    args = (early, late, tmp_path / "evolve.csv", [40])
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    for gradients in (
        write_table(tmp_path / "a.csv", {"token_id": [40], "cosine": [0.5]}),
        write_table(tmp_path / "a.parquet", {"token_id": [40], "cosine": [0.5]}),
        tmp_path / "gone.csv",
        tmp_path / "bad.parquet",
    ):
        with pytest.raises(DataError, match=rf"{gradients.name}: expected a table"):
            run(*args, gradients=gradients)
    beyond = write_table(tmp_path / "b.csv", {"token_id": [99_999], "cos_balanced": [0.5]})
    with pytest.raises(DataError, match="do not fit"):
        run(*args, gradients=beyond)


def test_it_is_said_whether_the_same_responses_were_scored_twice(tmp_path: Path, info: FileInfo):
    early, late = two_checkpoints(tmp_path, info)
    report = run(early, late, tmp_path / "evolve.csv", [40])
    assert report.facts["same_responses"] is True
    own = write_file(tmp_path / "own.parquet", info, random_responses(4, seed=0))
    report = run(early, own, tmp_path / "evolve.csv", [40])
    assert report.facts["same_responses"] is False
    assert "each student's own" in report.lines[0]


def test_types_that_the_two_do_not_share_leave_empty_groups(tmp_path: Path, info: FileInfo):
    """Nothing is seen at both checkpoints: no crash, and every number is null."""
    early = write_file(
        tmp_path / "early.parquet", info, [Response(ids=[40, 40], kl=[1, 2], prompt_id="a")]
    )
    late = write_file(
        tmp_path / "late.parquet", info, [Response(ids=[41, 41], kl=[1, 2], prompt_id="a")]
    )
    report = run(early, late, tmp_path / "evolve.csv", [40])
    found = json.loads(report.to_json())["groups"]
    assert all(group["num_types"] == 0 for group in found.values())
    assert found["rocks"]["median_early"] is None
    assert "rocks: no type was seen often enough at both checkpoints" in report.lines
    assert len(table(tmp_path / "evolve.csv")) == 0


def test_few_types_have_no_p_value_and_that_is_said(tmp_path: Path, info: FileInfo):
    files = [
        write_file(
            tmp_path / f"{name}.parquet", info, [Response(ids=[40, 40], kl=kl, prompt_id="a")]
        )
        for name, kl in (("early", [1, 1]), ("late", [0.5, 0.5]))
    ]
    report = run(*files, tmp_path / "evolve.csv", [40])
    assert any("rocks: median KL 1 -> 0.5 (-50%)" in line for line in report.lines)
    assert any("too few changes for a test" in line for line in report.lines)


def test_other_vocabularies_estimators_and_lists_are_refused(tmp_path: Path, info: FileInfo):
    early, late = two_checkpoints(tmp_path, info)
    responses = random_responses(2, seed=0)
    other = write_file(tmp_path / "other.parquet", replace(info, tokenizer="0" * 16), responses)
    sampled = write_file(
        tmp_path / "sampled.parquet", replace(info, estimator="sampled"), responses
    )
    out = tmp_path / "evolve.csv"
    with pytest.raises(DataError, match=r"other\.parquet: made with another tokenizer"):
        run(early, other, out, [40])
    with pytest.raises(DataError, match="score both alike"):
        run(early, sampled, out, [40])
    with pytest.raises(DataError, match="made with tokenizer"):
        run(early, late, out, [40], tokenizer="f" * 16)
    with pytest.raises(ConfigError, match="CSV or parquet"):
        run(early, late, tmp_path / "evolve.txt", [40])


def test_the_seed_draws_the_random_types(tmp_path: Path, info: FileInfo):
    """500 types, twice each: 200 of the 390 that are left are drawn."""
    ids = list(range(100, 600))
    rng = np.random.default_rng(0)
    files = [
        write_file(
            tmp_path / f"{name}.parquet",
            info,
            [Response(ids=ids * 2, kl=rng.exponential(size=1000).tolist(), prompt_id="a")],
        )
        for name in ("early", "late")
    ]
    drawn = {}
    for seed in (0, 0, 1):
        run(*files, tmp_path / "evolve.csv", list(range(100, 110)), seed=seed)
        rows = table(tmp_path / "evolve.csv")
        ids_drawn = [row["token_id"] for row in rows if row["group"] == "random"]
        assert len(ids_drawn) == 200
        assert drawn.setdefault(seed, ids_drawn) == ids_drawn
    assert drawn[0] != drawn[1]


def test_only_choosing_on_other_prompts_shows_how_much_rare_types_fell(
    tmp_path: Path, info: FileInfo
):
    """Every loss is drawn anew, and its mean falls by 30 % whatever the type."""
    rng = np.random.default_rng(4)
    ids = np.repeat(np.arange(100, 900), 4)
    files = []
    for name, factor in (("early", 1.0), ("late", 0.7)):
        responses = [
            Response(
                ids=ids.tolist(),
                kl=(factor * rng.exponential(size=len(ids)) ** 3).tolist(),
                prompt_id=f"p{i}",
            )
            for i in range(2)
        ]
        files.append(write_file(tmp_path / f"{name}.parquet", info, responses))
    groups = run(*files, tmp_path / "evolve.csv", [100]).facts["groups"]
    relative = {
        name: groups[name]["mean_change"]
        for name in ("rare_high", "rare_high_early", "rare_high_split")
    }
    assert relative["rare_high"] > 5  # seems to rise
    assert relative["rare_high_early"] < -5
    assert relative["rare_high_split"] == pytest.approx(-0.3 * 6, abs=2.5)  # mean of x ** 3 is 6
