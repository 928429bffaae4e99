// Shows Markdown as elements: paragraphs, headings, lists, quotes, tables, code blocks, and bold, italic and code within
// a line.
//
// Texts become text nodes, never HTML. Links and pictures stay text: a model could hide words of the conversation in an
// address, and opening it would tell them to that server.

import { add, copyButton } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)/;
const QUOTE = /^ {0,3}> ?/;
const UNDER_HEADINGS = /^[\s|:-]*-[\s|:-]*\|[\s|:-]*$/; // of a table
const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=\S)([^*]+?)\*/;

// Replaces what `place` shows.
export function show(place, text) {
  place.replaceChildren();
  blocks(place, text.split("\n"));
}

function blocks(place, lines) {
  let at = 0;
  const taken = (goesOn) => {
    const begin = at;
    while (at < lines.length && goesOn(lines[at])) at++;
    return lines.slice(begin, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(FENCE);
    const heading = line.match(HEADING);
    if (fence) {
      at++;
      codeBlock(place, taken((one) => !one.trim().startsWith(fence[1])).join("\n"), fence[2]);
      at++;
    } else if (heading) {
      inline(addText(place, `h${Math.min(heading[1].length + 3, 6)}`), heading[2]);
      at++;
    } else if (RULE.test(line)) {
      add(place, "hr");
      at++;
    } else if (ITEM.test(line)) {
      at = list(place, lines, at);
    } else if (QUOTE.test(line)) {
      blocks(addText(place, "blockquote"), taken((one) => QUOTE.test(one)).map((one) => one.replace(QUOTE, "")));
    } else if (line.includes("|") && UNDER_HEADINGS.test(lines[at + 1] ?? "")) {
      table(place, taken((one) => one.includes("|")));
    } else if (!line.trim()) {
      at++;
    } else {
      at++;
      inline(addText(place, "p"), [line, ...taken((one) => one.trim() && !isBlock(one))].join("\n"));
    }
  }
}

function isBlock(line) {
  return [FENCE, HEADING, RULE, ITEM, QUOTE].some((kind) => kind.test(line));
}

// Adds a list whose items may have lists and code blocks in them. Returns the number of the line after it.
function list(place, lines, at) {
  const [, margin, number] = lines[at].match(ITEM);
  const made = addText(place, number ? "ol" : "ul");
  if (number) made.start = Number(number);
  const isInside = (line) => line?.search(/\S/) >= margin.length + 2;
  const isItem = (line) => ITEM.test(line ?? "") && !isInside(line) && Boolean(line.match(ITEM)[2]) === Boolean(number);
  while (isItem(lines[at])) {
    const [whole, , , first] = lines[at++].match(ITEM);
    const item = [first];
    for (; at < lines.length; at++) {
      const next = lines.slice(at).find((line) => line.trim());
      if (lines[at].trim() ? !isInside(lines[at]) : !isInside(next)) break;
      item.push(lines[at].slice(Math.min(whole.length - first.length, Math.max(0, lines[at].search(/\S/)))));
    }
    blocks(add(made, "li"), item);
    const next = lines.findIndex((line, number) => number >= at && line.trim());
    if (isItem(lines[next])) at = next;
  }
  return at;
}

function table(place, [headings, under, ...rows]) {
  const made = addText(place, "table");
  const sides = cells(under).map((one) => (one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : one.startsWith(":") ? "left" : ""));
  for (const [line, tag] of [[headings, "th"], ...rows.map((row) => [row, "td"])]) {
    const row = add(made, "tr");
    cells(line).forEach((cell, at) => {
      const shown = add(row, tag);
      shown.style.textAlign = sides[at] ?? "";
      inline(shown, cell);
    });
  }
}

function cells(line) {
  const inner = line.trim().replace(/^\||(?<!\\)\|$/g, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function codeBlock(place, code, language) {
  const figure = add(place, "figure");
  const caption = add(figure, "figcaption", language || "code");
  caption.append(copyButton(code));
  figure.dir = "ltr";
  add(add(figure, "pre"), "code", code);
}

// Each paragraph, list, quote and table runs in the direction of its own language.
function addText(place, tag) {
  const made = add(place, tag);
  if (!place.closest("[dir]")) made.dir = "auto"; // what is inside has the same direction
  return made;
}

function inline(place, text) {
  for (let found; (found = text.match(INLINE)); text = text.slice(found.index + found[0].length)) {
    place.append(text.slice(0, found.index));
    if (found[2] !== undefined) add(place, "code", found[2]);
    else inline(add(place, found[3] === undefined ? "em" : "strong"), found[3] ?? found[4]);
  }
  place.append(text);
}
