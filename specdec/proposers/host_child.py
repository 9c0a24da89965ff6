"""The child's side of custom_class: loads a user's class, keeps the token rows it reads, calls it, and checks what it returns.

Owns: everything that runs beside the user's code. Must not know: torch, engine, deadlines. Read next: host_worker.py.
Letters: R requests of a call, M persistent rows.

The call shape is vLLM's, so that one class serves both: propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu,
slot_mappings=None) -> list of lists of ids.
"""

from __future__ import annotations

import operator
import os
import threading
import time
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np

PROPOSER_METHODS = ("memory", "bind", "admit", "propose", "release", "sleep", "wake", "reload")  # of specdec's own protocol


class Offer(NamedTuple):
    """What a user's class may know: path is "package.module.Class"; lengths in tokens."""

    path: str
    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int


class Started(NamedTuple):
    """First answer of a child. kind "device": the class speaks specdec's own protocol and belongs into the engine's process."""

    kind: Literal["host", "device", "error"]
    text: str = ""


class Ask(NamedTuple):
    """One step. rows [R]; num_tokens [R]; starts [R]: where each of `tokens` (int32 as bytes) belongs in its row, 0 for a new text;
    sampled [R]: ids accepted since the last call, empty while a prompt is read."""

    rows: list[int]
    num_tokens: list[int]
    starts: list[int]
    tokens: list[bytes]
    sampled: list[list[int]]


class Answer(NamedTuple):
    """Drafts per request, empty where they are unusable; faults say why. error: the call itself failed."""

    drafts: list[list[int]]
    faults: list[str]
    error: str = ""


class SpeculativeOffer(NamedTuple):
    """The part of vLLM's SpeculativeConfig that is offered."""

    method: str
    model: str
    num_speculative_tokens: int


class ModelOffer(NamedTuple):
    """The part of vLLM's ModelConfig that is offered."""

    max_model_len: int


class ConfigOffer(NamedTuple):
    """The constructor's argument, in the shape of vLLM's VllmConfig."""

    speculative_config: SpeculativeOffer
    model_config: ModelOffer


class LoadError(Exception):
    """The class cannot be used; the text says why."""


def serve(descriptor: int) -> None:
    """Answer asks over a connection until it is closed."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    offer: Offer = connection.recv()
    try:
        made = load_class(offer.path)
        if is_device_class(made):
            connection.send(Started("device"))
            return
        proposer = make(made, offer)
    except LoadError as error:
        connection.send(Started("error", str(error)))
        return
    connection.send(Started("host"))
    rows = TokenRows(offer.max_num_seqs, offer.max_model_len)
    while True:
        try:
            ask: Ask = connection.recv()
        except EOFError:
            return
        connection.send(call(proposer, rows, ask, offer))


def load_class(path: str) -> Any:
    """Import a class by its path.

    Raises:
        LoadError: with vLLM's texts.
    """
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        example = "It must be a full module path (e.g., 'module.MyProposerClass')."
        raise LoadError(f"Invalid custom proposer module path '{path}'. {example}")
    try:
        module = import_module(module_name)
    except BaseException as error:  # a module may do anything, also exit
        raise LoadError(f"Cannot import module '{module_name}' for custom proposer '{path}': {_text(error)}") from error
    if not hasattr(module, class_name):
        raise LoadError(f"Module '{module_name}' has no attribute '{class_name}' (speculative_config.model='{path}')")
    return getattr(module, class_name)


def is_device_class(made: Any) -> bool:
    """True for a class that implements the Proposer protocol."""
    return all(callable(getattr(made, name, None)) for name in PROPOSER_METHODS)


def make(made: Any, offer: Offer) -> Any:
    """Construct the user's object and check that it can be called.

    Raises:
        LoadError: with vLLM's texts.
    """
    config = ConfigOffer(
        SpeculativeOffer("custom_class", offer.path, offer.num_speculative_tokens),
        ModelOffer(offer.max_model_len),
    )
    try:
        proposer = made(config)
    except BaseException as error:
        rule = "The class constructor must accept VllmConfig as argument."
        raise LoadError(f"Failed to instantiate custom proposer class '{offer.path}': {_text(error)}. {rule}") from error
    if not hasattr(proposer, "propose"):
        raise LoadError(f"Custom proposer class '{offer.path}' must have a 'propose' method.")
    if not callable(proposer.propose):
        raise LoadError(f"Custom proposer class '{offer.path}' has a 'propose' attribute but it is not callable.")
    return proposer


class TokenRows:
    """The texts by persistent row, and in the order of the batch as the class wants them; only what is new is copied."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self._store = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._batch = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._text = [0] * max_num_seqs  # serial number of the text in each persistent row
        self._shown: list[tuple[int, int, int]] = [(-1, -1, 0)] * max_num_seqs  # batch position -> (row, text, tokens of it)

    def update(self, ask: Ask) -> tuple[np.ndarray, np.ndarray]:
        """Take in what is new; return (num_tokens [R] int32, token ids [R, max_model_len] int32)."""
        longest = self._store.shape[1]
        lengths = [min(count, longest) for count in ask.num_tokens]
        for position, (row, start, new) in enumerate(zip(ask.rows, ask.starts, ask.tokens, strict=True)):
            ids = np.frombuffer(new, dtype=np.int32)[: longest - start]
            self._store[row, start : start + len(ids)] = ids
            if start == 0:
                self._text[row] += 1
            shown = self._shown[position]
            since = shown[2] if shown[:2] == (row, self._text[row]) else 0
            self._batch[position, since : lengths[position]] = self._store[row, since : lengths[position]]
            self._shown[position] = (row, self._text[row], lengths[position])
        return np.array(lengths, dtype=np.int32), self._batch[: len(lengths)]


def call(proposer: Any, rows: TokenRows, ask: Ask, offer: Offer) -> Answer:
    """Call the user's object and make plain lists of what it returns."""
    num_tokens, token_ids = rows.update(ask)
    nothing: list[list[int]] = [[] for _ in ask.rows]
    try:
        reply = proposer.propose(ask.sampled, num_tokens, token_ids, slot_mappings=None)
    except BaseException:  # also SystemExit: the class does not decide when this process ends
        return Answer(nothing, [], f"propose raised an exception\n{traceback.format_exc().rstrip()}")
    if not isinstance(reply, list | tuple):
        return Answer(nothing, [], f"propose returned {type(reply).__name__}, but it must return a list of lists of token ids")
    if len(reply) != len(ask.rows):
        return Answer(nothing, [], f"propose returned {len(reply)} lists for {len(ask.rows)} requests, but it must return one for each")
    drafts, faults = [], []
    for index, ids in enumerate(reply):
        plain, fault = check_ids(ids, offer)
        drafts.append(plain)
        if fault:
            faults.append(f"propose returned {fault} for request {index} of the batch")
    return Answer(drafts, faults)


def check_ids(ids: Any, offer: Offer) -> tuple[list[int], str]:
    """Return (ids, "") or ([], what is wrong with them)."""
    if not isinstance(ids, list | tuple | np.ndarray):
        return [], f"{type(ids).__name__} in place of a list"
    try:
        plain = [operator.index(token) for token in ids]
    except TypeError:
        return [], "ids that are not whole numbers"
    if len(plain) > offer.num_speculative_tokens:
        return [], f"{len(plain)} ids, more than num_speculative_tokens ({offer.num_speculative_tokens}),"
    outside = [token for token in plain if not 0 <= token < offer.vocab_size]
    if outside:
        return [], f"the id {outside[0]}, which is not in 0..{offer.vocab_size - 1},"
    return plain, ""


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a call that never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
