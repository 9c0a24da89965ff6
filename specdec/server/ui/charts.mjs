// Lines and bars on canvas, in the colours of the page.

import { CHARTS, KEPT, acceptanceByPosition } from "./series.mjs";

const PER_POSITION = "Acceptance by position";

/** Builds the figures once and draws them from readings. */
export class Charts {
  #figures = new Map();

  constructor(root) {
    for (const title of [...CHARTS.map((chart) => chart.title), PER_POSITION]) {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const name = document.createElement("span");
      const now = document.createElement("output");
      const canvas = document.createElement("canvas");
      name.textContent = title;
      now.textContent = "–";
      canvas.setAttribute("role", "img");
      caption.append(name, now);
      figure.append(caption, canvas);
      root.append(figure);
      this.#figures.set(title, { now, canvas });
    }
  }

  draw(readings) {
    for (const chart of CHARTS) {
      const values = readings.line(chart);
      const last = values.findLast((value) => value !== null);
      this.#show(chart.title, last === undefined ? "–" : last.toFixed(last < 10 ? 2 : 0) + chart.unit, (pen) => line(pen, values));
    }
    const all = readings.all;
    const shares = all.length > 1 ? acceptanceByPosition(all[0], all.at(-1)) : [];
    const text = shares.map((share) => share.toFixed(2)).join(" ") || "–";
    this.#show(PER_POSITION, text, (pen) => bars(pen, shares));
  }

  #show(title, text, paint) {
    const { now, canvas } = this.#figures.get(title);
    now.textContent = text;
    canvas.setAttribute("aria-label", `${title}: ${text}`);
    const pen = penOf(canvas);
    if (pen !== null) paint(pen);
  }
}

/** A cleared pen in CSS pixels, null while the figure is not on the screen. */
function penOf(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (width === 0 || height === 0) return null;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { context, width, height, ink: colour("--accent"), soft: colour("--soft"), grid: colour("--line") };
}

function axis(pen, top) {
  const { context, width, height, soft, grid } = pen;
  context.strokeStyle = grid;
  context.fillStyle = soft;
  context.font = "11px system-ui, sans-serif";
  context.beginPath();
  for (const y of [14.5, height - 2.5]) {
    context.moveTo(0, y);
    context.lineTo(width, y);
  }
  context.stroke();
  context.fillText(top < 10 ? top.toFixed(2) : top.toFixed(0), 0, 11);
}

function line(pen, values) {
  const { context, width, height } = pen;
  const top = Math.max(...values.filter((value) => value !== null), 0) || 1;
  axis(pen, top);
  context.strokeStyle = pen.ink;
  context.lineWidth = 2;
  context.beginPath();
  const offset = KEPT - values.length;
  let isDown = false;
  values.forEach((value, index) => {
    if (value === null) {
      isDown = false;
      return;
    }
    const x = ((offset + index) / (KEPT - 1)) * width;
    const y = height - 3 - (value / top) * (height - 20);
    if (isDown) context.lineTo(x, y);
    else context.moveTo(x - 1, y);
    if (!isDown) context.lineTo(x, y); // one point alone is seen too
    isDown = true;
  });
  context.stroke();
}

function bars(pen, shares) {
  const { context, width, height } = pen;
  axis(pen, 1);
  context.fillStyle = pen.ink;
  const step = width / Math.max(shares.length, 1);
  shares.forEach((share, position) => {
    const tall = Math.min(share, 1) * (height - 20);
    context.fillRect(position * step + 2, height - 3 - tall, Math.max(step - 4, 1), tall);
  });
}
