// Sends messages to the endpoint, shows answers as they come, and what each answer has cost and who could see what.
// Texts from elsewhere become text nodes, never HTML.

import * as chats from "./chats.js";
import { events } from "./events.js";
import { show } from "./markdown.js";

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
let chat = { id: crypto.randomUUID(), messages: [] };
let answering = null; // the AbortController of the answer in progress
let before = null; // the ledger before the last question
let costs = {}; // of the last answer
let tokens = 0;

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

function button(text, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "plain";
  made.textContent = text;
  made.addEventListener("click", action);
  return made;
}

function copyButton(text) {
  return button("Copy", async (event) => {
    await navigator.clipboard.writeText(text()).then(
      () => (event.target.textContent = "Copied"),
      () => (event.target.textContent = "The browser does not allow it"),
    );
    setTimeout(() => (event.target.textContent = "Copy"), 1500);
  });
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
  byId("subject").textContent = sentence(now);
  byId("scheme").textContent =
    `Masking ${now.masking}. Rows can be read by: ${now.summary}. This rests on: ${now.assumption}. ` +
    `Providers and the network always see ${now.visible}. Requests to providers are counted from your question on; ` +
    "those of other answers at the same time are among them.";
}

// What left this machine for the last answer, in one sentence.
function sentence(now) {
  const executor = now.providers.find((one) => one.role === "executor");
  const helper = now.providers.find((one) => one.role === "helper");
  if (!executor) return "Nothing left this machine.";
  const rows = `${count(costs.rows ?? 0)} rows`;
  const [seen, others] = executor.hidden
    ? [`${rows} of integers that it cannot tell from random ones, and when they came`, "Nothing else left this machine."]
    : [`${rows} of numbers from which it can read your text`, ""];
  const seed = helper ? ` The helper saw ${helper.hidden ? "a random seed" : "numbers from which it can read your text"}.` : "";
  return `For this answer, the executor saw ${seen}.${seed} ${others}`;
}

// A conversation

function bubble(role, heading) {
  byId("welcome").hidden = true;
  const article = add(byId("chat"), "article", "", role);
  add(article, "h3", heading);
  const text = add(article, "div", "", "text");
  const actions = add(article, "div", "", "actions");
  byId("chat").scrollTop = byId("chat").scrollHeight;
  return { article, text, actions };
}

function showMessage(at) {
  const { role, content } = chat.messages[at];
  const { article, text, actions } = bubble(role, role === "user" ? "You" : "Answer");
  article.dataset.text = content;
  if (role === "user") {
    text.textContent = content;
    actions.append(button("Edit", () => edit(at)));
  } else {
    show(text, content, copyButton);
    actions.append(
      copyButton(() => content),
      button("Regenerate", () => regenerate(at)),
    );
  }
}

function showChat() {
  byId("chat").querySelectorAll("article").forEach((article) => article.remove());
  byId("welcome").hidden = chat.messages.length > 0;
  chat.messages.forEach((_, at) => showMessage(at));
  byId("status").textContent = "";
}

function showChats() {
  const list = byId("chats");
  list.replaceChildren();
  for (const one of chats.all()) {
    const item = add(list, "li");
    const open = button(one.title, () => openChat(one));
    open.setAttribute("aria-current", one.id === chat.id);
    const remove = button("Delete", () => {
      chats.remove(one.id);
      if (one.id === chat.id) openChat({ id: crypto.randomUUID(), messages: [] });
      showChats();
    });
    remove.setAttribute("aria-label", `Delete the chat ${one.title}`);
    item.append(open, remove);
  }
  byId("forget").hidden = !list.children.length;
}

function openChat(one) {
  answering?.abort();
  chat = one;
  showChat();
  showChats();
  if (isNarrow.matches) byId("history").open = false;
  byId("message").focus();
}

function edit(at) {
  if (answering) return;
  byId("message").value = chat.messages[at].content;
  chat.messages = chat.messages.slice(0, at);
  showChat();
  byId("message").focus();
}

function regenerate(at) {
  if (answering) return;
  const question = chat.messages[at - 1].content;
  chat.messages = chat.messages.slice(0, at - 1);
  showChat();
  send(question);
}

// Keeps the end of the conversation in view, unless the user has scrolled up to read.
function follow(change) {
  const place = byId("chat");
  const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 48;
  change();
  if (atEnd) place.scrollTop = place.scrollHeight;
}

async function ask(message) {
  const model = byId("model").value;
  const asking = chat;
  const sent = [...asking.messages, { role: "user", content: message }];
  bubble("user", "You").text.textContent = message;
  const { article, text } = bubble("assistant", model);
  article.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
  answering = new AbortController();
  const began = performance.now();
  let answer = "";
  [tokens, costs] = [0, {}];
  try {
    before = await sessionLedger();
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
    let chunks = 0;
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      answer += chunk.choices?.[0]?.delta?.content ?? "";
      follow(() => show(text, answer, copyButton));
      chunks += 1;
      tokens = chunk.usage?.completion_tokens ?? tokens;
      costs = chunk.usage?.ledger ?? chunk.ledger ?? costs;
      describe(byId("costs"), COSTS, costs, tokens || chunks);
      byId("status").textContent = `Answering, ${(chunks / secondsSince(began)).toFixed(1)} tokens per second`;
    }
    byId("status").textContent = answer ? speed(secondsSince(began)) : "The model ended its answer at once.";
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
    answering = null;
    article.dataset.text = answer;
    await recount().catch(() => {});
    article.removeAttribute("aria-busy");
  }
  if (!answer || chat !== asking) return; // there may be a new chat by now
  const status = byId("status").textContent;
  asking.messages = [...sent, { role: "assistant", content: answer }];
  chats.keep(asking.id, asking.messages);
  const kept = [...byId("chat").querySelectorAll(".error")];
  follow(showChat);
  byId("chat").lastElementChild.append(...kept);
  byId("status").textContent = status;
  showChats();
}

function secondsSince(began) {
  return Math.max(performance.now() - began, 1) / 1000;
}

function speed(seconds) {
  const trips = tokens ? Math.round((costs.round_trips ?? 0) / tokens) : 0;
  const each = trips ? `, ${count(trips)} round trips to the executor for each` : "";
  return `${count(tokens)} tokens in ${seconds.toFixed(1)} s: ${(tokens / seconds).toFixed(1)} per second${each}.`;
}

async function send(message) {
  if (!message || answering) return;
  byId("send").disabled = true;
  byId("stop").disabled = false;
  await ask(message);
  byId("send").disabled = false;
  byId("stop").disabled = true;
  byId("message").focus();
}

// Controls

const isNarrow = matchMedia("(max-width: 60rem)");

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const message = byId("message").value.trim();
  if (message && !answering) byId("message").value = "";
  send(message);
});

byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});

byId("examples").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") send(event.target.textContent);
});

byId("stop").addEventListener("click", () => answering?.abort());

byId("clear").addEventListener("click", () => openChat({ id: crypto.randomUUID(), messages: [] }));

byId("forget").addEventListener("click", () => {
  chats.removeAll();
  openChat({ id: crypto.randomUUID(), messages: [] });
});

byId("open-settings").addEventListener("click", () => byId("settings").showModal());

for (const [name, usual] of Object.entries({ temperature: "0.7", tokens: "1024" })) {
  byId(name).value = localStorage.getItem(name) ?? usual;
  byId(name).addEventListener("change", () => localStorage.setItem(name, byId(name).value));
}

byId("model").addEventListener("focus", () => showModels().catch(() => {})); // adapters come and go

function fit() {
  byId("history").open = byId("ledger").open = !isNarrow.matches;
}

isNarrow.addEventListener("change", fit);
fit();
showChats();

// States of providers change after an answer, too.
setInterval(() => !document.hidden && !asked && recount().catch(() => {}), LEDGER_MS);

takeKeyFromAddress()
  .then(showModels)
  .then(
    () => byId("message").focus(),
    (error) => (byId("status").textContent = error.message),
  );
