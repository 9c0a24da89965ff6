"""CustomClassProposer: drafts of a user's class, which runs in a process of its own and is called as vLLM calls it.

Owns: what the class knows of each text. Must not know: what it does with it. Read next: host_worker.py, host_child.py.
A class that implements specdec's own Proposer protocol runs inside the engine instead, with tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.config.methods import MethodTraits
from specdec.errors import ConfigError
from specdec.proposers.base import AdmitInfo, BaseProposer, DraftBatch, Outcome, Proposer, StepView
from specdec.proposers.host_child import Ask, Offer
from specdec.proposers.host_worker import Deadlines, HostWorker
from specdec.proposers.ngram import host_batch

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig


@dataclass(slots=True)
class _Text:
    """A live request: its tokens, how many the process has, and how many the class was told as sampled (None: none yet)."""

    tokens: list[int]
    num_sent: int = 0
    num_told: int | None = None


class CustomClassProposer(BaseProposer):
    """Drafts from a class in another process. Faults of the class cost the drafts of their step."""

    def __init__(self, resolved: ResolvedConfig, worker: HostWorker) -> None:
        assert resolved.traits is not None, "a proposer is built for a resolved method"
        self.traits: MethodTraits = resolved.traits
        self.worker = worker
        self._texts: dict[int, _Text] = {}
        self._generation = worker.generation

    @property
    def faults(self) -> Mapping[str, int]:
        """How often each kind of fault happened: exception, bad_reply, late, hang, crash."""
        return self.worker.faults

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Remember the prompts (and, after preemption, the output so far)."""
        for row, info in zip(rows, infos, strict=True):
            self._texts[row] = _Text(list(info.prompt_token_ids))

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Forget the rows."""
        for row in rows:
            self._texts.pop(row, None)

    def propose(self, step: StepView) -> DraftBatch:
        """Note the step's tokens, then ask the class, if anybody may draft and it can be asked."""
        rows, counts = step.rows.tolist(), step.num_sampled.tolist()
        self._extend(step, rows, counts)
        wanted = [limit if count else 0 for limit, count in zip(step.max_nodes, counts, strict=True)]
        drafts: list[list[int]] = [[] for _ in rows]
        if any(wanted) and self.worker.is_ready():
            answer = self.worker.ask(self._ask(rows, counts))
            drafts = answer.drafts if answer is not None else drafts
        return host_batch([ids[:limit] for ids, limit in zip(drafts, wanted, strict=True)], source=self.traits.method)

    def _extend(self, step: StepView, rows: list[int], counts: list[int]) -> None:
        num_tokens = step.num_tokens[step.rows].tolist()
        for row, sampled, count, length in zip(rows, step.sampled_token_ids.tolist(), counts, num_tokens, strict=True):
            text = self._texts[row]
            new = sampled[:count]
            if len(text.tokens) + count != length:  # another source drew a token of the target's since
                new = step.token_ids[row, len(text.tokens) : length].tolist()
            text.tokens.extend(new)

    def _ask(self, rows: list[int], counts: list[int]) -> Ask:
        """Everything the process has not been sent, and every sampled id the class was not told."""
        if self.worker.generation != self._generation:
            self._generation = self.worker.generation
            for text in self._texts.values():
                text.num_sent = 0
        ask = Ask([], [], [], [], [])
        for row, count in zip(rows, counts, strict=True):
            text = self._texts[row]
            length = len(text.tokens)
            ask.rows.append(row)
            ask.num_tokens.append(length)
            ask.starts.append(text.num_sent)
            ask.tokens.append(np.array(text.tokens[text.num_sent :], dtype=np.int32).tobytes())
            told = length - count if text.num_told is None else text.num_told
            ask.sampled.append(text.tokens[told:] if count else [])
            text.num_sent = length
            if count:
                text.num_told = length
        return ask


def build_custom(resolved: ResolvedConfig, *, deadlines: Deadlines | None = None) -> Proposer:
    """Load the user's class and return the proposer over it.

    Raises:
        ConfigError: it cannot be imported or constructed, or it needs what custom_class does not reserve.
    """
    config: Any = resolved.engine.speculative
    assert resolved.traits is not None, "a proposer is built for a resolved method"
    offer = Offer(
        path=config.model,
        num_speculative_tokens=resolved.traits.max_nodes,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.engine.scheduler.max_num_seqs,
        vocab_size=resolved.vocab_size,
    )
    worker = HostWorker(offer, deadlines or Deadlines())
    if worker.start() == "host":
        return CustomClassProposer(resolved, worker)
    worker.close()
    return _build_device(resolved, config.model)


def _build_device(resolved: ResolvedConfig, path: str) -> Proposer:
    """Construct a class of specdec's own protocol in this process, as the registry does."""
    module_name, _, class_name = path.rpartition(".")
    try:
        proposer: Any = getattr(import_module(module_name), class_name)(resolved)
    except ConfigError:  # what the class says about its configuration is passed on as it is
        raise
    except Exception as error:
        text = f"Failed to instantiate custom proposer class '{path}': {error}"
        raise ConfigError(text, hint="a class with specdec's protocol is constructed with a ResolvedConfig") from error
    traits = getattr(proposer, "traits", None)
    if not isinstance(traits, MethodTraits):
        raise ConfigError(f"custom proposer class '{path}' has no traits", hint="set self.traits, for example to resolved.traits")
    assert resolved.traits is not None, "checked by the caller"
    over = {
        name: getattr(traits, name)
        for name in ("max_nodes", "max_depth", "draft_slots", "lookahead", "prefill_lookahead")
        if getattr(traits, name) > getattr(resolved.traits, name)
    }
    if over:
        needs = ", ".join(f"{name} {value}" for name, value in over.items())
        allowed = ", ".join(f"{name} {getattr(resolved.traits, name)}" for name in over)
        raise ConfigError(
            f"custom proposer class '{path}' has traits with {needs}, but method `custom_class` reserves {allowed}",
            hint="raise num_speculative_tokens, or draft without KV slots of your own",
        )
    return proposer  # type: ignore[no-any-return]
