// A turn on the page: the question, what happened, the answer, and what can be done with it.

import { make } from "./element.js";
import { CritiqueView, RatingView } from "./judging.js";
import { show } from "./markdown.js";
import { isOver, textOf } from "./turn.js";

const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

/** Draws a turn at most once per frame, however often `changed` is called. */
export class TurnView {
  #waiting = false;
  #parts = new Map();
  #vote = null;

  /** rate(vote): the user's opinion; resolves when it was taken. */
  constructor(turn, { rate }) {
    this.turn = turn;
    this.steps = make("div", { class: "steps" });
    this.answer = make("div", { class: "answer", "aria-live": "polite", "aria-busy": "true" });
    this.trail = make("p", { class: "trail", "aria-label": "State machine" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.meta = make("span", { class: "meta" });
    this.judged = new CritiqueView();
    this.rating = new RatingView(rate);
    this.foot = make("footer", { hidden: true }, this.judged.buttons, this.rating.element, this.meta);
    this.element = make("article", { class: "turn", "aria-label": "Question and answer" },
      make("div", { class: "question" }, turn.query), this.steps, this.answer, this.error, this.trail, this.foot,
      this.judged.words);
    this.draw();
  }

  changed() {
    if (this.#waiting) return;
    this.#waiting = true;
    // frames stop in a hidden tab; its text may wait until it is seen
    requestAnimationFrame(() => { this.#waiting = false; this.draw(); });
  }

  draw() {
    const { turn } = this;
    const over = isOver(turn);
    const text = textOf(turn.pieces);
    drawParts(this.steps, turn.parts, this.#parts, { over, answering: text !== "" });
    show(this.answer, text);
    const busy = String(!over);
    if (this.answer.getAttribute("aria-busy") !== busy) this.answer.setAttribute("aria-busy", busy);
    this.element.classList.toggle("running", !over);
    this.#drawTrail();
    this.error.hidden = !turn.error && turn.state !== "cancelled" && !turn.interrupted;
    if (turn.error) setText(this.error, `Error: ${turn.error.message} (${turn.error.code})`);
    else if (!this.error.hidden) setText(this.error, "Stopped before the end.");
    this.foot.hidden = !over;
    this.rating.element.hidden = !turn.queryId || turn.state === "failed";
    setText(this.meta, summary(turn));
    this.judged.update(turn);
    if (turn.reward !== this.#vote) this.rating.update(this.#vote = turn.reward);
  }

  #drawTrail() {
    const { trail, state } = this.turn;
    this.trail.hidden = !trail.length && state !== "queued";
    const passed = trail.slice(0, -1).map((name) => `${name} → `).join("");
    const current = trail.at(-1) ?? "waiting for a generator";
    if (this.trail.textContent !== passed + current) this.trail.replaceChildren(passed, make("strong", {}, current));
  }
}

function summary(turn) {
  const { prompt_tokens: prompt, completion_tokens: completion } = turn.usage ?? {};
  const counted = prompt || completion ? `${prompt} + ${completion} tokens` : "";
  const cut = turn.finish === "length" ? "cut at the length limit" : "";
  return [turn.model, counted, cut].filter(Boolean).join(" · ");
}

/** Brings the elements of a list of parts up to date; `known` remembers them between calls. */
function drawParts(parent, parts, known, now) {
  for (const [part, view] of known) {
    if (!parts.includes(part)) {
      view.element.remove();
      known.delete(part);
    }
  }
  parts.forEach((part, at) => {
    let view = known.get(part);
    if (!view) {
      view = PARTS[part.kind](part);
      known.set(part, view);
    }
    if (parent.childNodes[at] !== view.element) parent.insertBefore(view.element, parent.childNodes[at] ?? null);
    view.update({ ...now, last: at === parts.length - 1 });
  });
}

const PARTS = {
  thinking(part) {
    const text = make("div", { class: "prose" });
    const label = make("summary", {}, "Thinking");
    const element = make("details", { class: "thinking" }, label, text);
    let chosen = false;
    label.addEventListener("click", () => { chosen = true; });
    return {
      element,
      update({ over, answering, last }) {
        setText(text, textOf(part.pieces));
        const live = last && !over && !answering;
        // open while it is being thought; afterwards as the user left it
        if (!chosen && element.open !== live) element.open = live;
        setText(label, live ? "Thinking …" : "Thought");
      },
    };
  },

  said(part) {
    const element = make("div", { class: "said" });
    show(element, part.text);
    return { element, update() {} };
  },

  note(part) {
    return { element: make("p", { class: "note" }, part.text), update() {} };
  },

  tool(part) {
    const status = make("span", { class: "tool-status" });
    const result = make("pre", { tabindex: "0" });
    const args = part.call.args ?? {};
    const element = make("details", { class: "tool" },
      make("summary", {}, make("span", { class: "tool-name" }, part.call.tool), " ",
        make("span", { class: "tool-args" }, brief(args)), " ", status),
      make("h3", {}, "Arguments"), make("pre", { tabindex: "0" }, JSON.stringify(args, null, 2)),
      make("h3", {}, "Result"), result);
    return {
      element,
      update({ over }) {
        const { error, duration_ms: ms } = part.call;
        const answered = part.call.result !== null && part.call.result !== undefined;
        const took = ms === undefined ? "" : duration(ms);
        element.classList.toggle("failed", Boolean(error));
        setText(status, error ? `error ${took}` : answered ? took || "done" : over ? "no result" : "running …");
        const text = part.call.result || "";
        setText(result, error && !text.includes(error) ? `${error}\n${text}`.trim() : text || "…");
      },
    };
  },

  persona(part) {
    const steps = make("div", { class: "steps" });
    const text = make("div", { class: "prose" });
    const label = make("summary", {});
    const element = make("details", { class: "persona", open: true }, label, steps, text);
    const known = new Map();
    return {
      element,
      update({ over }) {
        setText(label, `${part.persona}, round ${part.round}${part.done || over ? "" : " …"}`);
        drawParts(steps, part.parts, known, { over: over || part.done, answering: part.pieces.length > 0 });
        show(text, textOf(part.pieces));
      },
    };
  },
};

const duration = (ms) => (ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`);

function brief(args) {
  const values = Object.values(args);
  const text = values.length === 1 && typeof values[0] === "string" ? values[0] : JSON.stringify(args);
  return text.length > 80 ? `${text.slice(0, 80)}…` : text;
}
