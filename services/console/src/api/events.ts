// Server-sent events over fetch, which can send the key; streams that go on after a lost connection.

import { ApiError, request } from "./http";

// The gateway says every 15 s that it lives: a longer silence is a dead connection.
const SILENCE = 45_000;
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10_000;
// So many connections in a row that end in good order without an event: there will be none.
const EMPTY_ENDS = 5;

export interface RawEvent {
  id: string;
  type: string;
  data: string;
}

/** Takes a stream's text apart, piece by piece; a piece may end anywhere. */
export class EventParser {
  #rest = "";
  #event = { id: "", type: "message", data: [] as string[] };

  /** The events that this piece completes. */
  take(text: string): RawEvent[] {
    const found: RawEvent[] = [];
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop() ?? "";
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        const { id, type, data } = this.#event;
        if (data.length) found.push({ id, type, data: data.join("\n") });
        this.#event = { id: "", type: "message", data: [] };
        continue;
      }
      const colon = line.indexOf(":");
      if (colon === 0) continue;
      const name = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "id") this.#event.id = value;
      else if (name === "event") this.#event.type = value;
      else if (name === "data") this.#event.data.push(value);
    }
    return found;
  }
}

export type OnEvent = (type: string, id: string, data: unknown) => void;

interface Following {
  signal: AbortSignal;
  /** The id of the last event that is known. */
  after?: string;
  onEvent: OnEvent;
  /** Something has come, be it only that the server lives. */
  onAlive?: () => void;
  /** The connection is lost and tried again after so many ms; 0: it is there. */
  onWaiting?: (ms: number) => void;
  /** Whether the stream has had its end. */
  isOver?: () => boolean;
}

/**
 * Hands over the events of a stream, across lost connections, until `isOver()` after its end, or until `signal`.
 * Raises ApiError when the server refuses it for good.
 */
export async function follow(path: string, { signal, after = "", onEvent, onAlive = () => {}, onWaiting = () => {}, isOver = () => false }: Following): Promise<void> {
  let last = after;
  let failures = 0;
  let empty = 0;
  while (!signal.aborted) {
    try {
      const taken = (event: RawEvent) => {
        failures = 0;
        last = event.id || last;
        onEvent(event.type, event.id, JSON.parse(event.data));
      };
      const seen = await readOnce(path, last, signal, taken, onWaiting, onAlive);
      if (seen === null || isOver()) return;
      empty = seen ? 0 : empty + 1;
      if (empty >= EMPTY_ENDS) throw new ApiError(410, "no_end", "The stream ended without an end of the answer.");
    } catch (error) {
      if (signal.aborted) return;
      if (isOver()) return;
      if (error instanceof ApiError && !error.temporary) throw error;
      const cut = error instanceof DOMException && error.name === "AbortError";
      if (!(error instanceof ApiError) && !cut && !(error instanceof TypeError)) throw error;
    }
    const pause = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** failures) * (0.8 + 0.4 * Math.random());
    failures += 1;
    onWaiting(pause);
    await sleep(pause, signal);
  }
}

/** The number of events of one connection; null when the server says that there are no more. */
async function readOnce(
  path: string, last: string, signal: AbortSignal, onEvent: (event: RawEvent) => void, onWaiting: (ms: number) => void = () => {}, onAlive: () => void = () => {},
): Promise<number | null> {
  const attempt = new AbortController();
  const stop = () => attempt.abort();
  signal.addEventListener("abort", stop);
  let watchdog = setTimeout(stop, SILENCE);
  try {
    const headers: Record<string, string> = { Accept: "text/event-stream" };
    if (last) headers["Last-Event-ID"] = last;
    const response = await request("GET", path, { headers, signal: attempt.signal });
    if (response.status === 204 || !response.body) return null;
    onWaiting(0);
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    const parser = new EventParser();
    let seen = 0;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return seen;
      clearTimeout(watchdog);
      watchdog = setTimeout(stop, SILENCE);
      for (const event of parser.take(decoder.decode(value, { stream: true }))) {
        seen += 1;
        onEvent(event);
      }
      onAlive();
    }
  } finally {
    clearTimeout(watchdog);
    signal.removeEventListener("abort", stop);
    attempt.abort();
  }
}

export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
