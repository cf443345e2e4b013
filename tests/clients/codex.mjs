// Codex without a terminal, in a folder of its own. It speaks the Responses API, in streams alone.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { tried } from "./trying.mjs";

const { OPENAI_BASE_URL: url } = process.env;
// docs: begin
const CONFIG = `
model = "local2"
model_provider = "local2"

[model_providers.local2]
name = "LoCAL2"
base_url = "${url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
`; // in ~/.codex/config.toml
// docs: end

const here = dirname(fileURLToPath(import.meta.url));
const program = join(here, "node_modules", ".bin", "codex");
// an error is told at once; what it runs is an `echo`, for which no sandbox is needed
const quick = "request_max_retries = 0\nstream_max_retries = 0\n";
const form = { type: "object", properties: { city: { type: "string" }, country: { type: "string" } },
  required: ["city", "country"], additionalProperties: false };

function started(folder, words, key) {
  writeFileSync(join(folder, "config.toml"), CONFIG + quick);
  const environment = { ...process.env, HOME: folder, CODEX_HOME: folder, ...(key ? { OPENAI_API_KEY: key } : {}) };
  const fixed = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
  return spawn(program, [...fixed, ...words], { cwd: folder, env: environment, stdio: ["ignore", "pipe", "ignore"],
    detached: true });
}

async function inFolder(work) {
  const folder = mkdtempSync(join(here, "home-"));
  try {
    return await work(folder);
  } finally {
    rmSync(folder, { recursive: true, force: true, maxRetries: 5 });
  }
}

// What one or more messages of a conversation gave: each its events.
const codex = (words, key = "") => inFolder((folder) => events(folder, words, key));

async function events(folder, words, key = "") {
  const process = started(folder, words, key);
  let said = "";
  process.stdout.on("data", (part) => (said += part));
  await new Promise((resolve) => process.on("close", resolve));
  return said.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
}

const items = (found, type) => found.filter((one) => one.type === "item.completed" && one.item.type === type).map((one) => one.item);
const text = (found) => items(found, "agent_message").map((item) => item.text).join("");
const failure = (found) => found.find((one) => one.type === "turn.failed")?.error.message ?? "";

// It tells no word before the message is whole: the first event of a turn shows that it runs.
const left = () => inFolder(async (folder) => {
  const process = started(folder, ["slowly"]);
  let said = "";
  await new Promise((resolve) => {
    process.stdout.on("data", (part) => { if ((said += part).includes("turn.started")) setTimeout(resolve, 5000); });
    process.on("close", resolve);
  });
  globalThis.process.kill(-process.pid, "SIGKILL");
  return said.includes("turn.started");
});

await tried("chat", async () => text(await codex(["hello"])), "Hello there.");
await tried("chat", () => inFolder(async (folder) => {
  await events(folder, ["hello"]);
  return text(await events(folder, ["resume", "--last", "hello again"]));
}), "Hello there.", "resumed");
await tried("stream", async () => text(await codex(["hello"])), "Hello there.");
await tried("usage", async () => (await codex(["hello"])).at(-1).usage.output_tokens, (count) => count > 0);
await tried("reasoning", async () => items(await codex(["hello"]), "reasoning")[0]?.text, "Hm.");
await tried("abort", left, true);
await tried("wrong key", async () => failure(await codex(["hello"], "wrong")), (said) => said.includes("401"));
await tried("tools", async () => {
  const found = await codex(["run it"]);
  return [items(found, "command_execution")[0]?.aggregated_output.trim(), text(found)];
}, ([ran, said]) => ran.endsWith("hi42") && said.includes("hi42"));
await tried("structured", () => inFolder(async (folder) => {
  const file = join(folder, "form.json");
  writeFileSync(file, JSON.stringify(form));
  return JSON.parse(text(await events(folder, ["--output-schema", file, "where?"])));
}), (place) => place.city === "Paris" && place.country === "France");
await tried("Responses", async () => text(await codex(["hello"])), "Hello there.");
await tried("mid-stream error", async () => failure(await codex(["break"])), (said) => said.includes("refuses"));
