"""What a finished run tells on the terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rock_opd.report import show_summary
from rock_opd.tables import print_line

WHY = "0 of 9 types seen qualify; left out: 9 below policy.min_count=100, and nothing else " * 2


def shown(*, run_dir: Path = Path("runs/[x]"), **changes: Any) -> str:
    """Of a run of three steps, as a pipe gets it."""
    row = {"id": 7, "text": " a", "count": 12.0, "mean_kl": 0.25, "score": 3.0, "R": 3.0}
    summary = {
        "frozen_share": [0.0, 0.5, 0.5],
        "nothing_frozen": None,
        "rocks": [row | {"ccr": None, "rank": 1, "frozen": True}],
        "rocks_by": "rock",
        "phase_s": {"rollout": 1.0},
        "num_tokens": 100,
        "tokens_per_s": 10.0,
        **changes,
    }
    out = io.StringIO()
    show_summary(summary, run_dir, console=Console(file=out, width=60))
    return out.getvalue()


@pytest.mark.parametrize(
    ("score", "title"),
    [
        ("rock", "token types by Rock Score (top 1)"),
        ("rock_ctx", "token types by Rock Score x CCR (top 1)"),
        ("eb_lcb", "token types by eb_lcb (top 1)"),
    ],
)
def test_the_table_is_titled_by_the_score_it_is_sorted_by(score: str, title: str):
    assert title in shown(rocks_by=score)


def test_a_run_that_froze_nothing_says_why_on_one_line():
    text = shown(frozen_share=[0.0, 0.0], nothing_frozen=WHY, rocks=[])
    assert f"no token was frozen: {WHY}\n" in text and "token types by" not in text
    assert "no token was frozen\n" in shown(frozen_share=[0.0])
    assert text.endswith("\nall of it: runs/[x]\n")


def test_only_files_that_are_there_are_named(tmp_path):
    (tmp_path / "registry").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    text = shown(run_dir=tmp_path)
    assert text.endswith(f"\nall of it: {tmp_path} (metrics.jsonl, registry/)\n")


def test_a_line_is_wrapped_on_a_terminal_alone():
    for terminal, num_lines in ((False, 1), (True, 4)):
        out = io.StringIO()
        print_line(Console(file=out, width=60, force_terminal=terminal), WHY.strip())
        assert len(out.getvalue().splitlines()) == num_lines
