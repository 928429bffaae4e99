// Drop a file on the message, or paste it.
([place, kind, file]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))], "a.png", { type: kind }));
  const given = { bubbles: true, cancelable: true };
  const event = place === "paste" ? new ClipboardEvent(place, { ...given, clipboardData: data })
    : new DragEvent(place, { ...given, dataTransfer: data });
  document.querySelector("#message").dispatchEvent(event);
}
