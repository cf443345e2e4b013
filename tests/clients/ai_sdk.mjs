// The AI SDK with its provider for OpenAI (responses by default, and chat) and the one for compatible servers.
import { raised, tried } from "./trying.mjs";
// docs: begin
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const openai = createOpenAI({ baseURL, apiKey }); // openai("local2"): Responses, openai.chat("local2"): chat completions
const compatible = createOpenAICompatible({ name: "local2", baseURL, apiKey, supportsStructuredOutputs: true });
console.log((await generateText({ model: openai("local2"), prompt: "hello" })).text);
// docs: end
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const tools = {
  get_weather: tool({
    description: "The weather",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "sunny",
  }),
};
const models = { responses: openai("local2"), chat: openai.chat("local2"), compatible: compatible("local2") };

async function read(model, prompt, fields = {}) {
  let text = "";
  let trouble;
  const result = streamText({ model, prompt, maxRetries: 0, onError: ({ error }) => { trouble = error; }, ...fields });
  for await (const part of result.textStream) text += part;
  if (trouble) throw trouble;
  return text;
}

async function everything(model, way, features) {
  const feature = (name) => features ?? name;
  const named = (name) => (features ? `${way}${name}` : way);
  await tried(feature("chat"), async () => (await generateText({ model, prompt: "hello" })).text, "Hello there.",
    named("chat"));
  await tried(feature("stream"), () => read(model, "hello"), "Hello there.", named("stream"));
  await tried(feature("tools"), async () => {
    const done = await generateText({ model, tools, prompt: "the weather?", stopWhen: stepCountIs(3) });
    return done.text;
  }, "It is sunny there.", named("tools"));
  await tried(feature("structured"), async () => {
    const schema = z.object({ city: z.string(), country: z.string() });
    return JSON.stringify((await generateObject({ model, schema, prompt: "where?" })).object);
  }, '{"city":"Paris","country":"France"}', named("structured"));
}

await everything(models.responses, "", "Responses");
await everything(models.chat, "chat completions");
await everything(models.compatible, "compatible");
for (const [way, model] of Object.entries(models)) {
  await tried("usage", async () => (await generateText({ model, prompt: "hello" })).usage.totalTokens, (n) => n > 0, way);
  await tried("abort", async () => {
    const leaving = new AbortController();
    const result = streamText({ model, prompt: "slowly", abortSignal: leaving.signal, onError: () => {} });
    for await (const _ of result.textStream) leaving.abort();
    return leaving.signal.aborted;
  }, true, way);
  await tried("mid-stream error", raised(() => read(model, "break")), true, way);
  if (way === "chat") continue; // this provider reads no reasoning there
  await tried("reasoning", async () => (await generateText({ model, prompt: "hello" })).reasoningText, "Hm.", way);
}
const stranger = createOpenAI({ baseURL, apiKey: "wrong" });
await tried("wrong key", raised(
  () => generateText({ model: stranger("local2"), prompt: "hello" }), (error) => error.statusCode === 401), true);
