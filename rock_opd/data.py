"""Sets of prompts: loaded, put in order, held out; given responses, and answers written down.

A row that cannot be used is skipped and counted by reason, or ends the load, as the recipe says
(what a row must be is in ``prompt_rows``). The order of prompts is a function of (seed, step), so
that a resumed run needs no other memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.config import DataConfig, EvalConfig, Recipe
from rock_opd.errors import DataError
from rock_opd.models import tokenizer_fingerprint
from rock_opd.prompt_rows import NOT_VERLS, BadRow, Messages, RowReader, file_rows, numbered
from rock_opd.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_OFFENDERS = 5


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts ready to be sampled from, their order, and what was left out."""

    prompts: tuple[Prompt, ...]
    """In the order of the file."""
    messages: dict[str, Messages | str] = field(repr=False)
    """By prompt id: what was rendered; a string where the tokenizer has no chat template."""
    skipped: dict[str, int]
    """Rows left out, by reason."""
    offenders: tuple[str, ...]
    """The first of them, one line each."""
    fingerprint: str
    """Sixteen hex digits over ids and tokens of all prompts: equal data give equal digits."""
    seed: int
    shuffle: bool

    def steps_per_epoch(self, prompts_per_step: int) -> int:
        """Whole steps in one pass; prompts left over at its end wait for the next one.

        Raises:
            DataError: fewer prompts than one step takes.
        """
        if len(self.prompts) < prompts_per_step:
            raise DataError(
                f"{len(self.prompts)} usable prompts are fewer than rollout.prompts_per_step="
                f"{prompts_per_step}, and a step takes each only once; lower it or bring more"
            )
        return len(self.prompts) // prompts_per_step

    def batch(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """The prompts of one step (counted from 0), all different: a function of (seed, step)."""
        epoch, place = divmod(step, self.steps_per_epoch(prompts_per_step))
        if not self.shuffle:  # round and round, so that none is left out
            first, num = step * prompts_per_step, len(self.prompts)
            return [self.prompts[i % num] for i in range(first, first + prompts_per_step)]
        start = place * prompts_per_step
        order = _epoch_order(len(self.prompts), self.seed, epoch)
        return [self.prompts[i] for i in order[start : start + prompts_per_step]]


@lru_cache(maxsize=4)
def _epoch_order(num: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num)


# --- loading --------------------------------------------------------------------------------------


def load_prompts(
    cfg: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    max_response_tokens: int = 0,
    teacher_prefix_tokens: int = 0,
    seed: int = 0,
    need_answer: bool = False,
) -> PromptSet:
    """Reads ``cfg.prompts``; ``cfg.skip`` and ``cfg.limit`` count rows of the file, good or bad.

    A row has ``messages``, or ``prompt`` (a message list, or a string: one user message, or raw
    text where the tokenizer has no chat template); optional ``id`` (else ``row-<number>``),
    ``answer``, ``data_source``, ``teacher_messages`` (what the teacher reads in their place,
    rendered with the same template), ``response_ids`` or ``response`` (with ``finished: false``
    when it was cut off: then no EOS is appended). verl's rows are read as they are:
    ``extra_info.index`` is the id (where it came before, the row's number),
    ``reward_model.ground_truth`` the answer; with ``cfg.row_format`` verl ``messages``, ``id`` and
    ``answer`` are none of it.

    Args:
        max_prompt_tokens: longer prompts are bad rows.
        max_response_tokens: longer given responses are bad rows; 0: no limit.
        teacher_prefix_tokens: what a teacher's prompt may take beyond ``max_prompt_tokens``.
        seed: of the order.
        need_answer: a row without one is bad (evaluation problems).

    Raises:
        DataError: no such file, an unknown format, response ids of another tokenizer, a bad row
            when ``cfg.on_bad_row`` is ``fail``, or no usable row at all.
    """
    path = Path(cfg.prompts)
    as_verl = cfg.row_format == "verl"
    column = cfg.prompt_column or ("prompt" if as_verl else None)
    reader = RowReader(
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        max_teacher_prompt_tokens=max_prompt_tokens + teacher_prefix_tokens,
        max_response_tokens=max_response_tokens,
        enable_thinking=cfg.enable_thinking,
        need_answer=need_answer,
        need_response=cfg.source == "dataset",
        prompt_column=column,
    )
    prompts: list[Prompt] = []
    messages: dict[str, Messages | str] = {}
    skipped: Counter[str] = Counter()
    offenders: list[str] = []
    stop = cfg.skip + cfg.limit if cfg.limit else None
    num_rows, index = 0, -1
    for index, row in enumerate(file_rows(path, prompt_column=column)):
        if index < cfg.skip:
            continue
        if stop is not None and index >= stop:
            break
        num_rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            if as_verl:
                row = {key: value for key, value in row.items() if key not in NOT_VERLS}
            prompt, source = reader.read(row, index)
            if prompt.prompt_id in messages and row.get("id") is None:
                # verl's extra_info.index is unique within one data set, a file may hold several
                prompt = dataclasses.replace(prompt, prompt_id=numbered(index))
            if prompt.prompt_id in messages:
                raise BadRow("duplicate id", f"id '{prompt.prompt_id}' came before")
        except DataError as error:  # of the whole file, seen in this row
            raise DataError(f"{path}, row {index + 1}: {error}") from None
        except BadRow as bad:
            where = f"{path}, row {index + 1}: {bad.reason}: {bad.detail}"
            if cfg.on_bad_row == "fail":
                raise DataError(f"{where} (data.on_bad_row=skip leaves such rows out)") from None
            skipped[bad.reason] += 1
            if len(offenders) < NUM_OFFENDERS:
                offenders.append(where)
        else:
            prompts.append(prompt)
            messages[prompt.prompt_id] = source
    if index < 0:
        raise DataError(f"{path}: the file has no row")
    if not num_rows:
        raise DataError(
            f"{path}: data.skip={cfg.skip} leaves out all of its {index + 1} rows; lower it"
        )
    if not prompts:
        raise DataError(
            f"{path}: none of {num_rows} rows is usable (data.skip={cfg.skip}, "
            f"data.limit={cfg.limit}); first: {offenders[0]}"
        )
    return PromptSet(
        prompts=tuple(prompts),
        messages=messages,
        skipped=dict(skipped),
        offenders=tuple(offenders),
        fingerprint=prompts_digest(prompts),
        seed=seed,
        shuffle=cfg.shuffle,
    )


def load_heldout(
    cfg: DataConfig,
    eval_cfg: EvalConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    teacher_prefix_tokens: int = 0,
) -> tuple[Prompt, ...]:
    """The first ``eval.num_heldout`` usable prompts of the held-out file, or of the ``data.skip``
    first rows of the training file.

    Raises:
        DataError: what ``load_prompts`` raises, or fewer usable ones than asked.
    """
    if eval_cfg.heldout_prompts is not None:
        source = dataclasses.replace(cfg, prompts=eval_cfg.heldout_prompts, skip=0, limit=0)
    else:
        source = dataclasses.replace(cfg, skip=0, limit=cfg.skip)
    source = dataclasses.replace(source, source="student")
    loaded = load_prompts(
        source,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        teacher_prefix_tokens=teacher_prefix_tokens,
    )
    if len(loaded.prompts) < eval_cfg.num_heldout:
        raise DataError(
            f"{source.prompts}: {len(loaded.prompts)} usable held-out prompts, "
            f"eval.num_heldout={eval_cfg.num_heldout}; raise data.skip or lower eval.num_heldout"
        )
    return loaded.prompts[: eval_cfg.num_heldout]


def load_problems(
    cfg: DataConfig,
    eval_cfg: EvalConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> PromptSet:
    """The problems of ``eval.problems``, each with an answer, in the order of the file.

    Raises:
        DataError: what ``load_prompts`` raises.
    """
    assert eval_cfg.problems is not None
    source = dataclasses.replace(
        cfg, prompts=eval_cfg.problems, source="student", skip=0, limit=0, shuffle=False
    )
    return load_prompts(
        source, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens, need_answer=True
    )


def num_steps(recipe: Recipe, prompts: PromptSet, *, dtype: str) -> int:
    """Steps of the run: as asked (for this dtype of the student), or whole passes over the
    prompts."""
    per_epoch = prompts.steps_per_epoch(recipe.rollout.prompts_per_step)
    if dtype == "float32" and recipe.run.num_steps_float32:
        return recipe.run.num_steps_float32
    return recipe.run.num_steps or recipe.run.num_epochs * per_epoch


def prompts_digest(prompts: Iterable[Prompt], *, answers: bool = False) -> str:
    """Tells prompts from others, by what is read of them; order counts.

    Args:
        answers: by their gold answers too.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0".encode())
        for ids in (prompt.token_ids, prompt.teacher_prefix_ids, prompt.response_ids):
            digest.update(b"\0" if ids is None else np.asarray(ids, "<i4").tobytes() + b"\1")
        if answers:
            digest.update(f"{prompt.answer}\0".encode())
    return digest.hexdigest()[:16]


# --- given responses ------------------------------------------------------------------------------


def given_rollouts(prompts: Iterable[Prompt]) -> list[Rollout]:
    """Rollouts of the file's own responses: every response token is masked in, none was sampled.

    The prompts come from ``load_prompts`` with ``data.source=dataset``, so each has a response.
    """
    rollouts = []
    for prompt in prompts:
        assert prompt.response_ids is not None, prompt.prompt_id
        token_ids = np.concatenate([prompt.token_ids, prompt.response_ids]).astype(np.int32)
        prompt_len = len(prompt.token_ids)
        rollouts.append(
            Rollout(
                prompt_id=prompt.prompt_id,
                sample_idx=0,
                token_ids=token_ids,
                loss_mask=np.arange(len(token_ids)) >= prompt_len,
                logprobs=np.full(len(token_ids), np.nan, np.float32),
                finish_reason="given",
                policy_version=-1,
                prompt_len=prompt_len,
                teacher_id=prompt.teacher_id,
                teacher_prefix_ids=prompt.teacher_prefix_ids,
            )
        )
    return rollouts


def write_answers(
    path: str | Path,
    batches: Iterable[list[Rollout]],
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """Writes sampled answers as rows that ``load_prompts`` reads with ``data.source=dataset``.

    Each batch is on disk before the next is asked for, in ``<path>.partial``, which becomes
    ``path`` when the last one is written. A row has ``id`` (``Rollout.key``), ``messages`` (or
    ``prompt``), ``response``, ``response_ids``, ``finished``, ``finish_reason``, ``tokenizer``
    (its fingerprint), ``data_source`` and, where known, ``answer``. Empty answers are left out.

    Returns:
        Rows written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    by_id = {prompt.prompt_id: prompt for prompt in prompts.prompts}
    made_by = tokenizer_fingerprint(tokenizer)
    num_rows = 0
    with partial.open("w", encoding="utf-8") as out:
        for batch in batches:
            for rollout in batch:
                ids = rollout.token_ids[rollout.positions].tolist()
                if not ids:
                    continue
                source = prompts.messages[rollout.prompt_id]
                prompt = by_id[rollout.prompt_id]
                row = {
                    "id": rollout.key,
                    ("prompt" if isinstance(source, str) else "messages"): source,
                    "response": tokenizer.decode(ids, skip_special_tokens=True),
                    "response_ids": ids,
                    "finished": rollout.finish_reason == "stop",
                    "finish_reason": rollout.finish_reason,
                    "tokenizer": made_by,
                    "data_source": prompt.data_source,
                }
                if prompt.answer is not None:
                    row["answer"] = prompt.answer
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                num_rows += 1
            out.flush()
    os.replace(partial, path)
    return num_rows
