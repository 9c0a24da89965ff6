"""Checkpoint: reads a model's tensors by name and insists that every one of them is used.

Owns: weight files, sharded or not, and the strictness rule. Must not know: which architecture reads it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError
from specdec.models.source import TORCH_WEIGHTS, read_json
from specdec.models.torch_file import TorchFile

if TYPE_CHECKING:
    import torch

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # derived buffers some exporters write


class Checkpoint:
    """Tensors of a model directory. `take` reads one and marks it used; `finish` refuses what is left over.

    Raises:
        ConfigError: a file cannot be read, a tensor is missing or has another shape, or one was never asked for.
    """

    def __init__(self, model_path: str) -> None:
        self.path = Path(model_path)
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._where = self._index()
        self._left = set(self._where)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> set[str]:
        """Return the names of all tensors of the checkpoint."""
        return set(self._where)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the tensor `name` on the CPU in its stored dtype; `shape` is checked when given."""
        if name not in self._where:
            near = ", ".join(sorted(self._left)[:3])
            hint = f"the checkpoint is not of this architecture, or incomplete; it holds {near}, ..."
            raise ConfigError(f"tensor `{name}` is missing from {self.path}", hint=hint)
        tensor = self._read(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ConfigError(
                f"tensor `{name}` of {self.path} has shape {list(tensor.shape)}, but the config asks for {list(shape)}",
                hint="config.json and weights do not belong together",
            )
        self._left.discard(name)
        return tensor

    def skip(self, *prefixes: str) -> None:
        """Mark every tensor whose name starts with one of the prefixes as not ours (another reader loads it)."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Refuse the checkpoint if it holds a tensor that nobody took."""
        left = sorted(name for name in self._left if not name.endswith(_IGNORED_SUFFIXES))
        if left:
            raise ConfigError(
                f"unexpected tensor `{left[0]}`" + (f" and {len(left) - 1} more" if len(left) > 1 else "") + f" in {self.path}",
                hint="the checkpoint has weights this architecture does not use; serving it would ignore them",
            )

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ConfigError(f"{index} has no weight_map from tensors to files", hint="download the model again")
            return {name: self.path / file for name, file in weight_map.items()}
        files = sorted(self.path.glob("*.safetensors")) or [self.path / name for name in TORCH_WEIGHTS if (self.path / name).is_file()]
        if not files:
            raise ConfigError(f"no safetensors file in {self.path}", hint="point to a directory with model.safetensors, or to a .gguf file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (safe_open is no dict)

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        file = self._where[name]
        try:
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            message = f"tensor `{name}` cannot be read from {file}: {error}"
            raise ConfigError(message, hint="index and files do not belong together; fetch the model again") from error
        return tensor

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file.name not in self._handles and file.name in TORCH_WEIGHTS:
            self._handles[file.name] = TorchFile(file)
        elif file.name not in self._handles:
            try:
                self._handles[file.name] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {file}: {error}", hint="the file is damaged or incomplete; fetch it again") from error
        return self._handles[file.name]
