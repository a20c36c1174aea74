"""Knockout: ban one token type at every decoding step, and see what it does to accuracy.

The problems are answered once with nothing banned (the base) and once per candidate type (``bans``
says how that is done without doing work twice). A study that broke off goes on where it was.

Shape letters: ``P`` problems, ``C`` candidates, ``A`` answers (P x samples).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rock_opd.bans import Answer, Sampler, Task, mixed_batches
from rock_opd.config import Recipe
from rock_opd.core.analysis import PILLAR, knockout_counts, knockout_table
from rock_opd.data import load_problems
from rock_opd.errors import ConfigError, DataError
from rock_opd.models import (
    load_tokenizer,
    model_folder,
    num_real_ids,
    stop_token_ids,
    tokenizer_fingerprint,
)
from rock_opd.plots.knockout import knockout_figure
from rock_opd.rocklist import read_ids, write_ids
from rock_opd.tables import Columns, Report, Say, Track, write_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOT = 4
"""Answers sent to the engines at once, in multiples of what they decode at once."""

Grader = Callable[[list[str], list[str]], list[bool]]
"""(answers, gold answers) -> which are right."""


# --- results on disk ------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Parts:
    """What is finished, in a file of JSON lines: a header with what must not change, the base, then
    one candidate after another."""

    path: Path
    base: dict[str, Any] | None = None
    """ids (A lists), stopped [A], right [P], generated."""
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Candidate -> right [P] (share of its samples), reused, continued, truncated (answers),
    generated, tokens."""

    @classmethod
    def open(cls, path: Path, fingerprint: dict[str, Any]) -> Parts:
        """Reads the file, or begins it. A last line that was cut off is dropped.

        Raises:
            ConfigError: it belongs to another study (what differs is named), or cannot be written.
            DataError: damaged.
        """
        parts = cls(path=path)
        try:
            whole = _whole_lines(path)
            if not whole:
                path.parent.mkdir(parents=True, exist_ok=True)
                parts._append({"knockout": fingerprint})
                return parts
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None
        try:
            header, *rows = map(json.loads, whole)
            before = header["knockout"]
            for row in rows:
                if "candidate" in row:
                    parts.done[row["candidate"]] = row
                else:
                    parts.base = row["base"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: not the results of a knockout ({error!r}); remove it to start over"
            ) from None
        for key in fingerprint:
            if before.get(key) != fingerprint[key]:
                raise ConfigError(
                    f"{path} was begun with another {key} ({before.get(key)!r}, now "
                    f"{fingerprint[key]!r}); remove it to start over, or choose another --output"
                )
        return parts

    def base_answers(self) -> list[Answer]:
        assert self.base is not None
        return [
            Answer(token_ids=np.asarray(ids, np.int32), stopped=stopped, num_sampled=len(ids))
            for ids, stopped in zip(self.base["ids"], self.base["stopped"], strict=True)
        ]

    def keep_base(self, answers: list[Answer], right: np.ndarray) -> None:
        self.base = {
            "ids": [answer.token_ids.tolist() for answer in answers],
            "stopped": [answer.stopped for answer in answers],
            "right": right.tolist(),
            "generated": sum(answer.num_sampled for answer in answers),
        }
        self._append({"base": self.base})

    def keep(self, candidate: int, answers: list[Answer], right: np.ndarray) -> None:
        sampled = np.array([answer.num_sampled for answer in answers])
        length = np.array([len(answer.token_ids) for answer in answers])
        row = {
            "candidate": candidate,
            "right": right.tolist(),
            "reused": int((sampled == 0).sum()),
            "continued": int(((sampled > 0) & (sampled < length)).sum()),
            "truncated": sum(not answer.stopped for answer in answers),
            "generated": int(sampled.sum()),
            "tokens": int(length.sum()),
        }
        self.done[candidate] = row
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[bytes]:
    """The file's lines; what stands behind the last line break is cut from the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].splitlines()


# --- measuring ------------------------------------------------------------------------------------


class Grades:
    """Grades answers by problem; the same tokens in answer to the same problem only once."""

    def __init__(self, task: Task, decode: Callable[[np.ndarray], str], grader: Grader) -> None:
        self._task, self._decode, self._grader = task, decode, grader
        self._known: dict[tuple[int, bytes], bool] = {}

    def right(self, answers: list[Answer]) -> np.ndarray:
        """float64 [P]: the share of each problem's answers that are right."""
        keys = [
            (place // self._task.samples, hashlib.blake2b(answer.token_ids.tobytes()).digest())
            for place, answer in enumerate(answers)
        ]
        new = {k: a for k, a in zip(keys, answers, strict=True) if k not in self._known}
        if new:
            texts = [self._decode(answer.token_ids) for answer in new.values()]
            golds = [self._task.problems[problem].answer or "" for problem, _ in new]
            self._known.update(zip(new, self._grader(texts, golds), strict=True))
        right = np.array([self._known[key] for key in keys], np.float64)
        return right.reshape(-1, self._task.samples).mean(1)


def measure(
    rollouts: Sampler,
    grades: Grades,
    task: Task,
    candidates: Sequence[int],
    parts: Parts,
    *,
    lot: int,
    reuse: bool,
    say: Say,
    track: Track,
) -> None:
    """Answers and grades whatever ``parts`` lacks, and keeps each candidate as it is finished."""
    if parts.base is None:
        say(f"answering {len(task.problems)} problems with nothing banned")
        requests = task.requests()
        answers = [
            answer
            for begin in range(0, len(requests), lot)
            for answer in task.answer(rollouts, requests[begin : begin + lot])
        ]
        parts.keep_base(answers, grades.right(answers))
    base = parts.base_answers()
    left = [candidate for candidate in candidates if candidate not in parts.done]
    track(len(candidates) - len(left), len(candidates))
    for candidate, answers in mixed_batches(rollouts, task, left, base, lot=lot, reuse=reuse):
        parts.keep(candidate, answers, grades.right(answers))
        track(sum(c in parts.done for c in candidates), len(candidates))


def knock_out(
    cfg: Recipe,
    candidates: Path,
    output: Path,
    *,
    reuse: bool = True,
    address: str | None = None,
    say: Say,
    track: Track,
) -> Report:
    """Bans each candidate type in turn while the student solves ``eval.problems``.

    ``eval`` says how (samples, temperature, max_new_tokens), ``rollout`` with what engines. The
    same command goes on where one broke off (``<output>.parts.jsonl``), also with more candidates.

    Args:
        candidates: list of token ids, as ``rocklist.read_ids`` reads it.
        output: table, .csv or .parquet; beside it come ``<stem>.png`` and, where there are any,
            ``<stem>.pillars.json``: a list for ``policy.guard_file``.
        reuse: False generates every answer whole (see ``bans``).
        address: as for ``driver.connect``.

    Returns:
        Facts: ``num_problems``, ``num_candidates``, ``samples``, ``temperature``,
        ``base_accuracy``, ``base_truncated`` (share), what ``knockout_counts`` counts, ``pairs``
        (candidates x answers) with ``pairs_reused`` and ``pairs_continued`` of them,
        ``tokens_generated`` against ``tokens_in_answers``, ``seconds`` of this command.

    Raises:
        ConfigError: no problems, or an output of another study.
        DataError: an unusable list, file of problems or file of parts.
        RockOPDError: as the engines raise it.
    """
    started = time.monotonic()
    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--output {output}: expected a name ending in .csv or .parquet")
    task, tokenizer, ids = read_task(cfg, candidates, say)
    path = output.with_name(output.name + ".parts.jsonl")
    if output.exists() and not path.exists():
        raise ConfigError(f"{output} exists, without {path.name}; choose another name or remove it")
    parts = Parts.open(path, _fingerprint(cfg, task, tokenizer, reuse=reuse))
    left = [candidate for candidate in ids if candidate not in parts.done]
    if len(left) < len(ids):
        say(f"{len(ids) - len(left)} of {len(ids)} candidates were finished before")
    if left:
        with banning_engines(cfg, address, say) as (rollouts, grader):
            measure(
                rollouts,
                Grades(task, partial(tokenizer.decode, skip_special_tokens=True), grader),
                task,
                ids,
                parts,
                lot=lot_size(cfg),
                reuse=reuse,
                say=say,
                track=track,
            )
    stops = stop_token_ids(cfg.student.model)
    report = summarize(task, ids, parts, tokenizer, stops, output, seed=cfg.run.seed)
    report.facts["seconds"] = time.monotonic() - started
    return report


def lot_size(cfg: Recipe) -> int:
    """Answers to ask the engines for at once."""
    return LOT * cfg.rollout.max_num_seqs * cfg.rollout.num_workers


def read_task(
    cfg: Recipe, candidates: Path, say: Say
) -> tuple[Task, PreTrainedTokenizerBase, list[int]]:
    """The problems, the student's tokenizer, and the candidates in the order of their file."""
    from rock_opd.driver import skipped_lines

    if cfg.eval.problems is None:
        raise ConfigError(
            "knockout needs problems with answers: give --task, or eval.problems in the recipe"
        )
    tokenizer = load_tokenizer(cfg.student.model)
    width = num_real_ids(cfg.student.model, cfg.student.model)
    ids, notice = read_ids(candidates, num_types=width, tokenizer=tokenizer_fingerprint(tokenizer))
    if notice is not None:
        say(notice)
    problems = load_problems(
        cfg.data, cfg.eval, tokenizer=tokenizer, max_prompt_tokens=cfg.rollout.max_prompt_tokens
    )
    for line in skipped_lines(problems):
        say(line)
    samples = cfg.eval.samples
    if cfg.eval.temperature == 0 and samples > 1:
        say(f"greedy answers are all alike: 1 of a problem, not eval.samples={samples}")
        samples = 1
    task = Task(
        problems=problems.prompts,
        samples=samples,
        temperature=cfg.eval.temperature,
        max_new_tokens=cfg.eval.max_new_tokens,
        seed=cfg.run.seed,
    )
    return task, tokenizer, ids.tolist()


def _fingerprint(
    cfg: Recipe, task: Task, tokenizer: PreTrainedTokenizerBase, *, reuse: bool
) -> dict[str, Any]:
    """What results of one table have in common. More candidates may come later."""
    digest = hashlib.sha256()
    for problem in task.problems:
        digest.update(f"{problem.prompt_id}\0{problem.answer}\0".encode())
        digest.update(np.asarray(problem.token_ids, "<i4").tobytes() + b"\1")
    weights = sorted(model_folder(cfg.student.model).glob("*.safetensors"))
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in weights]
    return {
        "student": cfg.student.model,
        "state of the student's weight files": hashlib.sha256(repr(stamps).encode()).hexdigest(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "set of problems": digest.hexdigest()[:16],
        "number of samples": task.samples,
        "eval.temperature": task.temperature,
        "eval.max_new_tokens": task.max_new_tokens,
        "run.seed": task.seed,
        "rollout.dtype": cfg.rollout.dtype,
        "choice of reuse": reuse,
    }


@contextmanager
def banning_engines(cfg: Recipe, address: str | None, say: Say) -> Iterator[tuple[Sampler, Grader]]:
    """Rollout workers that can ban, and a grader."""
    import ray

    from rock_opd.actors.starting import start_rollouts
    from rock_opd.driver import connect, grade_in_task

    connect(address)
    try:
        say("starting the rollout workers")
        rollouts, release = start_rollouts(
            replace(cfg, placement=replace(cfg.placement, colocate="none")),
            model=cfg.student.model,
            num_real_ids=num_real_ids(cfg.student.model, cfg.student.model),
            stop_token_ids=stop_token_ids(cfg.student.model),
            can_ban=True,
            say=say,
        )
        yield rollouts, partial(grade_in_task, timeout_s=cfg.run.phase_timeout_s)
        release()
    finally:
        ray.shutdown()


# --- the outcome ----------------------------------------------------------------------------------


def summarize(
    task: Task,
    candidates: Sequence[int],
    parts: Parts,
    tokenizer: PreTrainedTokenizerBase,
    stops: tuple[int, ...],
    output: Path,
    *,
    seed: int,
) -> Report:
    """Statistics, table, figure and list of pillars from finished parts."""
    assert parts.base is not None
    rows = [parts.done[candidate] for candidate in candidates]
    table = knockout_table(
        np.array(parts.base["right"]), np.array([row["right"] for row in rows]), seed=seed
    )
    columns = {
        "token_id": np.asarray(candidates, np.int32),
        "text": [tokenizer.decode([candidate]) for candidate in candidates],
        **{
            {"delta_low": "ci_low", "delta_high": "ci_high"}.get(name, name): values
            for name, values in table.items()
        },
        **_occurrences(task, candidates, parts.base_answers()),
        "truncated": np.array([row["truncated"] for row in rows]) / len(parts.base["stopped"]),
        "note": [_note(candidate, tokenizer, stops) for candidate in candidates],
    }
    facts = {
        "num_problems": len(task.problems),
        "num_candidates": len(candidates),
        "samples": task.samples,
        "temperature": task.temperature,
        "base_accuracy": float(np.mean(parts.base["right"])),
        "base_truncated": 1 - float(np.mean(parts.base["stopped"])),
        **knockout_counts(table),
        "pairs": len(candidates) * len(parts.base["stopped"]),
        "pairs_reused": sum(row["reused"] for row in rows),
        "pairs_continued": sum(row["continued"] for row in rows),
        "tokens_generated": parts.base["generated"] + sum(row["generated"] for row in rows),
        "tokens_in_answers": parts.base["generated"] + sum(row["tokens"] for row in rows),
    }
    order = np.argsort(np.nan_to_num(table["delta"]), kind="stable")
    pillars = columns["token_id"][table["verdict"] == PILLAR]
    files = [write_table(output, columns)]
    files += _write_pillars(output, pillars, tokenizer, task)
    files.append(knockout_figure(output.with_suffix(".png"), columns))
    shown = ("token_id", "text", "base_accuracy", "accuracy", "delta", "ci_low", "ci_high")
    shown += ("p", "p_bh", "p_holm", "verdict", "note")
    return Report(
        title="knockout",
        facts=facts,
        lines=_lines(facts, table, pillars, output),
        table={name: [columns[name][i] for i in order] for name in shown},
        files=files,
    )


def _occurrences(
    task: Task, candidates: Sequence[int], base: list[Answer]
) -> dict[str, np.ndarray]:
    """Of each candidate in the base's answers: how often, and in how many problems."""
    of_problem = np.repeat(np.arange(len(task.problems)), task.samples)
    ids = np.concatenate([answer.token_ids for answer in base])
    problem = np.repeat(of_problem, [len(answer.token_ids) for answer in base])
    places = [problem[ids == candidate] for candidate in candidates]
    return {
        "base_occurrences": np.array([len(found) for found in places]),
        "problems_with_it": np.array([len(np.unique(found)) for found in places]),
    }


def _note(candidate: int, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> str:
    if candidate in stops:
        return "ends a response: without it answers run to the length limit, or end otherwise"
    return "special token" if candidate in tokenizer.all_special_ids else ""


def _lines(facts: dict[str, Any], table: Columns, pillars: np.ndarray, output: Path) -> list[str]:
    how = "greedy" if facts["temperature"] == 0 else f"temperature {facts['temperature']:g}"
    lines = [
        f"{facts['num_problems']} problems x {facts['samples']} answers, {how}; base accuracy "
        f"{facts['base_accuracy']:.3f}, {facts['base_truncated']:.1%} cut off by the length limit",
        f"{facts['pillars']} pillars, {facts['stumbling_blocks']} stumbling blocks, "
        f"{facts['neutral']} neutral of {facts['num_candidates']} candidates; corrected for "
        f"{facts['num_candidates']} tests there remain {facts['pillars_bh']} and "
        f"{facts['stumbling_blocks_bh']} (Benjamini-Hochberg), {facts['pillars_holm']} and "
        f"{facts['stumbling_blocks_holm']} (Holm)",
        f"{facts['pairs']} pairs of candidate and answer: {facts['pairs_reused']} are the base's "
        f"own answer (the type is not in it), {facts['pairs_continued']} its beginning, continued; "
        f"{facts['tokens_generated']} of {facts['tokens_in_answers']} tokens were generated",
    ]
    if facts["base_accuracy"] == 0:
        lines.append(
            "the base solves no problem, so a ban can take nothing away: delta is undefined, no "
            "verdict is given; choose an easier task or a longer eval.max_new_tokens"
        )
    elif facts["undefined"]:
        lines.append(f"{facts['undefined']} verdicts are undefined: a single problem is no sample")
    if not len(pillars):
        lines.append("no pillar, so no list of them")
    return lines


def _write_pillars(
    output: Path, pillars: np.ndarray, tokenizer: PreTrainedTokenizerBase, task: Task
) -> list[Path]:
    path = output.with_name(f"{output.stem}.pillars.json")
    if not len(pillars):
        for old in (path, path.with_name(path.stem + ".meta.json")):  # of fewer candidates, before
            old.unlink(missing_ok=True)
        return []
    return write_ids(
        path,
        pillars,
        tokenizer=tokenizer_fingerprint(tokenizer),
        made_by="knockout",
        num_problems=len(task.problems),
    )
