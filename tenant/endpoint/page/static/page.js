// Sends messages to the endpoint, shows answers as they come, and what each answer has cost and who could see what.
// Texts from elsewhere become text nodes, never HTML.

import { events } from "./events.js";

const LEDGER_MS = 500;
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

const byId = (id) => document.getElementById(id);
let messages = []; // of this conversation
let answering = null; // the AbortController of the answer in progress
let before = null; // the ledger before the last question

// Small helpers

function count(number) {
  return number.toLocaleString("en");
}

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (bytes < 1024) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(2)} GiB`;
}

function add(parent, tag, text = "", className = "") {
  const child = document.createElement(tag);
  child.textContent = text;
  child.className = className;
  parent.append(child);
  return child;
}

function describe(list, names, figures) {
  list.replaceChildren();
  for (const [name, [label, format]] of Object.entries(names)) {
    const row = add(list, "div");
    add(row, "dt", label);
    add(row, "dd", format(figures[name] ?? 0)).dataset.figure = name;
  }
}

// Requests

async function request(path, options = {}) {
  const headers = { ...options.headers, Authorization: `Bearer ${sessionStorage.getItem("key") ?? ""}` };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) {
    await askForKey(sessionStorage.getItem("key") ? "The endpoint does not accept this key." : "");
    return request(path, options);
  }
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the endpoint answered ${response.status}`);
}

let asked = null;
function askForKey(reason, key = "") {
  asked ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-reason").textContent = reason;
    byId("key").value = key;
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue === "continue") sessionStorage.setItem("key", byId("key").value.trim());
        byId("key").value = "";
        asked = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asked;
}

async function takeKeyFromAddress() {
  // The part after # is in no request. It leaves the address bar and the history, too. A link may be somebody else's.
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (location.hash) history.replaceState(null, "", location.pathname);
  if (!key || key === sessionStorage.getItem("key")) return;
  await askForKey("This key is from the link. Continue only if your own tenant serve has printed it.", key);
}

async function showModels() {
  const { data } = await (await request("v1/models")).json();
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren();
  for (const { id, parent } of data) {
    const option = add(select, "option", parent ? id : `${id} (base model)`);
    option.value = id;
    option.selected = id === chosen;
  }
}

// The ledger

async function sessionLedger() {
  return (await request("ledger")).json();
}

async function recount() {
  if (before) showProviders(await sessionLedger());
}

function showProviders(now) {
  const earlier = new Map(before.providers.map((one) => [`${one.role} ${one.name}`, one]));
  const place = byId("providers");
  place.replaceChildren();
  for (const one of now.providers) {
    const then = earlier.get(`${one.role} ${one.name}`) ?? {};
    const article = add(place, "article");
    article.dataset.provider = one.name;
    add(article, "h4", one.name === one.role ? one.role : `${one.role} ${one.name}`);
    add(article, "p", `${one.operator}, ${one.address}, ${one.state}`);
    const since = Object.fromEntries(Object.keys(COUNTED).map((name) => [name, one[name] - (then[name] ?? 0)]));
    describe(add(article, "dl"), COUNTED, since);
    add(article, "p", `It saw ${one.sees}.`);
  }
  if (!now.providers.length) add(place, "p", "No provider was asked.");
  byId("scheme").textContent =
    `Masking ${now.masking}. Rows can be read by: ${now.summary}. This rests on: ${now.assumption}. ` +
    `Providers and the network always see ${now.visible}. Requests to providers are counted from your question on; ` +
    "those of other answers at the same time are among them.";
}

// A conversation

function bubble(role, heading) {
  const article = add(byId("chat"), "article", "", role);
  add(article, "h3", heading);
  const text = add(article, "p");
  byId("chat").scrollTop = byId("chat").scrollHeight;
  return { article, text };
}

// Keeps the end of the conversation in view, unless the user has scrolled up to read.
function follow(change) {
  const chat = byId("chat");
  const atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 48;
  change();
  if (atEnd) chat.scrollTop = chat.scrollHeight;
}

async function ask(message) {
  const model = byId("model").value;
  const conversation = messages;
  const sent = [...conversation, { role: "user", content: message }];
  bubble("user", "You").text.textContent = message;
  const { article, text } = bubble("assistant", model);
  article.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
  answering = new AbortController();
  const began = performance.now();
  let tokens = 0;
  try {
    before = await sessionLedger();
    byId("subject").textContent = `What left your machine for this answer of ${model}:`;
    describe(byId("costs"), COSTS, {});
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: answering.signal,
      body: JSON.stringify({
        model,
        messages: sent,
        temperature: Number(byId("temperature").value),
        max_completion_tokens: Number(byId("tokens").value),
        stream: true,
        stream_options: { include_usage: true, include_ledger: true },
      }),
    });
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      follow(() => text.append(chunk.choices?.[0]?.delta?.content ?? ""));
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const costs = chunk.usage?.ledger ?? chunk.ledger;
      if (costs) describe(byId("costs"), COSTS, costs);
      byId("status").textContent = "Answering";
    }
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    byId("status").textContent = text.textContent
      ? `Answered: ${count(tokens)} tokens in ${seconds} s.`
      : "The model ended its answer at once.";
  } catch (error) {
    if (error.name === "AbortError") byId("status").textContent = "Stopped.";
    else {
      const unreachable = error instanceof TypeError; // the text of fetch's own errors helps nobody
      const why = unreachable ? "The endpoint cannot be reached. Check that tenant serve runs." : error.message;
      follow(() => add(article, "p", why, "error").setAttribute("role", "alert"));
      byId("status").textContent = "No answer. Your message is below: send it again.";
      byId("message").value ||= message;
    }
  } finally {
    await recount().catch(() => {});
    article.removeAttribute("aria-busy");
    answering = null;
  }
  const kept = text.textContent && messages === conversation; // there may be a new chat by now
  if (kept) messages = [...sent, { role: "assistant", content: text.textContent }];
}

// Controls

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const message = byId("message").value.trim();
  if (!message || answering) return;
  byId("message").value = "";
  byId("send").disabled = true;
  byId("stop").disabled = false;
  await ask(message);
  byId("send").disabled = false;
  byId("stop").disabled = true;
  byId("message").focus();
});

byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => answering?.abort());

byId("clear").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  byId("chat").replaceChildren();
  byId("status").textContent = "";
  byId("message").focus();
});

byId("model").addEventListener("focus", () => showModels().catch(() => {})); // adapters come and go

// States of providers change after an answer, too.
setInterval(() => !document.hidden && !asked && recount().catch(() => {}), LEDGER_MS);

takeKeyFromAddress()
  .then(showModels)
  .then(
    () => byId("message").focus(),
    (error) => (byId("status").textContent = error.message),
  );
