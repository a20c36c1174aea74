"""Prompt files and rows that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from case import MAX_PROMPT_TOKENS, Bench, Case

from rock_opd.errors import ConfigError, DataError, RockOPDError

GOOD = {"id": "good", "prompt": "hi", "response": "yes", "answer": "1"}
USER = {"role": "user", "content": "hi"}


def lines(*rows: object) -> bytes:
    """JSON lines; bytes go in as they are."""
    return b"".join(
        (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
    )


def row(
    id: str,
    wrong: str,
    bad: object,
    reason: str,
    says: str,
    todo: str,
    *,
    needs_answer: bool = False,
    borrowed: str | None = None,
    **data: Any,
) -> Case:
    """A good row, then a bad one."""

    def run(bench: Bench) -> object:
        path = bench.write("rows.jsonl", lines(GOOD, bad))
        return bench.prompts(path, needs_answer=needs_answer, **data)

    return Case(
        id=id,
        area="dataset",
        wrong=wrong,
        run=run,
        outcome="left out",
        error=DataError,
        reason=reason,
        says=rf"^rows.jsonl, row 2: {reason}: .*{says}",
        todo=todo,
        borrowed=borrowed,
    )


def parquet_row(id: str, wrong: str, bad: dict, reason: str, says: str, todo: str) -> Case:
    """The same in a parquet file, whose columns have one type."""

    def run(bench: Bench) -> object:
        good = {key: ([USER] if key == "messages" else None) for key in bad}
        return bench.prompts(table(bench.folder / "rows.parquet", [{**good, "id": "g"}, bad]))

    return Case(
        id=id,
        area="dataset",
        wrong=wrong,
        run=run,
        outcome="left out",
        error=DataError,
        reason=reason,
        says=rf"^rows.parquet, row 2: {reason}: .*{says}",
        todo=todo,
    )


def table(path: Path, rows: list[dict]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def file(
    id: str,
    wrong: str,
    make: Callable[[Bench], Path],
    says: str,
    todo: str,
    *,
    error: type[RockOPDError] = DataError,
    borrowed: str | None = None,
    **data: Any,
) -> Case:
    """A file that cannot be used at all."""

    def run(bench: Bench) -> object:
        return bench.prompts(make(bench), **data)

    return Case(
        id=id,
        area="dataset",
        wrong=wrong,
        run=run,
        error=error,
        says=says,
        todo=todo,
        borrowed=borrowed,
    )


def content(name: str, data: bytes) -> Callable[[Bench], Path]:
    return lambda bench: bench.write(name, data)


def fine(id: str, wrong: str, data: bytes) -> Case:
    """What other tools stumble over, and is no fault here."""

    def run(bench: Bench) -> object:
        found = bench.prompts(bench.write("rows.jsonl", data))
        assert [prompt.prompt_id for prompt in found.prompts] == ["a", "b"]
        return found

    return Case(
        id=id,
        area="dataset",
        wrong=wrong,
        run=run,
        outcome="read",
        todo="Nothing: it is read.",
    )


def _folder(bench: Bench) -> Path:
    (bench.folder / "data.jsonl").mkdir()
    return bench.folder / "data.jsonl"


def _torn_parquet(bench: Bench) -> Path:
    path = table(bench.folder / "rows.parquet", [GOOD] * 100)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _two_columns(bench: Bench) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = bench.folder / "rows.parquet"
    pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    return path


def _gzip(bench: Bench) -> Path:
    import gzip

    return bench.write("rows.jsonl", gzip.compress(lines(GOOD)))


def _renamed_parquet(bench: Bench) -> Path:
    return table(bench.folder / "p.parquet", [GOOD]).rename(bench.folder / "rows.jsonl")


def _too_few(bench: Bench) -> object:
    found = bench.prompts(bench.write("rows.jsonl", lines(GOOD)))
    return found.steps_per_epoch(8)


def _too_few_heldout(bench: Bench) -> object:
    return bench.inputs("eval.num_heldout=8", "data.skip=8", "rollout.max_prompt_tokens=24")


def _set(id: str, wrong: str, run: Callable[[Bench], object], says: str, todo: str) -> Case:
    return Case(id=id, area="dataset", wrong=wrong, run=run, error=DataError, says=says, todo=todo)


def _endless_line(bench: Bench) -> object:
    from rock_opd.prompt_rows import MAX_LINE_BYTES

    endless = b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}'
    return bench.prompts(bench.write("rows.jsonl", lines(GOOD, endless)))


ROWS = [
    row(
        "torn-line",
        "a line cut short",
        b'{"id": "x", "messages": [',
        "bad JSON",
        "",
        "Write the file again; the last line of a broken download looks so.",
        borrowed=r"(?<=bad JSON: ).*",
    ),
    row(
        "latin-1-line",
        "another encoding than UTF-8",
        b'{"id": "x", "prompt": "caf\xe9"}',
        "bad encoding",
        "not UTF-8 at byte 26",
        "Save it as UTF-8 (`iconv -f latin1 -t utf-8`).",
    ),
    row(
        "half-a-surrogate",
        "half of a surrogate pair, which is no text",
        b'{"id": "x", "prompt": "\\ud800"}',
        "unreadable text",
        "",
        "Repair the text where it was cut.",
        borrowed=r"(?<=unreadable text: ).*",
    ),
    row(
        "half-a-surrogate-in-the-id",
        "the same in an id",
        b'{"id": "\\ud800", "prompt": "hi"}',
        "unreadable text",
        "",
        "Give it another id.",
        borrowed=r"(?<=unreadable text: ).*",
    ),
    Case(
        id="endless-line",
        area="dataset",
        wrong="a line of more than 64 MiB",
        run=_endless_line,
        outcome="left out",
        error=DataError,
        reason="line too long",
        says=r"^rows.jsonl, row 2: line too long: more than 64 MiB",
        todo="Look for a lost line break; no more of it than that is ever in memory.",
    ),
    row(
        "nested-line",
        "brackets nested a hundred thousand deep",
        b"[" * 100_000,
        "bad JSON",
        "nested too deeply",
        "Remove the line.",
    ),
    row(
        "list-line",
        "a list where an object belongs",
        ["hi"],
        "wrong type",
        "expected an object, got a list",
        "One JSON object a line.",
    ),
    row(
        "no-prompt",
        "neither messages nor a prompt",
        {"id": "x", "question": "hi", "solution": "ho"},
        "no prompt",
        "neither 'messages' nor 'prompt' is given; keys: 'id', 'question', 'solution'",
        "Rename the column that holds the prompt.",
    ),
    row(
        "null-messages",
        "messages that are null",
        {"id": "x", "messages": None},
        "no prompt",
        "keys: 'id', 'messages'",
        "Fill it, or leave the row out.",
    ),
    row(
        "empty-messages",
        "no message",
        {"id": "x", "messages": []},
        "empty messages",
        "'messages' has no message",
        "Fill it, or leave the row out.",
    ),
    row(
        "blank-messages",
        "messages of white space",
        {"id": "x", "messages": [{"role": "user", "content": " \n"}]},
        "empty messages",
        "'messages' has no text",
        "Fill it, or leave the row out.",
    ),
    row(
        "system-only",
        "nobody asks: a system message alone",
        {"id": "x", "messages": [{"role": "system", "content": "Be brief."}]},
        "empty messages",
        "'messages' has text from the system only",
        "Add the user's message.",
    ),
    row(
        "blank-prompt",
        "a prompt of white space",
        {"id": "x", "prompt": "  "},
        "empty prompt",
        "'prompt' is empty",
        "Fill it, or leave the row out.",
    ),
    row(
        "messages-as-text",
        "messages stored as a JSON string",
        {"id": "x", "messages": json.dumps([USER])},
        "wrong type",
        r"'messages' is a string, expected a list of messages \(JSON inside a string",
        "Store the list itself.",
    ),
    row(
        "message-is-text",
        "a string where a message belongs",
        {"id": "x", "messages": ["hi"]},
        "wrong type",
        "'messages' message 1 is a string, expected an object",
        'Write `{"role": "user", "content": "hi"}`.',
    ),
    row(
        "null-content",
        "a message without content",
        {"id": "x", "messages": [USER, {"role": "user", "content": None}]},
        "null content",
        "'messages' message 2 has no content",
        "Fill it, or leave the row out.",
    ),
    row(
        "null-message",
        "null where a message belongs",
        {"id": "x", "messages": [USER, None]},
        "wrong type",
        "'messages' message 2 is null, expected an object",
        "Remove it.",
    ),
    row(
        "number-content",
        "content that is a number",
        {"id": "x", "messages": [{"role": "user", "content": 7}]},
        "wrong type",
        "'messages' message 1: the content is a number, expected a string",
        "Write it as text.",
    ),
    row(
        "content-parts",
        "content as a list of parts",
        {"id": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        "wrong type",
        "the content is a list, expected a string; join the parts' text",
        "Join the parts' text; pictures cannot be read.",
    ),
    row(
        "unknown-role",
        "a role nobody has",
        {"id": "x", "messages": [{"role": "human", "content": "hi"}]},
        "wrong type",
        "message 1 has role 'human', expected one of system, user, assistant, tool",
        "Rename it (human: user, gpt: assistant).",
    ),
    row(
        "role-missing",
        "a message without a role",
        {"id": "x", "messages": [{"from": "user", "content": "hi"}]},
        "wrong type",
        "message 1 has role None",
        "Rename the key to 'role'.",
    ),
    row(
        "assistant-last",
        "a conversation that ends with the answer",
        {"id": "x", "messages": [USER, {"role": "assistant", "content": "hello"}]},
        "assistant last",
        "'messages' ends with an answer; put it into 'response'",
        "Move the last message into 'response' (with data.source=dataset it is trained on).",
    ),
    row(
        "over-long",
        "a prompt longer than rollout.max_prompt_tokens",
        {"id": "x", "prompt": "long " * 500},
        "prompt too long",
        f"the limit is {MAX_PROMPT_TOKENS}",
        "Raise rollout.max_prompt_tokens, or shorten it.",
        borrowed=r"(?<=has )\d+(?= tokens)",
    ),
    row(
        "duplicate-id",
        "an id that came before",
        {"id": "good", "prompt": "again"},
        "duplicate id",
        "id 'good' came before",
        "Make ids unique, or leave them out: rows are then numbered.",
    ),
    row(
        "fraction-id",
        "an id that is a fraction",
        {"id": 1.5, "prompt": "hi"},
        "wrong type",
        "'id' is a number, expected a string or an integer",
        "Write it as text.",
    ),
    row(
        "teacher-messages-text",
        "teacher_messages that are text",
        {"id": "x", "prompt": "hi", "teacher_messages": "psst"},
        "wrong type",
        "'teacher_messages' is a string, expected a list of messages",
        "Write a list of messages.",
    ),
    row(
        "long-teacher-messages",
        "a teacher's prompt beyond teacher.prefix_tokens",
        {"id": "x", "prompt": "hi", "teacher_messages": [{**USER, "content": "long " * 500}]},
        "prompt too long",
        "'teacher_messages' has",
        "Raise teacher.prefix_tokens, or shorten it.",
        borrowed=r"(?<=has )\d+(?= tokens)",
    ),
    row(
        "no-answer",
        "a problem without an answer",
        {"id": "x", "prompt": "2+2?"},
        "no answer",
        "neither 'answer' nor 'reward_model.ground_truth'",
        "Add it; problems are graded against it.",
        needs_answer=True,
    ),
    row(
        "nan-answer",
        "an answer that is NaN (an empty cell of pandas)",
        b'{"id": "x", "prompt": "2+2?", "answer": NaN}',
        "no answer",
        "the answer is nan; leave it out where there is none",
        "Write null, or leave the key out.",
    ),
    row(
        "object-answer",
        "an answer that is an object",
        {"id": "x", "prompt": "2+2?", "answer": {"value": 4}},
        "wrong type",
        "the answer is an object, expected a string or a number",
        "Write its value.",
    ),
    row(
        "source-number",
        "a data_source that is a number",
        {"id": "x", "prompt": "hi", "data_source": 7},
        "wrong type",
        "'data_source' is a number, expected a string",
        "Write it as text.",
    ),
    row(
        "no-response",
        "data.source=dataset, and no response",
        {"id": "x", "prompt": "hi"},
        "no response",
        "data.source=dataset needs 'response_ids' or 'response'",
        "Let 'rock-opd generate' answer the prompts first.",
        source="dataset",
    ),
    row(
        "empty-response",
        "an empty response",
        {"id": "x", "prompt": "hi", "response": ""},
        "empty response",
        "the response has no token",
        "Leave the row out.",
        source="dataset",
    ),
    row(
        "long-response",
        "a response longer than rollout.max_new_tokens",
        {"id": "x", "prompt": "hi", "response_ids": [300] * 17},
        "response too long",
        "17 tokens, the limit is 16",
        "Raise rollout.max_new_tokens.",
        source="dataset",
    ),
    row(
        "float-response-ids",
        "response ids that are floats",
        {"id": "x", "prompt": "hi", "response_ids": [1.0, 2.0]},
        "wrong type",
        "'response_ids' is not a list of integers",
        "Write integers; pandas makes floats where a value is missing.",
        source="dataset",
    ),
    row(
        "response-ids-outside",
        "response ids beyond the vocabulary",
        {"id": "x", "prompt": "hi", "response_ids": [5, 151_936]},
        "id beyond vocabulary",
        "response id 151936, ids end at 1023",
        "Generate the answers with this tokenizer, or give the text.",
        source="dataset",
    ),
    row(
        "finished-text",
        "finished that is neither true nor false",
        {"id": "x", "prompt": "hi", "response": "ho", "finished": "no"},
        "wrong type",
        "'finished' is neither true nor false",
        "Write true or false; it decides whether EOS is appended.",
        source="dataset",
    ),
    parquet_row(
        "parquet-null-messages",
        "null messages in a parquet file",
        {"id": "x", "messages": None},
        "no prompt",
        "",
        "Fill it, or leave the row out.",
    ),
    parquet_row(
        "parquet-null-content",
        "null content in a parquet file",
        {"id": "x", "messages": [{"role": "user", "content": None}]},
        "null content",
        "",
        "Fill it, or leave the row out.",
    ),
    parquet_row(
        "parquet-null-role",
        "a role that parquet filled with null",
        {"id": "x", "messages": [{"role": None, "content": "hi"}]},
        "wrong type",
        "has role None",
        "Fill it; columns of messages of two schemas come together so.",
    ),
    parquet_row(
        "parquet-bytes",
        "a prompt stored as bytes",
        {"id": "x", "messages": None, "prompt": b"hi"},
        "wrong type",
        "'prompt' is bytes, expected a list of messages",
        "Store it as text.",
    ),
]

FILES = [
    file(
        "no-file",
        "the file does not exist",
        lambda bench: bench.folder / "rows.jsonl",
        r"^rows.jsonl: no such prompt file$",
        "Name it; paths are taken from the working directory.",
    ),
    file(
        "data-folder",
        "a folder in place of a file",
        _folder,
        r"expected a prompt file, got a folder",
        "Name the file in it.",
    ),
    row(
        "key-twice",
        "a key twice in one object",
        b'{"id": "x", "prompt": "one", "prompt": "another"}',
        "key twice",
        r"the key 'prompt' stands twice in one object",
        "Keep the one that is meant.",
    ),
    row(
        "key-twice-inside",
        "a key twice in a message",
        b'{"messages": [{"role": "user", "content": "one", "content": "another"}]}',
        "key twice",
        r"the key 'content' stands twice in one object",
        "Keep the one that is meant.",
    ),
    row(
        "megabytes",
        "a prompt of megabytes",
        {"prompt": "x" * 5_000_000},
        "prompt too long",
        r"'prompt' has \d+ characters, more than 64 tokens can hold",
        "Shorten it; it is refused before it is tokenised.",
    ),
    file(
        "two-prompt-columns",
        "a parquet file with two columns of one name",
        _two_columns,
        r"rows.parquet: has 2 columns named 'prompt'; rename all but",
        "Rename all but one.",
    ),
    file(
        "name-too-long",
        "a name no file system takes",
        lambda bench: bench.folder / f"{'x' * 300}.jsonl",
        r"data.prompts: the name 'x{30}...' in it is <n> bytes long",
        "Name the file, not its content.",
        error=ConfigError,
    ),
    file(
        "csv",
        "a format that is not read",
        content("rows.csv", b"prompt\nhi\n"),
        r"expected a .jsonl or .parquet file, got '.csv'",
        "Convert it to JSON lines.",
    ),
    file(
        "empty-file",
        "an empty file",
        content("rows.jsonl", b""),
        r"^rows.jsonl: the file has no row$",
        "See how it was written.",
    ),
    file(
        "nothing-usable",
        "a file of bad rows only",
        content("rows.jsonl", lines({"id": "a"}, {"id": "b"})),
        r"none of 2 rows is usable .*; first: rows.jsonl, row 1: no prompt",
        "Mend what the first one says.",
    ),
    file(
        "skip-beyond-the-end",
        "data.skip beyond the last row",
        content("rows.jsonl", lines(GOOD)),
        r"data.skip=5 leaves out all of its 1 rows; lower it",
        "Lower data.skip.",
        skip=5,
    ),
    file(
        "json-array",
        "one JSON array in place of JSON lines",
        content("rows.json", json.dumps([GOOD, GOOD]).encode()),
        r"expected an object, got a list \(JSON lines have one object a line",
        "`jq -c '.[]' rows.json > rows.jsonl`.",
    ),
    file(
        "pretty-json-array",
        "the same over many lines",
        content("rows.json", json.dumps([GOOD], indent=1).encode()),
        r"none of 8 rows is usable .*JSON lines have one object a line and no brackets",
        "`jq -c '.[]' rows.json > rows.jsonl`.",
        borrowed=r"(?<=bad JSON: ).*(?= \(JSON lines)",
    ),
    file(
        "binary-file",
        "bytes that are no text",
        content("rows.jsonl", bytes(range(128, 256)) * 8),
        r"none of \d+ rows is usable .*bad encoding",
        "Name the prompt file.",
    ),
    file(
        "utf-16",
        "UTF-16 text (of a Windows editor)",
        content("rows.jsonl", json.dumps(GOOD).encode("utf-16")),
        r"expected JSON lines, got UTF-16 text; save it as UTF-8",
        "Save it as UTF-8.",
    ),
    file(
        "compressed",
        "a compressed file",
        _gzip,
        r"expected JSON lines, got compressed \(gzip\); unpack it",
        "`gunzip` it.",
    ),
    file(
        "parquet-named-jsonl",
        "a parquet file under another name",
        _renamed_parquet,
        r"a parquet file by its content; give its name the ending .parquet",
        "Rename it.",
    ),
    file(
        "parquet-other-schema",
        "a parquet file of another schema",
        lambda bench: table(bench.folder / "rows.parquet", [{"question": "hi", "solution": "ho"}]),
        r"neither a column 'messages' nor 'prompt', it has question, solution",
        "Name the column: data.prompt_column=question.",
    ),
    file(
        "parquet-no-such-column",
        "a data.prompt_column that the file lacks",
        lambda bench: table(bench.folder / "rows.parquet", [{"question": "hi", "prompt": "ho"}]),
        r"no column 'asked', it has question, prompt; name the one that holds the prompts",
        "Name one that is there; no other stands in for it.",
        prompt_column="asked",
    ),
    file(
        "verl-agent",
        "verl's rows for an agent with tools",
        lambda bench: table(
            bench.folder / "rows.parquet", [{"prompt": [USER], "agent_name": "tool_agent"}]
        ),
        r"row 1: 'agent_name' is 'tool_agent', and answers are sampled in one turn without tools",
        "Leave the column out to train on answers of one turn.",
    ),
    file(
        "parquet-torn",
        "a parquet file cut short",
        _torn_parquet,
        r"^rows.parquet: unreadable as parquet",
        "Fetch it again.",
        borrowed=r"(?<=unreadable as parquet: ).*",
    ),
    file(
        "parquet-text",
        "text named .parquet",
        content("rows.parquet", lines(GOOD)),
        r"unreadable as parquet",
        "Rename it.",
        borrowed=r"(?<=unreadable as parquet: ).*",
    ),
    file(
        "foreign-response-ids",
        "response ids of another tokenizer",
        content(
            "rows.jsonl",
            lines(GOOD, {"prompt": "?", "response_ids": [5], "tokenizer": "0123456789abcdef"}),
        ),
        r"^rows.jsonl, row 2: response_ids were written with tokenizer .*: ids of another",
        "Generate the answers again, or remove 'response_ids' to train on the text.",
        source="dataset",
    ),
    _set(
        "too-few-prompts",
        "fewer prompts than a step takes",
        _too_few,
        r"1 usable prompts are fewer than rollout.prompts_per_step=8",
        "Lower rollout.prompts_per_step, or bring more.",
    ),
    _set(
        "too-few-heldout",
        "fewer held-out prompts than asked, once the over-long ones are gone",
        _too_few_heldout,
        r"usable held-out prompts, eval.num_heldout=8; raise data.skip",
        "Raise data.skip, or lower eval.num_heldout.",
    ),
]

FINE = [
    fine(
        "byte-order-mark",
        "a byte order mark before the first line",
        b"\xef\xbb\xbf" + lines({"id": "a", "prompt": "hi"}, {"id": "b", "prompt": "ho"}),
    ),
    fine(
        "crlf",
        "lines that end in CR LF",
        b'{"id": "a", "prompt": "hi"}\r\n{"id": "b", "prompt": "ho"}\r\n',
    ),
    fine(
        "blank-lines",
        "blank lines, and none at the end",
        b'\n{"id": "a", "prompt": "hi"}\n  \n\n{"id": "b", "prompt": "ho"}',
    ),
    fine(
        "mixed-schemas",
        "rows of two schemas in one file",
        lines({"id": "a", "prompt": "hi", "extra": 1}, {"id": "b", "messages": [USER]}),
    ),
]

CASES = ROWS + FILES + FINE
