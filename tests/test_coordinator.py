"""The loop, against roles that compute nothing: what it sends, what it refuses, what it writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rock_opd.actors.processes import Process
from rock_opd.checkpoint import load_checkpoint
from rock_opd.config import Recipe
from rock_opd.coordinator import Coordinator
from rock_opd.data import PromptSet
from rock_opd.driver import CoordinatorActor, shared_memory_lines
from rock_opd.durable import file_facts, storing
from rock_opd.errors import DataError, NumericsError, StorageError
from rock_opd.inputs import Inputs, context_encoder
from rock_opd.occurrences import build_registry, read_info
from rock_opd.progress import Progress
from rock_opd.recipe_file import build_recipe
from rock_opd.sampling import sample_seed
from rock_opd.types import Prompt, Rollout, StepResult, TeacherScores, TrainBatch

VOCAB = 16
HARD = 7
"""The token type whose KL is always 1; all others have KL 0.1."""


class Roles:
    """Stands in for Ray and the engines. The student samples ids from the request's seed."""

    def __init__(self) -> None:
        self.rollouts = self.teachers = self.students = self
        self.version = self.updates = 0
        self.gap = 0.0
        self.writes_for = 0
        """How often ``written`` still says no."""
        self.lag = 0
        self.only: int | None = None
        self.calls: list[tuple[str, object]] = []

    def turn(self, *roles: str) -> None:
        self.calls.append(("turn", roles))

    def generate(self, requests, *, temperature, top_p, max_new_tokens):
        return [self._rollout(request, max_new_tokens) for request in requests]

    def _rollout(self, request, num) -> Rollout:
        rng = np.random.default_rng(request.seed)
        response = rng.integers(3, VOCAB, num) if self.only is None else np.full(num, self.only)
        prompt = request.prompt.token_ids
        ids = np.concatenate([prompt, response]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        return Rollout(
            prompt_id=request.prompt.prompt_id,
            sample_idx=request.sample_idx,
            token_ids=ids,
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
            finish_reason="length",
            policy_version=self.version - self.lag,
            prompt_len=len(prompt),
        )

    def score(self, deal, rollouts):
        return [
            TeacherScores(
                key=r.key, logprobs=np.full(len(r.positions), -1.5, np.float32), entropy=None
            )
            for r in rollouts
        ]

    def clear(self) -> int:
        return 0

    def train_step(self, batches, *, total_weight, mask_version):
        self.updates += 1
        self.calls.append(("train", total_weight))
        return [self._result(b, mask_version) for b in batches]

    def measure(self, batches, *, entropy=False):
        self.calls.append(("measure", None))
        return [self._result(b, 0) for b in batches]

    def _result(self, batches: list[TrainBatch], mask_version: int) -> StepResult:
        ids = np.concatenate([b.token_ids[b.predicted] for b in batches])
        return StepResult(
            index=np.concatenate([b.index for b in batches]),
            kl=np.where(ids == HARD, 1.0, 0.1 / (1 + self.updates)).astype(np.float32),
            logprobs=np.full(len(ids), -1.0 + self.gap, np.float32),
            loss=0.5,
            grad_norm=2.0,
            learning_rate=1e-3,
            mask_version=mask_version,
            policy_version=self.updates,
            num_empty_batches=sum(not b.weight.any() for b in batches),
        )

    def push_weights(self, rollouts, *, version, bucket_bytes):
        self.version = version

    def save_hf(self, path: Path, *, background: bool = False) -> None:
        with storing("model", path):
            path.mkdir(parents=True, exist_ok=True)
            (path / "updates").write_text(str(self.updates))

    def save_state(self, path: Path, *, background: bool = False) -> None:
        self.calls.append(("save", background))
        with storing("student state", path):
            (path / "updates").write_text(str(self.updates))

    def written(self, path: Path):
        if self.writes_for > 0:
            self.writes_for -= 1
            return None
        return {"updates": file_facts(path / "updates")}

    def load_state(self, path: Path) -> None:
        self.updates = int((path / "updates").read_text())


class Patterned(Roles):
    """Type 7 always stands between 3s; type 8 has twice its KL, but ever other neighbours."""

    def _rollout(self, request, num) -> Rollout:
        rollout = super()._rollout(request, num)
        response = np.tile([3, 7, 3, 0, 8, 0], num // 6 + 1)[:num]
        others = response == 0
        response[others] = np.random.default_rng(request.seed).integers(9, 16, others.sum())
        prompt = rollout.token_ids[: rollout.prompt_len]
        return replace(rollout, token_ids=np.concatenate([prompt, response]).astype(np.int32))

    def _result(self, batches, mask_version) -> StepResult:
        ids = np.concatenate([b.token_ids[b.predicted] for b in batches])
        result = super()._result(batches, mask_version)
        return replace(result, kl=np.where(ids == 8, np.float32(2), result.kl))


class Tokenizer:
    eos_token_id = 2

    def decode(self, ids, skip_special_tokens=False) -> str:
        return " ".join(map(str, np.asarray(ids)))

    def batch_decode(self, sequences) -> list[str]:
        return ["\n" if ids == [5] else self.decode(ids) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(VOCAB)}


def make_recipe(folder: Path, *overrides: str) -> Recipe:
    base = {
        "run": {"name": "t", "dir": str(folder), "num_steps": 6, "device": "cpu"},
        "data": {"prompts": "p.jsonl", "skip": 2},
        "student": {"model": "s", "num_ranks": 2, "micro_batch_tokens": 40},
        "teacher": {"model": "t"},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 20},
        "policy": {
            "name": "rock_freeze",
            "top_k": 1,
            "drop_most_frequent": 0,
            "min_count": 1,
            "warmup_steps": 2,
            "refresh_every": 2,
            "audit_share": 0.5,
        },
    }
    return build_recipe(base, list(overrides))


def make_prompts(num: int) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(prompt_id=f"p{i}", token_ids=np.array([1, 2, 3 + i % 5], np.int32))
        for i in range(num)
    )


def coordinator(
    recipe: Recipe,
    roles: Roles,
    *,
    frozen: list[int] | None = None,
    guarded: tuple[int, ...] = (),
    **others: Any,
) -> Coordinator:
    """``others``: fields of ``Inputs``."""
    prompts = make_prompts(8)
    return Coordinator(
        recipe,
        replace(
            Inputs(
                prompts=PromptSet(
                    prompts=prompts,
                    messages={},
                    skipped={},
                    offenders=(),
                    fingerprint=f"of {len(prompts)}",
                    seed=recipe.run.seed,
                    shuffle=True,
                ),
                heldout=make_prompts(2) if recipe.eval.num_heldout else (),
                problems=(),
                tokenizer=Tokenizer(),
                num_real_ids=VOCAB,
                frozen_list=None if frozen is None else np.array(frozen, np.int32),
                guard_ids=np.array(guarded, np.int32),
                encoder=context_encoder(recipe, num_real_ids=VOCAB) if recipe.uses_probe else None,
            ),
            **others,
        ),
        roles,
        num_steps=recipe.run.num_steps,
        grader=lambda answers, golds: [True] * len(answers),
        progress=Progress(),
        stop=threading.Event(),
    )


CONTEXT = (
    "policy.score=rock_ctx",
    "probe.encoder=ngram",
    "probe.window=1",
    "probe.num_rollouts=6",
    "probe.tau_pre=0.5",
    "probe.tau_post=0.5",
    "probe.eta=0.5",
)
"""Types are chosen by R x CCR; the probe set is full after the second step."""


def events(recipe: Recipe, *kinds: str) -> list[dict]:
    return [e for e in lines(recipe, "events.jsonl") if e["event"] in kinds]


def lines(recipe: Recipe, name: str) -> list[dict]:
    return [json.loads(line) for line in (recipe.run_dir / name).read_text().splitlines()]


def test_the_hard_type_is_frozen_after_warm_up_and_not_before(tmp_path):
    recipe = make_recipe(tmp_path)
    coordinator(recipe, Roles()).run()
    metrics = lines(recipe, "metrics.jsonl")
    assert [m["freeze/num_types"] for m in metrics] == [0, 0, 1, 1, 1, 1]
    assert [m["freeze/mask_version"] for m in metrics] == [0, 0, 1, 1, 1, 1]
    assert metrics[1]["freeze/token_share"] == 0 < metrics[2]["freeze/token_share"]
    (freeze,) = [e for e in lines(recipe, "events.jsonl") if e["event"] == "freeze"]
    assert freeze["step"] == 3 and freeze["version"] == 1
    assert [t["id"] for t in freeze["types"]] == [HARD]
    assert freeze["types"][0]["mean_kl"] == pytest.approx(1.0)


def test_the_denominator_is_the_number_of_kept_tokens_and_of_all_tokens(tmp_path):
    for normalizer in ("kept", "all"):
        recipe = make_recipe(tmp_path / normalizer, f"loss.normalizer={normalizer}")
        roles = Roles()
        coordinator(recipe, roles).run()
        last = lines(recipe, "metrics.jsonl")[-1]
        total = [value for name, value in roles.calls if name == "train"][-1]
        kept = 1 - last["freeze/token_share"] if normalizer == "kept" else 1.0
        assert total == pytest.approx(kept * last["rollout/num_tokens"])
        assert last["train/denominator_share"] == pytest.approx(kept)


def test_a_step_whose_every_token_is_frozen_updates_nothing_and_is_logged(tmp_path):
    recipe = make_recipe(tmp_path, "policy.name=list", "policy.ids_file=x.json", "run.num_steps=2")
    roles = Roles()
    roles.only = HARD
    coordinator(recipe, roles, frozen=[HARD]).run()
    assert roles.updates == 0 and roles.version == 0
    events = lines(recipe, "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "skip"] == [1, 2]
    assert not [e for e in events if e["event"] == "sync"]
    assert lines(recipe, "metrics.jsonl")[-1]["freeze/token_share"] == 1.0


def test_a_random_control_freezes_other_types_than_the_rocks(tmp_path):
    recipe = make_recipe(tmp_path, "policy.name=random_matched")
    run = coordinator(recipe, Roles())
    run.run()
    mask = run.policy.mask
    assert list(mask.reference_ids) == [HARD] and HARD not in mask.frozen_ids
    last = lines(recipe, "metrics.jsonl")[-1]
    assert last["freeze/reference_share"] > 0 and last["freeze/type_share"] > 0


def test_types_in_consistent_contexts_are_frozen_before_those_of_higher_rock_score(tmp_path):
    by_score = make_recipe(tmp_path / "r")
    one = coordinator(by_score, Patterned())
    one.run()
    assert list(one.policy.mask.frozen_ids) == [8]
    by_context = make_recipe(tmp_path / "ctx", *CONTEXT)
    two = coordinator(by_context, Patterned())
    two.run()
    assert list(two.policy.mask.frozen_ids) == [7]
    assert two.registry.ccr[7] == 1.0 and two.registry.ccr[8] == 0.0

    for recipe, frozen in ((by_score, 8), (by_context, 7)):
        (freeze,) = events(recipe, "freeze")
        (row,) = freeze["types"]
        assert row["id"] == frozen and row["rank"] == 1 and row["mean_kl"] == frozen - 6
        assert row["R"] == pytest.approx(row["count"] * row["mean_kl"])
    assert row["ccr"] == 1.0 and row["score"] == row["R"]  # R_ctx = R x 1
    assert events(by_score, "freeze")[0]["types"][0]["ccr"] is None


def test_the_probe_set_is_kept_from_the_first_steps_and_measured_before_each_choice(tmp_path):
    recipe, roles = make_recipe(tmp_path, *CONTEXT), Patterned()
    run = coordinator(recipe, roles)
    run.run()
    probe = run.state.probe
    assert len(probe.rollouts) == 6 and [r.sample_idx for r in probe.rollouts] == list(range(6))
    assert [r.policy_version for r in probe.rollouts] == [0] * 4 + [1] * 2
    # as measured in the step each was sampled in (the stand-in's KL falls with every update)
    easy = ~np.isin(np.concatenate([r.token_ids[r.positions] for r in probe.rollouts]), (7, 8))
    want = np.repeat([0.1 / 2] * 4 + [0.1 / 3] * 2, 20).astype(np.float32)
    np.testing.assert_array_equal(probe.loss_pre[easy], want[easy])

    order = [name for name, _ in roles.calls if name in ("train", "measure")]
    assert order == ["train", "train", "measure", "train", "train", "measure", "train", "train"]
    first, second = events(recipe, "probe")
    assert (first["step"], second["step"]) == (3, 5)
    assert (first["version"], second["version"]) == (2, 4)
    assert first["num_rollouts"] == 6 and first["num_tokens"] == 120
    # 20 tokens: 7 stands at 1, 7, 13, 19 and 8 at 4, 10, 16
    assert first["persistent"] == first["judged"] == 6 * (4 + 3) and first["persistent_types"] == 2
    assert first["kept"] == 24 and first["num_pairs"] == 24 * 23 + 18 * 17
    assert first["tau_pre"] == first["tau_post"] == 0.5 and first["seconds"] > 0
    probed = [m["time/probe_s"] is not None for m in lines(recipe, "metrics.jsonl")]
    assert probed == [False, False, True, False, True, False]


def test_other_scores_keep_and_measure_no_probe_set(tmp_path):
    recipe, roles = make_recipe(tmp_path), Roles()
    run = coordinator(recipe, roles)
    run.run()
    assert not run.state.probe.rollouts and not [c for c in roles.calls if c[0] == "measure"]
    assert not events(recipe, "probe")


def test_a_probe_set_that_is_not_full_at_the_first_choice_is_used_and_said(tmp_path):
    recipe = make_recipe(tmp_path, *CONTEXT, "probe.num_rollouts=99")
    run = coordinator(recipe, Patterned())
    run.run()
    # two steps of four; the later steps have a mask and add nothing
    assert [e["num_rollouts"] for e in events(recipe, "probe")] == [8, 8]
    said = [line for line in run.progress.lines if isinstance(line, str) and "probe set" in line]
    assert len(said) == 1
    assert said[0].startswith("step 3: the probe set holds 8 of probe.num_rollouts=99 rollouts")


def test_a_selection_that_freezes_nothing_says_why_once_and_in_the_summary(tmp_path):
    recipe = make_recipe(tmp_path, *CONTEXT, "probe.tau_pre=9")
    run = coordinator(recipe, Patterned())
    summary = run.run()
    why = r"0 of \d+ types seen qualify; .*CCR is 0 everywhere: .*tau_pre 9.*lower probe\.tau_pre"
    (said,) = [line for line in run.progress.lines if "nothing is frozen" in str(line)]
    assert re.fullmatch(f"step 3: nothing is frozen: {why}.*", said)
    empty = events(recipe, "empty")
    assert [e["step"] for e in empty] == [3, 5] and all(re.match(why, e["reason"]) for e in empty)
    # The counts are those of the last selection.
    assert summary["nothing_frozen"] == empty[-1]["reason"]
    assert summary["rocks_by"] == "rock_ctx" and summary["rocks"] == []
    assert coordinator(make_recipe(tmp_path / "r"), Patterned()).run()["nothing_frozen"] is None


@pytest.mark.parametrize(
    ("changes", "guarded", "why"),
    [
        (("policy.warmup_steps=6",), (), "chosen after policy.warmup_steps=6 steps, and 6 were"),
        (("policy.min_count=100000",), (), "below policy.min_count=100000"),
        ((), tuple(range(VOCAB)), r"left out: \d+ guarded"),
        (("policy.name=random_matched", "policy.min_count=100000"), (), "below policy.min_count"),
        (("policy.name=all",), (), None),
    ],
)
def test_a_run_that_froze_nothing_says_why_unless_it_was_not_to(tmp_path, changes, guarded, why):
    summary = coordinator(make_recipe(tmp_path, *changes), Roles(), guarded=guarded).run()
    found = summary["nothing_frozen"]
    assert found is None if why is None else re.search(why, found)


def test_the_reason_for_freezing_nothing_outlives_a_break(tmp_path):
    settings = (*CONTEXT, "probe.tau_pre=9", "policy.refresh_every=9", "checkpoint.every=1")
    run_killed(make_recipe(tmp_path, *settings), Patterned(), in_step=5)
    again = coordinator(make_recipe(tmp_path, *settings, "resume=true"), Patterned())
    assert "lower probe.tau_pre" in again.run()["nothing_frozen"]  # chosen in step 3 only


def test_the_summarys_types_are_ordered_by_the_score_in_force(tmp_path):
    found = {}
    for score in ("rock", "mean"):
        recipe = make_recipe(tmp_path / score, f"policy.score={score}")
        summary = coordinator(recipe, Roles()).run()
        assert summary["rocks_by"] == score
        rows = summary["rocks"]
        assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
        found[score] = [(row["score"], row["R"], row["mean_kl"]) for row in rows]
        assert found[score] == sorted(found[score], key=lambda row: -row[0])
    assert all(score == R for score, R, _ in found["rock"])
    assert all(score == mean for score, _, mean in found["mean"])
    # Never measured: R stands in.
    early = make_recipe(tmp_path / "early", *CONTEXT, "policy.warmup_steps=6")
    assert coordinator(early, Patterned()).run()["rocks_by"] == "rock"


def test_a_thawed_type_is_an_event_with_the_same_numbers(tmp_path):
    class Shifting(Roles):
        def _result(self, batches, mask_version):
            result = super()._result(batches, mask_version)
            ids = np.concatenate([b.token_ids[b.predicted] for b in batches])
            late = np.where(ids == 9, np.float32(50), result.kl)
            return replace(result, kl=late if self.updates > 2 else result.kl)

    recipe = make_recipe(tmp_path)
    coordinator(recipe, Shifting()).run()
    (thaw,) = events(recipe, "thaw")
    (row,) = thaw["types"]
    assert thaw["step"] == 5 and row["id"] == HARD and row["rank"] == 2
    assert set(row) == {"id", "text", "count", "mean_kl", "score", "R", "ccr", "rank"}
    assert row["score"] == row["R"] > 0 and row["ccr"] is None
    assert [t["rank"] for e in events(recipe, "freeze") for t in e["types"]] == [1, 1]


def test_guarded_types_are_never_frozen(tmp_path):
    run = coordinator(make_recipe(tmp_path), Roles(), guarded=(HARD,))
    run.run()
    assert len(run.policy.mask.frozen_ids) == 1 and HARD not in run.policy.mask.frozen_ids


def test_what_a_policy_reports_is_logged(tmp_path):
    recipe = make_recipe(tmp_path, "policy.window_radius=1")
    coordinator(recipe, Roles()).run()
    assert all("freeze/window_share" in m for m in lines(recipe, "metrics.jsonl"))


def test_occurrences_of_every_step_are_written_and_make_the_same_registry(tmp_path):
    recipe = make_recipe(tmp_path, "log.occurrences=true")
    run = coordinator(recipe, Roles())
    run.run()
    folder = recipe.run_dir / "occurrences"
    assert sorted(p.name for p in folder.iterdir()) == [
        f"step_00000{i}.parquet" for i in range(1, 7)
    ]
    for name, value in build_registry(folder).state_dict().items():
        np.testing.assert_array_equal(value, run.registry.state_dict()[name])
    info = read_info(folder)
    assert (info.num_types, info.estimator, info.student) == (VOCAB, "hidden", "s")
    assert not (make_recipe(tmp_path, "run.name=u").run_dir / "occurrences").exists()


def test_occurrences_beyond_the_step_gone_on_from_are_dropped(tmp_path):
    settings = ("log.occurrences=true", "checkpoint.every=2", "checkpoint.background=false")
    recipe = make_recipe(tmp_path, *settings, "run.stop_after=3")
    cut = coordinator(recipe, Roles())
    cut._finish = lambda: {}  # the process dies here: step 3 is in no checkpoint
    cut.run()
    folder = recipe.run_dir / "occurrences"
    assert (folder / "step_000003.parquet").exists()
    (folder / "step_000004.parquet.partial").write_text("cut off")
    again = coordinator(
        make_recipe(tmp_path, *settings, "resume=true", "run.stop_after=2"), Roles()
    )
    again.run()
    assert sorted(p.name for p in folder.iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    for name, value in build_registry(folder).state_dict().items():
        np.testing.assert_array_equal(value, again.registry.state_dict()[name])


@pytest.mark.parametrize("stopped_after", [1, 3])
def test_a_run_with_a_probe_set_that_was_stopped_and_resumed_equals_the_whole_one(
    tmp_path, stopped_after
):
    # Two are judged per type at a cosine that varies: who is drawn decides the CCR.
    settings = (*CONTEXT, "probe.reservoir=2", "probe.gamma=0.45", "policy.top_k=2")
    whole = make_recipe(tmp_path / "whole", *settings)
    one = coordinator(whole, Patterned())
    one.run()
    cut = make_recipe(tmp_path / "cut", *settings, f"run.stop_after={stopped_after}")
    coordinator(cut, Patterned()).run()
    again = make_recipe(tmp_path / "cut", *settings, "resume=true")
    two = coordinator(again, Patterned())
    two.run()

    np.testing.assert_array_equal(one.state.probe.loss_pre, two.state.probe.loss_pre)
    for a, b in zip(one.state.probe.rollouts, two.state.probe.rollouts, strict=True):
        assert (a.key, a.policy_version) == (b.key, b.policy_version)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    for name, value in one.registry.state_dict().items():
        np.testing.assert_array_equal(value, two.registry.state_dict()[name])
    np.testing.assert_array_equal(one.policy.mask.frozen_ids, two.policy.mask.frozen_ids)
    assert [e["judged"] for e in events(whole, "probe")] == [4, 4]
    strip = [
        [
            {k: v for k, v in e.items() if k not in ("time", "seconds")}
            for e in events(r, "probe", "freeze", "thaw")
        ]
        for r in (whole, again)
    ]
    assert strip[0] == strip[1] and len([e for e in strip[0] if e["event"] == "probe"]) == 2


def test_rollouts_of_an_older_policy_stop_the_run(tmp_path):
    roles = Roles()
    roles.lag = 1
    with pytest.raises(NumericsError, match=r"step 1: .*policy v\[-1\], the trainer is at v0"):
        coordinator(make_recipe(tmp_path), roles).run()


def test_a_trainer_and_a_rollout_engine_that_disagree_stop_the_run(tmp_path):
    roles = Roles()
    roles.gap = 0.7
    with pytest.raises(NumericsError, match=r"differ by 0\.7 nats.*max_logprob_gap=0\.5"):
        coordinator(make_recipe(tmp_path), roles).run()


def test_a_stop_ends_the_run_after_its_step_with_a_checkpoint(tmp_path):
    recipe = make_recipe(tmp_path)
    run = coordinator(recipe, Roles())
    step = run._step

    def step_then_stop(number: int) -> dict:
        values = step(number)
        run.stop.set()
        return values

    run._step = step_then_stop
    summary = run.run()
    assert summary["num_steps"] == 1 and not summary["finished"]
    assert (recipe.run_dir / "checkpoints" / "step_000001" / "complete.json").exists()


class Killed(BaseException):
    """Stands in for SIGKILL: nothing of the run may catch it."""


def run_killed(recipe: Recipe, roles: Roles, *, in_step: int, where: str = "train_step") -> None:
    """Runs until a role's method is called in this step, and dies there."""
    run = coordinator(recipe, roles)
    method = getattr(roles, where)

    def dies(*args, **kwargs):
        if run.state.step + 1 == in_step:
            raise Killed
        return method(*args, **kwargs)

    setattr(roles, where, dies)
    with pytest.raises(Killed):
        run.run()


def same_run(one: Coordinator, other: Coordinator) -> None:
    """The registry, the mask and every metric but the clock's, step by step."""
    for name, value in one.registry.state_dict().items():
        np.testing.assert_array_equal(value, other.registry.state_dict()[name])
    np.testing.assert_array_equal(one.policy.mask.frozen_ids, other.policy.mask.frozen_ids)
    assert one.policy.mask.version == other.policy.mask.version
    strip = [
        [
            {k: v for k, v in m.items() if not k.startswith(("time/", "perf/"))}
            for m in lines(run.recipe, "metrics.jsonl")
        ]
        for run in (one, other)
    ]
    assert strip[0] == strip[1]


def saves_at_once(every: int) -> tuple[str, str]:
    """Checkpoints that are there when their step ends: the roles here are faster than any disk."""
    return f"checkpoint.every={every}", "checkpoint.background=false"


def journal(recipe: Recipe) -> list[str]:
    return sorted(p.name for p in (recipe.run_dir / "journal").iterdir())


@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize(
    ("in_step", "where"),
    [(4, "train_step"), *((5, w) for w in ("generate", "score", "train_step", "push_weights"))],
)
def test_a_run_killed_in_any_phase_and_resumed_equals_the_uninterrupted_one(
    tmp_path, in_step, where, replayed
):
    settings = ("eval.num_heldout=2", *saves_at_once(3))
    whole = make_recipe(tmp_path / "whole", *settings)
    one = coordinator(whole, Roles())
    summary_one = one.run()

    run_killed(make_recipe(tmp_path / "cut", *settings), Roles(), in_step=in_step, where=where)
    again = make_recipe(tmp_path / "cut", *settings, "resume=true")
    sampled = in_step - 1 if where == "generate" else in_step
    assert journal(again) == [f"step_{step:06d}.npz" for step in range(4, sampled + 1)]
    if not replayed:
        shutil.rmtree(again.run_dir / "journal")
    two = coordinator(again, Roles())
    summary_two = two.run()

    same_run(one, two)
    assert one.policy.mask.version == 1
    steps = list(range(4, sampled + 1)) if replayed else []
    assert [e["step"] for e in events(again, "replay")] == steps
    assert (again.run_dir / "checkpoints" / "step_000006").exists()
    for key in ("heldout_kl_before", "heldout_kl_after", "heldout_kl_change_ci95", "num_tokens"):
        assert summary_one[key] == summary_two[key]


class Wavering(Roles):
    """Samples otherwise every time it is started, as a GPU may at another batch size."""

    def __init__(self, life: int) -> None:
        super().__init__()
        self.life = life

    def _rollout(self, request, num):
        return super()._rollout(replace(request, seed=request.seed + self.life), num)


def test_where_sampling_again_gives_other_rollouts_the_journal_gives_the_same_run(tmp_path):
    # All six steps are sampled in the first life; the second one must not sample any.
    whole = make_recipe(tmp_path / "whole", *saves_at_once(3))
    one = coordinator(whole, Wavering(0))
    one.run()
    runs = {}
    for kept in (True, False):
        folder = tmp_path / f"kept{kept}"
        run_killed(make_recipe(folder, *saves_at_once(3)), Wavering(0), in_step=6)
        again = make_recipe(folder, *saves_at_once(3), "resume=true")
        assert journal(again) == [f"step_00000{i}.npz" for i in (4, 5, 6)]
        if not kept:
            shutil.rmtree(again.run_dir / "journal")
        runs[kept] = coordinator(again, Wavering(1))
        runs[kept].run()
    same_run(one, runs[True])
    with pytest.raises(AssertionError):
        same_run(one, runs[False])


def test_a_journal_that_is_torn_or_of_another_run_is_told_and_sampled_again(tmp_path):
    settings = saves_at_once(3)
    one = coordinator(make_recipe(tmp_path / "whole", *settings), Roles())
    one.run()
    run_killed(make_recipe(tmp_path / "cut", *settings), Roles(), in_step=6)
    again = make_recipe(tmp_path / "cut", *settings, "resume=true")
    folder = again.run_dir / "journal"
    torn = folder / "step_000004.npz"
    torn.write_bytes(torn.read_bytes()[:-400])
    other = make_recipe(tmp_path / "other", *settings, "run.seed=5")
    run_killed(other, Roles(), in_step=6)
    shutil.copyfile(other.run_dir / "journal" / "step_000005.npz", folder / "step_000005.npz")
    shutil.copyfile(folder / "step_000005.npz", folder / "step_000006.npz.partial")
    two = coordinator(again, Roles())
    two.run()
    same_run(one, two)
    said = [line for line in two.progress.lines if isinstance(line, str) and "journal" in line]
    assert "step 4: journal/step_000004.npz is not used" in said[0] and "damaged" in said[0]
    assert "step 5:" in said[1] and "another run wrote it" in said[1]
    assert [e["step"] for e in events(again, "replay")] == [6]
    # what no checkpoint can need any more is gone
    assert journal(again) == [f"step_00000{i}.npz" for i in (4, 5, 6)]


def test_a_run_that_begins_anew_does_not_take_an_old_journal(tmp_path):
    recipe = make_recipe(tmp_path, "checkpoint.every=3")
    run_killed(recipe, Roles(), in_step=2)
    coordinator(recipe, Roles()).run()
    assert not events(recipe, "replay")


def test_given_responses_need_no_journal(tmp_path):
    recipe = make_recipe(
        tmp_path, "data.source=dataset", "run.num_steps=2", "teacher.payload=hidden"
    )
    run = coordinator(recipe, Roles())
    given = [replace(p, response_ids=np.array([4, 5, 6], np.int32)) for p in make_prompts(8)]
    run.inputs = replace(run.inputs, prompts=replace(run.inputs.prompts, prompts=tuple(given)))
    run.run()
    assert not (recipe.run_dir / "journal").exists()


def test_a_run_goes_on_with_other_numbers_of_workers_teachers_and_ranks(tmp_path):
    settings = (*saves_at_once(3), "teacher.num_replicas=1", "student.num_ranks=2")
    one = coordinator(make_recipe(tmp_path / "whole", *settings), Roles())
    one.run()
    run_killed(make_recipe(tmp_path / "cut", *settings), Roles(), in_step=5)
    changed = (
        *("resume=true", "rollout.num_workers=3", "teacher.num_replicas=2", "student.num_ranks=1"),
        *("student.zero_stage=3", "placement.student_cpus=0.5", "optim.max_bad_steps=2"),
        *("checkpoint.every=1", "alarm.window=9", "student.micro_batch_tokens=80"),
    )
    two = coordinator(make_recipe(tmp_path / "cut", *settings, *changed), Roles())
    two.run()
    before, after = (lines(run.recipe, "metrics.jsonl") for run in (one, two))
    assert len(after) == 6
    for a, b in zip(before, after, strict=True):
        for name in ("rollout/num_tokens", "freeze/token_share", "freeze/mask_version"):
            assert a[name] == b[name]
        assert a["train/kl_mean"] == pytest.approx(b["train/kl_mean"], rel=1e-6)
    np.testing.assert_array_equal(one.registry.stats.count, two.registry.stats.count)


# ---------------------------------------------------------------- saving behind the run


def test_the_run_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path):
    class Slow(Roles):
        def save_state(self, path, *, background=False):
            super().save_state(path, background=background)
            self.writes_for = 12  # more often than one step asks

    recipe, roles = make_recipe(tmp_path, "checkpoint.every=2", "run.num_steps=4"), Slow()
    run = coordinator(recipe, roles)
    run.run()
    order = [(name, what) for name, what in roles.calls if name in ("train", "save")]
    assert [name for name, _ in order] == ["train", "train", "save", "train", "train", "save"]
    assert all(background for name, background in order if name == "save")
    names = [e["event"] + str(e["step"]) for e in lines(recipe, "events.jsonl")]
    assert names.index("sync4") < names.index("checkpoint2") < names.index("checkpoint4")
    assert sorted(p.name for p in (recipe.run_dir / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004",
    ]


def test_a_run_killed_while_its_checkpoint_is_written_goes_on_from_the_one_before(tmp_path):
    class Slow(Roles):
        def save_state(self, path, *, background=False):
            super().save_state(path, background=background)
            self.writes_for = 100 if path.parent.name.startswith("step_000004") else 0

    one = coordinator(make_recipe(tmp_path / "whole", "checkpoint.every=2"), Roles())
    one.run()
    cut = make_recipe(tmp_path / "cut", "checkpoint.every=2")
    run_killed(cut, Slow(), in_step=6)
    assert sorted(p.name for p in (cut.run_dir / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004.partial",
    ]
    again = make_recipe(tmp_path / "cut", "checkpoint.every=2", "resume=true")
    two = coordinator(again, Roles())
    two.run()
    same_run(one, two)
    assert [e["step"] for e in events(again, "replay")] == [3, 4, 5, 6]
    assert not list((cut.run_dir / "checkpoints").glob("*.partial"))


def test_serving_copies_have_their_own_pace_and_are_pruned(tmp_path):
    recipe = make_recipe(
        tmp_path, "checkpoint.every=3", "checkpoint.save_hf_every=2", "checkpoint.keep_hf=2"
    )
    coordinator(recipe, Roles()).run()
    assert sorted(p.name for p in (recipe.run_dir / "hf").iterdir()) == [
        "step_000004",
        "step_000006",
    ]
    assert [e["step"] for e in events(recipe, "hf")] == [2, 4, 6]
    assert (recipe.run_dir / "hf" / "step_000004" / "updates").read_text() == "4"
    assert [e["step"] for e in events(recipe, "checkpoint")] == [3, 6]


class FullDisk(Roles):
    """Cannot write the state of one step."""

    def __init__(self, at_update: int) -> None:
        super().__init__()
        self.at_update = at_update

    def written(self, path):
        if self.updates >= self.at_update and path.parent.name.startswith("step_000004"):
            raise StorageError("student state could not be written to x: No space left on device")
        return super().written(path)


def test_a_write_that_fails_stops_the_run_and_the_last_checkpoint_stays(tmp_path):
    recipe = make_recipe(tmp_path, "checkpoint.every=2")
    with pytest.raises(StorageError, match="No space left on device"):
        coordinator(recipe, FullDisk(4)).run()
    assert sorted(p.name for p in (recipe.run_dir / "checkpoints").iterdir()) == ["step_000002"]
    assert load_checkpoint(recipe.run_dir).step == 2


def test_a_write_that_fails_is_told_and_the_run_goes_on_where_the_recipe_says_so(tmp_path):
    recipe = make_recipe(tmp_path, "checkpoint.every=2", "checkpoint.on_error=warn")
    run = coordinator(recipe, FullDisk(4))
    assert run.run()["finished"]
    (event,) = events(recipe, "storage")
    assert "No space left" in event["error"] and event["step"] >= 4
    said = [line for line in run.progress.lines if isinstance(line, str) and "No space" in line]
    assert len(said) == 1 and "going on (checkpoint.on_error=warn)" in said[0]
    kept = sorted(p.name for p in (recipe.run_dir / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000006"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Filling(Roles):
    """Fills the disk after three updates, and makes room again after some more, if told so."""

    def __init__(self, disk: Path, *, until: int | None = None) -> None:
        super().__init__()
        self.filler, self.until = disk / "filler", until

    def train_step(self, *args, **kwargs):
        if self.updates == 3:
            with self.filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if self.updates == self.until:
            self.filler.unlink()
        return super().train_step(*args, **kwargs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_a_disk_that_fills_up_stops_the_run_in_one_line_or_loses_only_what_it_could_not_take(
    small_disk,
):
    """The file system is real; lines that found no room come later, none twice."""
    stop = make_recipe(small_disk, *saves_at_once(2))
    with pytest.raises(StorageError) as failure:
        coordinator(stop, Filling(small_disk, until=5)).run()
    assert "No space left on device" in str(failure.value) and "\n" not in str(failure.value)
    assert "needed, 0 B free" in str(failure.value)
    assert load_checkpoint(stop.run_dir).step == 2
    assert [m["step"] for m in lines(stop, "metrics.jsonl")] == [1, 2, 3]
    (small_disk / "filler").unlink()

    shutil.rmtree(stop.run_dir)
    warn = make_recipe(small_disk, *saves_at_once(2), "checkpoint.on_error=warn")
    assert coordinator(warn, Filling(small_disk, until=5)).run()["finished"]
    assert [m["step"] for m in lines(warn, "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert events(warn, "storage")
    assert load_checkpoint(warn.run_dir).step == 6
    syncs = [e["step"] for e in events(warn, "sync")]
    assert syncs == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_a_run_whose_end_finds_no_room_is_an_error_that_says_what_is_missing_and_goes_on_later(
    small_disk,
):
    """checkpoint.on_error=warn, and from step 4 on nothing can be written any more."""
    warn = make_recipe(small_disk, *saves_at_once(2), "checkpoint.on_error=warn")
    with pytest.raises(StorageError) as failure:
        coordinator(warn, Filling(small_disk)).run()
    said = str(failure.value)
    assert "\n" not in said and "ended after step 6" in said and "No space left on device" in said
    assert "lacks the checkpoint of step 6, model/, summary.json, 3 lines of metrics.jsonl" in said
    assert said.endswith(
        "the checkpoint of step 2 is kept: make room and go on from it with resume=true"
    )
    assert not (warn.run_dir / "model").exists() and load_checkpoint(warn.run_dir).step == 2

    (small_disk / "filler").unlink()
    again = make_recipe(small_disk, *saves_at_once(2), "checkpoint.on_error=warn", "resume=true")
    two = coordinator(again, Roles())
    assert two.run()["finished"] and (warn.run_dir / "model" / "updates").read_text() == "6"
    one = coordinator(make_recipe(small_disk.parent / "whole", *saves_at_once(2)), Roles())
    one.run()
    same_run(one, two)


@pytest.mark.parametrize("what", ["model", "student state"])
def test_a_run_that_lost_its_model_or_last_checkpoint_is_not_finished(tmp_path, what):
    class Refusing(Roles):
        def save_hf(self, path, *, background=False):
            if what == "model":
                raise StorageError("model could not be written to x: disk quota exceeded")
            super().save_hf(path, background=background)

        def save_state(self, path, *, background=False):
            if what != "model" and self.updates == 6:
                raise StorageError("student state could not be written to x: disk quota exceeded")
            super().save_state(path, background=background)

    recipe = make_recipe(tmp_path, *saves_at_once(2), "checkpoint.on_error=warn")
    kept, lost = (6, "model/") if what == "model" else (4, "the checkpoint of step 6")
    with pytest.raises(
        StorageError, match=rf"lacks {lost}: {what} could .* of step {kept} is kept"
    ):
        coordinator(recipe, Refusing()).run()
    assert json.loads((recipe.run_dir / "summary.json").read_text())["finished"] is False
    again = make_recipe(tmp_path, *saves_at_once(2), "resume=true")
    assert coordinator(again, Roles()).run()["finished"]


def test_a_last_checkpoint_that_fails_once_is_written_again(tmp_path):
    class Once(Roles):
        failed = False

        def written(self, path):
            if path.parent.name.startswith("step_000006") and not self.failed:
                self.failed = True
                raise StorageError("student state could not be written to x: stale file handle")
            return super().written(path)

    recipe = make_recipe(tmp_path, "checkpoint.every=2", "checkpoint.on_error=warn")
    assert coordinator(recipe, Once()).run()["finished"]
    assert load_checkpoint(recipe.run_dir).step == 6


def test_a_best_student_that_found_no_room_is_no_mark_for_those_that_come_later(tmp_path):
    class NoBest(Roles):
        def save_hf(self, path, *, background=False):
            if path.name == "best.partial" and self.updates < 4:
                raise StorageError("model could not be written to x: No space left on device")
            super().save_hf(path, background=background)

    settings = ("eval.problems=p.jsonl", "eval.every=2", "checkpoint.on_error=warn")
    run = coordinator(make_recipe(tmp_path, *settings), NoBest())
    run.inputs = replace(run.inputs, problems=make_prompts(2))
    assert run.run()["finished"]  # every evaluation grades the same, 1.0
    assert (run.recipe.run_dir / "best" / "updates").read_text() == "4"


def test_little_shared_memory_is_told(small_disk, tmp_path):
    (line,) = shared_memory_lines(small_disk)
    assert f"{small_disk} has 1.0 MB free of 1.0 MB" in line and "--shm-size" in line
    assert shared_memory_lines(tmp_path / "nowhere") == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "t").write_text("a file")
    with pytest.raises(StorageError, match=r"^the run could not be written to .*/t: "):
        coordinator(make_recipe(tmp_path), Roles()).run()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "not sealed by us"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(tmp_path, damage):
    one = coordinator(make_recipe(tmp_path / "whole", *saves_at_once(2)), Roles())
    one.run()
    cut = make_recipe(tmp_path / "cut", *saves_at_once(2))
    run_killed(cut, Roles(), in_step=5)
    newest = cut.run_dir / "checkpoints" / "step_000004"
    file = newest / "student" / "updates"
    if damage == "cut":
        (newest / "state.npz").write_bytes((newest / "state.npz").read_bytes()[:-1])
    elif damage == "changed":
        file.write_text("3")
    elif damage == "missing":
        file.unlink()
    else:
        seal = json.loads((newest / "complete.json").read_text())
        seal["files"].pop("student/updates")
        (newest / "complete.json").write_text(json.dumps(seal))
    again = make_recipe(tmp_path / "cut", *saves_at_once(2), "resume=true")
    two = coordinator(again, Roles())
    two.run()
    same_run(one, two)
    (event,) = events(again, "resume")
    assert event["step"] == 2 and len(event["refused"]) == 1
    assert event["refused"][0].startswith("step_000004: ")
    assert any("going on from step 2 instead" in str(line) for line in two.progress.lines)
    assert [e["step"] for e in events(again, "replay")] == [3, 4, 5]
    assert (cut.run_dir / "checkpoints" / "step_000004.damaged").is_dir()


def test_lines_of_the_log_that_are_no_steps_lines_go_and_are_counted(tmp_path):
    one = coordinator(make_recipe(tmp_path / "whole"), Roles())
    one.run()
    damaged = make_recipe(tmp_path / "damaged", "run.stop_after=3")
    coordinator(damaged, Roles()).run()
    for name in ("metrics.jsonl", "events.jsonl"):
        with (damaged.run_dir / name).open("ab") as file:
            lines_ = [b"5", b"null", b'{"a": 1}', b'{"step": "3"}', b'{"step": true}', b"\xff\xfe"]
            file.write(b"\n".join([*lines_, b"[" * 100_000, b'{"step": 3, "torn']))
    two = coordinator(make_recipe(tmp_path / "damaged", "resume=true"), Roles())
    two.run()
    same_run(one, two)
    told = [str(line) for line in two.progress.lines if "could not be read" in str(line)]
    assert told == [
        f"{name}: 7 lines could not be read and are gone"
        for name in ("metrics.jsonl", "events.jsonl")
    ]


def test_a_run_with_nothing_whole_or_of_another_recipe_is_refused_before_its_engines_start(
    tmp_path, monkeypatch
):
    def start(recipe: Recipe, **_: Any) -> None:
        raise AssertionError("the engines were started")

    def process(role: str, index: int) -> Process:
        return Process(role=role, index=index, pid=1, started=0, node_id="n", ip="127.0.0.1")

    monkeypatch.setattr("rock_opd.actors.starting.start_roles", start)
    monkeypatch.setattr("rock_opd.actors.processes.this_process", process)
    monkeypatch.setattr("rock_opd.driver.stop_token_ids", lambda model: [5])
    run = coordinator(make_recipe(tmp_path, "run.stop_after=1"), Roles())
    run.run()

    def resumed(*overrides: str) -> None:
        CoordinatorActor().run(make_recipe(tmp_path, "resume=true", *overrides), run.inputs)

    with pytest.raises(DataError, match=r"step_000001: optim.lr was 2e-06, is 0.5"):
        resumed("optim.lr=0.5")
    with pytest.raises(AssertionError, match="started"):
        resumed()
    (run.recipe.run_dir / "checkpoints" / "step_000001" / "complete.json").write_text("[]")
    with pytest.raises(DataError, match=r"no checkpoint under .* \(step_000001: it cannot be read"):
        resumed()


# ---------------------------------------------------------------- numbers that are not finite


class Bad(Roles):
    """Has no finite gradient in some steps."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps, self.asked = set(steps), 0

    def train_step(self, batches, *, total_weight, mask_version):
        self.asked += 1
        if self.asked in self.steps:
            raise NumericsError("the gradient is not finite; no weight was changed")
        return super().train_step(batches, total_weight=total_weight, mask_version=mask_version)


def test_a_bad_step_stops_the_run_unless_the_recipe_is_patient(tmp_path):
    with pytest.raises(NumericsError, match=r"step 3: the gradient .*bad step 1 in a row"):
        coordinator(make_recipe(tmp_path), Bad(3)).run()


def test_a_teacher_whose_numbers_are_not_finite_is_named(tmp_path):
    class NoTeacher(Bad):
        def score(self, deal, rollouts):
            whole = super().score(deal, rollouts)
            return [replace(s, logprobs=np.full_like(s.logprobs, np.nan)) for s in whole[:1]] + [
                *whole[1:]
            ]

    message = r"the gradient .* the teacher's own .* at 20 of 80 positions: look at teacher.model"
    with pytest.raises(NumericsError, match=message):
        coordinator(make_recipe(tmp_path), NoTeacher(1)).run()


def test_bad_steps_are_skipped_counted_and_told_and_too_many_in_a_row_stop_the_run(tmp_path):
    recipe = make_recipe(tmp_path, "optim.max_bad_steps=2", "log.occurrences=true")
    roles = Bad(2, 3, 5)
    run = coordinator(recipe, roles)
    run.run()
    metrics = lines(recipe, "metrics.jsonl")
    assert [m["train/bad_steps"] for m in metrics] == [0, 1, 2, 2, 3, 3]
    assert [m["train/num_updates"] for m in metrics] == [1, 1, 1, 2, 2, 3]
    assert [m["train/loss"] is None for m in metrics] == [False, True, True, False, True, False]
    assert metrics[1]["train/grad_norm"] is None and metrics[1]["rollout/num_tokens"] == 80
    assert [e["step"] for e in events(recipe, "sync")] == [1, 4, 6]
    bad = events(recipe, "bad_step")
    assert [(e["step"], e["in_a_row"]) for e in bad] == [(2, 1), (3, 2), (5, 1)]
    assert "not finite" in bad[0]["reason"]
    assert len([line for line in run.progress.lines if "is skipped" in str(line)]) == 3
    # nothing of such a step is in the registry, nor in the files
    assert run.registry.stats.count.sum() == 3 * 80
    np.testing.assert_array_equal(
        build_registry(recipe.run_dir / "occurrences").stats.count, run.registry.stats.count
    )

    recipe = make_recipe(tmp_path, "optim.max_bad_steps=2", "run.name=u")
    with pytest.raises(NumericsError, match=r"step 4: .*bad step 3 in a row, .*max_bad_steps=2"):
        coordinator(recipe, Bad(2, 3, 4)).run()
    assert len(lines(recipe, "metrics.jsonl")) == 3


def test_bad_steps_in_a_row_are_counted_across_a_resume(tmp_path):
    settings = ("optim.max_bad_steps=2", "checkpoint.every=1")
    coordinator(make_recipe(tmp_path, *settings, "run.stop_after=3"), Bad(2, 3)).run()
    again = make_recipe(tmp_path, *settings, "resume=true")
    with pytest.raises(NumericsError, match=r"step 4: .*bad step 3 in a row"):
        coordinator(again, Bad(1)).run()


def test_the_checkpoint_of_the_step_before_a_fatal_one_is_kept(tmp_path):
    class Slow(Bad):
        def save_state(self, path, *, background=False):
            super().save_state(path, background=background)
            self.writes_for = 30

    recipe = make_recipe(tmp_path, "checkpoint.every=2")
    with pytest.raises(NumericsError):
        coordinator(recipe, Slow(3)).run()
    assert load_checkpoint(recipe.run_dir).step == 2


def test_alarms_are_told_once_per_crossing_and_survive_a_resume(tmp_path):
    class Spiking(Roles):
        def _result(self, batches, mask_version):
            result = super()._result(batches, mask_version)
            norm = {11: 100.0, 12: 90.0, 14: 80.0}.get(self.updates, 2.0)
            return replace(result, grad_norm=norm)

    settings = ("run.num_steps=16", "alarm.window=9", *saves_at_once(4))
    one = make_recipe(tmp_path / "whole", *settings)
    run = coordinator(one, Spiking())
    run.run()
    found = [(e["step"], e["metric"]) for e in events(one, "alarm")]
    truncated = (1, "rollout/truncated_share")  # the stand-in never ends an answer
    assert found == [truncated, (11, "train/grad_norm"), (14, "train/grad_norm")]
    assert events(one, "alarm")[1]["value"] == 100 and events(one, "alarm")[1]["bound"] == 20
    assert sum("alarm: train/grad_norm is 100, above 20" in str(x) for x in run.progress.lines) == 1

    run_killed(make_recipe(tmp_path / "cut", *settings), Spiking(), in_step=13)
    again = make_recipe(tmp_path / "cut", *settings, "resume=true")
    coordinator(again, Spiking()).run()
    assert [(e["step"], e["metric"]) for e in events(again, "alarm")] == found


def test_resuming_with_other_prompts_is_refused(tmp_path):
    recipe = make_recipe(tmp_path, "run.num_steps=1")
    coordinator(recipe, Roles()).run()
    other = coordinator(make_recipe(tmp_path, "resume=true"), Roles(), num_real_ids=VOCAB + 1)
    with pytest.raises(DataError, match="vocabulary was 16, is 17"):
        other.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.name=all", "policy.name was rock_freeze, is all"),
        ("policy.lam=0.5", r"policy.lam was 0.0, is 0.5"),
        ("rollout.prompts_per_step=2", "rollout.prompts_per_step was 4, is 2"),
        ("optim.lr=1e-3", "optim.lr was"),
        ("teacher.model=other", "teacher.model was t, is other"),
        ("run.num_steps=9", "number of steps was 6, is 9"),
        ("probe.gamma=0.8", "probe.gamma was 0.5, is 0.8"),
        ("teacher.dtype=float32", "teacher.dtype was auto, is float32"),
        ("rollout.dtype=float32", "rollout.dtype was auto, is float32"),
        ("eval.samples=3", "eval.samples was 1, is 3"),
    ],
)
def test_resuming_another_experiment_is_refused(tmp_path, change, message):
    coordinator(make_recipe(tmp_path, "run.stop_after=1"), Roles()).run()
    with pytest.raises(DataError, match=message):
        coordinator(make_recipe(tmp_path, "resume=true", change), Roles()).run()


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"teacher": "weights of another"}, "content of teacher.model"),
        ({"heldout": make_prompts(3)}, "held-out prompts"),
        ({"problems": (replace(make_prompts(1)[0], answer="2"),)}, "evaluation problems"),
    ],
)
def test_resuming_with_another_teacher_or_other_problems_under_the_same_name_is_refused(
    tmp_path, other, what
):
    ours = {"teacher": "ours", "problems": (replace(make_prompts(1)[0], answer="1"),)}
    coordinator(make_recipe(tmp_path, "run.stop_after=1"), Roles(), **ours).run()
    again = make_recipe(tmp_path, "resume=true")
    with pytest.raises(DataError, match=rf"resume from .*step_000001: {what} was "):
        coordinator(again, Roles(), **ours | other).run()
    assert coordinator(again, Roles(), **ours).run()["finished"]


def test_resuming_with_other_guarded_types_is_refused_and_with_another_file_of_them_is_not(
    tmp_path,
):
    recipe = make_recipe(tmp_path, "run.stop_after=1", "policy.guard_file=a.json")
    coordinator(recipe, Roles(), guarded=(3, 4)).run()
    moved = make_recipe(tmp_path, "resume=true", "policy.guard_file=b.json")
    with pytest.raises(DataError, match="guarded ids was"):
        coordinator(moved, Roles(), guarded=(3, 5)).run()
    coordinator(moved, Roles(), guarded=(4, 3)).run()


def test_without_any_undamaged_checkpoint_each_is_named(tmp_path):
    recipe = make_recipe(tmp_path, "run.stop_after=1")
    coordinator(recipe, Roles()).run()
    (recipe.run_dir / "checkpoints" / "step_000001" / "state.npz").write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"is whole \(step_000001: state.npz has 9 bytes"):
        coordinator(make_recipe(tmp_path, "resume=true"), Roles()).run()


def test_with_lambda_between_0_and_1_the_share_shown_is_that_of_the_types(tmp_path):
    recipe = make_recipe(tmp_path, "policy.lam=0.5")
    summary = coordinator(recipe, Roles()).run()
    last = lines(recipe, "metrics.jsonl")[-1]
    assert last["freeze/token_share"] == 0 < last["freeze/type_share"]
    assert summary["frozen_share"][-1] == last["freeze/type_share"]


def test_resuming_without_a_whole_checkpoint_is_refused(tmp_path):
    recipe = make_recipe(tmp_path, "resume=true")
    (recipe.run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
    with pytest.raises(DataError, match="no whole checkpoint"):
        coordinator(recipe, Roles()).run()


def test_old_checkpoints_are_pruned(tmp_path):
    recipe = make_recipe(tmp_path, "checkpoint.every=1", "checkpoint.keep_last=2")
    coordinator(recipe, Roles()).run()
    kept = sorted(p.name for p in (recipe.run_dir / "checkpoints").iterdir())
    assert kept == ["step_000005", "step_000006"]


@pytest.mark.parametrize("settings", [(), (*CONTEXT, "policy.window_radius=1")])
def test_every_metric_of_a_step_stands_in_the_docs_and_none_is_missing(tmp_path, settings):
    recipe = make_recipe(tmp_path, *settings)
    coordinator(recipe, Roles()).run()
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    areas = {
        "train": ["kl_mean", "loss"],
        "freeze": ["token_share", "num_types", "mask_version"],
        "sync": ["logprob_gap_mean", "logprob_gap_p99", "logprob_gap_max"],
        "rollout": ["num_tokens", "length_p50", "length_p99", "truncated_share"],
        "coordinator": ["rx_bytes"],
        "perf": ["tokens_per_s"],
        "time": ["rollout_s", "teacher_s", "train_s", "sync_s", "step_s"],
    }
    required = {f"{area}/{what}" for area, names in areas.items() for what in names}
    for line in lines(recipe, "metrics.jsonl"):
        assert required <= line.keys()
        for name in line.keys() - {"step"}:
            _, what = name.split("/")
            assert name in page or f"`_{what.rsplit('_', 1)[-1]}`" in page, name


def test_what_reaches_the_coordinator_stays_below_32_bytes_a_token(tmp_path):
    recipe = make_recipe(tmp_path, "rollout.max_new_tokens=200")
    coordinator(recipe, Roles()).run()
    for line in lines(recipe, "metrics.jsonl"):
        assert line["coordinator/rx_bytes_per_token"] <= 32


def test_a_sample_seed_depends_on_what_is_sampled_and_nothing_else():
    seeds = {
        sample_seed(run, step, prompt, i)
        for run in (0, 1)
        for step in (1, 2)
        for prompt in ("a", "b")
        for i in (0, 1)
    }
    assert len(seeds) == 16 and all(0 <= s < 2**31 for s in seeds)
    assert sample_seed(0, 1, "a", 0) == sample_seed(0, 1, "a", 0)
