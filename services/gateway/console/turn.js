// One question and everything that happened to it, as plain data. Pure: journal entries in, state out.

export const TERMINAL = new Set(["completed", "failed", "cancelled"]);

/**
 * parts: what happened before the answer, in order. A part is one of
 *   {kind: "thinking", pieces} · {kind: "said", text} (before a tool call) · {kind: "tool", call} ·
 *   {kind: "persona", persona, round, done, parts, pieces} · {kind: "note", text}
 * pieces: the answer's text so far, each piece with the id of its entry, so that void ones can be taken out.
 */
export function newTurn(query) {
  return {
    query, queryId: "", state: "queued", parts: [], pieces: [], trail: [], last: "", model: null, finish: null,
    usage: { prompt_tokens: 0, completion_tokens: 0 }, error: null, critique: null, pairwise: null, reward: null, interrupted: false,
  };
}

export const textOf = (pieces) => pieces.map((piece) => piece.text).join("");

export const isOver = (turn) => TERMINAL.has(turn.state);

/** Whether entry id `a` comes after `b`. */
export function isAfter(a, b) {
  const [high, low] = numbers(a);
  const [otherHigh, otherLow] = numbers(b);
  return high > otherHigh || (high === otherHigh && low > otherLow);
}

const numbers = (id) => id.split("-").concat("0").slice(0, 2).map((part) => Number(part) || 0);

/** Takes one journal entry into the turn. An entry that was seen before changes nothing. */
export function apply(turn, type, id, data) {
  if (turn.last && id && !isAfter(id, turn.last)) return;
  turn.last = id || turn.last;
  if (turn.state === "queued" && !TERMINAL.has(type)) turn.state = "running";
  const scope = scopeOf(turn, data);
  switch (type) {
    case "claimed":
      turn.model = data.model ?? turn.model;
      break;
    case "state":
      if (!turn.trail.length) turn.trail.push(data.from);
      turn.trail.push(data.to);
      break;
    case "thinking":
      thinkingPart(scope).pieces.push({ id, text: data.text });
      break;
    case "answer":
      scope.pieces.push({ id, text: data.text });
      break;
    case "message":
      settle(turn, scope, data);
      break;
    case "tool.request":
      scope.parts.push({ kind: "tool", call: { ...data, result: null, error: null } });
      break;
    case "tool.result":
      finishCall(scope, data);
      break;
    case "notice":
      note(turn, data.message ?? data.text ?? data.code);
      break;
    case "context.truncated":
      note(turn, `The oldest turns no longer fit the model's context: ${data.dropped_turns} left out, `
        + `${data.kept_turns} kept.`);
      break;
    case "restarted":
      discard(turn, data.discard_after ?? "0-0");
      note(turn, "The model was started again; its unfinished text was discarded.");
      break;
    case "persona.done":
      scope.done = true;
      break;
    case "completed":
      complete(turn, data);
      break;
    case "failed":
      turn.state = "failed";
      turn.error = { code: data.code, message: data.message };
      turn.trail.push("IDLE");
      break;
    case "cancelled":
      turn.state = "cancelled";
      if (data.answer) turn.pieces = [{ id, text: data.answer }];
      turn.trail.push("IDLE");
      break;
    case "critique":
      turn.critique = data;
      break;
    case "pairwise":
      turn.pairwise = data;
      break;
    case "reward":
      turn.reward = data;
      break;
    default: // a newer server may say more than this page knows
  }
}

/** Fills the turn from GET /queries/{id}: for one that ended before the page was opened. */
export function fill(turn, result) {
  turn.parts = [];
  for (const said of result.deliberations ?? []) {
    const parts = said.thinking ? [{ kind: "thinking", pieces: [{ id: "", text: said.thinking }] }] : [];
    for (const { tool, args, result_preview } of said.tool_trace ?? []) {
      parts.push({ kind: "tool", call: { tool, args, result: result_preview, error: null } });
    }
    const pieces = [{ id: "", text: said.response }];
    turn.parts.push({ kind: "persona", persona: said.persona, round: said.round, done: true, parts, pieces });
  }
  if (result.thinking) turn.parts.push({ kind: "thinking", pieces: [{ id: "", text: result.thinking }] });
  for (const call of result.tool_calls ?? []) turn.parts.push({ kind: "tool", call });
  for (const notice of result.notices ?? []) note(turn, notice.message ?? notice.code);
  if (result.answer) turn.pieces = [{ id: "", text: result.answer }];
  turn.state = result.state;
  turn.model = result.model;
  turn.finish = result.finish_reason;
  turn.usage = result.usage;
  turn.error = result.error ?? null;
  turn.critique = result.critique ?? null;
  turn.pairwise = result.pairwise ?? null;
  turn.reward = result.reward ?? null;
}

/** The turn itself, or the part of the persona that an entry belongs to. */
function scopeOf(turn, data) {
  if (!data.persona) return turn;
  const round = data.round ?? 1;
  const known = turn.parts.find((p) => p.kind === "persona" && p.persona === data.persona && p.round === round);
  if (known) return known;
  const fresh = { kind: "persona", persona: data.persona, round, done: false, parts: [], pieces: [] };
  turn.parts.push(fresh);
  return fresh;
}

function thinkingPart(scope) {
  const last = scope.parts.at(-1);
  if (last?.kind === "thinking" && !scope.pieces.length) return last;
  const fresh = { kind: "thinking", pieces: [] };
  scope.parts.push(fresh);
  return fresh;
}

/** A model call has ended. What it said before a tool call is not part of the answer. */
function settle(turn, scope, data) {
  turn.usage = {
    prompt_tokens: turn.usage.prompt_tokens + (data.prompt_tokens ?? 0),
    completion_tokens: turn.usage.completion_tokens + (data.completion_tokens ?? 0),
  };
  if (!data.tool_calls?.length) return;
  if (textOf(scope.pieces).trim()) scope.parts.push({ kind: "said", text: textOf(scope.pieces) });
  scope.pieces = [];
}

function finishCall(scope, data) {
  const part = scope.parts.find((p) => p.kind === "tool" && p.call.call_id === data.call_id);
  if (part) part.call = { ...part.call, ...data };
  else scope.parts.push({ kind: "tool", call: data });
}

function discard(scope, after) {
  const kept = (piece) => !isAfter(piece.id, after);
  scope.pieces = scope.pieces.filter(kept);
  for (const part of scope.parts) {
    if (part.kind === "thinking") part.pieces = part.pieces.filter(kept);
    if (part.kind === "persona") discard(part, after);
  }
  scope.parts = scope.parts.filter((part) => part.kind !== "thinking" || part.pieces.length);
}

function complete(turn, data) {
  turn.state = "completed";
  // the end is what counts: a part that never came as a delta is shown now
  turn.pieces = [{ id: turn.last, text: data.answer }];
  turn.usage = data.usage ?? turn.usage;
  turn.model = data.model ?? turn.model;
  turn.finish = data.finish_reason ?? null;
  turn.trail.push("IDLE");
}

function note(turn, text) {
  const last = turn.parts.at(-1);
  if (last?.kind !== "note" || last.text !== text) turn.parts.push({ kind: "note", text });
}
