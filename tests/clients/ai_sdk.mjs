// The AI SDK with its provider for OpenAI (responses by default, and chat) and the one for compatible servers.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = process.env.OPENAI_API_KEY;
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "local2", baseURL, apiKey, supportsStructuredOutputs: true });
const tools = {
  get_weather: tool({
    description: "The weather",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "sunny",
  }),
};

async function tried(what, attempt, wanted) {
  let trouble = "";
  try {
    const result = await attempt();
    if (result !== wanted) trouble = `it gave ${JSON.stringify(result)}`;
  } catch (error) {
    trouble = `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ tried: what, trouble }).replace('{"tried":', '{"tried": '));
}

const models = { responses: openai("local2"), chat: openai.chat("local2"), compatible: compatible("local2") };
for (const [kind, model] of Object.entries(models)) {
  await tried(kind, async () => (await generateText({ model, prompt: "hello" })).text, "Hello there.");
  await tried(`${kind}, streamed`, async () => {
    let text = "";
    for await (const part of streamText({ model, prompt: "hello" }).textStream) text += part;
    return text;
  }, "Hello there.");
  await tried(`${kind}, tools`, async () => {
    const done = await generateText({ model, tools, prompt: "the weather?", stopWhen: stepCountIs(3) });
    return done.text;
  }, "It is sunny there.");
  await tried(`${kind}, object`, async () => {
    const schema = z.object({ city: z.string(), country: z.string() });
    return JSON.stringify((await generateObject({ model, schema, prompt: "where?" })).object);
  }, '{"city":"Paris","country":"France"}');
}
