// The memory inspector: what is remembered, what is known of it, and forgetting it.

import { call } from "./api.js";
import { colourOf, thumb, verdictOf } from "./judging.js";
import { make } from "./element.js";

const PAGE = 30;

export class MemoryPanel {
  #cursor = null;
  #opened = 0;

  constructor(element) {
    this.list = element.querySelector("#engrams");
    this.note = element.querySelector("#memory-note");
    this.more = element.querySelector("#more-engrams");
    this.query = element.querySelector("#memory-query");
    this.more.addEventListener("click", () => this.#next(this.#opened));
    element.querySelector("#memory-search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.open();
    });
  }

  /** Shows what is there now: the newest, or what fits the words that are searched for. */
  open() {
    this.#opened += 1;
    this.#cursor = null;
    this.list.replaceChildren();
    this.more.hidden = true;
    this.note.textContent = "";
    const words = this.query.value.trim();
    return words ? this.#search(words, this.#opened) : this.#next(this.#opened);
  }

  close() {
    this.#opened += 1;
  }

  async #search(words, opened) {
    await this.#said(async () => {
      const { hits, degraded } = await call("GET", `memory?limit=${PAGE}&query=${encodeURIComponent(words)}`);
      if (opened !== this.#opened) return;
      this.list.append(...hits.map((hit) => this.#row(hit)));
      this.note.textContent = degraded || (hits.length ? "" : "Nothing fits.");
    });
  }

  async #next(opened) {
    await this.#said(async () => {
      const after = this.#cursor ? `&cursor=${encodeURIComponent(this.#cursor)}` : "";
      const [{ engrams, cursor, total }, { parts }] = await Promise.all([
        call("GET", `memory/engrams?limit=${PAGE}${after}`),
        call("GET", "ready").catch(() => ({ parts: {} })),
      ]);
      if (opened !== this.#opened) return;
      this.#cursor = cursor;
      this.more.hidden = !cursor;
      this.list.append(...engrams.map((engram) => this.#row(engram)));
      const count = total ? `${total} remembered` : "Nothing is remembered yet.";
      this.note.textContent = [count, parts.memory?.reason].filter(Boolean).join(" · ");
    });
  }

  async #said(work) {
    try {
      await work();
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  #row(engram) {
    const { id, kind, query, answer, content, topic, respondent_id: respondent } = engram;
    const title = kind === "turn" ? query : topic || content || query;
    const words = make("div", { class: "prose" });
    const details = make("details", {}, make("summary", {}, title), words);
    details.addEventListener("toggle", () => {
      if (details.open && !words.childNodes.length) this.#tell(id, words, answer || content || "");
    });
    const row = make("li", {}, details, make("p", { class: "known" }, ...marks(engram),
      make("span", { class: "meta" }, [respondent && `respondent ${respondent}`, age(engram.age_seconds)].filter(Boolean).join(" · ")),
      make("button", {
        type: "button", class: "delete", title: "Forget", "aria-label": `Forget: ${title}`,
        onclick: () => this.#forget(id, title, row),
      }, "×")));
    return row;
  }

  /** Everything of one engram, when somebody looks at it. */
  async #tell(id, words, brief) {
    words.replaceChildren(make("p", {}, brief));
    await this.#said(async () => {
      const { answer, content, model, annotations } = await call("GET", `memory/engrams/${encodeURIComponent(id)}`);
      words.replaceChildren(make("p", {}, answer || content || brief));
      const { critique, pairwise } = annotations ?? {};
      if (critique?.feedback) words.append(make("p", { class: "meta" }, `critic: ${critique.feedback}`));
      if (pairwise?.reason) words.append(make("p", { class: "meta" }, `compared: ${pairwise.reason}`));
      if (model) words.append(make("p", { class: "meta" }, model));
    });
  }

  async #forget(id, title, row) {
    if (!confirm(`Forget this for good?\n\n${title}`)) return;
    await this.#said(async () => {
      await call("DELETE", `memory/engrams/${encodeURIComponent(id)}`);
      row.remove();
      this.note.textContent = "Forgotten.";
    });
  }
}

/** What is known of an engram, as marks. */
function marks({ score, pairwise_winner: won, pairwise_verdict: verdict, sentiment, tainted }) {
  const found = [];
  const colour = colourOf(score);
  if (colour) found.push(make("span", { class: `badge ${colour}`, title: "Critic's score" }, `${score}/5`));
  if (verdict) found.push(make("span", { class: "badge verdict", title: "Compared with the other respondent" },
    verdictOf(won ?? null)));
  if (sentiment) {
    const good = sentiment === "positive";
    found.push(make("span", { class: "voted", role: "img", "aria-label": good ? "Voted good" : "Voted bad" }, thumb(!good)));
  }
  if (tainted) found.push(make("span", { class: "badge verdict", title: "It holds text from the web" }, "from the web"));
  return found;
}

export function age(seconds) {
  const steps = [[60, "s"], [60, "min"], [24, "h"], [365, "d"]];
  let value = Math.max(0, seconds ?? 0);
  for (const [size, unit] of steps) {
    if (value < size) return `${Math.floor(value)} ${unit} ago`;
    value /= size;
  }
  return `${Math.floor(value)} y ago`;
}
