// @vitest-environment jsdom
import { act } from "react";
import { createRoot, type Root as ReactRoot } from "react-dom/client";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Account } from "./account";
import { button, press, until } from "./testing";

vi.setConfig({ testTimeout: 60_000 });

const SECRET = "the plan for the surprise party";
const session = { session_id: "s1", title: SECRET, created: 1, updated: 1, pinned: false, query_id: "", excerpt: "" };
const turn = { query_id: "1-0", after: null, query: `Tell me of ${SECRET}`, answer: `Of ${SECRET}: cake.`, time: 1, interrupted: false, attachments: [] };

interface Sent { method: string; path: string; key: string; signal: AbortSignal | undefined }

let goodKeys: Set<string>;
let sent: Sent[];
let renewed: number;
let root: ReactRoot | undefined;
let room: HTMLElement;

function answer(path: string, method: string): unknown {
  const name = path.split("?")[0]!;
  if (name === "keys/redeem") return { key: "key-of-ann-2", user_id: "ann" };
  if (name === "sessions") return { sessions: [session], complete: true };
  if (name === "sessions/s1" && method === "GET") return { ...session, settings: {}, tip: "1-0", total: 1, earlier: null, turns: [turn], messages: [] };
  if (name === "sessions/s1/turns/1-0") return { query_id: "1-0", session_id: "s1", open_to_votes: false, journal: [], event_log: [] };
  if (name === "queries") return { queries: [{ query_id: "2-0", session_id: "s1", state: "running", query: `And ${SECRET}?`, mode: "chat", accepted: 2, after: null, error: null }] };
  if (name === "ready") return { status: "ready", parts: {} };
  return {};
}

beforeEach(() => {
  vi.resetModules();
  (globalThis as { IS_REACT_ACT_ENVIRONMENT?: boolean }).IS_REACT_ACT_ENVIRONMENT = true;
  vi.stubGlobal("ResizeObserver", class { observe() {} unobserve() {} disconnect() {} });
  goodKeys = new Set(["key-of-ann", "key-of-ann-2", "key-of-bob"]);
  sent = [];
  renewed = 0;
  vi.stubGlobal("fetch", (path: string, { method = "GET", headers, signal }: RequestInit = {}) => {
    const key = ((headers as Record<string, string> | undefined)?.["Authorization"] ?? "").replace("Bearer ", "");
    sent.push({ method, path, key, signal: signal ?? undefined });
    if (path.includes("/events")) return new Promise(() => {});
    const open = path === "ready" || path === "keys/redeem";
    if (!open && !goodKeys.has(key)) return Promise.resolve(Response.json({ error: { code: "unauthorized", message: "a valid API key is needed" } }, { status: 401 }));
    return Promise.resolve(Response.json(answer(path, method)));
  });
  localStorage.clear();
  sessionStorage.clear();
  history.replaceState(null, "", "/");
  room = document.body.appendChild(document.createElement("div"));
});

afterEach(async () => {
  await act(async () => root?.unmount());
  root = undefined;
  room.remove();
  vi.unstubAllGlobals();
});

/** Render the page with freshly loaded modules, as after a reload. */
async function visit() {
  await act(async () => root?.unmount());
  vi.resetModules();
  const [modules, storage, http] = await Promise.all([Promise.all([import("./account"), import("./Root")]), import("./storage"), import("./api/http")]);
  const [{ Account: Fresh }, { Root: Page }] = modules;
  const account = new Fresh(() => { renewed += 1; });
  root = createRoot(room);
  await act(async () => root!.render(<Page account={account as Account} />));
  return { account, storage, http };
}

async function signedIn(key = "key-of-ann", storage: Storage = localStorage) {
  storage.setItem("local2.key", key);
  history.replaceState(null, "", "/#session=s1");
  const page = await visit();
  await until(() => document.querySelector("article.turn")?.textContent?.includes(SECRET));
  return page;
}

const shown = () => document.body.innerHTML + [...document.querySelectorAll("textarea, input")].map((one) => (one as HTMLInputElement).value).join();
const stored = () => JSON.stringify({ ...localStorage, ...sessionStorage });
const fill = (element: HTMLInputElement | HTMLTextAreaElement, words: string) => act(async () => {
  Object.getOwnPropertyDescriptor(Object.getPrototypeOf(element), "value")!.set!.call(element, words);
  element.dispatchEvent(new Event("input", { bubbles: true }));
});
const dialog = () => document.querySelector("[role=dialog]");

async function enterKey(key: string): Promise<void> {
  await fill(document.querySelector<HTMLInputElement>("#key")!, key);
  await press(button("Sign in"));
}

/** Check that no data of the user is left after a sign-out. */
async function nothingIsLeft(): Promise<void> {
  await until(() => dialog() && document.activeElement?.id === "key");
  expect(shown()).not.toContain(SECRET);
  expect(stored()).not.toContain(SECRET);
  expect(Object.keys({ ...sessionStorage }).concat(Object.keys({ ...localStorage })).filter((name) => !["local2.theme", "local2.developer"].includes(name))).toEqual([]);
  expect([location.hash, document.title]).toEqual(["", "LoCAL2"]);
  const streams = sent.filter(({ path }) => path.includes("/events"));
  expect(streams.length).toBeGreaterThan(0);
  expect(streams.filter(({ signal }) => !signal?.aborted)).toEqual([]);
}

const WAYS: [string, (page: Awaited<ReturnType<typeof visit>>) => Promise<void>][] = [
  ["the menu", async () => { await press(button("Settings")); await until(() => button("Sign out")); await press(button("Sign out")); }],
  ["a key that is refused", async ({ http }) => { goodKeys.clear(); await act(async () => { await http.request("GET", "memory/topics").catch(() => {}); }); }],
  ["another tab that signs out", async () => { localStorage.removeItem("local2.key"); await act(async () => { dispatchEvent(new StorageEvent("storage", { key: "local2.key", newValue: null, storageArea: localStorage })); }); }],
  ["another tab with a key of its own that signs out", async () => { await act(async () => { dispatchEvent(new StorageEvent("storage", { key: "local2.signed-out", newValue: "1", storageArea: localStorage })); }); localStorage.removeItem("local2.key"); }],
  ["another tab's sign-out that a cached page has missed", async () => { localStorage.removeItem("local2.key"); await act(async () => { dispatchEvent(Object.assign(new Event("pageshow"), { persisted: true })); }); }],
];

test.each(WAYS)("sign-out by %s leaves nothing of the user", async (_way, signOut) => {
  const page = await signedIn();
  await fill(document.querySelector<HTMLTextAreaElement>("#question")!, `A draft of ${SECRET}`);
  await fill(document.querySelector<HTMLInputElement>("#search")!, SECRET);
  page.storage.keep("chat.new", { systemPrompt: SECRET });
  page.storage.keep("theme", "dark");
  expect(stored()).toContain(SECRET);
  await signOut(page);
  await nothingIsLeft();
  expect(localStorage.getItem("local2.theme")).toBe('"dark"');
  // The data does not come back with the next user.
  goodKeys.add("key-of-bob");
  await enterKey("key-of-bob");
  expect(renewed).toBe(1);
  history.replaceState(null, "", "/");
  await visit();
  await until(() => document.querySelector("#question"));
  expect(document.querySelector<HTMLTextAreaElement>("#question")!.value).toBe("");
});

test("the menu has one item for the key: Sign out", async () => {
  await signedIn();
  await press(button("Settings"));
  await until(() => document.querySelector("[role=menuitem]"));
  const names = [...document.querySelectorAll("[role=menuitem]")].map((one) => one.textContent!);
  expect(names.filter((name) => /key|sign/i.test(name))).toEqual(["Sign out"]);
});

test.each(["Escape", "a click beside it", "a wrong key", "no key"])("the sign-in dialog stays after %s", async (what) => {
  await visit();
  await until(dialog);
  expect(document.querySelector("[role=dialog] [aria-label=Close]")).toBeNull();
  if (what === "Escape") await act(async () => { document.activeElement!.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true })); });
  else if (what === "no key") await press(button("Sign in"));
  else if (what === "a wrong key") await enterKey("wrong");
  else await act(async () => { for (const type of ["mousedown", "mouseup", "click"]) (document.querySelector(".backdrop") ?? document.body).dispatchEvent(new MouseEvent(type, { bubbles: true })); });
  await until(() => true);
  expect(dialog()).not.toBeNull();
  expect(document.querySelector("#question")).toBeNull();
  if (what === "a wrong key") expect(dialog()!.textContent).toContain("This key is not valid.");
});

test("a good key opens the page, and a server that needs no key asks for none", async () => {
  await visit();
  await until(dialog);
  await enterKey("key-of-bob");
  await until(() => document.querySelector("#question"));
  expect(renewed).toBe(0);
  localStorage.clear();
  goodKeys.add("");
  await visit();
  await until(() => document.querySelector("#question"));
  await press(button("Settings"));
  await until(() => document.querySelector("[role=menuitem]"));
  expect(button("Sign out")).toBeUndefined();
});

test("a key of one tab leaves nothing in the browser", async () => {
  await signedIn("key-of-ann", sessionStorage);
  await fill(document.querySelector<HTMLTextAreaElement>("#question")!, SECRET);
  expect(sessionStorage.getItem("local2.draft.s1")).toContain(SECRET);
  expect(JSON.stringify({ ...localStorage })).not.toContain(SECRET);
});

test.each([["ann", true], ["bob", false]])("a link finds drafts of %s: %s", async (user, there) => {
  for (const [name, value] of Object.entries({ key: "key-of-ann", user, "draft.new": JSON.stringify(SECRET) })) localStorage.setItem(`local2.${name}`, value);
  localStorage.setItem("local2.theme", '"dark"');
  history.replaceState(null, "", "/#once=token");
  await visit();
  await until(() => document.querySelector("#question"));
  expect(localStorage.getItem("local2.key")).toBe("key-of-ann-2");
  expect(stored().includes(SECRET)).toBe(there);
  expect([localStorage.getItem("local2.theme"), localStorage.getItem("local2.user")]).toEqual(['"dark"', "ann"]);
});

test("code that still runs after a sign-out stores nothing and sends nothing", async () => {
  const { account, storage, http } = await signedIn();
  await act(async () => account.signOut());
  const before = sent.length;
  storage.keep("draft.new", SECRET);
  let settled = false;
  void http.request("GET", "sessions").finally(() => { settled = true; });
  await until(() => true);
  expect([stored().includes(SECRET), sent.length, settled]).toEqual([false, before, false]);
});

test("a sign-out carries out a pending deletion of a chat", async () => {
  const { account } = await signedIn();
  await press(button(`What can be done with: ${SECRET}`));
  await until(() => button("Delete"));
  await press(button("Delete"));
  expect(sent.filter(({ method }) => method === "DELETE")).toEqual([]);
  await act(async () => account.signOut());
  await until(() => sent.some(({ method }) => method === "DELETE"));
  const removal = sent.find(({ method }) => method === "DELETE")!;
  expect([removal.path, removal.key, removal.signal?.aborted ?? false]).toEqual(["sessions/s1", "key-of-ann", false]);
});

test("a sign-out revokes the addresses of bytes", async () => {
  const ended: string[] = [];
  Object.assign(URL, { createObjectURL: () => "blob:one", revokeObjectURL: (address: string) => ended.push(address) });
  const { account, storage } = await signedIn();
  storage.addressOf(new Blob([SECRET]));
  await act(async () => account.signOut());
  expect(ended).toEqual(["blob:one"]);
});

test("storage.ts alone uses the browser's storage", () => {
  const sources = import.meta.glob<string>("./**/*.{ts,tsx}", { query: "?raw", import: "default", eager: true });
  const users = Object.entries(sources).filter(([name, text]) => !/\.test\.tsx?$/.test(name) && /localStorage|sessionStorage|indexedDB|caches\.|document\.cookie|createObjectURL/.test(text));
  expect(users.map(([name]) => name)).toEqual(["./storage.ts"]);
});
