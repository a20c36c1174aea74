"""Token lists, occurrence files and checkpoints that cannot be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
from case import Bench, Case, edit

from rock_opd.checkpoint import (
    RunState,
    load_checkpoint,
    pack_state,
    require_same,
    seal,
    write_state,
)
from rock_opd.core.policies import make_policy
from rock_opd.core.registry import Registry
from rock_opd.errors import DataError
from rock_opd.models import tokenizer_fingerprint
from rock_opd.occurrences import build_registry
from rock_opd.resume import identity
from rock_opd.rocklist import read_ids

sys.path.insert(0, str(Path(__file__).parents[1]))
from study_files import Response, file_info, write_file

# --- token lists ----------------------------------------------------------------------------------


def token_list(
    id: str,
    wrong: str,
    content: bytes | None,
    says: str,
    todo: str,
    *,
    name: str = "rock.json",
    meta: bytes | None = None,
    borrowed: str | None = None,
) -> Case:
    """A file of ids, with its meta file beside it; no content: no file."""

    def run(bench: Bench) -> object:
        if content is not None:
            bench.write(name, content)
        if meta is not None:
            bench.write("rock.meta.json", meta)
        fingerprint = tokenizer_fingerprint(bench.tokenizer)
        return read_ids(bench.folder / name, num_types=1024, tokenizer=fingerprint)

    return Case(
        id=id,
        area="token list",
        wrong=wrong,
        run=run,
        error=DataError,
        says=says,
        todo=todo,
        borrowed=borrowed,
    )


PAIRS = b"rock_id,rock_token\n13,.\n"
LIST = "Write a JSON list of integers, such as `[13, 198]`."

LISTS = [
    token_list("no-list", "the file does not exist", None, r"rock.json: no such file", "Name it."),
    token_list("empty-list", "an empty list", b"[]", r"empty; it must name at least one", LIST),
    token_list(
        "torn-list",
        "a list cut short",
        b"[13, 19",
        r"not readable",
        LIST,
        borrowed=r"(?<=not readable: ).*",
    ),
    token_list("object-list", "an object", b'{"ids": [1]}', r"expected a JSON list of", LIST),
    token_list("float-list", "ids that are floats", b"[13.0, 198.0]", r"list of integers", LIST),
    token_list("text-list", "tokens in place of ids", b'["the", "a"]', r"list of integers", LIST),
    token_list("nested-list", "a list of lists", b"[[13], [198]]", r"list of integers", LIST),
    token_list("boolean-list", "booleans", b"[true]", r"list of integers", LIST),
    token_list(
        "deep-list",
        "brackets nested a hundred thousand deep",
        b"[" * 100_000,
        r"not readable",
        LIST,
        borrowed=r"(?<=not readable: ).*",
    ),
    token_list(
        "ids-outside",
        "ids beyond the vocabulary",
        b"[13, 151645]",
        r"1 ids lie outside the vocabulary of 1024 \(first: 151645\)",
        "Take the list that was made with this tokenizer.",
    ),
    token_list(
        "negative-id",
        "an id below 0",
        b"[-1]",
        r"lie outside the vocabulary of 1024 \(first: -1\)",
        "Correct it.",
    ),
    token_list(
        "list-of-another-tokenizer",
        "a list that was made with another tokenizer",
        b"[13]",
        r"made with tokenizer <fingerprint> \(says rock.meta.json\)",
        "Make the list with this tokenizer: the same id is another token there.",
        meta=b'{"tokenizer": "0123456789abcdef"}',
    ),
    token_list(
        "torn-meta",
        "a meta file that is none",
        b"[13]",
        r"rock.meta.json: expected a JSON object with the key 'tokenizer'",
        "Remove it to use the list all the same.",
        meta=b"{",
        borrowed=r"(?<=\()JSONDecodeError(?=\))",
    ),
    token_list(
        "csv-without-column",
        "a table without the column of ids",
        b"token,freq\n13,4\n",
        r"no column 'rock_id', its header has \['token', 'freq'\]",
        "Name the column, as 'rock_id' or 'ctrl_id'.",
        name="pairs.csv",
    ),
    token_list(
        "csv-short-row",
        "a row with fewer cells than the header",
        PAIRS + b"14\n",
        r"line 3 does not have the header's 2 cells",
        "Write the table again.",
        name="pairs.csv",
    ),
    token_list(
        "csv-word",
        "a word in the column of ids",
        PAIRS + b"the,the\n",
        r"line 3: 'the' in 'rock_id' is no token id",
        "Write the id.",
        name="pairs.csv",
    ),
]

# --- occurrence files -----------------------------------------------------------------------------


def occurrences(
    id: str,
    wrong: str,
    damage: Callable[[Path], object],
    says: str,
    todo: str,
    *,
    borrowed: str | None = None,
) -> Case:
    """A sound file of two responses, damaged."""

    def run(bench: Bench) -> object:
        path = sound_occurrences(bench, "occ.parquet")
        damage(path)
        return build_registry(path)

    return Case(
        id=id,
        area="occurrence file",
        wrong=wrong,
        run=run,
        error=DataError,
        says=says,
        todo=todo,
        borrowed=borrowed,
    )


def sound_occurrences(bench: Bench, name: str, **info: object) -> Path:
    responses = [
        Response(ids=[5, 6, 7], kl=[0.1, 0.2, 0.3], prompt_id=prompt_id) for prompt_id in "ab"
    ]
    made = replace(file_info(bench.tiny / "student"), **info)
    return write_file(bench.folder / name, made, responses)


def columns(change: Callable) -> Callable[[Path], None]:
    """The table changed, its metadata kept."""

    def damage(path: Path) -> None:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            table, footer = file.read(), file.metadata.metadata
        changed = change(table)
        writer = pq.ParquetWriter(path, changed.schema)
        writer.write_table(changed)
        writer.add_key_value_metadata({"rock_opd_num_empty": footer[b"rock_opd_num_empty"]})
        writer.close()

    return damage


def _kl(table, *, value):
    import pyarrow as pa

    values = table["kl"].to_numpy().copy()
    values[1] = value
    place = table.schema.get_field_index("kl")
    return table.set_column(place, table.schema.field("kl"), pa.array(values))


def _other_format(path: Path) -> None:
    def change(table):
        said = json.loads(table.schema.metadata[b"rock_opd"]) | {"format": 99}
        return table.replace_schema_metadata({b"rock_opd": json.dumps(said)})

    columns(change)(path)


def _two_tokenizers(bench: Bench) -> object:
    folder = bench.folder / "occurrences"
    folder.mkdir()
    sound_occurrences(bench, "occurrences/step_000001.parquet")
    sound_occurrences(bench, "occurrences/step_000002.parquet", tokenizer="another")
    return build_registry(folder)


def _other_vocabulary(bench: Bench) -> object:
    from rock_opd.score import score

    sound_occurrences(bench, "occ.parquet", tokenizer="0123456789abcdef")
    return score(
        bench.recipe(),
        bench.folder / "out.parquet",
        reuse=bench.folder / "occ.parquet",
        say=lambda line: None,
        track=lambda done, of: None,
    )


def _occurrence(id: str, wrong: str, run: Callable, says: str, todo: str) -> Case:
    return Case(
        id=id, area="occurrence file", wrong=wrong, run=run, error=DataError, says=says, todo=todo
    )


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


SCORE = "Write it again with 'rock-opd score'."

OCCURRENCES = [
    occurrences(
        "no-occurrences",
        "the file does not exist",
        lambda path: path.unlink(),
        r"^occurrences occ.parquet: no such file or folder",
        "Name it.",
    ),
    occurrences(
        "occurrences-text",
        "a file that is no parquet",
        lambda path: path.write_bytes(b"kl\n0.1\n"),
        r"^occurrences occ.parquet",
        SCORE,
        borrowed=r"(?<=occ.parquet: ).*",
    ),
    occurrences(
        "occurrences-torn",
        "a file cut short",
        _torn,
        r"^occurrences occ.parquet",
        SCORE,
        borrowed=r"(?<=occ.parquet: ).*",
    ),
    occurrences(
        "foreign-parquet",
        "a parquet file of something else",
        columns(lambda table: table.select(["token_id", "kl"]).replace_schema_metadata()),
        r"a parquet file, but not one of occurrences \(it has columns token_id, kl, ",
        SCORE,
    ),
    occurrences(
        "column-missing",
        "a column is missing",
        columns(lambda table: table.drop_columns(["measure"])),
        r"columns are missing: measure",
        SCORE,
    ),
    occurrences(
        "rows-missing",
        "rows were filtered out",
        columns(lambda table: table.slice(1)),
        r"6 rows were written and 5 are there: rows were cut later",
        "Filter what the commands write instead.",
    ),
    occurrences(
        "rows-swapped",
        "rows in another order",
        columns(lambda table: table.take([0, 2, 1, 3, 4, 5])),
        r"row 1 \(rollout a#0, position 2, token 7\): stands behind position 0 of sample 0",
        "Use the file as it was written.",
    ),
    occurrences(
        "rows-twice",
        "rows appended twice",
        columns(lambda table: table.take([0, 1, 2, 3, 4, 5] * 2)),
        r"6 rows were written and 12 are there: rows were appended later",
        "Use the file as it was written.",
    ),
    occurrences(
        "kl-is-negative",
        "a KL below 0 by more than rounding (1e-4 nats)",
        columns(partial(_kl, value=-0.25)),
        r"column kl, row 1 .*: expected a KL of 0 or above \(rounding: 0.0001\), got -0.25",
        SCORE,
    ),
    occurrences(
        "metadata-damaged",
        "metadata that is no JSON",
        columns(lambda table: table.replace_schema_metadata({b"rock_opd": b"{"})),
        r"its metadata \(what the file says of itself\) is damaged: ",
        SCORE,
        borrowed=r"(?<=damaged: ).*(?=; score)",
    ),
    occurrences(
        "kl-is-nan",
        "a measured position without a loss",
        columns(partial(_kl, value=np.nan)),
        r"column kl, row 1 \(rollout a#0, position 1, token 6\): expected a finite KL",
        SCORE,
    ),
    occurrences(
        "occurrences-other-format",
        "a file of another version of the program",
        _other_format,
        r"written in format 99, this version reads \d+",
        "Use the version that wrote it, or score again.",
        borrowed=r"\d+$",
    ),
    _occurrence(
        "empty-occurrence-folder",
        "a folder without files",
        lambda bench: build_registry(bench.folder),
        r"the folder holds no step_\*.parquet; a run writes them with log.occurrences=true",
        "Run with log.occurrences=true.",
    ),
    _occurrence(
        "two-tokenizers",
        "a folder of files that do not belong together",
        _two_tokenizers,
        r"tokenizer is another, but <fingerprint> in step_000001.parquet: the files do not",
        "Keep the files of one run in a folder.",
    ),
    _occurrence(
        "reuse-of-another-tokenizer",
        "responses of another tokenizer, to be scored again",
        _other_vocabulary,
        r"its ids are of tokenizer <fingerprint> \(1024 types\)",
        "Score with models that share the tokenizer of the responses.",
    ),
]

# --- checkpoints ----------------------------------------------------------------------------------


def _state(bench: Bench, *overrides: str) -> tuple:
    recipe = bench.recipe("policy.name=rock_freeze", *overrides)
    own = {f.name: getattr(recipe.policy, f.name) for f in fields(recipe.policy)}
    for elsewhere in ("name", "ids_file", "guard_file", "guard_special", "decay"):
        del own[elsewhere]
    policy = make_policy("rock_freeze", ids=None, never=np.zeros(0, np.int32), seed=0, **own)
    return Registry(1024), policy, identity(recipe)


def sound_checkpoint(bench: Bench, step: int = 4) -> Path:
    folder = bench.folder / "run" / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    registry, policy, fingerprints = _state(bench)
    numbers, arrays = pack_state(RunState(step=step), registry, policy, fingerprints)
    seal(folder, step, write_state(folder, numbers, arrays))
    return folder


def checkpoint(
    id: str,
    wrong: str,
    damage: Callable[[Path], object],
    says: str,
    todo: str,
    *,
    borrowed: str | None = None,
) -> Case:
    """A run with one sound checkpoint, damaged."""

    def run(bench: Bench) -> object:
        damage(sound_checkpoint(bench))
        return load_checkpoint(bench.folder / "run")

    return Case(
        id=id,
        area="checkpoint",
        wrong=wrong,
        run=run,
        error=DataError,
        says=says,
        todo=todo,
        borrowed=borrowed,
    )


def _changed_number(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))


def _one_before(bench: Bench) -> object:
    sound_checkpoint(bench, 2)
    (sound_checkpoint(bench, 4) / "state.npz").write_bytes(b"")
    found = load_checkpoint(bench.folder / "run")
    assert found.step == 2 and [path.name for path, _ in found.refused] == ["step_000004"]
    return found


def _resumed(*overrides: str) -> Callable[[Bench], object]:
    def run(bench: Bench) -> object:
        sound_checkpoint(bench)
        found = load_checkpoint(bench.folder / "run")
        *_, fingerprints = _state(bench, *overrides)
        return require_same(found.numbers, fingerprints, where="step_000004")

    return run


OLDER = "An older checkpoint is used by itself; with none left, start over under another name."
AS_BEGUN = "Go on with the recipe it began with, or start a run of its own."

CHECKPOINTS = [
    checkpoint(
        "no-checkpoint",
        "a run that saved nothing",
        lambda folder: (folder / "complete.json").unlink(),
        r"no whole checkpoint under run/checkpoints",
        "Start without resume=true, or set checkpoint.every.",
    ),
    checkpoint(
        "torn-arrays",
        "state.npz cut short",
        lambda folder: (folder / "state.npz").write_bytes(b"PK\x03\x04"),
        r"step_000004: state.npz has <n> bytes, \d+ were written",
        OLDER,
        borrowed=r"\d+(?= were written)",
    ),
    checkpoint(
        "no-state",
        "state.json missing",
        lambda folder: (folder / "state.json").unlink(),
        r"step_000004: state.json is missing",
        OLDER,
    ),
    checkpoint(
        "changed-state",
        "state.json changed by hand, its length kept",
        _changed_number,
        r"step_000004: state.json was changed after it was written",
        OLDER,
    ),
    checkpoint(
        "changed-seal",
        "complete.json changed by hand",
        lambda folder: edit(folder / "complete.json", step=5),
        r"step_000004: complete.json was changed after it was written",
        OLDER,
    ),
    checkpoint(
        "torn-seal",
        "complete.json cut short",
        lambda folder: (folder / "complete.json").write_bytes(b"{"),
        r"step_000004: it cannot be read",
        OLDER,
        borrowed=r"(?<=it cannot be read \().*?(?=\))",
    ),
    checkpoint(
        "other-checkpoint-format",
        "a checkpoint of another version of the program",
        lambda folder: edit(folder / "complete.json", format=1),
        r"step_000004: format 1, this version reads \d+",
        "Go on with the version that began the run.",
        borrowed=r"\d+(?=\);)",
    ),
    Case(
        id="newest-is-torn",
        area="checkpoint",
        wrong="the newest one is torn, the one before it is whole",
        run=_one_before,
        outcome="read",
        todo="Nothing: the one before is used, and the run says so.",
    ),
    Case(
        id="other-seed",
        area="checkpoint",
        wrong="another seed than the run began with",
        run=_resumed("run.seed=1"),
        error=DataError,
        says=r"resume from step_000004: run.seed was 0, is 1; a run goes on as it began",
        todo=AS_BEGUN,
    ),
    Case(
        id="other-policy",
        area="checkpoint",
        wrong="another token policy than the run began with",
        run=_resumed("policy.top_k=50"),
        error=DataError,
        says=r"policy.top_k was 100, is 50; a run goes on as it began",
        todo=AS_BEGUN,
    ),
]

CASES = LISTS + OCCURRENCES + CHECKPOINTS
