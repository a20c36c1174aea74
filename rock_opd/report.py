"""What a finished run tells on the terminal: the numbers of ``summary.json``, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rock_opd.tables import print_line

SCORES = {"rock": "Rock Score", "rock_ctx": "Rock Score x CCR"}
"""What a score is called in a title; the others go by their names in a recipe."""

FILES = ("summary.json", "metrics.jsonl", "registry/", "model/")
"""What a run's folder is looked into for."""


def show_summary(summary: dict[str, Any], run_dir: Path, *, console: Console | None = None) -> None:
    """Prints a finished run's summary."""
    out = console or Console()
    out.print()
    _heldout(summary, out)
    _freezing(summary, out)
    if summary["rocks"]:
        out.print(_rock_table(summary["rocks"], summary["rocks_by"]))
    seconds = {k: v for k, v in summary["phase_s"].items() if k != "step"}
    print_line(
        out,
        "seconds per phase: "
        + ", ".join(f"{k} {v:.0f}" for k, v in seconds.items())
        + f"; {summary['num_tokens']:,} tokens at {summary['tokens_per_s']:,.0f} tokens/s",
    )
    if summary.get("accuracy") is not None:
        print_line(out, f"accuracy on the evaluation problems: {summary['accuracy']:.1%}")
    if summary.get("samples"):
        for name in ("prompt", "before", "after"):
            out.print(f"\n[bold]{name}[/bold]", highlight=False)
            print_line(out, summary["samples"][name].strip())
    there = [name for name in FILES if (run_dir / name).exists()]
    print_line(out, f"\nall of it: {run_dir}" + (f" ({', '.join(there)})" if there else ""))


def _heldout(summary: dict[str, Any], out: Console) -> None:
    if summary.get("heldout_kl_before") is None:
        return
    low, high = summary["heldout_kl_change_ci95"]
    before, after = summary["heldout_kl_before"], summary["heldout_kl_after"]
    verdict = "below zero: the student moved toward its teacher" if high < 0 else "not below zero"
    print_line(
        out,
        f"held-out reverse KL {before:.4f} -> {after:.4f} nats per token "
        f"(change {after - before:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, {verdict})",
    )


def _freezing(summary: dict[str, Any], out: Console) -> None:
    shares = summary["frozen_share"]
    if not any(shares):
        why = summary["nothing_frozen"]
        print_line(out, "no token was frozen" + (f": {why}" if why else ""))
        return
    print_line(
        out,
        "share of positions frozen, by step: " + " ".join(f"{100 * s:.0f}" for s in shares) + " %",
    )
    groups = summary.get("heldout_kl_by_group")
    if not groups or groups["frozen"]["before"] is None or groups["trained"]["before"] is None:
        return
    frozen, trained = groups["frozen"], groups["trained"]

    def change(group: dict[str, Any]) -> float:
        return group["after"] / group["before"] - 1 if group["before"] else 0.0

    print_line(
        out,
        f"what freezing did: held-out KL at the {frozen['positions']} positions of frozen types "
        f"{frozen['before']:.4f} -> {frozen['after']:.4f} ({change(frozen):+.0%}), at the "
        f"{trained['positions']} others {trained['before']:.4f} -> {trained['after']:.4f} "
        f"({change(trained):+.0%}). "
        + (
            "Frozen types improved less than the rest: what they no longer learn is missing."
            if change(frozen) > change(trained)
            else "Frozen types improved at least as much as the rest, by what they learned before "
            "and from the others."
        )
        + " Whether freezing paid needs the controls: the same recipe with policy.name=all and "
        "with policy.name=random_matched.",
    )


def _rock_table(rocks: list[dict[str, Any]], score: str) -> Table:
    table = Table(title=f"token types by {SCORES.get(score, score)} (top {len(rocks)})")
    for name in ("id", "text", "count", "mean KL", "score", "frozen"):
        table.add_column(name, justify="left" if name in ("text", "frozen") else "right")
    for row in rocks:
        table.add_row(
            str(row["id"]),
            repr(row["text"]),
            f"{row['count']:.0f}",
            f"{row['mean_kl']:.3f}",
            f"{row['score']:.{1 if row['score'] >= 10 else 3}f}",
            "frozen" if row["frozen"] else "",
        )
    return table
