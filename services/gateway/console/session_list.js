// The list of the user's sessions.

import { call } from "./api.js";
import { make } from "./element.js";

const PAGE = 50;

export class SessionList {
  #shown = PAGE;

  /** onOpen(id): a session was chosen. onDeleted(id): it is gone. onError(error) */
  constructor(list, more, { onOpen, onDeleted, onError }) {
    this.list = list;
    this.more = more;
    this.current = null;
    this.handlers = { onOpen, onDeleted, onError };
    more.addEventListener("click", () => {
      this.#shown += PAGE;
      this.refresh().catch(onError);
    });
  }

  /** Asks for the list again. Raises ApiError. */
  async refresh() {
    const found = [];
    while (found.length < this.#shown) {
      const { sessions } = await call("GET", `sessions?limit=${PAGE}&offset=${found.length}`);
      found.push(...sessions);
      if (sessions.length < PAGE) break;
    }
    this.more.hidden = found.length < this.#shown;
    const focused = document.activeElement?.dataset?.session;
    this.list.replaceChildren(...found.map((session) => this.#row(session)));
    if (focused) this.list.querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
  }

  mark(id) {
    this.current = id;
    for (const button of this.list.querySelectorAll("[data-session]")) {
      button.setAttribute("aria-current", String(button.dataset.session === id));
    }
  }

  #row({ session_id: id, title, updated }) {
    const name = title || id;
    return make("li", {},
      make("button", {
        type: "button", class: "session", "data-session": id, "aria-current": String(id === this.current),
        title: `${name}\n${new Date(updated).toLocaleString()}`, onclick: () => this.handlers.onOpen(id),
      }, name),
      make("button", {
        type: "button", class: "delete", "aria-label": `Delete session: ${name}`, title: "Delete",
        onclick: () => this.#delete(id, name),
      }, "×"));
  }

  async #delete(id, name) {
    if (!confirm(`Delete this session with all its turns?\n\n${name}`)) return;
    try {
      await call("DELETE", `sessions/${encodeURIComponent(id)}`);
      this.handlers.onDeleted(id);
      await this.refresh();
    } catch (error) {
      this.handlers.onError(error);
    }
  }
}
