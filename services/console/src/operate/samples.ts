// What the metrics were during the last hour: asked for while the operators' place is open, kept while the page lives.

import { sleep } from "../api/events";
import { request } from "../api/http";
import { parsed, perMinute, total, type Sample } from "./prometheus";
import { trouble } from "./asking";

const INTERVAL = 5_000;
const HOUR = 3_600_000;

export interface Series {
  name: string;
  unit: string;
  /** What an operator learns from it. */
  about: string;
  value(now: readonly Sample[], before: readonly Sample[] | null, elapsed: number): number | null;
}

const rate = (name: string, fits?: (labels: Record<string, string>) => boolean): Series["value"] =>
  (now, before, elapsed) => perMinute(before && total(before, name, fits), total(now, name, fits), elapsed);
const level = (name: string, scale = 1): Series["value"] => (now) => { const found = total(now, name); return found === null ? null : found / scale; };

/** The mean of a histogram between two moments; null when nothing happened. */
const mean = (name: string): Series["value"] => (now, before) => {
  if (!before) return null;
  const count = (total(now, `${name}_count`) ?? 0) - (total(before, `${name}_count`) ?? 0);
  const spent = (total(now, `${name}_sum`) ?? 0) - (total(before, `${name}_sum`) ?? 0);
  return count > 0 && spent >= 0 ? spent / count : null;
};

export const SERIES: readonly Series[] = [
  { name: "Questions", unit: "a minute", about: "Accepted by this gateway", value: rate("local2_queries_accepted_total") },
  { name: "First word", unit: "s", about: "Mean until the first token, of followed answers", value: mean("local2_query_first_token_seconds") },
  { name: "Questions waiting", unit: "", about: "Not yet taken up by a generator", value: level("local2_query_backlog") },
  { name: "Work waiting", unit: "messages", about: "Not yet read, over all participants", value: level("local2_group_lag") },
  { name: "In flight", unit: "", about: "What all replicas work at now", value: level("local2_replicas_in_flight") },
  { name: "Requests", unit: "a minute", about: "HTTP requests to this gateway", value: rate("local2_http_requests_total") },
  { name: "Errors", unit: "a minute", about: "Answers of 500 and more", value: rate("local2_http_requests_total", (labels) => (labels["status"] ?? "").startsWith("5")) },
  { name: "Open streams", unit: "", about: "Browsers and clients that listen", value: level("local2_sse_streams_open") },
  { name: "Dead letters", unit: "", about: "Messages that nobody could handle", value: level("local2_dead_letters") },
  { name: "Redis' memory", unit: "MB", about: "Used by everything that is kept there", value: level("local2_redis_memory_used_bytes", 1_000_000) },
];

export interface Kept {
  /** Moments in seconds since the epoch. */
  times: number[];
  values: (number | null)[][];
  wrong: string;
}

let kept: Kept = { times: [], values: SERIES.map(() => []), wrong: "" };
let before: { samples: Sample[]; at: number } | null = null;
const listeners = new Set<() => void>();

export const samples = (): Kept => kept;

export function onSamples(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Adds what the metrics are now, and drops what is older than an hour. */
export function added(known: Kept, at: number, values: readonly (number | null)[]): Kept {
  const first = known.times.findIndex((time) => time >= (at - HOUR) / 1000);
  const from = first < 0 ? known.times.length : first;
  return { times: [...known.times.slice(from), at / 1000], values: known.values.map((series, n) => [...series.slice(from), values[n] ?? null]), wrong: "" };
}

/** Asks every five seconds until the function that it returns is called. */
export function keepSampling(): () => void {
  const stop = new AbortController();
  void (async () => {
    while (!stop.signal.aborted) {
      if (!document.hidden) {
        try {
          const now = parsed(await (await request("GET", "metrics", { signal: stop.signal })).text());
          const at = Date.now();
          kept = added(kept, at, SERIES.map((one) => one.value(now, before?.samples ?? null, at - (before?.at ?? at))));
          before = { samples: now, at };
        } catch (error) {
          if (stop.signal.aborted) return;
          kept = { ...kept, wrong: trouble(error) };
        }
        for (const listener of listeners) listener();
      }
      await sleep(INTERVAL, stop.signal);
    }
  })();
  return () => stop.abort();
}
