// What others think of an answer: the judge's grade and verdict, and the user's own vote, which can be changed.

import { make } from "./element.js";

const THUMB = "M3 10h4v10H3zm6 10V10l4-7c2 .3 2.6 1.700 2.200 3.400L14.500 9H20c1 0 1.6.8 1.400 1.800l-1.500 7.500c-.2 1-.9 1.700-1.900 1.700z";
const STAR = "M12 3l2.700 5.900 6.300.7-4.700 4.300 1.300 6.300L12 17l-5.600 3.200 1.300-6.300L3 9.600l6.300-.7z";

/** A drawing: not every machine has a font with it. */
function drawn(path, name = "") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  if (name) svg.setAttribute("class", name);
  shape.setAttribute("d", path);
  svg.append(shape);
  return svg;
}

export const thumb = (down) => drawn(THUMB, down ? "down" : "");

/** 5 and 4 are good, 3 is fair, 2 and 1 are poor; "" for what is no grade. */
export function colourOf(score) {
  if (!Number.isInteger(score)) return "";
  return score >= 4 ? "good" : score === 3 ? "fair" : "poor";
}

/** A verdict in a few words; won: whether this answer is the better of the two, null after a tie. */
export function verdictOf(won) {
  if (won === null) return "as good as the other";
  return won ? "better than the other" : "the other was better";
}

/** The judge's grade and verdict as buttons that show and hide its words. */
export class CritiqueView {
  #shown = "";

  constructor() {
    this.buttons = make("span", { class: "badge-slot" });
    this.words = make("div", { class: "critique", hidden: true });
  }

  update({ critique, pairwise }) {
    const state = JSON.stringify([critique, pairwise]);
    if (state === this.#shown) return;
    this.#shown = state;
    this.buttons.replaceChildren();
    this.words.replaceChildren();
    const colour = colourOf(critique?.score);
    if (colour) {
      const feedback = critique.feedback ?? "";
      this.#add(`badge ${colour}`, `${critique.score}/5`, feedback, `Critic's score: ${critique.score} of 5. ${feedback}`);
      this.words.append(make("p", {}, feedback), make("p", { class: "meta" }, `rubric: ${critique.rubric ?? "realistic"}`));
    }
    if (pairwise) {
      const { winner, reason, score_a: a, score_b: b } = pairwise;
      const text = verdictOf(winner === "tie" ? null : winner === "A");
      this.#add("badge verdict", text, reason ?? "", `Compared with the second respondent's answer: ${text}. ${reason ?? ""}`);
      const grades = Number.isFinite(a) && Number.isFinite(b) ? ` (${a} and ${b} of 5)` : "";
      this.words.append(make("p", {}, make("b", {}, "Compared: "), `${text}${grades}. ${reason ?? ""}`));
    }
  }

  #add(classes, text, title, label) {
    const button = make("button", {
      type: "button", class: classes, title, "aria-label": label, "aria-expanded": String(!this.words.hidden),
      onclick: () => {
        this.words.hidden = !this.words.hidden;
        for (const one of this.buttons.children) one.setAttribute("aria-expanded", String(!this.words.hidden));
      },
    }, text);
    this.buttons.append(button);
  }
}

/** Thumbs and stars. The last vote counts; the current one is pressed. */
export class RatingView {
  #thumbs;
  #stars;

  /** rate(vote): sends {sentiment} or {stars, sentiment?}; resolves when it was taken. */
  constructor(rate) {
    this.rate = rate;
    this.status = make("span", { class: "rated", role: "status" });
    this.#thumbs = [["positive", "Good answer"], ["negative", "Bad answer"]].map(([sentiment, label]) => ({
      sentiment,
      button: this.#button("thumb", label, thumb(sentiment === "negative"), () => ({ sentiment })),
    }));
    this.#stars = [1, 2, 3, 4, 5].map((stars) => ({
      stars,
      // three stars say neither: the thumb that is pressed stays
      button: this.#button("star", `${stars} of 5 stars`, drawn(STAR),
        () => (stars === 3 ? { stars, sentiment: this.sentiment ?? "positive" } : { stars })),
    }));
    this.element = make("span", { class: "rating", role: "group", "aria-label": "Your vote" },
      ...this.#thumbs.map(({ button }) => button),
      make("span", { class: "stars" }, ...this.#stars.map(({ button }) => button)), this.status);
  }

  /** vote: {sentiment, stars} as the server knows it, or null. */
  update(vote) {
    this.sentiment = vote?.sentiment ?? null;
    const stars = vote?.stars ?? 0;
    for (const one of this.#thumbs) one.button.setAttribute("aria-pressed", String(one.sentiment === this.sentiment));
    for (const one of this.#stars) {
      one.button.classList.toggle("on", one.stars <= stars);
      one.button.setAttribute("aria-pressed", String(one.stars === stars));
    }
  }

  #button(classes, label, picture, vote) {
    return make("button", {
      type: "button", class: classes, "aria-label": label, title: label, "aria-pressed": "false",
      onclick: async () => {
        const chosen = vote();
        try {
          const taken = await this.rate(chosen);
          this.update({ sentiment: taken?.sentiment ?? chosen.sentiment, stars: chosen.stars ?? null });
          this.status.textContent = "Thank you";
        } catch (error) {
          this.status.textContent = error.message;
        }
      },
    }, picture);
  }
}
