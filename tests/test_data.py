"""Prompt files in, records out: every kind of bad row, the order, given responses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rock_opd.config import DataConfig, EvalConfig
from rock_opd.data import (
    given_rollouts,
    load_heldout,
    load_problems,
    load_prompts,
    write_answers,
)
from rock_opd.errors import DataError
from rock_opd.models import load_tokenizer, tokenizer_fingerprint
from rock_opd.prompt_rows import render_chat
from rock_opd.types import Rollout

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_models: Path):
    return load_tokenizer(str(tiny_models / "student"))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write(path: Path, *rows: object) -> DataConfig:
    """Rows as JSON lines; bytes go in as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return DataConfig(prompts=str(path), shuffle=False)


def load_file(path: str | Path, tokenizer, **more: object):
    """Keywords go to ``load_prompts`` or, where it has the key, to the config."""
    cfg = DataConfig(prompts=str(path), shuffle=False)
    for key in list(more):
        if hasattr(cfg, key):
            cfg = replace(cfg, **{key: more.pop(key)})
    return load_prompts(cfg, tokenizer=tokenizer, max_prompt_tokens=64, **more)


@pytest.fixture
def load(tmp_path: Path, tokenizer):
    """Loads rows given as arguments; keywords as in ``load_file``."""

    def run(*rows: object, **more: object):
        cfg = write(tmp_path / "rows.jsonl", *rows)
        return load_file(cfg.prompts, tokenizer, **more)

    return run


def ids(prompt_set) -> list[str]:
    return [prompt.prompt_id for prompt in prompt_set.prompts]


# --- rows -----------------------------------------------------------------------------------------


def test_a_prompt_is_rendered_up_to_where_the_answer_begins(load, tokenizer):
    (prompt,) = load({"id": "a", "messages": user("hi")}).prompts
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids.tolist()) == expected
    assert prompt.token_ids.dtype == np.int32


def test_a_string_prompt_is_one_user_message(load):
    a, b = load({"prompt": "hi"}, {"messages": user("hi")}).prompts
    assert a.token_ids.tolist() == b.token_ids.tolist()


def test_a_string_prompt_is_raw_text_where_there_is_no_chat_template(load, tiny_models, tmp_path):
    bare = load_tokenizer(str(tiny_models / "student"))
    bare.chat_template = None
    cfg = write(tmp_path / "raw.jsonl", {"prompt": "hi"}, {"messages": user("hi")})
    loaded = load_prompts(cfg, tokenizer=bare, max_prompt_tokens=64)
    assert bare.decode(loaded.prompts[0].token_ids.tolist()) == "hi"
    assert loaded.skipped == {"template refused": 1}


def verl_row(index: object, text: str = "2+2?", **change: object) -> dict[str, object]:
    """As verl's own data scripts write them."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": user(text),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": index, "split": "train"},
        **change,
    }


def load_parquet(rows: list[dict], path: Path, tokenizer, **more: object):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return load_file(path, tokenizer, **more)


def test_verl_columns_are_read_as_they_are(tokenizer, tmp_path):
    rows = [
        verl_row(7),
        verl_row(
            9,
            prompt=[{"role": "system", "content": "Be brief."}, *user("3+3?")],
            reward_model={"style": "rule", "ground_truth": "6"},
        ),
    ]
    loaded = load_parquet(rows, tmp_path / "verl.parquet", tokenizer, need_answer=True)
    assert [(p.prompt_id, p.answer, p.data_source) for p in loaded.prompts] == [
        ("7", "4", "openai/gsm8k"),
        ("9", "6", "openai/gsm8k"),
    ]
    assert "Be brief." in tokenizer.decode(loaded.prompts[1].token_ids.tolist())


def test_an_index_of_verl_that_came_before_gives_way_to_the_rows_number(tokenizer, tmp_path):
    """Two data sets in one file, and a row without an index; an id of one's own comes first."""
    rows = [
        verl_row(0),
        verl_row(0, "3+3?", data_source="math"),
        verl_row(None, "4+4?"),
        {**verl_row(1, "5+5?"), "id": "mine"},
    ]
    rows = [{"id": None, **row} for row in rows]
    loaded = load_parquet(rows, tmp_path / "verl.parquet", tokenizer)
    assert ids(loaded) == ["0", "row-2", "row-3", "mine"]


def test_a_ground_truth_of_several_parts_is_no_answer_and_no_fault_of_a_training_row(
    tokenizer, tmp_path
):
    rows = [verl_row(0, reward_model={"style": "rule", "ground_truth": {"target": ["4", "four"]}})]
    (prompt,) = load_parquet(rows, tmp_path / "verl.parquet", tokenizer).prompts
    assert prompt.answer is None
    with pytest.raises(DataError, match="the answer is an object"):
        load_parquet(rows, tmp_path / "verl.parquet", tokenizer, need_answer=True)


def test_as_verls_a_row_is_read_by_verls_columns_alone(tokenizer, tmp_path):
    rows = [
        verl_row(0) | {"messages": user("other"), "answer": "step by step #### 4", "id": "same"},
        verl_row(1, "3+3?") | {"messages": user("other"), "answer": "no", "id": "same"},
    ]
    own = load_parquet(rows, tmp_path / "rows.parquet", tokenizer)
    assert ids(own) == ["same"] and own.skipped == {"duplicate id": 1}
    verls = load_parquet(rows, tmp_path / "rows.parquet", tokenizer, row_format="verl")
    assert ids(verls) == ["0", "1"]
    assert [p.answer for p in verls.prompts] == ["4", "4"]
    assert verls.messages["1"][-1]["content"] == "3+3?"


def test_a_named_column_holds_the_prompts_and_no_other_stands_in_for_it(tokenizer, tmp_path, load):
    rows = [verl_row(0) | {"question": user("Which?")}]
    path = tmp_path / "rows.parquet"
    for row_format in ("auto", "verl"):
        more = {"row_format": row_format, "prompt_column": "question"}
        loaded = load_parquet(rows, path, tokenizer, **more)
        assert loaded.messages["0"] == user("Which?")
        with pytest.raises(DataError, match=r"rows.parquet: no column 'asked', it has data_source"):
            load_parquet(rows, path, tokenizer, row_format=row_format, prompt_column="asked")
    with pytest.raises(DataError, match=r"no prompt: 'asked' is not given; keys: 'data_source'"):
        load(rows[0], prompt_column="asked")
    with pytest.raises(DataError, match="no column 'prompt', it has messages"):
        load_parquet([{"messages": user("x")}], path, tokenizer, row_format="verl")
    assert load({"question": "Why?"}, prompt_column="question").prompts


@pytest.mark.parametrize(
    "change, said",
    [
        ({"agent_name": "tool_agent"}, "'agent_name' is 'tool_agent'"),
        ({"extra_info": {"index": 0, "need_tools_kwargs": True}}, "need_tools_kwargs' is true"),
    ],
)
def test_a_file_for_an_agent_with_tools_is_refused(tokenizer, tmp_path, change, said):
    plain = verl_row(0) | {"agent_name": "single_turn_agent"}
    plain["extra_info"] |= {"need_tools_kwargs": False}
    path = tmp_path / "rows.parquet"
    assert ids(load_parquet([plain], path, tokenizer)) == ["0"]
    with pytest.raises(DataError, match=rf"rows.parquet, row 2: .*{said}, and answers are sampled"):
        load_parquet([plain, plain | change], path, tokenizer)


def test_a_multi_modal_file_of_verl_is_refused(tokenizer, tmp_path):
    with pytest.raises(DataError, match="column 'images', and only text"):
        load_parquet([verl_row(0, images=[b"png"])], tmp_path / "v.parquet", tokenizer)


def test_nulls_that_parquet_fills_in_are_not_content(tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "hi", "name": None}], "answer": None},
        {"id": "b", "messages": None, "answer": "1"},
        {"id": "c", "messages": [{"role": "user", "content": None, "name": "x"}], "answer": "1"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "n.parquet")
    loaded = load_prompts(
        DataConfig(prompts=str(tmp_path / "n.parquet")), tokenizer=tokenizer, max_prompt_tokens=64
    )
    assert ids(loaded) == ["a"]
    assert loaded.skipped == {"no prompt": 1, "null content": 1}


BAD_ROWS = {
    "bad JSON": b'{"id": "x", "messages": [',
    "bad encoding": b'{"id": "x", "prompt": "caf\xe9"}',
    "wrong type": ["not", "an", "object"],
    "no prompt": {"id": "x"},
    "empty messages": {"id": "x", "messages": []},
    "empty prompt": {"id": "x", "prompt": "  "},
    "null content": {"id": "x", "messages": [{"role": "user", "content": None}]},
    "assistant last": {
        "id": "x",
        "messages": [*user("hi"), {"role": "assistant", "content": "hello"}],
    },
    "prompt too long": {"id": "x", "messages": user("word " * 100)},
    "duplicate id": {"id": "good", "messages": user("again")},
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_skipped_and_counted_by_its_reason(load, reason):
    loaded = load({"id": "good", "messages": user("hi")}, BAD_ROWS[reason])
    assert ids(loaded) == ["good"]
    assert loaded.skipped == {reason: 1}
    assert len(loaded.offenders) == 1
    assert "rows.jsonl, row 2: " + reason in loaded.offenders[0]


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_ends_the_load_where_the_recipe_says_so(load, reason):
    with pytest.raises(DataError, match=f"row 2: {reason}.*on_bad_row=skip"):
        load({"id": "good", "messages": user("hi")}, BAD_ROWS[reason], on_bad_row="fail")


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1.5, "messages": user("hi")},
        {"id": "", "messages": user("hi")},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"role": "robot", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": user("hi"), "answer": {"value": 4}},
        {"messages": user("hi"), "data_source": 7},
        {"messages": user("hi"), "teacher_messages": "psst"},
    ],
)
def test_a_value_of_another_type_is_a_bad_row(load, row):
    assert load({"id": "good", "prompt": "hi"}, row).skipped == {"wrong type": 1}


def test_only_the_first_offenders_are_named_but_all_are_counted(load):
    loaded = load({"prompt": "hi"}, *[{"id": str(i)} for i in range(9)])
    assert loaded.skipped == {"no prompt": 9}
    assert len(loaded.offenders) == 5


def test_a_file_without_a_usable_row_is_an_error_that_names_the_first_reason(load):
    with pytest.raises(DataError, match=r"none of 2 rows is usable.*first: .*no prompt"):
        load({"id": "a"}, {"id": "b"})


def test_an_empty_file_is_an_error(load):
    with pytest.raises(DataError, match="the file has no row"):
        load(b"")


@pytest.mark.parametrize("name, text", [("none.jsonl", "no such"), ("rows.csv", r"\.parquet")])
def test_a_missing_file_and_an_unknown_format_are_named(tokenizer, tmp_path, name, text):
    (tmp_path / "rows.csv").write_text("a,b\n")
    cfg = DataConfig(prompts=str(tmp_path / name))
    with pytest.raises(DataError, match=text):
        load_prompts(cfg, tokenizer=tokenizer, max_prompt_tokens=64)


def test_a_parquet_file_that_is_none_is_one_clear_line(tokenizer, tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="unreadable as parquet") as caught:
        load_prompts(
            DataConfig(prompts=str(tmp_path / "x.parquet")),
            tokenizer=tokenizer,
            max_prompt_tokens=64,
        )
    assert "\n" not in str(caught.value)


def test_a_prompt_of_exactly_the_limit_is_kept_and_one_token_more_is_not(tokenizer, tmp_path):
    cfg = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "a"}, {"id": "b", "prompt": "aa a"})
    limit = len(tokenizer(render_chat(tokenizer, user("a")))["input_ids"])
    loaded = load_prompts(cfg, tokenizer=tokenizer, max_prompt_tokens=limit)
    assert ids(loaded) == ["a"] and loaded.skipped == {"prompt too long": 1}


def test_skip_and_limit_count_rows_of_the_file_good_or_bad(load):
    rows = [
        {"id": "0", "prompt": "a"},
        {"id": "1"},
        *[{"id": f"{i}", "prompt": "a"} for i in (2, 3, 4)],
    ]
    assert ids(load(*rows, skip=2)) == ["2", "3", "4"]
    assert ids(load(*rows, limit=2)) == ["0"]
    assert ids(load(*rows, skip=1, limit=2)) == ["2"]


def test_the_byte_order_mark_and_blank_lines_are_no_rows(load):
    loaded = load(b"\xef\xbb\xbf" + json.dumps({"prompt": "hi"}).encode(), b"", b"  ")
    assert len(loaded.prompts) == 1 and not loaded.skipped


def test_what_only_the_teacher_reads_is_rendered_and_has_its_own_limit(load, tokenizer):
    row = {"messages": user("hi"), "teacher_messages": user("The answer is 4. hi")}
    (prompt,) = load(row).prompts
    assert "The answer is 4." in tokenizer.decode(prompt.teacher_prefix_ids.tolist())
    long = {"messages": user("hi"), "teacher_messages": user("word " * 40)}
    assert load({"prompt": "hi"}, long).skipped == {"prompt too long": 1}
    assert not load({"prompt": "hi"}, long, teacher_prefix_tokens=64).skipped


def test_enable_thinking_reaches_the_template(load, tokenizer):
    old = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    try:
        texts = [
            tokenizer.decode(
                load({"prompt": "hi"}, enable_thinking=flag).prompts[0].token_ids.tolist()
            )
            for flag in (None, False, True)
        ]
    finally:
        tokenizer.chat_template = old
    assert texts == ["hi", "hi", "hi think"]


# --- order ----------------------------------------------------------------------------------------


def test_an_epoch_takes_every_prompt_once_and_the_next_one_in_another_order(load):
    loaded = load(*[{"id": str(i), "prompt": "a"} for i in range(12)], shuffle=True)
    epochs = [
        [p.prompt_id for step in range(e * 4, e * 4 + 4) for p in loaded.batch(step, 3)]
        for e in range(3)
    ]
    assert loaded.steps_per_epoch(3) == 4
    for epoch in epochs:
        assert sorted(epoch) == sorted(str(i) for i in range(12))
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_seed_and_step_only(load):
    rows = [{"id": str(i), "prompt": "a"} for i in range(30)]
    a, b, c = (load(*rows, shuffle=True, seed=s) for s in (1, 1, 2))
    for step in (7, 0, 3):  # asked in any order
        assert [p.prompt_id for p in a.batch(step, 4)] == [p.prompt_id for p in b.batch(step, 4)]
    assert [p.prompt_id for p in a.batch(0, 4)] != [p.prompt_id for p in c.batch(0, 4)]


def test_a_step_never_holds_a_prompt_twice(load):
    loaded = load(*[{"id": str(i), "prompt": "a"} for i in range(7)], shuffle=True)
    for step in range(20):
        names = [p.prompt_id for p in loaded.batch(step, 5)]
        assert len(set(names)) == 5
    with pytest.raises(DataError, match="7 usable prompts are fewer"):
        loaded.batch(0, 8)


def test_without_shuffling_the_file_is_read_in_order(load):
    loaded = load(*[{"id": str(i), "prompt": "a"} for i in range(5)])
    assert [[p.prompt_id for p in loaded.batch(s, 2)] for s in range(3)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "0"],
    ]


def test_the_fingerprint_tells_other_data(load):
    row = {"id": "a", "prompt": "hi"}
    assert load(row).fingerprint == load(row).fingerprint
    others = [{"id": "b", "prompt": "hi"}, {"id": "a", "prompt": "ho"}]
    others.append({**row, "teacher_messages": user("hi")})
    prints = {load(r).fingerprint for r in [row, *others]}
    assert len(prints) == 4


# --- held-out prompts and problems ----------------------------------------------------------------


def test_held_out_prompts_are_the_rows_that_training_skips(tokenizer, tmp_path):
    rows = [{"id": str(i), "prompt": "a"} for i in range(6)]
    cfg = replace(write(tmp_path / "p.jsonl", *rows), skip=3, limit=2)
    common = {"tokenizer": tokenizer, "max_prompt_tokens": 64}
    held = load_heldout(cfg, EvalConfig(num_heldout=2), **common)
    assert [p.prompt_id for p in held] == ["0", "1"]
    assert ids(load_prompts(cfg, **common)) == ["3", "4"]
    with pytest.raises(DataError, match=r"3 usable held-out prompts, eval.num_heldout=4"):
        load_heldout(cfg, EvalConfig(num_heldout=4), **common)


def test_problems_need_answers(tokenizer, tmp_path, tiny_models):
    common = {"tokenizer": tokenizer, "max_prompt_tokens": 64}
    cfg = DataConfig(prompts="unused.jsonl", source="dataset", skip=3)
    found = load_problems(cfg, EvalConfig(problems=str(tiny_models / "problems.jsonl")), **common)
    assert len(found.prompts) == 8 and all(p.answer for p in found.prompts)
    write(
        tmp_path / "p.jsonl", {"id": "a", "prompt": "1+1?", "answer": 2}, {"id": "b", "prompt": "?"}
    )
    found = load_problems(cfg, EvalConfig(problems=str(tmp_path / "p.jsonl")), **common)
    assert [p.answer for p in found.prompts] == ["2"]
    assert found.skipped == {"no answer": 1}


# --- given responses ------------------------------------------------------------------------------


def test_a_text_response_ends_with_eos_unless_it_was_cut_off(load, tokenizer):
    text = tokenizer("yes")["input_ids"]
    rows = [
        {"id": "done", "prompt": "?", "response": "yes"},
        {"id": "cut", "prompt": "?", "response": "yes", "finished": False},
        {"id": "has it", "prompt": "?", "response": "yes<|im_end|>"},
    ]
    done, cut, has_it = load(*rows, source="dataset").prompts
    assert done.response_ids.tolist() == [*text, EOS]
    assert cut.response_ids.tolist() == text
    assert has_it.response_ids.tolist() == [*text, EOS]


def test_response_ids_are_taken_as_they_are_and_win_over_text(load):
    row = {"prompt": "?", "response": "no", "response_ids": [400, 5, 400]}
    (prompt,) = load(row, source="dataset").prompts
    assert prompt.response_ids.tolist() == [400, 5, 400]  # no EOS is put behind them


@pytest.mark.parametrize(
    "row, reason",
    [
        ({}, "no response"),
        ({"response": ""}, "empty response"),
        ({"response_ids": []}, "empty response"),
        ({"response": 7}, "wrong type"),
        ({"response_ids": [1, "2"]}, "wrong type"),
        ({"response_ids": [1, True]}, "wrong type"),
        ({"response_ids": [5, 1024]}, "id beyond vocabulary"),
        ({"response_ids": [-1]}, "id beyond vocabulary"),
        ({"response_ids": [5] * 9}, "response too long"),
        ({"response": "x", "finished": "yes"}, "wrong type"),
    ],
)
def test_a_response_that_cannot_be_used_is_counted(load, row, reason):
    good = {"id": "good", "prompt": "?", "response_ids": [5]}
    loaded = load(good, {"prompt": "?", **row}, source="dataset", max_response_tokens=8)
    assert ids(loaded) == ["good"] and loaded.skipped == {reason: 1}


def test_ids_of_another_tokenizer_are_refused_not_skipped(load):
    row = {"prompt": "?", "response_ids": [5], "tokenizer": "0123456789abcdef"}
    with pytest.raises(DataError, match="ids of another tokenizer"):
        load({"prompt": "?", "response_ids": [5]}, row, source="dataset")


def test_given_rollouts_train_every_response_token_and_claim_no_sampler(load):
    row = {"id": "a", "prompt": "?", "response_ids": [7, 8, EOS]}
    loaded = load(row, {**row, "id": "one", "response_ids": [9]}, source="dataset")
    rollout, one = given_rollouts(loaded.prompts)
    prompt = loaded.prompts[0]
    assert rollout.token_ids.tolist() == [*prompt.token_ids.tolist(), 7, 8, EOS]
    assert rollout.positions.tolist() == [len(prompt.token_ids) + i for i in range(3)]
    assert np.isnan(rollout.logprobs).all()
    assert (rollout.finish_reason, rollout.policy_version) == ("given", -1)
    assert one.positions.tolist() == [len(prompt.token_ids)]


def sampled(prompt, response: list[int], *, sample_idx: int = 0, reason: str = "stop") -> Rollout:
    token_ids = np.concatenate([prompt.token_ids, np.asarray(response, np.int32)]).astype(np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt.token_ids)
    return Rollout(
        prompt_id=prompt.prompt_id,
        sample_idx=sample_idx,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        finish_reason=reason,
        policy_version=0,
        prompt_len=len(prompt.token_ids),
    )


def test_written_answers_come_back_as_the_very_same_ids(load, tokenizer, tmp_path):
    prompts = load({"id": "a", "messages": user("hi"), "answer": "4"}, {"id": "b", "prompt": "ho"})
    a, b = prompts.prompts
    # 0xC3 alone is no UTF-8 text: only ids survive.
    odd = [tokenizer.convert_tokens_to_ids("Ã"), 300, EOS]
    batches = [
        [sampled(a, odd), sampled(a, [300, 301], sample_idx=1, reason="length")],
        [sampled(b, [5, EOS]), sampled(b, [], sample_idx=1, reason="length")],
    ]
    path = tmp_path / "out" / "answers.jsonl"
    assert write_answers(path, batches, prompts, tokenizer) == 3  # the empty one is left out
    assert [p.name for p in path.parent.iterdir()] == ["answers.jsonl"]

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["id"] for r in rows] == ["a#0", "a#1", "b#0"]
    assert rows[0]["tokenizer"] == tokenizer_fingerprint(tokenizer)
    assert (rows[0]["answer"], rows[0]["finished"], rows[1]["finished"]) == ("4", True, False)

    cfg = DataConfig(prompts=str(path), source="dataset", shuffle=False)
    back = load_prompts(cfg, tokenizer=tokenizer, max_prompt_tokens=64)
    assert [p.response_ids.tolist() for p in back.prompts] == [odd, [300, 301], [5, EOS]]
    assert [p.token_ids.tolist() for p in back.prompts] == [
        a.token_ids.tolist(),
        a.token_ids.tolist(),
        b.token_ids.tolist(),
    ]


def test_answers_are_on_disk_before_the_next_batch_is_asked_for(load, tokenizer, tmp_path):
    prompts = load({"id": "a", "prompt": "hi"})
    path = tmp_path / "answers.jsonl"
    seen = []

    def batches():
        for i in range(3):
            partial = path.with_name("answers.jsonl.partial")
            seen.append(len(partial.read_text().splitlines()))
            yield [sampled(prompts.prompts[0], [5, EOS], sample_idx=i)]

    write_answers(path, batches(), prompts, tokenizer)
    assert seen == [0, 1, 2]
