"""Recipes: what is accepted, and the one line that says what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rock_opd.config import Recipe, resolve_dtype
from rock_opd.errors import ConfigError
from rock_opd.recipe_file import build_recipe, load_recipe, recipe_yaml

LEAST = ["data.prompts=p.jsonl", "teacher.model=t", "student.model=s"]
RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def build(*overrides: str, tree: dict | None = None) -> Recipe:
    return build_recipe(tree or {}, [*LEAST, *overrides])


def refusal(*overrides: str, tree: dict | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        build(*overrides, tree=tree)
    text = str(caught.value)
    assert "\n" not in text and text.startswith("recipe: ")
    return text.removeprefix("recipe: ")


def test_three_keys_make_a_recipe_and_the_rest_has_the_papers_values():
    recipe = build()
    assert recipe.optim.lr == 2e-6 and recipe.optim.betas == (0.9, 0.98)
    assert recipe.policy.top_k == 100 and recipe.policy.drop_most_frequent == 5
    assert recipe.loss.normalizer == "kept" and recipe.rollout.temperature == 1.0


def test_overrides_win_over_the_file():
    recipe = build("optim.lr=1e-3", tree={"optim": {"lr": 1e-4, "weight_decay": 0.1}})
    assert (recipe.optim.lr, recipe.optim.weight_decay) == (1e-3, 0.1)


def test_a_built_recipe_cannot_be_changed():
    recipe = build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.optim.lr = 1.0


def test_the_written_recipe_reads_back_as_the_same(tmp_path):
    recipe = build("optim.betas=[0.8,0.9]", "policy.lam=0.25", "data.enable_thinking=false")
    (tmp_path / "config.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe


@pytest.mark.parametrize(
    "key, hint",
    [
        ("optim.lrr=1", "'optim.lrr'; did you mean 'optim.lr'?"),
        ("policy.topk=1", "'policy.topk'; did you mean 'policy.top_k'?"),
        ("polcy.lam=1", "'polcy'; did you mean 'policy'?"),
        ("betas=[0.9,0.98]", "'betas'; did you mean 'optim.betas'?"),
        ("temperature=1", "did you mean 'rollout.temperature' or 'eval.temperature'?"),
        ("optim.learning_rate=1", "'optim.learning_rate'; optim has: lr, min_lr, warmup_ratio"),
        ("trainer.x=1", "'trainer'; a recipe has: run, data, student, optim"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, hint):
    assert hint in refusal(key)


@pytest.mark.parametrize(
    "override, text",
    [
        ("optim.lr=fast", "optim.lr: "),
        ("optim.lr=0", "optim.lr must lie in (0, 1], got 0"),
        ("optim.lr=nan", "optim.lr must lie in (0, 1], got nan"),
        ("optim.min_lr=1", "optim.min_lr must lie in [0, 2e-06], got 1"),
        ("optim.betas=[0.9]", "optim.betas must be two numbers in [0, 1), got [0.9]"),
        ("optim.betas=[0.9,1.0]", "optim.betas must be two numbers in [0, 1)"),
        ("run.num_steps=1.5", "run.num_steps: "),
        ("run.num_steps=-1", "run.num_steps must be at least 0, got -1"),
        ("run.name=../x", "run.name must be letters, digits"),
        ("run.device=gpu", "run.device must be one of auto, cpu, cuda, got 'gpu'"),
        ("data.source=students", "data.source must be one of student, dataset"),
        ("data.skip=null", "data.skip: "),
        ("data=3", "data must be a mapping of keys to values"),
        ("student.zero_stage=4", "student.zero_stage must be 0, 1, 2 or 3, got 4"),
        ("rollout.top_p=0", "rollout.top_p must lie in (0, 1], got 0"),
        ("rollout.kv_cache_bytes=0", "rollout.kv_cache_bytes must be at least 1, got 0"),
        ("teacher.payload=hiden", "got 'hiden'; did you mean 'hidden'?"),
        ("loss.kd_ratio=1.5", "loss.kd_ratio must lie in [0, 1], got 1.5"),
        ("policy.lam=-0.1", "policy.lam must lie in [0, 1], got -0.1"),
        ("policy.audit_share=0", "policy.audit_share must lie in (0, 1], got 0"),
        ("eval.every=5", "eval.every needs eval.problems"),
        ("resume=maybe", "resume: "),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_was_expected(override, text):
    assert text in refusal(override)


@pytest.mark.parametrize(
    "overrides, text",
    [
        (["loss.divergence=policy_gradient", "rollout.temperature=0.7"], "is biased unless"),
        (["loss.divergence=policy_gradient", "rollout.top_p=0.9"], "is biased unless"),
        (["loss.divergence=policy_gradient", "data.source=dataset"], "were not sampled"),
        (["teacher.payload=sampled"], "drops the teacher from the gradient"),
        (["teacher.engine=prompt_logprobs"], "needs teacher.engine 'hidden'"),
        (["policy.name=list"], "policy.ids_file goes with policy.name=list"),
        (["policy.ids_file=rock.json"], "policy.ids_file goes with policy.name=list"),
        (["placement.colocate=all", "run.device=cpu"], "on run.device=cpu it must be none"),
        (["eval.num_heldout=8", "data.skip=7"], "must not be trained on"),
        (["student.offload_optimizer=true", "student.zero_stage=0"], "needs student.zero_stage"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(overrides, text):
    assert text in refusal(*overrides)


@pytest.mark.parametrize("left_out", range(3))
def test_a_missing_key_is_named(left_out):
    keys = [key for i, key in enumerate(LEAST) if i != left_out]
    with pytest.raises(ConfigError, match=LEAST[left_out].split("=")[0] + " is missing"):
        build_recipe({}, keys)


def test_a_student_from_a_run_is_that_runs_model():
    recipe = build_recipe({}, [*LEAST[:2], "student.from_run=runs/stage1"])
    assert recipe.student.model == "runs/stage1/model"


@pytest.mark.parametrize("item", ["lr", "=3", "optim.betas=[0.9"])
def test_an_override_that_is_none_is_quoted(item):
    assert f"override '{item}'" in refusal(item)


@pytest.mark.parametrize(
    "content, text",
    [
        (b"optim: [", "line 1: "),
        (b"optim:\n  lr: 1\n  lr: 2\n", "line 3: found duplicate key lr"),
        (b"- 1\n", "expected a mapping of sections"),
        (b"\xff\xfe\x00", "not readable as YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line_with_its_name(tmp_path, content, text):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, LEAST)
    assert text in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"recipe none\.yaml: no such file"):
        load_recipe("none.yaml")


def test_auto_is_bfloat16_on_gpus_and_a_stated_dtype_stays():
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("float32", "cuda") == "float32"
    assert resolve_dtype("auto", "cpu") in ("float32", "bfloat16")


# --- the recipes that ship ------------------------------------------------------------------------


def test_the_recipes_that_the_readme_promises_are_there():
    assert {path.stem for path in RECIPES} >= {
        "quickstart",
        "debug_cpu",
        "qwen3_1gpu",
        "qwen3_30b_a3b_to_4b_offpolicy",
        "qwen3_30b_a3b_to_4b_onpolicy",
        "qwen3_30b_a3b_to_4b_rock_freeze",
        "qwen3_30b_a3b_to_4b_random_freeze",
        "qwen3_30b_a3b_to_4b_8gpu_colocated",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_builds_and_its_run_has_the_files_name(path):
    assert load_recipe(path).run.name == path.stem


def by_name(name: str) -> Recipe:
    return load_recipe(next(path for path in RECIPES if path.stem.endswith(name)))


def test_the_reference_run_has_the_published_values():
    on, off = by_name("4b_onpolicy"), by_name("4b_offpolicy")
    for recipe in (on, off):
        assert recipe.optim.betas == (0.9, 0.98) and recipe.optim.max_grad_norm == 1.0
        assert (recipe.optim.min_lr, recipe.optim.warmup_ratio) == (1e-8, 0.05)
        assert recipe.optim.weight_decay == 0.0 and recipe.run.num_epochs == 1
        assert recipe.student.gradient_checkpointing and recipe.student.dtype == "bfloat16"
    assert on.optim.lr == 2e-6 and on.rollout.samples_per_prompt == 4
    assert (on.rollout.temperature, on.rollout.top_p) == (1.0, 1.0)
    assert on.loss.divergence == "reverse_kl" and on.loss.kd_ratio == 1.0
    assert off.loss.divergence == "forward_kl" and off.loss.kd_ratio == 0.5
    assert off.data.source == "dataset"
    assert on.student.model == f"runs/{off.run.name}/model"


@pytest.mark.parametrize("twin", ["rock_freeze", "random_freeze"])
def test_the_frozen_runs_differ_from_the_baseline_in_their_policy_alone(twin):
    base, other = by_name("4b_onpolicy"), by_name(f"4b_{twin}")
    assert (
        other.policy.name == {"rock_freeze": "rock_freeze", "random_freeze": "random_matched"}[twin]
    )
    assert other.policy.lam == 0.0 and other.policy.top_k == 100
    same = dataclasses.replace(other, policy=base.policy, run=base.run)
    assert same == base
    rocks = by_name("4b_rock_freeze").policy
    assert dataclasses.replace(other.policy, name="rock_freeze") == rocks


@pytest.mark.parametrize(
    "override",
    [
        "rollout.temperature=inf",
        "eval.temperature=nan",
        "run.phase_timeout_s=inf",
        "optim.weight_decay=inf",
        "run.seed=99999999999999999999",
        "student.attn_implementation=nonsense",
    ],
)
def test_numbers_without_an_end_and_unknown_choices_are_refused(override):
    tree = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        build_recipe(tree, [override])


def test_a_held_out_divergence_needs_more_than_the_sampled_ratio():
    tree = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    sampled = ["teacher.payload=sampled", "loss.divergence=policy_gradient"]
    build_recipe(tree, sampled)
    with pytest.raises(ConfigError, match=r"eval\.num_heldout needs teacher\.payload"):
        build_recipe(tree, [*sampled, "eval.num_heldout=1", "data.skip=1"])


@pytest.mark.parametrize("text", ["007", "1.10", "on", "2026_12_01", "1e5", "0x10", "yes", "no"])
def test_an_override_of_a_text_key_is_the_text_as_it_stands(text, tmp_path):
    base = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    recipe = build_recipe(
        base, [f"run.name={text}", f"data.prompts={text} #2", "student.model='q'"]
    )
    assert recipe.run.name == text
    assert recipe.data.prompts == f"{text} #2" and recipe.student.model == "q"
    (tmp_path / "config.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe


def test_a_text_key_that_may_be_empty_takes_null_and_one_that_may_not_refuses_it():
    base = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    given = build_recipe({**base, "run": {"mirror": "file:///m"}}, ["run.mirror=null"])
    assert given.run.mirror is None
    with pytest.raises(ConfigError, match=r"run.name: Incompatible value 'None'"):
        build_recipe(base, ["run.name=null"])


def test_every_key_that_holds_a_path_refuses_a_tilde_and_an_address():
    base = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    for key in (
        *("run.dir", "data.prompts", "student.model", "student.from_run", "teacher.model"),
        *("policy.ids_file", "policy.guard_file", "eval.heldout_prompts", "eval.problems"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: '~/x' is not expanded here; write /"):
            build_recipe(base, [f"{key}=~/x"])
        with pytest.raises(ConfigError, match=f"{key} is a path on this machine, got 's3://b/x'"):
            build_recipe(base, [f"{key}=s3://b/x"])


def test_an_alias_bomb_is_refused_in_an_override_too():
    bomb = "[&a [1,1,1,1,1,1,1,1,1,1]" + "".join(
        f", &{new} [{','.join([f'*{old}'] * 10)}]"
        for old, new in zip("abcdefg", "bcdefgh", strict=True)
    )
    with pytest.raises(ConfigError, match="more than 10000 values once its aliases"):
        build_recipe({}, [f"optim.betas={bomb}]"])


def test_one_server_without_brackets_is_told_to_be_a_list():
    base = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    with pytest.raises(ConfigError, match=r"teacher.urls: a list is expected: .*urls=\[\.\.\.\]"):
        build_recipe(base, ["teacher.engine=http", "teacher.urls=http://x"])


def test_other_defaults_give_way_to_what_a_recipe_or_an_override_says(tmp_path):
    recipe, defaults = tmp_path / "r.yaml", ("eval.temperature=0",)
    recipe.write_text("eval: {temperature: 0.6}\n")
    for path, overrides, temperature in (
        (None, [], 0.0),
        (None, ["eval.temperature=0.3"], 0.3),
        (recipe, [], 0.6),
        (recipe, ["eval.temperature=0.3"], 0.3),
    ):
        found = load_recipe(path, overrides, needed=(), defaults=defaults)
        assert found.eval.temperature == temperature
