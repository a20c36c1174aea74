"""Headers of a model's safetensors: which tensors there are, of which shape, and whether they are
all there.

Reads headers, and of a tied head a few rows; never a whole tensor. It refuses weights that are cut
short, that lack a file or a layer, or that are another model's than ``config.json`` says: libraries
fill such gaps with random numbers and a warning, or stop after minutes of loading.

Format: 8 bytes little-endian length, then JSON, then the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rock_opd.durable import digest
from rock_opd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_HEADER_BYTES = 100 << 20
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PLAIN_DTYPES = ("F32", "BF16", "F16")
"""What an unquantised tensor is stored as."""
SAMPLE_BYTES = 4096
"""Of each tensor, for ``content_sample``."""
NUM_COMPARED_ROWS = 16
"""Rows of a head that are compared with those of the embedding it should be."""


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """As safetensors names it: F32, BF16, I8, ..."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    num_bytes: int


def weight_headers(folder: Path, model: str) -> dict[str, TensorHeader]:
    """Every tensor of the model in ``folder``, by name.

    Args:
        model: the name to use in messages.

    Raises:
        ModelError: no safetensors, a file missing or cut short, or an index that does not fit.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed_headers(index, model)
    if (folder / SINGLE).is_file():
        return _file_headers(folder / SINGLE, model)
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        raise ModelError(
            f"model {model}: {shards[0]} is there, but neither {SINGLE} nor {INDEX}, which says "
            "what the files hold; fetch it again"
        )
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    if pickles:
        raise ModelError(
            f"model {model}: the weights are pickles ({pickles[0]}), which can run code and are "
            "never loaded here; save it as safetensors: AutoModelForCausalLM"
            ".from_pretrained(...).save_pretrained(...) on a machine that may load it"
        )
    raise ModelError(f"model {model}: the folder holds no weights (*.safetensors)")


def content_sample(headers: dict[str, TensorHeader]) -> str:
    """A digest of every tensor's name, dtype and shape, and of the bytes in its middle: of 60 GB it
    reads a few MB. The same however the tensors are spread over files; it misses a change that
    spares the middle of every tensor."""
    found = {}
    for path in sorted({header.file for header in headers.values()}):
        with path.open("rb") as file:
            for name, header in headers.items():
                if header.file == path:
                    num = min(SAMPLE_BYTES, header.num_bytes)
                    file.seek(header.start + (header.num_bytes - num) // 2)
                    found[name] = [header.dtype, header.shape, digest(file.read(num))]
    return digest(json.dumps(found, sort_keys=True).encode())


def check_weights(
    headers: dict[str, TensorHeader], config: PreTrainedConfig, *, model: str, composite: bool
) -> None:
    """Holds the headers against the config, as far as names that most architectures share go.

    Args:
        composite: the model has parts besides the language model, whose config may say ``tied``
            of itself while the whole says otherwise; the head is then left alone.

    Raises:
        ModelError: layers missing, an embedding of another shape, a head that is missing or is not
            the embedding although the two are tied.
    """
    found = {int(m[1]) for name in headers if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", name))}
    if found and (missing := sorted(set(range(config.num_hidden_layers)) - found)):
        raise ModelError(
            f"model {model}: config.json has {config.num_hidden_layers} layers, the weights lack "
            f"{len(missing)} of them (first: {missing[0]}); fetch it again, or correct "
            "num_hidden_layers"
        )
    embedding = _only(headers, "embed_tokens.weight")
    if embedding is None:
        return
    width = (
        getattr(config, "word_embed_proj_dim", None)
        or getattr(config, "embedding_size", None)
        or config.hidden_size
    )
    if embedding.dtype in PLAIN_DTYPES and embedding.shape != (config.vocab_size, width):
        raise ModelError(
            f"model {model}: the embedding has shape {list(embedding.shape)}, config.json says "
            f"[{config.vocab_size}, {width}] (vocab_size, hidden_size); the weights are another "
            "model's"
        )
    if composite:
        return
    head = _only(headers, "lm_head.weight")
    if not config.tie_word_embeddings and not any("lm_head." in name for name in headers):
        raise ModelError(
            f"model {model}: no lm_head.weight in the weights, and tie_word_embeddings is false, "
            "so the head would be random numbers; set it to true if the embedding is the head"
        )
    if config.tie_word_embeddings and head is not None and _differ(embedding, head):
        raise ModelError(
            f"model {model}: tie_word_embeddings is true, but lm_head.weight is another tensor "
            "than the embedding: engines would disagree on which is the head; set it to false, or "
            "remove lm_head.weight"
        )


def head_dtype(headers: dict[str, TensorHeader], *, tied: bool) -> str | None:
    """What the output head is stored as; None where it cannot be told by its name."""
    head = _only(headers, "embed_tokens.weight" if tied else "lm_head.weight")
    return None if head is None else head.dtype


def num_params(headers: dict[str, TensorHeader], *, tied: bool) -> int:
    """Numbers in all tensors, a tied head counted once."""
    return sum(
        math.prod(header.shape)
        for name, header in headers.items()
        if not (tied and name == "lm_head.weight")
    )


def _only(headers: dict[str, TensorHeader], ending: str) -> TensorHeader | None:
    found = [h for name, h in headers.items() if name == ending or name.endswith(f".{ending}")]
    return found[0] if len(found) == 1 else None


def _differ(a: TensorHeader, b: TensorHeader) -> bool:
    """Whether two matrices differ, by a few rows spread over them."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return True
    num_rows = a.shape[0]
    row_bytes = a.num_bytes // max(1, num_rows)
    rows = {i * (num_rows - 1) // (NUM_COMPARED_ROWS - 1) for i in range(NUM_COMPARED_ROWS)}
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        for row in sorted(rows):
            file_a.seek(a.start + row * row_bytes)
            file_b.seek(b.start + row * row_bytes)
            if file_a.read(row_bytes) != file_b.read(row_bytes):
                return True
    return False


def _indexed_headers(index: Path, model: str) -> dict[str, TensorHeader]:
    try:
        files: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        files = None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(
            f"model {model}: {INDEX} is no index of weights (an object with 'weight_map': tensor "
            "name to file name); fetch it again"
        )
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(files.values())):
        headers |= _file_headers(index.with_name(file), model)
    if absent := [name for name in files if name not in headers]:
        raise ModelError(
            f"model {model}: {INDEX} names {absent[0]} in {files[absent[0]]}, which does not hold "
            f"it ({len(absent)} such tensors); the files are of different models, fetch them again"
        )
    return headers


def _file_headers(path: Path, model: str) -> dict[str, TensorHeader]:
    if not path.is_file():
        raise ModelError(f"model {model}: weight file {path.name} is missing; fetch it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if head == b"version ":
            raise ModelError(
                f"model {model}: {path.name} is a git-lfs pointer, not the weights; run 'git lfs "
                "pull' in the folder"
            )
        if not 0 < length <= min(size, MAX_HEADER_BYTES):
            raise ModelError(
                f"model {model}: {path.name} is not a safetensors file ({size} bytes); fetch it "
                "again"
            )
        try:
            entries: dict[str, Any] = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            headers = {
                name: TensorHeader(
                    file=path,
                    dtype=str(entry["dtype"]),
                    shape=tuple(map(int, entry["shape"])),
                    start=8 + length + int(entry["data_offsets"][0]),
                    num_bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
                )
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise ModelError(
                f"model {model}: the header of {path.name} is damaged; fetch it again"
            ) from None
    whole = max((h.start + h.num_bytes for h in headers.values()), default=8 + length)
    if size != whole:
        raise ModelError(
            f"model {model}: {path.name} has {size} bytes, its header names {whole}; fetch it again"
        )
    return headers
