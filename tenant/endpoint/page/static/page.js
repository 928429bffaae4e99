// Sends messages to the endpoint, shows answers as they come, and keeps the conversation.

import * as chats from "./chats.js";
import { add, button, byId, copyButton, count } from "./dom.js";
import { events } from "./events.js";
import * as ledger from "./ledger.js";
import { show } from "./markdown.js";

const LEDGER_MS = 500;
const HERE = /^(localhost|127\.[0-9.]+|\[::1\])$/; // rows are shown to browsers on the endpoint's machine only

const isNarrow = matchMedia("(max-width: 60rem)");
// { id, messages: [{ role, content, model }] }. A reload opens it again.
let chat = chats.all().find(({ id }) => id === sessionStorage.getItem("open")) ?? newChat();
let answering = null; // the AbortController of the answer in progress
let progress = ""; // of the answer; shown while no provider is waited for
let before = null; // the ledger before the last question
let costs = {}; // of the last answer

function newChat() {
  return { id: crypto.randomUUID(), messages: [] };
}

function say(text) {
  byId("status").textContent = text;
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
function askForKey(problem, linked = "") {
  asked ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-problem").textContent = problem;
    byId("key-linked").hidden = !linked;
    byId("key-typed").hidden = Boolean(linked);
    byId("key").value = linked;
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
  await askForKey("", key);
}

async function showModels() {
  const { data } = await (await request("v1/models")).json();
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren();
  for (const { id, parent } of data) {
    const option = add(select, "option", parent || data.length === 1 ? id : `${id} (base model)`);
    option.value = id;
    option.selected = id === chosen;
  }
}

async function sessionLedger() {
  const now = await (await request("ledger")).json();
  ledger.showPromise(now);
  return now;
}

async function recount() {
  const since = before;
  const now = since && (await sessionLedger());
  if (!since || since !== before) return;
  ledger.showProviders(now, since, costs);
  if (!answering) return;
  const wait = ledger.waiting(now);
  byId("status").ariaBusy = wait ? null : "true"; // screen readers read what is waited for
  if (byId("status").textContent !== (wait || progress)) say(wait || progress);
}

// A conversation

function bubble(role, heading) {
  byId("welcome").hidden = true;
  const article = add(byId("chat"), "article", "", role);
  add(article, "h3", heading);
  const text = add(article, "div", "", "text");
  byId("chat").scrollTop = byId("chat").scrollHeight;
  return { article, text };
}

function showMessage({ role, content, model }, at) {
  const { article, text } = bubble(role, role === "user" ? "You" : (model ?? "Answer"));
  article.dataset.text = content;
  if (role === "user") add(text, "div", content).dir = "auto";
  else show(text, content);
  if (at !== undefined) addActions(article, at);
  return article;
}

function addActions(article, at) {
  const { role, content } = chat.messages[at];
  const actions = add(article, "div", "", "actions");
  if (role === "assistant") actions.append(copyButton(content), button("Regenerate", () => askAgain(at - 1)));
  else actions.append(button("Edit", () => edit(article, at)));
  if (role === "user" && at === chat.messages.length - 1) actions.append(button("Try again", () => askAgain(at)));
}

function showChat() {
  byId("chat").ariaLive = "off"; // screen readers read new answers only
  byId("chat").querySelectorAll("article").forEach((article) => article.remove());
  byId("welcome").hidden = chat.messages.length > 0;
  chat.messages.forEach(showMessage);
  say("");
}

function showChats() {
  const list = byId("chats");
  list.replaceChildren();
  for (const one of chats.all()) {
    const item = add(list, "li");
    const open = button(one.title, () => openChat(one));
    open.dir = "auto";
    open.setAttribute("aria-current", one.id === chat.id);
    const remove = button("×", () => {
      if (!confirm(`Delete the chat “${one.title}”?`)) return;
      chats.remove(one.id);
      if (one.id === chat.id) openChat(newChat());
      showChats();
      write();
    });
    remove.setAttribute("aria-label", `Delete the chat ${one.title}`);
    item.append(open, remove);
  }
  byId("forget").hidden = !list.children.length;
}

function openChat(one) {
  answering?.abort();
  [chat, before, costs] = [one, null, {}];
  sessionStorage.setItem("open", chat.id);
  ledger.clear();
  showChat();
  showChats();
  if (isNarrow.matches) byId("history").open = false;
  write();
}

// Puts the cursor into the message, unless the user edits another one. On a phone, that would open the keyboard over the
// answer.
function write() {
  if (!isNarrow.matches && !document.activeElement?.matches("#chat textarea")) byId("message").focus();
}

// Lets the user change a question where it stands. The answers after it go when the new one is sent.
function edit(article, at) {
  const { content } = chat.messages[at];
  const place = article.querySelector(".text");
  const replaced = [place.lastChild, article.querySelector(".actions")];
  const form = add(place, "form");
  const close = () => {
    form.remove();
    replaced.forEach((one) => (one.hidden = false));
  };
  const box = add(form, "textarea", content);
  box.dir = "auto";
  box.ariaLabel = "Edited message";
  box.addEventListener("keydown", (event) => (event.key === "Escape" ? close() : sendOnEnter(event)));
  form.append(button("Cancel", close));
  add(form, "button", "Send", "primary");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = box.value.trim();
    if (text) askAgain(at, text);
  });
  replaced.forEach((one) => (one.hidden = true));
  box.focus();
}

// Asks a question of this chat again, or another one in its place.
function askAgain(at, content = chat.messages[at].content) {
  if (answering) return;
  chat.messages = chat.messages.slice(0, at);
  showChat();
  send(content);
}

// Keeps the end of the conversation in view, unless the user has scrolled up to read.
function follow(change) {
  const place = byId("chat");
  const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 48;
  change();
  if (atEnd) place.scrollTop = place.scrollHeight;
}

async function ask(content) {
  const model = byId("model").value;
  const asking = chat;
  if (asking.messages.at(-1)?.role === "user") {
    asking.messages.pop(); // without an answer, and not asked again
    showChat();
  }
  const at = asking.messages.length;
  asking.messages.push({ role: "user", content });
  keep(asking);
  byId("chat").ariaLive = "polite";
  const question = showMessage(asking.messages[at]);
  const { article, text } = bubble("assistant", model);
  for (const busy of [article, byId("status")]) busy.ariaBusy = "true"; // screen readers wait for the whole answer
  setAnswering(new AbortController());
  const began = performance.now();
  let [answer, tokens, chunks, isWhole] = ["", 0, 0, false];
  const tell = (said) => {
    progress = said;
    if (byId("status").ariaBusy) say(said);
  };
  costs = {};
  ledger.showRow(null);
  tell("Waiting for the first token");
  try {
    before = await sessionLedger();
    ledger.showCosts(costs, 0);
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: answering.signal,
      body: JSON.stringify({
        model,
        messages: asking.messages.map(({ role, content }) => ({ role, content })),
        temperature: Number(byId("temperature").value),
        max_completion_tokens: Number(byId("tokens").value),
        stream: true,
        stream_options: { include_usage: true, include_ledger: true, include_row: HERE.test(location.hostname) },
      }),
    });
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content ?? "";
      answer += piece;
      if (piece) follow(() => show(text, answer));
      chunks += chunk.choices?.length ? 1 : 0;
      tokens = chunk.usage?.completion_tokens ?? tokens;
      costs = chunk.usage?.ledger ?? chunk.ledger ?? costs;
      ledger.showCosts(costs, tokens || chunks);
      if (chunk.usage) ledger.showRow(chunk.usage.row);
      if (answer) tell(`Answering, ${(chunks / secondsSince(began)).toFixed(1)} tokens per second`);
    }
    isWhole = Boolean(answer);
    follow(() => say(answer ? speed(tokens, secondsSince(began)) : "The model ended its answer at once."));
  } catch (error) {
    if (chat !== asking) return; // the question stays in its chat
    if (error.name === "AbortError") {
      isWhole = Boolean(answer); // as far as the user wanted it
      if (!isWhole) return takeBack(at);
      say("Stopped.");
    } else {
      const unreachable = error instanceof TypeError; // the text of fetch's own errors helps nobody
      const why = unreachable ? "The endpoint cannot be reached. Check that tenant serve runs." : error.message;
      follow(() => add(article, "p", why, "error").setAttribute("role", "alert"));
      say(answer ? "This answer is not complete, and is not kept." : "No answer.");
    }
  } finally {
    setAnswering(null);
    byId("status").ariaBusy = null;
    article.dataset.text = answer;
    await recount().catch(() => {});
    article.ariaBusy = null;
  }
  if (chat !== asking) return; // there may be a new chat by now
  if (isWhole) asking.messages.push({ role: "assistant", content: answer, model });
  keep(asking);
  follow(() => [question, article].slice(0, isWhole ? 2 : 1).forEach((one, after) => addActions(one, at + after)));
}

function setAnswering(controller) {
  answering = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
}

function keep({ id, messages }) {
  chats.keep(id, messages, messages[0].content);
  sessionStorage.setItem("open", id);
  showChats();
}

// Puts a question that was stopped before its answer began into the empty message box; else it stays in the chat.
function takeBack(at) {
  if (!byId("message").value) {
    byId("message").value = chat.messages.pop().content;
    if (chat.messages.length) keep(chat);
    else chats.remove(chat.id);
    showChats();
  }
  showChat();
  say("Stopped.");
}

function secondsSince(began) {
  return Math.max(performance.now() - began, 1) / 1000;
}

function speed(tokens, seconds) {
  const trips = tokens ? Math.round((costs.round_trips ?? 0) / tokens) : 0;
  const least = (trips / 100).toFixed(1);
  const each = trips ? ` Each waits for ${count(trips)} round trips: with providers 10 ms away, ${least} s at least.` : "";
  return `${count(tokens)} tokens in ${seconds.toFixed(1)} s, ${(tokens / seconds).toFixed(1)} per second.${each}`;
}

async function send(content) {
  if (!content || answering) return;
  write();
  await ask(content);
  write();
}

// Controls

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || answering) return byId("message").focus();
  byId("message").value = "";
  send(text);
});

function sendOnEnter(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

byId("message").addEventListener("keydown", sendOnEnter);

byId("examples").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") send(event.target.textContent);
});

byId("stop").addEventListener("click", () => answering?.abort());

byId("clear").addEventListener("click", () => openChat(newChat()));

byId("forget").addEventListener("click", () => {
  if (!confirm("Delete all chats of this browser?")) return;
  chats.removeAll();
  openChat(newChat());
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

for (const [one, other] of [["history", "ledger"], ["ledger", "history"]]) {
  byId(one).addEventListener("toggle", ({ target }) => {
    if (target.open && isNarrow.matches) byId(other).open = false;
  });
}

isNarrow.addEventListener("change", fit);
fit();
showChats();
showChat();

// States of providers change after an answer, too.
setInterval(() => !document.hidden && !asked && recount().catch(() => {}), LEDGER_MS);

takeKeyFromAddress()
  .then(showModels)
  .then(sessionLedger)
  .then(write, (error) => say(error.message));
