"""Where the hidden states of a request are written, for the writer and for the answer that names the file.

Owns: directory and file name. Must not know: what is in the file.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path


def hidden_states_directory(shared_storage_path: str | None) -> Path:
    """The directory that was configured, or the system's temporary one."""
    return Path(shared_storage_path or tempfile.gettempdir()).expanduser()


def hidden_states_path(directory: Path, request_id: str) -> Path:
    """A request's file. Ids that are no plain file names get a hash in place of what they cannot keep."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", request_id).lstrip(".")[:150]
    if name != request_id:
        name = f"{name}-{hashlib.sha256(request_id.encode()).hexdigest()[:12]}"
    return directory / f"{name}.safetensors"
