// LangChain.js: invoke, stream, bound tools and structured output, by both APIs.
import { raised, tried } from "./trying.mjs";
// docs: begin
import { ChatOpenAI } from "@langchain/openai";

const { OPENAI_BASE_URL: baseURL } = process.env;
const model = new ChatOpenAI({ model: "local2", configuration: { baseURL } }); // useResponsesApi: true for Responses
console.log((await model.invoke("hello")).text);
// docs: end
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { z } from "zod";

const weather = tool(async () => "sunny", {
  name: "get_weather", description: "The weather", schema: z.object({ city: z.string() }),
});
const Place = z.object({ city: z.string(), country: z.string() });
const paris = '{"city":"Paris","country":"France"}';
const responses = new ChatOpenAI({ model: "local2", configuration: { baseURL }, useResponsesApi: true, maxRetries: 0 });

async function read(model, said) {
  let text = "";
  for await (const part of await model.stream(said)) text += part.text;
  return text;
}

async function toolRound(model) {
  const bound = model.bindTools([weather]);
  const asked = [new HumanMessage("the weather?")];
  const first = await bound.invoke(asked);
  const [call] = first.tool_calls;
  return (await bound.invoke([...asked, first, new ToolMessage({ content: "sunny", tool_call_id: call.id })])).text;
}

async function left(model) {
  const leaving = new AbortController();
  const stream = await model.stream("slowly", { signal: leaving.signal });
  try {
    for await (const part of stream) if (part.text) leaving.abort();
  } catch (error) {
    if (!leaving.signal.aborted) throw error;
  }
  return true;
}

const object = async (model, method) =>
  JSON.stringify(await model.withStructuredOutput(Place, { method, name: "place" }).invoke("where?"));

await tried("chat", async () => (await model.invoke("hello")).text, "Hello there.");
await tried("stream", () => read(model, "hello"), "Hello there.");
await tried("usage", async () => (await model.invoke("hello")).usage_metadata.total_tokens, (count) => count > 0);
await tried("reasoning", async () => (await model.invoke("hello")).additional_kwargs.reasoning_content, "Hm.");
await tried("abort", () => left(model), true);
await tried("wrong key", raised(
  () => new ChatOpenAI({ model: "local2", apiKey: "wrong", configuration: { baseURL } }).invoke("hello"),
  (error) => error.status === 401), true);
await tried("tools", () => toolRound(model), "It is sunny there.");
await tried("structured", () => object(model, "jsonSchema"), paris, "jsonSchema");
await tried("structured", () => object(model, "functionCalling"), paris, "functionCalling");
await tried("Responses", async () => (await responses.invoke("hello")).text, "Hello there.");
await tried("Responses", () => read(responses, "hello"), "Hello there.", "stream");
await tried("Responses", () => toolRound(responses), "It is sunny there.", "tools");
await tried("Responses", () => object(responses, "jsonSchema"), paris, "structured");
await tried("mid-stream error", raised(() => read(new ChatOpenAI({ model: "local2", configuration: { baseURL }, maxRetries: 0 }), "break")), true);
