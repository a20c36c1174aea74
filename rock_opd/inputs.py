"""What a run reads and checks before any engine starts: prompts, tokenizer, lists of token ids."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import PolicyConfig, Recipe
from rock_opd.core.context import WindowEncoder
from rock_opd.core.policies import TokenPolicy, make_policy, unguarded
from rock_opd.data import PromptSet, load_heldout, load_problems, load_prompts
from rock_opd.errors import ConfigError, ModelError
from rock_opd.models import (
    ModelFacts,
    load_tokenizer,
    model_facts,
    model_fingerprint,
    num_real_ids,
    tokenizer_fingerprint,
)
from rock_opd.probe import window_encoder
from rock_opd.rocklist import read_ids
from rock_opd.types import Prompt
from rock_opd.vocabulary import Vocabulary, guarded_ids
from rock_opd.weight_files import PLAIN_DTYPES


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What was read and checked before any engine started."""

    prompts: PromptSet
    heldout: tuple[Prompt, ...]
    problems: tuple[Prompt, ...]
    tokenizer: Any
    num_real_ids: int
    frozen_list: np.ndarray | None
    """int32: the ids of ``policy.ids_file``."""
    guard_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32, ascending: types that are never frozen (``policy.guard_special`` and
    ``guard_file``)."""
    encoder: WindowEncoder | None = None
    """What turns contexts into vectors, where the run keeps a probe set."""
    teacher: str = ""
    """``models.model_fingerprint`` of the teacher."""
    notices: tuple[str, ...] = ()
    """What the person should know before the run starts."""


def longest_tokens(recipe: Recipe, role: str) -> int:
    """Tokens of the longest sequence that a role's engine must hold, evaluation included."""
    if role == "student":
        return recipe.max_model_len
    return recipe.rollout.max_model_len + recipe.teacher.prefix_tokens + 1


def role_problems(recipe: Recipe, role: str, facts: ModelFacts) -> list[str]:
    """Why a model that is whole cannot serve as ``student`` or ``teacher`` of this recipe: one line
    each, with what to change; usually none."""
    found, who = [], f"{role} {facts.model}"
    reads_head = role == "student" or recipe.teacher.engine == "hidden"
    other_engine = "use teacher.engine=prompt_logprobs with payload topk_tail or sampled"
    if (tokens := longest_tokens(recipe, role)) > facts.max_positions:
        sum_of = "rollout.max_prompt_tokens + " + (
            "the longest answer"
            if role == "student"
            else "rollout.max_new_tokens + teacher.prefix_tokens + 1"
        )
        found.append(
            f"{who} reads at most {facts.max_positions} tokens, the recipe needs {tokens} "
            f"({sum_of}); lower them"
        )
    if role == "student" and facts.quantized:
        found.append(f"{who} is quantised and cannot be trained; take the unquantised model")
    elif reads_head and facts.head_dtype not in (None, *PLAIN_DTYPES):
        way = "take the unquantised model" if role == "student" else other_engine
        found.append(f"{who}: the output head is stored as {facts.head_dtype}, quantised; {way}")
    if reads_head and facts.scaled_head is not None:
        way = "take another model" if role == "student" else other_engine
        found.append(
            f"{who} has {facts.scaled_head}: its logits are not head @ hidden, which the loss "
            f"computes; {way}"
        )
    return found


def role_facts(recipe: Recipe, role: str) -> ModelFacts:
    """What the files of the ``student`` or ``teacher`` say; a remote teacher's weights are not
    looked for.

    Raises:
        ModelError: files that are missing or cut short.
    """
    if role == "student":
        return model_facts(recipe.student.model)
    return model_facts(recipe.teacher.model, has_weights=not recipe.teacher.remote)


def require_models(recipe: Recipe) -> None:
    """Looks at student and teacher, where they are folders, before an engine starts.

    Raises:
        ModelError: one that is not whole, or cannot serve its role; the first problem found.
    """
    for role, model in (("student", recipe.student.model), ("teacher", recipe.teacher.model)):
        if not Path(model).is_dir():
            continue
        if problems := role_problems(recipe, role, role_facts(recipe, role)):
            raise ModelError(problems[0])


def guarded_notices(frozen_list: np.ndarray, guard_ids: np.ndarray) -> list[str]:
    """Told of a list to freeze that is guarded in part.

    Raises:
        DataError: it is guarded whole.
    """
    num_guarded = len(frozen_list) - len(unguarded(frozen_list, guard_ids))
    if not num_guarded:
        return []
    return [
        f"policy.ids_file: {num_guarded} of its {len(frozen_list)} types are guarded (see "
        "policy.guard_file and policy.guard_special) and will train"
    ]


def listed_types(
    cfg: PolicyConfig, vocabulary: Vocabulary
) -> tuple[np.ndarray | None, np.ndarray, list[str]]:
    """What a policy is given by lists: int32 ids of ``policy.ids_file`` (None without one), int32
    guarded ids, and what the person should know of them.

    Raises:
        DataError: a list that cannot be used, or is guarded whole.
    """
    notices: list[str] = []
    guard_ids = guarded_ids(cfg, vocabulary, say=notices.append)
    frozen_list = None
    if cfg.ids_file is not None:
        frozen_list, notice = read_ids(
            cfg.ids_file, num_types=vocabulary.num_types, tokenizer=vocabulary.fingerprint
        )
        notices += [f"policy.ids_file: {notice}"] if notice else []
        notices += guarded_notices(frozen_list, guard_ids)
    return frozen_list, guard_ids, notices


def build_policy(
    cfg: PolicyConfig, *, frozen_list: np.ndarray | None, guard_ids: np.ndarray, seed: int
) -> TokenPolicy:
    """The policy of a recipe; ``frozen_list`` and ``guard_ids`` as ``listed_types`` gives them."""
    return make_policy(
        cfg.name,
        ids=frozen_list,
        never=guard_ids,
        lam=cfg.lam,
        score=cfg.score,
        top_k=cfg.top_k,
        threshold=cfg.threshold,
        hysteresis=cfg.hysteresis,
        drop_most_frequent=cfg.drop_most_frequent,
        control_may_use_dropped=cfg.control_may_use_dropped,
        min_count=cfg.min_count,
        warmup_steps=cfg.warmup_steps,
        refresh_every=cfg.refresh_every,
        audit_share=cfg.audit_share,
        window_radius=cfg.window_radius,
        window_threshold=cfg.window_threshold,
        seed=seed,
    )


def context_encoder(recipe: Recipe, *, num_real_ids: int) -> WindowEncoder:
    """The encoder of the recipe's probe set.

    Raises:
        ModelError: the teacher's embedding cannot be read.
    """
    return window_encoder(
        recipe.probe,
        teacher=recipe.teacher.model,
        num_real_ids=num_real_ids,
        seed=recipe.run.seed,
    )


def load_inputs(recipe: Recipe) -> Inputs:
    """Reads and checks everything that needs no engine.

    Raises:
        ConfigError, DataError, ModelError: one line each.
    """
    from_run = recipe.student.from_run
    if from_run is not None and not (Path(recipe.student.model) / "config.json").is_file():
        raise ConfigError(f"student.from_run {from_run}: no model/ in it; has that run finished?")
    for key, asked, module in (
        ("log.wandb_project", recipe.log.wandb_project, "wandb"),
        ("log.mlflow_uri", recipe.log.mlflow_uri, "mlflow"),
    ):
        if asked is not None and importlib.util.find_spec(module) is None:
            raise ConfigError(f"{key} needs {module}: pip install 'rock-opd[{module}]'")
    require_models(recipe)
    tokenizer = load_tokenizer(recipe.student.model)
    width = num_real_ids(recipe.student.model, recipe.teacher.model)
    limit = recipe.rollout.max_prompt_tokens
    prompts = load_prompts(
        recipe.data,
        tokenizer=tokenizer,
        max_prompt_tokens=limit,
        max_response_tokens=recipe.rollout.max_new_tokens,
        teacher_prefix_tokens=recipe.teacher.prefix_tokens,
        seed=recipe.run.seed,
    )
    reading = {"tokenizer": tokenizer, "max_prompt_tokens": limit}
    heldout: tuple[Prompt, ...] = ()
    if recipe.eval.num_heldout:
        prefix = recipe.teacher.prefix_tokens
        heldout = load_heldout(recipe.data, recipe.eval, teacher_prefix_tokens=prefix, **reading)
    graded = load_problems(recipe.data, recipe.eval, **reading) if recipe.eval.problems else None
    vocabulary = Vocabulary(
        model=recipe.student.model,
        num_types=width,
        fingerprint=tokenizer_fingerprint(tokenizer),
        tokenizer=tokenizer,
    )
    frozen_list, guard_ids, notices = listed_types(recipe.policy, vocabulary)
    return Inputs(
        prompts=prompts,
        heldout=heldout,
        problems=graded.prompts if graded else (),
        tokenizer=tokenizer,
        num_real_ids=width,
        frozen_list=frozen_list,
        guard_ids=guard_ids,
        encoder=context_encoder(recipe, num_real_ids=width) if recipe.uses_probe else None,
        teacher=model_fingerprint(recipe.teacher.model, has_weights=not recipe.teacher.remote),
        notices=tuple(notices),
    )
