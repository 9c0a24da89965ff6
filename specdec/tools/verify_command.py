"""The verify command: configuration, prompts, progress bar, output, exit status.

Owns: what stands between the command line and verify.py. Must not know: statistics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from specdec.config.engine import EngineConfig, ResolvedConfig
from specdec.config.resolve import resolve
from specdec.errors import ConfigError
from specdec.tools.arm import Arm
from specdec.tools.prompts import prompts_for
from specdec.tools.serve import SpeculationFlags, choose_speculation
from specdec.tools.verify import RuleFacts, VerifyOptions, VerifyReport, num_steps, verify
from specdec.tools.verify_report import as_mapping, show

DEFAULT_PROMPTS = 16  # half of them questions, half texts to repeat, on which lookup methods draft
QUICK = {"tokens": 2000, "length": 32, "tv_samples": 40}
QUICK_PROMPTS = 6


def run_and_print(
    engine: EngineConfig, flags: SpeculationFlags, options: VerifyOptions, *, prompts_path: str | None, quick: bool, as_json: bool
) -> int:
    """Verify one configuration and print what was found. Returns 0 when nothing was, 1 when the output is not the target's own.

    Raises:
        ConfigError: anything that the user can mend.
    """
    if flags.off:
        raise ConfigError("--no-speculation is given, but verify compares speculation with plain decoding", hint="drop it")
    asked = replace(engine, speculative=choose_speculation(flags, engine.model.model))
    drafted, plain = resolve(asked), resolve(replace(engine, speculative=None))
    texts = read_prompts(prompts_path) if prompts_path else default_prompts(QUICK_PROMPTS if quick else DEFAULT_PROMPTS)
    prompts = encode(plain, texts, options)
    console = Console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=num_steps(len(prompts), options))
        report = verify(
            lambda: Arm.load(plain),
            lambda: Arm.load(drafted),
            prompts=prompts,
            rule=rule_facts(drafted),
            options=options,
            advance=lambda count: progress.advance(task, count),
        )
    _print(report, drafted, options, num_prompts=len(prompts), as_json=as_json)
    return 0 if report.ok and report.drafted else 1


def default_prompts(count: int) -> list[str]:
    """Return half questions, half texts to repeat."""
    return [*prompts_for("chat", count - count // 2), *prompts_for("copy", count // 2)]


def read_prompts(path: str) -> list[str]:
    """Read one prompt a line; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or has no prompt.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path!r} cannot be read: {error}", hint="give a UTF-8 text file with one prompt a line") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ConfigError(f"--prompts {path!r} holds no prompt", hint="write one prompt a line")
    return texts


def encode(resolved: ResolvedConfig, texts: Sequence[str], options: VerifyOptions) -> list[tuple[int, ...]]:
    """Return the prompts' ids, through the chat template where the model has one.

    Raises:
        ConfigError: a prompt and its answer do not fit the model.
    """
    from specdec.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_resolved(resolved)
    has_template = bool(tokenizer.hf.chat_template)
    prompts = []
    for index, text in enumerate(texts):
        rendered = tokenizer.render_chat([{"role": "user", "content": text}]) if has_template else text
        ids = tokenizer.encode(rendered, add_special_tokens=not has_template)
        room = resolved.max_model_len - options.length
        if not 0 < len(ids) <= room:
            message = f"prompt {index} has {len(ids)} tokens, but with {options.length} more it must fit {resolved.max_model_len}"
            raise ConfigError(message, hint="use shorter prompts, or a smaller --length")
        prompts.append(ids)
    return prompts


def rule_facts(resolved: ResolvedConfig) -> RuleFacts:
    """Return what the configured rule promises. A one-hot draft is verified by exact match; a drawn one by the named rule."""
    config: Any = resolved.engine.speculative
    rule, drawn = config.rejection_sample_method, config.draft_sample_method == "probabilistic"
    exact = not config.is_lossy and not drawn
    name = "exact match" if exact else rule
    return RuleFacts(name=name, exact_match=exact, by_slot=exact or rule == "standard", lossy=config.is_lossy)


def _print(report: VerifyReport, resolved: ResolvedConfig, options: VerifyOptions, *, num_prompts: int, as_json: bool) -> None:
    config: Any = resolved.engine.speculative
    if not as_json:
        show(report, Console(width=130))
        return
    configuration = {
        "model": resolved.served_model_name,
        "dtype": resolved.dtype,
        "device": resolved.device,
        "speculative_config": config.model_dump(mode="json", exclude_none=True),
        "num_prompts": num_prompts,
        "temperature": options.temperature,
        "tokens": options.tokens,
        "length": options.length,
        "seed": options.seed,
    }
    print(json.dumps(as_mapping(report, configuration)))
