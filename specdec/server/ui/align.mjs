// From streamed text and traced tokens to coloured pieces. Pure: no document, so that it can be tested by itself.
//
// Text and tokens of one event need not match: a stop string holds text back, a character may be split over tokens (its
// tokens then read U+FFFD), and special tokens have no text. Tokens therefore wait until the text that they made arrives.

const UNKNOWN = "\uFFFD";

/** Takes events, gives pieces {text, source}: source null for tokens that the target drew itself. */
export class Aligner {
  #waiting = [];

  /** text: what the event shows. trace: its `specdec` member, or undefined. */
  push(text, trace) {
    const tokens = trace?.tokens ?? [];
    const count = trace?.num_accepted ?? 0;
    tokens.forEach((token, index) => {
      this.#waiting.push({ text: token.text, source: index < count ? trace.source ?? "draft" : null });
    });
    const pieces = [];
    let rest = text;
    while (rest !== "") {
      const [piece, length] = this.#take(rest);
      pieces.push(piece);
      rest = rest.slice(length);
    }
    return joined(pieces);
  }

  /** The first piece of `rest`, and its length. */
  #take(rest) {
    const waiting = this.#waiting;
    while (waiting.length > 0 && waiting[0].text === "") waiting.shift();
    if (waiting.length === 0) return [{ text: rest, source: null }, rest.length];
    const head = waiting[0];
    if (!head.text.includes(UNKNOWN) && rest.startsWith(head.text)) {
      waiting.shift();
      return [{ text: head.text, source: head.source }, head.text.length];
    }
    // The nearest later token whose text is found: what stands before it belongs to the tokens before it.
    for (let next = 1; next < waiting.length; next += 1) {
      const at = waiting[next].text === "" || waiting[next].text.includes(UNKNOWN) ? -1 : rest.indexOf(waiting[next].text);
      if (at < 0) continue;
      const source = waiting[next - 1].source;
      waiting.splice(0, next);
      if (at === 0) return this.#take(rest);
      return [{ text: rest.slice(0, at), source }, at];
    }
    const source = waiting.at(-1).source;
    waiting.length = 0;
    return [{ text: rest, source }, rest.length];
  }
}

/** Neighbours of one source as one piece: fewer elements on the page. */
export function joined(pieces) {
  const out = [];
  for (const piece of pieces) {
    const last = out.at(-1);
    if (last !== undefined && last.source === piece.source) last.text += piece.text;
    else out.push({ ...piece });
  }
  return out;
}

/** Counts of one answer, fed with traces. */
export class Tally {
  tokens = 0;
  steps = 0;
  drafted = 0;
  accepted = 0;
  sources = new Map();

  add(trace) {
    if (!trace || trace.tokens.length === 0) return;
    this.tokens += trace.tokens.length;
    this.steps += 1;
    this.accepted += trace.num_accepted;
    this.drafted += trace.num_accepted + trace.rejected.length;
    if (trace.source) this.sources.set(trace.source, (this.sources.get(trace.source) ?? 0) + trace.num_accepted);
  }

  /** Tokens per pass of the target, 0 before the first. */
  get perStep() {
    return this.steps ? this.tokens / this.steps : 0;
  }
}
