// From two readings of /specdec/stats to the numbers of the charts. Pure: no document.

export const KEPT = 120; // points: two minutes at one a second

const ratio = (top, bottom) => (bottom > 0 ? top / bottom : null);

/** The lines of each chart, with what they show between two readings; null where there is nothing to show. */
export const CHARTS = [
  { title: "Tokens a second", unit: "", value: (a, b) => ratio(b.generation_tokens - a.generation_tokens, b.time_s - a.time_s) },
  {
    title: "Tokens per target pass",
    unit: "",
    value: (a, b) => ratio(b.num_decode_tokens - a.num_decode_tokens, b.num_decode_steps - a.num_decode_steps),
  },
  {
    title: "Acceptance length",
    unit: "",
    value: (a, b) => {
      const kept = ratio(b.num_accepted_tokens - a.num_accepted_tokens, b.num_drafts - a.num_drafts);
      return kept === null ? null : 1 + kept;
    },
  },
  { title: "Drafts in use (K)", unit: "", value: (_, b) => b.draft_length },
  { title: "Requests in the batch", unit: "", value: (_, b) => b.num_requests_running },
  { title: "Requests waiting", unit: "", value: (_, b) => b.num_requests_waiting },
  { title: "KV cache in use", unit: "%", value: (_, b) => 100 * b.kv_cache_usage_ratio },
];

/** Acceptance by position between two readings: entry i is the share of steps with drafts that kept draft i. */
export function acceptanceByPosition(a, b) {
  const drafts = b.num_drafts - a.num_drafts;
  const before = a.num_accepted_tokens_per_pos;
  return b.num_accepted_tokens_per_pos.map((count, position) => (drafts > 0 ? (count - (before[position] ?? 0)) / drafts : 0));
}

/** Readings of the last two minutes. A restart of the server (counters fall) starts over. */
export class Readings {
  all = [];

  push(reading) {
    const last = this.all.at(-1);
    if (last !== undefined && (reading.time_s < last.time_s || reading.num_steps < last.num_steps)) this.all = [];
    this.all.push(reading);
    if (this.all.length > KEPT + 1) this.all.shift();
  }

  /** One value for each pair of neighbours. */
  line(chart) {
    return this.all.slice(1).map((reading, index) => chart.value(this.all[index], reading));
  }
}
