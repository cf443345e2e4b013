// One question and everything that happened to it, as plain data. Pure: journal entries in, state out.

import type { components } from "../api/schema";
import type { FileOf } from "../files";
import type { Call, Critique, Failure, JournalEvent, Pairwise, Reward, Usage } from "../api/types";
import { counted } from "../words";

/** A piece of text with the id of its entry, so that void ones can be taken out. */
export interface Piece {
  id: string;
  text: string;
}

export interface Thinking { kind: "thinking"; pieces: Piece[] }
export interface Said { kind: "said"; text: string }
export interface Tool { kind: "tool"; call: Call }
export interface Note { kind: "note"; text: string }
export interface Persona { kind: "persona"; persona: string; round: number; done: boolean; parts: Part[]; pieces: Piece[] }
export type Part = Thinking | Said | Tool | Note | Persona;

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
  /** What happened before the answer, in order. */
  parts: Part[];
  /** The answer's text so far. */
  pieces: Piece[];
  /** The states of the state machine, in order. */
  trail: string[];
  /** The id of the last entry that was taken in. */
  last: string;
  model: string | null;
  finish: string | null;
  usage: Usage;
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

const TERMINAL: ReadonlySet<string> = new Set(["completed", "failed", "cancelled"]);

export function newTurn(query: string, values: Partial<Turn> = {}): Turn {
  return {
    query, files: [], queryId: "", after: null, state: "queued", time: 0, mode: "chat", parts: [], pieces: [], trail: [], last: "", model: null, finish: null,
    usage: { prompt_tokens: 0, completion_tokens: 0 }, error: null, critique: null, pairwise: null, reward: null, interrupted: false, rateable: true,
    detail: "none", ...values,
  };
}

// What was joined of a list that grows: a long answer has tens of thousands of pieces.
const joined = new WeakMap<readonly Piece[], { count: number; text: string }>();

/** The text of pieces. A list of them is only added to, or replaced by another one. */
export function textOf(pieces: readonly Piece[]): string {
  let { count, text } = joined.get(pieces) ?? { count: 0, text: "" };
  for (; count < pieces.length; count += 1) text += pieces[count]!.text;
  joined.set(pieces, { count, text });
  return text;
}

export const isOver = (turn: Turn): boolean => TERMINAL.has(turn.state);

/** Whether entry or query id `a` comes after `b`. */
export function isAfter(a: string, b: string): boolean {
  const [high, low] = numbers(a);
  const [otherHigh, otherLow] = numbers(b);
  return high > otherHigh || (high === otherHigh && low > otherLow);
}

function numbers(id: string): [number, number] {
  const [high, low] = id.split("-");
  return [Number(high) || 0, Number(low) || 0];
}

/** Takes one journal entry into the turn. An entry that was seen before changes nothing. */
export function apply(turn: Turn, type: string, id: string, data: unknown): void {
  if (turn.last && id && !isAfter(id, turn.last)) return;
  turn.last = id || turn.last;
  if (turn.state === "queued" && !TERMINAL.has(type)) turn.state = "running";
  // what an unknown type carries is not looked at
  const entry = { event: type, id, data } as JournalEvent;
  switch (entry.event) {
    case "claimed":
      turn.model = entry.data.model ?? turn.model;
      if (entry.data.attachments?.length) turn.files = entry.data.attachments.map((file) => filled(file, turn.files));
      break;
    case "state":
      if (!turn.trail.length) turn.trail.push(entry.data.from);
      turn.trail.push(entry.data.to);
      break;
    case "thinking":
      thinkingPart(scopeOf(turn, entry.data)).pieces.push({ id, text: entry.data.text });
      break;
    case "answer":
      scopeOf(turn, entry.data).pieces.push({ id, text: entry.data.text });
      break;
    case "message":
      settle(turn, scopeOf(turn, entry.data), entry.data);
      break;
    case "tool.request":
      scopeOf(turn, entry.data).parts.push({ kind: "tool", call: { ...entry.data, result: null, error: null } });
      break;
    case "tool.result":
      finishCall(scopeOf(turn, entry.data), entry.data);
      break;
    case "notice":
      note(turn, entry.data.message || entry.data.code);
      break;
    case "attachments":
      for (const text of notSent(entry.data)) note(turn, text);
      break;
    case "context.truncated":
      for (const text of leftOut(entry.data)) note(turn, text);
      break;
    case "restarted":
      discard(scopeOf(turn, entry.data), entry.data.discard_after || "0-0");
      note(turn, "The model was started again; its unfinished text was discarded.");
      break;
    case "persona.working":
      scopeOf(turn, entry.data);
      break;
    case "persona.done":
      scopeOf(turn, entry.data).done = true;
      break;
    case "completed":
      complete(turn, entry.data);
      break;
    case "failed":
      turn.state = "failed";
      turn.error = { code: entry.data.code, message: entry.data.message };
      end(turn);
      break;
    case "cancelled":
      turn.state = "cancelled";
      if (entry.data.answer) turn.pieces = [{ id, text: entry.data.answer }];
      end(turn);
      break;
    case "critique":
      turn.critique = entry.data;
      break;
    case "pairwise":
      turn.pairwise = entry.data;
      break;
    case "reward":
      turn.reward = entry.data.reward === null ? null : entry.data;
      break;
    default: // a newer server may say more than this page knows
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

interface Scope { parts: Part[]; pieces: Piece[] }

/** The turn itself, or the part of the persona that an entry belongs to. */
function scopeOf(turn: Turn, data: { persona?: string; round?: number }): Scope & { done?: boolean } {
  const { persona } = data;
  if (!persona) return turn;
  const round = data.round || 1;
  const known = turn.parts.find((part): part is Persona => part.kind === "persona" && part.persona === persona && part.round === round);
  if (known) return known;
  const fresh: Persona = { kind: "persona", persona, round, done: false, parts: [], pieces: [] };
  turn.parts.push(fresh);
  return fresh;
}

function thinkingPart(scope: Scope): Thinking {
  const last = scope.parts.at(-1);
  if (last?.kind === "thinking" && !scope.pieces.length) return last;
  const fresh: Thinking = { kind: "thinking", pieces: [] };
  scope.parts.push(fresh);
  return fresh;
}

/** A model call has ended. What it said before a tool call is not part of the answer. */
function settle(turn: Turn, scope: Scope, data: components["schemas"]["ModelMessage"]): void {
  turn.usage = {
    prompt_tokens: (turn.usage.prompt_tokens ?? 0) + (data.prompt_tokens ?? 0),
    completion_tokens: (turn.usage.completion_tokens ?? 0) + (data.completion_tokens ?? 0),
  };
  if (!data.tool_calls?.length) return;
  if (textOf(scope.pieces).trim()) scope.parts.push({ kind: "said", text: textOf(scope.pieces) });
  scope.pieces = [];
}

function finishCall(scope: Scope, data: components["schemas"]["ToolAnswered"]): void {
  const part = scope.parts.find((one): one is Tool => one.kind === "tool" && one.call.call_id === data.call_id);
  if (part) part.call = { ...part.call, ...data };
  else scope.parts.push({ kind: "tool", call: data });
}

function discard(scope: Scope, after: string): void {
  const kept = (piece: Piece) => !isAfter(piece.id, after);
  scope.pieces = scope.pieces.filter(kept);
  for (const part of scope.parts) {
    if (part.kind === "thinking") part.pieces = part.pieces.filter(kept);
  }
  scope.parts = scope.parts.filter((part) => part.kind !== "thinking" || part.pieces.length);
}

function complete(turn: Turn, data: components["schemas"]["Completed"]): void {
  turn.state = "completed";
  // the end is what counts: a part that never came as a delta is shown now
  turn.pieces = [{ id: turn.last, text: data.answer }];
  turn.usage = data.usage ?? turn.usage;
  turn.model = data.model ?? turn.model;
  turn.finish = data.finish_reason ?? null;
  end(turn);
}

function end(turn: Turn): void {
  turn.trail.push("IDLE");
  turn.detail = "whole";
}

function note(turn: Turn, text: string): void {
  if (!turn.parts.some((part) => part.kind === "note" && part.text === text)) turn.parts.push({ kind: "note", text });
}

/** A page that an answer rests on. */
export interface Source {
  url: string;
  title: string;
}

/** The pages that the answer rests on: those that were read, else those that were found; each once. */
export function sources(turn: Turn): Source[] {
  const calls = turn.parts.flatMap((part) => (part.kind === "persona" ? part.parts : [part])).filter((part) => part.kind === "tool");
  const found = new Map<string, Source>();
  for (const { call } of calls) {
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
