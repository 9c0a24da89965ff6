// The page: tabs, chat, race, polling. What is sent and what is drawn live in the other modules.

import { Legend, runAnswer } from "./answer.mjs";
import { chatBody, curlCommand, getJson } from "./api.mjs";
import { Charts } from "./charts.mjs";
import { Readings } from "./series.mjs";

const POLL_MS = 1000;
const $ = (id) => document.getElementById(id);
const legend = new Legend($("legend"));
const readings = new Readings();
const charts = new Charts($("charts"));
let messages = [];
let running = null; // AbortController of what streams now

// -- small helpers ---------------------------------------------------------------------------------------------------

function number(id, fallback) {
  const value = $(id).valueAsNumber;
  return Number.isFinite(value) ? value : fallback;
}

function readSettings() {
  return {
    temperature: number("temperature", 0),
    maxTokens: number("max-tokens", 256),
    seed: number("seed", 1),
    drafts: number("drafts", null),
    speculate: $("speculate").checked,
  };
}

const key = () => $("key").value.trim();

function notice(text) {
  $("notice").hidden = text === "";
  $("notice").textContent = text;
}

function setRunning(controller) {
  running = controller;
  for (const id of ["send", "race-start"]) $(id).disabled = controller !== null;
  for (const id of ["stop", "race-stop"]) $(id).disabled = controller === null;
}

function showCurl() {
  const content = $("prompt").value || "Hello";
  const body = chatBody([...messages, { role: "user", content }], readSettings());
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  $("curl").textContent = curlCommand(base, body, key() !== "");
}

// -- tabs ------------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll('[role="tab"]')];

function select(tab) {
  for (const each of tabs) {
    const isChosen = each === tab;
    each.setAttribute("aria-selected", String(isChosen));
    each.tabIndex = isChosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !isChosen;
  }
  charts.draw(readings);
}

function moveBetweenTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step === undefined) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus();
  select(next);
}

// -- chat ------------------------------------------------------------------------------------------------------------

function addMessage(who, text) {
  const message = document.createElement("div");
  const name = document.createElement("p");
  const said = document.createElement("div");
  message.className = "message";
  name.className = "who";
  name.textContent = who;
  said.className = who === "you" ? "said" : "answer";
  said.textContent = text;
  message.append(name, said);
  $("log").append(message);
  return { message, said };
}

function scrollLog() {
  $("log").scrollTop = $("log").scrollHeight;
}

async function send(event) {
  event.preventDefault();
  const content = $("prompt").value.trim();
  if (content === "" || running !== null) return;
  const asked = [...messages, { role: "user", content }];
  const body = chatBody(asked, readSettings());
  $("prompt").value = "";
  addMessage("you", content);
  const { message, said } = addMessage("model", "");
  const figures = document.createElement("p");
  figures.className = "figures";
  message.append(figures);
  setRunning(new AbortController());
  const result = await runAnswer({ body, key: key(), signal: running.signal, place: said, figures, legend, onText: scrollLog });
  setRunning(null);
  if (result.text !== "") messages = [...asked, { role: "assistant", content: result.text }];
  showCurl();
  scrollLog();
}

function clear() {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
  showCurl();
}

// -- race ------------------------------------------------------------------------------------------------------------

async function race(event) {
  event.preventDefault();
  const content = $("race-prompt").value.trim();
  if (content === "" || running !== null) return;
  setRunning(new AbortController());
  $("verdict").textContent = "";
  for (const lane of ["off", "on"]) $(`lane-${lane}`).replaceChildren();
  for (const lane of ["off", "on"]) $(`lane-${lane}-figures`).textContent = "–";
  const run = (lane) => {
    const body = chatBody([{ role: "user", content }], { ...readSettings(), speculate: lane === "on" });
    const [place, figures] = [$(`lane-${lane}`), $(`lane-${lane}-figures`)];
    return runAnswer({ body, key: key(), signal: running.signal, place, figures, legend });
  };
  const isTogether = $("race-together").checked;
  const results = isTogether ? await Promise.all([run("off"), run("on")]) : [await run("off"), await run("on")];
  setRunning(null);
  $("verdict").textContent = verdict(...results);
}

function verdict(off, on) {
  if (off.error !== null || on.error !== null) return `No result: ${off.error ?? on.error}.`;
  const same = off.text === on.text ? "Both gave the same text." : "The texts differ.";
  return off.rate > 0 ? `${same} With speculation the tokens came ${(on.rate / off.rate).toFixed(2)} times as fast.` : same;
}

// -- what the server runs --------------------------------------------------------------------------------------------

async function showConfig() {
  const config = await getJson("specdec/config", key());
  const drafting = config.sources.length ? `drafts: ${config.sources.join(", ")}, up to ${config.num_speculative_tokens}` : "no speculation";
  $("what-runs").textContent = `${config.model} on ${config.device} (${config.dtype}); ${drafting}; specdec ${config.version}`;
  $("drafts").max = config.num_speculative_tokens;
  const room = Math.max(Math.floor(config.max_model_len / 2), 1); // half of the context stays for the conversation
  if (number("max-tokens", 0) > room) $("max-tokens").value = room;
  showCurl();
  const rows = config.report.map((row) => {
    const tr = document.createElement("tr");
    for (const value of [row.name, row.value ?? "–", row.source]) {
      const td = document.createElement("td");
      td.textContent = String(value);
      tr.append(td);
    }
    return tr;
  });
  $("config-rows").replaceChildren(...rows);
}

let hasConfig = false;

async function poll() {
  try {
    if (!hasConfig) await showConfig();
    hasConfig = true;
    readings.push(await getJson("specdec/stats", key()));
    notice("");
    if (!$("panel-charts").hidden) charts.draw(readings);
  } catch (error) {
    hasConfig = false;
    if (error.status === 401) $("key-field").hidden = false;
    notice(error.status === undefined ? "The server does not answer." : error.message);
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

// -- wiring ----------------------------------------------------------------------------------------------------------

for (const tab of tabs) tab.addEventListener("click", () => select(tab));
$("tabs").addEventListener("keydown", moveBetweenTabs);
$("chat-form").addEventListener("submit", send);
$("chat-form").addEventListener("input", showCurl);
$("key").addEventListener("input", showCurl);
$("race-form").addEventListener("submit", race);
$("stop").addEventListener("click", () => running?.abort());
$("race-stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("show-rejected").addEventListener("change", (event) => $("log").classList.toggle("shows-rejected", event.target.checked));
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
$("copy-curl").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copied").textContent = "Copied.";
  } catch {
    $("copied").textContent = "The browser does not allow it here; select the text instead.";
  }
});
showCurl();
poll();
