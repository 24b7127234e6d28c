// The stream of the fleet's states. It goes by fetch: a browser's EventSource cannot show a token.

const KEY = "weightplane-token";

/** The coordinator wants to know who asks, or does not let this one look. */
export class Refused extends Error {}

/** Kept while the tab is open, and sent to the page's own coordinator alone. */
export function keepToken(token) {
  sessionStorage.setItem(KEY, token.trim());
}

/** Each state as it comes, until the stream ends. Throws Refused, or whatever keeps a connection from coming about. */
export async function* states() {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch("/api/watch", { headers, cache: "no-store" });
  if (response.status === 401 || response.status === 403) throw new Refused((await response.text()).trim());
  if (!response.ok) throw new Error((await response.text()).trim());
  yield* events(response.body.pipeThrough(new TextDecoderStream()).getReader());
}

async function* events(reader) {
  const parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    while (lines.length > 1) {
      const line = parts.splice(0).join("") + lines.shift();
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
    parts.push(lines[0]);
  }
}
