"""``rock-opd check --live``: what it compares, with roles that compute nothing; and once for real,
as a person starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rock_opd.config import Recipe
from rock_opd.contract import NUM_ANSWERS, Noise, check_live
from rock_opd.errors import DataError, RoleError
from rock_opd.findings import CheckReport
from rock_opd.recipe_file import build_recipe
from rock_opd.types import Rollout, StepResult, TeacherScores

ROOT = Path(__file__).parents[1]
EOS = 2
PROMPT_TOKENS, ANSWER_TOKENS = 64, 32


class Roles:
    """Stands in for Ray and the engines. The student says -1 of every token, the teacher -1.5 (so
    the log-ratio is .5, and so is the divergence); each fault is one of the arguments."""

    device = "cpu"

    def __init__(
        self,
        *,
        gap: float = 0.0,
        kl: float = 0.5,
        order_noise: float = 0.0,
        replica_offset: float = 0.0,
        stops: bool = True,
        claims: str | None = None,
        nan_at: int | None = None,
        teacher_limit: int = 10_000,
        no_rollouts: bool = False,
        student_limit: int = 10_000,
    ) -> None:
        self.teachers = self.students = self
        self.rollouts = None if no_rollouts else self
        self._gap, self._kl, self._nan_at = gap, kl, nan_at
        self._order_noise, self._replica_offset = order_noise, replica_offset
        self._stops, self._claims, self._teacher_limit = stops, claims, teacher_limit
        self._student_limit = student_limit
        self.trained: list[int] = []
        """Tokens of each rank's micro-batch in the one update."""
        self.scored: list[list[str]] = []
        """Keys of each request to the teacher."""
        self.asked: list[tuple[int, int]] = []
        """Prompt and given tokens of each request to the sampler."""

    def turn(self, *roles: str) -> None:
        pass

    def clear(self) -> int:
        return 0

    def generate(self, requests, *, temperature, top_p, max_new_tokens):
        self.asked += [(len(r.prompt.token_ids), len(r.begun)) for r in requests]
        rollouts = []
        for request in requests:
            rng = np.random.default_rng(request.seed)
            response = rng.integers(3, 1000, max_new_tokens)
            if self._stops:
                response = np.append(response[:9], EOS)
            prompt = request.prompt.token_ids
            mask = np.arange(len(prompt) + len(response)) >= len(prompt)
            rollouts.append(
                Rollout(
                    prompt_id=request.prompt.prompt_id,
                    sample_idx=request.sample_idx,
                    token_ids=np.concatenate([prompt, response]).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -1.0 - self._gap, np.nan).astype(np.float32),
                    finish_reason=self._claims or ("stop" if self._stops else "length"),
                    policy_version=0,
                    prompt_len=len(prompt),
                )
            )
        return rollouts

    def score(self, deal, rollouts):
        replica = {i: b.teacher for rank in deal.ranks for b in rank for i in b.rollouts}
        self.scored.append([r.key for r in rollouts])
        for rollout in rollouts:
            if len(rollout.teacher_token_ids) > self._teacher_limit:
                raise DataError(f"rollout {rollout.key}: too long for the teacher")
        # A batch that is not the whole gives other numbers, if asked for.
        noise = self._order_noise if len(rollouts) < NUM_ANSWERS else 0.0
        return [
            TeacherScores(
                key=r.key,
                logprobs=np.full(
                    len(r.positions), -1.5 + noise + self._replica_offset * replica[i], np.float32
                ),
                entropy=None,
            )
            for i, r in enumerate(rollouts)
        ]

    def train_step(self, batches, *, total_weight, mask_version):
        self.trained = [sum(len(b.token_ids) for b in part) for part in batches]
        assert total_weight == sum(b.weight.sum() for part in batches for b in part)
        if max(self.trained) > self._student_limit:
            raise RoleError("student rank 0 (10.0.0.1, pid 7): CUDA out of memory")
        return self.measure(batches, entropy=False)

    def peak_memory(self):
        return [(3_000_000_000, 0), (2_000_000_000, 41_000_000_000)]

    def measure(self, batches, *, entropy):
        results = []
        for part in batches:
            index = np.concatenate([b.index for b in part])
            wave = 0.1 * (-1.0) ** index
            kl = np.full(len(index), self._kl, np.float32)
            if self._nan_at is not None:
                kl[index == self._nan_at] = np.nan
            results.append(
                StepResult(
                    index=index,
                    kl=kl,
                    logprobs=(-1.0 + wave).astype(np.float32),
                    loss=0.0,
                    grad_norm=0.0,
                    learning_rate=0.0,
                    mask_version=0,
                    policy_version=0,
                    num_empty_batches=0,
                )
            )
        return results


@pytest.fixture
def recipe(tiny_models: Path):
    def build(*overrides: str) -> Recipe:
        return build_recipe(
            {
                "run": {"device": "cpu"},
                "data": {"prompts": str(tiny_models / "prompts.jsonl")},
                "student": {"model": str(tiny_models / "student"), "dtype": "float32"},
                "teacher": {"model": str(tiny_models / "teacher"), "dtype": "float32"},
                "rollout": {
                    "dtype": "float32",
                    "max_prompt_tokens": PROMPT_TOKENS,
                    "max_new_tokens": ANSWER_TOKENS,
                },
            },
            list(overrides),
        )

    return build


def live(recipe: Recipe, **faults) -> tuple[CheckReport, Roles]:
    roles = Roles(**faults)

    @contextmanager
    def engines(recipe, *, samples, num_real_ids, address, say):
        yield roles

    report = CheckReport()
    check_live(report, recipe, address=None, say=lambda line: None, engines=engines)
    return report, roles


def of_level(report: CheckReport, level: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.level == level]


def facts(report: CheckReport) -> dict:
    return {name: value for finding in report.findings for name, value in finding.facts.items()}


# The student's numbers wave by .1 around the sampler's: a gap of .1, more than float32 explains.
def test_a_sound_pair_passes_and_every_number_is_told(recipe):
    report, roles = live(recipe("rollout.temperature=0.7"), gap=0.0)
    assert not report.failed
    assert "16 answers, 160 tokens; 16 ended with a terminator" in of_level(report, "ok")[1]
    told = facts(report)
    assert told["num_positions"] == 160 and told["gap_mean"] == pytest.approx(0.1, abs=1e-6)
    assert (told["noise_mean"], told["noise_kl"]) == (0.0, 0.0)
    assert told["signal_kl"] == pytest.approx(0.5)
    assert told["longest_tokens"] == PROMPT_TOKENS + ANSWER_TOKENS
    # All at once; then backwards, a third at a time; the longest sequence; as many as fill a batch.
    whole, *parts, last, full = roles.scored[1:]
    assert len(whole) == NUM_ANSWERS and [len(keys) for keys in parts] == [6, 6, 4]
    assert [key for keys in parts for key in keys] == whole[::-1] and last == ["longest#0"]
    assert full == [f"longest#{i}" for i in range(4096 // 96)]
    # The longest prompt, and all of the longest answer given but the last token.
    assert roles.asked[-1] == (PROMPT_TOKENS, ANSWER_TOKENS - 1)


def test_a_sampler_that_is_another_model_fails_and_a_gap_that_dtypes_do_not_explain_warns(recipe):
    report, _ = live(recipe(), gap=1.0)
    (fail,) = of_level(report, "fail")
    assert "mean 1, " in fail and "above sync.max_logprob_gap=0.5, so a run would stop" in fail
    (warning,) = of_level(live(recipe())[0], "warn")
    assert "mean 0.1, largest 0.1 nats; more than the 0.0001" in warning


def test_a_teacher_that_depends_on_the_order_fails_with_the_noise_as_kl(recipe):
    report, _ = live(recipe(), order_noise=0.01)
    (fail,) = of_level(report, "fail")
    # Half of .01 squared.
    assert "|difference| mean 0.01, p99 0.01, largest 0.01, as KL 5e-05 nats" in fail
    assert "signal, KL(student, teacher) over the full vocabulary: 0.5 nats" in fail
    assert "scores depend on what stands beside them" in fail


def test_in_bfloat16_the_same_noise_is_within_the_bound_but_not_beside_a_small_signal(recipe):
    half = recipe("teacher.dtype=bfloat16", "rollout.temperature=0.7")
    assert not of_level(live(half, order_noise=0.01)[0], "fail")
    warnings = of_level(live(half, order_noise=0.01, kl=0.001)[0], "warn")
    assert any("more than 1% of what is to be learned" in text for text in warnings)


def test_replicas_that_disagree_fail_and_are_named(recipe):
    three = recipe("teacher.num_replicas=3")
    report, _ = live(three)
    assert [t for t in of_level(report, "ok") if "teacher replicas 0 and 2" in t]
    report, _ = live(three, replica_offset=0.25)
    first, second = [text for text in of_level(report, "fail") if "replicas" in text]
    assert "teacher replicas 0 and 1, same tokens: |difference| mean 0.25" in first
    assert "teacher replicas 0 and 2, same tokens: |difference| mean 0.5" in second
    assert "they serve different weights or settings" in first


def test_rows_of_other_positions_than_the_scalars_fail(recipe):
    # The log-ratio is .5 +- .1 over 160 tokens: a standard error of .0079.
    report, _ = live(recipe(), kl=0.5)
    assert any("are of the same positions" in text for text in of_level(report, "ok"))
    report, _ = live(recipe(), kl=0.4)
    (fail,) = of_level(report, "fail")
    assert "(+12.6 standard errors): rows and log-probabilities are not of the same" in fail
    # A table with a tail says less than the whole, never more.
    table = recipe("teacher.payload=topk_tail")
    assert not live(table, kl=0.4)[0].failed
    assert live(table, kl=0.6)[0].failed


def test_numbers_that_are_not_finite_fail_and_end_the_trial(recipe):
    report, roles = live(recipe(), nan_at=7)
    fails = of_level(report, "fail")
    assert "1 of 160 positions have no finite divergence" in fails[0]
    assert "measuring the answers: what follows needs finite numbers" in fails[1]
    assert len(roles.scored) == 1


def test_answers_that_do_not_stop_where_they_should_fail(recipe):
    report, _ = live(recipe(), stops=False)
    assert any("0 ended with a terminator" in text for text in of_level(report, "ok"))
    report, _ = live(recipe(), claims="length")
    assert any("16 answers end without a terminator" in text for text in of_level(report, "fail"))


def test_a_sequence_too_long_for_an_engine_fails_and_says_which_step(recipe):
    report, _ = live(recipe(), teacher_limit=95)
    (fail,) = of_level(report, "fail")
    assert fail == "trying the longest sequence: rollout longest#0: too long for the teacher"


def test_an_update_is_tried_on_micro_batches_as_full_as_the_recipe_allows(recipe):
    full = recipe("student.num_ranks=2", "student.micro_batch_tokens=200")
    report, roles = live(full)
    assert roles.trained == [192, 192]  # 2 x 96
    assert any(
        "an update on full micro-batches (2 x 96 tokens a rank) goes through; a student rank took "
        "at most 3.0 GB of host memory and 41.0 GB of its GPU" in text
        for text in of_level(report, "ok")
    )
    (fail,) = of_level(live(full, student_limit=191)[0], "fail")
    assert fail.startswith("trying an update on full micro-batches: student rank 0")


def test_the_teachers_longer_prompt_is_part_of_the_longest_sequence(recipe):
    report, _ = live(recipe("teacher.prefix_tokens=40"), teacher_limit=64 + 32 + 40)
    assert not report.failed
    assert any("teacher (136 there)" in text for text in of_level(report, "ok"))


def test_given_answers_need_no_sampler(recipe, tmp_path):
    rows = [{"id": str(i), "prompt": "?", "response": "yes " * 5} for i in range(20)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = recipe(f"data.prompts={tmp_path / 'p.jsonl'}", "data.source=dataset")
    report, roles = live(given, no_rollouts=True)
    assert not report.failed and not roles.asked
    assert "16 given answers are taken" in of_level(report, "ok")[1]
    assert not any("rollout engine" in line for line in report.lines)


def test_engines_that_do_not_start_are_one_finding(recipe):
    @contextmanager
    def engines(recipe, **_):
        raise RoleError("teacher 0 died in phase 'start': out of memory")
        yield

    report = CheckReport()
    check_live(report, recipe(), address=None, say=lambda line: None, engines=engines)
    assert report.lines == [
        "FAIL  starting the engines: teacher 0 died in phase 'start': out of memory"
    ]


def test_noise_is_mean_quantile_largest_and_half_the_mean_square():
    a, b = np.zeros(4, np.float32), np.array([0.0, 0.2, -0.2, 0.4], np.float32)
    noise = Noise.of(a, b)
    assert noise.mean == pytest.approx(0.2) and noise.most == pytest.approx(0.4)
    assert noise.kl == pytest.approx((0.04 + 0.04 + 0.16) / 4 / 2)


# --- for real -------------------------------------------------------------------------------------


def test_the_real_engines_pass_and_a_teacher_with_another_terminator_is_said(tiny_models, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_models / "teacher", teacher)
    (teacher / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    args = [
        *(sys.executable, "-m", "rock_opd", "check", str(ROOT / "recipes" / "debug_cpu.yaml")),
        *("--live", "--cluster", "--json"),
        f"run.dir={tmp_path / 'runs'}",
        f"data.prompts={tiny_models / 'prompts.jsonl'}",
        f"eval.problems={tiny_models / 'problems.jsonl'}",
        f"student.model={tiny_models / 'student'}",
        f"teacher.model={teacher}",
        "teacher.num_replicas=2",
    ]
    done = subprocess.run(
        args, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    read = json.loads(done.stdout)
    assert read["failed"] is False
    texts = {level: [] for level in ("ok", "info", "warn")}
    for finding in read["findings"]:
        texts[finding["level"]].append(finding["text"])
    (warning,) = texts["warn"]
    assert "student ends responses with 2 <|im_end|>, teacher with 0 <|endoftext|>, 2" in warning
    assert any("1 nodes: each writes to" in text for text in texts["ok"])
    told = {name: value for finding in read["findings"] for name, value in finding.items()}
    assert told["num_answers"] == 16 and told["num_positions"] > 100
    assert told["noise_mean"] < 1e-5 and told["noise_p99"] < 1e-5  # float32
    assert told["replica_1_mean"] < 1e-5
    assert 0 < told["gap_mean"] < 1e-4  # really compared
    assert 2 < told["signal_kl"] < 6 and told["noise_kl"] < 1e-6 * told["signal_kl"]
    assert abs(told["standard_errors"]) < 6
    assert told["longest_tokens"] == 64 + 32
    assert not list((tmp_path / "runs").iterdir())  # what the nodes wrote is gone
