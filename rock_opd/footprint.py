"""What a run takes: CPUs and GPUs, bytes on the wire, memory by role. Estimates from the models'
numbers, and they say so."""

from __future__ import annotations

import tempfile

from rock_opd.config import Recipe, resolve_dtype
from rock_opd.durable import free_bytes, in_bytes
from rock_opd.engines.vllm_quirks import CPU_KV_CACHE_BYTES
from rock_opd.findings import CheckReport
from rock_opd.inputs import longest_tokens
from rock_opd.models import ModelFacts

BYTES = {"float32": 4, "bfloat16": 2}
SAMPLED_BYTES = 12
"""Per position: id and two log-probabilities."""


def report_placement(report: CheckReport, recipe: Recipe) -> None:
    """CPUs and GPUs, by role."""
    place, rollout, teacher, student = (
        recipe.placement,
        recipe.rollout,
        recipe.teacher,
        recipe.student,
    )
    roles = {
        "student": (student.num_ranks, 1, place.student_cpus),
        "rollout": (rollout.num_workers, rollout.tensor_parallel, place.rollout_cpus),
        "teacher": (
            teacher.num_replicas,
            0 if teacher.engine == "http" else teacher.tensor_parallel,
            place.teacher_cpus,
        ),
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
    return BYTES[resolve_dtype(recipe.teacher.dtype, assumed_device(recipe))]


def assumed_device(recipe: Recipe) -> str:
    """cpu or cuda, without asking a cluster: ``auto`` is taken for cuda."""
    return "cpu" if recipe.run.device == "cpu" else "cuda"


def report_wire(report: CheckReport, recipe: Recipe, teacher: ModelFacts | None) -> None:
    """Bytes that teacher rows take on their way, for each payload."""
    num = _positions(recipe)
    per_position: dict[str, int | None] = {
        "hidden": None if teacher is None else teacher.hidden_size * _wire_bytes(recipe),
        "topk_tail": recipe.teacher.top_k * 8 + 8,
        "sampled": SAMPLED_BYTES,
    }
    parts = []
    for kind, size in per_position.items():
        chosen = " (this recipe)" if kind == recipe.teacher.payload else ""
        amount = "2 or 4 bytes x teacher width" if size is None else in_bytes(num * size)
        parts.append(f"{kind} {amount}{chosen}")
    report.add(
        "info",
        f"teacher rows on the wire per step, at most ({short_count(num)} positions, none frozen): "
        + ", ".join(parts),
    )


def report_memory(
    report: CheckReport, recipe: Recipe, student: ModelFacts, teacher: ModelFacts
) -> None:
    """Estimates from the models' numbers, by role."""
    device = assumed_device(recipe)
    report.add(
        "info",
        "memory, estimated; libraries and fragmentation come on top:\n"
        + "\n".join(
            [
                f"student rank: {_student_memory(recipe, student, teacher, device)}",
                f"rollout worker: {_rollout_memory(recipe, student, device)}",
                f"teacher replica: {_teacher_memory(recipe, teacher, device)}"
                if recipe.teacher.engine != "http"
                else "teacher: on its servers",
            ]
        ),
    )
    for role, facts, cfg, tokens in (
        ("rollout", student, recipe.rollout, recipe.max_model_len),
        (
            "teacher",
            teacher,
            recipe.teacher,
            longest_tokens(recipe, "teacher"),
        ),
    ):
        if role == "teacher" and recipe.teacher.engine == "http":
            continue
        cache = cfg.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device == "cpu" else None)
        one = tokens * facts.kv_bytes_per_token(BYTES[resolve_dtype(cfg.dtype, device)])
        if cache is not None and cache < one // cfg.tensor_parallel:
            report.add(
                "fail",
                f"{role}.kv_cache_bytes={cache} is less than one sequence of {tokens} tokens takes "
                f"({in_bytes(one // cfg.tensor_parallel)}); raise it, or shorten the sequences",
            )
    park = _positions(recipe) * teacher.hidden_size * _wire_bytes(recipe)
    park //= recipe.teacher.num_replicas
    parks = recipe.teacher.payload != "sampled" and recipe.teacher.engine == "hidden"
    if parks and park > recipe.teacher.park_bytes:
        report.add(
            "warn",
            f"a full step parks up to {in_bytes(park)} in each teacher, teacher.park_bytes holds "
            f"{in_bytes(recipe.teacher.park_bytes)}: what does not fit is prefilled twice",
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
        f"weights {in_bytes(weights)}, gradients {in_bytes(grads)}, optimizer {in_bytes(states)}"
        f"{' on the host' if host else ''}, logits {in_bytes(logits)}, "
        f"teacher head {in_bytes(head)}, activations {in_bytes(activations)}"
    )
    return f"{in_bytes(on_device)} ({parts}; ZeRO {stage}, {ranks} ranks, {dtype})"


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
    tokens = longest_tokens(recipe, "teacher")
    full = cfg.max_num_seqs * tokens * teacher.kv_bytes_per_token(size) // cfg.tensor_parallel
    engine = _engine_memory(weights, full, cfg.kv_cache_bytes, device)
    park = _positions(recipe) * teacher.hidden_size * _wire_bytes(recipe) // cfg.num_replicas
    parked = "" if cfg.payload == "sampled" else f"; parked rows on the host up to {in_bytes(park)}"
    return f"{engine}, head {in_bytes(head)}{parked}"


def _engine_memory(weights: int, full_cache: int, cache: int | None, device: str) -> str:
    held = cache or (CPU_KV_CACHE_BYTES if device == "cpu" else None)
    kept = "what gpu_memory_utilization leaves" if held is None else in_bytes(held)
    return (
        f"weights {in_bytes(weights)} a GPU, "
        if device == "cuda"
        else f"weights {in_bytes(weights)}, "
    ) + f"KV cache {kept} (all sequences at full length: {in_bytes(full_cache)})"


def report_run_dir(report: CheckReport, recipe: Recipe, student: ModelFacts | None) -> None:
    """Whether this machine can write where the run's folder will be, and whether its files fit.

    Args:
        student: None: unknown, and so is how much it takes.
    """
    folder = recipe.run_dir
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".rock-opd-check-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        report.add(
            "fail",
            f"run.dir={recipe.run.dir}: nothing can be written to {there} here: "
            f"{error.strerror or error}; name another folder, or free it",
        )
        return
    free = free_bytes(there)
    if student is None or free is None:
        report.add("ok", f"{folder}: can be written here")
        return
    needed = _stored_bytes(recipe, student)
    enough = needed <= free
    report.add(
        "ok" if enough else "warn",
        f"{folder}: {in_bytes(free)} free here, checkpoints and models take about "
        f"{in_bytes(needed)}"
        + ("" if enough else "; lower checkpoint.keep_last or keep_hf, or name another run.dir"),
    )


def _stored_bytes(recipe: Recipe, student: ModelFacts) -> int:
    """Checkpoints kept and the one being written beside them, copies for serving, the model."""
    cfg = recipe.checkpoint
    model = student.num_params * BYTES[resolve_dtype(recipe.student.dtype, assumed_device(recipe))]
    states = 12 * student.num_params  # float32 master and two moments
    models = 1 + (cfg.keep_hf + 1 if cfg.save_hf_every else 0)
    models += cfg.keep_best and recipe.eval.problems is not None
    return (cfg.keep_last + 1) * states + models * model


def short_count(num: float) -> str:
    """A count in three digits: 164K, 4.02B."""
    for unit in ("", "K", "M"):
        if num < 1000:
            return f"{num:.3g}{unit}"
        num /= 1000
    return f"{num:.3g}B"
