// One session as the server has it: its turns, what runs, asking, following, stopping.

import { ApiError, call } from "../api/http";
import { inZone } from "../api/zone";
import { follow, sleep } from "../api/events";
import type { ChatSettings, QueryBody, QueryListed, Reward, SessionShown, TurnShown, TurnTold } from "../api/types";
import { Store } from "./store";
import { inItsPlace, newestBehind, parents } from "./versions";
import type { FileOf } from "../files";
import { isAfter } from "./response";
import { apply, isOver, newTurn, type Turn } from "./turn";

const PAGE = 50;
const TRIES = 4;
// Between two looks at what other tabs and browsers have asked, in ms.
const LOOK = 2_500;
// When a comparison may be there, in ms after the critique.
const COMPARED = [3_000, 15_000];
// Turns are asked for by so many at a time: a browser has six connections to a server.
const READERS = 2;
// Of so many turns is looked at again what is thought of them.
const JUDGED_AGAIN = 10;

/** A turn and who looks at it. */
export class TurnStore extends Store {
  asked: "not" | "asked" = "not";

  constructor(readonly turn: Turn) {
    super();
  }

  static #count = 0;
  /** What tells it from others for as long as it is shown. */
  readonly key = `t${(TurnStore.#count += 1)}`;
}

export type Ask = Pick<QueryBody, "query"> & Partial<Omit<QueryBody, "attachments">> & { files?: readonly FileOf[] };

export class Conversation extends Store {
  sessionId: string | null = null;
  title = "";
  /** How this chat is asked, as the server keeps it; null: not known yet, or there is no session. */
  settings: ChatSettings | null = null;
  /** The turn whose conversation is shown, where it is not the newest. */
  chosen: string | null = null;
  turns: TurnStore[] = [];
  earlier: string | null = null;
  loading = false;
  /** What is wrong with the connection; "" when it is well. */
  connection = "";
  /** Turns were just put before the others. */
  shifted = false;
  #stop = new AbortController();
  #reading = 0;
  #waiting: TurnStore[] = [];
  /** Questions without an answer that stand on pages which are not here yet. */
  #before: QueryListed[] = [];
  #following: TurnStore | null = null;
  /** A question has taken the place of another one: turns may have left the session. */
  #replaced = false;
  /** Choices of a version that the server has not answered yet. */
  #choosing = 0;

  constructor(private readonly told: { onChange(): void; onError(error: unknown): void; onVote?(queryId: string, reward: Reward | null): void }) {
    super();
  }

  /** The turns that are not answered yet, in their order. */
  get open(): Turn[] {
    return this.turns.map((one) => one.turn).filter((turn) => !isOver(turn));
  }

  /** Shows a session, or an empty one for null. Raises ApiError. */
  async show(sessionId: string | null): Promise<void> {
    this.#stop.abort();
    const stop = (this.#stop = new AbortController());
    Object.assign(this, { sessionId, title: "", settings: null, chosen: null, turns: [], earlier: null, connection: "", loading: sessionId !== null });
    this.#waiting = [];
    this.#before = [];
    this.#following = null;
    this.changed();
    if (sessionId === null) return;
    try {
      await this.sync(true);
    } finally {
      if (!stop.signal.aborted) {
        this.loading = false;
        this.changed();
      }
    }
    void this.#watch(stop.signal);
  }

  close(): void {
    this.#stop.abort();
  }

  async #watch(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      await sleep(LOOK, signal);
      if (signal.aborted || document.hidden) continue;
      try {
        await this.sync(false);
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return this.told.onError(error);
        // everything else is seen by what the user does
      }
    }
  }

  /** Takes over what the server has that this page has not. `whole`: also how older questions ended. */
  async sync(whole: boolean): Promise<void> {
    const id = this.sessionId;
    const { signal } = this.#stop;
    if (id === null) return;
    const name = encodeURIComponent(id);
    const newest = this.turns.findLast(({ turn }) => turn.state === "completed" || turn.interrupted)?.turn.queryId;
    const look = (all: boolean) => Promise.all([
      call<{ queries: QueryListed[] }>("GET", `queries?session_id=${name}${all ? "&limit=200" : "&state=running"}`),
      call<SessionShown>("GET", `sessions/${name}?messages=false&limit=${all ? PAGE : 1}`),
    ]);
    let [listed, shown] = await look(whole);
    if (signal.aborted) return;
    const last = shown.turns.at(-1)?.query_id;
    // what other words have replaced leaves the session a moment later
    const fewer = !this.earlier && shown.total < this.turns.filter(({ turn }) => turn.state === "completed" || turn.interrupted).length;
    // more was said elsewhere than the newest turn
    const more = !whole && last !== undefined && (this.#replaced || fewer || (last !== newest && !this.#known(last)));
    if (whole || more) this.#replaced = false;
    if (more) [listed, shown] = await look(true);
    if (signal.aborted) return;
    const chosen = shown.tip && shown.tip !== shown.turns.at(-1)?.query_id ? shown.tip : null;
    const changed = this.title !== shown.title || (this.#choosing === 0 && this.chosen !== chosen) || JSON.stringify(this.settings) !== JSON.stringify(shown.settings);
    if (this.#choosing === 0) this.chosen = chosen;
    this.title = shown.title;
    // the same object as long as nothing is changed: a dialog that is open keeps what was written in it
    if (JSON.stringify(this.settings) !== JSON.stringify(shown.settings)) this.settings = shown.settings;
    const left = more && this.#drop(shown, listed.queries);
    if (whole) this.earlier = shown.earlier;
    if (whole) this.#before = listed.queries.filter((one) => this.earlier && one.state !== "completed" && isAfter(this.earlier, one.query_id));
    const added = shown.turns.filter((one) => !this.#known(one.query_id)).map(fromSession);
    for (const one of listed.queries) {
      if (this.#known(one.query_id) || one.state === "completed" || added.some((turn) => turn.queryId === one.query_id)) continue;
      // what is older than this page stands on an earlier one
      if (this.earlier && isAfter(this.earlier, one.query_id)) continue;
      added.push(fromList(one));
    }
    // one that this page has just asked has no id yet: it is not added twice
    const own = this.turns.some(({ turn }) => !turn.queryId);
    const fresh = own ? added.filter((turn) => isOver(turn)) : added;
    if (fresh.length) this.#insert(fresh);
    if (fresh.length || changed || left) this.#told();
    this.#go();
  }

  /** Takes turns out that the server does not have any more: their question was asked in other words. */
  #drop(shown: SessionShown, listed: readonly QueryListed[]): boolean {
    const first = shown.earlier ? shown.turns[0]!.query_id : "0-0";
    const there = new Set([...shown.turns, ...listed].map((one) => one.query_id));
    const kept = this.turns.filter(({ turn }) => !isOver(turn) || !turn.queryId || !isAfter(turn.queryId, first) || there.has(turn.queryId));
    const some = kept.length < this.turns.length;
    this.turns = kept;
    return some;
  }

  #known(queryId: string): boolean {
    return this.turns.some(({ turn }) => turn.queryId === queryId);
  }

  #insert(turns: Turn[]): void {
    const all = [...this.turns, ...turns.map((turn) => new TurnStore(turn))];
    all.sort((a, b) => {
      if (!a.turn.queryId || !b.turn.queryId) return a.turn.queryId ? -1 : b.turn.queryId ? 1 : 0;
      return isAfter(a.turn.queryId, b.turn.queryId) ? 1 : -1;
    });
    this.shifted = false;
    this.turns = all;
  }

  #told(): void {
    this.changed();
    this.told.onChange();
  }

  /** Puts the page before the oldest turn; false when there is none, or it is on its way. */
  async showEarlier(): Promise<boolean> {
    if (!this.earlier || this.loading || this.sessionId === null) return false;
    const { signal } = this.#stop;
    this.loading = true;
    try {
      const path = `sessions/${encodeURIComponent(this.sessionId)}?messages=false&limit=${PAGE}&before=${encodeURIComponent(this.earlier)}`;
      const { turns, earlier } = await call<SessionShown>("GET", path);
      if (signal.aborted) return false;
      const here = (one: QueryListed) => !earlier || !isAfter(earlier, one.query_id);
      const unanswered = this.#before.filter(here);
      this.#before = this.#before.filter((one) => !here(one));
      this.earlier = earlier;
      this.#insert([...turns.filter((one) => !this.#known(one.query_id)).map(fromSession), ...unanswered.filter((one) => !this.#known(one.query_id)).map(fromList)]);
      this.shifted = true;
      return true;
    } finally {
      this.loading = false;
      if (!signal.aborted) this.changed();
    }
  }

  /** Every turn of the session, for an export. Raises ApiError. */
  async all(): Promise<TurnShown[]> {
    return everyTurn(this.sessionId);
  }

  /** Shows the conversation of a version, here and everywhere, and goes on from there. Raises ApiError. */
  async choose(store: TurnStore): Promise<void> {
    const { queryId, state, interrupted } = store.turn;
    this.chosen = this.turns[newestBehind(parents(this.turns), this.turns.indexOf(store))]!.turn.queryId;
    this.changed();
    // a question without an answer is no version that could be gone on from
    if (this.sessionId === null || !queryId || !(state === "completed" || interrupted)) return;
    this.#choosing += 1;
    try {
      await call("PATCH", `sessions/${encodeURIComponent(this.sessionId)}`, { version: queryId });
    } finally {
      this.#choosing -= 1;
    }
  }

  /** Keeps how the chat is asked. Raises ApiError. */
  async set(settings: ChatSettings): Promise<void> {
    this.settings = settings;
    this.changed();
    if (this.sessionId !== null) await call("PATCH", `sessions/${encodeURIComponent(this.sessionId)}`, { settings });
  }

  /** Asks; in the place of a turn, where one is given. Raises ApiError when the query was not accepted; then nothing is
      left of it on the page. */
  async ask({ files = [], ...asked }: Ask, insteadOf: Turn | null = null): Promise<void> {
    const { signal } = this.#stop;
    const replaced = insteadOf?.queryId ? this.turns.find(({ turn }) => turn.queryId === insteadOf.queryId) : undefined;
    const place = replaced ? parents(this.turns)[this.turns.indexOf(replaced)]! : -1;
    const after = replaced ? (this.turns[place]?.turn.queryId || "0-0") : this.chosen;
    const { chosen } = this;
    this.chosen = null;
    const turn = newTurn(asked.query, { time: Date.now(), mode: asked.mode ?? "chat", after, files });
    const store = new TurnStore(turn);
    this.shifted = false;
    this.turns = [...this.turns, store];
    this.#told();
    try {
      // Without the field, a question that replaces another one gets the files of the replaced one.
      const body = { ...asked, ...(this.sessionId ? { session_id: this.sessionId } : {}), ...(replaced ? { instead_of: replaced.turn.queryId } : {}), ...(files.length || replaced ? { attachments: files.map(({ id }) => id) } : {}) };
      const accepted = await inZone((zone) => accept({ ...body, time_zone: zone }, (text) => this.#say(text), signal));
      turn.queryId = accepted.query_id;
      if (signal.aborted) return;
      const first = this.sessionId === null;
      this.sessionId = accepted.session_id;
      // another tab's look may have brought the same query meanwhile
      this.turns = this.turns.filter((one) => one === store || one.turn.queryId !== turn.queryId);
      // other words: what was said in their place is forgotten at the server too
      if (replaced && words(replaced.turn.query) !== words(turn.query)) {
        const gone = inItsPlace(this.turns, replaced);
        this.turns = this.turns.filter((one) => !gone.has(one));
      }
      if (first) void this.#watch(signal);
    } catch (error) {
      this.turns = this.turns.filter((one) => one !== store);
      this.chosen = chosen;
      this.#told();
      throw error;
    }
    this.#told();
    this.#go();
  }

  async cancel(turn: Turn): Promise<void> {
    if (turn.queryId) await call("POST", `queries/${turn.queryId}/cancel`);
  }

  #say(text: string): void {
    if (this.connection === text) return;
    this.connection = text;
    this.changed();
  }

  /** Follows the first turn that is not answered: those behind it wait for it at the server too. */
  #go(): void {
    const next = this.turns.find(({ turn }) => !isOver(turn) && turn.queryId);
    if (!next || next === this.#following) return;
    this.#following = next;
    void this.#follow(next, this.#stop.signal).finally(() => {
      if (this.#following === next) this.#following = null;
      if (!this.#stop.signal.aborted) this.#go();
    });
  }

  async #follow(store: TurnStore, session: AbortSignal): Promise<void> {
    const { turn } = store;
    const ending = new AbortController();
    const stop = () => ending.abort();
    session.addEventListener("abort", stop);
    store.asked = "asked";
    try {
      await follow(`queries/${turn.queryId}/events`, {
        signal: ending.signal,
        isOver: () => isOver(turn),
        onWaiting: (ms) => this.#say(ms ? `Connection lost; trying again in ${Math.ceil(ms / 1000)} s. The question is being answered all the same.` : ""),
        onEvent: (type, id, data) => {
          apply(turn, type, id, data);
          store.changedSoon();
        },
      });
      this.#say("");
      this.#replaced ||= turn.after !== null;
      store.changed();
      this.#told();
      if (turn.state === "completed" && this.turns[0] === store) void this.#name(session);
      if (isOver(turn)) void this.#judged(store, session);
      // the server says that there is nothing to come, and this page has seen no end
      else await this.#read(store);
    } catch (error) {
      if (isOver(turn) || session.aborted) return;
      turn.state = "failed";
      turn.error = { code: error instanceof ApiError ? error.code : "page", message: error instanceof Error ? error.message : String(error) };
      store.changed();
      this.#told();
    } finally {
      session.removeEventListener("abort", stop);
    }
  }

  /** Has the model name the session; its first words stay its name where that cannot be done. */
  async #name(signal: AbortSignal): Promise<void> {
    try {
      const { title } = await call<{ title: string }>("POST", `sessions/${encodeURIComponent(this.sessionId!)}/title`);
      if (signal.aborted || title === this.title) return;
      this.title = title;
      this.#told();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
  }

  /** Looks for grade and comparison, which come after the answer. */
  async #judged(store: TurnStore, signal: AbortSignal): Promise<void> {
    const { turn } = store;
    try {
      await follow(`queries/${turn.queryId}/events?follow=true`, {
        signal,
        after: turn.response.last,
        isOver: () => true,
        onEvent: (type, id, data) => {
          apply(turn, type, id, data);
          if (type === "critique" || type === "pairwise" || type === "reward") store.changed();
        },
      });
    } catch {
      // the answer is there; what is thought of it can be looked up later
    }
    for (const pause of COMPARED) {
      await sleep(pause, signal);
      if (signal.aborted || turn.pairwise || turn.state !== "completed") return;
      await this.#judgement(store);
    }
  }

  /** The turn as its session tells it. Raises ApiError. */
  async #asTold({ turn }: TurnStore): Promise<Turn> {
    const { query, queryId, after, time, mode, interrupted, files } = turn;
    const { journal, open_to_votes } = await call<TurnTold>("GET", `sessions/${encodeURIComponent(this.sessionId!)}/turns/${queryId}`);
    const fresh = newTurn(query, { queryId, after, time, mode, interrupted, files, rateable: open_to_votes });
    for (const { event, id, data } of journal) apply(fresh, event, id, data);
    return fresh;
  }

  async #judgement(store: TurnStore): Promise<void> {
    try {
      const { critique, pairwise, reward, rateable } = await this.#asTold(store);
      Object.assign(store.turn, { critique, pairwise, reward, rateable });
      store.changed();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
  }

  /** A vote was cast, changed or withdrawn: `here`, of which other tabs are told, or in one of them. */
  voted(queryId: string, reward: Reward | null, here: boolean): void {
    const store = this.turns.find(({ turn }) => turn.queryId === queryId);
    if (store) {
      store.turn.reward = reward;
      store.changed();
    }
    if (here) this.told.onVote?.(queryId, reward);
  }

  /** What is thought of the newest turns by now: somebody may have voted in another browser. */
  async judgedMeanwhile(): Promise<void> {
    const { signal } = this.#stop;
    for (const store of this.turns.filter(({ asked, turn }) => asked === "asked" && turn.state === "completed" && turn.detail !== "expired").slice(-JUDGED_AGAIN)) {
      if (signal.aborted) return;
      await this.#judgement(store);
    }
  }

  /** Return a question's existing files, also for a turn whose journal is not loaded. */
  async filesOf(turn: Turn): Promise<readonly FileOf[]> {
    const store = this.turns.find((one) => one.turn === turn);
    if (store && turn.detail === "none" && isOver(turn) && turn.queryId) await this.#read(store);
    return turn.files.filter(({ deleted }) => !deleted);
  }

  /** Asks for everything else that is known of a turn that is looked at. */
  detail(store: TurnStore): void {
    if (store.asked === "asked" || !store.turn.queryId || !isOver(store.turn)) return;
    store.asked = "asked";
    this.#waiting.push(store);
    this.#next();
  }

  #next(): void {
    if (this.#reading >= READERS) return;
    // what was looked at last is on the page now
    const store = this.#waiting.pop();
    if (!store) return;
    this.#reading += 1;
    void this.#read(store).finally(() => {
      this.#reading -= 1;
      this.#next();
    });
  }

  /** Takes over what the session tells of the turn: everything, in the order in which it happened; or no more than what
      was thought of it, where nothing else is kept. */
  async #read(store: TurnStore): Promise<void> {
    const { turn } = store;
    const { signal } = this.#stop;
    try {
      const fresh = await this.#asTold(store);
      if (signal.aborted) return;
      const { critique, pairwise, reward, rateable } = fresh;
      if (isOver(fresh)) Object.assign(turn, fresh);
      else if (isOver(turn)) Object.assign(turn, { critique, pairwise, reward, rateable, detail: "expired" });
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 404) turn.detail = "expired";
      else store.asked = "not";
    }
    store.changed();
  }
}

/** All turns of a session, oldest first. Raises ApiError. */
export async function everyTurn(sessionId: string | null): Promise<TurnShown[]> {
  const found: TurnShown[] = [];
  let before = "";
  while (sessionId !== null) {
    const page = await call<SessionShown>("GET", `sessions/${encodeURIComponent(sessionId)}?messages=false&limit=200${before && `&before=${before}`}`);
    found.unshift(...page.turns);
    if (!page.earlier) break;
    before = encodeURIComponent(page.earlier);
  }
  return found;
}

const words = (text: string): string => text.split(/\s+/).join(" ").trim().normalize("NFC");

function fromSession({ query_id, after, query, answer, interrupted, time, attachments }: TurnShown): Turn {
  const files = attachments.map((file) => ({ ...file, name: file.name || "a file" }));
  return newTurn(query, { files, queryId: query_id, after, state: interrupted ? "cancelled" : "completed", interrupted, time, rateable: false, answer });
}

function fromList({ query_id, after, query, state, mode, accepted, error }: QueryListed): Turn {
  return newTurn(query, { queryId: query_id, after: after ?? null, state: state === "running" ? "queued" : state, mode, time: accepted, error: error ?? null });
}

/** Sends the query until it is accepted or refused: the same key makes sure that it is asked once. */
async function accept(body: QueryBody, onConnection: (text: string) => void, signal: AbortSignal): Promise<{ query_id: string; session_id: string }> {
  const once = Array.from(crypto.getRandomValues(new Uint8Array(16)), (n) => n.toString(16).padStart(2, "0")).join("");
  for (let attempt = 1; ; attempt += 1) {
    try {
      const accepted = await call<{ query_id: string; session_id: string }>("POST", "query?wait=false", body, { "Idempotency-Key": once });
      onConnection("");
      return accepted;
    } catch (error) {
      if (!(error instanceof ApiError) || !error.temporary || attempt === TRIES || signal.aborted) throw error;
      const pause = error.retryAfter * 1000 || 500 * 2 ** attempt;
      onConnection(`${error.message} Trying again in ${Math.ceil(pause / 1000)} s.`);
      await sleep(pause, signal);
    }
  }
}
