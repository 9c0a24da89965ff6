"""Steps replayed from captures: the same tokens as computed ones, whatever the padding holds; and what is captured, and counted.

No GPU is needed: tests/worker/tape.py captures on the CPU under a GPU's rules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config.engine import ExecutionConfig, ResolvedConfig
from specdec.config.method_configs import NgramConfig
from specdec.config.methods import traits_for
from specdec.kernels.graphs import Bucket, CapturedGraphs, CapturePlan, Field, NoGraphs, Tensors
from specdec.models.attention import allocate_kv
from specdec.models.registry import load_model
from specdec.proposers.base import MemoryNeed
from specdec.worker import cuda_graphs
from specdec.worker.batch_builder import attention_metadata
from specdec.worker.cuda_graphs import graph_bytes, make_graphs, step_buckets
from specdec.worker.input_batch import InputBatch
from specdec.worker.target_pass import TargetPass
from specdec.worker.worker import memory_plan
from tests.proposers.tiny import BLOCK_SIZE, mixed_requests, plain, request, resolved_for, run, start, write_checkpoint
from tests.worker.tape import HostRead, Tape, capture_on_cpu

LOOKUP = NgramConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


def with_lookup(target: Path, **settings: object) -> ResolvedConfig:
    return resolved_for(target, traits=traits_for(LOOKUP), speculative=LOOKUP, **settings)


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_replayed_steps_emit_the_same_tokens(target: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    requests = mixed_requests(7)
    expected = plain(target, requests)
    replays = capture_on_cpu(monkeypatch)
    ours = run(resolved_for(target) if method == "off" else with_lookup(target), requests)
    assert ours.token_ids == expected
    assert len(replays) > 0.7 * ours.num_engine_steps, "all but the prompts' steps fit a bucket"
    if method == "ngram":
        assert ours.num_accepted() > 0


def test_tokens_after_sleep_come_from_new_captures(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(4)
    expected = plain(target, requests)
    replays = capture_on_cpu(monkeypatch)
    engine = start(with_lookup(target))
    weights = engine.runner.weights
    assert weights is not None
    weights.sleep(2)
    weights.wake()
    engine.add(requests)
    engine.finish()
    assert engine.token_ids == expected
    assert replays


class Poisoned(TargetPass):
    """The target's pass whose padding holds other ids, positions, lengths and blocks; it still writes nowhere and owns no rows."""

    def fields(self, bucket: Bucket) -> Mapping[str, Field]:
        garbage = {"input_ids": 13, "positions": 41, "seq_lens": 9, "block_table": 1}
        fields = super().fields(bucket)
        return {name: Field(x.shape, x.dtype, garbage.get(name, x.pad)) for name, x in fields.items()}


def batch_of(lengths: Sequence[tuple[int, int]], num_blocks: int, *, seed: int) -> InputBatch:
    """Requests of (context, query rows), each in blocks of its own; ids at random."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = tuple(query for _, query in lengths)
    positions = torch.cat([torch.arange(context, context + query) for context, query in lengths])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(query_lens))
    table = 1 + torch.arange(len(lengths) * num_blocks, dtype=torch.int32).view(len(lengths), num_blocks)
    bounds = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = tuple(context + query for context, query in lengths)
    return InputBatch(
        request_ids=tuple(f"r{i}" for i in range(len(lengths))),
        rows=torch.arange(len(lengths)),
        input_ids=torch.randint(0, 90, (len(positions),), generator=generator),
        positions=positions,
        parents=None,
        slot_mapping=table[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        cu_query_lens=bounds,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        logits_indices=torch.arange(len(positions)),
        cu_num_logits=bounds,
        num_drafts=torch.tensor(query_lens) - 1,
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        num_drafts_cpu=tuple(query - 1 for query in query_lens),
        num_logits_cpu=query_lens,
    )


@torch.inference_mode()
def test_padding_changes_no_row_and_no_slot(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged requests in a wide bucket, several steps one after another: states, taps and caches are those of an eager pass."""
    replays = capture_on_cpu(monkeypatch)
    model = load_model(str(target), resolved_for(target).hf_config, dtype=torch.float32, device=CPU, max_model_len=64)
    num_blocks = 64 // BLOCK_SIZE
    plan = CapturePlan(
        graphs=CapturedGraphs(lambda: Tape(replays), CPU), buckets=(Bucket(6, 5),), num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    caches = [
        allocate_kv(model.num_layers, (1 + 3 * num_blocks, BLOCK_SIZE, *model.kv_shape()), dtype=torch.float32, device=CPU) for _ in "ab"
    ]
    replayed, eager = Poisoned(model, caches[0], taps=(1,), plan=plan), TargetPass(model, caches[1], taps=(1,))
    plan.graphs.capture()
    contexts = [0, 0, 0]
    for step, query_lens in enumerate([(5, 2, 1), (1, 4), (5, 5, 5), (3,), (2, 1, 4)]):
        batch = batch_of(list(zip(contexts, query_lens, strict=False)), num_blocks, seed=step)
        results = [one.run(batch, attention_metadata(batch, [])) for one in (replayed, eager)]
        assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
        assert torch.allclose(results[0][1][1], results[1][1][1], atol=1e-5)
        contexts = [context + query for context, query in zip(contexts, (*query_lens, 0, 0), strict=False)]
    assert len(replays) == 5
    for ours, expected in zip(*caches, strict=True):
        assert all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in zip(ours, expected, strict=True))


class Doubling:
    """A program of one operation, and of one number that the host knows."""

    name, buckets = "doubling", (Bucket(1, 2), Bucket(2, 2), Bucket(8, 1), Bucket(4, 1))
    factor = 2
    reads_host = False

    def fields(self, bucket: Bucket) -> Mapping[str, Field]:
        return {"x": Field((bucket.num_rows,), torch.float32)}

    def compute(self, inputs: Tensors, bucket: Bucket) -> Tensors:
        if self.reads_host:
            inputs["x"].tolist()
        return {"y": inputs["x"] * self.factor}


@torch.inference_mode()
def test_a_tape_keeps_the_rules_of_a_capture() -> None:
    """Contents are read anew, numbers of the host are frozen, and the host may not look."""
    program, graphs = Doubling(), CapturedGraphs(lambda: Tape([]), CPU)
    graphs.add(program)
    graphs.capture()
    program.factor = 3
    assert graphs.run(program, Bucket(2, 2), {"x": torch.tensor([1.0, 2.0])})["y"].tolist() == [2, 4, 0, 0]
    assert graphs.run(program, Bucket(2, 2), {"x": torch.tensor([5.0])})["y"].tolist() == [10, 0, 0, 0]
    program.reads_host = True
    with pytest.raises(HostRead, match="tolist"):
        graphs.capture()


def test_the_bucket_with_the_fewest_rows_is_taken() -> None:
    program, graphs = Doubling(), CapturedGraphs(lambda: Tape([]), CPU)
    graphs.add(program)
    assert graphs.bucket_for(program, 1, 1) is None, "nothing is captured yet"
    graphs.capture()
    assert graphs.bucket_for(program, 1, 1) == Bucket(1, 2)
    assert graphs.bucket_for(program, 3, 1) == Bucket(4, 1)
    assert graphs.bucket_for(program, 2, 2) == Bucket(2, 2)
    assert graphs.bucket_for(program, 3, 2) is None
    assert graphs.bucket_for(program, 9, 1) is None
    graphs.drop()
    assert graphs.bucket_for(program, 1, 1) is None


def test_buckets_cover_every_decoding_batch_and_pad_query_lengths_less_than_twice(target: Path) -> None:
    resolved = with_lookup(target, max_num_seqs=48, max_num_batched_tokens=4096)
    buckets = step_buckets(resolved)
    assert {bucket.query_len for bucket in buckets} == {1, 2, 4, 5}
    for requests in range(1, 49):
        for length in range(1, 6):
            fitting = [bucket for bucket in buckets if bucket.holds(requests, length)]
            assert fitting, (requests, length)
            assert min(bucket.query_len for bucket in fitting) < 2 * length
    own = replace(resolved.engine, execution=ExecutionConfig(cudagraph_capture_sizes=(10, 20)))
    assert step_buckets(replace(resolved, engine=own)) == tuple(
        sorted(Bucket(n, length) for length, sizes in {1: (10, 20), 2: (5, 10), 4: (3, 5), 5: (2, 4)}.items() for n in sizes)
    )


def test_memory_is_counted_before_blocks(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with captures fewer blocks are left, by the bytes that were counted; on a CPU nothing is."""
    resolved = with_lookup(target)
    model = load_model(str(target), resolved.hf_config, dtype=torch.float32, device=CPU, max_model_len=64)
    assert graph_bytes(resolved, model) == 0
    on_gpu = replace(resolved, device="cuda")
    few = replace(on_gpu, engine=replace(on_gpu.engine, execution=ExecutionConfig(cudagraph_capture_sizes=(1,))))
    eager = replace(on_gpu, engine=replace(on_gpu.engine, execution=ExecutionConfig(enforce_eager=True)))
    assert graph_bytes(on_gpu, model) > graph_bytes(few, model) > graph_bytes(eager, model) == 0
    assert graph_bytes(few, model) >= 3 * cuda_graphs.BYTES_PER_GRAPH
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10**9, 10**9))
    plans = [memory_plan(one, model, MemoryNeed()) for one in (on_gpu, eager)]
    assert plans[0].fixed_bytes - plans[1].fixed_bytes == graph_bytes(on_gpu, model)
    assert plans[0].num_blocks < plans[1].num_blocks


@pytest.mark.parametrize(
    ("execution", "reason"),
    [(ExecutionConfig(enforce_eager=True), "--enforce-eager"), (ExecutionConfig(attention_backend="sdpa"), "attention backend sdpa")],
)
def test_why_nothing_is_captured_is_said(
    target: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, execution: ExecutionConfig, reason: str
) -> None:
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    caplog.set_level(logging.INFO, logger="specdec")
    resolved = replace(resolved_for(target), device="cuda")
    model = load_model(str(target), resolved.hf_config, dtype=torch.float32, device=CPU, max_model_len=64)
    assert isinstance(make_graphs(replace(resolved, engine=replace(resolved.engine, execution=execution)), model), NoGraphs)
    assert f"CUDA graphs: none ({reason})" in caplog.text


def test_a_capture_says_what_it_holds(target: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    caplog.set_level(logging.INFO, logger="specdec")
    capture_on_cpu(monkeypatch)
    run(resolved_for(target, max_num_seqs=4), [request("one", [3, 4, 5])])
    assert "CUDA graphs of target: 1, 2, 4 requests x 1 rows" in caplog.text
    assert "CUDA graphs: 3 captured in" in caplog.text
