"""Calls of every kernel with the shapes of a served model: values for gpu.py to check, bytes for it to compare with the memory's speed.

Owns: arguments. Must not know: clocks or tables. Letters: R requests, K drafts, V vocabulary, Hq/Hkv heads, Dh head dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

INT64, INT32 = torch.int64, torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one model and load."""

    requests: int
    drafts: int
    context: int
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16

    @property
    def rows(self) -> int:
        """Query rows of a verify step."""
        return self.requests * (self.drafts + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel call. num_bytes: least traffic. written: places of the arguments that it changes, its result where it returns none."""

    name: str
    label: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    num_bytes: int
    written: tuple[int, ...] = ()


def calls(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    """Every kernel whose time counts in a step, one call each."""
    torch.manual_seed(0)
    for make in (_sampling, _verification, _layers, _attention):
        yield from make(sizes, device, dtype)


def _sampling(s: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:  # noqa: ARG001 (logits are float32)
    logits = torch.randn(s.rows, s.vocab, device=device) * 3
    cuts = {
        "temperature": torch.full((s.rows,), 0.8, device=device),
        "top_k": torch.zeros(s.rows, dtype=INT64, device=device),
        "top_p": torch.full((s.rows,), 0.95, device=device),
        "min_p": torch.zeros(s.rows, device=device),
    }
    u = torch.rand(s.rows, device=device)
    size = _bytes(logits)
    yield Call(name="sample_logits", label="greedy", arguments=(logits, u), options=cuts | {"temperature": u * 0}, num_bytes=size)
    yield Call(name="sample_logits", label="T 0.8, top_p 0.95", arguments=(logits, u), options=cuts, num_bytes=size)
    yield Call(name="target_law", label="T 0.8, top_p 0.95", arguments=(logits,), options=cuts, num_bytes=2 * size)


def _verification(s: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:  # noqa: ARG001
    probs = torch.softmax(torch.randn(s.rows, s.vocab, device=device) * 3, dim=-1)
    drafts = probs.view(s.requests, s.drafts + 1, -1)[:, : s.drafts].argmax(dim=-1)
    keys = {name: torch.arange(s.requests, dtype=INT64, device=device) for name in ("seed", "position")}
    bounds = {"cu_num_logits": torch.arange(0, s.rows + 1, s.drafts + 1, dtype=INT32, device=device)}
    draft_logits = torch.randn(s.requests, s.drafts, s.vocab, device=device)
    drawn = {"draft_logits": draft_logits}
    targets = probs.argmax(dim=-1)
    yield Call(name="verify_coupled", label="exact match", arguments=(targets, drafts), options=bounds, num_bytes=_bytes(targets, drafts))
    for rule in ("rejection_sample", "block_verify"):
        yield Call(
            name=rule, label="drawn drafts", arguments=(probs, drafts), options=bounds | keys | drawn, num_bytes=_bytes(probs, draft_logits)
        )


def _layers(s: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    x, residual = (torch.randn(s.rows, s.hidden, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(s.hidden, device=device, dtype=dtype)
    wide = torch.randn(s.rows, 6 * s.hidden, device=device, dtype=dtype)
    query = torch.randn(s.rows, s.heads, s.head_dim, device=device, dtype=dtype)
    angles = torch.rand(s.rows, s.head_dim // 2, device=device)
    yield Call(name="rms_norm", label="", arguments=(x, weight, 1e-5), options={}, num_bytes=2 * _bytes(x))
    yield Call(name="add_rms_norm", label="with the residual", arguments=(x, residual, weight, 1e-5), options={}, num_bytes=4 * _bytes(x))
    yield Call(name="silu_mul", label="", arguments=(wide,), options={}, num_bytes=_bytes(wide) * 3 // 2)
    yield Call(name="rotate", label="", arguments=(query, angles.cos(), angles.sin()), options={}, num_bytes=2 * _bytes(query))


def _attention(s: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    query = torch.randn(s.rows, s.heads, s.head_dim, device=device, dtype=dtype)
    length = s.context + s.drafts + 1
    per_request = -(-length // s.block_size)
    table = torch.randperm(s.requests * per_request, device=device).view(s.requests, per_request).to(INT32)
    shape = (s.requests * per_request, s.block_size, s.kv_heads, s.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    given = {
        "query_lens": (s.drafts + 1,) * s.requests,
        "seq_lens": (length,) * s.requests,
        "block_table": table,
        "scale": s.head_dim**-0.5,
    }
    read = 2 * s.requests * length * s.kv_heads * s.head_dim * query.element_size()
    yield Call(name="paged_attention", label="verify", arguments=(query, keys, values), options=given, num_bytes=read + 2 * _bytes(query))
    fresh = query[:, : s.kv_heads].contiguous()
    slots = torch.arange(s.rows, dtype=INT64, device=device)
    caches = (keys.clone(), values.clone())
    yield Call(name="store_kv", label="", arguments=(fresh, fresh, *caches, slots), options={}, num_bytes=4 * _bytes(fresh), written=(2, 3))


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


Kernel = Callable[..., Any]


def results(call: Call, function: Kernel) -> list[torch.Tensor]:
    """Run a call on copies of what it writes, and return its tensors."""
    arguments = [x.clone() if i in call.written else x for i, x in enumerate(call.arguments)]
    made = function(*arguments, **call.options)
    if call.written:
        return [arguments[i] for i in call.written]
    if isinstance(made, torch.Tensor):
        return [made]
    return [part for part in made if isinstance(part, torch.Tensor)]
