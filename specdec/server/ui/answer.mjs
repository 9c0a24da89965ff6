// One streamed answer on the page: coloured tokens, rejected drafts, and its figures. Text is only ever set as text.

import { Aligner, Tally } from "./align.mjs";
import { streamChat } from "./api.mjs";

const COLOURS = 6;

/** Gives each source a colour for as long as the page lives, and lists them in the legend. */
export class Legend {
  #root;
  #known = new Map();

  constructor(root) {
    this.#root = root;
    this.#add("drawn by the target", "");
  }

  classOf(source) {
    if (!this.#known.has(source)) {
      this.#known.set(source, `draft s${this.#known.size % COLOURS}`);
      this.#add(`drafted by ${source}, accepted`, this.#known.get(source));
    }
    return this.#known.get(source);
  }

  #add(text, className) {
    const item = document.createElement("li");
    item.append(span(text, className));
    this.#root.append(item);
  }
}

/** Streams one answer into `place` and its figures into `figures`; returns {text, tally, seconds, error}. */
export async function runAnswer({ body, key, signal, place, figures, legend, onText = () => {} }) {
  const aligner = new Aligner();
  const tally = new Tally();
  const startedMs = performance.now();
  let firstMs = null;
  let firstTokens = 0;
  let text = "";
  let error = null;
  const decodeSeconds = () => (firstMs === null ? 0 : (performance.now() - firstMs) / 1000);
  const show = () => {
    const seconds = decodeSeconds();
    const rate = seconds > 0 ? (tally.tokens - firstTokens) / seconds : 0;
    const drafts = tally.drafted ? `, ${tally.accepted} of ${tally.drafted} drafts accepted` : "";
    const wait = firstMs === null ? "" : `, first after ${((firstMs - startedMs) / 1000).toFixed(2)} s`;
    figures.textContent = `${tally.tokens} tokens, ${rate.toFixed(1)} tok/s, ${tally.perStep.toFixed(2)} tokens per pass${drafts}${wait}`;
    return rate;
  };
  try {
    for await (const event of streamChat(body, key, signal)) {
      const choice = event.choices[0];
      if (choice === undefined) continue;
      tally.add(choice.specdec);
      if (firstMs === null && tally.tokens > 0) {
        firstMs = performance.now();
        firstTokens = tally.tokens;
      }
      const piece = choice.delta.content ?? "";
      text += piece;
      for (const { text: part, source } of aligner.push(piece, choice.specdec)) {
        place.append(source === null ? document.createTextNode(part) : span(part, legend.classOf(source)));
      }
      const rejected = (choice.specdec?.rejected ?? []).map((token) => token.text).join("");
      if (rejected !== "") {
        const dropped = span(rejected, "rejected");
        dropped.title = "rejected drafts";
        place.append(dropped);
      }
      show();
      onText();
    }
  } catch (caught) {
    error = caught.name === "AbortError" ? "stopped" : caught.message;
    const note = document.createElement("p");
    note.className = "error";
    note.textContent = error;
    place.append(note);
  }
  const seconds = decodeSeconds();
  return { text, tally, seconds, rate: show(), error };
}

export function span(text, className) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}
