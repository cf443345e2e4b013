// A tool worker in JavaScript: `npm install ioredis`, then `REDIS_URL=redis://… node worker.mjs`; see docs/worker-protocol.md
import { setTimeout as sleep } from "node:timers/promises";
import Redis from "ioredis";
const tool = { type: "function", participant: "timer", function: { name: "timer",
  description: 'Wait some seconds, then tell the time. Call it for "wait a moment" or "tell me in ten seconds".',
  parameters: { type: "object", required: ["seconds"], properties: { seconds: { type: "number", description: "0 to 60" } } } } };
async function run({ seconds }, signal) {
  if (!(seconds >= 0 && seconds <= 60)) throw new Error("argument seconds: must be a number from 0 to 60");
  await sleep(seconds * 1000, null, { signal });
  return { text: `${seconds} s later it is ${new Date().toISOString()}.`, data: { seconds } }; }
const name = tool.function.name, stream = `local2:tool.request.${name}`, me = `js-${process.pid}-${crypto.randomUUID().slice(0, 6)}`;
const beatMs = Number(process.env.HEARTBEAT ?? 1) * 1000, silent = 3 * beatMs, room = 8, attempts = 5, held = new Set();
const redis = new Redis(process.env.REDIS_URL), reader = redis.duplicate(), registry = `local2:replica:${name}:${me}`;
let offset = 0, begun = 0, stopping = false, now = () => Math.round(Date.now() + offset); // in ms, by the bus's clock
const record = (flat) => Object.fromEntries(flat.flatMap((v, i) => (i % 2 ? [] : [[v, flat[i + 1]]])));
async function answer(id, fields, deliveries) {
  let asked = {}, text, error = null, data = null, dead = deliveries > attempts ? `delivered ${deliveries} times` : "";
  try { asked = JSON.parse(fields.payload); } catch { dead = "the payload is malformed"; }
  const { call_id, query_id, session_id = "", reply_to, token = "" } = asked, place = `local2:result:{${stream}}:${call_id}`;
  const stored = dead ? null : await redis.get(place), known = stored?.startsWith("{"), started = Date.now(), write = redis.multi();
  if (dead) { // the note vouches for the letter
    const letter = JSON.stringify({ stream, group: name, entry_id: id, deliveries, reason: dead, fields });
    const at = await redis.xadd("local2:dead.letter", "*", "source", `${name}/${me}`, "payload", letter);
    await redis.set(`local2:once:{local2:dead.letter}:${stream}:${name}:${id}`, at, "EX", 86400, "NX"); }
  const left = fields.deadline ? fields.deadline - now() : 3_600_000, late = "the query's deadline has passed";
  try {
    if (dead || left <= 0) throw new Error(dead || late);
    if (!known) ({ text, data } = await run(asked.args, AbortSignal.timeout(left)));
  } catch (failure) { error = failure.name === "AbortError" ? late : failure.message; text = `[tool error: ${error}]`; }
  const result = known ? stored : JSON.stringify({ query_id, call_id, tool: name, result: text, error, data, session_id,
    request_id: id, duration_ms: Date.now() - started });
  if (call_id && error !== late) write.set(place, result, "EX", 86400);
  if (reply_to) write.call("XADD", reply_to, "NOMKSTREAM", "MAXLEN", "~", 1000, "*", "type", "tool.result", "call_id", call_id,
    "token", token, "payload", result);
  if (call_id && !known) write.xadd(`local2:tool.result.${name}`, "MAXLEN", "~", 10000, "*", "source", `${name}/${me}`,
    "correlation_id", query_id, "causation_id", id, "payload", result);
  await write.xack(stream, name, id).exec(); } // all of it at once: nobody is answered twice
const begin = ([id, flat], n) => held.add(id) && answer(id, record(flat), n).catch(console.error).finally(() => held.delete(id));
async function take(rows, idle) { // what nobody keeps
  for (const [id, , , times] of rows.filter(([id]) => !held.has(id)).slice(0, Math.max(0, room - held.size)))
    for (const entry of await redis.xclaim(stream, name, me, idle, id)) begin(entry, times + 1); }
async function beat() {
  const [s, us] = await redis.time(), pending = (...which) => redis.xpending(stream, name, ...which);
  offset = s * 1000 + us / 1000 - Date.now(); begun ||= now();
  const info = { participant: name, replica: me, state: "ready", started: begun, seen: now(), in_flight: held.size,
    concurrency: room, tools: [tool], release: 2 };
  await redis.multi().set(registry, JSON.stringify(info), "PX", silent).zadd("local2:replicas", now(), `${name}/${me}`).exec();
  const mine = (await pending("-", "+", 1000, me)).map(([id]) => id).filter((id) => held.has(id)); // never another's
  if (mine.length) await redis.xclaim(stream, name, me, 0, ...mine, "JUSTID");
  await take(await pending("-", "+", room, "handover"), 0);
  if (now() - begun > silent) await take(await pending("IDLE", silent, "-", "+", room), silent); }
await redis.xgroup("CREATE", stream, name, "0", "MKSTREAM").catch((e) => { if (!/BUSYGROUP/.test(e)) throw e; });
await beat(); const beating = setInterval(() => beat().catch(console.error), beatMs);
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => { stopping = true; clearInterval(beating); });
while (!stopping) for (const [, entries] of (held.size < room && await reader.xreadgroup("GROUP", name, me, "COUNT",
  room - held.size, "BLOCK", 1000, "STREAMS", stream, ">")) || [await sleep(20, [0, []])]) for (const one of entries) begin(one, 1);
await redis.multi().del(registry).zrem("local2:replicas", `${name}/${me}`).exec();
for (let left = 40; held.size && left--; ) await sleep(50); // two seconds; then the rest is anybody's at once
for (const id of held) await redis.xclaim(stream, name, "handover", 0, id, "IDLE", 1e9, "RETRYCOUNT", 0, "JUSTID");
await redis.xgroup("DELCONSUMER", stream, name, me).finally(() => process.exit());
