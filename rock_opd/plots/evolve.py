"""What became of types between two states of a student (``rock-opd evolve``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.plots.canvas import BLACK, GREY, PURPLE, RED, figure
from rock_opd.tables import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUP_LOOKS = {
    "rocks": (RED, "o"),
    "rare_high": (PURPLE, "s"),
    "random": (GREY, "."),
}
"""Colour and marker of the groups of ``analysis.stagnation_groups``."""
GROUP_NAMES = {"rocks": "rocks", "rare_high": "rare high-KL", "random": "random others"}


def evolve_figure(path: Path, groups: Mapping[str, Columns]) -> Path:
    """How types moved between two checkpoints.

    Args:
        groups: by the names of ``GROUP_NAMES``: columns ``early``, ``late`` (mean KL, nats) and,
            where gradients are known, ``cosine`` with the balanced gradient at the early one.
    """
    with_cosine = any(np.isfinite(columns["cosine"]).any() for columns in groups.values())
    with figure(path, panels=2) as (left, right):
        drawn = []
        for name in ("random", "rare_high", "rocks"):
            color, marker = GROUP_LOOKS[name]
            early = np.asarray(groups[name]["early"], np.float64)
            late = np.asarray(groups[name]["late"], np.float64)
            at = (early > 0) & (late > 0)
            drawn.extend([early[at], late[at]])
            left.scatter(
                early[at],
                late[at],
                s=20,
                c=color,
                marker=marker,
                alpha=0.65,
                linewidths=0,
                label=f"{GROUP_NAMES[name]} ({len(early)})",
            )
        both = np.concatenate(drawn) if np.concatenate(drawn).size else np.array([0.1, 1.0])
        span = np.array([both.min() * 0.7, both.max() * 1.4])
        left.plot(span, span, color=BLACK, linewidth=0.9, linestyle=":", label="no change")
        left.set(
            xlim=span,
            ylim=span,
            xscale="log",
            yscale="log",
            xlabel="mean KL at the early checkpoint, nats (log scale)",
            ylabel="mean KL at the late checkpoint, nats (log scale)",
            title="Each type, early and late",
        )
        left.legend(loc="lower right")
        if with_cosine:
            _against_cosine(right, groups)
        else:
            _changes(right, groups)
    return path


def _against_cosine(axes: Axes, groups: Mapping[str, Columns]) -> None:
    for name in ("random", "rare_high", "rocks"):
        color, marker = GROUP_LOOKS[name]
        columns = groups[name]
        change = np.asarray(columns["late"]) - np.asarray(columns["early"])
        axes.scatter(
            columns["cosine"], change, s=20, c=color, marker=marker, alpha=0.65, linewidths=0,
            label=GROUP_NAMES[name],
        )  # fmt: skip
    axes.axhline(0, color=BLACK, linewidth=0.9, linestyle=":")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set(
        xlabel="cosine of the type's gradient with the balanced one",
        ylabel="change of mean KL, nats (log scale beyond ±0.1)",
        title="Change against gradient direction",
    )
    axes.legend(loc="best")


def _changes(axes: Axes, groups: Mapping[str, Columns]) -> None:
    """Boxes of late / early: median, quartiles, 5th and 95th percentile."""
    axes.axhline(1, color=BLACK, linewidth=0.9, linestyle=":")
    axes.set_yscale("log")
    axes.set(
        ylabel="mean KL, late / early (log scale)",
        title="Change by group (box: quartiles, whiskers: 5-95 %)",
    )
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter("{x:g}")
    axes.grid(axis="x", visible=False)
    names, changes = [], []
    for name in GROUP_NAMES:
        early = np.asarray(groups[name]["early"], np.float64)
        late = np.asarray(groups[name]["late"], np.float64)
        at = (early > 0) & (late > 0)
        if at.any():
            names.append(name)
            changes.append(late[at] / early[at])
    if not names:
        return
    boxes = axes.boxplot(
        changes,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        widths=0.5,
        medianprops={"color": BLACK, "linewidth": 1.6},
    )
    for box, name in zip(boxes["boxes"], names, strict=True):
        box.set(facecolor=GROUP_LOOKS[name][0], alpha=0.6)
    axes.set_xticks(range(1, len(names) + 1), [GROUP_NAMES[name] for name in names])
