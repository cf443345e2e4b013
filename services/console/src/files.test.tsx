// @vitest-environment jsdom
import { act } from "react";
import { createRoot, type Root } from "react-dom/client";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { Composer } from "./chat/Composer";
import { USUAL } from "./chat/ChatSettings";
import { ConversationState } from "./chat/ConversationState";
import type { Ask } from "./chat/conversation";
import { apply, newTurn, stepsOf } from "./chat/turn";
import { Attachment, FileViewer } from "./FileViewer";
import { about, kindOf, safeType, sizeOf, type FileOf } from "./files";
import Files from "./places/Files";
import { button, press, until } from "./testing";

vi.setConfig({ testTimeout: 60_000 });

const stored = (name: string, values = {}) => ({ id: `file-${name}`, name, type: "text/plain", size: 10, sha256: "", added: 1, expires: null, state: "ready", reason: null, title: null, chars: 3, pages: null, ...values });

// jsdom has no Blob.text
Blob.prototype.text ??= function text(this: Blob) {
  return new Promise((resolve) => { const reader = new FileReader(); reader.onload = () => resolve(String(reader.result)); reader.readAsText(this); });
};

let root: Root;
let room: HTMLElement;
let sent: { method: string; path: string }[];
let made: Map<string, Blob>;
let files: ReturnType<typeof stored>[];
let refused: string;

beforeEach(() => {
  (globalThis as { IS_REACT_ACT_ENVIRONMENT?: boolean }).IS_REACT_ACT_ENVIRONMENT = true;
  sent = [];
  made = new Map();
  files = [];
  refused = "";
  Object.assign(URL, {
    createObjectURL: (blob: Blob) => { const address = `blob:${made.size}`; made.set(address, blob); return address; },
    revokeObjectURL: (address: string) => made.delete(address),
  });
  vi.stubGlobal("fetch", (path: string, { method = "GET" }: RequestInit = {}) => {
    sent.push({ method, path });
    const [name, query] = path.split("?");
    if (refused && method === "POST") return Promise.resolve(Response.json({ error: { code: "unsupported", message: refused } }, { status: 422 }));
    if (name === "files" && method === "POST") return Promise.resolve(Response.json(stored(new URLSearchParams(query).get("name")!)));
    if (name === "files") {
      const words = new URLSearchParams(query).get("search")!;
      const found = files.filter((one) => one.name.includes(words));
      return Promise.resolve(Response.json({ files: found, total: found.length, cursor: null }));
    }
    if (method === "DELETE") return Promise.resolve(Response.json({ deleted: true }));
    if (name === "sessions/away") return Promise.resolve(Response.json({ messages: null, messages_missing: "no generator is there" }));
    if (name!.startsWith("sessions/")) return Promise.resolve(Response.json({ messages: [{ role: "system", content: "Be brief.\nToday is Friday." }, { role: "user", content: "<b>Hi</b>" }, { role: "assistant", content: "", tool_calls: [{ function: { name: "web_search" } }] }, { role: "tool", content: "found", name: "web_search" }] }));
    if (name === "files/gone") return Promise.resolve(Response.json({ error: { code: "not_found", message: "no such file" } }, { status: 404 }));
    return Promise.resolve(new Response("<script>window.hit = 1</script>", { headers: { "Content-Type": "text/html" } }));
  });
  room = document.body.appendChild(document.createElement("div"));
  root = createRoot(room);
});

afterEach(async () => {
  await act(async () => root.unmount());
  room.remove();
  vi.unstubAllGlobals();
});

const show = (file: FileOf) => act(async () => root.render(<FileViewer onError={() => {}}><ul><Attachment file={file} /></ul></FileViewer>));
const pick = (selector: string, list: File[]) => act(async () => {
  const field = document.querySelector<HTMLInputElement>(selector)!;
  Object.defineProperty(field, "files", { value: list, configurable: true });
  field.dispatchEvent(new Event("change", { bubbles: true }));
});

it.each([
  ["image/png", "image", "image/png"],
  ["image/JPEG", "image", "image/jpeg"],
  ["text/plain; charset=utf-16", "text", "text/plain;charset=utf-8"],
  ["text/markdown", "text", "text/plain;charset=utf-8"],
  ["application/pdf", "pdf", "application/pdf"],
  // Types that could run in the page's origin, and unknown types.
  ["text/html", "other", "application/octet-stream"],
  ["image/svg+xml", "other", "application/octet-stream"],
  ["application/xhtml+xml", "other", "application/octet-stream"],
  ["text/xml", "other", "application/octet-stream"],
  ["application/javascript", "other", "application/octet-stream"],
  ["constructor", "other", "application/octet-stream"],
  ["", "other", "application/octet-stream"],
])("a file of type %s is opened as %s", (type, kind, safe) => {
  expect([kindOf({ type }), safeType({ type })]).toEqual([kind, safe]);
});

it.each([[0, "0 bytes"], [1, "1 byte"], [999, "999 bytes"], [1_640, "1.6 kB"], [126_000, "126 kB"], [999_700, "1.0 MB"], [20_000_000, "20 MB"], [3e9, "3.0 GB"], [5e12, "5000 GB"]])("%d bytes are %s", (bytes, words) => {
  expect(sizeOf(bytes)).toBe(words);
});

it("the facts about a file are one line", () => {
  expect(about({ id: "a", name: "a", type: "application/pdf", size: 1_200_000, pages: 12 })).toBe("PDF, 12 pages, 1.2 MB");
  expect(about({ id: "a", name: "a" })).toBe("");
});

it("an image is shown small, and whole on a click; its addresses are revoked", async () => {
  await show({ id: "f", name: "a.png", type: "image/png", size: 5 });
  await until(() => document.querySelector(".thumbnail img"));
  await press(button("Show a.png"));
  await until(() => document.querySelector("[role=dialog] img"));
  expect([...made.values()].map(({ type }) => type)).toEqual(["image/png", "image/png"]);
  await act(async () => root.unmount());
  expect(made.size).toBe(0);
  root = createRoot(room);
});

it("a text with markup is shown as text", async () => {
  await show({ id: "f", name: "a.txt", type: "text/plain" });
  await press(button("a.txt"));
  await until(() => document.querySelector(".file-text")?.textContent?.includes("<script>"));
  expect(document.querySelector("script")).toBeNull();
});

it.each(["text/html", "image/svg+xml", "application/zip"])("a file of type %s is saved, never opened", async (type) => {
  const opened = vi.spyOn(window, "open").mockReturnValue(null);
  const saved: string[] = [];
  const click = vi.spyOn(HTMLAnchorElement.prototype, "click").mockImplementation(function (this: HTMLAnchorElement) { saved.push(`${this.download} ${made.get(this.href)!.type}`); });
  await show({ id: "f", name: "page", type });
  await press(button("page"));
  await until(() => saved.length);
  expect(saved).toEqual(["page application/octet-stream"]);
  expect([opened.mock.calls, document.querySelector("[role=dialog]")]).toEqual([[], null]);
  opened.mockRestore();
  click.mockRestore();
});

it("a PDF is opened in a tab, which closes with the page", async () => {
  const tab = { location: { replace: vi.fn() }, close: vi.fn() };
  const opened = vi.spyOn(window, "open").mockReturnValue(tab as unknown as Window);
  await show({ id: "f", name: "a.pdf", type: "application/pdf" });
  await press(button("a.pdf"));
  await until(() => tab.location.replace.mock.calls.length);
  expect(made.get(tab.location.replace.mock.calls[0]![0] as string)!.type).toBe("application/pdf");
  expect(tab.close).not.toHaveBeenCalled();
  await act(async () => root.unmount());
  expect(tab.close).toHaveBeenCalled();
  opened.mockRestore();
  root = createRoot(room);
});

it.each([[{ id: "f", name: "a.png", type: "image/png", deleted: true }], [{ id: "gone", name: "a.png", type: "image/png" }]])("a file that was deleted keeps its name: %o", async (file) => {
  await show(file);
  await until(() => document.querySelector(".chip")?.textContent?.includes("a.png"));
  expect(document.querySelector("img")).toBeNull();
});

it("a message may consist of a file alone", async () => {
  const asked: Ask[] = [];
  await act(async () => root.render(
    <FileViewer onError={() => {}}>
      <Composer ref={null} sessionId={null} settings={USUAL} waiting={0} onAsk={async (ask) => { asked.push(ask); }} onStop={() => {}} onSettings={() => {}} onOptions={() => {}} onState={null} onError={() => {}} />
    </FileViewer>,
  ));
  expect(button("Send").disabled).toBe(true);
  await pick("input[type=file]", [new File(["x"], "notes.txt", { type: "text/plain" })]);
  await until(() => !button("Send").disabled);
  await press(button("Send"));
  expect(asked).toEqual([{ query: "", files: [{ id: "file-notes.txt", name: "notes.txt", type: "text/plain", size: 10, pages: null }] }]);
});

it("files of the journal get the session's facts", () => {
  const turn = newTurn("q", { files: [{ id: "f", name: "a.pdf", type: "application/pdf", size: 7, pages: 3, deleted: true }] });
  apply(turn, "claimed", "1-1", { attachments: [{ id: "f", name: "" }, { id: "g", name: "b.png", type: "image/png", size: 5 }] });
  expect(turn.files).toEqual([
    { id: "f", name: "a.pdf", type: "application/pdf", size: 7, pages: 3, deleted: true },
    { id: "g", name: "b.png", type: "image/png", size: 5, pages: null, deleted: false },
  ]);
});

it.each([
  ["left_out", ["Images of earlier messages no longer fit the model's context: a.png, a file. Attach them again to ask about them."]],
  ["unseen", ["This model sees no images. It was given only the names of earlier ones: a.png, a file."]],
  ["unreadable", ["The text of these files could not be read: a.png, a file."]],
  ["away", ["The memory is away, so that the model did not get these files: a.png, a file."]],
  ["image", []],
  ["text", []],
  ["search", []],
  ["a newer form", []],
])("files of earlier messages that were sent as %s", (sent, notes) => {
  const turn = newTurn("q");
  apply(turn, "attachments", "1-1", { files: [{ id: "f", name: "a.png", sent }, { id: "g", sent }] });
  expect(stepsOf(turn).map((part) => part.kind === "note" && part.text)).toEqual(notes);
});

it("images of earlier messages that no longer fit are named", () => {
  const turn = newTurn("q");
  apply(turn, "context.truncated", "1-1", { dropped_turns: 0, kept_turns: 3, prompt_tokens: 1, attachments: [{ id: "f", name: "a.png" }] });
  apply(turn, "context.truncated", "1-2", { dropped_turns: 1, kept_turns: 2, prompt_tokens: 1, attachments: [] });
  expect(stepsOf(turn).map((part) => part.kind === "note" && part.text)).toEqual([
    "Images of earlier messages no longer fit the model's context: a.png. Attach them again to ask about them.",
    "The oldest turns no longer fit the model's context: 1 turn left out, 2 kept.",
  ]);
});

it("the list of files is searched, added to, and a file deleted after a question", async () => {
  await act(async () => root.render(<FileViewer onError={() => {}}><Files onError={() => {}} /></FileViewer>));
  await until(() => document.body.textContent?.includes("There are no files yet."));
  files = [stored("manual.pdf", { type: "application/pdf", pages: 1 }), stored("scan.pdf", { type: "application/pdf", state: "failed", reason: "the scan has no text" })];
  await pick("input[type=file]", [new File(["x"], "new.txt")]);
  await until(() => document.querySelectorAll("#files-table tbody tr").length === 2);
  expect(document.body.textContent).toContain("PDF, 1 page");
  expect(document.body.textContent).toContain("the scan has no text");
  const field = document.querySelector<HTMLInputElement>("#file-search")!;
  await act(async () => {
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value")!.set!.call(field, "scan");
    field.dispatchEvent(new Event("input", { bubbles: true }));
  });
  await until(() => document.querySelectorAll("#files-table tbody tr").length === 1 && document.body.textContent?.includes("1 file"));
  await press(button("Delete scan.pdf"));
  expect(sent.filter(({ method }) => method === "DELETE")).toEqual([]);
  await press(button("Delete it"));
  await until(() => document.body.textContent?.includes("No file has this in its name."));
  expect(sent.filter(({ method }) => method === "DELETE")).toEqual([{ method: "DELETE", path: "files/file-scan.pdf" }]);
});

it("a refused file shows the reason until it is left out", async () => {
  refused = "an archive is not taken: add the files in it";
  await act(async () => root.render(<FileViewer onError={() => {}}><Files onError={() => {}} /></FileViewer>));
  await pick("input[type=file]", [new File(["x"], "all.zip")]);
  await until(() => document.body.textContent?.includes(refused));
  await press(button("Leave out all.zip"));
  expect(document.body.textContent).not.toContain(refused);
});

it("the conversation state shows every message as text", async () => {
  await act(async () => root.render(<ConversationState open sessionId="s" state="" onClose={() => {}} />));
  await until(() => document.querySelectorAll(".message").length === 4);
  const shown = [...document.querySelectorAll(".message")].map((one) => one.textContent!);
  expect(shown[0]).toContain("Today is Friday.");
  expect(shown[1]).toContain("<b>Hi</b>");
  expect(shown[2]).toContain("web_search");
  expect(document.querySelector(".message b")).toBeNull();
});

it("the conversation state has the browser's time zone and the reason why messages are missing", async () => {
  const format = vi.spyOn(Intl.DateTimeFormat.prototype, "resolvedOptions").mockReturnValue({ timeZone: "Australia/Sydney" } as Intl.ResolvedDateTimeFormatOptions);
  await act(async () => root.render(<ConversationState open sessionId="away" state="" onClose={() => {}} />));
  await until(() => document.body.textContent?.includes("no generator is there"));
  format.mockRestore();
  expect(sent.map(({ path }) => path)).toEqual(["sessions/away?limit=1&time_zone=Australia%2FSydney"]);
});
