"""Does generated text follow the target's law? Teacher forcing with the same weights, then the probability integral transform.

With ids ordered by falling probability, U = mass before the drawn id + v * its own mass is uniform and independent of the past if
the text was drawn from the law, whatever the prompts. Surprisal against its own mean sees what bins miss. Fresh v, fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from specdec.engine.types import EngineRequest
from specdec.kernels.reference import target_law
from specdec.sampling_params import SamplingParams
from specdec.worker.logits import needs_processing, process_block

NUM_BINS = 20
CHI_SQUARE_BAR = 72.0  # 19 degrees of freedom: P(> 72) is about 5e-8
Z_BAR = 5.2  # two-sided 2e-7


@dataclass(frozen=True)
class Verdict:
    """num_tokens scored; num_impossible tokens whose law gives them no mass; chi-square of the bins; z of the surprisal."""

    num_tokens: int
    num_impossible: int
    chi_square: float
    surprisal_z: float

    @property
    def is_lawful(self) -> bool:
        return not self.num_impossible and self.chi_square < CHI_SQUARE_BAR and abs(self.surprisal_z) < Z_BAR


def laws_of(path: Path, request: EngineRequest, output: Sequence[int]) -> torch.Tensor:
    """[len(output), V] float64: what plain sampling draws each output token from, with all of the request's parameters."""
    model = _model(path)
    prompt = list(request.prompt_token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    logits = logits.clone()  # an ordinary tensor, which may be changed
    sampling: SamplingParams = request.sampling
    if needs_processing(sampling):
        paths = [list(output[:i]) for i in range(len(output))]
        process_block(logits, sampling, prompt=prompt, output=[], paths=paths, stop_ids=list(sampling.stop_token_ids))
    count = len(output)
    return target_law(
        logits,
        temperature=torch.full((count,), sampling.temperature),
        top_k=torch.full((count,), sampling.top_k),
        top_p=torch.full((count,), sampling.top_p),
        min_p=torch.full((count,), sampling.min_p),
    )


def judge(path: Path, requests: Sequence[EngineRequest], token_ids: dict[str, list[int]]) -> Verdict:
    """Score every token of the requests' outputs."""
    generator = torch.Generator().manual_seed(1)
    places, surprisals, means, variances, impossible = [], [], 0.0, 0.0, 0
    for request in requests:
        output = token_ids[request.request_id]
        laws = laws_of(path, request, output)
        own = laws.gather(1, torch.tensor(output)[:, None])
        impossible += int((own < 1e-12).sum())
        before = torch.where(laws > own, laws, 0.0).sum(-1)
        ties = (laws == own) & (torch.arange(laws.shape[1]) < torch.tensor(output)[:, None])
        before += torch.where(ties, laws, 0.0).sum(-1)
        places.append(before + torch.rand(len(output), generator=generator, dtype=torch.float64) * own[:, 0])
        surprisals.append(-own[:, 0].clamp_min(1e-12).log())
        entropy = torch.special.entr(laws).sum(-1)
        means += float(entropy.sum())
        variances += float((laws * laws.clamp_min(1e-300).log() ** 2).sum() - (entropy**2).sum())
    u = torch.cat(places).clamp(0, 1 - 1e-12)
    counts = torch.bincount((u * NUM_BINS).long(), minlength=NUM_BINS).double()
    expected = len(u) / NUM_BINS
    z = (float(torch.cat(surprisals).sum()) - means) / math.sqrt(max(variances, 1e-12))
    return Verdict(len(u), impossible, float(((counts - expected) ** 2 / expected).sum()), z)


_models: dict[Path, LlamaForCausalLM] = {}


def _model(path: Path) -> LlamaForCausalLM:
    if path not in _models:
        _models[path] = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return _models[path]
