// What a message of the bus says, in a line; and the messages of one question in their order.

import type { BusEntry } from "./asking";
import { counted } from "../words";

const BEGINNING = 160;

type Payload = Record<string, unknown>;

const payloadOf = (entry: BusEntry): Payload => (typeof entry.payload === "object" && entry.payload !== null ? (entry.payload as Payload) : {});
const words = (value: unknown): string => (typeof value === "string" ? value : "");
const count = (value: unknown): number => (Array.isArray(value) ? value.length : 0);

/** The beginning of a text, on one line. */
export function beginning(text: string, length = BEGINNING): string {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length).trimEnd()}…` : line;
}

export function summaryOf(entry: BusEntry): string {
  const payload = payloadOf(entry);
  const { subject } = entry;
  if (subject.startsWith("tool.request.")) return beginning(`asks for ${fieldsOf(payload["args"] ?? {})}`);
  if (subject.startsWith("tool.result.")) {
    const took = typeof payload["duration_ms"] === "number" ? ` (${payload["duration_ms"]} ms)` : "";
    return payload["error"] ? beginning(`failed${took}: ${words(payload["error"])}`) : beginning(`${count(payload["data"]) ? `${count(payload["data"])} found` : "done"}${took}: ${words(payload["result"])}`);
  }
  switch (subject) {
    case "query.received": return beginning(words(payload["query"]));
    case "response.generation": {
      const parts = [beginning(words(payload["answer"])) || "no answer"];
      if (words(payload["thinking"])) parts.push(`thought: ${beginning(words(payload["thinking"]), 60)}`);
      const tools = count(payload["tool_calls"]);
      if (tools) parts.push(counted(tools, "tool"));
      return parts.join(" · ");
    }
    case "answer.dialog": return beginning(words(payload["answer"]));
    case "agent.transition": return `${words(payload["from"])} → ${words(payload["to"])} (${words(payload["action"])})`;
    case "critique.result": return beginning(`${payload["score"] === null || payload["score"] === undefined ? "no grade" : `${String(payload["score"])} of 5`}: ${words(payload["feedback"])}`);
    case "pairwise.result": return beginning(`${payload["winner"] === "tie" ? "as good as each other" : `${words(payload["winner"])} is better`}: ${words(payload["reason"])}`);
    case "user.feedback": return [payload["withdrawn"] === true ? "withdrawn" : "", words(payload["sentiment"]), typeof payload["stars"] === "number" ? counted(payload["stars"], "star") : "", words(payload["comment"])].filter(Boolean).join(", ");
    case "reward.event": return payload["withdrawn"] === true ? `vote withdrawn for ${words(payload["respondent_id"])}` : `reward ${String(payload["reward"])} for ${words(payload["respondent_id"])}`;
    case "settings.update": return beginning(`${words(payload["participant"])}: ${Object.keys((payload["values"] as object | null) ?? {}).join(", ")}`);
    case "memory.changed": return changed(payload);
    case "memory.save": return beginning(words(payload["topic"]) || words(payload["content"]) || words(payload["query"]));
    case "dead.letter": return beginning(`${words(payload["stream"])}: ${words(payload["reason"])}`);
    case "query.cancel": return `stops ${words(payload["query_id"])}`;
    case "tool.schema": return words((payload["function"] as Payload | undefined)?.["name"]) || fieldsOf(entry.payload);
    case "memory.classify": return `what ${words(payload["id"])} is about is to be told`;
    case "knowledge.read": return `facts of ${words(payload["response_id"])} are to be read`;
    default: return fieldsOf(entry.payload);
  }
}

/** Of a message that has no words of its own here: its fields, as people read them. */
function fieldsOf(payload: unknown): string {
  if (typeof payload !== "object" || payload === null || Array.isArray(payload)) return beginning(JSON.stringify(payload) ?? "");
  const parts = Object.entries(payload).filter(([, value]) => value !== null && value !== "").map(([name, value]) => `${name.replaceAll("_", " ")} ${said(value)}`);
  return beginning(parts.join(" · "));
}

function said(value: unknown): string {
  if (Array.isArray(value)) return value.length > 3 ? `${value.length} of them` : value.map(said).join(", ") || "none";
  if (typeof value === "object" && value !== null) return Object.keys(value).join(", ") || "none";
  return String(value);
}

function changed(payload: Payload): string {
  if (payload["all"] === true) return "everything was removed";
  const parts = [[count(payload["put"]), "kept"], [count(payload["removed"]), "removed"]].filter(([number]) => number);
  return parts.map(([number, what]) => `${number} ${what}`).join(", ") || "nothing";
}

/** The question that a message belongs to; "" for none. */
export function questionOf(entry: BusEntry): string {
  if (entry.subject === "query.received") return entry.entry_id;
  const payload = payloadOf(entry);
  const correlated = (entry as unknown as Payload)["correlation_id"];
  return words(correlated) || words(payload["query_id"]) || words(payload["original_query_id"]);
}

export function sessionOf(entry: BusEntry): string {
  return words((entry as unknown as Payload)["session_id"]) || words(payloadOf(entry)["session_id"]);
}

/** Whether a message only says in which state somebody is: most of them do. */
export const isState = (entry: BusEntry): boolean => entry.subject === "agent.transition";

export const participantOf = (entry: BusEntry): string => (entry.source ?? "").split("/")[0]!;

/** When a message was published, in ms. */
export function timeOf(entry: BusEntry): number {
  return Number(entry.time) || Number(entry.entry_id.split("-")[0]) || 0;
}

export interface Wanted {
  subject: string;
  session: string;
  question: string;
  participant: string;
}

/** Whether a message is one that is looked for; a subject may be a beginning. */
export function fits(entry: BusEntry, { subject, session, question, participant }: Wanted): boolean {
  return (!subject || entry.subject.startsWith(subject.replace(/\*$/, "")) || entry.subject.includes(subject))
    && (!session || sessionOf(entry).startsWith(session))
    && (!question || questionOf(entry).startsWith(question))
    && (!participant || participantOf(entry) === participant);
}

export interface Span {
  entry: BusEntry;
  /** ms after the first message. */
  start: number;
  /** ms until the same participant says something again about it; 0 for its last message. */
  length: number;
}

/** One question from its arrival to its judge, the oldest message first. */
export function spansOf(entries: readonly BusEntry[], question: string): Span[] {
  const own = entries.filter((entry) => questionOf(entry) === question).sort((a, b) => order(a, b));
  const first = own.length ? timeOf(own[0]!) : 0;
  return own.map((entry, at) => {
    const next = entry.source && own.slice(at + 1).find((one) => one.source === entry.source && respondentOf(one) === respondentOf(entry));
    const start = Math.max(0, timeOf(entry) - first);
    return { entry, start, length: next ? Math.max(0, timeOf(next) - timeOf(entry)) : 0 };
  });
}

/** The messages, with those of a question that only its event log names: they have no content. */
export function withLog(entries: readonly BusEntry[], question: string, log: readonly { subject: string; id: string }[]): BusEntry[] {
  const known = new Set(entries.map((entry) => `${entry.subject} ${entry.entry_id}`));
  const gone = log.filter(({ subject, id }) => !known.has(`${subject} ${id}`));
  return [...entries, ...gone.map(({ subject, id }) => ({ subject, entry_id: id, correlation_id: question }) as unknown as BusEntry)];
}

export const respondentOf = (entry: BusEntry): string => words((entry as unknown as Payload)["respondent_id"]);

function order(a: BusEntry, b: BusEntry): number {
  const arrived = Number(b.subject === "query.received") - Number(a.subject === "query.received");
  return arrived || timeOf(a) - timeOf(b) || a.entry_id.localeCompare(b.entry_id, "en", { numeric: true });
}
