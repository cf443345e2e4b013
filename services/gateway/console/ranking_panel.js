// The leaderboard: configurations by the judge and by people, and whether one's own conversations may be used.

import { call } from "./api.js";
import { make } from "./element.js";

const percent = (share) => `${Math.round(share * 100)} %`;

export class RankingPanel {
  #board = null;

  constructor(element) {
    this.note = element.querySelector("#ranking-note");
    this.tables = element.querySelector("#ranking-tables");
    this.intent = element.querySelector("#ranking-intent");
    this.consent = element.querySelector("#consent");
    this.consentNote = element.querySelector("#consent-note");
    this.intent.addEventListener("change", () => this.#show());
    this.consent.addEventListener("change", () => this.#say());
  }

  async open() {
    this.note.textContent = "";
    try {
      const { consent } = await call("GET", "preferences/consent");
      this.consent.checked = consent === true;
      this.consentNote.textContent = consent === null ? "You have not said yet: that counts as no." : "";
      this.#board = await call("GET", "preferences/leaderboard");
      const chosen = this.intent.value;
      this.intent.replaceChildren(make("option", { value: "" }, "All turns"),
        ...Object.keys(this.#board.intents).map((name) => make("option", { value: name, selected: name === chosen }, name)));
      this.#show();
    } catch (error) {
      this.note.textContent = error.status === 403 ? "The ranking is shown to administrators." : error.message;
    }
  }

  close() {}

  #show() {
    const board = this.#board;
    const shown = this.intent.value ? board.intents[this.intent.value] : board;
    if (!shown) return;
    this.tables.replaceChildren(...ranking("By the judge", shown.judge), ...bias(shown.judge),
      ...ranking("By people", shown.people), ...(this.intent.value ? [] : agreed(board.agreement)));
  }

  async #say() {
    try {
      const { consent } = await call("PUT", "preferences/consent", { consent: this.consent.checked });
      this.consent.checked = consent === true;
      this.consentNote.textContent = "Kept.";
    } catch (error) {
      this.consent.checked = !this.consent.checked;
      this.consentNote.textContent = error.message;
    }
  }
}

function ranking(title, { rows, note }) {
  const heading = make("h3", {}, title);
  if (!rows.length) return [heading, make("p", {}, "Nothing to rank yet.")];
  return [heading, make("ol", { class: "ranking" }, ...rows.map((row) => make("li", {},
    make("span", { class: "name" }, row.name), bar(row),
    make("span", { class: "meta" }, `${percent(row.win_rate)} [${percent(row.win_rate_low)} to ${percent(row.win_rate_high)}]`
      + ` · ${row.wins} won, ${row.ties} tied, ${row.losses} lost`)))),
    ...(note ? [make("p", {}, note)] : [])];
}

/** The chance against the others, with its interval as a line. */
function bar({ win_rate: value, win_rate_low: low, win_rate_high: high }) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 100 8");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "bar");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${percent(value)}, between ${percent(low)} and ${percent(high)}`);
  const rect = (name, x, y, width, height) => {
    const shape = document.createElementNS(space, "rect");
    for (const [key, number] of Object.entries({ x, y, width: Math.max(0, width), height })) shape.setAttribute(key, number);
    shape.setAttribute("class", name);
    svg.append(shape);
  };
  rect("ground", 0, 0, 100, 8);
  rect("value", 0, 0, value * 100, 8);
  rect("interval", low * 100, 3, (high - low) * 100, 2);
  return svg;
}

function bias({ disagreement, bias: towards, bias_low: low, bias_high: high }) {
  if (disagreement === null) return [];
  const signed = (number) => (number < 0 ? "" : "+") + number.toFixed(2);
  const standing = towards === null ? "" : ` Standing first is worth ${signed(towards)} [${signed(low)}, ${signed(high)}] log-odds.`;
  return [make("p", { class: "meta" }, `The two orders disagree in ${percent(disagreement)}.${standing}`)];
}

function agreed({ cases, share }) {
  return share === null ? [] : [make("p", { class: "meta" }, `Judge and people agree on ${percent(share)} of ${cases} answers.`)];
}
