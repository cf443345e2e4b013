// OpenAI's package for JavaScript.
import OpenAI from "openai";

const client = new OpenAI();
const hello = [{ role: "user", content: "hello" }];
const tool = {
  type: "function",
  function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
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

await tried("chat", async () => {
  const done = await client.chat.completions.create({ model: "local2", messages: hello });
  return done.choices[0].message.content;
}, "Hello there.");
await tried("stream", async () => {
  let text = "";
  const stream = await client.chat.completions.create({ model: "local2", messages: hello, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}, "Hello there.");
await tried("tools", async () => {
  const messages = [{ role: "user", content: "the weather?" }];
  const first = await client.chat.completions.create({ model: "local2", messages, tools: [tool] });
  const call = first.choices[0].message.tool_calls[0];
  messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" });
  const last = await client.chat.completions.create({ model: "local2", messages, tools: [tool] });
  return last.choices[0].message.content;
}, "It is sunny there.");
await tried("responses", async () => {
  const done = await client.responses.create({ model: "local2", input: "hello" });
  return done.output_text;
}, "Hello there.");
await tried("responses, streamed", async () => {
  const stream = client.responses.stream({ model: "local2", input: "hello" });
  return (await stream.finalResponse()).output_text;
}, "Hello there.");
