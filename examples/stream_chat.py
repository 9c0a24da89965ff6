"""Stream one answer of a running server with the OpenAI client (pip install openai).

Run it: specdec serve, then python examples/stream_chat.py [base URL] [question]
"""

import sys

from openai import OpenAI

if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    question = sys.argv[2] if len(sys.argv) > 2 else "Name three uses of a paper clip."
    client = OpenAI(base_url=f"{url}/v1", api_key="none")  # any key, unless the server was started with --api-key
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:  # with speculation one chunk may hold several tokens
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")
