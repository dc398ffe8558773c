/* A run's events as they happen. EventSource cannot send an Authorization header, so this reads the stream with fetch.
 *
 *    connect (Last-Event-ID) ──▶ bytes ──▶ Parser ──▶ onEvent ──▶ `end`: done
 *        ▲                         └─ cut, silent for 25 s, or `dropped` (this page was too slow)
 *        └── wait 0.5 s, 1 s, 2 s … at most 10 s, less a random part; at once when the network comes back ──┘
 */

import { Problem } from "./service.js";

const SILENCE = 25_000; // ms; the server sends a heartbeat every 10 s
const FIRST = 500;
const LONGEST = 10_000;

/** Server-sent events from pieces of text that are cut anywhere (HTML living standard, 9.2.6). */
export class Parser {
  constructor() {
    this.rest = "";
    this.lastId = "";
    this.clear();
  }

  clear() {
    this.kind = "";
    this.data = [];
  }

  /** The events that are complete with `text`: [{id, kind, data}], `data` as text. */
  push(text) {
    // A carriage return at the end may be half of a line's end, so it waits for what follows.
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    return lines.map((line) => this.line(line)).filter(Boolean);
  }

  line(line) {
    if (line === "") return this.dispatch();
    const [, name, value = ""] = line.match(/^([^:]*)(?:: ?(.*))?$/s); // of a heartbeat the name is empty
    if (name === "event") this.kind = value;
    else if (name === "data") this.data.push(value);
    else if (name === "id" && !value.includes("\0")) this.lastId = value;
    return null;
  }

  dispatch() {
    const { kind, data } = this;
    this.clear();
    return data.length ? { id: this.lastId, kind: kind || "message", data: data.join("\n") } : null;
  }
}

export class Stream {
  /** `onEvent(kind, data, id)`; `onChange(state, detail)` with state connecting | live | waiting | ended | refused. */
  constructor(service, run, { kinds, after = "", onEvent, onChange }) {
    Object.assign(this, { service, run, kinds, after, onEvent, onChange });
    this.abort = new AbortController();
    this.wake = () => {};
  }

  stop() {
    this.abort.abort();
    this.wake();
  }

  async start() {
    const online = () => this.wake();
    window.addEventListener("online", online);
    try {
      await this.keep();
    } finally {
      window.removeEventListener("online", online);
    }
  }

  async keep() {
    let pause = FIRST;
    while (!this.abort.signal.aborted) {
      this.onChange("connecting", "");
      let why = "the connection ended";
      try {
        const [ended, heard] = await this.read();
        if (ended === "end") return this.onChange("ended", "");
        if (ended) why = ended;
        if (heard) pause = FIRST;
      } catch (error) {
        if (this.abort.signal.aborted) return;
        if (error instanceof Problem && error.status >= 400 && error.status < 500 && error.status !== 429) {
          return this.onChange("refused", error.message);
        }
        why = error.message;
      }
      if (this.abort.signal.aborted) return;
      const wait = pause * (0.7 + 0.3 * Math.random());
      this.onChange("waiting", why);
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, wait);
      });
      pause = Math.min(LONGEST, 2 * pause);
    }
  }

  /** One connection. Returns ["end" | why it was dropped | "", whether anything was heard]. */
  async read() {
    const once = new AbortController();
    const stop = () => once.abort();
    this.abort.signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, SILENCE);
    let heard = false;
    try {
      const headers = { Accept: "text/event-stream" };
      if (this.after) headers["Last-Event-ID"] = this.after;
      const path = `v1/runs/${encodeURIComponent(this.run)}/metrics/stream`;
      const response = await this.service.fetch(path, { query: { kinds: this.kinds }, headers, signal: once.signal });
      this.onChange("live", "");
      const parser = new Parser();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        clearTimeout(silence);
        silence = setTimeout(stop, SILENCE);
        if (done) return ["", heard];
        for (const event of parser.push(value)) {
          heard = true;
          if (event.kind === "end") return ["end", heard];
          const data = JSON.parse(event.data);
          if (event.kind === "dropped") return [`the server dropped this reader: ${data.reason ?? "too slow"}`, heard];
          this.onEvent(event.kind, data, event.id);
          if (event.id) this.after = event.id;
        }
      }
    } catch (error) {
      if (once.signal.aborted && !this.abort.signal.aborted) return ["nothing was heard for 25 s", heard];
      throw error;
    } finally {
      clearTimeout(silence);
      this.abort.signal.removeEventListener("abort", stop);
      once.abort(); // lets go of the connection
    }
  }
}
