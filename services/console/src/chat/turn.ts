// One question and everything that happened to it, as plain data. Pure: journal entries in, the page's view out.

import type { components } from "../api/schema";
import type { FileOf } from "../files";
import type { Call, Critique, Failure, JournalEvent, Pairwise, Reward, Usage } from "../api/types";
import { counted } from "../words";
import { dataOf, isAfter, newResponse, reduce, spentOf, textOf, answerOf as answerSoFar, type ResponseState, type Speaker, type ToolCall } from "./response";

export interface Thinking { kind: "thinking"; text: string }
export interface Said { kind: "said"; text: string }
export interface Tool { kind: "tool"; call: Call }
export interface Note { kind: "note"; text: string }
export interface Persona { kind: "persona"; persona: string; round: number; done: boolean; steps: Step[]; text: string }
export type Step = Thinking | Said | Tool | Note | Persona;

export type State = "queued" | "running" | "completed" | "failed" | "cancelled";

export interface Turn {
  query: string;
  files: readonly FileOf[];
  queryId: string;
  /** The turn before it is the newest one that was not accepted after this query; null: the one before it in the session. */
  after: string | null;
  state: State;
  /** When it was asked, in ms since the epoch; 0: not known. */
  time: number;
  mode: string;
  /** The answer of a turn whose journal is not loaded. */
  answer: string;
  response: ResponseState;
  error: Failure | null;
  critique: Critique | null;
  pairwise: Pairwise | null;
  reward: Reward | null;
  interrupted: boolean;
  /** Whether the server takes a vote on it: not any more some time after the answer, nor of what was imported. */
  rateable: boolean;
  /** How much is known beside question and answer: nothing yet, everything, or no more than is left of it. */
  detail: "none" | "whole" | "expired";
}

export function newTurn(query: string, values: Partial<Turn> = {}): Turn {
  return {
    query, files: [], queryId: "", after: null, state: "queued", time: 0, mode: "chat", answer: "", response: newResponse(), error: null, critique: null,
    pairwise: null, reward: null, interrupted: false, rateable: true, detail: "none", ...values,
  };
}

export const isOver = ({ state }: Turn): boolean => state !== "queued" && state !== "running";

/** Take one journal entry into the turn. An entry that was seen before changes nothing. */
export function apply(turn: Turn, type: string, id: string, data: unknown): void {
  const { response } = turn;
  if (response.last && id && !isAfter(id, response.last)) return;
  const entry = { event: type, id, data } as JournalEvent;
  const counts = reduce(response, entry);
  turn.state = response.end?.event ?? "running";
  turn.detail = response.end ? "whole" : turn.detail;
  if (!counts) return;
  switch (entry.event) {
    case "claimed":
      if (entry.data.attachments?.length) turn.files = entry.data.attachments.map((file) => filled(file, turn.files));
      break;
    case "failed":
      turn.error = { code: entry.data.code, message: entry.data.message };
      break;
    case "critique":
      turn.critique = entry.data;
      break;
    case "pairwise":
      turn.pairwise = entry.data;
      break;
    case "reward":
      turn.reward = entry.data.reward === null ? null : entry.data;
  }
}

/** The answer, or its text so far. */
export function answerOf({ answer, response }: Turn): string {
  const { end } = response;
  if (end?.event === "completed") return end.data.answer;
  return (end?.event === "cancelled" && end.data.answer) || answerSoFar(response) || answer;
}

export function modelOf({ response }: Turn): string | null {
  const claimed = dataOf(response, "claimed").findLast(({ model }) => model)?.model ?? null;
  return (response.end?.event === "completed" && response.end.data.model) || claimed;
}

export const finishOf = ({ response: { end } }: Turn): string | null => (end?.event === "completed" ? end.data.finish_reason : null);

export const usageOf = ({ response }: Turn): Usage => (response.end?.event === "completed" && response.end.data.usage) || spentOf(response);

/** The states of the state machine, in order. */
export function trailOf({ response }: Turn): string[] {
  const states = dataOf(response, "state");
  return [...states.slice(0, 1).map(({ from }) => from), ...states.map(({ to }) => to), ...(response.end ? ["IDLE"] : [])];
}

/** What happened before the answer, in order. */
export function stepsOf({ response }: Turn): Step[] {
  const steps: Step[] = [];
  const members = new Map<string, Persona>();
  const member = ([persona, round]: NonNullable<Speaker>): Persona => {
    const known = members.get(`${persona} ${round}`);
    if (known) return known;
    const fresh: Persona = { kind: "persona", persona, round, done: false, steps: [], text: "" };
    members.set(`${persona} ${round}`, fresh);
    steps.push(fresh);
    return fresh;
  };
  for (const part of response.parts) {
    const speaker = part.speaker && member(part.speaker);
    const own = speaker ? speaker.steps : steps;
    if (part.kind === "thinking") {
      const last = own.at(-1);
      if (last?.kind === "thinking") last.text += textOf(part);
      else own.push({ kind: "thinking", text: textOf(part) });
    } else if (part.kind === "answer") {
      if (part.said && textOf(part).trim()) own.push({ kind: "said", text: textOf(part) });
      else if (speaker && !part.said) speaker.text += textOf(part);
    } else if (part.kind === "call") {
      own.push({ kind: "tool", call: callOf(part) });
    } else if (part.kind === "entry") {
      if (speaker && part.entry.event === "persona.done") speaker.done = true;
      for (const text of notesOf(part.entry)) if (!steps.some((step) => step.kind === "note" && step.text === text)) steps.push({ kind: "note", text });
    }
  }
  return steps;
}

const callOf = ({ asked, answered }: ToolCall): Call => (answered ? { ...asked, ...answered } : { ...asked!, result: null });

/** Return what the page says about an entry. */
function notesOf(entry: JournalEvent): string[] {
  switch (entry.event) {
    case "notice":
      return [entry.data.message || entry.data.code];
    case "attachments":
      return notSent(entry.data);
    case "context.truncated":
      return leftOut(entry.data);
    case "restarted":
      return ["The model was started again; its unfinished text was discarded."];
    default:
      return [];
  }
}

/** Return a file of the journal with the session's facts about it: the journal does not record a deletion. */
function filled(file: components["schemas"]["Attached"], known: readonly FileOf[]): FileOf {
  const before = known.find((one) => one.id === file.id);
  return { ...file, name: file.name || before?.name || "a file", type: file.type || before?.type || "", size: file.size ?? before?.size ?? null, pages: file.pages ?? before?.pages ?? null, deleted: before?.deleted ?? false };
}

/** Return sentences about turns and images that the model no longer gets. */
function leftOut({ dropped_turns, kept_turns, attachments = [] }: components["schemas"]["Truncated"]): string[] {
  return [
    dropped_turns ? `The oldest turns no longer fit the model's context: ${counted(dropped_turns, "turn")} left out, ${kept_turns} kept.` : "",
    tooLarge(attachments),
  ].filter(Boolean);
}

/** Return sentences about files of earlier messages that the model does not get; it can search documents. */
function notSent({ files }: components["schemas"]["FilesSent"]): string[] {
  const of = (form: string) => files.filter(({ sent }) => sent === form);
  const told = (form: string, text: string) => (of(form).length ? `${text}: ${namesOf(of(form))}.` : "");
  return [
    tooLarge(of("left_out")),
    told("unseen", "This model sees no images. It was given only the names of earlier ones"),
    told("unreadable", "The text of these files could not be read"),
    told("away", "The memory is away, so that the model did not get these files"),
  ].filter(Boolean);
}

const namesOf = (files: readonly { name?: string }[]): string => files.map(({ name }) => name || "a file").join(", ");

const tooLarge = (images: readonly { name?: string }[]): string =>
  images.length ? `Images of earlier messages no longer fit the model's context: ${namesOf(images)}. Attach them again to ask about them.` : "";

/** A page that an answer rests on. */
export interface Source {
  url: string;
  title: string;
}

/** The pages that the answer rests on: those that were read, else those that were found; each once. */
export function sources(turn: Turn): Source[] {
  const found = new Map<string, Source>();
  for (const part of turn.response.parts) {
    if (part.kind !== "call") continue;
    const call = callOf(part);
    if (call.error) continue;
    for (const one of call.tool === "web_fetch" ? [{ ...record(call.data), url: call.args["url"] }] : hits(call)) {
      const { url, title } = one as { url?: unknown; title?: unknown };
      if (typeof url !== "string" || !/^https?:/i.test(url)) continue;
      found.set(url, { url, title: typeof title === "string" && title ? title : (found.get(url)?.title ?? url) });
    }
  }
  return [...found.values()].slice(0, 20);
}

/** What a search has found, whatever it is. */
export function hits(call: Call): Record<string, unknown>[] {
  const data = call.data;
  const list = Array.isArray(data) ? data : (record(data)["hits"] ?? record(data)["facts"]);
  return Array.isArray(list) ? list.filter((one) => typeof one === "object" && one !== null) : [];
}

function record(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Record<string, unknown>) : {};
}
