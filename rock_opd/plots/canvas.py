"""What all figures share: a PNG file in the making, colours, and the texts of tokens. Matplotlib
without a screen: no window, no global state.

A figure never computes: it is handed the columns of a table. Colours are Okabe and Ito's, which
differ also for the colour-blind; groups differ in shape as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#9A9A9A",
    "#000000",
)
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "font.size": 9.5,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.6,
}
MAX_LABELS = 12
"""Token texts written into a picture: more would overlap."""


@contextmanager
def figure(
    path: Path,
    *,
    panels: int = 1,
    size: tuple[float, float] | None = None,
    widths: Sequence[float] | None = None,
) -> Iterator[list[Axes]]:
    """A picture in the making: gives its panels, side by side, and writes it at the end.

    Args:
        path: a PNG file; written aside and renamed, so that an error leaves the old one.
        size: inches; by default 5.6 x 4.2 per panel.
        widths: relative widths of the panels; equal by default.

    Raises:
        DataError: the place cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=size or (5.6 * panels, 4.2), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.subplots(1, panels, squeeze=False, width_ratios=widths)[0]
        yield list(axes)
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn.savefig(partial, format="png", dpi=150)
            os.replace(partial, path)
        except OSError as error:
            raise DataError(f"figure {path} cannot be written: {error}") from None


def token_label(token_id: int, text: str | None) -> str:
    """How a type is written into a picture: its text in quotes, line breaks as an arrow, what the
    font may lack escaped; its id where the text is unknown."""
    if not text:
        return f"#{token_id}"
    shown = text.replace("\r", "").replace("\n", "\u21b5").replace("\t", "\u2192")
    shown = "".join(
        c if c in "\u21b5\u2192" or (c.isascii() and c.isprintable()) else ascii(c)[1:-1]
        for c in shown
    )
    return f"'{shown if len(shown) <= 14 else shown[:12] + '..'}'"


def label_points(axes: Axes, x: np.ndarray, y: np.ndarray, labels: Sequence[str]) -> None:
    """Labels the first points, at most ``MAX_LABELS``, where there is room: a text that would cover
    a point or another text is left out. Comes last: it settles the layout of the whole figure.

    Args:
        x, y: float [n], of all points that are not to be covered.
        labels: of the points, in order of importance.
    """
    drawn = axes.figure
    renderer = drawn.canvas.get_renderer()
    drawn.draw_without_rendering()  # limits and scales, on which places depend
    drawn.set_layout_engine("none")
    inside = axes.get_window_extent(renderer)
    points = axes.transData.transform(np.column_stack([x, y]))
    taken: list[Bbox] = []
    for (point_x, point_y), label in zip(zip(x, y, strict=True), labels, strict=True):
        if len(taken) == MAX_LABELS:
            break
        for offset, align in (((5, 3), "left"), ((-5, 3), "right"), ((5, -9), "left")):
            text = axes.annotate(
                label,
                (point_x, point_y),
                xytext=offset,
                textcoords="offset points",
                ha=align,
                fontsize=7.5,
                parse_math=False,
            )
            text.set_in_layout(False)
            box = text.get_window_extent(renderer)
            covers = box.count_contains(points) or any(box.overlaps(other) for other in taken)
            if not covers and inside.count_contains(box.corners()) == 4:
                taken.append(box)
                break
            text.remove()
