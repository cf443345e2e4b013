// How the pages of operators ask: once, again and again while they are seen, and by the bus's tail.

import { useCallback, useEffect, useRef, useState } from "react";
import { follow, sleep } from "../api/events";
import { ApiError, call } from "../api/http";
import type { components } from "../api/schema";
import { timeOf } from "./summary";

export type Shapes = components["schemas"];
export type BusEntry = Shapes["BusEntry"];

const INTERVAL = 2_000;
const RARELY = 15_000;
const KEPT = 1_000;
// A busy bus says more than anybody reads: what has come is shown so many ms later, together.
const PAUSE = 150;

/** What went wrong, as a sentence for whoever looks. */
export function trouble(error: unknown): string {
  if (error instanceof ApiError && error.status === 403) return "This is shown to administrators.";
  return error instanceof Error ? error.message : String(error);
}

export interface Asked<T> {
  found: T | null;
  wrong: string;
  /** Asks now. */
  refresh(): void;
}

/** What a route says: once, or every so many ms while the page is seen. No path: nothing is asked. */
export function useAsked<T>(path: string | null, every = 0): Asked<T> {
  const [found, setFound] = useState<T | null>(null);
  const [wrong, setWrong] = useState("");
  const [turn, again] = useState(0);
  useEffect(() => setFound(null), [path]);
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    void (async () => {
      while (!stop.signal.aborted) {
        if (!document.hidden || !every) {
          try {
            const answer = await call<T>("GET", path);
            if (!stop.signal.aborted) { setFound(answer); setWrong(""); }
          } catch (error) {
            if (!stop.signal.aborted) setWrong(trouble(error));
            if (error instanceof ApiError && (error.status === 403 || error.status === 401)) return;
          }
        }
        if (!every) return;
        await sleep(every, stop.signal);
      }
    })();
    return () => stop.abort();
  }, [path, every, turn]);
  const refresh = useCallback(() => again((before) => before + 1), []);
  return { found, wrong, refresh };
}

export const usePolled = <T,>(path: string): Asked<T> => useAsked<T>(path, INTERVAL);

/** Return whether a respondent B runs; null: not known. */
export function useRespondentB(): boolean | null {
  const { found } = useAsked<Shapes["ParticipantList"]>("participants", RARELY);
  return found && found.participants.some(({ name, replicas }) => name === "respondent-b" && replicas.length > 0);
}

/** Work that somebody started; what came of it is said, never thrown. */
export function useWork(): [string, (work: () => Promise<string | void>) => Promise<void>] {
  const [said, say] = useState("");
  const run = useCallback(async (work: () => Promise<string | void>) => {
    try {
      say((await work()) ?? "");
    } catch (error) {
      say(trouble(error));
    }
  }, []);
  return [said, run];
}

export interface Tail {
  entries: readonly BusEntry[];
  /** What is wrong with the connection; "" for nothing. */
  said: string;
  /** Whether those from before have come. */
  there: boolean;
}

/** The newest messages of the bus, newest first, and those that come; `last` of them from before. */
export function useTail(subjects: readonly string[], last: number): Tail {
  const [entries, setEntries] = useState<readonly BusEntry[]>([]);
  const [there, setThere] = useState(false);
  const [said, say] = useState("");
  const waiting = useRef<BusEntry[]>([]);
  const asked = subjects.join(" ");
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const show = () => {
      timer = undefined;
      const fresh = waiting.current.splice(0);
      setEntries((known) => joined(known, fresh).slice(0, KEPT));
      setThere(true);
    };
    setEntries([]);
    setThere(false);
    const path = `bus/events?last=${last}${asked.split(" ").filter(Boolean).map((one) => `&subject=${encodeURIComponent(one)}`).join("")}`;
    follow(path, {
      signal: stop.signal,
      onEvent: (_type, _id, data) => {
        waiting.current.push(data as BusEntry);
        timer ??= setTimeout(show, PAUSE);
      },
      // behind those from before the server says that it lives
      onAlive: () => { timer ??= setTimeout(show, PAUSE); },
      onWaiting: (pause) => say(pause ? `The connection is lost. Next attempt in ${Math.round(pause / 1000)} s.` : ""),
    }).catch((error: unknown) => { if (!stop.signal.aborted) say(trouble(error)); });
    return () => { stop.abort(); clearTimeout(timer); waiting.current = []; };
  }, [asked, last]);
  return { entries, said, there };
}

/** Known entries with fresh ones, the newest first; what came before a lost connection comes again and is left out. */
export function joined(known: readonly BusEntry[], fresh: readonly BusEntry[]): BusEntry[] {
  const name = (one: BusEntry) => `${one.subject} ${one.entry_id}`;
  const seen = new Set(known.map(name));
  const added = fresh.filter((one) => !seen.has(name(one)) && seen.add(name(one))).reverse();
  // each stream comes in its order, not all of them in one; what is equally old stays as it came
  return added.length ? [...added, ...known].sort((a, b) => timeOf(b) - timeOf(a)) : [...known];
}
