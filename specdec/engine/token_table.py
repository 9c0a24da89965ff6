"""vocabulary_of: what every id of the logits spells, for grammars.

Owns: the way from a tokenizer to plain bytes. Must not know: grammars. Read next: structured/compiler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.tokenizer import Tokenizer
from specdec.structured.vocabulary import Vocabulary


def vocabulary_of(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Return the bytes of ids 0..vocab_size - 1.

    Special tokens spell nothing here: their text is left out of answers, so no grammar may count on it.
    """
    special = {token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    known = min(vocab_size, tokenizer.vocab_size)
    table = [b"" if token_id in special else tokenizer.token_bytes(token_id) for token_id in range(known)]
    return Vocabulary((*table, *[b""] * (vocab_size - known)), tuple(eos_token_ids))
