"""MtpModulesProposer: several multi-token-prediction modules, one behind the other, each for the draft of its own place.

Owns: which rows each module runs over, and the target's states of the last rows. Must not know: what a module computes (models/mtp.py).

Module k (from 0) joins, in the row of position j, the token of position j + k + 1 with what module k - 1 made of that row (the target's
state for k = 0); all modules run over the same positions. With the newest row at position n - 2 and the anchor at n - 1, module k needs
the first k drafts, which may be refused: its last k rows are true only once their tokens are text. So each step runs all modules again
over the last M - 1 rows of the step before (M modules), for which the target's states are kept. A step that drafts nothing runs each
module as far as its tokens are known. Blocks are hashed with at least M tokens past their end (`prefill_lookahead`), so what a prefix
hit brings is true in all modules. Drafts past the M-th come from the last module, fed with its own output as in eagle.py.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec.models.loader import Checkpoint
from specdec.models.mtp import MtpModules
from specdec.models.mtp_names import count_modules
from specdec.proposers.base import DraftBatch, StepView
from specdec.proposers.chain import wanted_drafts
from specdec.proposers.draft_sampling import ChainDraws
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.head_proposer import HeadProposer
from specdec.proposers.kept_rows import kept_rows
from specdec.proposers.paged import PagedRows, Span, StepLengths, paged_rows, step_lengths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.config.engine import ResolvedConfig
    from specdec.proposers.base import AdmitInfo, Outcome


def build_mtp(resolved: ResolvedConfig) -> EagleProposer | MtpModulesProposer:
    """One module drafts again and again; several draft one place each, where more than one draft is asked for."""
    assert resolved.traits is not None, "a proposer is built for a resolved method"
    assert resolved.draft_model_path is not None, "resolve() found the checkpoint"
    with Checkpoint(resolved.draft_model_path) as checkpoint:
        count = count_modules(checkpoint, resolved.draft_hf_config.num_hidden_layers)
    if count > 1 and resolved.traits.prefill_lookahead >= count:
        return MtpModulesProposer(resolved)
    return EagleProposer(resolved)


class _Tail(NamedTuple):
    """The target's states [c, H] of the last rows before position `stop`."""

    stop: int
    states: torch.Tensor


class MtpModulesProposer(HeadProposer[MtpModules]):
    """Drafts with all modules of a checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be loaded or does not fit the target.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved, build=MtpModules)
        self._tails: dict[int, _Tail] = {}  # by persistent row

    def admit(self, rows: Sequence[int], infos: Sequence[AdmitInfo]) -> None:
        """Rows begin anew."""
        self._forget(rows)

    def release(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Forget the rows."""
        self._forget(rows)

    def propose(self, step: StepView) -> DraftBatch:
        """Run every module over the rows that became text and those that it could only guess before; draft along the way."""
        lengths = step_lengths(step)
        wanted = wanted_drafts(
            step, [x.num_sampled for x in lengths], num_tokens=[x.num_computed + 1 for x in lengths], max_len=self.max_len
        )
        anchors = {request: lengths[request].num_computed for request in wanted}
        draws = ChainDraws(self.vocabulary.sampling(step.sampling), anchors, method=self._draft_sample_method)
        features = self._run_modules(step, lengths, draws, wanted)
        self._continue(step, draws, wanted, features)
        return draws.batch(len(lengths), source=self.traits.method, id_map=self.vocabulary.id_map)

    def _run_modules(self, step: StepView, lengths: Sequence[StepLengths], draws: ChainDraws, wanted: Mapping[int, int]) -> torch.Tensor:
        """Return the last module's output [drafts past the modules, H] in the newest rows of requests that want more than M drafts."""
        head, rail = self._awake(), self._bound()
        spans, states = self._known_states(step, lengths)
        num_tokens = step.num_tokens[step.rows].tolist()
        for index, module in enumerate(head.modules):
            kept = [self._cut(span, index, num_tokens[span.request], wanted) for span in spans]
            states = torch.cat(
                [x[: max(cut.stop - cut.start, 0)] for cut, x in zip(kept, _split(states, [x.stop - x.start for x in spans]), strict=True)]
            )
            spans = [cut for cut in kept if cut.start < cut.stop]
            if not spans:
                break
            rows = paged_rows(rail, step, spans)
            ids = self._input_ids(step, rows, index, num_tokens=num_tokens, draws=draws)
            made = module.forward(ids, states, rows.positions, rail.kv[index : index + 1], rows.meta)
            last = dict(zip((span.request for span in spans), rows.last.tolist(), strict=True))
            left = [request for request in draws.anchors if wanted[request] > index]
            if left:
                draws.draw(left, module.compute_logits(made.scored[[last[request] for request in left]]))
            states = made.fed_back
        further = [request for request in draws.anchors if wanted[request] > len(head.modules)]
        return states[[last[request] for request in further]] if further else states[:0]

    def _known_states(self, step: StepView, lengths: Sequence[StepLengths]) -> tuple[list[Span], torch.Tensor]:
        """The rows to run, and the target's states [N, H] there: those that were kept, then those of this step. Keeps the last ones."""
        module = self._awake().modules[0]
        at = kept_rows(step)
        counts = [x.num_computed - x.context for x in lengths]
        new = _split(module.combine({tap: step.taps[tap][at] for tap in self.traits.taps}), counts)
        spans, states = [], []
        for request, (row, length) in enumerate(zip(step.rows.tolist(), lengths, strict=True)):
            tail = self._tails.get(row)
            before = new[request][:0] if tail is None or tail.stop != length.context else tail.states
            joined = torch.cat([before, new[request]])
            self._tails[row] = _Tail(length.num_computed, joined[max(len(joined) - len(self._awake().modules) + 1, 0) :].clone())
            if length.context < length.num_computed:
                spans.append(Span(request, length.context - len(before), length.num_computed))
                states.append(joined)
        return spans, torch.cat(states) if states else step.taps[self.traits.taps[0]][:0]

    def _cut(self, span: Span, index: int, num_tokens: int, wanted: Mapping[int, int]) -> Span:
        """The rows of module `index`: all where drafts stand for the tokens that are not text yet, else those whose tokens are."""
        return span if wanted.get(span.request, 0) > index else span._replace(stop=min(span.stop, num_tokens - 1 - index))

    def _input_ids(self, step: StepView, rows: PagedRows, index: int, *, num_tokens: Sequence[int], draws: ChainDraws) -> torch.Tensor:
        """The token [N] index + 1 places behind each row's position: text, or the drafts made so far."""
        places = rows.positions + index + 1
        known = torch.tensor(num_tokens, device=places.device)[rows.owner]
        is_text = places < known
        ids = step.token_ids[step.rows[rows.owner], torch.where(is_text, places, 0)].long()
        missing = zip(rows.owner[~is_text].tolist(), (places - known)[~is_text].tolist(), strict=True)
        drafts = self.vocabulary.to_target([max(draws.tokens[request][place], 0) for request, place in missing])
        ids[~is_text] = torch.tensor(drafts, dtype=torch.int64, device=ids.device)
        return ids

    def _continue(self, step: StepView, draws: ChainDraws, wanted: Mapping[int, int], features: torch.Tensor) -> None:
        """Feed each newest draft to the last module with its own output, one position further each time."""
        head, rail = self._awake(), self._bound()
        count = len(head.modules)
        active = [request for request in draws.anchors if wanted[request] > count]
        for depth in range(count, max(wanted.values(), default=0)):
            left = [request for request in active if wanted[request] > depth]
            features = features[[index for index, request in enumerate(active) if wanted[request] > depth]]
            places = [draws.anchors[request] + depth - count for request in left]
            rows = paged_rows(rail, step, [Span(request, place, place + 1) for request, place in zip(left, places, strict=True)])
            ids = torch.tensor(self.vocabulary.to_target(draws.newest(left)), device=rail.device)
            made = head.modules[-1].forward(ids, features, rows.positions, rail.kv[count - 1 : count], rows.meta)
            draws.draw(left, head.modules[-1].compute_logits(made.scored))
            active, features = left, made.fed_back

    def _forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._tails.pop(row, None)


def _split(states: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """[N, H] -> one part for each count."""
    ends = list(accumulate(counts))
    return [states[end - count : end] for end, count in zip(ends, counts, strict=True)]
