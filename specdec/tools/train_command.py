"""specdec train: data, features, fit, export. Each goes on where it was stopped.

Owns: arguments and progress of the subcommands. Must not know: how a head is trained (specdec/train).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specdec.tools.train_data import Report
    from specdec.train.fit import Progress
    from specdec.train.run import TrainingRun

train_app = typer.Typer(no_args_is_help=True, help="Train a draft head on text that the target wrote itself.")

METHOD_HELP = "eagle3, dspark, medusa, peagle, mtp, dflash, mlp_speculator, or truncated (a draft model)."
Model = Annotated[str | None, typer.Option("--model", help="The target; none: the embedded model.")]
Data = Annotated[Path, typer.Option("--data", help="Directory of the shards.")]


@train_app.command()
def data(
    out: Annotated[Path, typer.Option("--out", help="Directory of the shards; what it holds already counts.")],
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Answer tokens in all: 1,000,000 for a first head, 5,000,000 for a good one.")] = 1_000_000,
    prompts: Annotated[
        str | None,
        typer.Option(help="Text file, one prompt a line, or .jsonl of messages; none: built-in ones and ones the target writes itself."),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of one answer, at most.")] = 280,
    seed: Annotated[int, typer.Option(help="Of prompts and answers.")] = 0,
    batch: Annotated[int, typer.Option(help="Answers at once.")] = 48,
) -> None:
    """Let the target answer prompts. Stop it at any time: it goes on behind the last finished shard."""
    from specdec.config.engine import EMBEDDED_MODEL
    from specdec.engine.llm import LLM
    from specdec.models.source import locate_target
    from specdec.tools.train_data import DataOptions, write_data
    from specdec.tools.train_sources import FileSource, Frame, OwnSource
    from specdec.train.manifest import model_fingerprint

    options = DataOptions(num_tokens=tokens, answer_tokens=answer_tokens, seed=seed)
    given = FileSource(prompts) if prompts else None  # a bad file is told before a model is loaded
    name = model or EMBEDDED_MODEL
    fingerprint = model_fingerprint(Path(locate_target(name).model_path))
    with LLM(name, max_model_len=options.max_model_len, max_num_seqs=batch) as llm, _data_bar(tokens) as show:
        source = given or OwnSource(llm, Frame(llm.tokenizer))
        total = write_data(llm, out, source, fingerprint=fingerprint, options=options, show=show)
    typer.echo(f"{total} answer tokens in {out}")


@contextmanager
def _data_bar(tokens: int) -> Iterator[Callable[[Report], None]]:
    """Yield what draws the bar of `train data`: it moves with each shard."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, speed_estimate_period=3600) as bar:
        task = bar.add_task("asking", total=tokens)
        bar.update(task, completed=0)

        def show(report: Report) -> None:
            told = f"{report.tokens_per_s:.0f} tok/s, kept {report.kept} answers to {report.asked} prompts"
            bar.update(task, completed=report.num_tokens, description=told)

        yield show


@train_app.command()
def features(
    data: Data,
    model: Model = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers already applied whose states are kept, such as 2,15,27; none: an early, a middle and a late one."),
    ] = None,
) -> None:
    """Compute the target's hidden states for every shard that lacks them: about 4.6 kB a token on disk for the embedded model."""
    from rich.progress import Progress as Bar

    from specdec.train.features import check_space, make_features, taps_of
    from specdec.train.shards import features_path, read_shard, shard_paths

    given = _parse_layers(layers) if layers else None
    _check_model(data, model)
    missing = [shard for shard in shard_paths(data) if not features_path(shard).exists()]
    total = sum(len(document.ids) for shard in missing for document in read_shard(shard, features=False))
    target, width = _load_target(model)
    chosen = given or taps_of(target.num_layers)
    check_space(data, num_tokens=total, token_bytes=2 * width * (len(chosen) + 1))
    with Bar(transient=True) as bar:
        task = bar.add_task("tokens", total=total)
        make_features(data, target, chosen, advance=lambda count: bar.advance(task, count))
    typer.echo(f"{len(missing)} shards, {total} tokens")


@train_app.command()
def fit(
    method: Annotated[str, typer.Argument(help=METHOD_HELP)],
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Directory of the run: checkpoint, log, vocabulary.")],
    model: Model = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps in all.")] = 1200,
    batch_size: Annotated[int, typer.Option(help="Documents a step.")] = 16,
    max_len: Annotated[int, typer.Option(help="Tokens of a document; the rest is cut.")] = 320,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 8e-4,
    seed: Annotated[int, typer.Option(help="Of the order of documents.")] = 0,
    init: Annotated[
        Path | None, typer.Option(help="An exported head of the same method to begin from, in place of random weights.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Directory of TensorBoard's curves.")] = None,
) -> None:
    """Train until --steps. Stop it at any time: it goes on from its last checkpoint, with the shards that are there then."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from specdec.train.fit import FitOptions

    watch = _curves(tensorboard) if tensorboard else lambda _: None
    options = FitOptions(steps=steps, batch_size=batch_size, max_len=max_len, lr=lr, seed=seed)
    run = _open_run(method, data, out, model, init)
    console = Console()
    with Bar(console=console) as bar:
        task = bar.add_task(method, total=steps)

        def show(progress: Progress) -> None:
            watch(progress)
            bar.update(task, completed=progress.step, description=f"{method} loss {progress.loss:.3f}")
            if progress.acceptance:
                shares = " ".join(f"{share:.3f}" for share in progress.acceptance)
                console.print(f"step {progress.step}: loss {progress.loss:.3f}, accepted {shares}, length {progress.mean_length:.3f}")

        run.fit(options, show)


def _curves(directory: Path) -> Callable[[Progress], None]:
    """What draws each step's loss and, where it was measured, acceptance."""
    from specdec.errors import ConfigError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the package tensorboard", hint="pip install 'specdec[tensorboard]'") from None
    writer = SummaryWriter(str(directory))

    def draw(progress: Progress) -> None:
        values = {"loss": progress.loss} | {f"by_position/{place}": value for place, value in enumerate(progress.by_position)}
        for place, share in enumerate(progress.acceptance or ()):
            values[f"accepted/{place}"] = share
        if progress.mean_length is not None:
            values["accepted/length"] = progress.mean_length
        for name, value in values.items():
            writer.add_scalar(name, value, progress.step)
        writer.flush()

    return draw


@train_app.command()
def export(
    method: Annotated[str, typer.Argument(help=METHOD_HELP)],
    data: Data,
    run_directory: Annotated[Path, typer.Option("--run", help="Directory that fit wrote to.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the checkpoint.")],
    model: Model = None,
) -> None:
    """Write the trained head in the public format of its method, ready for --speculative-config."""
    _open_run(method, data, run_directory, model).export(out)
    typer.echo(str(out))


@train_app.command("token-map")
def token_map(
    out: Annotated[Path, typer.Option("--out", help="The file: .pt (SGLang reads it too), .json or .safetensors.")],
    data: Annotated[Path | None, typer.Option("--data", help="Directory of the shards: the target's own answers are counted.")] = None,
    corpus: Annotated[Path | None, typer.Option("--corpus", help="Text or .jsonl file to count in place of shards.")] = None,
    model: Model = None,
    size: Annotated[int, typer.Option(help="How many ids, best a multiple of 64.")] = 8192,
) -> None:
    """Rank the ids that the target writes most, for heads that share its LM head: --speculative-token-map FILE."""
    from specdec.config.engine import EMBEDDED_MODEL
    from specdec.errors import ConfigError
    from specdec.models.source import locate_target
    from specdec.tools.train_token_map import check_ending, rank, write

    check_ending(out)
    if (data is None) == (corpus is None):
        raise ConfigError("--data and --corpus are " + ("both missing" if data is None else "both given"), hint="give one of the two")
    files = locate_target(model or EMBEDDED_MODEL)
    vocab_size = _config_of(files.model_path).get_text_config().vocab_size
    counts = _count_corpus(corpus, files.tokenizer_path, vocab_size) if corpus is not None else _count_answers(data, model, vocab_size)
    chosen = rank(counts, size, always=_special_ids(files.tokenizer_path))
    write(chosen.ids, out)
    typer.echo(f"{len(chosen.ids)} ids in {out}, which are {chosen.coverage:.1%} of {int(counts.sum())} tokens")


def _count_answers(data: Path | None, model: str | None, vocab_size: int) -> Any:
    from specdec.train.draft_vocabulary import count_ids
    from specdec.train.shards import Corpus

    assert data is not None, "checked by the caller"
    _check_model(data, model)
    return count_ids(Corpus(data, features=False).documents("train"), vocab_size)


def _count_corpus(corpus: Path, tokenizer_path: str, vocab_size: int) -> Any:
    from specdec.engine.tokenizer import Tokenizer
    from specdec.proposers.suffix import texts_of
    from specdec.tools.train_token_map import count_texts

    tokenizer = Tokenizer.from_path(tokenizer_path)
    texts = texts_of(corpus.expanduser(), name="corpus")
    return count_texts(lambda text: tokenizer.encode(text, add_special_tokens=False), texts, vocab_size)


def _open_run(method: str, data: Path, directory: Path, model: str | None, init: Path | None = None) -> TrainingRun:
    from specdec.config.engine import EMBEDDED_MODEL
    from specdec.models.source import locate_target
    from specdec.train.run import TargetTables, TrainingRun

    _check_model(data, model)
    files = locate_target(model or EMBEDDED_MODEL)
    tables = TargetTables.load(files.model_path, _config_of(files.model_path))
    return TrainingRun(method, data=data, directory=directory, target=tables, always=_special_ids(files.tokenizer_path), init=init)


def _check_model(data: Path, model: str | None) -> None:
    from specdec.config.engine import EMBEDDED_MODEL
    from specdec.models.source import locate_target
    from specdec.train.manifest import check_written_by

    check_written_by(data, Path(locate_target(model or EMBEDDED_MODEL).model_path))


def _parse_layers(text: str) -> tuple[int, ...]:
    from specdec.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"layers is {text!r}, but it must be numbers with commas between", hint="such as 2,15,27") from None


def _load_target(model: str | None) -> tuple[Any, int]:
    """The target, and its hidden size."""
    import torch

    from specdec.config.engine import EMBEDDED_MODEL
    from specdec.models.registry import load_model
    from specdec.models.source import locate_target

    path = locate_target(model or EMBEDDED_MODEL).model_path
    config = _config_of(path)
    target = load_model(path, config, dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=config.max_position_embeddings)
    return target, config.get_text_config().hidden_size


def _config_of(path: str) -> Any:
    from specdec.config.checkpoints import auto_config

    return auto_config(path)


def _special_ids(path: str) -> tuple[int, ...]:
    from specdec.engine.tokenizer import Tokenizer

    return tuple(Tokenizer.from_path(path).hf.all_special_ids)
