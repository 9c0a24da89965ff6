"""GrammarFault: why a schema, regex, choice list or grammar cannot be served. The reason names the place; callers name the field.

Owns: the one exception of this folder. Must not know: HTTP fields.
"""

from __future__ import annotations


class GrammarFault(Exception):
    """`reason` completes the sentence "<field> cannot be used: ..."; `hint` is the way out."""

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
