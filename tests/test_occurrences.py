"""Occurrence files: what is written comes back, and damage is named."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rock_opd.occurrences as module
from rock_opd.core.registry import Registry
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import DataError, NumericsError
from rock_opd.occurrence_format import NUM_EMPTY_KEY
from rock_opd.occurrences import (
    FileInfo,
    Occurrences,
    OccurrenceWriter,
    build_registry,
    merge,
    newline_counts,
    read,
    read_info,
)
from rock_opd.types import Rollout

VOCAB = 50
NEWLINES = np.zeros(VOCAB, np.int32)
INFO = FileInfo(
    tokenizer="0123456789abcdef",
    num_types=VOCAB,
    student="models/student",
    teacher="models/teacher",
    estimator="hidden",
    temperature=0.7,
    top_p=0.9,
)


def rollout(mask: str, *, seed: int = 0, prompt_len: int | None = None, **fields) -> Rollout:
    """A sequence from its mask: ``x`` sampled, ``.`` not."""
    rng = np.random.default_rng(seed)
    sampled = np.array([letter == "x" for letter in mask])
    values = {
        "prompt_id": f"p{seed // 2}",
        "sample_idx": seed % 2,
        "token_ids": rng.integers(0, VOCAB, len(mask)).astype(np.int32),
        "loss_mask": sampled,
        "logprobs": np.where(sampled, -rng.exponential(size=len(mask)), np.nan).astype(np.float32),
        "finish_reason": "stop",
        "policy_version": 4,
        "prompt_len": f"{mask}x".index("x") if prompt_len is None else prompt_len,
    }
    return Rollout(**{**values, **fields})


def occurrences(rollouts: list[Rollout], *, step: int = 0, seed: int = 0) -> Occurrences:
    """Some numbers for every position; a third was not measured."""
    rng = np.random.default_rng(seed)
    num = sum(len(r.positions) for r in rollouts)
    measure = rng.choice([0.0, 1.0, 50.0], num).astype(np.float32)
    return Occurrences(
        rollouts=rollouts,
        step=np.full(num, step, np.int32),
        kl=np.where(measure > 0, rng.exponential(size=num), np.nan).astype(np.float32),
        measure=measure,
        logratio=rng.normal(size=num).astype(np.float32),
        student_entropy=rng.exponential(size=num).astype(np.float32),
        teacher_entropy=rng.exponential(size=num).astype(np.float32),
    )


def random_rollouts(num: int, *, seed: int = 0, longest: int = 40) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    masks = ["." * rng.integers(1, 9) + "x" * rng.integers(1, longest) for _ in range(num)]
    return [rollout(mask, seed=1000 * seed + i) for i, mask in enumerate(masks)]


def write(
    path: Path, groups: Iterable[Occurrences], info: FileInfo = INFO, newlines=NEWLINES
) -> Path:
    with OccurrenceWriter(path, info, newlines=newlines) as writer:
        for group in groups:
            writer.write(group)
    return path


def assert_same_rollout(found: Rollout, expected: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b and type(a) is type(b), field.name


def assert_same(found: Occurrences, expected: Occurrences) -> None:
    for a, b in zip(found.rollouts, expected.rollouts, strict=True):
        assert_same_rollout(a, b)
    for name in ("step", "kl", "measure", "logratio", "student_entropy", "teacher_entropy"):
        a, b = getattr(found, name), getattr(expected, name)
        if b is None:
            assert a is None
        else:
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


# --- round trip -----------------------------------------------------------------------------------


def test_what_is_read_is_bit_for_bit_what_was_written(tmp_path):
    groups = [
        occurrences([rollout("...xxxxx", seed=0), rollout(".x", seed=1)], step=3, seed=1),
        occurrences(
            [
                rollout("..xx...xxx.x", seed=2),  # two turns that nobody sampled
                rollout("...xx", seed=3, teacher_prefix_ids=np.arange(7, dtype=np.int32)),
                rollout("...x", seed=4, teacher_prefix_ids=np.zeros(0, np.int32)),
                rollout("...xx", seed=5, teacher_id="second", prompt_len=2),
                rollout("..xxx", seed=6, finish_reason="length", policy_version=0),
            ],
            step=4,
            seed=2,
        ),
    ]
    path = write(tmp_path / "occ.parquet", groups)
    for found, expected in zip(read(path), groups, strict=True):
        assert_same(found, expected)
    assert read_info(path) == INFO
    assert not (tmp_path / "occ.parquet.partial").exists()


def test_given_responses_come_back_with_nan_logprobs_and_no_version(tmp_path):
    given = rollout(
        "..xxx",
        finish_reason="given",
        policy_version=-1,
        logprobs=np.full(5, np.nan, np.float32),
    )
    group = dataclasses.replace(occurrences([given]), logratio=np.full(3, np.nan, np.float32))
    (found,) = read(write(tmp_path / "occ.parquet", [group]))
    assert_same(found, group)


def test_entropies_that_nobody_knows_are_null_and_come_back_as_none(tmp_path):
    group = dataclasses.replace(
        occurrences([rollout("..xxx")]), student_entropy=None, teacher_entropy=None
    )
    path = write(tmp_path / "occ.parquet", [group])
    assert pq.read_table(path)["teacher_entropy"].null_count == 3
    (found,) = read(path)
    assert_same(found, group)


def test_responses_without_a_token_leave_no_row_and_are_counted(tmp_path):
    empty = rollout("...")
    full = rollout("..xx", seed=7)
    path = write(
        tmp_path / "occ.parquet", [occurrences([empty, full, empty]), occurrences([empty])]
    )
    assert read_info(path).num_empty == 3
    (found,) = read(path)
    assert_same_rollout(found.rollouts[0], full)
    assert pq.read_table(path)["sample"].to_pylist() == [0, 0]


def test_tokens_behind_the_last_sampled_one_are_not_kept(tmp_path):
    (found,) = read(write(tmp_path / "occ.parquet", [occurrences([rollout("..xx.")])]))
    np.testing.assert_array_equal(found.rollouts[0].token_ids, rollout("..xx.").token_ids[:4])


def test_columns_say_where_each_token_stands(tmp_path):
    # Type 7 is a line break, type 8 an empty line: two of them.
    newlines = np.zeros(VOCAB, np.int32)
    newlines[[7, 8]] = [1, 2]
    ids = np.array([7, 7, 1, 2, 7, 3, 8, 8, 4, 5], np.int32)
    one = rollout("..xxxxxxxx", token_ids=ids)
    alone = rollout(".x", seed=1)
    table = pq.read_table(
        write(tmp_path / "occ.parquet", [occurrences([one, alone])], newlines=newlines)
    ).to_pydict()
    assert table["line"][:8] == [0, 0, 0, 1, 1, 3, 5, 5]  # the prompt's breaks do not count
    assert table["column"][:8] == [0, 1, 2, 0, 1, 0, 0, 1]
    assert table["position"] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert table["relative_position"] == pytest.approx([i / 7 for i in range(8)] + [0])
    assert table["sample"] == [0] * 8 + [1]
    assert table["prefix_ids"] == [[7, 7]] + [None] * 7 + [alone.token_ids[:1].tolist()]
    assert table["prompt_len"] == [2] + [None] * 7 + [1]
    assert table["teacher_id"] == ["teacher"] + [None] * 7 + ["teacher"]
    assert table["teacher_prefix_ids"] == [None] * 9


def test_a_turn_nobody_sampled_counts_for_lines_and_stands_before_the_next_token(tmp_path):
    newlines = np.zeros(VOCAB, np.int32)
    newlines[7] = 1
    ids = np.array([1, 2, 7, 3, 4, 5], np.int32)
    table = pq.read_table(
        write(
            tmp_path / "occ.parquet",
            [occurrences([rollout(".x..xx", token_ids=ids)])],
            newlines=newlines,
        )
    ).to_pydict()
    assert table["token_id"] == [2, 4, 5]
    assert table["prefix_ids"] == [[1], [7, 3], None]
    assert (table["line"], table["column"]) == ([0, 1, 1], [0, 1, 2])


def test_line_breaks_of_a_tokenizer(tiny_models):
    from rock_opd.models import load_tokenizer

    tokenizer = load_tokenizer(str(tiny_models / "student"))
    counts = newline_counts(tokenizer, len(tokenizer))
    assert counts.shape == (len(tokenizer),)
    ids = tokenizer("a\nb\n\n  c")["input_ids"]
    assert counts[ids].sum() == 3
    assert all(counts[i] == tokenizer.decode([i]).count("\n") for i in range(0, 1024, 5))


def test_positions_name_the_token_in_its_sequence():
    group = occurrences([rollout("..xx"), rollout("."), rollout(".x.x", seed=1)])
    positions = group.positions
    assert positions.sequence_idx.tolist() == [0, 0, 2, 2]
    assert positions.place.tolist() == [2, 3, 1, 3]
    np.testing.assert_array_equal(positions.token_ids, group.token_ids)


# --- streaming ------------------------------------------------------------------------------------


def test_large_writes_become_several_row_groups_of_whole_rollouts(tmp_path):
    masks = ["." * num + "x" * 5 for num in (100_000, 100_000, 9, 250_000, 300_000, 4)]
    group = occurrences([rollout(mask, seed=i) for i, mask in enumerate(masks)])
    path = write(tmp_path / "occ.parquet", [group])
    parts = list(read(path))
    assert module.GROUP_TOKENS == 262_144
    assert [len(part.rollouts) for part in parts] == [3, 1, 1, 1]
    assert [r.key for part in parts for r in part.rollouts] == [r.key for r in group.rollouts]
    np.testing.assert_array_equal(np.concatenate([part.kl for part in parts]), group.kl)
    assert pq.read_table(path)["sample"].to_numpy()[-1] == 5


def test_memory_does_not_grow_with_the_rows_written_or_read(tmp_path):
    def peaks(num_groups: int) -> list[int]:
        """Most bytes that writing and reading held: numpy's, and Arrow's so far."""
        path = tmp_path / f"{num_groups}.parquet"
        groups = (
            occurrences(random_rollouts(200, seed=seed), step=seed) for seed in range(num_groups)
        )
        found = []
        for work in (
            lambda: write(path, groups),
            lambda: sum(len(rows.kl) for rows in read(path)),
        ):
            tracemalloc.start()
            work()
            found.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return [*found, pa.default_memory_pool().max_memory()]

    few, many = peaks(4), peaks(24)
    for a, b in zip(few, many, strict=True):
        assert b < 1.3 * a


def test_an_error_while_writing_leaves_no_file(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        OccurrenceWriter(tmp_path / "occ.parquet", INFO, newlines=NEWLINES) as writer,
    ):
        writer.write(occurrences([rollout(".xx")]))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"occurrences .*file/occ.parquet cannot be written"):
        write(tmp_path / "file" / "occ.parquet", [])


def test_rows_that_must_not_be_read_are_not_written(tmp_path):
    group = occurrences([rollout(".x"), rollout(".xx", seed=5)])
    kl, measure = np.array([1, np.nan, np.inf], np.float32), np.array([1, 0, 2], np.float32)
    bad = dataclasses.replace(group, kl=kl, measure=measure)
    with pytest.raises(
        NumericsError, match=r"column kl, row 2 \(rollout p2#1, position 1, token \d+\): .*got inf"
    ):
        write(tmp_path / "occ.parquet", [bad])
    with pytest.raises(ValueError, match="reach beyond 3 types"):
        write(tmp_path / "occ.parquet", [group], info=dataclasses.replace(INFO, num_types=3))
    with pytest.raises(ValueError, match="3 sampled positions, but 2 of 'kl'"):
        dataclasses.replace(group, kl=kl[:2])


# --- several files --------------------------------------------------------------------------------


def test_parts_become_one_file_with_samples_numbered_through(tmp_path):
    groups = [occurrences(random_rollouts(3, seed=s), seed=s) for s in range(3)]
    groups.insert(1, occurrences([rollout("..")]))  # a part without rows
    parts = [write(tmp_path / f"{i}.parquet", [g]) for i, g in enumerate(groups)]
    assert merge(parts, tmp_path / "all.parquet") == 9
    whole = list(read(tmp_path / "all.parquet"))
    for found, expected in zip(whole, [groups[0], groups[2], groups[3]], strict=True):
        assert_same(found, expected)
    samples = pq.read_table(tmp_path / "all.parquet")["sample"].to_numpy()
    assert np.unique(samples).tolist() == list(range(9)) and (np.diff(samples) >= 0).all()
    assert read_info(tmp_path / "all.parquet") == dataclasses.replace(INFO, num_empty=1)
    with pytest.raises(DataError, match="all 1 responses are empty"):
        merge(parts[1:2], tmp_path / "none.parquet")
    assert not list(tmp_path.glob("none*"))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for step in (12, 2, 7):
        group = occurrences([rollout(".xx", seed=step), rollout(".", seed=1)], step=step)
        write(tmp_path / f"step_{step:06d}.parquet", [group])
    (tmp_path / "other.parquet").write_text("not read")
    assert [rows.step[0] for rows in read(tmp_path)] == [2, 7, 12]
    assert read_info(tmp_path) == dataclasses.replace(INFO, num_empty=3)


def test_files_of_two_vocabularies_are_no_folder(tmp_path):
    write(tmp_path / "step_1.parquet", [occurrences([rollout(".x")])])
    other = dataclasses.replace(INFO, tokenizer="f" * 16)
    write(tmp_path / "step_2.parquet", [occurrences([rollout(".x")])], info=other)
    with pytest.raises(DataError, match=r"step_2.parquet: tokenizer is f+, but 0123.*step_1"):
        read(tmp_path)


# --- bad files ------------------------------------------------------------------------------------


def tampered(path: Path, change) -> Path:
    """The same file with its rows changed by somebody else's hand."""
    table = pq.read_table(path)
    stored = pq.read_metadata(path).metadata
    table = change(table)
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({NUM_EMPTY_KEY: stored[NUM_EMPTY_KEY]})
    return path


@pytest.fixture
def good(tmp_path) -> Path:
    groups = [occurrences(random_rollouts(20, seed=s), seed=s) for s in range(3)]
    return write(tmp_path / "occ.parquet", groups)


@pytest.mark.parametrize("reader", [read_info, read, build_registry])
def test_a_missing_file_and_an_empty_folder_are_said_at_once(tmp_path, reader):
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        reader(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"the folder holds no step_\*.parquet"):
        reader(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(good, share):
    content = good.read_bytes()
    good.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"occ.parquet: cut short, damaged or no parquet file"):
        read(good)


def test_a_flipped_bit_in_the_data_is_noticed(good):
    content = bytearray(good.read_bytes())
    for place in range(len(content) // 4, len(content) // 2, 50):
        content[place] ^= 0xFF
    good.write_bytes(content)
    with pytest.raises(DataError, match=r"occ\.parquet: cut short, damaged"):
        list(read(good))


def test_another_parquet_file_is_no_occurrence_file(tmp_path):
    pq.write_table(pa.table({"token_id": [1], "count": [2.0]}), tmp_path / "registry.parquet")
    with pytest.raises(DataError, match=r"not one of occurrences \(it has columns token_id, count"):
        read_info(tmp_path / "registry.parquet")


def test_another_format_is_refused(good, tmp_path):
    table = pq.read_table(good)
    said = json.loads(table.schema.metadata[b"rock_opd"])
    table = table.replace_schema_metadata({b"rock_opd": json.dumps({**said, "format": 2})})
    pq.write_table(table, tmp_path / "new.parquet")
    with pytest.raises(DataError, match="written in format 2, this version reads 1"):
        read_info(tmp_path / "new.parquet")


def test_a_file_without_rows_is_refused(tmp_path):
    path = write(tmp_path / "occ.parquet", [occurrences([rollout("..")])])
    with pytest.raises(DataError, match=r"no rows \(1 responses were empty\)"):
        read(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.filter(pc.greater(t["position"], 0)), r"sample 0 lacks its first rows"),
        (lambda t: t.filter(pc.not_equal(t["position"], 1)), r"stands behind position 0 of sam"),
    ],
    ids=["first rows gone", "second rows gone"],
)
def test_rows_that_are_no_longer_whole_responses_are_refused(good, change, says):
    with pytest.raises(DataError, match=says):
        list(read(tampered(good, change)))


def test_a_missing_column_is_named(good):
    def drop(table: pa.Table) -> pa.Table:
        return table.drop_columns(["kl"])

    with pytest.raises(DataError, match="columns are missing: kl"):
        read_info(tampered(good, drop))


def test_a_measured_position_without_a_loss_is_named(good):
    row = 200
    table = pq.read_table(good)
    position = table["position"][row].as_py()

    def spoil(table: pa.Table) -> pa.Table:
        for name, value in (("measure", 1.0), ("kl", np.nan)):
            values = table[name].to_numpy().copy()
            values[row] = value
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(at), pa.array(values))
        return table

    with pytest.raises(
        DataError,
        match=rf"occ.parquet: column kl, row {row} .*position {position}, token \d+\): expected a "
        r"finite KL, as measure is above 0, got nan; score",
    ):
        build_registry(tampered(good, spoil))


def with_value(name: str, row: int, value: object):
    """One cell changed."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        at = table.schema.get_field_index(name)
        field = table.schema.field(at).with_nullable(True)
        return table.set_column(at, field, pa.array(values, field.type))

    return change


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("measure", np.nan, "a finite number, 0 or above, got nan"),
        ("measure", -1.0, "a finite number, 0 or above, got -1.0"),
        ("logratio", np.nan, "a finite number, got nan"),
        ("logratio", np.inf, "a finite number, got inf"),
        ("sampled_logprob", np.nan, "a finite number, got nan"),
        ("sampled_logprob", 0.5, r"a log-probability \(rounding: 0.0001\), got 0.5"),
        ("student_entropy", np.nan, "an entropy of 0 or above"),
        ("teacher_entropy", -0.25, "an entropy of 0 or above .*got -0.25"),
        ("relative_position", np.nan, r"expected position / \(rows of the response - 1\) = .*nan"),
        ("step", -1, "at least 0, got -1"),
        ("policy_version", -2, "at least -1, got -2"),
        ("line", -1, "at least 0"),
        ("kl", None, "a value, got nothing"),
        ("token_id", None, "a value, got nothing"),
        ("finish_reason", None, "a value, got nothing"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_column_and_row(good, name, value, expected):
    path = tampered(good, with_value(name, 30, value))
    with pytest.raises(DataError, match=rf"occ.parquet: column {name}, row 30 .*{expected}"):
        list(read(path))


def test_a_negative_kl_is_rounding_down_to_a_ten_thousandth(tmp_path):
    group = occurrences([rollout(".xxx")])
    measure, kl = np.array([1, 1, 0], np.float32), np.array([-9e-5, -2e-6, np.nan], np.float32)
    rounded = dataclasses.replace(group, measure=measure, kl=kl)
    (found,) = read(write(tmp_path / "occ.parquet", [rounded]))
    np.testing.assert_array_equal(found.kl, kl)

    wrong = dataclasses.replace(rounded, kl=np.array([0.1, -2e-4, np.nan], np.float32))
    with pytest.raises(NumericsError, match=r"column kl, row 1 .*a KL of 0 or above"):
        write(tmp_path / "occ.parquet", [wrong])
    sampled = dataclasses.replace(INFO, estimator="sampled")  # a log-ratio, of either sign
    assert len(list(read(write(tmp_path / "occ.parquet", [wrong], info=sampled)))) == 1


def test_a_negative_kl_of_somebody_elses_hand_is_refused(good):
    row = int(np.flatnonzero(pq.read_table(good)["measure"].to_numpy() > 0)[7])
    with pytest.raises(DataError, match=rf"column kl, row {row} .*0 or above .*got -0.3"):
        list(read(tampered(good, with_value("kl", row, -0.3))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: pa.concat_tables([t, t]), r"column sample, row \d+ .*stands behind sample 59"),
        (lambda t: t.take(pa.array(np.random.default_rng(0).permutation(len(t)))), "or sorted"),
        (
            lambda t: pa.concat_tables([t, t.slice(len(t) - 1)]),
            r"stands behind position \d+ of sample 59",
        ),
        (lambda t: t.slice(0, len(t) - 1), r"sample 59 ends here with \d+ of its \d+ rows"),
    ],
    ids=["appended twice", "shuffled", "the last row twice", "the last row gone"],
)
def test_rows_appended_or_cut_are_refused(good, change, says):
    with pytest.raises(DataError, match=says):
        list(read(tampered(good, change)))


def test_a_response_cut_down_to_its_first_row_is_told_by_the_number_of_rows(tmp_path):
    """One row of four looks like a response of one; the file knows how many were written."""
    path = write(tmp_path / "occ.parquet", [occurrences([rollout(".x"), rollout(".xxxx", seed=1)])])
    table, stored = pq.read_table(path), pq.read_metadata(path).metadata
    for some, said in ((table.slice(0, 2), "2 are there: rows were cut"), (table, None)):
        with pq.ParquetWriter(path, some.schema) as writer:
            writer.write_table(some)
            ours = {k: v for k, v in stored.items() if k.startswith(b"rock_opd_")}
            writer.add_key_value_metadata(ours)
        if said is None:
            assert len(list(read(path))) == 1
        else:
            with pytest.raises(DataError, match=f"5 rows were written and {said} later"):
                read(path)


def test_a_file_rewritten_by_another_program_is_told(good):
    pq.write_table(pq.read_table(good), good)
    with pytest.raises(DataError, match="another program rewrote it"):
        read_info(good)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("{", "is damaged: Expecting property name"),
        ("{}", "is damaged: 'format' is missing"),
        ("[]", "is damaged: "),
        ({"student": None}, "'student' is None, expected str"),
        ({"num_types": "50"}, "'num_types' is '50', expected int"),
        ({"num_types": 0}, "num_types 0 and num_empty 0 cannot be"),
        ({"colour": "red"}, "'colour' is unknown"),
    ],
)
def test_damaged_metadata_says_what_is_wrong_with_it(good, said, says):
    if isinstance(said, dict):
        said = json.dumps(json.loads(pq.read_metadata(good).metadata[b"rock_opd"]) | said)
    path = tampered(good, lambda table: table.replace_schema_metadata({b"rock_opd": said}))
    with pytest.raises(DataError, match=rf"metadata \(what the file says of itself\) .*{says}"):
        read_info(path)


def test_a_column_of_another_type_is_named(good):
    def text(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("kl")
        return table.set_column(at, "kl", pa.array(["much"] * len(table)))

    with pytest.raises(DataError, match="column kl is string, expected float"):
        list(read(tampered(good, text)))


def test_one_step_in_two_files_of_a_folder_is_refused(tmp_path):
    for name in ("step_000001", "step_000002"):
        write(tmp_path / f"{name}.parquet", [occurrences([rollout(".x")], step=1)])
    with pytest.raises(DataError, match=r"step_000002.parquet: its step 1 stands in the files bef"):
        list(read(tmp_path))


def test_ids_beyond_the_vocabulary_are_refused(good):
    def spoil(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("token_id")
        ids = pa.array(np.full(len(table), VOCAB, np.int32))
        return table.set_column(at, table.schema.field(at), ids)

    with pytest.raises(DataError, match="do not fit the 50 types"):
        list(read(tampered(good, spoil)))


# --- the registry of a file -----------------------------------------------------------------------


def online(groups: list[Occurrences], *, decay: float) -> Registry:
    """What a run does: one update with all of a step."""
    registry = Registry(VOCAB, decay=decay)
    for group in groups:
        stats = TokenStats.from_rows(
            group.token_ids, group.kl, group.measure, group.logratio, num_types=VOCAB
        )
        registry.update(stats)
    return registry


def assert_same_registry(found: Registry, expected: Registry) -> None:
    assert found.num_updates == expected.num_updates
    np.testing.assert_array_equal(found.stats.count, expected.stats.count)
    for name in ("mean_loss", "score"):
        a, b = getattr(found, name)(), getattr(expected, name)()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    for field in dataclasses.fields(TokenStats):
        a, b = getattr(found.stats, field.name), getattr(expected.stats, field.name)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_a_file_gives_the_registry_of_the_run(tmp_path, decay):
    groups = [occurrences(random_rollouts(9, seed=s), step=s, seed=s) for s in range(1, 6)]
    groups[2] = occurrences([rollout("..")], step=3)  # every response was empty
    expected = online(groups, decay=decay)
    one = write(tmp_path / "one.parquet", groups)
    assert_same_registry(build_registry(one, decay=decay), expected)
    pieces = [group.select(i, i + 1) for group in groups for i in range(len(group.rollouts))]
    many = write(tmp_path / "many.parquet", pieces)  # a step in many row groups
    assert pq.ParquetFile(many).num_row_groups == 36
    assert_same_registry(build_registry(many, decay=decay), expected)
    for step, group in enumerate(groups, start=1):
        write(tmp_path / f"step_{step:06d}.parquet", [group])
    assert_same_registry(build_registry(tmp_path, decay=decay), expected)


def test_decay_weighs_a_step_by_its_age(tmp_path):
    token = {"token_ids": np.array([1, 9], np.int32)}
    groups = [occurrences([rollout(".x", **token)], step=step) for step in (1, 2, 4)]
    registry = build_registry(write(tmp_path / "occ.parquet", groups), decay=0.5)
    assert registry.stats.count[9] == 0.125 + 0.25 + 1  # step 3 left no row, and decayed
    assert registry.num_updates == 4


def test_steps_that_go_backwards_are_refused(tmp_path):
    groups = [occurrences([rollout(".x")], step=step) for step in (2, 1)]
    with pytest.raises(DataError, match="step 1 stands behind step 2"):
        build_registry(write(tmp_path / "occ.parquet", groups))
