"""One row of a prompt file: read from JSONL or parquet, checked, rendered, tokenised.

A row that cannot be used comes as the ``BadRow`` it is; what becomes of it is for the caller to
say. A file that cannot be read at all is a ``DataError``. No text is ever tokenised twice: given
responses come as ids where the file has ids.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rock_opd.errors import DataError
from rock_opd.models import first_line, tokenizer_fingerprint, vocabulary_width
from rock_opd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
ROLES = ("system", "user", "assistant", "tool")


class BadRow(Exception):
    """A row that cannot be used: the reason it is counted under, and what exactly is wrong."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


# --- files ---


MAX_LINE_BYTES = 64 << 20
"""A longer line is a bad row; more of it is never held in memory."""
ALWAYS_TOKENISED = 100_000
"""Characters that any tokenizer cuts in a moment."""
COLUMNS = (
    *("id", "messages", "prompt", "answer", "reward_model", "data_source", "teacher_messages"),
    *("response_ids", "response", "finished", "tokenizer", "extra_info", "agent_name"),
)
"""What a row may have that is read here; of a parquet file, nothing else is."""
PICTURES = ("images", "videos", "audios")
"""Columns of verl's multi-modal files, whose prompts are no text without them."""
NOT_VERLS = ("id", "answer")
"""Columns that are ours alone: a file of verl's that has them means something else."""
FOREIGN = {
    b"PAR1": "a parquet file by its content; give its name the ending .parquet",
    b"\x1f\x8b": "compressed (gzip); unpack it",
    b"\x28\xb5\x2f\xfd": "compressed (zstd); unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
"""How files begin that are no JSON lines whatever their name, and what to do about it."""


def file_rows(path: Path, *, prompt_column: str | None = None) -> Iterator[dict[str, Any] | BadRow]:
    """The file's rows; a line that is no JSON object comes as the ``BadRow`` it is.

    Args:
        prompt_column: the one that must be there; None: ``messages`` or ``prompt``.

    Raises:
        DataError: no such file, one that cannot be read, or one of another format.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # such as a name that no file system takes
        raise DataError(f"prompt file {path}: cannot be read: {error.strerror}") from None
    if is_folder:
        raise DataError(f"{path}: expected a prompt file, got a folder; name the file in it")
    if not is_file:
        raise DataError(f"{path}: no such prompt file")
    if path.suffix in (".jsonl", ".json"):
        yield from _jsonl_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path, prompt_column)
    else:
        raise DataError(f"{path}: expected a .jsonl or .parquet file, got '{path.suffix}'")


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any] | BadRow]:
    for number, line in enumerate(_lines(path)):
        if isinstance(line, BadRow):
            yield line
            continue
        if number == 0:
            for start, what in FOREIGN.items():
                if line.startswith(start):
                    raise DataError(f"{path}: expected JSON lines, got {what}")
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            yield BadRow("bad encoding", f"not UTF-8 at byte {error.start}")
        except RecursionError:
            yield BadRow("bad JSON", "nested too deeply")
        except BadRow as bad:
            yield bad
        except ValueError as error:
            yield BadRow("bad JSON", str(error) + _array_hint(line, number))
        else:
            if isinstance(row, dict):
                yield row
            else:
                what = f"expected an object, got {_type(row)}"
                yield BadRow("wrong type", what + _array_hint(line, number))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose keys JSON itself would let the last one win."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1)
        raise BadRow("key twice", f"the key {twice[:40]!r} stands twice in one object")
    return made


def _array_hint(line: bytes, number: int) -> str:
    if number or not line.lstrip().startswith(b"["):
        return ""
    return " (JSON lines have one object a line and no brackets around them)"


def _lines(path: Path) -> Iterator[bytes | BadRow]:
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                yield BadRow("line too long", f"more than {MAX_LINE_BYTES >> 20} MiB")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parquet_rows(path: Path, prompt_column: str | None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = {*COLUMNS, *filter(None, [prompt_column])}
            if twice := sorted(name for name in wanted if names.count(name) > 1):
                raise DataError(
                    f"{path}: has {names.count(twice[0])} columns named '{twice[0]}'; rename all "
                    "but the one that is meant"
                )
            if not ({prompt_column} if prompt_column else {"messages", "prompt"}) & set(names):
                none = f"no column '{prompt_column}'"
                if prompt_column is None:
                    none = "neither a column 'messages' nor 'prompt'"
                raise DataError(
                    f"{path}: {none}, it has {', '.join(names[:8]) or 'none'}; name the one that "
                    "holds the prompts: data.prompt_column"
                )
            if pictures := [name for name in PICTURES if name in names]:
                raise DataError(
                    f"{path}: has a column '{pictures[0]}', and only text is trained on; without "
                    "it the prompts would read otherwise than was meant"
                )
            columns = [name for name in names if name in wanted]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: unreadable as parquet: {first_line(error)}") from None


# --- one row --------------------------------------------------------------------------------------


class RowReader:
    """Turns a row into a ``Prompt``."""

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
        prompt_column: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._num_ids = vocabulary_width(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self._max_prompt = max_prompt_tokens
        self._max_teacher_prompt = max_teacher_prompt_tokens
        self._max_response = max_response_tokens
        self._enable_thinking = enable_thinking
        self._need_answer = need_answer
        self._need_response = need_response
        self._prompt_column = prompt_column

    def read(self, row: dict[str, Any], index: int) -> tuple[Prompt, Messages | str]:
        """The prompt, and what of the row was rendered.

        Args:
            index: of the row in its file, from 0; names a row without an id.

        Raises:
            BadRow: the row cannot be used.
            DataError: response ids of another tokenizer; a row for an agent with tools.
        """
        _refuse_agents(row)
        try:
            return self._read(row, index)
        except (TypeError, ValueError, RecursionError) as error:  # such as half a surrogate pair
            raise BadRow("unreadable text", first_line(error)) from None

    def _read(self, row: dict[str, Any], index: int) -> tuple[Prompt, Messages | str]:
        source = self._source(row)
        token_ids = self._render(source, "prompt", self._max_prompt)
        prefix_ids = None
        if row.get("teacher_messages") is not None:
            teacher_messages = _messages(row["teacher_messages"], "teacher_messages")
            prefix_ids = self._render(
                teacher_messages, "teacher_messages", self._max_teacher_prompt
            )
        answer = _answer(row, needed=self._need_answer)
        if self._need_answer and not answer:
            raise BadRow("no answer", "neither 'answer' nor 'reward_model.ground_truth'")
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
        column = self._prompt_column
        if column is None:
            column = "messages" if row.get("messages") is not None else "prompt"
        prompt = row.get(column)
        if prompt is None:
            keys = ", ".join(map(repr, list(row)[:6])) or "none"
            named = self._prompt_column
            what = f"'{named}' is not" if named else "neither 'messages' nor 'prompt' is"
            raise BadRow("no prompt", f"{what} given; keys: {keys}")
        if column == "messages" or not isinstance(prompt, str):
            return _messages(prompt, column)
        if not prompt.strip():
            raise BadRow("empty prompt", f"'{column}' is empty")
        if self._tokenizer.chat_template is None:
            return prompt
        return [{"role": "user", "content": prompt}]

    def _render(self, source: Messages | str, what: str, limit: int) -> np.ndarray:
        text = source if isinstance(source, str) else self._template(source)
        self._refuse_endless(text, limit, f"'{what}'", "prompt too long")
        if isinstance(source, str):
            ids = self._tokenizer(text)["input_ids"]
        else:
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise BadRow("empty prompt", f"'{what}' renders to no token")
        if len(ids) > limit:
            raise BadRow("prompt too long", f"'{what}' has {len(ids)} tokens, the limit is {limit}")
        return np.asarray(ids, np.int32)

    def _refuse_endless(self, text: str, limit: int, what: str, reason: str) -> None:
        """Refuses what cannot fit before a tokenizer takes minutes over it (66 s for 5 MB).

        A token stands for no more characters than the longest in the vocabulary; where whitespace
        is merged or stripped before, only the rest is sure to need tokens.
        """
        if len(text) <= ALWAYS_TOKENISED:
            return
        num_chars = sum(map(len, text.split()))
        if num_chars > limit * self._longest_token:
            raise BadRow(
                reason,
                f"{what} has {len(text)} characters, more than {limit} tokens can hold",
            )

    def _template(self, messages: Messages) -> str:
        try:
            return render_chat(self._tokenizer, messages, enable_thinking=self._enable_thinking)
        except Exception as error:  # templates are programs and raise what they like
            raise BadRow("template refused", first_line(error)) from None

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
                raise BadRow("wrong type", "'response_ids' is not a list of integers")
            beyond = [i for i in ids if not 0 <= i < self._num_ids]
            if beyond:
                raise BadRow(
                    "id beyond vocabulary",
                    f"response id {beyond[0]}, ids end at {self._num_ids - 1}",
                )
        elif text is not None:
            if not isinstance(text, str):
                raise BadRow("wrong type", f"'response' is {_type(text)}, expected a string")
            if self._max_response:
                self._refuse_endless(text, self._max_response, "'response'", "response too long")
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            finished = row.get("finished")
            if finished not in (None, True, False):
                raise BadRow("wrong type", "'finished' is neither true nor false")
            eos = self._tokenizer.eos_token_id
            if ids and finished is not False and eos is not None and ids[-1] != eos:
                ids = [*ids, eos]
        else:
            raise BadRow("no response", "data.source=dataset needs 'response_ids' or 'response'")
        if not ids:
            raise BadRow("empty response", "the response has no token")
        if self._max_response and len(ids) > self._max_response:
            raise BadRow(
                "response too long", f"{len(ids)} tokens, the limit is {self._max_response}"
            )
        return np.asarray(ids, np.int32)


def _refuse_agents(row: dict[str, Any]) -> None:
    """Refuses verl's rows that are not answered in one turn: sampled so, they are another task."""
    agent, extra = row.get("agent_name"), row.get("extra_info")
    if agent not in (None, "", "single_turn_agent"):
        asks = f"'agent_name' is {agent!r}"
    elif isinstance(extra, dict) and extra.get("need_tools_kwargs"):
        asks = "'extra_info.need_tools_kwargs' is true"
    else:
        return
    raise DataError(
        f"{asks}, and answers are sampled in one turn without tools; leave it out to train on such "
        "answers"
    )


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
        as_text = isinstance(value, str) and value.lstrip().startswith("[")
        hint = " (JSON inside a string: store the list itself)" if as_text else ""
        raise BadRow("wrong type", f"'{what}' is {_type(value)}, expected a list of messages{hint}")
    if not value:
        raise BadRow("empty messages", f"'{what}' has no message")
    messages = []
    for number, message in enumerate(value):
        where = f"'{what}' message {number + 1}"
        if not isinstance(message, dict):
            raise BadRow("wrong type", f"{where} is {_type(message)}, expected an object")
        message = {key: item for key, item in message.items() if item is not None}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRow(
                "wrong type", f"{where} has role {role!r}, expected one of {', '.join(ROLES)}"
            )
        if content is None:
            if not message.get("tool_calls"):
                raise BadRow("null content", f"{where} has no content")
            message["content"] = ""
        elif not isinstance(content, str):
            hint = "; join the parts' text" if isinstance(content, list) else ""
            raise BadRow(
                "wrong type", f"{where}: the content is {_type(content)}, expected a string{hint}"
            )
        messages.append(message)
    if messages[-1]["role"] == "assistant":
        raise BadRow("assistant last", f"'{what}' ends with an answer; put it into 'response'")
    if not any(m["content"].strip() for m in messages if m["role"] != "system"):
        if any(m["content"].strip() for m in messages):
            raise BadRow("empty messages", f"'{what}' has text from the system only")
        raise BadRow("empty messages", f"'{what}' has no text")
    return messages


def numbered(index: int) -> str:
    """The id of a row that brings none."""
    return f"row-{index + 1}"


def _row_id(row: dict[str, Any], index: int) -> str:
    value = row.get("id")
    if value is None and isinstance(row.get("extra_info"), dict):  # verl's, of the data set
        value = row["extra_info"].get("index")
        return numbered(index) if type(value) not in (str, int) else _encodable(str(value))
    if value is None:
        return numbered(index)
    if type(value) not in (str, int) or value == "":
        raise BadRow("wrong type", f"'id' is {_type(value)}, expected a string or an integer")
    return _encodable(str(value))


def _answer(row: dict[str, Any], *, needed: bool) -> str | None:
    value = row.get("answer")
    if value is None and isinstance(row.get("reward_model"), dict):
        value = row["reward_model"].get("ground_truth")
        if isinstance(value, list | dict) and not needed:
            return None  # what a reward function of verl's own reads
    if value is None:
        return None
    if type(value) not in (str, int, float):
        raise BadRow("wrong type", f"the answer is {_type(value)}, expected a string or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow("no answer", f"the answer is {value}; leave it out where there is none")
    return _encodable(str(value))


def _text(row: dict[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRow("wrong type", f"'{key}' is {_type(value)}, expected a string")
    return None if value is None else _encodable(value)


def _encodable(text: str) -> str:
    """The text, which will be written to files; ``UnicodeEncodeError`` (a ``ValueError``) on half a
    surrogate pair."""
    text.encode()
    return text


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", bytes: "bytes"}
    if value is None:
        return "null"
    named = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return names.get(type(value), named)
