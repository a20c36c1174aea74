"""Token lists on disk, ours and the official ones."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from rock_opd.errors import DataError
from rock_opd.rocklist import read_ids, write_ids, write_rock_vs_control

OURS = {"num_types": 1024, "tokenizer": "aaaa"}
HEADER = (
    "rock_id,rock_token,rock_freq,rock_mean_kl,rock_freq_mean,"
    "ctrl_id,ctrl_token,ctrl_freq,ctrl_mean_kl,ctrl_freq_mean"
)


def write(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


# JSON


def test_a_list_keeps_its_order_and_loses_its_repeats(tmp_path):
    ids, _ = read_ids(write(tmp_path / "rock.json", "[13, 198, 13, 7]"), **OURS)
    assert ids.tolist() == [13, 198, 7]
    assert ids.dtype == np.int32


def test_what_we_write_we_read_and_say_nothing(tmp_path):
    path = tmp_path / "new" / "rocks.json"
    files = write_ids(path, np.array([9, 2], np.int32), tokenizer="aaaa", top_k=np.int64(2))
    assert files == [path, path.with_name("rocks.meta.json")]
    assert json.loads(path.read_text()) == [9, 2]  # the official format
    assert json.loads(files[1].read_text()) == {"tokenizer": "aaaa", "top_k": 2}
    ids, notice = read_ids(str(path), **OURS)
    assert ids.tolist() == [9, 2]
    assert notice is None
    assert sorted(p.name for p in path.parent.iterdir()) == ["rocks.json", "rocks.meta.json"]


def test_a_list_of_another_tokenizer_is_refused_and_both_are_named(tmp_path):
    path = tmp_path / "rocks.json"
    write_ids(path, np.array([9, 2]), tokenizer="bbbb")
    with pytest.raises(DataError, match=r"made with tokenizer bbbb .* used with tokenizer aaaa"):
        read_ids(path, **OURS)


def test_a_list_that_does_not_name_its_tokenizer_is_taken_with_a_notice(tmp_path):
    _, notice = read_ids(write(tmp_path / "rock.json", "[13]"), **OURS)
    assert "rock.meta.json" in notice
    assert "\n" not in notice


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null"])
def test_a_fingerprint_that_cannot_be_read_is_no_fingerprint_of_ours(tmp_path, text):
    write(tmp_path / "rock.meta.json", text)
    with pytest.raises(DataError, match=r"rock\.meta\.json.*remove it to use rock\.json"):
        read_ids(write(tmp_path / "rock.json", "[13]"), **OURS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("[13, 198", "not readable"),
        ('{"13": 1}', "expected a JSON list of integers"),
        ("[13, true]", "expected a JSON list of integers"),
        ("[1.5]", "expected a JSON list of integers"),
        ("[]", "empty"),
        ("[13, 1024, 2000]", r"2 ids lie outside the vocabulary of 1024 \(first: 1024\)"),
        ("[-1]", "1 ids lie outside"),
        ("[99999999999999999999]", "1 ids lie outside"),
    ],
)
def test_a_list_that_cannot_be_used_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "rock.json"
    if text is not None:
        write(path, text)
    with pytest.raises(DataError, match=message) as caught:
        read_ids(path, **OURS)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


# CSV


def pairs(tmp_path, *, ctrl_ids=(4, -1)):
    """Rock 7 (a comma) four times at 0.5, rock 2 (a line break) once at 3, control 4 unmeasured."""
    count, mean = np.zeros(10), np.full(10, np.nan)
    count[[7, 2, 4]], mean[[7, 2]] = [4, 1.5, 3], [0.5, 3]
    text = {7: ",", 2: "\n", 4: '"'}
    path = tmp_path / "rock_vs_control.csv"
    files = write_rock_vs_control(
        path,
        np.array([7, 2]),
        np.array(ctrl_ids),
        count=count,
        mean_kl=mean,
        decode=text.__getitem__,
        tokenizer="aaaa",
    )
    assert files == [path, tmp_path / "rock_vs_control.meta.json"]
    return path


def test_rocks_and_controls_have_the_official_columns(tmp_path):
    path = pairs(tmp_path)
    assert path.read_text().partition("\n")[0] == HEADER
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert rows == [
        ["7", ",", "4", "0.5", "2.0", "4", '"', "3", "", ""],
        ["2", "\n", "1.5", "3.0", "4.5", "", "", "", "", ""],
    ]


def test_both_columns_of_ids_are_read(tmp_path):
    path = pairs(tmp_path)
    rocks, notice = read_ids(path, **OURS)
    assert rocks.tolist() == [7, 2]
    assert notice is None
    assert read_ids(path, **OURS, column="ctrl_id")[0].tolist() == [4]
    with pytest.raises(DataError, match="made with tokenizer aaaa"):
        read_ids(path, num_types=1024, tokenizer="cccc")


def test_the_official_file_is_read_with_a_notice(tmp_path):
    """As pandas writes it: a column with gaps in floats, Windows line ends, a byte order mark."""
    text = f'\ufeff{HEADER}\r\n13, the,5,0.1,0.5,4.0,x,5,0.1,0.5\r\n198,"\n",2,1.0,2.0,,,,,\r\n'
    path = tmp_path / "rock_vs_control.csv"
    path.write_bytes(text.encode())
    ids, notice = read_ids(path, **OURS)
    assert ids.tolist() == [13, 198]
    assert "rock_vs_control.meta.json" in notice
    assert read_ids(path, **OURS, column="ctrl_id")[0].tolist() == [4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no column 'rock_id', its header has \[\]"),
        ("id,token\n1,x\n", r"no column 'rock_id', its header has \['id', 'token'\]"),
        ("rock_id,rock_token\n", "empty"),
        ("rock_id,rock_token\n,x\n", "empty"),
        ("rock_id,rock_token\n1\n", "line 2 does not have the header's 2 cells"),
        ("rock_id,rock_token\n1,a,b\n", "line 2 does not have the header's 2 cells"),
        ("rock_id,rock_token\n1,a\nx,b\n", "line 3: 'x' in 'rock_id' is no token id"),
        ("rock_id,rock_token\n1.5,a\n", "'1.5' in 'rock_id' is no token id"),
        ("rock_id,rock_token\nnan,a\n", "'nan' in 'rock_id' is no token id"),
        ('rock_id,rock_token\n1,"a\n', "not readable"),
        ("rock_id,rock_token\n1024,a\n", "1 ids lie outside the vocabulary of 1024"),
    ],
)
def test_a_csv_that_cannot_be_used_is_one_clear_line(tmp_path, text, message):
    path = write(tmp_path / "rocks.csv", text)
    with pytest.raises(DataError, match=message) as caught:
        read_ids(path, **OURS)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_one_clear_line(tmp_path):
    for name in ("rocks.csv", "rocks.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00PAR1")
        with pytest.raises(DataError, match="not readable"):
            read_ids(tmp_path / name, **OURS)


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_ids(tmp_path / "file" / "rocks.json", np.array([1]), tokenizer="aaaa")
