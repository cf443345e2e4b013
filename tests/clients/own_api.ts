// The client that openapi-typescript generates, in use: ask, events with resume, cancel, feedback.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.d.ts";

type JournalEvent = components["schemas"]["JournalEvent"];
const key = process.env.LOCAL2_KEY!, base = process.env.LOCAL2_URL!;
const api = createClient<paths>({ baseUrl: base, headers: { Authorization: `Bearer ${key}` } });

async function tried(what: string, attempt: () => Promise<boolean>): Promise<void> {
  let trouble = "";
  try { trouble = (await attempt()) ? "" : "it gave something else"; } catch (error) { trouble = String(error); }
  console.log(JSON.stringify({ feature: what, trouble }));
}

async function events(query: string, after?: string): Promise<JournalEvent[]> {
  const { data } = await api.GET("/queries/{query_id}/events", {
    params: { path: { query_id: query }, header: after ? { "last-event-id": after } : {} }, parseAs: "text" });
  return (data ?? "").split("\n\n").filter((block) => block.startsWith("id:")).map((block) =>
    Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s).slice(0, 2))) as JournalEvent);
}

let asked = "";
await tried("ask", async () => {
  const { data } = await api.POST("/query", { body: { query: "Hello" } });
  const answer = typeof data === "object" && "answer" in data ? data : undefined;
  asked = answer?.query_id ?? "";
  return answer?.state === "completed" && answer.answer === "Hello there." && answer.usage.completion_tokens! >= 0;
});
await tried("events with resume", async () => {
  const all = await events(asked), middle = all[2];
  if (!middle) return false;
  const rest = await events(asked, middle.id), last = all.at(-1);
  const text = all.flatMap((one) => (one.event === "answer" ? [JSON.parse(one.data).text] : [])).join("");
  return text === "Hello there." && last?.event === "completed" && JSON.stringify(rest) === JSON.stringify(all.slice(3));
});
await tried("cancel", async () => {
  const { data } = await api.POST("/query", { params: { query: { wait: false } }, body: { query: "tell me slowly, for long" } });
  if (typeof data !== "object") return false;
  const cancelled = await api.POST("/queries/{query_id}/cancel", { params: { path: { query_id: data.query_id } } });
  const end = (await events(data.query_id)).at(-1);
  return cancelled.data?.state === "cancelling" && end?.event === "cancelled";
});
await tried("feedback", async () => {
  const { data, response } = await api.POST("/feedback", { body: { query_id: asked, stars: 5 } });
  return response.status === 202 && data?.sentiment === "positive";
});
await tried("an error with its code", async () => {
  const { error, response } = await api.GET("/sessions/{session_id}", { params: { path: { session_id: "none" } } });
  return response.status === 404 && error?.error.code === "not_found";
});
await tried("sessions", async () => {
  const { data } = await api.GET("/sessions", { params: { query: { limit: 5 } } });
  return (data?.sessions ?? []).some((session) => session.title === "Hello");
});
