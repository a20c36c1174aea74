"""`rock-opd score`: with roles that compute nothing, what it asks, keeps and refuses; and for real,
with numbers against transformers in float64."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError, DataError, ModelError, NumericsError
from rock_opd.inputs import load_inputs
from rock_opd.models import load_tokenizer, tokenizer_fingerprint
from rock_opd.occurrences import Occurrences, OccurrenceWriter, build_registry, read, read_info
from rock_opd.recipe_file import build_recipe
from rock_opd.sampling import sample_seed
from rock_opd.score import score
from rock_opd.types import Rollout, StepResult, TeacherScores

NUM_PROMPTS = 10
LOTS = 4
"""Ten prompts, three a lot."""


class Roles:
    """Stands in for Ray and the engines: numbers are functions of seed and token."""

    def __init__(self, recipe: Recipe, *, student: float = 0.0, break_at: int = 0) -> None:
        """
        Args:
            student: which student measures: its log-probabilities are -1 - ``student``.
            break_at: number of the call of ``generate`` that is interrupted; 0: none.
        """
        self.rollouts = self.teachers = self.students = self
        self.recipe, self.student, self.break_at = recipe, student, break_at
        self.seeds: list[int] = []
        self.turns: list[str] = []
        self.num_generated = 0
        self.empty = False

    def turn(self, *roles: str) -> None:
        self.turns += roles

    def generate(self, requests, *, temperature, top_p, max_new_tokens):
        self.num_generated += 1
        if self.num_generated == self.break_at:
            raise KeyboardInterrupt
        self.seeds += [request.seed for request in requests]
        return [self._rollout(request, max_new_tokens) for request in requests]

    def _rollout(self, request, longest: int) -> Rollout:
        rng = np.random.default_rng(request.seed)
        response = rng.integers(3, 1000, 0 if self.empty else rng.integers(1, longest + 1))
        prompt = request.prompt.token_ids
        mask = np.arange(len(prompt) + len(response)) >= len(prompt)
        return Rollout(
            prompt_id=request.prompt.prompt_id,
            sample_idx=request.sample_idx,
            token_ids=np.concatenate([prompt, response]).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
            finish_reason="length",
            policy_version=0,
            prompt_len=len(prompt),
        )

    def score(self, deal, rollouts):
        return [
            TeacherScores(
                key=r.key,
                logprobs=np.full(len(r.positions), -1.5, np.float32),
                entropy=(r.token_ids[r.positions] % 5).astype(np.float32),
            )
            for r in rollouts
        ]

    def clear(self) -> int:
        return 0

    def measure(self, batches, *, entropy):
        results = []
        for part in batches:
            ids = np.concatenate([b.token_ids[b.predicted] for b in part])
            results.append(
                StepResult(
                    index=np.concatenate([b.index for b in part]),
                    kl=(0.1 * (ids % 7)).astype(np.float32),
                    logprobs=np.full(len(ids), -1.0 - self.student, np.float32),
                    loss=0.0,
                    grad_norm=0.0,
                    learning_rate=0.0,
                    mask_version=0,
                    policy_version=0,
                    num_empty_batches=0,
                    entropy=(ids % 3).astype(np.float32) if entropy else None,
                )
            )
        return results


class Engines:
    """Starts ``Roles`` in this process, and remembers them."""

    def __init__(self, **settings) -> None:
        self.settings, self.started, self.asked = settings, [], []

    @contextmanager
    def __call__(self, recipe, *, samples, num_real_ids, address, say):
        self.asked.append({"samples": samples, "num_real_ids": num_real_ids, "recipe": recipe})
        empty = self.settings.pop("empty", False)
        roles = Roles(recipe, **self.settings)
        roles.empty = empty
        self.started.append(roles)
        yield roles


class Bench:
    """A folder with prompts, and a person at the terminal."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models, self.output = folder, models, folder / "occ.parquet"
        self.lines: list[str] = []
        self.done: list[tuple[int, int]] = []
        self.prompts(NUM_PROMPTS)

    def prompts(self, num: int, **fields) -> None:
        rows = [{"id": f"p{i}", "prompt": f"Count to {i}.", **fields} for i in range(num)]
        (self.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def recipe(self, *overrides: str) -> Recipe:
        base = {
            "run": {"device": "cpu", "seed": 5},
            "data": {"prompts": str(self.folder / "prompts.jsonl")},
            "student": {"model": str(self.models / "student"), "num_ranks": 2},
            "teacher": {"model": str(self.models / "teacher")},
            "rollout": {
                "prompts_per_step": 3,
                "samples_per_prompt": 2,
                "max_prompt_tokens": 64,
                "max_new_tokens": 20,
                "temperature": 0.7,
            },
        }
        return build_recipe(base, list(overrides), needed=("teacher.model", "student.model"))

    def score(self, *overrides: str, engines: Engines | None = None, output=None, reuse=None):
        return score(
            self.recipe(*overrides),
            output or self.output,
            reuse=reuse,
            address=None,
            say=self.lines.append,
            track=lambda *done: self.done.append(done),
            engines=engines or Engines(),
        )


@pytest.fixture
def bench(tmp_path, tiny_models) -> Bench:
    return Bench(tmp_path, tiny_models)


def rollouts(path: Path) -> list[Rollout]:
    return [rollout for rows in read(path) for rollout in rows.rollouts]


def test_every_prompt_is_answered_in_order_with_the_seeds_of_step_0(bench):
    engines = Engines()
    report = bench.score(engines=engines)
    expected = [(f"p{i}", j) for i in range(NUM_PROMPTS) for j in range(2)]
    assert [(r.prompt_id, r.sample_idx) for r in rollouts(bench.output)] == expected
    assert engines.started[0].seeds == [sample_seed(5, 0, *pair) for pair in expected]
    assert engines.asked[0]["samples"] and engines.asked[0]["num_real_ids"] == 1024
    assert engines.started[0].turns == ["rollout", "teacher", "student"] * LOTS
    assert bench.done == [(done, LOTS) for done in range(LOTS + 1)]
    assert report.facts["num_samples"] == 20 and report.files == [bench.output]
    assert not bench.output.with_name("occ.parquet.parts").exists()


def test_a_row_holds_what_student_teacher_and_sampler_said(bench):
    report = bench.score()
    table = pq.read_table(bench.output).to_pydict()
    ids = np.array(table["token_id"])
    np.testing.assert_allclose(table["kl"], 0.1 * (ids % 7), atol=1e-6)
    assert table["student_entropy"] == (ids % 3).tolist()
    assert table["teacher_entropy"] == (ids % 5).tolist()
    assert set(table["logratio"]) == {0.5}  # -1.0 of the student, -1.5 of the teacher
    assert set(table["sampled_logprob"]) == {-1.0} and set(table["measure"]) == {1.0}
    assert set(table["step"]) == {0}
    tokenizer = load_tokenizer(str(bench.models / "student"))
    info = read_info(bench.output)
    assert info.tokenizer == tokenizer_fingerprint(tokenizer) and info.num_types == 1024
    assert (info.student, info.teacher) == tuple(
        str(bench.models / name) for name in ("student", "teacher")
    )
    assert (info.estimator, info.temperature, info.top_p) == ("hidden", 0.7, 1.0)
    assert info.num_empty == 0

    facts = report.facts
    assert facts["num_rows"] == len(ids)
    assert facts["mean_kl"] == pytest.approx((0.1 * (ids % 7)).mean())
    assert facts["mean_logratio"] == pytest.approx(0.5)
    assert facts["rows_per_s"] > 0 and facts["peak_rss_bytes"] > 50 << 20
    assert {"start", "generate", "measure", "write", "merge"} == facts["phase_s"].keys()
    assert len(report.table["text"]) == 20
    score_column = list(report.table["score"])
    assert score_column == sorted(score_column, reverse=True)
    json.loads(report.to_json())


def test_a_start_that_broke_off_goes_on_and_ends_as_if_it_had_not(bench, tmp_path):
    bench.score(output=tmp_path / "whole.parquet")
    first = Engines(break_at=3)
    with pytest.raises(KeyboardInterrupt):
        bench.score(engines=first)
    parts = bench.output.with_name("occ.parquet.parts")
    assert len(list(parts.glob("*.parquet"))) == 2 and not bench.output.exists()

    second = Engines()
    report = bench.score(engines=second)
    assert "2 of 4 lots are there already; going on after them" in bench.lines
    assert second.started[0].num_generated == 2
    assert pq.read_table(bench.output).equals(pq.read_table(tmp_path / "whole.parquet"))
    assert not parts.exists()
    assert report.facts["num_samples"] == 20  # of the file, not of this start


def test_parts_that_only_wait_to_be_put_together_start_no_engine(bench):
    in_the_way = bench.output.with_name("occ.parquet.partial")
    in_the_way.mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        bench.score()
    in_the_way.rmdir()
    engines = Engines()
    report = bench.score(engines=engines)
    assert engines.started == [] and report.facts["rows_per_s"] is None
    assert report.facts["num_samples"] == 20


def break_off(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.score(engines=Engines(break_at=2))


@pytest.mark.parametrize(
    "override, said",
    [
        ("rollout.temperature=1.0", r"rollout.temperature was 0.7, is 1.0"),
        ("run.seed=6", "run.seed was 5, is 6"),
        ("teacher.payload=topk_tail", "teacher.payload was hidden, is topk_tail"),
        ("student.model={models}/student_untied", "student.model, student's weights"),
        ("data.limit=4", "prompts was"),
    ],
)
def test_parts_of_other_settings_are_not_mixed_in(bench, override, said):
    break_off(bench)
    with pytest.raises(ConfigError, match=rf"parts made with other settings.*{said}.*remove"):
        bench.score(override.format(models=bench.models))


def test_parts_of_a_student_that_was_written_again_are_not_mixed_in(bench, tmp_path):
    copy = shutil.copytree(bench.models / "student", tmp_path / "student")
    with pytest.raises(KeyboardInterrupt):
        bench.score(f"student.model={copy}", engines=Engines(break_at=2))
    os.utime(copy / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConfigError, match="student's weights was"):
        bench.score(f"student.model={copy}")


def test_nothing_is_written_over(bench):
    bench.output.write_text("mine")
    with pytest.raises(ConfigError, match=r"occ\.parquet exists"):
        bench.score()
    other = bench.folder / "other.parquet"
    (bench.folder / "other.parquet.parts").mkdir()
    (bench.folder / "other.parquet.parts" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="is in the way: it holds no parts"):
        bench.score(output=other)


@pytest.mark.parametrize(
    "name, config, said",
    [
        ("student", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ("student", {"quantization_config": {"quant_method": "gptq"}}, "is quantised"),
        ("teacher", {"max_position_embeddings": 64}, "reads at most 64 tokens"),
    ],
)
def test_models_that_a_run_refuses_are_refused_before_an_engine_starts(
    bench, tmp_path, name, config, said
):
    copy = shutil.copytree(bench.models / name, tmp_path / name)
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    engines = Engines()
    with pytest.raises(ModelError, match=said):
        bench.score(f"{name}.model={copy}", engines=engines)
    with pytest.raises(ModelError, match=said):
        load_inputs(bench.recipe(f"{name}.model={copy}"))
    assert engines.started == []


def test_a_teacher_on_servers_needs_no_weights_here(bench, tmp_path):
    teacher = shutil.copytree(bench.models / "teacher", tmp_path / "teacher")
    (teacher / "model.safetensors").unlink()
    named = f"teacher.model={teacher}"
    with pytest.raises(ModelError, match="teacher"):
        bench.score(named)
    remote = ("teacher.engine=http", "teacher.urls=[http://127.0.0.1:9]")
    bench.score(named, *remote, "teacher.payload=topk_tail")
    assert bench.output.exists()


def test_a_sampler_that_is_not_the_student_stops_it(bench):
    with pytest.raises(NumericsError, match=r"differ by 2 nats.*max_logprob_gap=0.5"):
        bench.score(engines=Engines(student=2.0))


def test_responses_that_are_all_empty_give_no_file(bench):
    with pytest.raises(DataError, match="all 20 responses are empty"):
        bench.score(engines=Engines(empty=True))
    assert not bench.output.exists()


def test_a_file_of_given_responses_is_scored_as_it_stands(bench):
    bench.prompts(4, response="One, two.")
    engines = Engines()
    bench.score("data.source=dataset", engines=engines)
    found = rollouts(bench.output)
    assert not engines.asked[0]["samples"] and engines.started[0].seeds == []
    assert [r.finish_reason for r in found] == ["given"] * 4
    assert all(np.isnan(r.logprobs).all() and r.policy_version == -1 for r in found)
    assert set(pq.read_table(bench.output)["logratio"].to_pylist()) == {0.5}


# --- the same responses, another student ----------------------------------------------------------


@pytest.fixture
def occurrences_of_a_run(bench) -> Path:
    """A run's folder: two steps, in which each prompt was answered; responses of 30 tokens."""
    bench.score(output=bench.folder / "source.parquet")
    source = list(read(bench.folder / "source.parquet"))
    folder = bench.folder / "occurrences"
    for step in (1, 2):
        info = read_info(bench.folder / "source.parquet")
        path = folder / f"step_{step:06d}.parquet"
        with OccurrenceWriter(path, info, newlines=np.zeros(1024, np.int32)) as writer:
            for rows in source:
                moved = [
                    Rollout(**{**vars_of(r), "policy_version": step - 1}) for r in rows.rollouts
                ]
                writer.write(
                    Occurrences(
                        rollouts=moved,
                        step=np.full_like(rows.step, step),
                        kl=rows.kl,
                        measure=rows.measure,
                        logratio=rows.logratio,
                        student_entropy=None,
                        teacher_entropy=None,
                    )
                )
    return folder


def vars_of(rollout: Rollout) -> dict:
    return {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__}


def test_reused_responses_keep_step_version_and_sampler_and_get_the_other_student(
    bench, occurrences_of_a_run
):
    engines = Engines(student=0.25)
    bench.score(
        "rollout.temperature=1.0", "data.prompts=''", engines=engines, reuse=occurrences_of_a_run
    )
    assert not engines.asked[0]["samples"] and engines.started[0].num_generated == 0
    before = list(read(occurrences_of_a_run))
    after = list(read(bench.output))
    for name in ("step", "kl", "measure"):
        a, b = (np.concatenate([getattr(rows, name) for rows in x]) for x in (before, after))
        np.testing.assert_array_equal(a, b)
    for a, b in zip(
        (r for rows in before for r in rows.rollouts),
        (r for rows in after for r in rows.rollouts),
        strict=True,
    ):
        assert (a.key, a.policy_version) == (b.key, b.policy_version)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    table = pq.read_table(bench.output).to_pydict()
    assert set(table["logratio"]) == {0.25} and set(table["sampled_logprob"]) == {-1.0}
    assert set(table["step"]) == {1, 2}
    assert read_info(bench.output).temperature == 0.7  # what they were sampled with
    one, other = (build_registry(p, decay=0.5) for p in (occurrences_of_a_run, bench.output))
    np.testing.assert_array_equal(one.stats.count, other.stats.count)
    np.testing.assert_allclose(one.score(), other.score(), atol=1e-9)


def test_reusing_goes_on_after_a_break_too(bench, occurrences_of_a_run):
    class Breaking(Roles):
        def score(self, deal, rollouts):
            self.num_generated += 1
            if self.num_generated == 3:
                raise NumericsError("a row is not finite")
            return super().score(deal, rollouts)

    @contextmanager
    def breaking(recipe, **_):
        yield Breaking(recipe)

    with pytest.raises(NumericsError):
        bench.score(engines=breaking, reuse=occurrences_of_a_run)
    bench.score(reuse=occurrences_of_a_run)
    assert "2 of 8 lots are there already; going on after them" in bench.lines
    assert len(rollouts(bench.output)) == 40


def test_there_is_room_for_the_longest_reused_response(bench, occurrences_of_a_run):
    engines = Engines()
    bench.score(
        "rollout.max_prompt_tokens=4",
        "rollout.max_new_tokens=2",
        engines=engines,
        reuse=occurrences_of_a_run,
    )
    longest = max(len(r.token_ids) for r in rollouts(bench.output))
    assert longest > 6
    assert engines.asked[0]["recipe"].rollout.max_model_len == longest


def test_responses_of_another_tokenizer_are_refused_with_both_fingerprints(bench):
    bench.score(output=bench.folder / "source.parquet")
    (rows, *_), info = (
        read(bench.folder / "source.parquet"),
        read_info(bench.folder / "source.parquet"),
    )
    other = bench.folder / "other.parquet"
    with OccurrenceWriter(
        other, replace(info, tokenizer="f" * 16), newlines=np.zeros(1024, np.int32)
    ) as writer:
        writer.write(rows)
    with pytest.raises(DataError, match=rf"tokenizer f+ .*is {info.tokenizer} \(1024\)"):
        bench.score(reuse=other)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_lots(bench):
    def peak(num_lots: int) -> int:
        bench.prompts(3 * num_lots)
        tracemalloc.start()
        bench.score("rollout.max_new_tokens=1900", output=bench.folder / f"{num_lots}.parquet")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    assert peak(40) < 1.3 * peak(4)


# --- for real -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
LIMIT_S = 600


def run_cli(models: Path, output: Path, *more: str) -> dict:
    args = [
        *(sys.executable, "-m", "rock_opd", "score", "--json", "-o", str(output)),
        *("--student", str(models / "student"), "--teacher", str(models / "teacher")),
        *("run.device=cpu", "student.dtype=float32", "student.micro_batch_tokens=512"),
        *("rollout.dtype=float32", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2"),
        *("rollout.max_prompt_tokens=64", "rollout.max_new_tokens=24", "rollout.max_num_seqs=16"),
        *("rollout.kv_cache_bytes=67108864", "teacher.kv_cache_bytes=67108864"),
        *("teacher.dtype=float32", "teacher.max_num_seqs=16", "teacher.max_batched_tokens=1024"),
        *("placement.rollout_cpus=0", "placement.teacher_cpus=0"),
        *more,
    ]
    done = subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def scored(tiny_models, tmp_path_factory) -> tuple[Path, dict]:
    path = tmp_path_factory.mktemp("scored") / "occ.parquet"
    prompts = ["--prompts", str(tiny_models / "prompts.jsonl"), "data.limit=8"]
    return path, run_cli(tiny_models, path, *prompts)


@torch.no_grad()
def test_the_numbers_are_those_of_transformers_in_float64(scored, tiny_models):
    from transformers import AutoModelForCausalLM

    path, facts = scored
    assert facts["num_samples"] == 16 and facts["num_rows"] > 50
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(
            tiny_models / name, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        for name in ("student", "teacher")
    )
    for rows in read(path):
        start = 0
        for rollout in rows.rollouts:
            ids = torch.tensor(rollout.token_ids.astype(np.int64))[None]
            at = rollout.positions
            log_q, log_p = (
                torch.log_softmax(model(ids).logits[0, at - 1], -1) for model in (student, teacher)
            )
            expected = {
                "kl": (log_q.exp() * (log_q - log_p)).sum(-1),
                "student_entropy": -(log_q.exp() * log_q).sum(-1),
                "teacher_entropy": -(log_p.exp() * log_p).sum(-1),
                "logratio": (log_q - log_p)[range(len(at)), ids[0, at]],
            }
            for name, values in expected.items():
                found = getattr(rows, name)[start : start + len(at)]
                np.testing.assert_allclose(found, values.numpy(), atol=1e-4, err_msg=name)
            logprobs = log_q[range(len(at)), ids[0, at]].numpy()
            np.testing.assert_allclose(rollout.logprobs[at], logprobs, atol=1e-4)
            start += len(at)


def test_scoring_the_same_responses_again_gives_the_same_numbers(scored, tiny_models, tmp_path):
    path, _ = scored
    run_cli(tiny_models, tmp_path / "again.parquet", "--reuse", str(path))
    one, other = (pq.read_table(p).to_pydict() for p in (path, tmp_path / "again.parquet"))
    measured = ("kl", "logratio", "student_entropy", "teacher_entropy")
    for name, values in one.items():
        if name in measured:
            np.testing.assert_allclose(other[name], values, rtol=0, atol=1e-6, err_msg=name)
        else:
            assert other[name] == values, name
