// OpenAI's package for JavaScript.
import { raised, tried } from "./trying.mjs";
// docs: begin
import OpenAI from "openai";

const client = new OpenAI();
const answer = await client.chat.completions.create({ model: "local2", messages: [{ role: "user", content: "hello" }] });
console.log(answer.choices[0].message.content);
// docs: end
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const says = (content) => [{ role: "user", content }];
const chat = (messages, fields = {}) => client.chat.completions.create({ model: "local2", messages, ...fields });
const Place = z.object({ city: z.string(), country: z.string() });
const paris = '{"city":"Paris","country":"France"}';
const tool = {
  type: "function",
  function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function left(stream) {
  for await (const _ of stream) break;
  return true;
}

await tried("chat", async () => (await chat(says("hello"))).choices[0].message.content, "Hello there.");
await tried("stream", async () => {
  const chunks = await all(await chat(says("hello"), { stream: true }));
  return chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");
}, "Hello there.");
await tried("usage", async () => (await chat(says("hello"))).usage.total_tokens, (count) => count > 0);
await tried("reasoning", async () => (await chat(says("hello"))).choices[0].message.reasoning_content, "Hm.");
await tried("abort", async () => left(await chat(says("slowly"), { stream: true })), true);
await tried("abort", async () => {
  const stream = await client.responses.create({ model: "local2", input: "slowly", stream: true });
  return left(stream);
}, true, "responses");
await tried("wrong key", raised(
  () => new OpenAI({ apiKey: "wrong" }).models.list(), (error) => error instanceof OpenAI.AuthenticationError), true);
await tried("tools", async () => {
  const messages = says("the weather?");
  const first = await chat(messages, { tools: [tool] });
  const call = first.choices[0].message.tool_calls[0];
  messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" });
  return (await chat(messages, { tools: [tool] })).choices[0].message.content;
}, "It is sunny there.");
await tried("structured", async () => {
  const done = await client.chat.completions.parse({
    model: "local2", messages: says("where?"), response_format: zodResponseFormat(Place, "place"),
  });
  return JSON.stringify(done.choices[0].message.parsed);
}, paris);
await tried("Responses", async () => (await client.responses.create({ model: "local2", input: "hello" })).output_text,
  "Hello there.");
await tried("Responses", async () => {
  const stream = client.responses.stream({ model: "local2", input: "hello" });
  return (await stream.finalResponse()).output_text;
}, "Hello there.", "stream");
await tried("Responses", async () => {
  const done = await client.responses.parse({
    model: "local2", input: "where?", text: { format: zodTextFormat(Place, "place") },
  });
  return JSON.stringify(done.output_parsed);
}, paris, "structured");
await tried("mid-stream error", raised(
  async () => all(await chat(says("break"), { stream: true })), (error) => error instanceof OpenAI.APIError), true);
