"""Does speculative sampling keep the law, and does Equation 1 count its tokens? No model: a Markov source over four tokens.

Run it: python examples/markov_lossless.py [number of sequences, 400000 by default]
"""

import random
import sys

import torch

from specdec.kernels.rules import STANDARD, Problem
from specdec.tools.estimate import tokens_per_pass

LENGTH, VOCAB, START = 6, 4, 0


def table(seed: int) -> torch.Tensor:
    rng = random.Random(seed)
    weights = torch.tensor([rng.random() + 0.05 for _ in range(VOCAB**2)], dtype=torch.float64).view(VOCAB, VOCAB)
    return weights / weights.sum(1, keepdim=True)  # row: the token before; column: the next one


TARGET = table(7)
DRAFT = 0.3 * TARGET + 0.7 * table(11)
PROBLEMS = [[Problem(TARGET[[before, d]], DRAFT[[before]], [d]) for d in range(VOCAB)] for before in range(VOCAB)]
ACCEPT = torch.tensor([[STANDARD.coins(problem)[0] for problem in row] for row in PROBLEMS], dtype=torch.float64)
RESIDUAL = torch.stack([STANDARD.recovered(row[0], 0) for row in PROBLEMS])


def generate(count: int, k: int, seed: int) -> tuple[torch.Tensor, float, float]:
    """Return the law of the sequences, the mean acceptance, and tokens per pass; k = 0 samples the target plainly."""
    torch.manual_seed(seed)
    tokens, made = torch.full((count, LENGTH + k + 1), START), torch.zeros(count, dtype=torch.int64)
    accepts, checked, passes = 0.0, 0, 0
    while len(active := (made < LENGTH).nonzero().squeeze(1)):
        passes += len(active)
        for depth in range(k + 1):  # active: the sequences whose drafts were all kept so far
            before = tokens[active, made[active] - 1]  # column -1 is never written and holds START
            kept, drafts = torch.zeros(len(active), dtype=torch.bool), before
            if depth < k:
                drafts = DRAFT[before].multinomial(1).squeeze(1)
                kept = torch.rand(len(active)) < ACCEPT[before, drafts]
                accepts, checked = accepts + float(ACCEPT[before, drafts].sum()), checked + len(active)
            last = RESIDUAL if depth < k else TARGET  # a refused draft is replaced; after k kept ones comes a bonus
            tokens[active, made[active]] = torch.where(kept, drafts, last[before].multinomial(1).squeeze(1))
            made[active] += 1
            active = active[kept]
    symbols = (tokens[:, :LENGTH] * VOCAB ** torch.arange(LENGTH)).sum(1)
    return torch.bincount(symbols, minlength=VOCAB**LENGTH) / count, accepts / max(checked, 1), float(made.sum()) / passes


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400_000
    plain, again = (generate(count, 0, seed)[0] for seed in (1, 2))
    print(f"total variation of two plain runs, the floor: {0.5 * (plain - again).abs().sum():.4f}")
    for k in (1, 2, 4, 8):
        law, alpha, per_pass = generate(count, k, seed=3 + k)
        counted = f"tokens per pass {per_pass:.4f}, Equation 1 {tokens_per_pass(alpha, k):.4f}"
        print(f"k={k}: total variation {0.5 * (plain - law).abs().sum():.4f}, acceptance {alpha:.3f}, {counted}")
