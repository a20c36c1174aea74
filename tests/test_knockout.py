"""Knockout against a small stand-in for the engine: what is generated, kept, counted, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rock_opd.bans import Task, mixed_batches, naive_loop
from rock_opd.errors import ConfigError, DataError
from rock_opd.knockout import Grades, Parts, measure, summarize
from rock_opd.types import Prompt, Rollout, SampleRequest

VOCAB, EOS, LIMIT = 12, 0, 20
NUM_PROBLEMS = 10


class FakeEngine:
    """A model whose next token depends on everything before it: random logits by hash. Greedy, or
    a seeded exponential race; it can ban, and go on from a begun response."""

    def __init__(self) -> None:
        self.calls: list[list[SampleRequest]] = []
        self.fail_after = 10**9

    def generate(self, requests, *, temperature, top_p, max_new_tokens) -> list[Rollout]:
        if len(self.calls) >= self.fail_after:
            raise RuntimeError("out of memory")
        self.calls.append(requests)
        return [self._answer(r, temperature, max_new_tokens) for r in requests]

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.calls))

    def _answer(self, request: SampleRequest, temperature: float, limit: int) -> Rollout:
        race = np.random.default_rng(request.seed)
        ids = [*request.prompt.token_ids.tolist(), *request.begun]
        first, end = len(ids), len(request.prompt.token_ids) + limit
        while len(ids) < end and not (len(ids) > first and ids[-1] == EOS):
            logits = np.random.default_rng(ids).normal(0, 2, VOCAB)
            logits[EOS] -= 1
            logits[list(request.banned_ids)] = -np.inf
            if temperature:
                logits = logits / temperature - np.log(race.exponential(size=VOCAB))
            ids.append(int(logits.argmax()))
        mask = np.arange(len(ids)) >= first
        return Rollout(
            prompt_id=request.prompt.prompt_id,
            sample_idx=request.sample_idx,
            token_ids=np.array(ids, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
            finish_reason="stop" if ids[-1] == EOS else "length",
            policy_version=0,
            prompt_len=len(request.prompt.token_ids),
        )


class FakeTokenizer:
    all_special_ids = (0, 1)

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(VOCAB)}

    eos_token_id = EOS

    def decode(self, ids: Any) -> str:
        return "".join(f"<{i}>" for i in ids)


def task(*, samples: int = 1, temperature: float = 0.0, num: int = NUM_PROBLEMS) -> Task:
    problems = tuple(
        Prompt(prompt_id=f"p{i}", token_ids=np.array([i + 1, 3], np.int32), answer=str(i))
        for i in range(num)
    )
    return Task(
        problems=problems,
        samples=samples,
        temperature=temperature,
        max_new_tokens=LIMIT,
        seed=0,
    )


def ids_of(answers: list) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


# --- answering under bans -------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("temperature", "samples"), [(0.0, 1), (1.0, 3)])
def test_mixed_batches_give_the_naive_loops_answers(temperature: float, samples: int, reuse: bool):
    it, candidates = task(samples=samples, temperature=temperature), [5, EOS, 9, 3]
    naive = dict(naive_loop(FakeEngine(), it, candidates))
    assert all(v not in ids for v, answers in naive.items() for ids in ids_of(answers))

    engine = FakeEngine()
    base = it.answer(engine, it.requests())
    mixed = dict(mixed_batches(engine, it, candidates, base, lot=7, reuse=reuse))
    assert {v: ids_of(a) for v, a in mixed.items()} == {v: ids_of(a) for v, a in naive.items()}
    assert [[a.stopped for a in mixed[v]] for v in candidates] == [
        [a.stopped for a in naive[v]] for v in candidates
    ]

    sizes = [len(call) for call in engine.calls[1:]]
    assert max(sizes) == 7 and all(size == 7 for size in sizes[:-1])
    assert max(len({r.banned_ids for r in call}) for call in engine.calls[1:]) > 1
    bitten = sum(v in ids for v in candidates for ids in ids_of(base))
    pairs = len(candidates) * len(base)
    assert sum(sizes) == (bitten if reuse else pairs)
    assert 0 < bitten < pairs


def test_a_greedy_answer_goes_on_from_the_first_place_of_the_banned_type():
    it, engine = task(), FakeEngine()
    base = it.answer(engine, it.requests())
    v = int(np.bincount(np.concatenate([a.token_ids for a in base]))[1:].argmax()) + 1
    ((_, answers),) = mixed_batches(engine, it, [v], base, lot=100)
    (call,) = engine.calls[1:]
    begun = {r.prompt.prompt_id: list(r.begun) for r in call}
    for i, (before, answer) in enumerate(zip(ids_of(base), answers, strict=True)):
        if v not in before:
            assert answer.token_ids.tolist() == before and answer.num_sampled == 0
        else:
            assert begun[f"p{i}"] == before[: before.index(v)]
            assert answer.num_sampled == len(answer.token_ids) - before.index(v)
    assert any(begun.values())


def test_a_sampled_answer_is_never_begun():
    it, engine = task(samples=2, temperature=0.7), FakeEngine()
    base = it.answer(engine, it.requests())
    dict(mixed_batches(engine, it, [5, 9], base, lot=100))
    assert all(r.begun == () and r.banned_ids for call in engine.calls[1:] for r in call)


def test_a_ban_changes_no_seed():
    it = task(samples=2)
    assert [r.seed for r in it.requests()] == [r.seed for r in it.requests(5)]
    assert len({r.seed for r in it.requests()}) == 2 * NUM_PROBLEMS


# --- keeping what is finished ---------------------------------------------------------------------


class FakeGrader:
    """An even number of fives is right."""

    def __init__(self, right: bool | None = None) -> None:
        self.right, self.seen = right, []

    def __call__(self, answers: list[str], golds: list[str]) -> list[bool]:
        self.seen += zip(answers, golds, strict=True)
        if self.right is not None:
            return [self.right] * len(answers)
        return [answer.count("<5>") % 2 == 0 for answer in answers]


def run(engine: Any, parts: Parts, candidates: list[int], it: Task, **changed: Any) -> FakeGrader:
    grader = changed.pop("grader", FakeGrader())
    measure(
        engine,
        Grades(it, FakeTokenizer().decode, grader),
        it,
        candidates,
        parts,
        lot=changed.pop("lot", 6),
        reuse=True,
        say=lambda line: None,
        track=changed.pop("track", lambda done, total: None),
    )
    return grader


def test_a_study_that_broke_off_goes_on_and_ends_as_one_that_did_not(tmp_path: Path):
    it, candidates, path = task(), [5, 9, 3, 7, EOS], tmp_path / "k.parts.jsonl"
    whole = Parts.open(tmp_path / "whole.jsonl", {"x": 1})
    run(full := FakeEngine(), whole, candidates, it)

    broken = FakeEngine()
    broken.fail_after = 6
    with pytest.raises(RuntimeError, match="out of memory"):
        run(broken, Parts.open(path, {"x": 1}), candidates, it)
    with path.open("a") as file:
        file.write('{"candidate": 3, "right": [1.0, 0.')  # the machine went down while writing

    parts, engine, steps = Parts.open(path, {"x": 1}), FakeEngine(), []
    before = set(parts.done)
    assert before and before < set(candidates)
    run(engine, parts, candidates, it, track=lambda done, total: steps.append((done, total)))
    assert parts.done == whole.done and parts.base == whole.base
    assert {r.banned_ids[0] for call in engine.calls for r in call} == set(candidates) - before
    assert 0 < engine.num_requests < full.num_requests
    assert steps[0] == (len(before), 5) and steps[-1] == (5, 5)

    again = Parts.open(path, {"x": 1})
    assert again.done == whole.done
    run(idle := FakeEngine(), again, candidates, it)
    assert idle.calls == []


def test_results_of_another_study_are_not_added_to(tmp_path: Path):
    path = tmp_path / "k.parts.jsonl"
    Parts.open(path, {"eval.temperature": 0.0, "run.seed": 1})
    Parts.open(path, {"eval.temperature": 0.0, "run.seed": 1})
    with pytest.raises(ConfigError, match=r"begun with another run.seed \(1, now 2\); remove it"):
        Parts.open(path, {"eval.temperature": 0.0, "run.seed": 2})
    path.write_text('{"knockout": {}}\n{"candi\n')
    with pytest.raises(DataError, match=r"k.parts.jsonl: not the results of a knockout"):
        Parts.open(path, {})


def test_the_same_answer_to_a_problem_is_graded_once(tmp_path: Path):
    it, parts = task(), Parts.open(tmp_path / "p.jsonl", {})
    grader = run(FakeEngine(), parts, [5, 9, 3, 7], it)
    assert len(set(grader.seen)) == len(grader.seen) < 5 * NUM_PROBLEMS
    reused = sum(row["reused"] for row in parts.done.values())
    assert len(grader.seen) <= 5 * NUM_PROBLEMS - reused


# --- the outcome ----------------------------------------------------------------------------------


def outcome(parts: Parts, candidates: list[int], it: Task, output: Path) -> Any:
    return summarize(it, candidates, parts, FakeTokenizer(), (EOS,), output, seed=0)


def read(path: Path) -> dict[str, list]:
    import pyarrow.csv as pc

    return pc.read_csv(path).to_pydict()


def test_the_table_counts_the_answers_it_speaks_of(tmp_path: Path):
    it, candidates = task(num=40), [5, EOS, 11]
    parts = Parts.open(tmp_path / "p.jsonl", {})
    engine = FakeEngine()
    run(engine, parts, candidates, it)
    report = outcome(parts, candidates, it, tmp_path / "k.csv")
    table, facts = read(tmp_path / "k.csv"), report.facts

    base = parts.base["ids"]
    right = [ids.count(5) % 2 == 0 for ids in base]
    assert facts["base_accuracy"] == pytest.approx(np.mean(right))
    assert table["base_accuracy"] == pytest.approx([np.mean(right)] * 3)
    assert table["accuracy"][0] == 1.0  # without a five their number is even
    assert table["delta"][0] == pytest.approx(1 - np.mean(right))
    assert table["verdict"][0] == "stumbling block"
    assert table["base_occurrences"] == [sum(ids.count(v) for ids in base) for v in candidates]
    assert table["problems_with_it"] == [sum(v in ids for ids in base) for v in candidates]
    assert table["note"][1].startswith("ends a response") and table["note"][::2] == ["", ""]
    assert table["text"][0] == "<5>"
    assert table["truncated"][1] == 1.0  # nothing else ends a response
    assert facts["pairs"] == 120
    assert facts["pairs_reused"] == 120 - sum(table["problems_with_it"])
    generated = sum(
        len(r.token_ids) - r.prompt_len - len(q.begun)
        for call in engine.calls
        for q, r in zip(
            call,
            FakeEngine().generate(call, temperature=0.0, top_p=1.0, max_new_tokens=LIMIT),
            strict=True,
        )
    )
    assert facts["tokens_generated"] == generated < facts["tokens_in_answers"]
    assert json.loads(report.to_json())["stumbling_blocks"] == facts["stumbling_blocks"]


def test_pillars_are_written_as_a_list_for_the_guard(tmp_path: Path):
    it, candidates = task(num=40), [9, 5]
    parts = Parts.open(tmp_path / "p.jsonl", {})

    class NeedsNine(FakeGrader):
        def __call__(self, answers: list[str], golds: list[str]) -> list[bool]:
            return ["<9>" in answer for answer in answers]

    run(FakeEngine(), parts, candidates, it, grader=NeedsNine())
    report = outcome(parts, candidates, it, tmp_path / "k.csv")
    assert report.facts["pillars"] == 1
    assert json.loads((tmp_path / "k.pillars.json").read_text()) == [9]
    assert tmp_path / "k.pillars.json" in report.files and tmp_path / "k.png" in report.files

    outcome(parts, [5], it, tmp_path / "k.csv")  # an old list does not outlive its verdict
    assert not list(tmp_path.glob("k.pillars*"))


def test_without_a_solved_problem_no_delta_is_claimed(tmp_path: Path):
    it, parts = task(), Parts.open(tmp_path / "p.jsonl", {})
    run(FakeEngine(), parts, [5, 9], it, grader=FakeGrader(right=False))
    report = outcome(parts, [5, 9], it, tmp_path / "k.csv")
    assert report.facts["undefined"] == 2 and report.facts["pillars"] == 0
    assert read(tmp_path / "k.csv")["verdict"] == ["undefined", "undefined"]
    assert np.isnan(report.table["delta"]).all()
    assert any("the base solves no problem" in line for line in report.lines)
    assert any("no pillar" in line for line in report.lines)


# --- the command, before an engine is started -----------------------------------------------------


def knock(tiny_models: Path, folder: Path, ids: object, *overrides: str, **changed: Any) -> Any:
    from rock_opd.knockout import knock_out
    from rock_opd.recipe_file import build_recipe

    (folder / "ids.json").write_text(json.dumps(ids))
    settings = {"student.model": tiny_models / "student"} | changed
    cfg = build_recipe(
        {}, [*(f"{k}={v}" for k, v in settings.items()), *overrides], needed=("student.model",)
    )
    return knock_out(
        cfg,
        folder / "ids.json",
        folder / "out.csv",
        address="127.0.0.1:1",  # nobody is there: none of these gets so far
        say=lambda line: None,
        track=lambda done, total: None,
    )


def test_unusable_input_is_refused_before_ray_starts(tiny_models: Path, tmp_path: Path):
    problems = f"eval.problems={tiny_models / 'problems.jsonl'}"
    with pytest.raises(DataError, match="1024"):
        knock(tiny_models, tmp_path, [5, 1024], problems)
    with pytest.raises(DataError):
        knock(tiny_models, tmp_path, [], problems)
    with pytest.raises(ConfigError, match=r"give --task, or eval\.problems"):
        knock(tiny_models, tmp_path, [5])
    (tmp_path / "out.csv").write_text("somebody else's")
    with pytest.raises(ConfigError, match=r"out.csv exists, without out.csv.parts.jsonl"):
        knock(tiny_models, tmp_path, [5], problems)


def test_the_command_ends_to_end_and_again_without_an_engine(tiny_models: Path, tmp_path: Path):
    (tmp_path / "ids.json").write_text("[5, 2, 300]")
    output = tmp_path / "out" / "knockout.csv"
    args = [
        *(sys.executable, "-m", "rock_opd", "knockout", "--json", "-o", str(output)),
        *("--candidates", str(tmp_path / "ids.json"), "--student", str(tiny_models / "student")),
        *("--task", str(tiny_models / "problems.jsonl")),
        *("eval.max_new_tokens=16", "rollout.dtype=float32", "run.device=cpu"),
    ]

    def finish(*more: str) -> dict[str, Any]:
        done = subprocess.run(
            [*args, *more], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return json.loads(done.stdout)

    facts = finish()
    num = len((tiny_models / "problems.jsonl").read_text().splitlines())
    assert facts["temperature"] == 0 and facts["pairs"] == 3 * num
    assert 0 < facts["pairs_reused"] < facts["pairs"]
    assert facts["tokens_generated"] < facts["tokens_in_answers"]
    table = read(output)
    assert table["token_id"] == [5, 2, 300]
    assert table["note"][1].startswith("ends a response") and table["truncated"][1] == 1.0
    assert (output.parent / "knockout.png").read_bytes().startswith(b"\x89PNG")

    again = finish("--address", "127.0.0.1:1")  # nobody is there, and nobody is needed
    facts.pop("seconds"), again.pop("seconds")
    assert again == facts
