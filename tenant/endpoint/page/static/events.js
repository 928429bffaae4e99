// Yields the JSON objects of a stream of server-sent events, up to `[DONE]`.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the answer was cut off; ask again");
      const parts = (text + value).split(/\r\n\r\n|\n\n/);
      text = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
