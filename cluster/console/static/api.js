// Asking the console's server: requests, and streams that come back by themselves.

const SILENT_MS = 25_000;
const FIRST_MS = 500;
const LONGEST_MS = 15_000;

export class Refused extends Error {
  constructor(status, error) {
    super(error.message || `HTTP ${status}`);
    this.status = status;
    this.hint = error.hint || "";
  }
}

// Where the page is, there is the server: a proxy may have it below a path of its own.
export const here = (path) => path.replace(/^\//, "");

async function answer(response) {
  const data = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, data.error || {});
  return data;
}

export async function get(path) {
  return answer(await fetch(here(path), { headers: { accept: "application/json" } }));
}

export async function post(path, body = {}) {
  return answer(await fetch(here(path), {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  }));
}

export const of = (session) => `/api/sessions/${encodeURIComponent(session)}`;

// Server-sent events by name. A new connection says which event was the last, so that none is missing and none comes twice.
// `state` is called with "live" or "reconnecting"; `refused` with an error that no new try would mend.
export function stream(path, handlers, { state, refused, check }) {
  let source, timer, watch, last = "", delay = FIRST_MS, closed = false;

  function again() {
    source.close();
    clearTimeout(watch);
    if (closed) return;
    state("reconnecting");
    timer = setTimeout(retry, delay * (0.5 + Math.random() / 2));
    delay = Math.min(LONGEST_MS, delay * 2);
  }

  async function retry() {
    try {
      await check(); // an EventSource does not say why it ended
    } catch (error) {
      if (closed) return;
      if (error instanceof Refused && error.status < 500) return refused(error);
      timer = setTimeout(retry, delay);
      delay = Math.min(LONGEST_MS, delay * 2);
      return;
    }
    if (!closed) open();
  }

  function heard() {
    clearTimeout(watch);
    watch = setTimeout(again, SILENT_MS);
  }

  function open() {
    source = new EventSource(here(last ? `${path}?last=${encodeURIComponent(last)}` : path));
    heard();
    source.onopen = () => { delay = FIRST_MS; state("live"); heard(); };
    source.onerror = again;
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        heard();
        if (event.lastEventId) last = event.lastEventId;
        handle(JSON.parse(event.data));
      });
    }
  }

  open();
  return () => { closed = true; clearTimeout(timer); clearTimeout(watch); source.close(); };
}
