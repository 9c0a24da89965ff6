"""HeadProposer: what every drafter with a head on the target's hidden states does alike: load, size, bind, sleep, wake.

Owns: the head's life. Must not know: what a head computes, or when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from specdec.config.methods import MethodTraits
from specdec.config.token_map import read_token_map
from specdec.models.draft_head import HeadSetting, Lender
from specdec.models.loader import Checkpoint
from specdec.proposers.base import BaseProposer, DraftRail, MemoryNeed
from specdec.proposers.draft_vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


class Head(Protocol):
    """A head as far as its life goes. id_map [Vd] int64: target id of each draft id, None where they are equal."""

    id_map: torch.Tensor | None

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one KV pair."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of its own."""
        ...

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every layer."""
        ...

    def attach(self, target: Lender) -> None:
        """Borrow from the target what the checkpoint does not hold."""
        ...


HeadT = TypeVar("HeadT", bound=Head)


class HeadProposer(BaseProposer, Generic[HeadT]):
    """Holds one head. build: makes it from (hf config, checkpoint, setting).

    Raises:
        ConfigError: the head's checkpoint cannot be loaded, or does not fit the target.
    """

    def __init__(self, resolved: ResolvedConfig, *, build: Callable[[Any, Checkpoint, HeadSetting], HeadT]) -> None:
        config: Any = resolved.engine.speculative
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        assert resolved.draft_model_path is not None, "resolve() found the draft's checkpoint"
        self.traits: MethodTraits = resolved.traits
        self._resolved, self._build = resolved, build
        self.max_len = min(resolved.max_model_len, config.max_model_len or resolved.max_model_len)
        self._draft_sample_method = config.draft_sample_method
        self._token_map: str | None = getattr(config, "token_map", None)
        self._quantization: str | None = getattr(config, "quantization", None)
        self.draft_path: str = resolved.draft_model_path
        self.rail: DraftRail | None = None
        self.head: HeadT | None = self._load()
        self.vocabulary = DraftVocabulary(self.head.id_map)

    def memory(self) -> MemoryNeed:
        """Weights, and KV for every layer of the head in each of the target's blocks."""
        head = self._awake()
        heads, head_dim = head.kv_shape()
        element = torch.empty(0, dtype=getattr(torch, self._resolved.dtype)).element_size()
        block_size = self._resolved.engine.cache.block_size
        return MemoryNeed(
            weights_bytes=head.num_bytes,
            kv_bytes_per_block=2 * head.num_layers * block_size * heads * head_dim * element,
            kv_layers=((heads, head_dim),) * head.num_layers,
        )

    def bind(self, rail: DraftRail) -> None:
        """Keep the caches, and borrow the target's tables."""
        self.rail = rail
        self._awake().attach(rail.target)

    def sleep(self) -> None:
        """Drop the weights."""
        self.head = None

    def wake(self) -> None:
        """Load the weights again."""
        if self.head is None:
            self._take(self._load())

    def reload(self, draft_path: str | None = None, /) -> None:
        """Read the head's checkpoint again, or another one of the same shapes."""
        before, self.draft_path = self.draft_path, draft_path or self.draft_path
        try:
            self._take(self._load())
        except BaseException:
            self.draft_path = before
            raise

    def _load(self) -> HeadT:
        resolved = self._resolved
        device = torch.device(resolved.device)
        ids = None if self._token_map is None else read_token_map(self._token_map, resolved.vocab_size).to(device)
        setting = HeadSetting(
            dtype=getattr(torch, resolved.dtype),
            device=device,
            max_model_len=resolved.max_model_len,
            taps=self.traits.taps,
            target_width=resolved.hf_config.get_text_config().hidden_size,
            vocab_size=resolved.vocab_size,
            draft_ids=ids,
            quantization=self._quantization,
        )
        with Checkpoint(self.draft_path) as checkpoint:
            head = self._build(resolved.draft_hf_config, checkpoint, setting)
            checkpoint.finish()
        return head

    def _take(self, head: HeadT) -> None:
        self.head = head
        self.vocabulary = DraftVocabulary(head.id_map)
        if self.rail is not None:
            head.attach(self.rail.target)

    def _awake(self) -> HeadT:
        assert self.head is not None, "the draft head sleeps; call wake() first"
        return self.head

    def _bound(self) -> DraftRail:
        assert self.rail is not None, "the proposer was not bound"
        return self.rail
