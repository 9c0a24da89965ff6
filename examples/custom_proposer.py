"""Draft with a class of your own, offline. vLLM calls such a class in the same way, so it serves both.

Run it: python examples/custom_proposer.py [model directory or hub id; without one the embedded model answers]
"""

import sys


class AsLastTime:
    """Goes on as the text went on the last time that it said its newest token."""

    def __init__(self, vllm_config):
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        texts = (token_ids_cpu[index, : num_tokens_no_spec[index]].tolist() for index in range(len(sampled_token_ids)))
        return [self.continue_text(text) if new else [] for new, text in zip(sampled_token_ids, texts, strict=True)]

    def continue_text(self, text):
        for end in range(len(text) - 1, 0, -1):
            if text[end - 1] == text[-1]:
                return text[end : end + self.num_drafts]
        return []


if __name__ == "__main__":
    from specdec import LLM, SamplingParams  # here, because the class is imported by a process of its own that needs neither

    config = {"method": "custom_class", "model": "custom_proposer.AsLastTime", "num_speculative_tokens": 4}
    with LLM(*sys.argv[1:2], speculative_config=config, max_model_len=256, max_num_seqs=1) as llm:
        prompt = "one two three four, one two three four, one two three four,"
        (result,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        total = llm.stats.spec.total
    print(f"{prompt}{result.outputs[0].text}")
    print(f"{total.num_accepted_tokens} of {total.num_draft_tokens} drafts were right")
