"""Heads in training compute what the papers say, learn, go on where they stopped, and serve what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.config.checkpoints import draft_hf_config
from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig, MtpConfig
from specdec.config.methods import traits_for
from specdec.errors import ConfigError
from specdec.train.batches import collate
from specdec.train.draft_vocabulary import choose_draft_ids
from specdec.train.dspark import RANK, DSparkTraining
from specdec.train.eagle3 import Eagle3Training
from specdec.train.evaluation import accepted_lengths, serve_held_out, walk
from specdec.train.features import make_features
from specdec.train.fit import FitOptions, Progress, fit
from specdec.train.losses import Mix, draft_laws, linear_draft_loss
from specdec.train.run import METHODS, TrainingRun
from specdec.train.shards import Corpus, Document, save_atomically
from tests.models.block_reference import BlockSpec, PlainBlock
from tests.models.eagle_reference import Spec
from tests.proposers.heads import headed as eagle_headed
from tests.proposers.heads import plain_head
from tests.proposers.test_block import headed as block_headed
from tests.proposers.test_hidden_head import headed as hidden_headed
from tests.proposers.tiny import plain, request, resolved_for, run
from tests.train.conftest import TAPS, Taught

OPTIONS = FitOptions(steps=80, batch_size=8, max_len=48, lr=6e-3, save_every=40, eval_every=40, ema=0.9)
EAGLE = Spec(draft_vocab=97, taps=(1, 2), fc_norm=True, norm_output=True)
SLOW = ("medusa", "dflash")  # Medusa does not see the anchor; a DFlash mask learns first of all to look at it


def build(taught: Taught, kind: type[Any], **more: Any) -> Any:
    torch.manual_seed(1)
    tables = taught.tables
    ids = torch.arange(97)
    head = kind(tables.config, embedding=tables.embedding, head=tables.head, draft_ids=ids, dtype=torch.float32, **more)
    with torch.no_grad():  # nothing may be zero or one, or a missing part would not show
        for name, weight in head.named_parameters():
            weight += 0.2 * torch.randn_like(weight) if weight.ndim == 1 or "markov_second" in name else 0
    return head


def serving(target: Path, head: Path, method: str, drafts: int) -> ResolvedConfig:
    """The configuration of the tiny target with an exported head."""
    if method in ("eagle3", "peagle"):
        return eagle_headed(target, head, EAGLE, drafts, config={"parallel_drafting": method == "peagle"})
    if method in ("dspark", "dflash"):
        return block_headed(target, head, drafts, method=method)
    if method in ("medusa", "mlp_speculator"):
        return hidden_headed(target, head, drafts)
    kind = MtpConfig if method == "mtp" else DraftModelConfig
    speculative = kind(model=str(head), num_speculative_tokens=drafts)
    keys = json.loads((head / "config.json").read_text(encoding="utf-8"))
    resolved = resolved_for(target, traits=traits_for(speculative, keys, num_target_layers=4), speculative=speculative)
    return replace(resolved, draft_model_path=str(head), draft_hf_config=draft_hf_config(str(head), keys))


def save(head: Any, path: Path) -> Path:
    """Write a head whose vocabulary is whole, with its weights as they are."""
    path.mkdir()
    tensors = {name: tensor.float() for name, tensor in head.tensors().items()}
    tensors |= {name: weight.detach().clone().contiguous() for name, weight in head.weights().items()}
    save_atomically(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(head.config()), encoding="utf-8")
    return path


def widen(head: Any, taught: Taught) -> None:
    """Let a head compute in float32, as the engine does here."""
    head.dtype = torch.float32
    if hasattr(head, "embedding"):
        head.embedding = taught.tables.embedding.float()
    head.target_head = taught.tables.head.float()


# -- arithmetic ----------------------------------------------------------------------------------------------------------


def states_of(taught: Taught, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """transformers' states of a text: the stream before each layer and before the norm, each [T, H], and behind the norm."""
    streams: list[torch.Tensor] = []
    parts = [*taught.model.model.layers, taught.model.model.norm]
    hooks = [part.register_forward_pre_hook(lambda _, args: streams.append(args[0][0])) for part in parts]
    with torch.no_grad():
        last = taught.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return streams, last


def exact(taught: Taught, ids: torch.Tensor, document: Document) -> Document:
    """The document with other ids, and states that were not rounded to bf16."""
    streams, last = states_of(taught, ids)
    return replace(document, ids=ids, aux=torch.stack([streams[tap] for tap in TAPS], dim=1), hidden=last)


def test_features_are_the_targets_own_states(taught: Taught) -> None:
    document = Corpus(taught.data, features=True).documents("train")[3]
    assert document.aux is not None
    assert document.hidden is not None
    streams, last = states_of(taught, document.ids)
    for place, tap in enumerate(TAPS):
        torch.testing.assert_close(document.aux[:, place].float(), streams[tap], atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(document.hidden.float(), last, atol=2e-2, rtol=1e-2)
    assert make_features(taught.data, taught.served, TAPS) == 0  # nothing is left to do


@pytest.mark.parametrize("mix", [Mix(), Mix(0.0, 1.0), Mix(0.3, 0.7)])
def test_the_fused_loss_and_its_gradient_are_those_of_autograd(mix: Mix) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (700, 31))
    laws = torch.randn(50, 31, generator=generator).mul(3).softmax(-1)
    rows, weights = torch.randint(0, 50, (700,), generator=generator), torch.rand(700, generator=generator)
    loss, overlap = linear_draft_loss(hidden, weight, laws, rows, row_weight=weights, mix=mix)
    loss.backward()
    mine = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    log_q, p = (hidden @ weight.T).log_softmax(-1), laws[rows]
    distance = (p - log_q.exp()).abs().sum(-1)
    plain = ((mix.cross_entropy * -(p * log_q).sum(-1) + mix.distance * distance) * weights).sum()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(overlap, 1 - distance.detach() / 2)
    torch.testing.assert_close(mine, (hidden.grad, weight.grad), atol=1e-4, rtol=1e-4)


def test_laws_are_the_targets_on_the_draft_vocabulary() -> None:
    hidden, head = torch.randn(9, 8), torch.randn(20, 8)
    torch.testing.assert_close(draft_laws(hidden, head), (hidden @ head.T).softmax(-1))


def test_the_eagle3_roll_out_is_the_papers(taught: Taught, tmp_path: Path) -> None:
    """Step s of row j, against a plain head that reads the text afresh and is fed its own output s times."""
    head = build(taught, Eagle3Training, steps=3)
    reference = plain_head(taught.target, save(head, tmp_path / "head"), EAGLE).reference
    document = Corpus(taught.data, features=True).documents("train")[0]
    with torch.no_grad():
        outputs = head.roll_out(collate([document], max_len=48))
    assert document.aux is not None
    features = reference.features(list(document.aux.float().unbind(1)))
    for row in (0, 7, 30):
        ids, fed = document.ids[1 : row + 2], features[: row + 1]
        for step, output in enumerate(outputs):
            scored, following = reference.rows(ids, fed)
            torch.testing.assert_close(output[0, row], scored[-1], atol=1e-3, rtol=1e-3)
            ids, fed = document.ids[1 : row + 3 + step], torch.cat([fed, following[-1:]])


def test_a_dspark_block_is_the_papers(taught: Taught, tmp_path: Path) -> None:
    head = build(taught, DSparkTraining, slots=4)
    document = Corpus(taught.data, features=True).documents("train")[0]
    batch = collate([document], max_len=48)
    anchors = torch.tensor([[1, 9, 30]])
    with torch.no_grad():
        blocks = head.blocks(batch, anchors, 4)
    spec = BlockSpec(draft_vocab=97, taps=(1, 2), rank=RANK, markov="rnn", drafts=4)
    reference = PlainBlock(taught.target, save(head, tmp_path / "head"), spec)
    for place, anchor in enumerate(anchors[0].tolist()):
        rows = reference.block(document.ids[: anchor + 1].tolist(), 4)
        torch.testing.assert_close(blocks[0, place], rows, atol=3e-2, rtol=3e-2)  # features are kept in bf16


# -- learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_head_learns_serves_and_is_accepted(taught: Taught, tmp_path: Path, method: str) -> None:
    """A tiny target repeats itself, so a head that is aligned learns it in seconds; one that is shifted does not."""
    training = TrainingRun(method, data=taught.data, directory=tmp_path / "run", target=taught.tables)
    shown: list[Progress] = []
    training.fit(OPTIONS, shown.append)
    measured = [progress for progress in shown if progress.acceptance]
    assert measured[-1].acceptance is not None
    documents = list(Corpus(taught.data, features=True).documents("train"))
    head: Any = training.head
    taught_it = serve_held_out(head, documents, batch_size=8, max_len=48)
    assert taught_it is not None
    assert taught_it.by_position[0] > (0.15 if method in SLOW else 0.3)  # of the texts it was taught
    training.export(tmp_path / "head")
    provenance = json.loads((tmp_path / "head" / "provenance.json").read_text())
    assert provenance["steps"] == OPTIONS.steps
    assert provenance["held_out_acceptance"] == list(measured[-1].acceptance)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert (tmp_path / "head" / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert all(tensor.dtype in (torch.bfloat16, torch.int64, torch.bool) for tensor in stored.values())
    requests = [request(f"r{i}", document.ids[:6].tolist(), temperature=0.0, max_tokens=30) for i, document in enumerate(documents[:8])]
    result = run(serving(taught.target, tmp_path / "head", method, min(4, len(taught_it.by_position))), requests)
    assert result.token_ids == plain(taught.target, requests)
    assert result.acceptance_length() > (1.2 if method in SLOW else 1.4)


@pytest.mark.parametrize("method", METHODS)
def test_what_evaluation_counts_is_what_the_engine_counts(taught: Taught, tmp_path: Path, method: str) -> None:
    """The same head on the same answers: as many drafts accepted, position by position, as when it is served."""
    training = TrainingRun(method, data=taught.data, directory=tmp_path / "run", target=taught.tables)
    head: Any = training.head
    training.fit(replace(OPTIONS, steps=40), lambda _: None)
    widen(head, taught)
    documents = [exact(taught, d.ids[:40], d) for d in Corpus(taught.data, features=True).documents("train")[:12]]
    counted = serve_held_out(head, documents, batch_size=5, max_len=48)
    assert counted is not None
    stored = save(head, tmp_path / "head")
    requests = [
        request(f"r{i}", d.ids[: d.prompt_len].tolist(), temperature=0.0, max_tokens=40 - d.prompt_len) for i, d in enumerate(documents)
    ]
    result = run(serving(taught.target, stored, method, len(counted.by_position)), requests)
    assert list(result.token_ids.values()) == [d.ids[d.prompt_len :].tolist() for d in documents]
    accepted = counted.num_blocks * sum(counted.by_position)
    # an engine's last blocks are shorter, and DFlash drafts something else when there are fewer masks
    assert result.num_accepted() == pytest.approx(accepted, abs=5 if method == "dflash" else 1)


def test_blocks_begin_behind_the_block_before_and_end_with_the_answer() -> None:
    ids = torch.tensor([[9, 9, 1, 2, 3, 4, 5, 6]])
    own = torch.arange(8) >= 2
    drafts = torch.full((1, 8, 2), -1)
    drafts[0, 2] = torch.tensor([2, 3])  # both right: the next block begins at token 5, which the target wrote
    drafts[0, 3] = torch.tensor([3, 4])  # right too, but never asked for
    drafts[0, 5] = torch.tensor([7, 6])  # right only behind a wrong one
    drafts[0, 6] = torch.tensor([6, 7])  # no block begins where one token is left, and what is behind the end is never right
    lengths = accepted_lengths(drafts, ids)
    assert lengths[0].tolist() == [0, 0, 2, 2, 0, 0, 1, 0]
    assert walk(lengths[0], own) == [2, 0]
    assert walk(torch.full((8,), 4), own) == [4]
    assert walk(lengths[0], own & False) == []


@pytest.mark.parametrize("method", [name for name in METHODS if name != "medusa"])  # which says nothing of the token that it stands behind
def test_a_drafter_trained_one_place_off_learns_less(taught: Taught, tmp_path: Path, method: str) -> None:
    corpus, tables, lengths = Corpus(taught.data, features=True), taught.tables, {}
    kind = METHODS[method]
    more: dict[str, Any] = {"read": tables.read} if kind.copies_layers else {"slots": 3} if method == "dflash" else {}
    options = replace(OPTIONS, steps=80, lr=1e-2) if method in SLOW else replace(OPTIONS, steps=40)
    for shift in (-1, 0, 1):
        torch.manual_seed(1)
        head = kind.kind(
            tables.config, embedding=tables.embedding, head=tables.head, draft_ids=torch.arange(97), taps=TAPS, shift=shift, **more
        )
        fit(head, corpus.documents("train"), (), directory=tmp_path / str(shift), options=options)
        served = serve_held_out(head, corpus.documents("train")[:20], batch_size=8, max_len=48)
        assert served is not None
        lengths[shift] = served.by_position[0]
    assert lengths[0] > lengths[-1] + 0.05
    assert lengths[0] > lengths[1] + 0.05


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(taught: Taught, tmp_path: Path) -> None:
    weights = {}
    for name, stops in (("whole", (6,)), ("stopped", (3, 6))):
        for _ in stops:
            training = TrainingRun("dspark", data=taught.data, directory=tmp_path / name, target=taught.tables)
            stop_at = len(stops) == 2 and not (tmp_path / name / "checkpoint.pt").exists()
            options = replace(OPTIONS, steps=6, save_every=3, eval_every=100)
            if stop_at:
                with pytest.raises(KeyboardInterrupt):
                    training.fit(options, _stop_after(4))
            else:
                training.fit(options, lambda _: None)
        weights[name] = training.head.state_dict()
    for name, value in weights["whole"].items():
        assert torch.equal(value, weights["stopped"][name]), name


def _stop_after(step: int) -> Any:
    def show(progress: Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return show


def test_a_run_begins_from_an_exported_head(taught: Taught, tmp_path: Path) -> None:
    first = TrainingRun("dspark", data=taught.data, directory=tmp_path / "first", target=taught.tables)
    first.fit(replace(OPTIONS, steps=4), lambda _: None)
    first.export(tmp_path / "head")
    again = TrainingRun("dspark", data=taught.data, directory=tmp_path / "again", target=taught.tables, init=tmp_path / "head")
    assert torch.equal(again.draft_ids, first.draft_ids)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    head: Any = again.head
    assert all(torch.equal(tensor, stored[name]) for name, tensor in head.tensors().items())
    with pytest.raises(ConfigError, match=r"fc_norm\.0\.weight is nothing"):
        TrainingRun("eagle3", data=taught.data, directory=tmp_path / "other", target=taught.tables, init=tmp_path / "head")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        TrainingRun("dspark", data=taught.data, directory=tmp_path / "none", target=taught.tables, init=tmp_path)


# -- bad input -----------------------------------------------------------------------------------------------------------


def test_missing_data_and_bad_sizes_are_named(taught: Taught, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no shard"):
        Corpus(tmp_path, features=False)
    with pytest.raises(ConfigError, match="method is 'eagle9'"):
        TrainingRun("eagle9", data=taught.data, directory=tmp_path, target=taught.tables)
    with pytest.raises(ConfigError, match="draft-vocab-size is 98"):
        choose_draft_ids(torch.zeros(97), 98)
    with pytest.raises(ConfigError, match="lr is 2"):
        FitOptions(lr=2)
    with pytest.raises(ConfigError, match="one batch needs 4000"):
        TrainingRun("dspark", data=taught.data, directory=tmp_path / "x", target=taught.tables).fit(
            replace(OPTIONS, batch_size=4000), lambda _: None
        )
    with pytest.raises(ConfigError, match="no checkpoint"):
        TrainingRun("dspark", data=taught.data, directory=tmp_path / "y", target=taught.tables).export(tmp_path / "z")


def test_the_most_frequent_ids_and_the_special_ones_are_drafted() -> None:
    counts = torch.tensor([0, 5, 1, 9, 0, 7])
    assert choose_draft_ids(counts, 3, always=[0]).tolist() == [0, 3, 5]
