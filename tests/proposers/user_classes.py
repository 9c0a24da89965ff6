"""Classes as users write them, good and bad; the tests name them by import path, so they are loaded in another process."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np


class Repeats:
    """Continues the last earlier occurrence of the newest token; reads the rows, as vLLM's own n-gram does."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.calls = 0

    def propose(self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None) -> list[list[int]]:
        self.calls += 1
        assert token_ids_cpu.shape == (len(sampled_token_ids), self.max_model_len)
        return [self.continued(*one) for one in zip(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, strict=True)]

    def continued(self, sampled: list[int], length: int, row: np.ndarray) -> list[int]:
        text = row[:length].tolist()
        assert not sampled or text[-len(sampled) :] == sampled
        places = [i for i in range(len(text) - 1) if text[i] == text[-1]] if sampled else []
        return text[places[-1] + 1 :][: self.k] if places else []


class Remembers(Repeats):
    """Remembers each text as it last was, and fails when sampled_token_ids leave a gap between that and the rows."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.latest: set[tuple[int, ...]] = set()

    def continued(self, sampled: list[int], length: int, row: np.ndarray) -> list[int]:
        if sampled:
            text = tuple(row[:length].tolist())
            before = text[: -len(sampled)]
            if before in self.latest:
                self.latest.remove(before)
            else:
                assert not [known for known in self.latest if text[: len(known)] == known], "tokens were not told"
            self.latest.add(text)
        return super().continued(sampled, length, row)


class Faulty(Repeats):
    """Does in each call what its script says, the last entry for ever; "fine" behaves like Repeats."""

    script: tuple[str, ...] = ("fine",)

    def propose(self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None) -> Any:
        drafts = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)
        what = self.script[min(self.calls, len(self.script)) - 1]
        match what:
            case "raise":
                raise ValueError("a bug of the user")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "slow":
                time.sleep(1.6)
            case "none":
                return None
            case "short":
                return drafts[:-1]
            case "strings":
                return ["ab"] * len(drafts)
            case "floats":
                return [[1.5]] * len(drafts)
            case "outside":
                return [[97]] * len(drafts)
            case "negative":
                return [[-1]] * len(drafts)
            case "long":
                return [[1] * (self.k + 1)] * len(drafts)
            case "numpy":
                return [np.array(ids, dtype=np.int64) for ids in drafts]
        return drafts


class Raises(Faulty):
    script = ("raise", "fine")


class Exits(Faulty):
    script = ("exit", "fine")


class Dies(Faulty):
    script = ("fine", "fine", "die")


class HangsFirst(Faulty):
    script = ("hang",)


class HangsLater(Faulty):
    script = ("fine", "fine", "hang")


class SlowOnce(Faulty):
    script = ("fine", "slow", "fine")


class ReturnsNone(Faulty):
    script = ("none", "fine")


class ReturnsShort(Faulty):
    script = ("short", "fine")


class ReturnsStrings(Faulty):
    script = ("strings", "fine")


class ReturnsFloats(Faulty):
    script = ("floats", "fine")


class ReturnsOutside(Faulty):
    script = ("outside", "fine")


class ReturnsNegative(Faulty):
    script = ("negative", "fine")


class ReturnsLong(Faulty):
    script = ("long", "fine")


class ReturnsNumpy(Faulty):
    script = ("numpy",)


class NeedsTwoArguments:
    def __init__(self, one: Any, two: Any) -> None: ...

    def propose(self) -> None: ...


class HasNoPropose:
    def __init__(self, vllm_config: Any) -> None: ...


class ProposeIsNotCallable:
    propose = 3

    def __init__(self, vllm_config: Any) -> None: ...


class NeverReady:
    def __init__(self, vllm_config: Any) -> None:
        time.sleep(3600)

    def propose(self) -> None: ...
