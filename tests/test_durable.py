"""Files whole or not at all, and what a disk that takes no more says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rock_opd.durable import (
    FileFacts,
    digest,
    file_facts,
    first_difference,
    in_bytes,
    replace_folder,
    storing,
    write_text,
)
from rock_opd.errors import StorageError


def test_a_digest_is_that_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    facts = file_facts(tmp_path / "a")
    # blake2b-128 of "abc", by b2sum -l 128
    assert facts == FileFacts(num_bytes=3, digest="cf4ab791c62b8d2b2109c90275287816")
    assert digest(b"abc") == facts.digest


def test_the_first_file_that_is_another_one_is_named(tmp_path):
    files = {}
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
        files[name] = file_facts(tmp_path / name)
    assert first_difference(tmp_path, files) is None
    (tmp_path / "c").write_bytes(b"c" * 999 + b"d")
    assert first_difference(tmp_path, files).startswith("c was changed")
    (tmp_path / "b").write_bytes(b"b" * 999)
    assert first_difference(tmp_path, files) == "b has 999 bytes, 1000 were written"
    (tmp_path / "a").unlink()
    assert first_difference(tmp_path, files) == "a is missing"


def test_a_folder_takes_the_place_of_another_whole(tmp_path):
    for name in ("new.partial", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    replace_folder(tmp_path / "new.partial", tmp_path / "old")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["new.partial"]
    write_text(tmp_path / "text", "é")
    assert (tmp_path / "text").read_text(encoding="utf-8") == "é"


def test_a_failed_write_says_what_where_why_and_how_much(tmp_path):
    where = tmp_path / "not" / "there" / "x"
    with pytest.raises(StorageError) as failure, storing("the thing", where, needed=12_345_678):
        where.write_text("")
    text = str(failure.value)
    assert text.startswith(f"the thing could not be written to {where}: No such file or directory")
    assert "(12.3 MB needed, " in text and text.endswith(" free)") and "\n" not in text
    with pytest.raises(KeyError), storing("the thing", where):
        raise KeyError("other errors pass")
    with pytest.raises(StorageError, match=r"^as it was$"), storing("the thing", where):
        raise StorageError("as it was")
    assert [in_bytes(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**12)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 TB")
    ]


@pytest.mark.parametrize("writer", ["safetensors", "parquet", "numpy"])
def test_every_writer_s_own_kind_of_full_disk_is_the_same_error(tmp_path, writer):
    """A file-size limit stands in for the disk; in a process of its own, as it cannot be lifted."""
    script = """
import resource, sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
from safetensors.torch import save_file
from rock_opd.durable import storing
from rock_opd.errors import StorageError
path, writer = Path(sys.argv[1]) / "x", sys.argv[2]
values = np.random.default_rng(0).random(100_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with storing("numbers", path, needed=values.nbytes):
        if writer == "safetensors":
            save_file({"a": torch.from_numpy(values)}, path)
        elif writer == "parquet":
            pq.write_table(pa.table({"a": values}), path)
        else:
            with path.open("wb") as file:
                np.savez(file, a=values)
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), writer],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("numbers could not be written to ") and "800.0 kB needed" in line
    assert "File too large" in line
