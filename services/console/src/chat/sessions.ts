// The list of the user's sessions, and what runs in them.

import { ApiError, call, request } from "../api/http";
import type { QueryListed, Session } from "../api/types";
import { Store } from "./store";

const PAGE = 50;
const UNDO = 6_000;
const DAY = 86_400_000;

export interface Group {
  name: string;
  sessions: Session[];
}

/** Sessions under the days of their last use, pinned ones first. `now` in ms since the epoch. */
export function grouped(sessions: readonly Session[], now: number): Group[] {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  const found = new Map<string, Session[]>();
  for (const session of sessions) {
    const name = session.pinned ? "Pinned" : day(session.updated, midnight);
    found.set(name, [...(found.get(name) ?? []), session]);
  }
  return [...found].map(([name, listed]) => ({ name, sessions: listed }));
}

function day(time: number, midnight: number): string {
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last 7 days";
  if (time >= midnight - 30 * DAY) return "Last 30 days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

export class SessionList extends Store {
  sessions: Session[] = [];
  running = new Set<string>();
  words = "";
  complete = true;
  more = false;
  /** A session that is deleted in a moment, unless somebody says no. */
  leaving: Session | null = null;
  #shown = PAGE;
  #timer = 0;
  #asked = 0;

  constructor(private readonly onError: (error: unknown) => void) {
    super();
    // nothing that was deleted comes back because the page was closed
    addEventListener("pagehide", this.#atEnd);
  }

  #atEnd = (): void => void this.#leave(true);

  /** Carry out pending deletions at once, and stop. */
  close(): void {
    removeEventListener("pagehide", this.#atEnd);
    this.#atEnd();
  }

  /** Asks for the list again. Raises ApiError. */
  async refresh(): Promise<void> {
    const asked = (this.#asked += 1);
    const words = this.words.trim();
    const path = words ? `sessions?limit=${PAGE}&search=${encodeURIComponent(words)}` : `sessions?limit=${Math.min(200, this.#shown)}`;
    const [page, open] = await Promise.all([
      call<{ sessions: Session[]; complete: boolean }>("GET", path),
      call<{ queries: QueryListed[] }>("GET", "queries?state=running").catch(() => ({ queries: [] })),
    ]);
    const found = page.sessions;
    while (!words && found.length < this.#shown && found.length > 0 && found.length % 200 === 0) {
      found.push(...(await call<{ sessions: Session[] }>("GET", `sessions?limit=200&offset=${found.length}`)).sessions);
    }
    if (asked !== this.#asked) return;
    this.sessions = found;
    this.complete = page.complete;
    this.more = !words && found.length >= this.#shown;
    this.running = new Set(open.queries.map((one) => one.session_id));
    this.changed();
  }

  search(words: string): void {
    this.words = words;
    this.changed();
    this.refresh().catch(this.onError);
  }

  showMore(): void {
    this.#shown += PAGE;
    this.refresh().catch(this.onError);
  }

  /** Renames or pins. Raises ApiError. */
  async change(session: Pick<Session, "session_id">, change: { title?: string; pinned?: boolean }): Promise<void> {
    await call("PATCH", `sessions/${encodeURIComponent(session.session_id)}`, change);
    await this.refresh();
  }

  /** Deletes a session after a while in which it can be taken back. */
  delete(session: Session): void {
    void this.#leave(false);
    this.leaving = session;
    this.changed();
    this.#timer = window.setTimeout(() => void this.#leave(false), UNDO);
  }

  undo(): void {
    clearTimeout(this.#timer);
    this.leaving = null;
    this.changed();
  }

  async #leave(keepalive: boolean): Promise<void> {
    clearTimeout(this.#timer);
    const { leaving } = this;
    if (!leaving) return;
    this.leaving = null;
    this.sessions = this.sessions.filter((one) => one.session_id !== leaving.session_id);
    this.changed();
    try {
      await request("DELETE", `sessions/${encodeURIComponent(leaving.session_id)}`, { keepalive });
      await this.refresh();
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) this.onError(error);
    }
  }
}
