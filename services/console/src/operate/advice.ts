// What an operator can do about a part that is not well.

import type { components } from "../api/schema";
import { counted } from "../words";

type Part = components["schemas"]["PartState"];
type Participant = components["schemas"]["Participant"];

const TODO: Record<string, string> = {
  bus: "See that Redis runs and has room; what was asked is kept and goes on when it is back.",
  generator: "Start a generator: local2 run starts one, in containers it is the service generator. Its log says why it ended.",
  model: "See that the model server runs at the address of the settings and has the model; the generator finds it again by itself.",
  memory: "Questions are answered without memories until it is back. Start it, or see its log for why it ended.",
  tools: "Start the participants that offer them; until then the model answers without them.",
  gateway: "The gateway does not answer: start it again, or see its log.",
};

/** A sentence for a part that is not well; "" for one that is. */
export function advice(name: string, part: Part): string {
  if (part.ok) return part.demo ? "Answers come from a script, not from a model: start a model server and name it in the settings." : "";
  return TODO[name] ?? "Its log says why.";
}

export interface Warning {
  participant: string;
  words: string;
  todo: string;
}

/** What replicas say of themselves that an operator should know, once for each participant. */
export function warningsOf(participants: readonly Participant[]): Warning[] {
  const found = new Map<string, Warning>();
  const warn = (participant: string, words: string, todo = "") => {
    if (!found.has(`${participant} ${words}`)) found.set(`${participant} ${words}`, { participant, words, todo });
  };
  for (const { name, replicas, work } of participants) {
    const waiting = (work ?? []).reduce((sum, one) => sum + (one.backlog ?? 0), 0);
    if (!replicas.length) warn(name, waiting ? `No replica is alive, and ${counted(waiting, "message")} ${waiting === 1 ? "waits" : "wait"}.` : "No replica is alive.", "Start it; what waits is handled then. Where it is not wanted, nothing is to be done.");
    for (const { facts = {} } of replicas) {
      for (const [fact, value] of Object.entries(facts)) {
        if (typeof value === "string" && value && (fact === "degraded" || fact.endsWith("_reason"))) warn(name, value);
        if (fact === "gpu_note" && typeof value === "string" && value) warn(name, value, "Answers come faster when the model server computes on the GPU.");
        if (value === false && fact.endsWith("_ok") && !facts[fact.replace(/_ok$/, "_reason")] && !facts["degraded"]) warn(name, `Its ${fact.slice(0, -3).replaceAll("_", " ")} is not well.`);
      }
    }
  }
  return [...found.values()];
}
