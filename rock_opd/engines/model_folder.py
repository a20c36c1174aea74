"""A model folder that transformers and vLLM load, written shard by shard.

Knows files, no ranks: whoever holds whole tensors hands them over. The first failure is kept and
raised at the end, so that the ranks that gather the rest are not left waiting.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rock_opd.durable import FileFacts, storing, sync, total_bytes
from rock_opd.errors import StorageError
from rock_opd.models import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "generation_config.json",
)


def host_copies(bucket: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Contiguous tensors in host memory, each with a storage of its own: no longer the live ones,
    and what safetensors takes (parts of a fused tensor share theirs)."""
    return {
        name: torch.empty_like(t, device="cpu", memory_format=torch.contiguous_format).copy_(t)
        for name, t in bucket
    }


class ModelFolder:
    """Writes one; files of the same names are replaced."""

    def __init__(self, path: Path, *, num_shards: int) -> None:
        self._path, self._num_shards = path, num_shards
        self._weight_map: dict[str, str] = {}
        self._num_bytes = 0
        self._failure: StorageError | None = None
        self._shard = 0

    def write(self, tensors: dict[str, Tensor]) -> None:
        """The next shard."""
        from safetensors.torch import save_file

        if self._failure is not None:
            return
        name = "model.safetensors"
        if self._num_shards > 1:
            name = f"model-{self._shard + 1:05d}-of-{self._num_shards:05d}.safetensors"
        needed = total_bytes(tensors.values())
        try:
            with storing("model", self._path / name, needed=needed):
                if self._shard == 0:
                    self._begin()
                save_file(tensors, self._path / name, metadata={"format": "pt"})
                sync(self._path / name)
        except StorageError as error:
            self._failure = error
        self._shard += 1
        self._weight_map.update(dict.fromkeys(tensors, name))
        self._num_bytes += needed

    def _begin(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        index = self._path / "model.safetensors.index.json"
        for old in [*self._path.glob("model*.safetensors"), index]:
            old.unlink(missing_ok=True)

    def finish(self, config: PreTrainedConfig, source: str) -> dict[str, FileFacts]:
        """The index, ``config`` and the tokenizer files of the model at ``source``; nothing is
        vouched for, so the answer is empty.

        Raises:
            StorageError: this, or a shard before it, could not be written.
        """
        if self._failure is not None:
            raise self._failure
        with storing("model", self._path):
            if self._num_shards > 1:
                index = {
                    "metadata": {"total_size": self._num_bytes},
                    "weight_map": self._weight_map,
                }
                (self._path / "model.safetensors.index.json").write_text(
                    json.dumps(index, indent=2)
                )
            config.save_pretrained(self._path)
            folder = model_folder(source)
            if folder.resolve() != self._path.resolve():
                for pattern in TOKENIZER_FILES:
                    for file in folder.glob(pattern):
                        if file.is_file():
                            shutil.copyfile(file, self._path / file.name)
        return {}
