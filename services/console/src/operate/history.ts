// The last hour of the metrics that matter, from polls of Prometheus' text at /metrics while the page is open.

import { useEffect, useRef, useState } from "react";
import { sleep } from "../api/events";
import { ApiError, request } from "../api/http";
import { trouble } from "./asking";

/** Milliseconds between two polls. */
const EVERY = 15_000;
/** Seconds of moments that are shown. */
const HOUR = 3_600;
/** Routes whose 503 reports a state and is no failure. */
const PROBES = ["/ready"];

// Counters, shown as growth a minute.
const RATES = { questions: "local2_queries_accepted_total", requests: "local2_http_requests_total", errors: "errors" } as const;
// Sums with their counts, shown as the mean of what came between two moments, in seconds.
const MEANS = { first_word: "local2_first_word_seconds" } as const;
const LEVELS = {
  questions_waiting: "local2_query_backlog",
  work_waiting: "local2_group_lag",
  in_flight: "local2_replicas_in_flight",
  streams: "local2_sse_streams_open",
  dead_letters: "local2_dead_letters",
  redis_bytes: "local2_redis_memory_used_bytes",
} as const;

export type Key = keyof typeof RATES | keyof typeof MEANS | keyof typeof LEVELS;
/** What a moment shows; null: not known, or nothing happened that has a mean. */
export type Values = Record<Key, number | null>;
/** Sums of samples over their labels, by name; `errors`: answers of 500 and more, except those of probes. */
export type Totals = Record<string, number>;

/** Return the totals in Prometheus' text. */
export function totals(text: string): Totals {
  const found: Totals = { errors: 0 };
  for (const [, name, labels = "", value] of text.matchAll(/^([a-z_0-9]+)(?:\{(.*)\})? (\S+)$/gm)) {
    found[name!] = (found[name!] ?? 0) + Number(value);
    if (name !== RATES.requests) continue;
    const label = (key: string) => new RegExp(`${key}="([^"]*)"`).exec(labels)?.[1] ?? "";
    if (Number(label("status")) >= 500 && !PROBES.includes(label("route"))) found.errors! += Number(value);
  }
  return found;
}

/** Return what a moment shows. `before`: the totals `seconds` earlier; null for the first moment. */
export function between(before: Totals | null, now: Totals, seconds: number): Values {
  const shown = Object.fromEntries(Object.entries(LEVELS).map(([key, name]) => [key, now[name] ?? null]));
  for (const [key, name] of Object.entries(RATES)) {
    // A missing counter has not counted yet. A counter that became less begins anew: its gateway was restarted.
    const growth = (now[name] ?? 0) - (before?.[name] ?? 0);
    shown[key] = before && seconds > 0 ? (growth < 0 ? now[name] ?? 0 : growth) * 60 / seconds : null;
  }
  for (const [key, name] of Object.entries(MEANS)) {
    const growth = (part: string) => (now[name + part] ?? 0) - (before?.[name + part] ?? 0);
    // The sum over replicas shrinks when one leaves, and is missing while the bus is away.
    const known = before?.local2_bus_up === 1 && growth("_count") > 0 && growth("_sum") >= 0;
    shown[key] = known ? growth("_sum") / growth("_count") : null;
  }
  return shown as Values;
}

export interface Moment {
  /** Seconds since the epoch. */
  at: number;
  values: Values;
}

/** Poll the gateway's metrics while the component is mounted; return the moments of the last hour, oldest first. */
export function useHistory(): { moments: readonly Moment[]; wrong: string } {
  const [moments, setMoments] = useState<readonly Moment[]>([]);
  const [wrong, setWrong] = useState("");
  const before = useRef<{ at: number; totals: Totals } | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    void (async () => {
      while (!stop.signal.aborted) {
        try {
          const now = totals(await (await request("GET", "metrics", { signal: stop.signal })).text());
          const at = Date.now() / 1000;
          const values = between(before.current?.totals ?? null, now, at - (before.current?.at ?? at));
          before.current = { at, totals: now };
          setMoments((known) => [...known.filter((one) => one.at > at - HOUR), { at, values }]);
          setWrong("");
        } catch (error) {
          if (stop.signal.aborted) return;
          setWrong(trouble(error));
          if (error instanceof ApiError && (error.status === 403 || error.status === 401)) return;
        }
        await sleep(EVERY, stop.signal);
      }
    })();
    return () => stop.abort();
  }, []);
  return { moments, wrong };
}
