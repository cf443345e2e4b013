// @vitest-environment jsdom
import { act } from "react";
import { createRoot, type Root } from "react-dom/client";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import type { Reward } from "../api/types";
import { Rating } from "./Judging";
import { newTurn } from "./turn";

vi.setConfig({ testTimeout: 60_000 });

let root: Root;
let room: HTMLElement;
let sent: [string, string, unknown][];
let refused: boolean;

beforeEach(() => {
  (globalThis as { IS_REACT_ACT_ENVIRONMENT?: boolean }).IS_REACT_ACT_ENVIRONMENT = true;
  sent = [];
  refused = false;
  vi.stubGlobal("fetch", (path: string, { method = "GET", body }: RequestInit = {}) => {
    sent.push([method, path, typeof body === "string" ? JSON.parse(body) : undefined]);
    if (refused) return Promise.resolve(Response.json({ error: { code: "not_found", message: "There is no such query." } }, { status: 404 }));
    return Promise.resolve(Response.json({}, { status: 202 }));
  });
  room = document.body.appendChild(document.createElement("div"));
  root = createRoot(room);
});

afterEach(async () => {
  await act(async () => root.unmount());
  room.remove();
  vi.unstubAllGlobals();
});

const turn = newTurn("q", { queryId: "1-0" });

async function shown(): Promise<void> {
  const onVoted = (reward: Reward | null) => { turn.reward = reward; };
  await act(async () => root.render(<Rating turn={{ ...turn }} onVoted={onVoted} />));
}

async function press(label: string): Promise<void> {
  await act(async () => room.querySelector<HTMLElement>(`[aria-label="${label}"]`)!.click());
  await shown();
}

const pressed = () => [...room.querySelectorAll("[aria-pressed=true]")].map((one) => one.getAttribute("aria-label"));

it("a thumb and stars are given, withdrawn by pressing them again, and leave each other", async () => {
  await shown();
  await press("Good answer");
  await press("2 of 5 stars");
  expect(pressed()).toEqual(["Good answer", "2 of 5 stars"]);
  await press("2 of 5 stars");
  expect(pressed()).toEqual(["Good answer"]);
  await press("Bad answer");
  await press("Bad answer");
  expect(pressed()).toEqual([]);
  expect(turn.reward).toBeNull();
  const vote = (said: object) => ["POST", "feedback", { query_id: "1-0", ...said }];
  expect(sent).toEqual([
    vote({ sentiment: "positive" }),
    vote({ stars: 2 }),
    ["DELETE", "feedback/1-0?what=stars", undefined],
    vote({ sentiment: "negative" }),
    ["DELETE", "feedback/1-0?what=thumb", undefined],
  ]);
});

it("a vote on an answer that is too old is shown, and no other one is offered", async () => {
  turn.rateable = false;
  turn.reward = { reward: 0.5, sentiment: "positive", thumb: "positive", stars: 4, comment: "Well put." };
  await shown();
  expect(room.querySelectorAll("button").length).toBe(0);
  expect(room.querySelector("[role=img]")!.getAttribute("aria-label")).toBe("Your vote: good answer, 4 of 5 stars. The answer is too old for it to be changed.");
  expect(room.querySelectorAll(".star.on").length).toBe(4);
  expect(room.textContent).toBe("Well put.");
  turn.reward = null;
  await shown();
  expect(room.innerHTML).toBe("");
  turn.rateable = true;
});

it("the words of a vote stay with it when it is changed", async () => {
  turn.reward = { reward: 0.5, sentiment: "positive", thumb: null, stars: 4, comment: "Well put." };
  await shown();
  await press("5 of 5 stars");
  expect(sent).toEqual([["POST", "feedback", { query_id: "1-0", stars: 5, comment: "Well put." }]]);
  expect(room.querySelector("q")!.textContent).toBe("Well put.");
  await press("5 of 5 stars");
  expect(room.querySelector("q")).toBeNull();
});

it("a vote that the server refuses is not shown, and says why", async () => {
  await shown();
  refused = true;
  await press("Good answer");
  expect(pressed()).toEqual([]);
  expect(room.querySelector("[role=status]")!.textContent).toBe("There is no such query.");
});
