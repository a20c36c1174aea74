"""How far a list of K types reaches, and how stable it is (``rock-opd cutoff``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rock_opd.plots.canvas import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, figure


def cutoff_figure(
    path: Path,
    *,
    coverage: np.ndarray,
    cuts: Sequence[int],
    sizes: Sequence[int],
    jaccard: np.ndarray,
    jaccard_low: np.ndarray,
    jaccard_high: np.ndarray,
    num_prompts: int,
    recommended: int | None,
    coverage_target: float,
    jaccard_bar: float,
) -> Path:
    """Coverage of the loss by K, and how far smaller samples find the same top K.

    Args:
        coverage: float [n]: of the first K types, K = 1 to n.
        cuts: K at which stability was measured.
        sizes: prompts in the sub-samples.
        jaccard, jaccard_low, jaccard_high: float [len(sizes), len(cuts)].
        recommended: K; None: no K is recommended, and none is marked.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    with figure(path, panels=2, size=(11.2, 4.6)) as (left, right):
        left.plot(np.arange(1, len(coverage) + 1), coverage, color=RED)
        left.axhline(coverage_target, color=BLACK, linestyle=":", linewidth=1)
        left.set(
            xscale="log",
            xlabel="K, types in the list (log scale)",
            ylabel="share of all KL",
            ylim=(0, 1.02),
            title="KL carried by the top K types",
        )
        for color, line, i in zip(
            (SKY, GREEN, BLUE, PURPLE, ORANGE), ("-", "--", "-.", ":", "-"), range(len(sizes)),
            strict=False,
        ):  # fmt: skip
            right.plot(cuts, jaccard[i], color=color, linestyle=line, label=f"{sizes[i]} prompts")
            right.fill_between(
                cuts, jaccard_low[i], jaccard_high[i], color=color, alpha=0.13, linewidth=0
            )
        right.axhline(jaccard_bar, color=BLACK, linestyle=":", linewidth=1)
        right.set(
            xscale="log",
            xlim=(cuts[0] / 1.1, cuts[-1] * 1.1),  # also where every value is unknown
            xlabel="K, types in the list (log scale)",
            ylabel="Jaccard with the list of all prompts",
            ylim=(0, 1.02),
            title=f"Stability against all {num_prompts} prompts (bands: 95 % of repeats)",
        )
        for axes in (left, right):
            if recommended is not None:
                axes.axvline(recommended, color=ORANGE, linewidth=1.2, zorder=0)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
        left.plot([], [], color=BLACK, linestyle=":", linewidth=1, label="target")
        if recommended is None:
            left.plot([], [], linestyle="", label="no K is recommended")
        else:
            left.plot([], [], color=ORANGE, linewidth=1.2, label=f"recommended K = {recommended}")
        for axes in (left, right):  # below: curves may run anywhere within
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, frameon=False)
    return path
