// Shows Markdown as elements: paragraphs, headings, lists, quotes, code blocks, and bold, italic and code within a line.
//
// Texts become text nodes, never HTML. Links and pictures stay text: a model could hide words of the conversation in an
// address, and opening it would tell them to that server.

import { add, copyButton } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)/;
const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=\S)([^*]+?)\*/;

// Replaces what `place` shows.
export function show(place, text) {
  place.replaceChildren();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(FENCE);
    const heading = line.match(HEADING);
    if (fence) {
      const begin = ++at;
      while (at < lines.length && !lines[at].trim().startsWith(fence[1])) at++;
      codeBlock(place, lines.slice(begin, at).join("\n"), fence[2]);
      at++;
    } else if (heading) {
      inline(add(place, `h${Math.min(heading[1].length + 3, 6)}`), heading[2]);
      at++;
    } else if (ITEM.test(line)) {
      const list = add(place, line.match(ITEM)[1] ? "ul" : "ol");
      if (line.match(ITEM)[2]) list.start = Number(line.match(ITEM)[2]);
      for (; at < lines.length && ITEM.test(lines[at]); at++) inline(add(list, "li"), lines[at].match(ITEM)[3]);
    } else if (line.startsWith(">")) {
      const quoted = [];
      for (; at < lines.length && lines[at].startsWith(">"); at++) quoted.push(lines[at].replace(/^>\s?/, ""));
      inline(add(add(place, "blockquote"), "p"), quoted.join("\n"));
    } else if (!line.trim()) {
      at++;
    } else {
      const begin = at++;
      while (at < lines.length && lines[at].trim() && !isBlock(lines[at])) at++;
      inline(add(place, "p"), lines.slice(begin, at).join("\n"));
    }
  }
}

function isBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">");
}

function codeBlock(place, code, language) {
  const figure = add(place, "figure");
  const caption = add(figure, "figcaption", language || "code");
  caption.append(copyButton(code));
  add(add(figure, "pre"), "code", code);
}

function inline(place, text) {
  for (let found; (found = text.match(INLINE)); text = text.slice(found.index + found[0].length)) {
    place.append(text.slice(0, found.index));
    if (found[2] !== undefined) add(place, "code", found[2]);
    else inline(add(place, found[3] === undefined ? "em" : "strong"), found[3] ?? found[4]);
  }
  place.append(text);
}
