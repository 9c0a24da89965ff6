// Talking to the server: requests as text and as objects, and server-sent events one by one. Knows nothing of the page.

/** The body of a chat request from what the user set. settings: see readSettings in app.mjs. */
export function chatBody(messages, settings) {
  const speculative = { enabled: settings.speculate, trace: true };
  if (settings.speculate && settings.drafts !== null) speculative.num_speculative_tokens = settings.drafts;
  return {
    messages,
    temperature: settings.temperature,
    max_tokens: settings.maxTokens,
    seed: settings.seed,
    stream: true,
    stream_options: { include_usage: true },
    speculative,
  };
}

/** The shell command that sends the same body; the key is named, never shown. */
export function curlCommand(origin, body, hasKey) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = hasKey ? " \\\n  -H \"Authorization: Bearer $SPECDEC_API_KEY\"" : "";
  return `curl -N ${origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}

export function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Yield the parsed events of a streamed answer; an error of the server is thrown with its own words. */
export async function* streamChat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const events = new EventBuffer();
  for (;;) {
    const { done, value } = await reader.read();
    for (const data of events.push(done ? decoder.decode() : decoder.decode(value, { stream: true }))) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    if (done) throw new Error("the connection ended in the middle of the answer");
  }
}

/** Collects pieces of a text/event-stream and gives back the data of each complete event. */
export class EventBuffer {
  #text = "";

  push(piece) {
    this.#text += piece;
    const events = this.#text.split("\n\n");
    this.#text = events.pop();
    return events.map((event) => event.replace(/^data: /, "")).filter((data) => data !== "");
  }
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  const error = new Error(message);
  error.status = response.status;
  return error;
}
