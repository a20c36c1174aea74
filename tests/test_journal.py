"""What the journal of a step gives back, and when it gives nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rock_opd.errors import StorageError
from rock_opd.journal import Journal, pack_rollouts, unpack_rollouts
from rock_opd.types import Prompt, Rollout, SampleRequest


def rollouts(num: int, *, prefix: bool = False) -> list[Rollout]:
    """The first one sampled nothing; a third of them were given (no log-probabilities)."""
    rng = np.random.default_rng(num)
    made = []
    for i in range(num):
        length = int(rng.integers(2, 30))
        mask = rng.random(length) < 0.5 if i else np.zeros(length, bool)
        mask[0] = False
        sampled = rng.normal(size=length) if i % 3 < 2 else np.full(length, np.nan)
        made.append(
            Rollout(
                prompt_id=f"p{i}",
                sample_idx=i,
                token_ids=rng.integers(0, 99, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, sampled, np.nan).astype(np.float32),
                finish_reason=("stop", "length", "given")[i % 3],
                policy_version=i - 1,
                prompt_len=1,
                teacher_id=f"t{i % 2}",
                teacher_prefix_ids=np.arange(i % 3, dtype=np.int32) if prefix and i % 2 else None,
            )
        )
    return made


def assert_same(left: list[Rollout], right: list[Rollout]) -> None:
    for a, b in zip(left, right, strict=True):
        for name in Rollout.__dataclass_fields__:
            one, two = getattr(a, name), getattr(b, name)
            assert type(one) is type(two), name
            if isinstance(one, np.ndarray):
                assert one.dtype == two.dtype, name
                np.testing.assert_array_equal(one, two)
            else:
                assert one == two, name


@pytest.mark.parametrize("num", [0, 1, 7])
def test_packed_rollouts_come_back_exactly_with_and_without_a_teacher_prefix(num):
    for prefix in (False, True):
        before = rollouts(num, prefix=prefix)
        rows, arrays = pack_rollouts(before)
        after = unpack_rollouts(json.loads(json.dumps(rows)), arrays)
        assert_same(before, after)
    if num == 7:  # an empty prefix is not the same as none
        lengths = [
            None if r.teacher_prefix_ids is None else len(r.teacher_prefix_ids) for r in after
        ]
        assert lengths == [None, 1, None, 0, None, 2, None]


def requests(answers: list[Rollout]) -> list[SampleRequest]:
    return [
        SampleRequest(
            prompt=Prompt(prompt_id=r.prompt_id, token_ids=r.token_ids[: r.prompt_len]),
            sample_idx=r.sample_idx,
            seed=0,
        )
        for r in answers
    ]


def test_a_step_comes_back_as_it_was_to_the_run_version_and_prompts_it_was_sampled_for(tmp_path):
    answers = rollouts(7, prefix=True)
    asked, journal = requests(answers), Journal(tmp_path, fingerprint="a")
    journal.write(3, 2, answers)
    found = journal.read(3, 2, asked)
    assert found.refused is None
    assert_same(found.rollouts, answers)
    nothing = journal.read(4, 2, asked)
    assert nothing.rollouts is None and nothing.refused is None


def test_what_a_journal_does_not_answer_is_said_in_one_line(tmp_path):
    answers = rollouts(7)
    asked, journal = requests(answers), Journal(tmp_path, fingerprint="a")
    journal.write(3, 2, answers)
    file = tmp_path / "journal" / "step_000003.npz"
    (tmp_path / "journal" / "step_000004.npz").write_bytes(file.read_bytes())
    other_text = [
        *asked[:6],
        replace(asked[6], prompt=replace(asked[6].prompt, token_ids=np.array([98, 1], np.int32))),
    ]
    cases = {
        "another run wrote it": Journal(tmp_path, fingerprint="b").read(3, 2, asked),
        "by v2 of the student, which is at v1": journal.read(3, 1, asked),
        "it holds step 3": journal.read(4, 2, asked),
        "it answers other prompts": journal.read(3, 2, asked[:6]),
        "prompt p6 was another text then": journal.read(3, 2, other_text),
    }
    for text, found in cases.items():
        assert found.rollouts is None and text in found.refused, text
        assert "\n" not in found.refused and "sampled again" in found.refused


@pytest.mark.parametrize("damage", ["cut", "one bit", "not a file of ours", "empty"])
def test_a_damaged_journal_is_not_used(tmp_path, damage):
    answers = rollouts(7)
    journal = Journal(tmp_path, fingerprint="a")
    journal.write(3, 2, answers)
    file = tmp_path / "journal" / "step_000003.npz"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "one bit":
        at = content.index(answers[3].token_ids.tobytes())
        content[at] ^= 1
    else:
        content = b"" if damage == "empty" else b"hello"
    file.write_bytes(content)
    found = journal.read(3, 2, requests(answers))
    assert found.rollouts is None and "it is damaged" in found.refused


@pytest.mark.parametrize("header", [b"[]", b"null", b"[" * 100_000, b'{"rows": 5}', b"\xff"])
def test_a_journal_whose_header_is_something_else_is_not_used(tmp_path, header):
    answers = rollouts(7)
    journal = Journal(tmp_path, fingerprint="a")
    journal.write(3, 2, answers)
    file = tmp_path / "journal" / "step_000003.npz"
    with np.load(file) as npz:
        arrays = dict(npz) | {"header": np.frombuffer(header, np.uint8)}
    np.savez(file, **arrays)
    found = journal.read(3, 2, requests(answers))
    assert found.rollouts is None and "it is damaged" in found.refused


def test_a_sampled_token_costs_about_eight_bytes(tmp_path):
    num, length = 8, 20_000
    rng = np.random.default_rng(0)
    answers = [
        Rollout(
            prompt_id=f"p{i}",
            sample_idx=0,
            token_ids=rng.integers(0, 150_000, length).astype(np.int32),
            loss_mask=np.arange(length) >= 100,
            logprobs=np.where(np.arange(length) >= 100, -1.0, np.nan).astype(np.float32),
            finish_reason="length",
            policy_version=0,
            prompt_len=100,
        )
        for i in range(num)
    ]
    Journal(tmp_path, fingerprint="a").write(1, 0, answers)
    size = (tmp_path / "journal" / "step_000001.npz").stat().st_size
    assert 8 < size / (num * (length - 100)) < 8.2


def test_steps_that_a_checkpoint_holds_are_dropped_and_half_written_ones_too(tmp_path):
    journal = Journal(tmp_path, fingerprint="a")
    for step in range(1, 6):
        journal.write(step, step - 1, rollouts(1))
    (tmp_path / "journal" / "step_000006.npz.partial").write_text("cut off")
    journal.prune(3)
    names = sorted(p.name for p in (tmp_path / "journal").iterdir())
    assert names == ["step_000004.npz", "step_000005.npz"]
    journal.clear()
    assert not (tmp_path / "journal").exists()
    journal.prune(9)


def test_a_file_size_limit_is_one_line_and_leaves_nothing_half_written(tmp_path):
    """In a process of its own: the limit of a process cannot be lifted again."""
    script = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_journal import rollouts
from rock_opd.errors import StorageError
from rock_opd.journal import Journal
journal = Journal(Path(sys.argv[1]), fingerprint="a")
journal.write(1, 0, rollouts(3))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    journal.write(2, 1, rollouts(60))
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("the journal of step 2 could not be written to ")
    assert "File too large" in line and "kB needed" in line and "free)" in line
    assert [p.name for p in (tmp_path / "journal").iterdir()] == ["step_000001.npz"]


def test_a_journal_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(StorageError, match=r"Not a directory|File exists"):
        Journal(tmp_path, fingerprint="a").write(1, 0, rollouts(1))
