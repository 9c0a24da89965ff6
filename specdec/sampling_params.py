"""SamplingParams: how one request wants its tokens drawn. Frozen and validated on construction.

Owns: ranges and their error texts. Must not know: HTTP bodies (server/protocol.py) or tensors (worker/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.errors import RequestRejected

MAX_TEMPERATURE = 100  # a law is flat long before; the bound keeps every value a float32
GREEDY_TEMPERATURE = 1e-5  # below this a request is greedy by branch, never by division


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Per-request control of drafting, within what the server allows. None keeps the server's choice."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputParams:
    """Exactly one of: a JSON schema (text), any JSON object, a regex, a list of choices, an EBNF grammar.

    compiled: the structured.compiler.Grammar of it, which the engine adds before a request is queued.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    compiled: object | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Units: lengths in tokens, `seed` any 64-bit integer.

    Raises:
        RequestRejected: a value is outside its range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0  # in [0, 100]; 0 selects argmax
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # in [0, 1]
    seed: int | None = None
    repetition_penalty: float = 1.0  # in [0.01, 100]; over prompt and output
    presence_penalty: float = 0.0  # in [-2, 2]; over output
    frequency_penalty: float = 0.0  # in [-2, 2]; over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # in [-100, 100]
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None  # None: up to max_model_len
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # number of top alternatives beside the sampled token; 0 is the sampled token alone
    prompt_logprobs: int | None = None
    structured: StructuredOutputParams | None = None
    speculation: SpeculationParams = SpeculationParams()

    @property
    def is_greedy(self) -> bool:
        """True when the argmax is taken and no random number is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    def __post_init__(self) -> None:
        _require("n", self.n, 1 <= self.n <= 128, "must be in 1..128")
        _require("temperature", self.temperature, 0 <= self.temperature <= MAX_TEMPERATURE, f"must be in [0, {MAX_TEMPERATURE}]")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]")
        _require("top_k", self.top_k, -1 <= self.top_k < 2**31, "must be -1 or 0 (off) or a positive 32-bit integer")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "must be in [0, 1]")
        _require("repetition_penalty", self.repetition_penalty, 0.01 <= self.repetition_penalty <= 100, "must be in [0.01, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, -2 <= value <= 2, "must be in [-2, 2]")
        _require("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "must be at least 0")
        if self.max_tokens is not None:
            _require("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, f"must not exceed max_tokens {self.max_tokens}")
        _require("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 20, "must be in 0..20")
        _require(
            "prompt_logprobs", self.prompt_logprobs, self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "must be in 0..20"
        )
        _require("stop", self.stop, all(self.stop), "must not contain an empty string")
        for token_id, bias in self.logit_bias.items():
            _require(f"logit_bias[{token_id}]", bias, -100 <= bias <= 100, "must be in [-100, 100]")
        if self.seed is not None:
            _require("seed", self.seed, -(2**63) <= self.seed < 2**64, "must fit in 64 bits")


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise RequestRejected(f"{name} is {value!r}, which {rule}".replace("which must", "but it must"), param=name.split("[")[0])
