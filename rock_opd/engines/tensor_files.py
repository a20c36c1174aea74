"""Finds single tensors in a model's safetensors, in a folder or on the hub, and opens them.

Only the file that holds a tensor is touched (and, from the hub, downloaded).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rock_opd.errors import ModelError

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What an unquantised tensor is stored as."""


def tensor_files(model: str) -> dict[str, str]:
    """Tensor name -> file that holds it.

    Args:
        model: folder or hub id with safetensors weights, one file or sharded with an index.

    Raises:
        ModelError: no such file, or one that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = _find(model, "model.safetensors.index.json")
    if index is not None:
        return json.loads(index.read_text())["weight_map"]
    if (single := _find(model, "model.safetensors")) is None:
        raise ModelError(
            f"model {model}: neither model.safetensors nor model.safetensors.index.json (offline, "
            "a hub id must be in the local cache); save it with transformers first"
        )
    try:
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), "model.safetensors")
    except SafetensorError as error:
        raise ModelError(f"model {model}: model.safetensors cannot be read: {error}") from None


def names_ending(names: Iterable[str], ending: str) -> list[str]:
    """Those that are ``ending``, or end with it behind a dot."""
    return [name for name in names if name == ending or name.endswith(f".{ending}")]


@contextmanager
def open_tensor(model: str, file: str, name: str) -> Iterator[Any]:
    """A tensor that is read as it is sliced: ``tensor[a:b]`` reads rows a to b - 1 and no more.

    Raises:
        ModelError: the file is missing or damaged, or has no such tensor.
    """
    from safetensors import SafetensorError, safe_open

    path = _find(model, file)
    if path is None:
        raise ModelError(
            f"model {model}: its index names {file} for {name}, but that file is missing"
        )
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors.get_slice(name)
    except SafetensorError as error:
        raise ModelError(f"model {model}: {file} cannot be read: {error}") from None


def _find(model: str, file: str) -> Path | None:
    """The file in the model's folder, or from the hub (downloaded once, then cached)."""
    if Path(model).is_dir():
        path = Path(model) / file
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, file))
    except EntryNotFoundError:  # not in the repository; when offline, not in the cache
        return None
