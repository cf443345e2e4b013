// @openai/agents: runs with tools, typed output and streaming, by responses (its default) and chat completions.
import { raised, tried } from "./trying.mjs";
// docs: begin
import { Agent, run, setTracingDisabled } from "@openai/agents";

setTracingDisabled(true);
const agent = new Agent({ name: "a", model: "local2" });
console.log((await run(agent, "hello")).finalOutput);
// docs: end
import { OpenAIProvider, Runner, tool } from "@openai/agents";
import { z } from "zod";

const weather = tool({
  name: "get_weather", description: "The weather", parameters: z.object({ city: z.string() }), execute: async () => "sunny",
});
const Place = z.object({ city: z.string(), country: z.string() });
const typed = new Agent({ name: "c", model: "local2", outputType: Place });
const busy = new Agent({ name: "b", model: "local2", tools: [weather] });

async function read(runner, agent, said) {
  const stream = await runner.run(agent, said, { stream: true });
  let text = "";
  for await (const part of stream.toTextStream()) text += part;
  await stream.completed;
  return text;
}

async function left(runner) {
  const leaving = new AbortController();
  const stream = await runner.run(agent, "slowly", { stream: true, signal: leaving.signal });
  for await (const part of stream.toTextStream()) if (part) leaving.abort();
  return leaving.signal.aborted;
}

const paths = [["chat completions", false], ["responses", true]];
for (const [way, useResponses] of paths) {
  const runner = new Runner({ modelProvider: new OpenAIProvider({ useResponses }), tracingDisabled: true });
  const feature = (name) => (useResponses ? "Responses" : name);
  const named = (name) => (useResponses ? name : "");
  await tried(feature("chat"), async () => (await runner.run(agent, "hello")).finalOutput, "Hello there.", named("chat"));
  await tried(feature("stream"), () => read(runner, agent, "hello"), "Hello there.", named("stream"));
  await tried(feature("tools"), async () => (await runner.run(busy, "the weather?")).finalOutput, "It is sunny there.",
    named("tools"));
  await tried(feature("structured"), async () => JSON.stringify((await runner.run(typed, "where?")).finalOutput),
    '{"city":"Paris","country":"France"}', named("structured"));
  await tried("usage", async () => (await runner.run(agent, "hello")).rawResponses[0].usage.totalTokens, (n) => n > 0, way);
  await tried("abort", () => left(runner), true, way);
  await tried("mid-stream error", raised(() => read(runner, agent, "break")), true, way);
  await tried("reasoning", async () => {
    const items = (await runner.run(agent, "hello")).newItems.filter((item) => item.type === "reasoning_item");
    return JSON.stringify(items.map((item) => item.rawItem)).includes("Hm.");
  }, true, way);
}
const stranger = new Runner({ modelProvider: new OpenAIProvider({ apiKey: "wrong" }), tracingDisabled: true });
await tried("wrong key", raised(() => stranger.run(agent, "hello"), (error) => error.status === 401), true);
