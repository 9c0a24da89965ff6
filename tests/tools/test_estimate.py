"""The numbers of Equation 1 and Theorem 3.8, as published tables round them, and how the command prints them."""

from __future__ import annotations

import json

import pytest

from specdec import cli
from specdec.errors import ConfigError
from specdec.tools.estimate import ALPHAS, COSTS, LONGEST, best_k, estimate, read_numbers, speedup, tokens_per_pass

TABLE = {  # at k = 4: tokens per pass, then the speedup at each of COSTS
    0.5: (1.94, 1.79, 1.61, 1.38, 0.84),
    0.6: (2.31, 2.13, 1.92, 1.65, 0.99),
    0.7: (2.77, 2.57, 2.31, 1.98, 1.20),
    0.8: (3.36, 3.11, 2.80, 2.40, 1.45),
    0.9: (4.10, 3.79, 3.41, 2.93, 1.77),
}


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_table_at_four_drafts(alpha: float) -> None:
    tokens, *speedups = TABLE[alpha]
    assert tokens_per_pass(alpha, 4) == pytest.approx(tokens, abs=0.005)
    assert [round(speedup(alpha, 4, cost), 2) for cost in COSTS] == speedups


def test_the_best_number_of_drafts() -> None:
    assert (best_k(0.8, 0.05), round(speedup(0.8, 8, 0.05), 2)) == (8, 3.09)
    assert (best_k(0.8, 0.33), round(speedup(0.8, 3, 0.33), 2)) == (3, 1.48)
    assert best_k(0.3, 0.4) == 0, "no draft pays when it costs more than its acceptance"
    assert best_k(0.99, 0.0) == LONGEST, "free drafts are never too many"


def test_low_acceptance_and_longer_drafts() -> None:
    assert round(tokens_per_pass(0.3, 4), 2) == 1.43
    assert round(speedup(0.3, 4, 0.1), 2) == 1.02
    assert round(tokens_per_pass(0.7, 8) - tokens_per_pass(0.7, 4), 2) == 0.43


def test_the_ends_of_the_range() -> None:
    assert tokens_per_pass(1.0, 4) == 5.0
    assert tokens_per_pass(0.0, 4) == 1.0
    assert tokens_per_pass(0.999999, 4) == pytest.approx(5.0, abs=1e-4)
    assert estimate(0.8, 0, 0.5).speedup == 1.0


def test_the_command_prints_point_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["estimate", "--alpha", "0.8", "--k", "4", "--cost", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3.36" in next(line for line in lines if "tokens per target pass" in line)
    assert "2.40x" in next(line for line in lines if line.strip().startswith("speedup  "))
    row = next(line for line in lines if line.startswith("│") and " 0.9 " in line)
    assert all(f"{value:.2f}x (" in row for value in TABLE[0.9][1:])


def test_the_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    table = ["--alphas", "0.1:0.3:0.1", "--costs", "0.2"]
    assert cli._run(["estimate", "--alpha", "0.8", "--k", "8", "--cost", "0.05", *table, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["best_k"], round(answer["best_speedup"], 2), round(answer["speedup"], 2)) == (8, 3.09, 3.09)
    assert [(cell["alpha"], cell["k"], cell["cost"]) for cell in answer["table"]] == [(0.1, 8, 0.2), (0.2, 8, 0.2), (0.3, 8, 0.2)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--alpha", "1.2"], "alpha is 1.2, but it must be in [0, 1]"),
        (["--k", "65"], "k is 65, but it must be in 0..64 drafts"),
        (["--cost", "-0.1"], "cost is -0.1, but it must be 0 or more"),
        (["--cost", "nan"], "cost is nan"),
        (["--alphas", "a,b"], "--alphas is 'a,b', which is no list of numbers and no range"),
        (["--costs", "0.1:0.5:0"], "--costs is '0.1:0.5:0'"),
        (["--costs", "0.1:0.5:-0.1"], "a range needs a positive step"),
        (["--alphas", "0.5,1.5"], "alpha is 1.5"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["estimate", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_ranges_include_both_ends() -> None:
    assert read_numbers("0.5:0.9:0.1", "--alphas") == ALPHAS
    assert read_numbers("0.02,0.05,0.10,0.33", "--costs") == COSTS
    with pytest.raises(ConfigError, match="1 to 100 numbers"):
        read_numbers("0:1:0.001", "--alphas")
