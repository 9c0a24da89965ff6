"""What does verification cost in a CPU step: 8 requests of 6 rows over SmolLM2's vocabulary, by kind of request?

Times Sampler.verify alone on random logits and one-hot drafts (no model is read). Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter

import torch

from specdec.sampling_params import SamplingParams
from specdec.scheduler.output import NewRequestData, SchedulerOutput
from specdec.worker.batch_builder import build_batch
from specdec.worker.request_state import RequestState
from specdec.worker.sampler import Sampler

VOCAB, BLOCK, PROMPT, DRAFTS = 49152, 16, 200, 5
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "T 0.8": SamplingParams(temperature=0.8, seed=1),
    "T 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "T 0.8, top_k 50, min_p 0.05": SamplingParams(temperature=0.8, top_k=50, min_p=0.05, seed=1),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
    "greedy, logprobs 5": SamplingParams(temperature=0, logprobs=5),
}


def time_kind(sampling: SamplingParams, *, requests: int, repeats: int) -> float:
    """Median milliseconds of one verification."""
    blocks = (PROMPT + DRAFTS + 1) // BLOCK + 1
    state = RequestState(max_num_seqs=requests, max_model_len=1024, block_size=BLOCK, max_nodes=DRAFTS, seed=0, device=torch.device("cpu"))
    names = [f"r{i}" for i in range(requests)]
    tokens = tuple(torch.randint(0, VOCAB, (PROMPT,)).tolist())
    for index, name in enumerate(names):
        held = tuple(range(index * blocks, (index + 1) * blocks))
        state.add(NewRequestData(name, tokens, PROMPT - 20, sampling, held, PROMPT - 1))
    state.draft_token_ids[:] = torch.randint(0, VOCAB, state.draft_token_ids.shape)
    plan = SchedulerOutput(
        num_scheduled_tokens=dict.fromkeys(names, 1 + DRAFTS), num_draft_nodes=dict.fromkeys(names, DRAFTS), epoch=dict.fromkeys(names, 0)
    )
    infos, batch = build_batch(plan, state, block_size=BLOCK)
    sampler = Sampler(state, eos_token_ids=(2,))
    logits = torch.randn(requests * (1 + DRAFTS), VOCAB) * 3
    times = []
    for _ in range(repeats + 3):
        fresh = logits.clone()  # verification consumes its logits
        start = perf_counter()
        sampler.verify(fresh, batch, infos)
        times.append((perf_counter() - start) * 1e3)
    return median(times[3:])


def main() -> None:
    """Time every kind and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        results = {name: time_kind(kind, requests=arguments.requests, repeats=arguments.repeats) for name, kind in KINDS.items()}
    print(f"{arguments.requests} requests x {1 + DRAFTS} rows x {VOCAB} ids, {torch.get_num_threads()} threads")
    for name, milliseconds in results.items():
        print(f"{name:<32} {milliseconds:6.2f} ms")
    print(json.dumps({"requests": arguments.requests, "rows": 1 + DRAFTS, "vocab": VOCAB, "ms": results, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
