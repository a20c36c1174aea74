"""Figures are whole PNG files, say what they show, and survive odd texts and empty groups."""

from __future__ import annotations

import itertools
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

from rock_opd.errors import DataError
from rock_opd.plots.canvas import MAX_LABELS, figure, label_points, token_label
from rock_opd.plots.cutoff import cutoff_figure
from rock_opd.plots.evolve import evolve_figure
from rock_opd.plots.rocks import rocks_figure

# A missing glyph or a layout that does not fit is a warning in matplotlib, and a fault here.
pytestmark = pytest.mark.filterwarnings("error")


def png_size(path: Path) -> tuple[int, int]:
    """Width and height; checks every chunk up to the end."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, kind = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 4 : at + 8 + length]
        (crc,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert crc == zlib.crc32(body)
        at += 12 + length
    assert kind == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_a_figure_has_its_size_at_150_dots_per_inch_and_leaves_nothing_else(tmp_path: Path):
    with figure(tmp_path / "new" / "a.png", panels=2, size=(6, 3)) as axes:
        assert len(axes) == 2
        axes[0].plot([1, 2], [3, 4])
    assert png_size(tmp_path / "new" / "a.png") == (900, 450)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.png"]


def test_an_error_while_drawing_keeps_the_old_figure(tmp_path: Path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), figure(path):
        _ = 1 / 0
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "a.png"
    with pytest.raises(DataError, match=r"figure .*a\.png cannot be written"), figure(path):
        pass


def test_drawing_changes_no_global_setting_and_opens_no_window(tmp_path: Path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    with figure(tmp_path / "a.png"):
        pass
    assert dict(matplotlib.rcParams) == before


def test_labels_show_what_cannot_be_seen():
    assert token_label(5, " So") == "' So'"
    assert token_label(5, "\n\n") == "'↵↵'"
    assert token_label(5, "\\frac") == "'\\frac'"
    assert token_label(5, "漢") == "'\\u6f22'"
    assert token_label(5, "supercalifragilistic") == "'supercalifra..'"
    assert token_label(5, "") == token_label(5, None) == "#5"


def test_labels_cover_neither_each_other_nor_a_point(tmp_path: Path):
    rng = np.random.default_rng(0)
    x, y = rng.random(60), rng.random(60)
    with figure(tmp_path / "a.png") as (axes,):
        axes.scatter(x, y)
        label_points(axes, x, y, [f"'label {i}'" for i in range(60)])
        renderer = axes.figure.canvas.get_renderer()
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        points = axes.transData.transform(np.column_stack([x, y]))
        assert 5 <= len(boxes) <= MAX_LABELS
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert not any(box.count_contains(points) for box in boxes)


def draw_rocks(path: Path, texts: dict[int, str], families: dict[str, tuple[int, float]]) -> None:
    rng = np.random.default_rng(1)
    table = {
        "token_id": np.arange(100, 200),
        "count": np.arange(100.0, 0, -1),
        "mean_kl": np.concatenate([[np.nan, 0.0, -1.0], rng.exponential(size=97)]),
    }
    rocks_figure(
        path,
        table,
        rock_ids=np.array([103, 100, 150]),
        control_ids=np.array([160, 161]),
        texts=texts,
        families=families,
    )


def test_the_rocks_figure_takes_any_text_and_types_that_cannot_be_drawn(tmp_path: Path):
    odd = {103: "$x^", 150: "漢字\x00\u200b", 100: "_{"}
    draw_rocks(tmp_path / "a.png", odd, {"delimiter": (2, 0.1), "other": (1, 0.0)})
    wide = png_size(tmp_path / "a.png")
    draw_rocks(tmp_path / "a.png", {}, {})
    assert png_size(tmp_path / "a.png")[0] == wide[0] / 2  # no texts, no panel of families


def test_the_cutoff_figure_takes_unknown_values_and_a_single_type(tmp_path: Path):
    for cuts in ([1], [5, 10, 20]):
        unknown = np.full((2, len(cuts)), np.nan)
        cutoff_figure(
            tmp_path / "a.png",
            coverage=np.linspace(0.1, 1.0, cuts[-1]),
            cuts=cuts,
            sizes=[2, 4],
            jaccard=unknown,
            jaccard_low=unknown,
            jaccard_high=unknown,
            num_prompts=8,
            recommended=cuts[0] if len(cuts) == 1 else None,
            coverage_target=0.6,
            jaccard_bar=0.7,
        )
        assert png_size(tmp_path / "a.png") == (1680, 690)


@pytest.mark.parametrize("with_cosine", [True, False])
@pytest.mark.parametrize("num", [0, 1, 30])
def test_the_evolve_figure_takes_empty_groups_and_types_at_zero(
    tmp_path: Path, num: int, with_cosine: bool
):
    rng = np.random.default_rng(2)

    def group(size: int) -> dict[str, np.ndarray]:
        cosine = rng.normal(size=size) if with_cosine else np.full(size, np.nan)
        late = rng.exponential(size=size)
        late[: size // 3] = 0.0
        return {"early": rng.exponential(size=size), "late": late, "cosine": cosine}

    groups = {"rocks": group(num), "rare_high": group(0), "random": group(num)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evolve_figure(tmp_path / "a.png", groups)
    assert png_size(tmp_path / "a.png") == (1680, 630)
