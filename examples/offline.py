"""Complete a few prompts without a server, and see what speculation did.

Run it: python examples/offline.py [model directory or hub id; without one the embedded model answers]
"""

import sys

from specdec import LLM, SamplingParams

STORY = "Anna went to the market. Anna bought apples, pears and bread. Anna went home."
PROMPTS = [f"Text: {STORY}\nThe same text again:", "Three colours of the rainbow are", "1, 2, 3, 4, 5, 6,"]
SPECULATION = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 4}

if __name__ == "__main__":
    model = sys.argv[1:2]
    with LLM(*model, speculative_config=SPECULATION, max_model_len=256, max_num_seqs=len(PROMPTS)) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=32)
        for result in llm.generate(PROMPTS, greedy, use_tqdm=False):
            print(f"{result.prompt!r}\n  -> {result.outputs[0].text!r}")
        total = llm.stats.spec.total
    print(f"{total.num_accepted_tokens} of {total.num_draft_tokens} drafts were right; without drafts the text would be the same")
