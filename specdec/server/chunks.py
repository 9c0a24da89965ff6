"""ChunkWriter: stream events of one answer from a prepared template, since this runs once per output of every request.

Owns: the text around a delta. Must not know: what a delta holds. Only the delta is encoded; the rest is joined strings.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.server.context import Job
from specdec.server.sse import encode


@dataclass(frozen=True, slots=True)
class Ending:
    """The JSON texts that follow a delta: finish_reason, stop_reason, and `,"key":value` pairs of the choice."""

    finish_reason: str = "null"
    stop_reason: str = "null"
    extra: str = ""


OPEN = Ending()


class ChunkWriter:
    """Writes the events of one stream."""

    def __init__(self, job: Job, kind: str, *, has_usage: bool) -> None:
        named = f'"model":{encode(job.model)},"system_fingerprint":"{job.fingerprint}"'
        self._head = f'data: {{"id":{encode(job.id)},"object":"{kind}","created":{job.created_s},{named},"choices":['
        self._heads = [f'{self._head}{{"index":{index},' for index in range(len(job.requests))]
        self._tail = ',"usage":null}\n\n' if has_usage else "}\n\n"

    def chunk(self, index: int, payload: str, *, logprobs: str = "null", ending: Ending = OPEN, more: str = "") -> bytes:
        """Return one event of one choice.

        payload: a JSON member, such as `"text":"Hi"`. logprobs: a JSON value. more: `,"key":value` pairs of the event.
        """
        tail = more + "}\n\n" if more else self._tail
        return (
            f'{self._heads[index]}{payload},"logprobs":{logprobs},"finish_reason":{ending.finish_reason},'
            f'"stop_reason":{ending.stop_reason}{ending.extra}}}]{tail}'
        ).encode()

    def closing(self, members: dict[str, object]) -> bytes:
        """Return the event without choices that carries usage and metrics."""
        return (self._head + "]," + encode(members)[1:] + "\n\n").encode()
