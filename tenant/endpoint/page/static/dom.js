// Makes elements. Texts become text nodes, never HTML.

export const byId = (id) => document.getElementById(id);

export function add(parent, tag, text = "", className = "") {
  const child = document.createElement(tag);
  child.textContent = text;
  child.className = className;
  parent.append(child);
  return child;
}

export function button(text, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "plain";
  made.textContent = text;
  made.addEventListener("click", action);
  return made;
}

export function copyButton(text) {
  return button("Copy", async (event) => {
    await navigator.clipboard.writeText(text).then(
      () => (event.target.textContent = "Copied"),
      () => (event.target.textContent = "The browser does not allow it"),
    );
    setTimeout(() => (event.target.textContent = "Copy"), 1500);
  });
}

export function count(number) {
  return number.toLocaleString("en");
}
