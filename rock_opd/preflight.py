"""``rock-opd check``: everything about a recipe that can be known without starting an engine.

``config`` has already refused what no file is needed for. Here: the installed packages, the
recipe's parts against each other, models, tokenizers, and prompts as they will be read; what the
run takes is in ``footprint``, what only running engines can tell in ``contract``, what only a
cluster's nodes can in ``nodes``. Every finding is listed; a failure does not hide the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rock_opd.config import Recipe, resolve_dtype
from rock_opd.data import PromptSet, load_heldout, load_problems, load_prompts, num_steps
from rock_opd.dead_keys import dead_keys
from rock_opd.errors import RockOPDError
from rock_opd.findings import CheckReport
from rock_opd.footprint import (
    assumed_device,
    report_memory,
    report_placement,
    report_run_dir,
    report_wire,
    short_count,
)
from rock_opd.inputs import (
    context_encoder,
    guarded_notices,
    longest_tokens,
    role_facts,
    role_problems,
)
from rock_opd.mirror_store import open_store, probe
from rock_opd.models import (
    ModelFacts,
    load_tokenizer,
    num_real_ids,
    stop_token_ids,
    tokenizer_fingerprint,
    trust_code,
)
from rock_opd.packages import report_packages
from rock_opd.prompt_rows import Messages, render_chat
from rock_opd.resume import has_begun, report_resume
from rock_opd.rocklist import read_ids
from rock_opd.vocabulary import Vocabulary, guarded_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check(recipe: Recipe, *, static: bool, report: CheckReport | None = None) -> CheckReport:
    """Checks a recipe that was built without complaint; raises nothing.

    Args:
        report: what to add to; None: a new one.
        static: leave out what needs model and data files, so that a recipe for a cluster can be
            checked where its models are not.
    """
    report = CheckReport() if report is None else report
    trust_code(*recipe.trusted_models)
    report.add("ok", f"recipe {recipe.run.name}: every key and value is accepted")
    report_packages(report)
    _check_parts(report, recipe)
    if recipe.run.mirror is not None:
        _check_mirror(report, recipe, static=static)
    facts: dict[str, ModelFacts] = {}
    if static:
        report.add(
            "info",
            f"student {recipe.student.model}, teacher {recipe.teacher.model}, prompts "
            f"{recipe.data.prompts}: not opened (--static), so sizes that depend on them are left "
            "out: vocabulary, tokenizers, prompt lengths, memory",
        )
    else:
        facts = _check_models(report, recipe)
        _check_data(report, recipe)
        if recipe.teacher.remote and "teacher" in facts:
            _check_servers(report, recipe)
    report_placement(report, recipe)
    report_wire(report, recipe, facts.get("teacher"))
    if not static:
        report_run_dir(report, recipe, facts.get("student"))
    if "student" in facts and "teacher" in facts:
        report_memory(report, recipe, facts["student"], facts["teacher"])
    if recipe.resume and not static and not report.failed:
        report_resume(report, recipe)
    return report


def _check_mirror(report: CheckReport, recipe: Recipe, *, static: bool) -> None:
    try:
        if static:
            report.add("info", f"mirror: {open_store(recipe).uri} not tried (--static)")
        else:
            report.add("ok", probe(recipe))
    except RockOPDError as error:
        report.add("fail", str(error))


# --- the recipe's parts against each other --------------------------------------------------------


def _check_parts(report: CheckReport, recipe: Recipe) -> None:
    rollout, teacher, student, policy = (
        recipe.rollout,
        recipe.teacher,
        recipe.student,
        recipe.policy,
    )
    on_policy = recipe.data.source == "student"
    num = rollout.prompts_per_step * (rollout.samples_per_prompt if on_policy else 1)
    for role, actors in (
        ("rollout.num_workers", rollout.num_workers if on_policy else 1),
        ("student.num_ranks", student.num_ranks),
        ("teacher.num_replicas", teacher.num_replicas),
    ):
        if num < actors:
            report.add("warn", f"{role}={actors}, but a step has {num} sequences: some idle")
    if policy.name in ("rock_freeze", "random_matched") and (
        0 < recipe.run.num_steps <= policy.warmup_steps
    ):
        report.add(
            "warn",
            f"policy {policy.name} only observes for policy.warmup_steps={policy.warmup_steps}, "
            f"and run.num_steps={recipe.run.num_steps}: nothing will be frozen",
        )
    for line in dead_keys(recipe):
        report.add("warn", line)
    if on_policy and rollout.temperature == 0:
        report.add("warn", "rollout.temperature=0: the student sees only its greedy answers")
    if recipe.run.device == "cpu":
        for role, width in (
            ("rollout", rollout.tensor_parallel),
            ("teacher", teacher.tensor_parallel),
        ):
            if width > 1:
                report.add("fail", f"{role}.tensor_parallel={width} needs GPUs, run.device is cpu")
    taken = has_begun(recipe) and not recipe.resume
    if taken and recipe.run.on_existing == "fail":
        report.add(
            "warn",
            f"{recipe.run_dir} already holds a run: train will refuse; resume=true goes on with "
            "it, run.name=... starts another",
        )
    if student.zero_stage == 0 and student.dtype == "bfloat16":
        report.add("info", "student.zero_stage=0 in bfloat16 runs as stage 1 (float32 master)")


# --- models ---------------------------------------------------------------------------------------


def _check_models(report: CheckReport, recipe: Recipe) -> dict[str, ModelFacts]:
    """The facts of each model that can be read."""
    found: dict[str, ModelFacts] = {}
    for role, model in (("student", recipe.student.model), ("teacher", recipe.teacher.model)):
        try:
            facts = role_facts(recipe, role)
        except RockOPDError as error:
            report.add("fail", f"{role}: {error}")
            continue
        found[role] = facts
        experts = f", {facts.num_experts} experts" if facts.num_experts else ""
        report.add(
            "ok",
            f"{role} {model}: {facts.architecture}, {short_count(facts.num_params)} parameters, "
            f"{facts.num_layers} layers, width {facts.hidden_size}{experts}, "
            f"{'tied' if facts.tied else 'untied'} head",
        )
        for problem in role_problems(recipe, role, facts):
            report.add("fail", problem)
    if len(found) == 2:
        _check_vocabulary(report, recipe, found)
    return found


def _check_vocabulary(report: CheckReport, recipe: Recipe, facts: dict[str, ModelFacts]) -> None:
    student, teacher = recipe.student.model, recipe.teacher.model
    try:
        width = num_real_ids(student, teacher)
        stops = {model: stop_token_ids(model) for model in (student, teacher)}
    except RockOPDError as error:
        report.add("fail", str(error))
        return
    padding = {role: facts[role].vocab_size - width for role in ("student", "teacher")}
    report.add(
        "ok",
        f"tokenizers agree on all {width} ids; padded rows that are cut off: student "
        f"{padding['student']}, teacher {padding['teacher']}",
    )
    if stops[student] == stops[teacher]:
        report.add("ok", f"responses end with {_tokens(stops[student], student)} in both models")
    else:
        report.add(
            "warn",
            f"student ends responses with {_tokens(stops[student], student)}, teacher with "
            f"{_tokens(stops[teacher], teacher)}: where one ends and the other goes on, the "
            "divergence is about stopping; set eos_token_id alike in both generation_config.json",
        )
    top_k = recipe.teacher.top_k
    if recipe.teacher.payload == "topk_tail" and top_k >= width:
        report.add(
            "fail",
            f"teacher.top_k={top_k} leaves no tail of {width} ids; lower it, or use "
            "teacher.payload=hidden for the full vocabulary",
        )
    _check_special_tokens(report, recipe)
    _check_lists(report, recipe, width)
    if recipe.uses_probe:
        _check_encoder(report, recipe, width)


def _check_lists(report: CheckReport, recipe: Recipe, width: int) -> None:
    """Lists of token ids: what each names, and whether the guard leaves anything to freeze."""
    policy, tokenizer = recipe.policy, load_tokenizer(recipe.student.model)
    fingerprint = tokenizer_fingerprint(tokenizer)
    lists: dict[str, np.ndarray] = {}
    for ids_file in filter(None, (policy.ids_file, policy.guard_file)):
        try:
            ids, notice = read_ids(ids_file, num_types=width, tokenizer=fingerprint)
        except RockOPDError as error:
            report.add("fail", str(error))
            continue
        lists[ids_file] = ids
        report.add("ok", f"{ids_file}: {len(ids)} token types, all within the vocabulary")
        if notice:
            report.add("warn", notice)
    if policy.ids_file not in lists or (policy.guard_file and policy.guard_file not in lists):
        return
    vocabulary = Vocabulary(
        model=recipe.student.model, num_types=width, fingerprint=fingerprint, tokenizer=tokenizer
    )
    try:
        guard_ids = guarded_ids(policy, vocabulary, say=lambda notice: None)  # said above
        for notice in guarded_notices(lists[policy.ids_file], guard_ids):
            report.add("warn", notice)
    except RockOPDError as error:
        report.add("fail", str(error))


def _check_encoder(report: CheckReport, recipe: Recipe, width: int) -> None:
    try:
        context_encoder(recipe, num_real_ids=width)
    except RockOPDError as error:
        report.add("fail", str(error))
        return
    if recipe.probe.encoder == "embedding":
        report.add("ok", f"contexts are read through the input embedding of {recipe.teacher.model}")


def _check_special_tokens(report: CheckReport, recipe: Recipe) -> None:
    """Which tokens each side holds for special; their ids are equal already."""
    ours, theirs = (load_tokenizer(model) for model in (recipe.student.model, recipe.teacher.model))
    sets = []
    for tokenizer in (ours, theirs):
        added = tokenizer.added_tokens_decoder.items()
        sets.append(
            {str(token) for _, token in added if token.special} | set(tokenizer.all_special_tokens)
        )
    roles = [
        f"{name} {a or 'none'} / {b or 'none'}"
        for name in ("bos_token", "eos_token", "pad_token")
        if (a := getattr(ours, name)) != (b := getattr(theirs, name))
    ]
    for who, only in (("student's", sets[0] - sets[1]), ("teacher's", sets[1] - sets[0])):
        if only:
            roles.append(f"only the {who} holds for special: {', '.join(sorted(only)[:5])}")
    if roles:
        report.add(
            "warn",
            f"special tokens differ (student / teacher): {'; '.join(roles)}; the student's are "
            "used; take its tokenizer files for both if that is not meant",
        )
    else:
        report.add("ok", f"special tokens agree: {', '.join(sorted(sets[0])[:8])}")


def _tokens(ids: tuple[int, ...], model: str) -> str:
    tokenizer = load_tokenizer(model)
    return ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in ids)


def _check_servers(report: CheckReport, recipe: Recipe) -> None:
    from rock_opd.engines.http_teacher import check_server

    problems = check_server(
        recipe.teacher,
        max_model_len=longest_tokens(recipe, "teacher"),
        say=lambda line: report.add("ok", line),
        doubt=lambda line: report.add("warn", line),
    )
    for problem in problems:
        report.add("fail", problem)


# --- data -----------------------------------------------------------------------------------------


def _check_data(report: CheckReport, recipe: Recipe) -> None:
    try:
        tokenizer = load_tokenizer(recipe.student.model)
    except RockOPDError:
        return  # said above
    limit = recipe.rollout.max_prompt_tokens
    try:
        prompts = load_prompts(
            recipe.data,
            tokenizer=tokenizer,
            max_prompt_tokens=limit,
            max_response_tokens=recipe.rollout.max_new_tokens,
            teacher_prefix_tokens=recipe.teacher.prefix_tokens,
            seed=recipe.run.seed,
        )
        per_epoch = prompts.steps_per_epoch(recipe.rollout.prompts_per_step)
    except RockOPDError as error:
        report.add("fail", str(error))
    else:
        _report_prompts(report, recipe, prompts, per_epoch)
        _report_rendering(report, recipe, prompts, tokenizer)
        _report_thinking(report, recipe, prompts)
    reading = {"tokenizer": tokenizer, "max_prompt_tokens": limit}
    if recipe.eval.num_heldout:
        try:
            heldout = load_heldout(recipe.data, recipe.eval, **reading)
        except RockOPDError as error:
            report.add("fail", str(error))
        else:
            report.add("ok", f"held out: {len(heldout)} prompts")
    if recipe.eval.problems is not None:
        try:
            problems = load_problems(recipe.data, recipe.eval, **reading)
        except RockOPDError as error:
            report.add("fail", str(error))
        else:
            report.add(
                "ok", f"{recipe.eval.problems}: {len(problems.prompts)} problems with answers"
            )
            _report_skipped(report, recipe.eval.problems, problems)


def _report_prompts(
    report: CheckReport, recipe: Recipe, prompts: PromptSet, per_epoch: int
) -> None:
    lengths = sorted(len(prompt.token_ids) for prompt in prompts.prompts)
    dtype = resolve_dtype(recipe.student.dtype, assumed_device(recipe))
    steps = num_steps(recipe, prompts, dtype=dtype)
    report.add(
        "ok",
        f"{recipe.data.prompts}: {len(lengths)} prompts, median {lengths[len(lengths) // 2]}, "
        f"longest {lengths[-1]} of {recipe.rollout.max_prompt_tokens} tokens; {steps} steps, "
        f"{steps / per_epoch:.3g} passes",
    )
    _report_skipped(report, recipe.data.prompts, prompts)


def _report_skipped(report: CheckReport, path: str, prompts: PromptSet) -> None:
    if prompts.skipped:
        counts = ", ".join(f"{num} {reason}" for reason, num in prompts.skipped.items())
        report.add("warn", "\n".join([f"{path}: left out: {counts}", *prompts.offenders]))


def _report_rendering(
    report: CheckReport,
    recipe: Recipe,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The first prompt as each model reads it, special tokens visible."""
    first = prompts.prompts[0]
    seen = tokenizer.decode(first.token_ids.tolist(), skip_special_tokens=False)
    report.add("info", f"the student reads ({first.prompt_id}):\n{_boxed(seen)}")
    if first.teacher_prefix_ids is not None:
        own = tokenizer.decode(first.teacher_prefix_ids.tolist(), skip_special_tokens=False)
        report.add("info", f"the teacher reads (teacher_messages):\n{_boxed(own)}")
        return
    source = prompts.messages[first.prompt_id]
    if isinstance(source, str):
        report.add("info", "the teacher reads the same; the tokenizer has no chat template")
        return
    try:
        theirs = load_tokenizer(recipe.teacher.model)
        own = render_chat(theirs, source, enable_thinking=recipe.data.enable_thinking)
    except Exception as error:  # templates are programs and raise what they like
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        report.add("warn", f"the teacher reads the same; its own template gave none: {reason}")
        return
    if own == seen:
        report.add("ok", "the teacher reads the same, as its own template has it")
    else:
        report.add(
            "warn",
            "the teacher reads the same ids, but its own template renders otherwise; give rows "
            f"'teacher_messages', or make the templates alike:\n{_boxed(own)}",
        )


def _report_thinking(report: CheckReport, recipe: Recipe, prompts: PromptSet) -> None:
    """Whether the templates react to ``enable_thinking``, and what follows from its value."""
    source = prompts.messages[prompts.prompts[0].prompt_id]
    if isinstance(source, str):
        return
    renders = {}
    for role, model in (("student", recipe.student.model), ("teacher", recipe.teacher.model)):
        try:
            renders[role] = _thinking_renders(model, source)
        except Exception:  # what a template refuses is said where it is rendered
            continue
    reacting = [role for role, texts in renders.items() if texts[True] != texts[False]]
    chosen = recipe.data.enable_thinking
    if not reacting:
        if chosen is not None:
            report.add(
                "warn",
                f"data.enable_thinking={str(chosen).lower()}, but no template reacts to it; leave "
                "it out",
            )
        return
    if len(reacting) < len(renders):
        report.add(
            "warn",
            f"only the {reacting[0]}'s template reacts to enable_thinking; the ids are those that "
            "the student's template gives: see whether the teacher knows such prompts",
        )
    texts = renders[reacting[0]]
    both = "\n".join(
        f"enable_thinking={str(flag).lower()}:\n{_boxed(texts[flag])}" for flag in (True, False)
    )
    if chosen is None:
        default = next((str(f).lower() for f in (True, False) if texts[None] == texts[f]), "else")
        report.add(
            "warn",
            f"the {reacting[0]}'s template reacts to enable_thinking and data.enable_thinking is "
            f"unset, so its own default holds ({default}); set it to what the teacher was trained "
            f"for:\n{both}",
        )
    else:
        report.add("ok", f"data.enable_thinking={str(chosen).lower()} is set:\n{both}")


def _thinking_renders(model: str, source: Messages) -> dict[bool | None, str]:
    tokenizer = load_tokenizer(model)
    return {
        flag: render_chat(tokenizer, source, enable_thinking=flag) for flag in (None, True, False)
    }


def _boxed(text: str) -> str:
    return "\n".join(f"| {line}" for line in text.split("\n"))
