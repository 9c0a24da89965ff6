"""TorchFile: a `pytorch_model.bin` or `medusa_lm_head.pt`, as many draft heads are published, read like a safetensors file.

Owns: reading it without running code from it. Must not know: which tensors are wanted.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ConfigError

if TYPE_CHECKING:
    import torch

_RESAVE = "save the weights alone, as safetensors"


class TorchFile:
    """The tensors of one file. Only tensors are unpickled, and they stay on disk until they are used.

    Raises:
        ConfigError: the file is damaged, or holds anything but tensors by name.
    """

    def __init__(self, file: Path) -> None:
        import torch

        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"cannot read {file}: {first}"
            raise ConfigError(
                message, hint="the file is damaged, or holds more than tensors; fetch it again, or save it as safetensors"
            ) from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file} holds a {type(content).__name__}, but it must hold tensors by name", hint=_RESAVE)
        strays = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
        if strays:
            raise ConfigError(f"{file} holds {strays[0]!r}, which is no tensor", hint=_RESAVE)
        self._tensors: dict[str, torch.Tensor] = dict(content)

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        return self._tensors[name]
