// One session on the page: its turns, asking, following the answer, stopping.

import { ApiError, call } from "./api.js";
import { make } from "./element.js";
import { follow, sleep } from "./events.js";
import { apply, fill, isOver, newTurn } from "./turn.js";
import { TurnView } from "./turn_view.js";

// Which query runs in which session: after a reload the page goes on with it.
const RUNNING = "local2.running";
// What is known of older turns is asked for when somebody opens the session: of the newest ones only.
const DETAILED = 10;
const TRIES = 4;
// When a comparison may be there, in ms after the critique.
const COMPARED = [3_000, 15_000];

export class Conversation {
  #views = [];
  #stop = new AbortController();
  sessionId = null;

  /**
   * onChange(): running or session changed. onAccepted(): a query was taken.
   * onConnection(text): what to say of the stream; "" when it is well.
   */
  constructor(element, empty, { onChange, onAccepted, onConnection }) {
    this.element = element;
    this.empty = empty;
    this.onChange = onChange;
    this.onAccepted = onAccepted;
    this.onConnection = onConnection;
  }

  /** The turn that is being answered. */
  get running() {
    const turn = this.#views.at(-1)?.turn;
    return turn && !isOver(turn) ? turn : null;
  }

  /** Shows a session, or an empty one for null; goes on with its running query. Raises ApiError. */
  async open(sessionId) {
    this.#stop.abort();
    this.#stop = new AbortController();
    const { signal } = this.#stop;
    this.sessionId = sessionId;
    this.#views = [];
    this.element.replaceChildren(this.empty);
    this.onConnection("");
    this.onChange();
    if (sessionId === null) return;
    const { turns, earlier } = await call("GET", `sessions/${encodeURIComponent(sessionId)}`);
    if (signal.aborted) return;
    for (const told of turns) this.#add(kept(told));
    this.#offerEarlier(earlier);
    this.#toEnd();
    await this.#resume(sessionId, turns, signal);
    await this.#detail(this.#views.filter(({ turn }) => isOver(turn)).slice(-DETAILED), signal);
  }

  /** Asks. Raises ApiError when the query was not accepted; then nothing is left of it on the page. */
  async ask(query, mode) {
    // a followed stream that waits for an earlier critique would hold one of the browser's few connections
    this.#stop.abort();
    this.#stop = new AbortController();
    const { signal } = this.#stop;
    const turn = newTurn(query);
    const view = this.#add(turn);
    this.#toEnd();
    this.onChange();
    try {
      const body = { query, mode, ...(this.sessionId ? { session_id: this.sessionId } : {}) };
      const accepted = await accept(body, this.onConnection, signal);
      turn.queryId = accepted.query_id;
      remember(accepted.session_id, accepted.query_id);
      if (signal.aborted) return;
      this.sessionId = accepted.session_id;
    } catch (error) {
      view.element.remove();
      this.#views = this.#views.filter((one) => one !== view);
      if (!this.#views.length) this.element.replaceChildren(this.empty);
      this.onChange();
      throw error;
    }
    view.changed();
    this.onChange();
    this.onAccepted();
    await this.#follow(view, signal);
  }

  async cancel() {
    const turn = this.running;
    if (turn?.queryId) await call("POST", `queries/${turn.queryId}/cancel`);
  }

  #view(turn) {
    const rate = (vote) => call("POST", "feedback", { query_id: turn.queryId, ...vote });
    return new TurnView(turn, { rate });
  }

  #add(turn) {
    const view = this.#view(turn);
    this.empty.remove();
    this.element.append(view.element);
    this.#views.push(view);
    return view;
  }

  /** A button above the first turn for those before it, when there are any. */
  #offerEarlier(before) {
    if (!before) return;
    const button = make("button", { type: "button", class: "earlier", onclick: async () => {
      button.disabled = true;
      try {
        await this.#showEarlier(button, before);
      } catch (error) {
        button.disabled = false;
        this.onConnection(error.message);
      }
    } }, "Earlier turns");
    this.element.prepend(button);
  }

  async #showEarlier(button, before) {
    const path = `sessions/${encodeURIComponent(this.sessionId)}?before=${encodeURIComponent(before)}`;
    const { turns, earlier } = await call("GET", path);
    // another session was opened meanwhile
    if (!button.isConnected) return;
    // what was read stays where it is
    const fromEnd = this.element.scrollHeight - this.element.scrollTop;
    const views = turns.map((told) => this.#view(kept(told)));
    button.replaceWith(...views.map(({ element }) => element));
    this.#views.unshift(...views);
    this.#offerEarlier(earlier);
    this.element.scrollTop = this.element.scrollHeight - fromEnd;
  }

  async #resume(sessionId, turns, signal) {
    const queryId = remembered()[sessionId];
    if (!queryId) return;
    if (turns.some((turn) => turn.query_id === queryId)) return remember(sessionId, null);
    try {
      const { query } = await call("GET", `queries/${queryId}`);
      if (signal.aborted) return;
      const turn = newTurn(query);
      turn.queryId = queryId;
      const view = this.#add(turn);
      this.#toEnd();
      this.onChange();
      // not awaited: the details of the turns before it come meanwhile
      this.#follow(view, signal).catch((error) => this.onConnection(error.message));
    } catch (error) {
      if (error.status !== 404) throw error;
      remember(sessionId, null);
    }
  }

  /** Shows a query's events until its end, and for a while after it for the critique. */
  async #follow(view, signal) {
    const { turn } = view;
    const session = this.sessionId;
    const onEvent = (type, id, data) => {
      const was = isOver(turn);
      const atEnd = this.#isAtEnd();
      apply(turn, type, id, data);
      if (isOver(turn) && !was) {
        remember(session, null);
        this.onChange();
        this.#detail(this.#views.slice(-4, -1).filter((one) => !one.turn.critique), signal);
      }
      view.changed();
      if (atEnd) requestAnimationFrame(() => this.#toEnd());
    };
    const onWaiting = (ms) => {
      this.onConnection(ms ? `Connection lost; trying again in ${Math.ceil(ms / 1000)} s. The query goes on.` : "");
    };
    try {
      await follow(`queries/${turn.queryId}/events?follow=true`, {
        signal, onEvent, onWaiting, isOver: () => isOver(turn),
      });
      await this.#compared(view, signal);
    } catch (error) {
      if (isOver(turn)) return;
      turn.state = "failed";
      turn.error = { code: error.code ?? "page", message: error.message };
      remember(session, null);
      view.changed();
      this.onChange();
    }
  }

  /** Looks for the comparison, which comes after the stream's end when there is a second respondent. */
  async #compared(view, signal) {
    for (const pause of COMPARED) {
      await sleep(pause, signal);
      if (signal.aborted || view.turn.pairwise || view.turn.state !== "completed") return;
      await this.#detail([view], signal);
    }
  }

  /** Adds what the turns' journals still say: thinking, tool calls, critique. They expire; the turn does not. */
  async #detail(views, signal) {
    await Promise.all(views.map(async (view) => {
      try {
        const result = await call("GET", `queries/${view.turn.queryId}`);
        // an expired journal leaves a record without an answer
        if (signal.aborted || !["completed", "cancelled"].includes(result.state)) return;
        if (view.turn.last) Object.assign(view.turn, { critique: result.critique, pairwise: result.pairwise, reward: result.reward ?? null });
        else fill(view.turn, result);
        view.changed();
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
      }
    }));
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    return scrollHeight - scrollTop - clientHeight < 60;
  }

  #toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }
}

/** A turn as the session keeps it. */
function kept({ query_id, query, answer, interrupted }) {
  const state = { queryId: query_id, state: "completed", interrupted, pieces: [{ id: "", text: answer }] };
  return Object.assign(newTurn(query), state);
}

/** Sends the query until it is accepted or refused: the same key makes sure that it is asked once. */
async function accept(body, onConnection, signal) {
  const once = Array.from(crypto.getRandomValues(new Uint8Array(16)), (n) => n.toString(16).padStart(2, "0")).join("");
  for (let attempt = 1; ; attempt += 1) {
    try {
      const accepted = await call("POST", "query?wait=false", body, { "Idempotency-Key": once });
      onConnection("");
      return accepted;
    } catch (error) {
      if (!error.temporary || attempt === TRIES || signal.aborted) throw error;
      const pause = error.retryAfter * 1000 || 500 * 2 ** attempt;
      onConnection(`${error.message} Trying again in ${Math.ceil(pause / 1000)} s.`);
      await sleep(pause, signal);
    }
  }
}

function remembered() {
  try {
    return JSON.parse(localStorage.getItem(RUNNING)) ?? {};
  } catch {
    return {};
  }
}

function remember(sessionId, queryId) {
  const known = remembered();
  if (queryId) known[sessionId] = queryId;
  else delete known[sessionId];
  try {
    localStorage.setItem(RUNNING, JSON.stringify(known));
  } catch { /* storage is switched off: a reload does not go on with the query */ }
}
