// Pictures for the model. The browser decodes them and draws them again, smaller and without what a file says besides
// (where it was taken). They are shown on canvases, so that the page's policy allows no addresses of pictures.

import { add } from "./dom.js";

const MOST_BYTES = 20 << 20; // of a file, before it is read
const SIDE = 1280;

// Returns the data URL of a JPEG. Throws an error with a text for the user.
export async function read(file) {
  if (!file.type.startsWith("image/")) throw new Error(`${file.name} is not a picture.`);
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than ${MOST_BYTES >> 20} MiB. Choose a smaller one.`);
  const canvas = await drawn(file, SIDE).catch(() => null);
  if (!canvas) throw new Error(`The browser cannot read ${file.name}. Choose a PNG, JPEG or WebP picture.`);
  return canvas.toDataURL("image/jpeg", 0.9);
}

// Adds a small view of a picture of `read`.
export function show(place, url, name) {
  const view = add(place, "span", "", "picture");
  view.setAttribute("role", "img");
  view.setAttribute("aria-label", name);
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  drawn(new Blob([bytes]), 320).then((canvas) => view.append(canvas), () => (view.textContent = name));
  return view;
}

async function drawn(file, side) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, side / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas;
}
