// What left this machine for an answer, who could see what, and one row as it is here and as the executor saw it.

import { add, byId, count } from "./dom.js";

const COSTS = {
  rows: ["Rows sent", count],
  round_trips: ["Round trips to executors", count],
  answers_verified: ["Answer rows verified", count],
  answers_rejected: ["Answers refused", count],
  bytes_up: ["Sent to providers", size],
  bytes_down: ["Received from providers", size],
  cached_tokens: ["Tokens not sent again", count],
};
const COUNTED = {
  requests: ["Requests", count],
  bytes_sent: ["Sent to it", size],
  bytes_received: ["Received from it", size],
  verified: ["Answers verified", count],
  rejected: ["Answers refused", count],
};
const [BLUE, RED] = [[31, 95, 139], [205, 90, 30]];
const NOTHING_YET = byId("subject").textContent;

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (bytes < 1024) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(2)} GiB`;
}

function describe(list, names, figures, each = 0) {
  list.replaceChildren();
  for (const [name, [label, format]] of Object.entries(names)) {
    const row = add(list, "div");
    add(row, "dt", label);
    const found = figures[name] ?? 0;
    add(row, "dd", format(found)).dataset.figure = name;
    if (each && found && name !== "cached_tokens") add(row, "dd", `${format(Math.round(found / each))} per token`, "quiet");
  }
}

export function showCosts(costs, tokens) {
  describe(byId("costs"), COSTS, costs, tokens);
}

// What will be true of answers, before the first one.
export function showPromise(now) {
  const hidden = "The model runs on other machines. They compute with numbers that hide your text, and every answer is checked.";
  const exposed = `The model runs on machines that can read your text: this session uses the masking “${now.masking}”.`;
  byId("promise").textContent = now.exposed ? exposed : now.remote ? hidden : "The model runs on this machine alone.";
  byId("welcome").classList.toggle("exposed", now.exposed || !now.remote);
}

export function clear() {
  byId("subject").textContent = NOTHING_YET;
  byId("row").hidden = byId("figures").hidden = true;
}

// `before`: the ledger before the question, from which on requests are counted.
export function showProviders(now, before, costs) {
  const earlier = new Map(before.providers.map((one) => [`${one.role} ${one.name}`, one]));
  const place = byId("providers");
  place.replaceChildren();
  for (const one of now.providers) {
    const then = earlier.get(`${one.role} ${one.name}`) ?? {};
    const article = add(place, "article");
    article.dataset.provider = one.name;
    add(article, "h4", named(one));
    add(article, "p", `${one.operator}, ${one.address}, ${one.state}`);
    const since = Object.fromEntries(Object.keys(COUNTED).map((name) => [name, one[name] - (then[name] ?? 0)]));
    if (one.requests !== null) describe(add(article, "dl"), COUNTED, since); // counters are for the first key
    add(article, "p", `It sees ${one.sees}.`);
  }
  if (!now.remote) add(place, "p", "No provider was asked.");
  byId("figures").hidden = false;
  byId("subject").textContent = sentence(now, costs);
  byId("scheme").textContent =
    `Masking ${now.masking}. Rows can be read by: ${now.summary}. This rests on: ${now.assumption}. ` +
    `Providers and the network always see ${now.visible}. Requests to providers are counted from your question on; ` +
    "those of other answers at the same time are among them.";
}

function named({ name, role }) {
  return name === role ? role : `${role} ${name}`;
}

// Returns what a request waits for, and until when at most; an empty text if there is no such wait.
export function waiting({ providers }) {
  const one = providers.find(({ left_s }) => left_s > 0);
  if (!one) return "";
  const clock = (seconds) => new Date(Date.now() + 1000 * seconds).toLocaleTimeString("en-GB");
  const state = one.state === "down" ? "not reachable" : one.state;
  return `Waiting for ${named(one)}, ${state} since ${clock(-one.waited_s)}, gives up at ${clock(one.left_s)}.`;
}

function sentence(now, costs) {
  const executor = now.providers.find((one) => one.role === "executor");
  const helper = now.providers.find((one) => one.role === "helper");
  if (!executor) return now.exposed ? "The executor saw numbers from which it can read your text." : "Nothing left this machine.";
  if (!costs.rows) return "No row has left this machine for this answer.";
  const rows = `${count(costs.rows)} rows`;
  const [seen, others] = executor.hidden
    ? [`${rows} of integers that it cannot tell from random ones, and when they came`, "Nothing else left this machine."]
    : [`${rows} of numbers from which it can read your text`, ""];
  const seed = helper ? ` The helper saw ${helper.hidden ? "a random seed" : "numbers from which it can read your text"}.` : "";
  return `For this answer, the executor saw ${seen}.${seed} ${others}`;
}

// `row`: integers of the last token, `hidden` on this machine and those that the executor `saw`.
export function showRow(row) {
  byId("row").hidden = !row;
  if (!row) return;
  draw(byId("saw"), row.saw, (share) => Array(3).fill(128 + 127 * share));
  draw(byId("hides"), row.hidden, (share) => {
    const [own, strong] = [share < 0 ? BLUE : RED, Math.sqrt(Math.abs(share))]; // small numbers are seen beside large ones
    return own.map((part) => 255 + (part - 255) * strong);
  });
}

// Draws one cell per integer, each strip on its own scale; `colour` takes a share from -1 to 1.
function draw(canvas, integers, colour) {
  const most = integers.reduce((most, one) => Math.max(most, Math.abs(one)), 1);
  canvas.width = Math.ceil(Math.sqrt(8 * integers.length));
  while (integers.length % canvas.width && canvas.width ** 2 < 16 * integers.length) canvas.width++; // for whole lines
  canvas.height = Math.ceil(integers.length / canvas.width);
  const image = new ImageData(canvas.width, canvas.height);
  integers.forEach((one, at) => image.data.set([...colour(one / most), 255], 4 * at));
  canvas.getContext("2d").putImageData(image, 0, 0);
  const range = `${count(integers.length)} integers between ${count(Math.min(...integers))} and ${count(Math.max(...integers))}`;
  canvas.setAttribute("aria-label", range);
  canvas.nextElementSibling.textContent = range;
}
