// The side panel: who is alive, what waits, and everything that is published, for administrators.

import { call } from "./api.js";
import { follow, sleep } from "./events.js";
import { make } from "./element.js";

const INTERVAL = 2_000;
const KEPT = 100;

export class BusPanel {
  #stop = null;

  constructor(element) {
    this.participants = element.querySelector("#participants tbody");
    this.streams = element.querySelector("#streams tbody");
    this.streamsNote = element.querySelector("#streams-note");
    this.tail = element.querySelector("#bus-events");
    this.tailNote = element.querySelector("#bus-events-note");
  }

  /** Shows what is going on until `close`. Nothing is asked while the page is hidden. */
  open() {
    this.close();
    this.#stop = new AbortController();
    const { signal } = this.#stop;
    this.#poll(signal);
    this.#listen(signal);
  }

  close() {
    this.#stop?.abort();
    this.#stop = null;
  }

  async #poll(signal) {
    let admin = true;
    while (!signal.aborted) {
      if (!document.hidden) {
        try {
          this.#showParticipants((await call("GET", "participants")).participants);
          if (admin) this.#showStreams((await call("GET", "bus/streams")).streams);
        } catch (error) {
          if (error.status === 403) admin = false;
          if (error.status === 401) return;
          this.streamsNote.textContent = admin ? error.message : "Streams are shown to administrators.";
          this.streams.closest("table").hidden = true;
        }
      }
      await sleep(INTERVAL, signal);
    }
  }

  #showParticipants(found) {
    const sum = (items, field) => items.reduce((total, item) => total + (item[field] ?? 0), 0);
    this.participants.replaceChildren(...found.map(({ name, replicas, work }) => {
      const states = replicas.map((one) => (one.replica ? `${one.replica}: ${one.state}` : one.state)).join("\n");
      return make("tr", { class: replicas.length ? null : "absent" },
        make("th", { scope: "row", title: states || "no live replica" }, name),
        make("td", {}, String(replicas.length)),
        make("td", {}, work ? `${sum(replicas, "in_flight")}/${sum(replicas, "concurrency")}` : "–"),
        make("td", {}, work ? String(sum(work, "backlog")) : "–"));
    }));
  }

  #showStreams(found) {
    this.streams.closest("table").hidden = false;
    this.streamsNote.textContent = "";
    this.streams.replaceChildren(...found.map(({ subject, length, groups }) => {
      const total = (field) => (groups.length ? String(groups.reduce((n, g) => n + (g[field] ?? 0), 0)) : "–");
      return make("tr", {}, make("th", { scope: "row" }, subject), make("td", {}, String(length)),
        make("td", {}, total("lag")), make("td", {}, total("pending")));
    }));
  }

  async #listen(signal) {
    this.tail.replaceChildren();
    this.tailNote.textContent = "";
    try {
      await follow("bus/events?last=20", {
        signal,
        onEvent: (_type, _id, event) => this.#showEvent(event),
        onWaiting: (ms) => { this.tailNote.textContent = ms ? "Connection lost; trying again." : ""; },
      });
    } catch (error) {
      this.tailNote.textContent = error.status === 403 ? "Events are shown to administrators." : error.message;
    }
  }

  #showEvent(event) {
    if (this.tail.querySelector(`[data-entry="${CSS.escape(`${event.subject} ${event.entry_id}`)}"]`)) return;
    const at = new Date(Number(event.time) || Number(event.entry_id.split("-")[0]));
    const details = make("details", {}, make("summary", {},
      make("time", {}, at.toLocaleTimeString([], { hour12: false })), " ", make("b", {}, event.subject), " ",
      make("span", {}, event.source ?? "")));
    // the text of an event is made when somebody looks at it
    details.addEventListener("toggle", () => {
      if (details.open && details.childNodes.length === 1) {
        details.append(make("pre", { tabindex: "0" }, JSON.stringify(event, null, 2)));
      }
    });
    const row = make("li", { "data-entry": `${event.subject} ${event.entry_id}` }, details);
    this.tail.prepend(row);
    while (this.tail.childNodes.length > KEPT) this.tail.lastChild.remove();
  }
}
