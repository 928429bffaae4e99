// Events are read wherever their bytes are cut (test_router.py runs it beside events.js).

import { events } from "./events.js";

async function values(...parts) {
  const found = [];
  const body = new ReadableStream({ start(c) { parts.forEach((part) => c.enqueue(part)); c.close(); } });
  for await (const one of events(body)) found.push(one.a);
  return found.join();
}

const text = ': ping\r\n\r\ndata: {"a": "é"}\r\n\r\ndata: {"a": 2}\n\ndata: [DONE]\n\n';
const bytes = new TextEncoder().encode(text);
for (let cut = 0; cut <= bytes.length; cut++) {
  const found = await values(bytes.slice(0, cut), bytes.slice(cut));
  if (found !== "é,2") throw new Error(`cut at ${cut}: ${found}`);
}
const end = await values(bytes.slice(0, 40)).catch((error) => error.message);
if (!end.includes("cut off")) throw new Error(`no error at an early end: ${end}`);
