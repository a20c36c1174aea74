"""Prompt files in, records out: read, checked, rendered, tokenised, put in order.

A row that cannot be used is skipped and counted by reason, or ends the load, as the recipe says.
The order of prompts is a function of (seed, step), so that a resumed run needs no other memory.
No text is ever tokenised twice: given responses come as ids where the file has ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rock_opd.config import DataConfig, EvalConfig
from rock_opd.errors import DataError
from rock_opd.models import tokenizer_fingerprint, vocabulary_width
from rock_opd.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
ROLES = ("system", "user", "assistant", "tool")
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


class _BadRow(Exception):
    """A row that cannot be used: the reason it is counted under, and what exactly is wrong."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


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
    when it was cut off: then no EOS is appended). verl's ``reward_model.ground_truth`` is read as
    the answer.

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
    reader = _RowReader(
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        max_teacher_prompt_tokens=max_prompt_tokens + teacher_prefix_tokens,
        max_response_tokens=max_response_tokens,
        enable_thinking=cfg.enable_thinking,
        need_answer=need_answer,
        need_response=cfg.source == "dataset",
    )
    prompts: list[Prompt] = []
    messages: dict[str, Messages | str] = {}
    skipped: Counter[str] = Counter()
    offenders: list[str] = []
    stop = cfg.skip + cfg.limit if cfg.limit else None
    num_rows = 0
    for index, row in enumerate(_rows(path)):
        if index < cfg.skip:
            continue
        if stop is not None and index >= stop:
            break
        num_rows += 1
        try:
            if isinstance(row, _BadRow):
                raise row
            try:
                prompt, source = reader.read(row, index)
            except (TypeError, ValueError, RecursionError) as error:  # such as a lone surrogate
                raise _BadRow("unreadable text", _line(error)) from None
            if prompt.prompt_id in messages:
                raise _BadRow("duplicate id", f"id '{prompt.prompt_id}' came before")
        except _BadRow as bad:
            where = f"{path}, row {index + 1}: {bad.reason}: {bad.detail}"
            if cfg.on_bad_row == "fail":
                raise DataError(f"{where} (data.on_bad_row=skip leaves such rows out)") from None
            skipped[bad.reason] += 1
            if len(offenders) < NUM_OFFENDERS:
                offenders.append(where)
        else:
            prompts.append(prompt)
            messages[prompt.prompt_id] = source
    if not prompts:
        first = f"; first: {offenders[0]}" if offenders else ""
        raise DataError(
            f"{path}: none of {num_rows} rows is usable (data.skip={cfg.skip}, "
            f"data.limit={cfg.limit}){first}"
        )
    return PromptSet(
        prompts=tuple(prompts),
        messages=messages,
        skipped=dict(skipped),
        offenders=tuple(offenders),
        fingerprint=_fingerprint(prompts),
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


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0".encode())
        for ids in (prompt.token_ids, prompt.teacher_prefix_ids, prompt.response_ids):
            digest.update(b"\0" if ids is None else np.asarray(ids, "<i4").tobytes() + b"\1")
    return digest.hexdigest()[:16]


def _rows(path: Path) -> Iterator[dict[str, Any] | _BadRow]:
    """The file's rows; a line that is no JSON object comes as the ``_BadRow`` it is."""
    if not path.is_file():
        raise DataError(f"{path}: no such prompt file")
    if path.suffix in (".jsonl", ".json"):
        yield from _jsonl_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise DataError(f"{path}: expected a .jsonl or .parquet file, got '{path.suffix}'")


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any] | _BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield _BadRow("bad encoding", f"not UTF-8 at byte {error.start}")
            except ValueError as error:
                yield _BadRow("bad JSON", str(error))
            else:
                if isinstance(row, dict):
                    yield row
                else:
                    yield _BadRow("wrong type", f"expected an object, got {_type(row)}")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: unreadable as parquet: {str(error).splitlines()[0]}") from None


# --- one row --------------------------------------------------------------------------------------


class _RowReader:
    """Turns a row into a ``Prompt``, or raises the ``_BadRow`` it is."""

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_teacher_prompt_tokens: int,
        max_response_tokens: int,
        enable_thinking: bool | None,
        need_answer: bool,
        need_response: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._num_ids = vocabulary_width(tokenizer)
        self._max_prompt = max_prompt_tokens
        self._max_teacher_prompt = max_teacher_prompt_tokens
        self._max_response = max_response_tokens
        self._enable_thinking = enable_thinking
        self._need_answer = need_answer
        self._need_response = need_response

    def read(self, row: dict[str, Any], index: int) -> tuple[Prompt, Messages | str]:
        source = self._source(row)
        token_ids = self._render(source, "prompt", self._max_prompt)
        prefix_ids = None
        if row.get("teacher_messages") is not None:
            teacher_messages = _messages(row["teacher_messages"], "teacher_messages")
            prefix_ids = self._render(
                teacher_messages, "teacher_messages", self._max_teacher_prompt
            )
        answer = _answer(row)
        if self._need_answer and not answer:
            raise _BadRow("no answer", "neither 'answer' nor 'reward_model.ground_truth'")
        prompt = Prompt(
            prompt_id=_row_id(row, index),
            token_ids=token_ids,
            teacher_prefix_ids=prefix_ids,
            answer=answer,
            response_ids=self._response(row) if self._need_response else None,
            data_source=_text(row, "data_source") or "",
        )
        return prompt, source

    def _source(self, row: dict[str, Any]) -> Messages | str:
        if row.get("messages") is not None:
            return _messages(row["messages"], "messages")
        prompt = row.get("prompt")
        if prompt is None:
            raise _BadRow("no prompt", "neither 'messages' nor 'prompt'")
        if not isinstance(prompt, str):
            return _messages(prompt, "prompt")
        if not prompt.strip():
            raise _BadRow("empty prompt", "'prompt' is empty")
        if self._tokenizer.chat_template is None:
            return prompt
        return [{"role": "user", "content": prompt}]

    def _render(self, source: Messages | str, what: str, limit: int) -> np.ndarray:
        if isinstance(source, str):
            ids = self._tokenizer(source)["input_ids"]
        else:
            ids = self._tokenizer(self._template(source), add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
        if not ids:
            raise _BadRow("empty prompt", f"'{what}' renders to no token")
        if len(ids) > limit:
            raise _BadRow(
                "prompt too long", f"'{what}' has {len(ids)} tokens, the limit is {limit}"
            )
        return np.asarray(ids, np.int32)

    def _template(self, messages: Messages) -> str:
        try:
            return render_chat(self._tokenizer, messages, enable_thinking=self._enable_thinking)
        except Exception as error:  # templates are programs and raise what they like
            raise _BadRow("template refused", _line(error)) from None

    def _response(self, row: dict[str, Any]) -> np.ndarray:
        ids, text = row.get("response_ids"), row.get("response")
        if ids is not None:
            made_by = row.get("tokenizer")
            if made_by is not None and made_by != self._fingerprint:
                raise DataError(
                    f"response_ids were written with tokenizer {made_by}, the student's is "
                    f"{self._fingerprint}: ids of another tokenizer; generate the answers again, "
                    "or remove 'response_ids' to train on the text"
                )
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise _BadRow("wrong type", "'response_ids' is not a list of integers")
            beyond = [i for i in ids if not 0 <= i < self._num_ids]
            if beyond:
                raise _BadRow(
                    "id beyond vocabulary",
                    f"response id {beyond[0]}, ids end at {self._num_ids - 1}",
                )
        elif text is not None:
            if not isinstance(text, str):
                raise _BadRow("wrong type", f"'response' is {_type(text)}, expected a string")
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            finished = row.get("finished")
            if finished not in (None, True, False):
                raise _BadRow("wrong type", "'finished' is neither true nor false")
            eos = self._tokenizer.eos_token_id
            if ids and finished is not False and eos is not None and ids[-1] != eos:
                ids = [*ids, eos]
        else:
            raise _BadRow("no response", "data.source=dataset needs 'response_ids' or 'response'")
        if not ids:
            raise _BadRow("empty response", "the response has no token")
        if self._max_response and len(ids) > self._max_response:
            raise _BadRow(
                "response too long", f"{len(ids)} tokens, the limit is {self._max_response}"
            )
        return np.asarray(ids, np.int32)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, enable_thinking: bool | None = None
) -> str:
    """The prompt as text, ending where the assistant's answer begins.

    Raises whatever the template raises; ``ValueError`` when the tokenizer has none.
    """
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **extra
    )


def _messages(value: Any, what: str) -> Messages:
    """Checked messages; columns that parquet filled with nulls are dropped."""
    if not isinstance(value, list):
        raise _BadRow("wrong type", f"'{what}' is {_type(value)}, expected a list of messages")
    if not value:
        raise _BadRow("empty messages", f"'{what}' has no message")
    messages = []
    for number, message in enumerate(value):
        where = f"'{what}' message {number + 1}"
        if not isinstance(message, dict):
            raise _BadRow("wrong type", f"{where} is {_type(message)}, expected an object")
        message = {key: item for key, item in message.items() if item is not None}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _BadRow(
                "wrong type", f"{where} has role {role!r}, expected one of {', '.join(ROLES)}"
            )
        if content is None:
            if not message.get("tool_calls"):
                raise _BadRow("null content", f"{where} has no content")
            message["content"] = ""
        elif not isinstance(content, str):
            raise _BadRow("wrong type", f"{where} has content {_type(content)}, expected a string")
        messages.append(message)
    if messages[-1]["role"] == "assistant":
        raise _BadRow("assistant last", f"'{what}' ends with an answer; put it into 'response'")
    if not any(m["content"].strip() for m in messages if m["role"] != "system"):
        raise _BadRow("empty messages", f"'{what}' has no text")
    return messages


def _row_id(row: dict[str, Any], index: int) -> str:
    value = row.get("id")
    if value is None:
        return f"row-{index + 1}"
    if type(value) not in (str, int) or value == "":
        raise _BadRow("wrong type", f"'id' is {_type(value)}, expected a string or an integer")
    return str(value)


def _answer(row: dict[str, Any]) -> str | None:
    value = row.get("answer")
    if value is None and isinstance(row.get("reward_model"), dict):
        value = row["reward_model"].get("ground_truth")
    if value is None:
        return None
    if type(value) not in (str, int, float):
        raise _BadRow("wrong type", f"the answer is {_type(value)}, expected a string or a number")
    return str(value)


def _text(row: dict[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise _BadRow("wrong type", f"'{key}' is {_type(value)}, expected a string")
    return value


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else str(type(value))
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
