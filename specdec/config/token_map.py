"""read_token_map: which ids a draft head scores, from a file that ranks or lists them (FR-Spec, 2502.14856).

Owns: the formats and the check of the ids. Must not know: heads.

| file | content |
|---|---|
| `.pt`, `.pth`, `.bin` | a list or a tensor of ids, as SGLang's `--speculative-token-map` takes it; no code in it is run |
| `.json` | a list of ids |
| `.safetensors` | the tensor `token_map`, or the only one that there is |
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError

if TYPE_CHECKING:
    import torch

_TENSOR = "token_map"


def read_token_map(path: str, vocab_size: int) -> torch.Tensor:
    """Return the ids [Vd] int64, ascending: which come first in the file does not matter to a head that scores them all.

    Raises:
        ConfigError: the file cannot be read, or holds anything but different ids from 0 to vocab_size - 1.
    """
    import torch

    file = Path(path).expanduser()
    if file.suffix not in _READERS:
        raise _refusal(path, f"ends in {file.suffix!r}", f"it must end in one of {', '.join(_READERS)}")
    try:
        content = _READERS[file.suffix](file)
        ids = torch.as_tensor(content)
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, pickle.UnpicklingError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refusal(path, f"cannot be read: {first}", "make it anew with specdec train token-map") from None
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype is torch.bool:
        raise _refusal(path, "holds no one list of token ids", "make it anew with specdec train token-map")
    ids = ids.long().sort().values
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        outside = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        raise _refusal(
            path, f"holds the id {outside}, but the target has ids 0 to {vocab_size - 1}", "make it with this target's tokenizer"
        )
    twice = ids[1:][ids.diff() == 0].tolist()
    if twice:
        raise _refusal(path, f"holds the id {twice[0]} twice", "each id may occur once")
    return ids


def _refusal(path: str, fault: str, hint: str) -> ConfigError:
    return ConfigError(f"speculative_config.token_map {path!r} {fault}", hint=hint)


def _read_torch(file: Path) -> Any:
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _read_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if _TENSOR not in tensors and len(tensors) != 1:
        raise ValueError(f"it holds {len(tensors)} tensors, and none is called {_TENSOR}")
    return tensors.get(_TENSOR, next(iter(tensors.values())))


_READERS: dict[str, Callable[[Path], Any]] = {
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".bin": _read_torch,
    ".json": _read_json,
    ".safetensors": _read_safetensors,
}
