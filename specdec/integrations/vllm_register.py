"""The entry point of vLLM's plugins. It installs nothing, and imports nothing that vLLM does not import by itself.

Owns: what is said at the start of a vLLM process. Must not know: the proposers, which vLLM imports by path when it needs one.
vLLM's CPU build (0.32) fails at start in a process that has loaded numba's llvmlite before, so neither may be imported here.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

logger = logging.getLogger(__name__)

MODULE = "specdec.integrations.vllm_plugin"
NAMES = ("NgramProposer", "SuffixProposer", "HybridProposer")


@cache
def register() -> None:
    """Name the proposers, or warn where vLLM cannot use them; vLLM calls this in each of its processes, perhaps more than once."""
    if find_spec("vllm") is not None and find_spec("vllm.v1.spec_decode.custom_class_proposer") is None:
        logger.warning("this version of vllm has no method custom_class, so specdec's proposers cannot be used in it")
        return
    logger.info("specdec offers proposers for --speculative-config's custom_class: %s", ", ".join(f"{MODULE}.{name}" for name in NAMES))
